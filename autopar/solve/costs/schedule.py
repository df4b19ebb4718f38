"""A pipeline's schedule and staging."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import SCHEDULES

from autopar.solve.costs.pipeline_cost import Stages


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline's schedule (one rank: 'gpipe'), how many ranks it has, and how many stages each."""

    name: str
    ranks: int
    stages_per_rank: int

    @property
    def alternates(self) -> bool:
        """Whether ranks alternate forwards and backwards after a warm-up."""
        return SCHEDULES[self.name].alternates

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed apart."""
        return SCHEDULES[self.name].splits_backward

    @property
    def has_one_stage(self) -> bool:
        """Whether a rank never has more than one stage."""
        return SCHEDULES[self.name].max_stages_per_rank == 1


@dataclass(frozen=True, slots=True)
class Staging:
    """`modes` has the recompute mode of each segment.  No staging of the placement that fits takes less than `bound_s`.  `is_free`: memory
    left out no staging that could be faster."""

    stages: Stages
    modes: tuple[str, ...]
    bound_s: float
    is_free: bool


def ramp(part: float, ranks: int, micro_batches: int) -> float:
    """Seconds of a step for each second of a micro-batch over all ranks, if a rank waits for `part` of what each before it takes: m t +
    part x (t of the ranks before) is least where all are equal."""
    part = min(max(part, 1e-9), 1.0)
    return part / (1 - (1 - part / micro_batches) ** ranks)
