"""A pipeline's schedule and staging."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import SCHEDULES

from autopar.solve.costs.pipeline_cost import Stages


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline's schedule (for one rank: 'gpipe'), its number of ranks, and the stages of each
    rank.
    """

    name: str
    ranks: int
    stages_per_rank: int

    @property
    def alternates(self) -> bool:
        """Whether ranks alternate forwards and backwards after a warm-up."""
        return SCHEDULES[self.name].alternates

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights are computed separately."""
        return SCHEDULES[self.name].splits_backward

    @property
    def has_one_stage(self) -> bool:
        """Whether the schedule allows only one stage per rank."""
        return SCHEDULES[self.name].max_stages_per_rank == 1


@dataclass(frozen=True, slots=True)
class Staging:
    """The stages of a placement and the recompute mode of each segment (`modes`). `bound_s` is a
    lower bound on all stagings of the placement that fit. `is_free`: memory excluded no staging
    that could be faster.
    """

    stages: Stages
    modes: tuple[str, ...]
    bound_s: float
    is_free: bool


def ramp(part: float, ranks: int, micro_batches: int) -> float:
    """Seconds of a step per second of a micro-batch over all ranks, if a rank waits for the
    fraction `part` of the time of each earlier rank. m t + part x (t of the ranks before) is
    minimal if all are equal.
    """
    part = min(max(part, 1e-9), 1.0)
    return part / (1 - (1 - part / micro_batches) ** ranks)
