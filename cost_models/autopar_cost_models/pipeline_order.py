"""Pipeline schedules: their names, the combinations that they can run, and the order of work of
their ranks.

A rank has v virtual stages, its *chunks*, and runs v*m forwards and as many backwards for m
micro-batches. Forwards come in *laps*: `lap` micro-batches through chunk 0, the same ones through
chunk 1, and so on, then the next micro-batches. Backwards come likewise, from the last chunk to
chunk 0.

After `warm_up` forwards a rank alternates: forward j, then backward j - warm_up. Under zero bubble
the weight gradient of the backward that is `lag` earlier follows. The rest follows in the same
order. This describes 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
Clusters Using Megatron-LM", SC 2021, section 2.2.1) and its interleaved form (section 2.2.2). It
also describes ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2.2), in the
variants that torch.distributed.pipelining runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from autopar_cost_models.checks import nearest, whole
from autopar_cost_models.echo import shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleKind:
    """The properties of a pipeline schedule.

    - `alternates`: after its warm-up a rank alternates forwards and backwards.
    - `splits_backward`: gradients of weights are computed apart from those of inputs, and later.
    - `min_stages_per_rank`, `max_stages_per_rank`: limits on virtual stages of a rank; None is
      unlimited.
    - `fills_ranks`: it needs at least one micro-batch for each rank.
    - `in_rounds`: micro-batches run in max(1, m // p) equal rounds over p ranks.
    - `forwards_per_hop`: how many more warm-up forwards a rank has than the next rank.
    """

    alternates: bool = True
    splits_backward: bool = False
    min_stages_per_rank: int = 1
    max_stages_per_rank: int | None = None
    fills_ranks: bool = False
    in_rounds: bool = False
    forwards_per_hop: int = 1


SCHEDULES = {
    "gpipe": ScheduleKind(alternates=False, max_stages_per_rank=1),
    "1f1b": ScheduleKind(max_stages_per_rank=1, fills_ranks=True),
    "interleaved_1f1b": ScheduleKind(min_stages_per_rank=2, in_rounds=True, forwards_per_hop=2),
    "zero_bubble": ScheduleKind(splits_backward=True, in_rounds=True),
}


def splits_backward(schedule: str) -> bool:
    """Whether a schedule computes weight gradients separately. False for 'none', which means no
    pipeline.
    """
    return schedule in SCHEDULES and SCHEDULES[schedule].splits_backward


def check_schedule(schedule: str, ranks: int, stages_per_rank: int, micro_batches: int) -> None:
    """Raise ValueError, with a combination that works, unless torch can run this one.

    GPipe and 1F1B need one stage a rank, interleaved 1F1B at least two; zero bubble takes any
    number. 1F1B needs a micro-batch for each rank. Interleaved and zero bubble cut the
    micro-batches into max(1, m // p) equal rounds, so m = 10 over p = 4 runs as 2 rounds of 5.
    """
    if schedule not in SCHEDULES:
        raise ValueError(
            f"unknown schedule {shown(schedule)}; {nearest(schedule, list(SCHEDULES))}"
        )
    whole("ranks", ranks)
    whole("stages_per_rank", stages_per_rank)
    whole("micro_batches", micro_batches)
    kind = SCHEDULES[schedule]
    if kind.max_stages_per_rank is not None and stages_per_rank > kind.max_stages_per_rank:
        raise ValueError(
            f"{schedule} runs one stage per rank, not stages_per_rank={stages_per_rank}; interleaved_1f1b and zero_bubble run several"
        )
    if stages_per_rank < kind.min_stages_per_rank:
        raise ValueError(
            "interleaved_1f1b interleaves at least 2 stages per rank, not stages_per_rank=1; with one stage use 1f1b"
        )
    if kind.fills_ranks and micro_batches < ranks:
        raise ValueError(
            f"1f1b needs a micro-batch for each rank: micro_batches={micro_batches} < ranks={ranks}; "
            f"use {ranks} micro-batches or more, {micro_batches} ranks or fewer, or gpipe"
        )
    rounds = max(1, micro_batches // ranks)
    if kind.in_rounds and micro_batches % rounds:
        below = next(m for m in range(micro_batches - 1, 0, -1) if m % max(1, m // ranks) == 0)
        above = next(
            m
            for m in range(micro_batches + 1, 2 * micro_batches + ranks)
            if m % max(1, m // ranks) == 0
        )
        raise ValueError(
            f"{schedule} cuts micro_batches={micro_batches} over {ranks} ranks into {rounds} equal rounds, which leaves "
            f"{micro_batches % rounds} over; {below} and {above} micro-batches work"
        )


@dataclass(frozen=True, slots=True)
class Order:
    """The order of work of all ranks under 1F1B, interleaved 1F1B or zero bubble.

    Attributes:
        chunks: virtual stages of a rank.
        lap: micro-batches that run through one chunk before the next chunk's turn.
        warm_up: by rank, forwards before forwards and backwards alternate.
        lag: by rank, how many backwards later the weight gradient of a backward runs.
    """

    ranks: int
    chunks: int
    micro_batches: int
    lap: int
    warm_up: tuple[int, ...]
    lag: tuple[int, ...]
    per_hop: int
    """How many more warm-up forwards a rank has than the rank after it."""
    weights: bool
    """Whether weight gradients are computed separately."""

    @property
    def forwards(self) -> int:
        """Number of forwards that a rank runs in a step."""
        return self.chunks * self.micro_batches


@lru_cache(maxsize=4096)
def order_of(schedule: str, ranks: int, chunks: int, micro_batches: int) -> Order:
    """The order of work of a schedule other than GPipe. The combination must have passed
    `check_schedule`.
    """
    kind = SCHEDULES[schedule]
    rounds = max(1, micro_batches // ranks) if kind.in_rounds else 1
    lap, per_hop = micro_batches // rounds, kind.forwards_per_hop
    warm_up = ((chunks - 1) * lap + per_hop * (ranks - 1 - rank) for rank in range(ranks))
    return Order(
        ranks=ranks,
        chunks=chunks,
        micro_batches=micro_batches,
        lap=lap,
        warm_up=tuple(min(depth, chunks * micro_batches) for depth in warm_up),
        lag=tuple(range(ranks)) if kind.splits_backward else (0,) * ranks,
        per_hop=per_hop,
        weights=kind.splits_backward,
    )
