"""Solves one pipeline in which each rank lies within one *group* of devices of one kind.

All ranks have the same placement. It is staged exactly, with a row of its units for each group
(`staging_of_ranks`). A family of placements is bounded by the best staging of rows that cost no
more than any of its placements.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import inf

from autopar.ir.stop import TimeIsOver
from autopar.solve.bounds.cell import Cell, least_costs
from autopar.solve.bounds.family import Family
from autopar.solve.bounds.lagrangian import leanest
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.costs.recompute_mix import Models, hides
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.search.candidate_bounds import CandidateBounds
from autopar.solve.search.candidate_models import CandidateModels
from autopar.solve.search.frontier import Frontier
from autopar.solve.search.search_state import time_to_beat_s
from autopar.solve.search.staged_placement import Staged, first_of, in_first_modes, staged_placement
from autopar.solve.staging.one_stage_per_rank import staging_of_ranks
from autopar.solve.staging.row_of_costs import in_first, row_of_costs, row_of_placement
from autopar.solve.staging.unit_row import UnitRow

_MOST_PLACEMENTS = 4
"""Number of placements of each group that are staged."""

RowsOf = Callable[[int], Sequence[UnitRow | None]]
"""A function from a number of recompute modes to a row for each group in these first modes; None if
no placement is consistent.
"""


@dataclass(kw_only=True)
class MixedSolver:
    """A `CandidateSolver` for devices of several kinds. `models_of()`, `cells` and `capacities` are
    by group of devices. `bounds_s` has a lower bound on step seconds by schedule.
    """

    candidate: Candidate
    models_of: Callable[[], list[Models]]
    cells: list[Cell]
    capacities: Sequence[int | None]
    bounds_s: dict[Schedule, float]
    frontier: Frontier | None = None
    is_raised: bool = False
    tried: list[Choices] = field(default_factory=list)  # placements of families that were staged

    @property
    def models(self) -> list[Models]:
        """For each group of devices, the models by recompute mode."""
        return self.models_of()

    @property
    def groups(self) -> tuple[int, ...]:
        """The index of the device group of each pipeline rank."""
        return self.candidate.mesh.groups

    @property
    def bound_s(self) -> float:
        """A lower bound on step seconds under any schedule; infinite without schedules."""
        return min(self.bounds_s.values(), default=inf)

    @cached_property
    def hides(self) -> bool:
        """Whether recomputation can speed up the pipeline on some group even if memory does not
        require it (`recompute_mix.hides`).
        """
        return any(map(hides, self.models))

    @cached_property
    def of_groups(self) -> list[CandidateBounds]:
        """For each group of devices, the bounds of a pipeline as if all ranks were on it."""
        found = []
        for models, cell, capacity in zip(self.models, self.cells, self.capacities, strict=True):
            own = CandidateModels((models.__getitem__,), self.candidate.modes)
            found.append(CandidateBounds(own, tuple(self.bounds_s), capacity, cell))
            found[-1].raise_by_totals(inf)
        return found

    def raise_bounds(self, upper_bound_s: float) -> tuple[float, float]:
        """Raises `bounds_s` by the best staging of the minimal costs of each segment, for schedules
        below `upper_bound_s`. Returns (the lowest bound, 0: no estimate).
        """
        self.is_raised, all_models = True, self.models
        pairs = [
            (models, least_costs(models, cell))
            for models, cell in zip(all_models, self.cells, strict=True)
        ]

        def rows(modes: int) -> list[UnitRow]:
            return [
                row_of_costs(in_first_modes(models, modes), in_first(costs, modes))
                for models, costs in pairs
            ]

        for schedule, known_s in self.bounds_s.items():
            if known_s < upper_bound_s:
                found = self._staging(rows, schedule, upper_bound_s)
                self.bounds_s[schedule] = max(known_s, _bound_of(found))
        return self.bound_s, 0.0

    def _staging(
        self, rows_of: RowsOf, schedule: Schedule, upper_bound_s: float
    ) -> Staging | float:
        """The best `Staging` with a row for each group, or a lower bound in seconds if none takes
        less than `upper_bound_s`. It uses only the first recompute mode if memory excludes no
        staging, otherwise all modes.
        """
        capacities = [self.capacities[group] for group in self.groups]
        found: Staging | float = inf
        for modes in dict.fromkeys((1, len(self.candidate.modes))):
            rows = [row for row in rows_of(modes) if row is not None]
            if len(rows) < len(self.cells):
                return inf
            of_ranks = [rows[group] for group in self.groups]
            found = staging_of_ranks(of_ranks, schedule, capacities, upper_bound_s)
            is_free = not isinstance(found, float) and found.is_free
            if is_free and (rows[0].is_bound or not self.hides):
                break
        return found

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """(the best `Staged` plan of some placements below `upper_bound_s`, or None; a lower bound
        on all). If none of them fits or is faster, the leanest placement is tried. `time_limit_s`
        is ignored. Raises `TimeIsOver` if `stops_at` ends it before it has a plan.
        """
        best = None
        for choices in self._placements():
            schedules = sorted(self.bounds_s, key=self.bounds_s.__getitem__)
            try:
                found, _ = self._try(choices, schedules, upper_bound_s)
            except TimeIsOver:
                if best is None:
                    raise
                break
            if found is not None:
                best, upper_bound_s = found, time_to_beat_s(found.solution.time_s)
        if best is None:
            lean = self.leanest()
            if lean is not None:
                best, _ = self._try(lean, list(self.bounds_s), upper_bound_s)
        return best, self.bound_s

    def _placements(self) -> Iterator[Choices]:
        """Placements that are optimal on one of the groups at some price of a byte, each once; at
        most `_MOST_PLACEMENTS` of a group.
        """
        seen: list[Choices] = []
        for bounds in self.of_groups:
            of_group: list[Choices] = []
            for total in bounds.totals.values():
                of_group += [one for one in reversed(total.placements) if one not in of_group]
            for choices in of_group[:_MOST_PLACEMENTS]:
                if choices not in seen:
                    seen.append(choices)
                    yield choices

    def leanest(self) -> Choices | None:
        """The placement with the fewest kept and static bytes; None if none is consistent."""
        tables = self.cells[0].tables
        return leanest(tables, tables.parameters(self.models[0]), first_of(self.models[0]))

    def _try(
        self, choices: Choices, schedules: Iterable[Schedule], upper_bound_s: float
    ) -> tuple[Staged | None, float]:
        """(the placement with its best stages, as `Staged`, if it takes less than `upper_bound_s`,
        otherwise None; a lower bound on its step seconds under these schedules).
        """
        best, bounds_s, models = None, [], self.models
        rows = cache(
            lambda modes: [
                row_of_placement(in_first_modes(of_group, modes), choices) for of_group in models
            ]
        )
        for schedule in schedules:
            bounds_s.append(upper_bound_s)
            if self.bounds_s[schedule] < upper_bound_s:
                staging = self._staging(rows, schedule, upper_bound_s)
                bounds_s[-1] = _bound_of(staging)
                if isinstance(staging, float):
                    continue
                found = staged_placement(models, self.groups, choices, staging, schedule)
                if found.solution.time_s < upper_bound_s:
                    best, upper_bound_s = found, time_to_beat_s(found.solution.time_s)
        return best, min(bounds_s, default=inf)

    def narrow(
        self, upper_bound_s: float, splits: int, time_limit_s: float
    ) -> tuple[Staged | None, float]:
        """Splits families of placements, at most `splits` times, and none after `time_limit_s`
        seconds. Returns (the best `Staged` plan found below `upper_bound_s`, or None; a lower bound
        on all, in seconds). The first call bounds the family of all placements.
        """
        deadline, best = time.perf_counter() + time_limit_s, None
        if self.frontier is None:
            self.frontier = Frontier()
            open_s = {s: known_s for s, known_s in self.bounds_s.items() if known_s < upper_bound_s}
            root = replace(self.of_groups[0].families.root(), bounds_s=open_s)
            self._push(self.frontier, root, upper_bound_s)
        frontier = self.frontier
        for _ in range(splits):
            if (
                frontier.bound_s >= upper_bound_s
                or not frontier.waiting
                or time.perf_counter() > deadline
            ):
                break
            found = self._split(frontier, frontier.pop(), upper_bound_s)
            if found is not None:
                best, upper_bound_s = found, time_to_beat_s(found.solution.time_s)
        for schedule, known_s in self.bounds_s.items():
            self.bounds_s[schedule] = max(known_s, min(frontier.bound_s, upper_bound_s))
        return best, self.bound_s

    def _split(self, frontier: Frontier, family: Family, upper_bound_s: float) -> Staged | None:
        """Stages a placement of a family, using the prices of each group in turn, and puts back the
        halves of the family. Returns a `Staged` plan below `upper_bound_s`, or None.
        """
        bounds, best = self.of_groups[frontier.popped % len(self.of_groups)], None
        choices = bounds.likely(family)
        if choices is not None and choices not in self.tried:
            self.tried.append(choices)
            best, _ = self._try(choices, family.bounds_s, upper_bound_s)
            upper_bound_s = time_to_beat_s(best.solution.time_s) if best else upper_bound_s
        parts = bounds.families.branching.split(family)
        if not parts and bounds.is_consistent(family):
            only = bounds.families.branching.only(family)
            found, bound_s = self._try(only, family.bounds_s, upper_bound_s)
            best = found or best
            frontier.settle(max(bound_s, min(family.bounds_s.values())))
        for part in parts:
            self._push(frontier, part, upper_bound_s)
        return best

    def _push(self, frontier: Frontier, family: Family, upper_bound_s: float) -> None:
        """Bounds a family, and puts it into the frontier unless its bound reaches `upper_bound_s`.

        Segments are bounded separately first, then together with their neighbours.
        """
        bounds_s = dict(family.bounds_s)
        for closely in (False, True):
            rows = cache(
                lambda modes, closely=closely: [
                    bounds.families.row(family, False, modes, closely) for bounds in self.of_groups
                ]
            )
            for schedule, known_s in bounds_s.items():
                found = self._staging(rows, schedule, upper_bound_s)
                bounds_s[schedule] = max(known_s, _bound_of(found))
            bounds_s = {s: bound_s for s, bound_s in bounds_s.items() if bound_s < upper_bound_s}
        if bounds_s:
            frontier.push(replace(family, bounds_s=bounds_s), min(bounds_s.values()))


def _bound_of(found: Staging | float) -> float:
    return found if isinstance(found, float) else found.bound_s
