"""Numbers with units, as text."""

from __future__ import annotations

WIDTH = 120


def ms(seconds: float) -> str:
    """Milliseconds with at least four significant digits: `5,239.8 ms`, `0.02131 ms`."""
    value = seconds * 1e3
    return f"{value:,.1f} ms" if value >= 1000 or value == 0 else f"{value:.4g} ms"


def gib(size_bytes: float) -> str:
    """Bytes in GiB: `12.34 GiB`, `0.012 GiB`."""
    value = size_bytes / 2**30
    return f"{value:.2f} GiB" if value >= 0.1 or value == 0 else f"{value:.2g} GiB"


def percent(share: float) -> str:
    """A fraction as a percentage: `12.3 %`."""
    return f"{100 * share:.1f} %"


def gap_words(gap: float) -> str:
    """A relative gap as a percentage with two significant digits: `0.094 %`, `12 %`."""
    return f"{round(100 * gap)} %" if gap >= 0.1 else f"{100 * max(gap, 0.0):.2g} %"
