"""Time of one step of a pipeline, in closed form: GPipe, 1F1B, interleaved 1F1B, zero bubble."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar_cost_models.checks import positive
from autopar_cost_models.pipeline_lattice import lattice_path_s
from autopar_cost_models.pipeline_order import Order, check_schedule, order_of
from autopar_cost_models.pipeline_paths import pivot_path_s
from autopar_cost_models.stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """What a schedule costs.  In flight: micro-batches whose forward has run and whose backward (weight part included) has not."""

    time_s: float
    bubble_share: float
    """Share of `time_s` in which even the rank with the most work does not compute."""
    in_flight: tuple[int, ...]
    """Peak on each rank, over its virtual stages together."""
    in_flight_by_stage: tuple[int, ...]
    """Peak of each virtual stage by itself; the stages of a rank need not peak at the same moment."""


def pipeline_time(
    schedule: str, stages: Sequence[StageTimes], ranks: int, micro_batches: int, hop_s: float = 0.0, overlap: bool = True
) -> PipelineTime:
    v = _check(schedule, stages, ranks, micro_batches, hop_s)
    rows = _rows(schedule, stages, ranks, hop_s, overlap)
    latency_s = hop_s if overlap and ranks > 1 else 0.0
    if schedule == "gpipe":
        time_s = 2 * (ranks - 1) * latency_s
        for row in rows[:2]:
            time_s += sum(r[0] for r in row) + (micro_batches - 1) * max(r[0] for r in row)
        peaks = (micro_batches,) * ranks
        by_stage = peaks
    else:
        order = order_of(schedule, ranks, v, micro_batches)
        time_s = pivot_path_s(order, *rows, latency_s)
        if ranks > 1 and schedule != "1f1b":
            time_s = max(time_s, lattice_path_s(order, *rows, latency_s))
        peaks = tuple(min(order.forwards, order.warm_up[r] + order.lag[r] + 1) for r in range(ranks))
        by_stage = tuple(_peak(order, stage) for stage in range(len(stages)))
    work_s = micro_batches * max(sum(s.total_s for s in stages[rank::ranks]) for rank in range(ranks))
    return PipelineTime(time_s, 1.0 - work_s / time_s if time_s else 0.0, peaks, by_stage)


def _peak(order: Order, stage: int) -> int:
    """Micro-batches of one stage that are alive when its last lap of forwards ends: never are there more."""
    chunk, rank = divmod(stage, order.ranks)
    forwards = order.forwards - (order.chunks - 1 - chunk) * order.lap  # that the rank has run by then
    backwards = max(0, forwards - 1 - order.warm_up[rank] - order.lag[rank])
    rounds, rest = divmod(backwards, order.chunks * order.lap)
    mine = rounds * order.lap + min(order.lap, max(0, rest - (order.chunks - 1 - chunk) * order.lap))
    return order.micro_batches - mine


def _check(schedule, stages, ranks, micro_batches, hop_s) -> int:
    positive("hop_s", hop_s, zero_allowed=True)
    v, rest = divmod(len(stages), ranks)
    if rest or not v:
        raise ValueError("x")
    check_schedule(schedule, ranks, v, micro_batches)
    return v


def _rows(schedule, stages, ranks, hop_s, overlap):
    forward = [s.forward_s for s in stages]
    backward = [s.input_s if schedule == "zero_bubble" else s.backward_s for s in stages]
    if not overlap and ranks > 1:
        forward[:-1] = [t + hop_s for t in forward[:-1]]
        backward[1:] = [t + hop_s for t in backward[1:]]
    weight = [[s.weight_s for s in reversed(stages[r::ranks])] for r in range(ranks)] if schedule == "zero_bubble" else None
    return [forward[r::ranks] for r in range(ranks)], [backward[r::ranks][::-1] for r in range(ranks)], weight
