"""One candidate whose recomputation or stages are not fixed: placement, schedule, stages and recompute modes together.

The first placements are those that are best for some price of a byte, found on the way to the best bound (`lagrangian.py`): the fastest
without regard to memory, and leaner ones where memory makes blocks recompute. Each is staged best (`best_staging.py`), under each schedule
that the candidate leaves. What others could still gain is found, or ruled out, family by family (`family_bounds.py`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from math import inf

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.candidate_facts import CandidateFacts
from autopar.solve.bounds.cell import Cell
from autopar.solve.bounds.family import EVERY, Family, Part
from autopar.solve.bounds.family_bounds import Families
from autopar.solve.bounds.lagrangian import Total, leanest, parameters_s, raise_totals, shape_of
from autopar.solve.bounds.sketch import Sketch, sums
from autopar.solve.bounds.zero_variants import least_of, undominated_variants
from autopar.solve.costs.pipeline_cost import blocks_of, pipelined
from autopar.solve.costs.placement_cost import Choices, price
from autopar.solve.costs.recompute_mix import Mixed, Models, hides, mixed
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.elimination.bucket_elimination import Question
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.integer_program.placement_solver import Solution, SolverAuditError
from autopar.solve.integer_program.recompute_counts import solve_together
from autopar.solve.search.frontier import Frontier
from autopar.solve.staging.best_staging import best_staging, quick_bound_s
from autopar.solve.staging.row_of_costs import row_of_placement
from autopar.solve.staging.unit_row import UnitRow

ALONE = Schedule("gpipe", 1, 1)

_PARTS, _CLOSE = 8, 1e-4
"""So many parts of a family are bounded at most, where that may raise its bound by so much of it."""

_TOGETHER_S, _TOGETHER_PART = 10.0, 10
"""Seconds for the integer program of a candidate, at most, and no more than one part of so many of the time that is left, so that other
candidates have some of it."""

_MOST_PLACEMENTS = 4
"""How many placements are staged under one schedule."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The best way to run a candidate.  `recompute`: the mode of all blocks, or 'mixed'; `variant`: the number of its ZeRO stage."""

    solution: Solution
    mixed: Mixed
    schedule: Schedule
    recompute: str
    variant: int = 0


