"""Bounds on one candidate on devices of one kind in closed form: by a sketch of its cell, then by
totals over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

import numpy as np

from autopar.solve.bounds.candidate_facts import CandidateFacts
from autopar.solve.bounds.cell import Cell
from autopar.solve.bounds.family import Family
from autopar.solve.bounds.family_bounds import Families
from autopar.solve.bounds.lagrangian import Total, parameters_s, raise_totals, schedule_shape
from autopar.solve.bounds.sketch import Sketch, prefix_sums
from autopar.solve.costs.pipeline_cost import blocks_of
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.costs.schedule import Schedule
from autopar.solve.elimination.bucket_elimination import Question
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.search.candidate_models import CandidateModels

_DEVICE_SHARES = (0.75, 0.5, 0.25, 1e-4)
"""The device's weight in means of its time and the host's. With the last, what runs once a step decides
among placements.
"""


@dataclass
class CandidateBounds:
    """Lower bounds on one candidate. `by_schedule` has the step seconds for each schedule; methods
    raise it. `cell` is shared by candidates whose ops cost the same. `schedules` are the allowed
    ones, `capacity_bytes` is the memory of a device (None: unlimited).
    """

    models: CandidateModels
    schedules: tuple[Schedule, ...]
    capacity_bytes: int | None
    cell: Cell
    by_schedule: dict[Schedule, float] = field(default_factory=dict)

    @property
    def least_s(self) -> float:
        """A lower bound on step seconds under any schedule."""
        return min(self.by_schedule.values())

    def raise_to(self, schedule: Schedule, bound_s: float) -> None:
        """Sets the bound of a schedule to `bound_s` seconds if it is lower than that."""
        self.by_schedule[schedule] = max(self.by_schedule[schedule], bound_s)

    def below(self, upper_bound_s: float) -> dict[Schedule, float]:
        """The schedules whose bound is below `upper_bound_s`, with their bounds."""
        return {s: known_s for s, known_s in self.by_schedule.items() if known_s < upper_bound_s}

    @cached_property
    def totals(self) -> dict[Schedule, Total]:
        """For each schedule, its bound by totals over all ranks, not evaluated yet;
        `raise_by_totals` improves it.
        """
        first = self.models.first
        micro, units = first.num_microbatches, len(blocks_of(first))
        return {s: Total(schedule_shape(s, micro, units, self.cell.alike)) for s in self.schedules}

    @cached_property
    def families(self) -> Families:
        """The object that bounds and splits families (sets) of placements of this candidate. It
        uses the best prices of a byte of `totals`.
        """
        held = [held for total in self.totals.values() for held in total.shape.held if held]
        price = max(total.dual.best_price for total in self.totals.values())
        # a rank may be short of memory where all together are not
        if self.capacity_bytes is not None:
            price = max(price, self.cell.prices[1])
        facts = CandidateFacts(
            models=self.models.least,
            cell=self.cell,
            held=tuple(held) or (1.0,),
            price=price,
            parts_backward=any(s.splits_backward for s in self.schedules),
        )
        return Families(facts)

    @cached_property
    def parameters(self) -> list[Stack]:
        """Cost tables of the parameters, with the minimum over ZeRO stages (see
        `CostTables.parameters`).
        """
        return self.cell.tables.parameters(self.models.least)

    def glance(self, micro_batches: int, is_hasty: bool = False) -> float:
        """Sets `by_schedule` to bounds from the cell alone, without a memory limit, and returns the
        lowest one in seconds. Only the cell is annotated for it. `is_hasty` is as for
        `Cell.glance_s`.
        """
        glance_s = self.cell.glance_s
        self.by_schedule = {s: glance_s(s, micro_batches, is_hasty) for s in self.schedules}
        return self.least_s

    def raise_by_cell(
        self,
        static_bytes: Sequence[int],
        fixed_bytes: int,
        micro_batches: int,
        upper_bound_s: float,
    ) -> tuple[float, float]:
        """Raises `by_schedule` by the cell's sketch, for schedules below `upper_bound_s`. Returns
        (the lowest bound, an estimate of step seconds; infinite if no schedule is below).

        `static_bytes` has, for each class, a lower bound on the static bytes of a segment.
        `fixed_bytes` are needed on every rank besides. A step has `micro_batches` micro-batches.
        """
        return self._sketched(
            self.cell.sketch, static_bytes, fixed_bytes, micro_batches, upper_bound_s
        )

    def _sketched(
        self,
        sketch: Sketch,
        static_bytes: Sequence[int],
        fixed_bytes: int,
        micro_batches: int,
        upper_bound_s: float,
    ) -> tuple[float, float]:
        cell, likely_s = self.cell, inf
        room_bytes = inf if self.capacity_bytes is None else self.capacity_bytes - fixed_bytes
        static = prefix_sums(cell.by_unit([static_bytes[index] for index in cell.first.segments]))
        for schedule in self.below(upper_bound_s):
            held = schedule_shape(schedule, micro_batches, sketch.units, cell.alike).held
            self.raise_to(
                schedule, sketch.bound_s(schedule, micro_batches, held, room_bytes, static)
            )
            schedule_s = sketch.likely_s(schedule, micro_batches, held, room_bytes, int(static[-1]))
            likely_s = min(likely_s, max(self.by_schedule[schedule], schedule_s))
        return self.least_s, likely_s

    def raise_by_totals(self, upper_bound_s: float) -> tuple[float, float]:
        """Raises `by_schedule` by a sketch with parameters and by totals, for schedules below
        `upper_bound_s`. Returns (the lowest bound, an estimate of step seconds; infinite if no
        schedule is below).
        """
        least, first, cell = self.models.least, self.models.first, self.cell
        of_class = parameters_s(least)
        parts = (
            cell.by_unit([of_class[index][part] for index in first.segments]) for part in range(4)
        )
        sketch = cell.sketch.with_parameters(*parts)
        static = least_static_by_class(first)
        self.by_schedule = self.by_schedule or dict.fromkeys(self.schedules, 0.0)
        _, likely_s = self._sketched(
            sketch, static, first.fixed_bytes, first.num_microbatches, upper_bound_s
        )
        if open_ := [self.totals[schedule] for schedule in self.below(upper_bound_s)]:
            raise_totals(cell, least, self.parameters, open_, self.capacity_bytes, upper_bound_s)
        for schedule, total in self.totals.items():
            self.raise_to(schedule, total.dual.best_s + first.fixed_s)
            if schedule.ranks == 1:
                self._raise_by_host(schedule, total, float(sketch.issue_s[-1]))
        return self.least_s, likely_s

    def _raise_by_host(self, schedule: Schedule, total: Total, issue_s: float) -> None:
        """Raises the bound without a pipeline if the host may decide. It issues a micro-batch in at
        least `issue_s`. The longer of device and host is no less than any mean of both.
        """
        first, price = self.models.first, total.dual.best_price
        if self.by_schedule[schedule] <= total.dual.best_s + first.fixed_s or price == inf:
            return  # the device decides
        room = 0 if self.capacity_bytes is None else self.capacity_bytes - first.fixed_bytes
        question = total.question(price)
        asked = [replace(question, forward=share, backward=share) for share in _DEVICE_SHARES]
        found = self.cell.tables.least(asked, self.parameters)
        if found is None:
            return
        for number, share in enumerate(_DEVICE_SHARES):
            least_s = total.bound_s(float(found.cost_s[number]), price, room) + first.fixed_s
            host_s = (1 - share) * first.num_microbatches * issue_s
            self.raise_to(schedule, least_s + host_s)

    def possible(self, upper_bound_s: float) -> Family:
        """The family of all placements, without strategies for which totals prove that no placement
        with them takes less than `upper_bound_s`.
        """
        root = self.families.root()
        totals = [self.totals[schedule] for schedule in self.below(upper_bound_s)]
        if upper_bound_s == inf or not totals:
            return root
        found = self.cell.tables.least_with(
            [total.question(total.dual.best_price) for total in totals], self.parameters
        )
        first = self.models.first
        room = 0 if self.capacity_bytes is None else self.capacity_bytes - first.fixed_bytes
        for (c, op), cost_s in found.items():
            least_s = np.array(
                [
                    total.bound_s(costs, total.dual.best_price, room)
                    for total, costs in zip(totals, cost_s, strict=True)
                ]
            ).min(axis=0)
            left = tuple(np.flatnonzero(least_s + first.fixed_s < upper_bound_s).tolist())
            if 0 < len(left) < cost_s.shape[1]:
                root.allowed[c][op] = left
        return root

    def likely(self, family: Family) -> Choices | None:
        """The placement of a family that is optimal at the best known price of a byte, under the
        schedule with the family's lowest bound. None if no consistent one was found.
        """
        total = self.totals[min(family.bounds_s, key=family.bounds_s.__getitem__)]
        question = total.question(total.dual.best_price)
        found = self.cell.tables.least([question], self.parameters, family.by_op())
        return None if found is None else found.placement(0, self.models.first)

    def is_consistent(self, family: Family) -> bool:
        """Whether some placement of a family has layouts that can be converted everywhere, also
        between segments.
        """
        return self.cell.tables.least([Question()], self.parameters, family.by_op()) is not None
