"""Which layers of a plan recompute how, as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autopar.ir.plan import Plan


def recompute_words(plan: Plan) -> str:
    """How the plan's layers recompute: one mode, or `mixed: layers 0-9 full; 10-47 selective`."""
    if plan.recompute != "mixed":
        return plan.recompute
    mode_of = {name: block.recompute for block in plan.blocks for name in block.segments}
    by_mode: dict[str, dict[str, list[int]]] = {}
    for name in sorted(mode_of, key=_place):
        prefix, number = _place(name)
        if number >= 0 or mode_of[name] != "none":
            by_mode.setdefault(mode_of[name], {}).setdefault(prefix, []).append(number)
    parts = []
    for mode, layers in by_mode.items():
        parts.append(f"{', '.join(f'{prefix} {_runs(numbers)}'.strip() for prefix, numbers in layers.items())} {mode}")  # fmt: skip
    return f"mixed: {'; '.join(parts)}"


def _place(name: str) -> tuple[str, int]:
    """The prefix and the number of a segment: ('layers', 3) of 'layers.3'. -1 without a number."""
    prefix, _, number = name.rpartition(".")
    return (prefix, int(number)) if prefix and number.isdigit() else (name, -1)


def _runs(numbers: Sequence[int]) -> str:
    """Ascending numbers as runs: `0-3, 8`. '' of a name without a number."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    if numbers[0] < 0:
        return ""
    return ", ".join(f"{a}-{b}" if b > a else f"{a}" for a, b in zip(starts, ends, strict=True))
