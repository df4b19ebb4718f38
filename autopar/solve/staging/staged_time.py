"""Seconds of a step for given stages."""

from __future__ import annotations

from collections.abc import Sequence

from autopar_cost_models import StageTimes, pipeline_time

from autopar.solve.costs.pipeline_cost import longest_hop_s
from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.unit_row import UnitRow


def staged_step_s(
    rows: Sequence[UnitRow],
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    more_s: Sequence[float],
    more_once_s: Sequence[float] = (),
) -> float:
    """Step seconds of the stages `runs`, as `pipeline_cost.pipelined` prices them, without the
    constant part. It is a lower bound if the rows are.

    `runs` has the (first, end) units of each stage. `more_s`: by stage, seconds that recomputation
    adds to backward. `more_once_s`: by rank, extra seconds once a step.
    """
    ranks, micro = schedule.ranks, rows[0].micro_batches
    times: list[StageTimes] = []
    for number, ((first, end), more) in enumerate(zip(runs, more_s, strict=True)):
        at = rows[number % ranks].at
        forward_s, backward_s, weight_s = (
            x[end] - x[first] for x in (at.forward_s, at.backward_s, at.weight_s)
        )
        times.append(
            StageTimes(
                forward_s,
                backward_s + more,
                min(weight_s, backward_s) if times else backward_s + more,
            )
        )
    more_once_s = more_once_s or [0.0] * ranks
    step_s = max(rows[rank].once_s(runs[rank::ranks]) + more_once_s[rank] for rank in range(ranks))
    if ranks == 1:
        return micro * times[0].total_s + step_s
    hop_s = longest_hop_s(
        [row.model for row in kinds_of(rows)], [rows[0].arriving[first] for first, _ in runs[1:]]
    )
    return (
        pipeline_time(schedule.name, times, ranks, micro, hop_s, least=rows[0].is_bound).time_s
        + step_s
    )


def is_monotone(row: UnitRow, schedule: Schedule) -> bool:
    """Whether the step time of stages of a row is a lower bound for all placements that the row
    stands for. It is not if the row is a bound and the schedule is zero bubble. A step may then
    become longer if more of the same backward is gradients of parameters, so only paths are bounds.
    """
    return not schedule.splits_backward or not row.is_bound


def kinds_of(rows: Sequence[UnitRow]) -> list[UnitRow]:
    """The distinct rows (by identity), in order of first occurrence."""
    return list({id(row): row for row in rows}.values())
