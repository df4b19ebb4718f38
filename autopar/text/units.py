"""Numbers with units, as text."""

from __future__ import annotations

from math import log10

WIDTH = 120

PROVED = 1e-3
"""The gap up to which reports call a plan the optimum. The search ends there too, and where exactly
differs from run to run.
"""
NOT_PROVED, NOTHING_KNOWN = 0.05, 0.9
"""The gaps from which an answer says first that its plan is not proved, and that nothing useful is
known about others.
"""


def ms(seconds: float) -> str:
    """Seconds as text with four significant digits: `5.240 s` from one second on, and below in
    milliseconds: `0.02131 ms`.
    """
    value = seconds * 1e3
    if value == 0:
        return "0.0 ms"
    if value >= 999.95:
        return f"{seconds:,.{max(0, 3 - int(log10(seconds)))}f} s"
    return f"{value:.4g} ms"


def gib(size_bytes: float) -> str:
    """Bytes as text in GiB: `12.34 GiB`, and with two significant digits below 0.1: `0.012 GiB`."""
    value = size_bytes / 2**30
    return f"{value:.2f} GiB" if value >= 0.1 or value == 0 else f"{value:.2g} GiB"


def percent(share: float) -> str:
    """A fraction as text in percent: `12.3 %`."""
    return f"{100 * share:.1f} %"


def gap_words(gap: float) -> str:
    """A relative gap as text in percent: whole from 10 % on (`12 %`), with two significant digits
    below (`0.094 %`). One below 1e-6, of rounding alone, is `0 %`.
    """
    if gap >= 0.1:
        return f"{round(100 * gap)} %"
    return f"{100 * gap if gap >= 1e-6 else 0:.2g} %"


def count(number: float) -> str:
    """A number of things as text with four digits: `8.03 B`, `124.4 M`, `1.03 T`."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.4g} {letter}"
    return f"{number:.4g}"
