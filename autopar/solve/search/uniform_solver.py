"""Solves one candidate on devices of one kind: placement, schedule, stages and recompute modes
together.

The first placements are those that are optimal at some price of a byte, found while searching for
the best bound (`lagrangian.py`). They include the fastest without regard to memory, and leaner ones
if memory makes blocks recompute. Each gets its best staging (`best_staging.py`), under each
schedule that the candidate allows. Any further gain is found, or excluded, family by family
(`family_bounds.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.stop import TimeIsOver
from autopar.solve.bounds.cell import Cell
from autopar.solve.bounds.family import Family
from autopar.solve.bounds.lagrangian import leanest
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.placement_solver import SolverAuditError
from autopar.solve.integer_program.recompute_counts import solve_together
from autopar.solve.search.candidate_bounds import CandidateBounds
from autopar.solve.search.candidate_models import CandidateModels
from autopar.solve.search.frontier import Frontier
from autopar.solve.search.row_bound import PartBounds, RowBound
from autopar.solve.search.staged_placement import Staged, Stager, bound_of

ALONE = Schedule("gpipe", 1, 1)
"""The schedule without a pipeline."""

_TOGETHER_S, _TOGETHER_PART = 10.0, 10
"""(the most seconds for the integer program of a candidate; it also gets at most this fraction, 1 /
n, of the remaining time).
"""

_MOST_PLACEMENTS = 4
"""Number of placements that are staged under one schedule."""


class UniformSolver:
    """A `CandidateSolver` for devices of one kind.

    `model_of(mode)` returns the candidate annotated for a recompute mode. `others` are the same for
    other ZeRO stages, of which the best is taken. `modes` are the allowed recompute modes, the one
    that keeps most first. `schedules` are the allowed ones, `capacity_bytes` the memory of a device
    (None: unlimited). `cell` is shared with candidates whose ops cost the same.
    """

    def __init__(
        self,
        model_of: Callable[[str], AnnotatedModel],
        modes: tuple[str, ...],
        schedules: tuple[Schedule, ...],
        capacity_bytes: int | None,
        cell: Cell,
        others: tuple[Callable[[str], AnnotatedModel], ...] = (),
    ) -> None:
        self.models = CandidateModels((model_of, *others), modes)
        self.bounds = CandidateBounds(self.models, schedules, capacity_bytes, cell)
        self.stager = Stager(self.models, capacity_bytes)
        self.capacity_bytes = capacity_bytes
        self.frontier: Frontier | None = None
        self._possible: tuple[float, Family] | None = None  # an upper bound, and the family for it
        self._asked_program = False  # whether the integer program of `recompute_counts.py` was
        self._dropped_s = inf  # families whose placements take at least as long were dropped

    def raise_bounds(self, upper_bound_s: float) -> tuple[float, float]:
        """Raises the bounds by schedule with `CandidateBounds.raise_by_totals`. Returns (the lowest
        bound, an estimate of step seconds).
        """
        return self.bounds.raise_by_totals(upper_bound_s)

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """(the best `Staged` plan of some placements below `upper_bound_s`, or None; a lower bound
        on all). `raise_bounds` must be called first. Once any plan is known, no more are staged
        after `time_limit_s` seconds. Raises `TimeIsOver` if `stops_at` ends it before it has a
        plan.

        With an infinite `upper_bound_s`, the plan is the leanest placement if none of the others
        fits.
        """
        start, best, bounds_s = time.perf_counter(), None, self.bounds.by_schedule
        for schedule in sorted(self.bounds.schedules, key=bounds_s.__getitem__):
            least_s, placements = inf, self._placements(schedule)
            for choices in placements:
                late = time.perf_counter() - start > time_limit_s
                if bounds_s[schedule] >= upper_bound_s or (late and upper_bound_s < inf):
                    break
                try:
                    found = self.stager.staged(choices, schedule, upper_bound_s)
                except TimeIsOver:
                    if best is None:
                        raise
                    return best, self.bounds.least_s
                least_s = min(least_s, bound_of(found))
                if isinstance(found, Staged) and found.solution.time_s < upper_bound_s:
                    best, upper_bound_s = found, found.solution.time_s
            else:
                # none was met if the bound was beyond what is wanted
                if self.models.has_one_placement and placements:
                    self.bounds.raise_to(schedule, least_s)
        if best is None and upper_bound_s == inf:
            best = self._leanest()
        return best, self.bounds.least_s

    def _leanest(self) -> Staged | None:
        """The placement with the fewest kept and static bytes, `Staged` under its best schedule.
        None if it does not fit or none is consistent.
        """
        choices = leanest(self.bounds.cell.tables, self.bounds.parameters, self.models.first)
        if choices is None:
            return None
        plans = (self.stager.staged(choices, schedule, inf) for schedule in self.bounds.schedules)
        fitting = (plan for plan in plans if isinstance(plan, Staged))
        return min(fitting, key=lambda plan: plan.solution.time_s, default=None)

    def _together(self, capacity_bytes: int, upper_bound_s: float, limit_s: float) -> Staged | None:
        """Without a pipeline: the best `Staged` plan that fits and takes less than `upper_bound_s`,
        by one integer program; None if there is none. Raises the bound on all placements too. The
        plan may be optimal at no price of a byte. `limit_s` is the time limit in seconds.
        """
        allowed = self.bounds.possible(upper_bound_s).by_op()
        found = solve_together(self.models.least, capacity_bytes, limit_s, upper_bound_s, allowed)
        # placements that take at least `upper_bound_s` were left out
        self.bounds.raise_to(ALONE, min(found.bound_s, upper_bound_s))
        if found.choices is None:
            return None
        staged = self.stager.staged(found.choices, ALONE, inf)
        if isinstance(staged, float) or staged.solution.priced.device_s > found.time_s:
            raise SolverAuditError(
                f"CP-SAT found a placement that fits in {found.time_s} s; staged, it takes {staged}"
            )
        return staged if staged.solution.time_s < upper_bound_s else None

    def narrow(
        self, upper_bound_s: float, splits: int, time_limit_s: float
    ) -> tuple[Staged | None, float]:
        """Splits families of placements, at most `splits` times, and none after `time_limit_s`
        seconds. Returns (a `Staged` plan below `upper_bound_s`, or None; a lower bound on all, at
        most `upper_bound_s`).

        The next call continues with the remaining families. Without a pipeline, one integer program
        is solved before the first split.
        """
        deadline, best = time.perf_counter() + time_limit_s, None
        if self._possible is None or upper_bound_s < self._possible[0]:
            self._possible = upper_bound_s, self.bounds.possible(upper_bound_s)
        _, possible = self._possible
        if self.frontier is None:
            self.frontier = self._root(possible, upper_bound_s)
        frontier = self.frontier
        if splits and self.capacity_bytes is not None and self._wants_program():
            self._asked_program = True
            limit_s = min(_TOGETHER_S, time_limit_s / _TOGETHER_PART)
            best = self._together(self.capacity_bytes, upper_bound_s, limit_s)
            upper_bound_s = best.solution.time_s if best else upper_bound_s
        for _ in range(splits):
            if (
                self._left_s(frontier) >= upper_bound_s
                or not frontier.waiting
                or time.perf_counter() > deadline
            ):
                break
            whole = frontier.pop()
            family = whole.within(possible)
            try:
                if family is whole:
                    found = self._split(frontier, family, upper_bound_s)
                    best, upper_bound_s = (
                        (best, upper_bound_s) if found is None else (found, found.solution.time_s)
                    )
                elif family is not None:  # a faster plan was found since it was bounded
                    self._push(frontier, family, upper_bound_s)
            except TimeIsOver:
                frontier.push(whole, min(whole.bounds_s.values()))
                if best is None:
                    raise
                break
        # the upper bound may rise again, where a process that found a plan dies
        self._dropped_s = min(self._dropped_s, upper_bound_s)
        return best, min(self._left_s(frontier), self._dropped_s)

    def _root(self, possible: Family, upper_bound_s: float) -> Frontier:
        """A frontier with the family `possible`, if it may contain a placement that takes less than
        `upper_bound_s`. Raises the bounds by schedule.
        """
        frontier, open_s = Frontier(), self.bounds.below(upper_bound_s)
        self._push(frontier, replace(possible, bounds_s=open_s), upper_bound_s)
        left_s = frontier.waiting[0].family.bounds_s if frontier.waiting else {}
        for schedule in open_s:
            self.bounds.raise_to(schedule, min(left_s.get(schedule, inf), upper_bound_s))
        return frontier

    def _wants_program(self) -> bool:
        """Whether the integer program is to be solved: it was not yet, there is no pipeline, and
        there are several placements.
        """
        return (
            self.bounds.schedules == (ALONE,)
            and not self._asked_program
            and not self.models.has_one_placement
        )

    def _left_s(self, frontier: Frontier) -> float:
        """A lower bound in seconds on all placements of the frontier: that of its families, or of
        the integer program if that was solved and is higher.
        """
        if not self._asked_program:
            return frontier.bound_s
        return max(frontier.bound_s, self.bounds.by_schedule[ALONE])

    def _split(self, frontier: Frontier, family: Family, upper_bound_s: float) -> Staged | None:
        """Stages a promising placement of a family, and puts back the halves of the family. Returns
        a `Staged` plan below `upper_bound_s`, or None.
        """
        best = self._met(family, upper_bound_s)
        upper_bound_s = upper_bound_s if best is None else best.solution.time_s
        parts = self.bounds.families.branching.split(family)
        if not parts:
            return self._settle(frontier, family, upper_bound_s) or best
        for part in parts:
            self._push(frontier, part, upper_bound_s)
        return best

    def _settle(self, frontier: Frontier, family: Family, upper_bound_s: float) -> Staged | None:
        """Stages the only placement of a family, if it is consistent, and records its bound in the
        frontier. Returns the `Staged` plan if it takes less than `upper_bound_s`, otherwise None.
        """
        if not self.bounds.is_consistent(family):
            return None
        best, choices = None, self.bounds.families.branching.only(family)
        for schedule, known_s in family.bounds_s.items():
            found = self.stager.staged(choices, schedule, upper_bound_s)
            if isinstance(found, Staged) and found.solution.time_s < upper_bound_s:
                best, upper_bound_s = found, found.solution.time_s
            frontier.settle(max(bound_of(found), known_s))
        return best

    def _push(self, frontier: Frontier, family: Family, upper_bound_s: float) -> None:
        """Bounds a family, and puts it into the frontier unless its bound reaches
        `upper_bound_s`.
        """
        bounds_s: dict[Schedule, float] = {}
        limited: set[Schedule] = set()
        parts: dict[Schedule, PartBounds] = {}
        row_of = cache(partial(self.bounds.families.row, family))
        for schedule, known_s in family.bounds_s.items():
            if known_s >= upper_bound_s:
                continue
            bound = RowBound(
                families=self.bounds.families,
                family=family,
                row_of=row_of,
                schedule=schedule,
                capacity_bytes=self.capacity_bytes,
                upper_bound_s=upper_bound_s,
                is_limited=schedule in (family.limited or ()),
            )
            found_s, left = bound.raised()
            if (bound_s := max(known_s, found_s)) < upper_bound_s:
                bounds_s[schedule] = bound_s
                limited |= {schedule} if bound.is_limited else set()
                parts |= {schedule: left} if left else {}
        if bounds_s:
            family = replace(family, bounds_s=bounds_s, limited=frozenset(limited), parts=parts)
            frontier.push(family, min(bounds_s.values()))

    def _met(self, family: Family, upper_bound_s: float) -> Staged | None:
        """A `Staged` plan from the placement of a family that is optimal at the best known price of
        a byte. None if it was staged before, or does not take less than `upper_bound_s`.
        """
        choices = self.bounds.likely(family)
        if not choices or choices in self.stager.known:
            return None
        schedule = min(family.bounds_s, key=family.bounds_s.__getitem__)
        found = self.stager.staged(choices, schedule, upper_bound_s)
        if isinstance(found, Staged) and found.solution.time_s < upper_bound_s:
            return found
        return None

    def _placements(self, schedule: Schedule) -> Sequence[Choices]:
        """The placements to stage for a schedule, at most `_MOST_PLACEMENTS`. First those found
        last for it, which are nearest to the best price, then those of other schedules.
        """
        totals = self.bounds.totals
        found = list(reversed(totals[schedule].placements))
        for total in totals.values():
            found += [choices for choices in total.placements if choices not in found]
        return found[:_MOST_PLACEMENTS]
