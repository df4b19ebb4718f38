"""The best plan of each family of layouts that a practitioner would name, staged and priced.

A family is a set of candidates, such as all pipelines with tensor parallelism. Its candidates are
ordered by the first bound of the search, which knows no memory. The first `SKETCHED` whose
parameters fit are sketched with memory, and as many of those that recipes use. The `STAGED` most
promising ones are solved, and more if these have no plan that fits. Then the family has a search of
its own: candidates are bounded and solved, the lowest bound first, until no other can be `NEAR`
faster than the best plan. These counts limit the work, and the time only where it is short, so that
equal requests give equal runners-up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from math import inf
from typing import Any

from autopar.ir.mesh import MeshShape
from autopar.ir.simplicity import INSIDE
from autopar.ir.stop import TimeIsOver, check_time, stops_at
from autopar.solve.costs.candidate import Candidate
from autopar.solve.integer_program.placement_solver import Solution
from autopar.solve.search.restaging import Part, Restaged, Restager, parts_of
from autopar.solve.search.result import SearchResult
from autopar.solve.search.simplest import candidate_simplicity, fastest
from autopar.solve.search.workers import Team

_ALONE_S = 60.0  # for which helpers are waited for without a deadline
SKETCHED, STAGED, IN_VAIN = 12, 2, 48
"""Numbers of candidates of a family that are sketched, and that are solved; and how many more are
solved as long as none has a plan that fits.
"""
_ROUNDING = 1e-9  # of equal times
NEAR, BOUNDED = 0.01, 48
"""The search of a family ends where no candidate can be faster than its best plan by this fraction,
or after this number of candidates.
"""

FAMILIES = (
    "data parallel (DDP, ZeRO-1, ZeRO-2)",
    "FSDP (ZeRO-3)",
    "TP",
    "PP",
    "TP + PP",
    "CP",
    "EP",
    "EP + PP",
)
"""Families by name, in the order of a table. Each has data parallelism besides. CP, EP and EP + PP
may have TP too, and CP may have PP.
"""


def family_of(candidate: Candidate) -> str:
    """The family of a candidate, one of `FAMILIES`."""
    mesh = candidate.mesh
    if mesh.ep > 1:
        return "EP + PP" if mesh.pp > 1 else "EP"
    if mesh.cp > 1:
        return "CP"
    if mesh.pp > 1:
        return "TP + PP" if mesh.tp > 1 else "PP"
    if mesh.tp > 1:
        return "TP"
    return FAMILIES[1] if candidate.zero == 3 else FAMILIES[0]


@dataclass(frozen=True, slots=True)
class FamilyBest:
    """The best plan that was found of a family (None without one), of how many `candidates`, and
    how many of them were `solved`. `listed` is the outcome of a faster plan that the search itself
    has of the family, if there is one. `cut`: the time was over before all that were promising were
    looked at. No plan of the family takes less than `bound_s` seconds; it is infinite if it is
    proved that none fits.
    """

    family: str
    candidates: int
    solved: int
    plan: tuple[Candidate, Solution] | None
    staged: Restaged | None  # None too if the search itself found the plan
    cut: bool = False
    bound_s: float = 0.0
    listed: Mapping[str, Any] | None = None

    @property
    def time_s(self) -> float:
        """Step seconds of the plan; infinite without one."""
        if self.listed is not None:
            return self.listed["time_s"]
        return inf if self.plan is None else self.plan[1].time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Finds the best plan of each family of `candidates`, once. `groups` are indices of candidates
    that are solved together. `glances_s` has the first bound of each candidate in seconds. `outcomes`
    has what the search knows of each in the end, as `SearchResult`. `likely` are the indices of those
    that recipes use. At most `processes` work at once; `tell` is called with a line of text if one
    cannot be started. From `until` on, by `time.perf_counter()`, no more plans are looked at; helpers
    have `stuck_s` seconds more. The searches of single families share `own_s` seconds.
    """

    groups: Sequence[Sequence[int]]
    candidates: Sequence[Candidate]
    glances_s: Sequence[float]
    outcomes: Sequence[Mapping[str, Any]]
    likely: Collection[int]
    restager: Restager
    processes: int
    tell: Callable[[str], None]
    until: float = inf
    stuck_s: float = 60.0
    own_s: float = inf
    known: dict[str, FamilyBest] = field(default_factory=dict)

    def runners_up(self, searched: SearchResult) -> list[FamilyBest]:
        """The best plan that was found of each family but that of the chosen plan of `searched`,
        the fastest first; families without a plan come last. If the search found a faster plan than
        the chosen one, that is the best of its family.
        """
        if searched.best is None:
            return []
        own, first = family_of(searched.best[0]), searched.fastest
        families = {family_of(self.candidates[group[0]]) for group in self.groups} - {own}
        found = []
        if first is not None and (family := family_of(first[0])) in families:
            families.remove(family)
            found.append(FamilyBest(family, sum(map(len, self._parts(family))), 1, first, None))
        new = [one for one in FAMILIES if one in families - self.known.keys()]
        self._find(new, self._best)
        end = min(self.until, time.perf_counter() + self.own_s)
        self._find(new, lambda family: self._searched(family, end))
        found += [self.known.get(family) or self._best(family) for family in families]
        now = replace(self, outcomes=searched.outcomes)  # which has plans that were preferred since
        found = [replace(best, listed=now._listed(best)) for best in found]
        found = [replace(best, bound_s=now._bound_s(best)) for best in found]
        return sorted(found, key=lambda best: (best.time_s, FAMILIES.index(best.family)))

    def _bound_s(self, best: FamilyBest) -> float:
        """A lower bound on the step seconds of a family, by those of its candidates, its plan, and its
        own search.
        """
        own = map(_least_of, self._outcomes(best.family))
        return min(best.time_s, max(best.bound_s, min(own)))

    def _outcomes(self, family: str) -> Iterator[Mapping[str, Any]]:
        """What the search knows of each candidate of a family."""
        for candidate, outcome in zip(self.candidates, self.outcomes, strict=True):
            if family_of(candidate) == family:
                yield outcome

    def _listed(self, best: FamilyBest) -> Mapping[str, Any] | None:
        """The outcome of the fastest plan that the search has of a family, if it is faster than the
        best that was found after it. The time may be over before that one is solved again.
        """
        solved = [one for one in self._outcomes(best.family) if one["time_s"]]
        first = min(solved, key=lambda one: one["time_s"], default=None)
        return first if first and first["time_s"] < (1 - _ROUNDING) * best.time_s else None

    def _find(self, families: Sequence[str], work: Callable[[str], FamilyBest]) -> None:
        """Keeps the result of `work` on each of `families`, several at once in helper processes.
        Results of one that dies are left out.
        """
        team, waiting = Team(self.tell, stuck_s=self.stuck_s), list(families)
        try:
            while waiting:
                is_late = time.perf_counter() >= self.until
                if not is_late and len(waiting) > 1 and len(team.helpers) < self.processes - 1:
                    family = waiting.pop()
                    team.call(FAMILIES.index(family), lambda *_, own=family: work(own))
                else:
                    family = waiting.pop(0)
                    self.known[family] = work(family)
                self._hear(team, None)
            self._hear(team, min(self.until, time.perf_counter() + _ALONE_S))
        finally:
            team.dismiss()

    def _hear(self, team: Team, until: float | None) -> None:
        """Keeps the results of helpers that are done. `until` is as for `Team.results`."""
        for number, _, best in team.results(until):
            if best is not None:
                self.known[FAMILIES[number]] = best

    def _best(self, family: str) -> FamilyBest:
        """The best of the plans of a family that are promising."""
        common, others = self._parts(family)
        count = len(common) + len(others)
        if time.perf_counter() >= self.until:
            return FamilyBest(family, count, 0, None, None, cut=True)
        best, solved = _best_of(self.restager, self.until, common, others)
        is_cut = time.perf_counter() >= self.until
        return FamilyBest(family, count, solved, _plan_of(best), best, is_cut)

    def _searched(self, family: str, end: float) -> FamilyBest:
        """The best plan of a family with a lower bound on all of them, after a search of its own. It
        ends by `end`, by `time.perf_counter()`.
        """
        known = self.known.get(family) or self._best(family)
        turns = sorted(
            (min(_least_of(self.outcomes[number]) for number in numbers), place)
            for place, numbers in enumerate(self.groups)
            if family_of(self.candidates[numbers[0]]) == family
        )
        best, least_s, solved = known.staged, known.time_s, known.solved
        for number, (bound_s, place) in enumerate(turns):
            within_s = known.time_s if best is None else best.time_s
            near_s = (1 - NEAR) * within_s
            if bound_s >= near_s or number >= BOUNDED:
                least_s = min(least_s, bound_s)
                break
            part = parts_of([self.candidates[own] for own in self.groups[place]])
            try:
                with stops_at(end):
                    check_time()
                    solver = self.restager.solver(part)
                    part_s, _ = solver.raise_bounds(within_s)
                    if part_s < near_s:
                        found, part_s = self.restager.solved(part, solver, within_s, end)
                        best, solved = found or best, solved + 1
            except TimeIsOver:
                least_s = min(least_s, bound_s)
                break
            least_s = min(least_s, max(part_s, bound_s))
        plan = known.plan if best is known.staged else _plan_of(best)
        return replace(known, plan=plan, staged=best, solved=solved, bound_s=least_s)

    def _parts(self, family: str) -> tuple[list[Part], list[Part]]:
        """(the plans of a family that recipes use, all others), the most promising candidates
        first.
        """
        turns: tuple[list[tuple[float, int]], ...] = [], []
        for place, numbers in enumerate(self.groups):
            if family_of(self.candidates[numbers[0]]) == family:
                is_other = set(numbers).isdisjoint(self.likely)
                turns[is_other].append((self.glances_s[numbers[0]], place))
        common, others = (
            [parts_of([self.candidates[n] for n in self.groups[place]]) for _, place in sorted(of)]
            for of in turns
        )
        return common, others


