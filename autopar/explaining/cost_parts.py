"""The parts of two plans' times and memory, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.plan import Plan

_OF_STAGES = ("forward", "backward", "recompute", "conversion", "edge")
"""Parts of a step without pipeline that a pipeline's breakdown has as `stages`."""


def time_parts(one: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part, seconds of one, seconds of the other): the parts of either, each column adding up to its step.

    Where only one of them is a pipeline, what its breakdown has as one part is one part of both.
    """
    first, second = one.predicted.breakdown, other.predicted.breakdown
    if ("stages" in first) != ("stages" in second):
        first, second = _with_stages(first), _with_stages(second)
    return [(part, first.get(part, 0.0), second.get(part, 0.0)) for part in {**first, **second}]


def _with_stages(parts: Mapping[str, float]) -> dict[str, float]:
    inside = sum(parts.get(part, 0.0) for part in ("stages", *_OF_STAGES))
    return {"stages": inside} | {
        part: seconds for part, seconds in parts.items() if part not in ("stages", *_OF_STAGES)
    }


def memory_parts(one: Plan, other: Plan) -> list[tuple[str, int, int]]:
    """(part, bytes of one, bytes of the other) on the fullest device of each."""
    first, second = one.predicted.memory, other.predicted.memory
    return [(part, first.get(part, 0), second.get(part, 0)) for part in {**first, **second}]
