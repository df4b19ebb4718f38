"""Seconds of one pipelined step in closed form: GPipe, 1F1B, interleaved 1F1B and zero bubble, with
stages of different times.

p is the number of ranks, m of micro-batches, v of virtual stages per rank. GPipe (Huang et al.,
"GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", NeurIPS 2019,
section 2.3) is two flow shops of equal jobs: all forwards, then all backwards. Each takes one pass
through all stages plus (m - 1) times the slowest:

    time = sum(forward) + (m - 1) max(forward) + sum(backward) + (m - 1) max(backward) + 2 (p - 1) hops          (exact)

The other schedules are priced by their critical path: the longest path of the families in
`pipeline_paths` and `pipeline_lattice`. They are:

- 1F1B: PipeDream-flush (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
  Clusters Using Megatron-LM", SC 2021, section 2.2.1).
- Interleaved 1F1B: section 2.2.2 of the same paper.
- Zero bubble: ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2), or its
  interleaved form with several stages a rank.

For equal stages and messages that take no time, with the times of one virtual stage, the critical
path is

    1F1B          (m + p - 1) (forward + backward)
    interleaved   (m v + p - 1) (forward + backward)
    zero bubble   m v (forward + backward) + (p - 1) max(forward, input, forward + input - weight)        input = backward - weight

A path is a lower bound on the time, so errors are on the low side. The simulation of the same
schedules (`simulate`) shares no code with this. `tests/cost_models/test_pipeline.py` compares the
two. They differ by less than 2 % for stages of 1 to 3 layers, heavier first and last stages, and up
to 16 ranks. Messages take up to half a mean forward.

Two cases are known to differ more. One is more than 16 unequal ranks with several stages each and
random times: 5 % low on 64 ranks, 1.5 % if stages have 1 or 2 layers. The other is zero bubble with
messages of twice a forward (2 %).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile

from autopar_cost_models.checks import positive, whole
from autopar_cost_models.pipeline_lattice import lattice_path_s
from autopar_cost_models.pipeline_order import (
    SCHEDULES,
    Order,
    check_schedule,
    order_of,
    splits_backward,
)
from autopar_cost_models.pipeline_paths import Rows, pivot_path_s
from autopar_cost_models.stage_times import StageTimes


@dataclass(frozen=True, slots=True)
class PipelineTime:
    """The predicted step of a schedule. A micro-batch is *in flight* after its forward and before
    the end of its backward, including the weight part.
    """

    time_s: float
    bubble_share: float
    """Fraction of `time_s` in which the rank with the most work is idle."""
    in_flight: tuple[int, ...]
    """Peak number of micro-batches in flight on each rank, over all its virtual stages."""
    in_flight_by_stage: tuple[int, ...]
    """Peak number in flight of each virtual stage. The stages of a rank may peak at different
    moments.
    """


def pipeline_time(
    schedule: str,
    stages: Sequence[StageTimes],
    ranks: int,
    micro_batches: int,
    hop_s: float = 0.0,
    overlap: bool = True,
    least: bool = False,
) -> PipelineTime:
    """The predicted step of `schedule` (an entry of `SCHEDULES`) on `ranks` ranks.

    Args:
        schedule: its name.
        stages: times of the virtual stages, first to last; stage s is on rank s % `ranks`.
        ranks: number of pipeline ranks.
        micro_batches: number of micro-batches of a step.
        hop_s: seconds to send a stage's result to another rank.
        overlap: whether the sender computes while it sends.
        least: return a lower bound instead, from fewer paths: no prediction for equal or slower
            stages is below it. Zero bubble is an exception, since its step may become shorter when
            stages become slower.

    Raises:
        ValueError: torch cannot run the combination (`check_schedule`), or `ranks` does not divide
            the number of stages.
    """
    whole("ranks", ranks)
    positive("hop_s", hop_s, zero_allowed=True)
    chunks, rest = divmod(len(stages), ranks)
    if rest or not chunks:
        below, above = chunks * ranks, (chunks + 1) * ranks
        fit = f"{below} or {above}" if chunks else f"{above}"
        raise ValueError(
            f"{len(stages)} virtual stages cannot be dealt evenly to {ranks} ranks; {fit} can"
        )
    check_schedule(schedule, ranks, chunks, micro_batches)
    hop_s = hop_s if ranks > 1 else 0.0
    rows = _rows(schedule, stages, ranks, 0.0 if overlap else hop_s)
    latency_s = hop_s if overlap else 0.0
    if not SCHEDULES[schedule].alternates:
        time_s = _gpipe_s(*rows[:2], micro_batches, latency_s)
        in_flight = in_flight_by_stage = (micro_batches,) * ranks
    else:
        order = order_of(schedule, ranks, chunks, micro_batches)
        in_flight, in_flight_by_stage = _in_flight(order)
        time_s = pivot_path_s(order, *rows, latency_s, least)
        if ranks > 1 and (schedule != "1f1b" or latency_s):
            time_s = max(time_s, lattice_path_s(order, *rows, latency_s, least))
    work_s = [0.0] * ranks
    for stage, times in enumerate(stages):
        work_s[stage % ranks] += times.forward_s + times.backward_s
    bubble_share = max(0.0, 1.0 - micro_batches * max(work_s) / time_s) if time_s else 0.0
    return PipelineTime(time_s, bubble_share, in_flight, in_flight_by_stage)


def peak_held(
    schedule: str, sizes: Sequence[int], ranks: int, micro_batches: int
) -> tuple[int, ...]:
    """The peak bytes on each rank that micro-batches in flight keep. `sizes` has the bytes per
    micro-batch of each virtual stage.
    """
    moments = held_moments(schedule, ranks, len(sizes) // ranks, micro_batches)
    return tuple(
        max(
            sum(held * size for held, size in zip(moment, sizes[rank::ranks], strict=True))
            for moment in of
        )
        for rank, of in enumerate(moments)
    )


@lru_cache(maxsize=4096)
def late_moments(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[tuple[tuple[int, ...], int], ...], ...]:
    """For each rank, the states at its backwards; dominated ones are left out.

    A state is (for each virtual stage of the rank, how many of its weight gradients are pending,
    including the current one; the index of the stage whose backward runs).

    Under zero bubble a weight gradient runs `lag` backwards later. Under other schedules nothing is
    pending.
    """
    if not splits_backward(schedule):
        return (tuple(((0,) * stages_per_rank, chunk) for chunk in range(stages_per_rank)),) * ranks
    order, found = order_of(schedule, ranks, stages_per_rank, micro_batches), []
    for lag in order.lag:
        moments = set()
        for latest in range(min(order.forwards, lag + order.lap * order.chunks + 1)):
            chunk_of = [
                order.chunks - 1 - number // order.lap % order.chunks
                for number in range(max(latest - lag, 0), latest + 1)
            ]
            moments.add((tuple(map(chunk_of.count, range(order.chunks))), chunk_of[-1]))
        found.append(
            tuple(
                sorted(
                    (moment, turn)
                    for turn in range(order.chunks)
                    for moment in _undominated({m for m, own in moments if own == turn})
                )
            )
        )
    return tuple(found)


@lru_cache(maxsize=4096)
def held_moments(
    schedule: str, ranks: int, stages_per_rank: int, micro_batches: int
) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """For each rank, the states in which it may hold most: how many micro-batches each of its
    virtual stages holds.

    The virtual stages of a rank do not all peak at one moment. This follows the rank's forwards and
    backwards through one round of alternation, after which the state repeats. Dominated states are
    left out.
    """
    check_schedule(schedule, ranks, stages_per_rank, micro_batches)
    if not SCHEDULES[schedule].alternates:
        return (((micro_batches,),),) * ranks
    # later rounds are like those before
    if micro_batches > 4 * ranks and (stages_per_rank == 1 or micro_batches % ranks == 0):
        return held_moments(schedule, ranks, stages_per_rank, 4 * ranks)
    order, found = order_of(schedule, ranks, stages_per_rank, micro_batches), []
    for rank in range(ranks):
        # forwards before the first backward
        ahead = min(order.forwards, order.warm_up[rank] + order.lag[rank] + 1)
        held = [0] * stages_per_rank
        for number in range(ahead):
            held[number // order.lap % order.chunks] += 1
        moments = {tuple(held)}
        for number in range(min(order.forwards - ahead, order.lap * order.chunks)):
            held[(ahead + number) // order.lap % order.chunks] += 1
            held[order.chunks - 1 - number // order.lap % order.chunks] -= 1
            moments.add(tuple(held))
        found.append(tuple(sorted(_undominated(moments))))
    return tuple(found)


def _weighs_more(total: int, other: tuple[int, tuple[int, ...]]) -> bool:
    return other[0] > total


def _undominated(moments: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """The states that no other state dominates. Only states with a greater sum can dominate a
    state, so only those are compared.
    """
    by_sum = sorted(((sum(moment), moment) for moment in moments), reverse=True)
    for total, moment in by_sum:
        heavier = takewhile(partial(_weighs_more, total), by_sum)
        if not any(all(a <= b for a, b in zip(moment, other, strict=True)) for _, other in heavier):
            yield moment


def _rows(
    schedule: str, stages: Sequence[StageTimes], ranks: int, send_s: float
) -> tuple[Rows, Rows, Rows | None]:
    """Three tables [rank][lap] of seconds: of forwards (first chunk first), of backwards, and of
    weight gradients (both last chunk first). Forwards and backwards include `send_s` if they send.
    The third is None if the schedule does not split backward.
    """
    split = splits_backward(schedule)
    forward = [times.forward_s + send_s for times in stages]
    backward = [times.backward_s - (times.weight_s if split else 0.0) + send_s for times in stages]
    forward[-1] -= send_s  # the loss and the gradient of the input go nowhere
    backward[0] -= send_s
    weight = [times.weight_s for times in stages] if split else None
    return (
        [forward[rank::ranks] for rank in range(ranks)],
        [backward[rank::ranks][::-1] for rank in range(ranks)],
        [weight[rank::ranks][::-1] for rank in range(ranks)] if weight else None,
    )


def _gpipe_s(forward: Rows, backward: Rows, micro_batches: int, hop_s: float) -> float:
    time_s = 2 * (len(forward) - 1) * hop_s
    for row in (forward, backward):
        durations_s = [duration_s for (duration_s,) in row]
        time_s += sum(durations_s) + (micro_batches - 1) * max(durations_s)
    return time_s


@lru_cache(maxsize=4096)
def _in_flight(order: Order) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Peak micro-batches in flight, by rank and by virtual stage.

    A rank holds most after its warm-up, before the first backward or weight gradient. A stage holds
    most at the end of a lap of its forwards. In the last such round backwards are under way, and
    the stage holds at least as much as before.
    """
    by_rank = tuple(
        min(order.forwards, order.warm_up[rank] + order.lag[rank] + 1)
        for rank in range(order.ranks)
    )
    by_stage = []
    for stage in range(order.ranks * order.chunks):
        chunk, rank = divmod(stage, order.ranks)
        later = (
            order.chunks - 1 - chunk
        ) * order.lap  # operations of a round that come after its forwards, or before its backwards
        released = max(0, order.forwards - later - 1 - order.warm_up[rank] - order.lag[rank])
        rounds, rest = divmod(released, order.chunks * order.lap)
        by_stage.append(
            order.micro_batches - rounds * order.lap - max(0, min(order.lap, rest - later))
        )
    return by_rank, tuple(by_stage)