def _least_of(outcome: Mapping[str, Any]) -> float:
    """The lower bound in seconds of an outcome; infinite if it is proved that no plan fits."""
    return inf if outcome["bound_s"] is None else outcome["bound_s"]


def _plan_of(best: Restaged | None) -> tuple[Candidate, Solution] | None:
    """The candidate of a plan with its solution; None without one."""
    return None if best is None else (best.candidate, best.staged.solution)


def simpler_of(
    others: Sequence[FamilyBest],
    searched: SearchResult,
    tolerance: float,
    crosses: Callable[[MeshShape], bool] = lambda mesh: False,
) -> Restaged | None:
    """The simplest of the plans of other families that are within `tolerance` of the fastest plan
    found (as `Preference`), if it is simpler than the chosen plan. A search that ended by its
    time limit may have left one. A plan whose mesh `crosses` does not replace one whose mesh does
    not.
    """
    if searched.best is None or not tolerance:
        return None
    candidate, solution = searched.fastest or searched.best
    first = candidate_simplicity(candidate)

    def is_near(plan: Restaged) -> bool:
        allowed = first.allowed_more(candidate_simplicity(plan.candidate), tolerance)
        return plan.time_s <= (1 + allowed) * solution.time_s

    near = [one.staged for one in others if one.staged is not None and is_near(one.staged)]
    if not crosses(searched.best[0].mesh):
        near = [one for one in near if not crosses(one.candidate.mesh)]
    ranked = sorted(
        (candidate_simplicity(one.candidate), one.time_s, k) for k, one in enumerate(near)
    )
    own = candidate_simplicity(searched.best[0])
    return near[ranked[0][2]] if ranked and ranked[0][0] < own else None


