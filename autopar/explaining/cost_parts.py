"""The parts of the times and memory of two plans, side by side."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.ir.plan import Plan

_OF_STAGES = ("forward", "backward", "recompute", "conversion", "edge")
"""Parts of a step without a pipeline that the breakdown of a pipeline combines as `stages`."""


def time_parts(one: Plan, other: Plan) -> list[tuple[str, float, float]]:
    """(part, seconds of `one`, seconds of `other`) for the parts of either. Each column adds up to
    the step time.

    If only one plan is a pipeline, the parts that its breakdown combines are combined for both.
    """
    return breakdown_parts(one.predicted.breakdown, other.predicted.breakdown)


def breakdown_parts(
    first: Mapping[str, float], second: Mapping[str, float]
) -> list[tuple[str, float, float]]:
    """The same for two breakdowns, which map parts to seconds."""
    if ("stages" in first) != ("stages" in second):
        first, second = _with_stages(first), _with_stages(second)
    return [(part, first.get(part, 0.0), second.get(part, 0.0)) for part in {**first, **second}]


def _with_stages(parts: Mapping[str, float]) -> dict[str, float]:
    inside = sum(parts.get(part, 0.0) for part in ("stages", *_OF_STAGES))
    return {"stages": inside} | {
        part: seconds for part, seconds in parts.items() if part not in ("stages", *_OF_STAGES)
    }


def memory_parts(one: Plan, other: Plan) -> list[tuple[str, int, int]]:
    """(part, bytes of `one`, bytes of `other`) for the parts of either, each on the plan's fullest
    device. A part that a plan lacks is 0.
    """
    first, second = one.predicted.memory, other.predicted.memory
    return [(part, first.get(part, 0), second.get(part, 0)) for part in {**first, **second}]
