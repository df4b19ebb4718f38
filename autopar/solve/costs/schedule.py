"""A pipeline's schedule and staging."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import SCHEDULES

from autopar.solve.costs.pipeline_cost import Stages


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline's schedule by name ('gpipe' if there is one rank), its number of ranks, and the
    number of stages of each rank. `sizes` has the blocks of each stage if these are fixed; (): the
    search finds them.

    Raises ValueError if `sizes` are not those of all stages, at least one block each.
    """

    name: str
    ranks: int
    stages_per_rank: int
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        stages = self.ranks * self.stages_per_rank
        if self.sizes and (len(self.sizes) != stages or min(self.sizes) < 1):
            raise ValueError(f"{stages} stages with one block or more each, not {self.sizes}")

    @property
    def alternates(self) -> bool:
        """Whether each rank alternates forwards and backwards after a warm-up. GPipe does not."""
        return SCHEDULES[self.name].alternates

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart from those of inputs (zero bubble)."""
        return SCHEDULES[self.name].splits_backward

    @property
    def has_one_stage(self) -> bool:
        """Whether the schedule allows only one stage per rank, as GPipe and 1F1B do."""
        return SCHEDULES[self.name].max_stages_per_rank == 1


@dataclass(frozen=True, slots=True)
class Staging:
    """The stages of a placement (the segments of each) and the recompute mode of each segment
    (`modes`). `bound_s` is a lower bound on the step seconds of all stagings of the placement that
    fit in memory. `is_free`: memory excluded no staging that could be faster.
    """

    stages: Stages
    modes: tuple[str, ...]
    bound_s: float
    is_free: bool


def ramp(part: float, ranks: int, micro_batches: int) -> float:
    """The smallest seconds of a step, per second that one micro-batch takes on all ranks together,
    over all divisions of work among ranks. A rank waits for the fraction `part` of the time of each
    earlier rank, then computes all micro-batches.

    With t seconds on a rank, it ends after m t + part x (t of the ranks before). The latest end is
    earliest if all ends are equal.
    """
    part = min(max(part, 1e-9), 1.0)
    return part / (1 - (1 - part / micro_batches) ** ranks)