@dataclass
class Joint:
    """`model_of(mode)` is the candidate annotated for a recompute mode, `others` the same under other ZeRO stages, of which the best is
    taken; `modes` are those allowed, the first keeping most."""

    model_of: Callable[[str], AnnotatedModel]
    modes: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    capacity_bytes: int | None
    cell: Cell
    others: tuple[Callable[[str], AnnotatedModel], ...] = ()
    bounds_s: dict[Schedule, float] = field(
        default_factory=dict
    )  # no placement under the schedule is faster
    numbered: list[Choices] = field(default_factory=list)  # placements that were staged
    rows: dict[tuple[int, int, int], UnitRow] = field(
        default_factory=dict
    )  # by numbers of the placement and the variant, number of modes
    frontier: Frontier | None = None  # families that are left
    possible: tuple[float, Family] | None = None  # a time, and what `_possible` says of it
    is_asked: bool = False  # whether the integer program of `recompute_counts.py` was
    dropped_s: float = inf  # what families were dropped for that take at least as long

    @cached_property
    def models(self) -> Models:
        """What no variant goes below."""
        return {mode: self.least_of(mode) for mode in self.modes}

    def least_of(self, mode: str) -> AnnotatedModel:
        return least_of([model_of(mode) for model_of in (self.model_of, *self.others)])

    @cached_property
    def variants(self) -> dict[int, Models]:
        """Those that may be the best, by number."""
        found = [
            {mode: model_of(mode) for mode in self.modes}
            for model_of in (self.model_of, *self.others)
        ]
        return {number: found[number] for number in undominated_variants(found)}

    @cached_property
    def hiding(self) -> dict[int, bool]:
        """By variant: `hides`."""
        return {number: hides(models) for number, models in self.variants.items()}

    @property
    def first(self) -> AnnotatedModel:
        return self.models[self.modes[0]]

    @cached_property
    def decided(self) -> bool:
        """Whether there is but one placement."""
        return all(len(op.strategies) == 1 for block in self.first.classes for op in block.ops)

    @cached_property
    def families(self) -> Families:
        held = [held for total in self.totals.values() for held in total.shape.held if held]
        price = max(total.dual.best_price for total in self.totals.values())
        if (
            self.capacity_bytes is not None
        ):  # a rank may be short of memory where all together are not
            price = max(price, self.cell.prices[1])
        return Families(
            CandidateFacts(
                models=self.models,
                cell=self.cell,
                held=tuple(held) or (1.0,),
                price=price,
                parts_backward=any(s.splits_backward for s in self.schedules),
            )
        )

    @cached_property
    def parameters(self) -> list[Stack]:
        return self.cell.tables.parameters(self.models)

    @cached_property
    def totals(self) -> dict[Schedule, Total]:
        micro, units = self.first.num_microbatches, len(blocks_of(self.first))
        return {s: Total(shape_of(s, micro, units, self.cell.alike)) for s in self.schedules}

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """(the best way that takes less than `upper_bound_s`, if one was found; a bound of all ways), after `raise_bounds`."""
        start, best = time.perf_counter(), None
        for schedule in sorted(self.schedules, key=self.bounds_s.__getitem__):
            least_s, placements = inf, self._placements(schedule)
            for choices in placements:
                if self.bounds_s[schedule] >= upper_bound_s or (
                    best and time.perf_counter() - start > time_limit_s
                ):
                    break
                found = self._staged(choices, schedule, upper_bound_s)
                least_s = min(
                    least_s, found if isinstance(found, float) else found.solution.bound_s
                )
                if not isinstance(found, float) and found.solution.time_s < upper_bound_s:
                    best, upper_bound_s = found, found.solution.time_s
            else:
                if (
                    self.decided and placements
                ):  # none was met if the bound was beyond what is wanted
                    self.bounds_s[schedule] = max(self.bounds_s[schedule], least_s)
        if (
            best is None
            and upper_bound_s == inf
            and (choices := leanest(self.cell.tables, self.parameters)) is not None
        ):
            ways = (self._staged(choices, schedule, upper_bound_s) for schedule in self.schedules)
            best = min(
                (way for way in ways if not isinstance(way, float)),
                key=lambda way: way.solution.time_s,
                default=None,
            )
        return best, min(self.bounds_s.values())

    def _together(self, upper_bound_s: float, limit_s: float) -> Staged | None:
        """Without a pipeline: the best that fits and takes less than `upper_bound_s`, by one integer program, which also bounds the others.
        It may be best at no price of a byte."""
        allowed = self._possible(upper_bound_s).by_op()
        found = solve_together(self.models, self.capacity_bytes, limit_s, upper_bound_s, allowed)
        self.bounds_s[ALONE] = max(
            self.bounds_s[ALONE], min(found.bound_s, upper_bound_s)
        )  # others were left out that take as long
        if found.choices is None:
            return None
        staged = self._staged(found.choices, ALONE, inf)
        if isinstance(staged, float) or staged.solution.time_s > found.time_s:
            raise SolverAuditError(
                f"CP-SAT found a placement that fits in {found.time_s} s; staged, it takes {staged}"
            )
        return staged if staged.solution.time_s < upper_bound_s else None

    def glance(self, micro_batches: int) -> float:
        """A bound of every placement in whatever memory, by what the cell tells; nothing is annotated for that but the cell."""
        self.bounds_s = {
            schedule: self.cell.glance_s(schedule, micro_batches) for schedule in self.schedules
        }
        return min(self.bounds_s.values())

    def sketch(
        self,
        static_bytes: Sequence[int],
        fixed_bytes: int,
        micro_batches: int,
        upper_bound_s: float,
    ) -> tuple[float, float]:
        """(a bound of every placement by what the cell tells, what a step is likely to take).  `static_bytes`: of a segment of each class
        at least."""
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
        static = sums(cell.by_unit([static_bytes[index] for index in cell.first.segments]))
        for schedule in (
            schedule for schedule, bound_s in self.bounds_s.items() if bound_s < upper_bound_s
        ):
            held = shape_of(schedule, micro_batches, sketch.units, cell.alike).held
            bound_s = max(
                self.bounds_s[schedule],
                sketch.bound_s(schedule, micro_batches, held, room_bytes, static),
            )
            self.bounds_s[schedule] = bound_s
            likely_s = min(
                likely_s,
                max(
                    bound_s,
                    sketch.likely_s(schedule, micro_batches, held, room_bytes, int(static[-1])),
                ),
            )
        return min(self.bounds_s.values()), likely_s

    def raise_bounds(self, upper_bound_s: float) -> tuple[float, float]:
        """(a bound of every placement by a sketch with parameters and by the formula of totals, what a step is likely to take)."""
        first, cell, of_class = self.first, self.cell, parameters_s(self.models)
        parts = (
            cell.by_unit([of_class[index][part] for index in first.segments]) for part in range(3)
        )
        sketch, static = cell.sketch.with_parameters(*parts), least_static_by_class(first)
        self.bounds_s = self.bounds_s or dict.fromkeys(self.schedules, 0.0)
        _, likely_s = self._sketched(
            sketch, static, first.fixed_bytes, first.num_microbatches, upper_bound_s
        )
        if open_ := [
            total
            for schedule, total in self.totals.items()
            if self.bounds_s[schedule] < upper_bound_s
        ]:
            raise_totals(
                cell, self.models, self.parameters, open_, self.capacity_bytes, upper_bound_s
            )
        for schedule, total in self.totals.items():
            self.bounds_s[schedule] = max(
                self.bounds_s[schedule], total.dual.best_s + first.fixed_s
            )
        return min(self.bounds_s.values()), likely_s

    def narrow(
        self, upper_bound_s: float, splits: int, time_limit_s: float
    ) -> tuple[Staged | None, float]:
        """(a way that takes less than `upper_bound_s`, if one was met; a bound up to that), after so many splits of families at most.

        What is left is gone on with at the next call.  Without a pipeline one integer program is asked first.
        """
        start, best = time.perf_counter(), None
        if self.possible is None or upper_bound_s < self.possible[0]:
            self.possible = upper_bound_s, self._possible(upper_bound_s)
        _, possible = self.possible
        if self.frontier is None:
            self.frontier = Frontier()
            open_s = {s: bound_s for s, bound_s in self.bounds_s.items() if bound_s < upper_bound_s}
            self._push(replace(possible, bounds_s=open_s), upper_bound_s)
            left_s = self.frontier.waiting[0].family.bounds_s if self.frontier.waiting else {}
            self.bounds_s |= {
                s: max(bound_s, min(left_s.get(s, inf), upper_bound_s))
                for s, bound_s in open_s.items()
            }
        if (
            splits
            and self.schedules == (ALONE,)
            and not (self.is_asked or self.decided or self.capacity_bytes is None)
        ):
            self.is_asked = True
            best = self._together(upper_bound_s, min(_TOGETHER_S, time_limit_s / _TOGETHER_PART))
            upper_bound_s = best.solution.time_s if best else upper_bound_s
        for _ in range(splits):
            if (
                self._left_s >= upper_bound_s
                or not self.frontier.waiting
                or time.perf_counter() - start > time_limit_s
            ):
                break
            whole = self.frontier.pop()
            family = whole.within(possible)
            if family is not whole:  # a faster plan was found since it was bounded
                if family is not None:
                    self._push(family, upper_bound_s)
                continue
            found = self._met(family, upper_bound_s)
            if found is not None:
                best, upper_bound_s = found, found.solution.time_s
            parts = self.families.branching.split(family)
            if not parts:
                best, upper_bound_s = self._settle(family, best, upper_bound_s)
            for part in parts:
                self._push(part, upper_bound_s)
        self.dropped_s = min(
            self.dropped_s, upper_bound_s
        )  # which may rise again, where a process that found a plan dies
        return best, min(self._left_s, self.dropped_s)

    @property
    def _left_s(self) -> float:
        """No placement that is still looked for is faster.  The integer program is asked where there is no pipeline alone."""
        return (
            max(self.frontier.bound_s, self.bounds_s[ALONE])
            if self.is_asked
            else self.frontier.bound_s
        )

    def _settle(
        self, family: Family, best: Staged | None, upper_bound_s: float
    ) -> tuple[Staged | None, float]:
        """A family of one placement is staged as that; of none, where its segments do not go together, nothing is left."""
        if not self.is_consistent(family):
            return best, upper_bound_s
        choices = self.families.branching.only(family)
        for schedule in family.bounds_s:
            found = self._staged(choices, schedule, upper_bound_s)
            bound_s = found if isinstance(found, float) else found.solution.bound_s
            if not isinstance(found, float) and found.solution.time_s < upper_bound_s:
                best, upper_bound_s = found, found.solution.time_s
            self.frontier.settled_s = min(
                self.frontier.settled_s, max(bound_s, family.bounds_s[schedule])
            )
        return best, upper_bound_s

    def _possible(self, upper_bound_s: float) -> Family:
        """The family of all placements, without strategies that no placement has which is faster than `upper_bound_s`, by totals."""
        root = self.families.root()
        totals = [
            total
            for schedule, total in self.totals.items()
            if self.bounds_s[schedule] < upper_bound_s
        ]
        if upper_bound_s == inf or not totals:
            return root
        found = self.cell.tables.least_with(
            [total.question(total.dual.best_price) for total in totals], self.parameters
        )
        room = 0 if self.capacity_bytes is None else self.capacity_bytes - self.first.fixed_bytes
        for (c, op), cost_s in found.items():
            least_s = [
                total.bound_s(costs, total.dual.best_price, room)
                for total, costs in zip(totals, cost_s, strict=True)
            ]
            left = tuple(
                np.flatnonzero(
                    np.min(least_s, axis=0) + self.first.fixed_s < upper_bound_s
                ).tolist()
            )
            if 0 < len(left) < cost_s.shape[1]:
                root.allowed[c][op] = left
        return root

    def _push(self, family: Family, upper_bound_s: float) -> None:
        """Bound a family, and put it back unless none of its placements is faster than `upper_bound_s`."""
        bounds_s, limited, parts = {}, set(), {}
        row_of = cache(partial(self.families.row, family))
        for schedule, known_s in family.bounds_s.items():
            found_s, is_limited, left = known_s, False, ()
            if known_s < upper_bound_s:
                found_s, is_limited, left = self._row_bound_s(
                    family, row_of, schedule, upper_bound_s
                )
            if (bound_s := max(known_s, found_s)) < upper_bound_s:
                bounds_s[schedule] = bound_s
                limited |= {schedule} if is_limited else set()
                parts |= {schedule: left} if left else {}
        if bounds_s:
            self.frontier.push(
                replace(family, bounds_s=bounds_s, limited=frozenset(limited), parts=parts),
                min(bounds_s.values()),
            )

    def _row_bound_s(
        self,
        family: Family,
        row_of: Callable[[bool, int, bool, Part], UnitRow | None],
        schedule: Schedule,
        upper_bound_s: float,
    ) -> tuple[float, bool, tuple[tuple[float, Part], ...]]:
        """(a bound of a family under a schedule, up to `upper_bound_s`; whether memory asks for recomputation; the parts that are left);
        `row_of` as `Families.row` of the family.

        In the first mode if memory leaves nothing out, else in all; by what segments cost each by itself, and if that is not enough,
        together with what stands beside them.  Where the first of these was not enough for the family that this one is a part of it is not
        tried again.
        """
        is_limited, closest = schedule in (family.limited or ()), bool(self.families.facts.units)

        def bound_s(part: Part, closely: bool = closest, up_to_s: float = upper_bound_s) -> float:
            nonlocal is_limited
            free_s = 0.0
            for modes in (len(self.modes),) if is_limited else dict.fromkeys((1, len(self.modes))):
                row = row_of(schedule.stages_per_rank > 1, modes, closely, part)
                found = (
                    inf
                    if row is None
                    else best_staging(row, schedule, self.capacity_bytes, up_to_s)
                )
                if row is None or modes == len(self.modes):
                    break
                if isinstance(found, float) or not found.is_free:
                    is_limited = True
                elif (
                    (free_s := found.bound_s) >= up_to_s
                    or schedule.ranks == 1
                    or not self.families.facts.hides
                ):
                    break  # with the least of all modes once a step: if that is not enough, it is asked what more backward takes for it
            return max(found if isinstance(found, float) else found.bound_s, free_s)

        left = [(known_s, False, part) for known_s, part in family.parts.get(schedule, ())]
        if not left:
            known_s = 0.0
            for closely in dict.fromkeys((family.limited is not None and closest, closest)):
                if (known_s := bound_s(EVERY, closely)) >= upper_bound_s:
                    return known_s, is_limited, ()
            least_s, slack_s = self.families.least_and_slack_s(family)
            if schedule.ranks == 1 or upper_bound_s == inf or not any(slack_s):
                return known_s, is_limited, ()
            narrowest = Part(
                *((seconds, seconds) for seconds in least_s)
            )  # many parts say about as much, fewer less
            if bound_s(narrowest, up_to_s=2 * upper_bound_s) <= known_s * (1 + _CLOSE):
                return known_s, is_limited, ()
            left = [(known_s, True, EVERY)]
        found_s, left = self._parted(
            left, bound_s, self.families.least_and_slack_s(family), upper_bound_s
        )
        return found_s, is_limited, left

    def _parted(
        self, left: Sequence[tuple[float, bool, Part]], bound_of: Callable[[Part], float],
        least_and_slack_s: tuple[tuple[float, float], ...], upper_bound_s: float,
    ) -> tuple[float, tuple[tuple[float, Part], ...]]:  # fmt: skip
        """(a bound of a family by its parts, those that are left with their bounds); `left`: a bound of each, and whether that is of it in
        this family.

        Within a part, what a block takes in all leaves little for backward to take less.  The part of the least bound is bounded next, or
        parted if that is done.
        """
        parts = [
            (known_s, number, is_done, part) for number, (known_s, is_done, part) in enumerate(left)
        ]
        heapq.heapify(parts)
        number, last = len(parts), len(parts) + _PARTS
        while parts[0][0] < upper_bound_s and number < last:
            known_s, _, is_done, part = parts[0]
            smaller = part.halves(*least_and_slack_s) if is_done else (part,)
            if smaller is None:
                break
            heapq.heappop(parts)
            for one in smaller:
                number += 1
                heapq.heappush(parts, (max(bound_of(one), known_s), number, True, one))
        return parts[0][0], tuple(
            (known_s, part) for known_s, *_, part in parts if known_s < upper_bound_s
        )

    def _met(self, family: Family, upper_bound_s: float) -> Staged | None:
        """A way of a family that is best at a likely price of a byte, if it takes less than `upper_bound_s`."""
        schedule = min(family.bounds_s, key=family.bounds_s.__getitem__)
        choices = self.likely(family, schedule)
        if not choices or choices in self.numbered:
            return None
        staged = self._staged(choices, schedule, upper_bound_s)
        return (
            staged
            if not isinstance(staged, float) and staged.solution.time_s < upper_bound_s
            else None
        )

    def likely(self, family: Family, schedule: Schedule) -> Choices | None:
        """The placement of a family that is best at a likely price of a byte; None if none is consistent."""
        question = self.totals[schedule].question(self.totals[schedule].dual.best_price)
        found = self.cell.tables.least([question], self.parameters, family.by_op())
        return found and found.decode(0)[0]

    def is_consistent(self, family: Family) -> bool:
        """Whether segments of some placement of a family go together."""
        return self.cell.tables.least([Question()], self.parameters, family.by_op()) is not None

    def _placements(self, schedule: Schedule) -> Sequence[Choices]:
        """The last that were met for this schedule, which are nearest to the best price, then the first of others."""
        found = list(reversed(self.totals[schedule].placements))
        for total in self.totals.values():
            found += [choices for choices in total.placements if choices not in found]
        return found[:_MOST_PLACEMENTS]

    def _staged(self, choices: Choices, schedule: Schedule, upper_bound_s: float) -> Staged | float:
        """A placement in its best stages under the best ZeRO stage, or a bound of it if that takes at least `upper_bound_s`."""
        best, bound_s = None, inf
        for variant in self.variants:
            found = self._staged_as(variant, choices, schedule, upper_bound_s)
            bound_s = min(bound_s, found if isinstance(found, float) else found.solution.bound_s)
            if not isinstance(found, float) and (
                best is None or found.solution.time_s < best.solution.time_s
            ):
                best, upper_bound_s = found, min(upper_bound_s, found.solution.time_s)
        return (
            bound_s
            if best is None
            else replace(best, solution=replace(best.solution, bound_s=bound_s))
        )

    def _staged_as(
        self, variant: int, choices: Choices, schedule: Schedule, upper_bound_s: float
    ) -> Staged | float:
        """The same under one ZeRO stage."""
        number = self._number(choices)
        bound_s = inf
        for count in dict.fromkeys((1, len(self.modes))):
            models = {mode: self.variants[variant][mode] for mode in self.modes[:count]}
            row = self.rows.get((number, variant, count))
            if row is None:
                row = self.rows[number, variant, count] = row_of_placement(models, choices)
            if (least_s := quick_bound_s(row, schedule)) >= upper_bound_s:
                return least_s
            staging = best_staging(row, schedule, self.capacity_bytes, upper_bound_s)
            bound_s = staging if isinstance(staging, float) else staging.bound_s
            if not isinstance(staging, float) and (
                count == len(self.modes) or (staging.is_free and not self._hides(variant, schedule))
            ):
                return replace(_priced(models, choices, staging, schedule), variant=variant)
        return bound_s

    def _hides(self, variant: int, schedule: Schedule) -> bool:
        """Whether recomputation may pay in a pipeline where memory does not ask for it."""
        return schedule.ranks > 1 and self.hiding[variant]

    def _number(self, choices: Choices) -> int:
        """A number that a placement is known by."""
        if choices not in self.numbered:
            self.numbered.append(choices)
        return self.numbered.index(choices)


def _priced(models: Models, choices: Choices, staging: Staging, schedule: Schedule) -> Staged:
    """A staging priced as any placement is, by the definition."""
    found = mixed(models, staging.modes)
    own, model = found.choices(choices), found.model
    if model.pipeline is not None:
        model = replace(
            model,
            pipeline=replace(
                model.pipeline, schedule=schedule.name, stages_per_rank=schedule.stages_per_rank
            ),
        )
    cut = pipelined(model, own, staging.stages) if model.pipeline else None
    solution = Solution("feasible", own, price(model, own), staging.bound_s, 0.0, "staging", cut)
    modes = {staging.modes[block] for block in blocks_of(next(iter(models.values())))}
    return Staged(
        solution, replace(found, model=model), schedule, modes.pop() if len(modes) == 1 else "mixed"
    )