def inside_of(
    others: Sequence[FamilyBest], searched: SearchResult, crosses: Callable[[MeshShape], bool]
) -> Restaged | None:
    """The fastest of the plans of other families whose mesh does not `crosses`, if that of the chosen
    plan does. It is within `INSIDE` of the fastest plan found. None if there is none.
    """
    if searched.best is None or not crosses(searched.best[0].mesh):
        return None
    limit_s = (1 + INSIDE) * (searched.fastest or searched.best)[1].time_s
    staged = [one.staged for one in others if one.staged is not None and one.time_s <= limit_s]
    inner = [one for one in staged if not crosses(one.candidate.mesh)]
    return min(inner, key=lambda one: one.time_s, default=None)


def same_layout_s(
    restager: Restager,
    groups: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    chosen: tuple[Candidate, Solution],
    until: float = inf,
) -> float | None:
    """Step seconds of the fastest plan found in the restager's memory with the mesh and schedule of
    `chosen`; those of `chosen` if none is faster. Micro-batch, ZeRO stage and recompute modes are
    free. `groups` are indices of `candidates` that are solved together. None if that was not known
    by `until`, by `time.perf_counter()`.
    """
    if time.perf_counter() >= until:
        return None
    candidate, solution = chosen
    (own,) = parts_of([candidate]).schedules
    parts = []
    for group in groups:
        alike = [candidates[number] for number in group]
        alike = [one for one in alike if (one.mesh, one.shard) == (candidate.mesh, candidate.shard)]
        if alike and own in (part := parts_of(alike)).schedules:
            parts.append(replace(part, schedules=(own,)))
    best, _ = fastest(restager, parts, solution.time_s, until)
    if best is None:
        return None if time.perf_counter() >= until else solution.time_s
    return best.time_s


