"""Which layers of a plan recompute how, as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise

from autopar.ir.plan import Plan


def recompute_words(plan: Plan) -> str:
    """How the plan's layers recompute: one mode, or `mixed: layers 0-9 full; 10-47 selective`. In a
    pipeline, layers of each stage in their order: `mixed: stage 0: 3 full, 5 none; 1-3: 8 none`.
    """
    if plan.recompute != "mixed":
        return plan.recompute
    mode_of = {name: block.recompute for block in plan.blocks for name in block.segments}
    words = _by_stage(plan.stages, mode_of) if plan.mesh.pp > 1 else _by_mode(mode_of)
    return f"mixed: {'; '.join(words)}"


def _by_mode(mode_of: Mapping[str, str]) -> Iterator[str]:
    by_mode: dict[str, dict[str, list[int]]] = {}
    for name in sorted(mode_of, key=_place):
        prefix, number = _place(name)
        if number >= 0 or mode_of[name] != "none":
            by_mode.setdefault(mode_of[name], {}).setdefault(prefix, []).append(number)
    for mode, layers in by_mode.items():
        runs = (f"{prefix} {_runs(numbers)}".strip() for prefix, numbers in layers.items())
        yield f"{', '.join(runs)} {mode}"


def _by_stage(stages: Sequence[Sequence[str]], mode_of: Mapping[str, str]) -> Iterator[str]:
    """The words of each stage, and of those with the same words together."""
    alike: dict[str, list[int]] = {}
    for number, stage in enumerate(stages):
        alike.setdefault(", ".join(_in_order(stage, mode_of)), []).append(number)
    for place, (words, numbers) in enumerate(alike.items()):
        yield f"{'' if place else 'stage '}{_runs(numbers)}: {words}"


def _in_order(stage: Sequence[str], mode_of: Mapping[str, str]) -> Iterator[str]:
    """The number of layers of each mode along a stage; other segments that recompute by name."""
    layers = [name for name in stage if _place(name)[1] >= 0]
    for mode, alike in groupby(layers, key=lambda name: mode_of[name]):
        yield f"{len(list(alike))} {mode}"
    for name in stage:
        if name not in layers and mode_of[name] != "none":
            yield f"{name} {mode_of[name]}"


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
