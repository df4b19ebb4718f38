"""Candidate stages of a rank: runs of units with the least recomputation that fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from autopar_cost_models import held_moments, late_moments

from autopar.ir.stop import check_time
from autopar.solve.costs.pipeline_cost import is_parted
from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.least_recomputation import least
from autopar.solve.staging.unit_row import UnitRow

Seconds = float | np.ndarray
"""Seconds of one item, or of many as an array."""


@dataclass(frozen=True, slots=True)
class StageRun:
    """A candidate stage: units `first` to `end` (excluded) on rank `stage`, with the least
    recomputation that fits.

    `weight_s` is part of `backward_s`; `total_s` is forward and backward of a micro-batch. `step_s`
    is seconds once a step; `least_s` is a lower bound for a micro-batch with its share of these.
    `amounts` counts blocks by [kind, recompute mode]. `room` is (micro-batches held, bytes of the
    rank, micro-batches that wait), the arguments of `least`.
    """

    stage: int
    first: int
    end: int
    forward_s: float
    backward_s: float
    weight_s: float
    total_s: float
    step_s: float
    least_s: float
    amounts: np.ndarray
    room: tuple[int, float, int]


@dataclass(frozen=True, slots=True)
class StageRuns:
    """Many runs of one stage. Fields are those of `StageRun`, as arrays with one entry for each
    run.
    """

    stage: int
    first: np.ndarray
    end: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    total_s: np.ndarray
    step_s: np.ndarray
    least_s: np.ndarray

    @staticmethod
    def of(runs: Sequence[StageRun]) -> StageRuns:
        """Runs of one stage, at least one, as arrays in the same order."""
        return StageRuns(
            runs[0].stage,
            **{name: np.array([getattr(run, name) for run in runs]) for name in _NUMBERS},
        )

    def picked(self, chosen: np.ndarray) -> StageRuns:
        """The runs with the indices `chosen`, in that order and possibly repeated."""
        return StageRuns(self.stage, **{name: getattr(self, name)[chosen] for name in _NUMBERS})


_NUMBERS = ("first", "end", "forward_s", "backward_s", "weight_s", "total_s", "step_s", "least_s")


@dataclass
class RunFinder:
    """Finds the runs of ranks, each with its own row of units and bytes of memory. `is_free`
    becomes False once memory excludes a run or requires recomputation.
    """

    rows: Sequence[UnitRow]
    schedule: Schedule
    capacities: Sequence[float]
    is_free: bool = True

    @cached_property
    def rooms(self) -> list[tuple[int, float, int]]:
        """For each rank: (micro-batches held at the peak, bytes of memory, micro-batches that wait
        for gradients of parameters). The last is 0 if the backward is not split.
        """
        name, ranks, micro = self.schedule.name, self.schedule.ranks, self.rows[0].micro_batches
        held, late = [1], [0]
        if ranks > 1:
            held = [most for ((most,),) in held_moments(name, ranks, 1, micro)]
            late = [most for (((most,), _),) in late_moments(name, ranks, 1, micro)]
        return [
            (held[rank], self.capacities[rank], late[rank] * is_parted(name, rank))
            for rank in range(ranks)
        ]

    def run(self, stage: int, first: int, end: int) -> StageRun | None:
        """A `StageRun` of units `first` to `end` as stage `stage`, with the least recomputation
        that fits; None if no recomputation makes them fit. Clears `is_free` if they do not fit, or
        fit only with recomputation.
        """
        check_time()
        row, room = self.rows[stage], self.rooms[stage]
        if (found := least(row, first, end, *room)) is None:
            self.is_free = False
            return None
        more_s, amounts, least_s = found
        at = row.at
        forward_s = at.forward_s[end] - at.forward_s[first]
        backward_s = at.backward_s[end] - at.backward_s[first]
        if more_s:
            self.is_free = False
        return StageRun(
            stage=stage,
            first=first,
            end=end,
            forward_s=forward_s,
            backward_s=backward_s + more_s,
            weight_s=min(at.weight_s[end] - at.weight_s[first], backward_s),
            total_s=max(forward_s + backward_s + more_s, row.total_s(first, end)),
            step_s=row.once_s([(first, end)]),
            least_s=least_s,
            amounts=amounts,
            room=room,
        )