def _best_of(
    restager: Restager, until: float, *several: Sequence[Part]
) -> tuple[Restaged | None, int]:
    """(the fastest plan that was found by `until` in the most promising parts of `several` lists, or
    None; how many were solved). If these have no plan that fits, the next ones are solved until one
    does.
    """
    turns = [_promising(restager, parts, until) for parts in several]
    sketched = [
        (likely_s, place, parts[number])
        for place, (turn, parts) in enumerate(zip(turns, several, strict=True))
        for likely_s, number in islice(turn, SKETCHED)
    ]
    sketched.sort(key=lambda one: one[:2])
    promising = [part for *_, part in sketched]
    best, _ = fastest(restager, promising[:STAGED], inf, until)
    solved = len(promising[:STAGED])
    later = (
        parts[number] for turn, parts in zip(turns, several, strict=True) for _, number in turn
    )
    others = islice(chain(promising[STAGED:], later), IN_VAIN)
    while best is None and time.perf_counter() < until and (part := next(others, None)):
        best, _ = fastest(restager, [part], inf, until)
        solved += 1
    return best, solved


def _promising(
    restager: Restager, parts: Sequence[Part], until: float
) -> Iterator[tuple[float, int]]:
    """(estimated seconds, index) of each part whose parameters fit. If a micro-batch does not fit,
    larger ones of parts that hold the same are left out.
    """
    kinds = [tuple(candidate.holds for candidate in part.group) for part in parts]
    sizes = [part.group[0].micro_batch for part in parts]
    smallest: dict[Hashable, int] = {}
    for number, kind in enumerate(kinds):
        if kind not in smallest or sizes[number] < sizes[smallest[kind]]:
            smallest[kind] = number
    too_much: dict[Hashable, float] = {}

    def likely_s_of(number: int) -> float | None:
        """`likely_s` of a part; None if `until` is over."""
        try:
            with stops_at(until):
                check_time()
                return restager.likely_s(parts[number])
        except TimeIsOver:
            return None

    for number, kind in enumerate(kinds):
        if kind not in too_much:
            if (least_s := likely_s_of(smallest[kind])) is None:
                return
            too_much[kind] = 0 if least_s == inf else inf
        if sizes[number] >= too_much[kind]:
            continue
        if (likely_s := likely_s_of(number)) is None:
            return
        if likely_s == inf:
            too_much[kind] = min(too_much[kind], sizes[number])
            continue
        yield likely_s, number


_LISTED = ("mesh", "micro_batch", "num_microbatches", "zero", "shard", "recompute", "schedule",
           "stages_per_rank", "time_s", "memory_bytes")  # fmt: skip
"""What the data of a runner-up have of an outcome."""


def runner_up_data(best: FamilyBest) -> dict[str, Any]:
    """A runner-up as a dict for JSON: the family, the number of its `candidates` and of those that
    were `solved`, and whether it is `cut`. Then `bound_s`, a lower bound on all its plans, which is
    None if it is proved that none fits; choices, `time_s`, `memory_bytes` and `breakdown` of its
    best plan. These are None if no plan was found.
    """
    c, solution = best.plan or (None, None)
    known = {
        "family": best.family,
        "candidates": best.candidates,
        "solved": best.solved,
        "cut": best.cut,
        "bound_s": None if best.bound_s == inf else best.bound_s,
    }
    if best.listed is not None:
        return known | {name: best.listed[name] for name in _LISTED} | {"breakdown": None}
    return known | {
        "mesh": c and c.mesh.as_dict(),
        "micro_batch": c and c.micro_batch,
        "num_microbatches": c and c.num_microbatches,
        "zero": c and c.zero,
        "shard": c and c.shard,
        "recompute": c and c.recompute,
        "schedule": c and c.schedule,
        "stages_per_rank": c and c.stages_per_rank,
        "time_s": solution and solution.time_s,
        "memory_bytes": solution and solution.memory_bytes,
        "breakdown": solution and dict(solution.breakdown),
    }
