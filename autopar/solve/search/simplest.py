"""The simplest plan within a tolerance of the fastest.

Plans fall into classes of equal simplicity (`ir/simplicity.py`). Beginning with the simplest class,
every candidate whose lower bound is within the tolerance is bounded again, with only the plans of
the class, and solved. The first class with a plan has the answer: its fastest plan, or its fastest
one that leaves memory free. Classes after that are not looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf

from autopar.ir.mesh import MeshShape
from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.ir.simplicity import FREE_SHARE, INSIDE, UNSPLIT, Simplicity, simplicity_of
from autopar.ir.stop import TimeIsOver, check_time, stops_at
from autopar.solve.costs.candidate import MIXED, Candidate
from autopar.solve.costs.schedule import Schedule
from autopar.solve.search.restaging import Part, Restaged, Restager, parts_of
from autopar.solve.search.result import SearchResult, outcome_data

_SAME, _AS_FAST = 1e-6, 1e-3
"""A plan that is as simple as the fastest replaces it if it takes at most this fraction longer. It
makes equal requests give equal plans where several processes find equally fast ones. The second
applies to searches that ended with a gap.
"""

KEPT = "the fastest whose tensor parallelism does not cross nodes or PCIe"


@dataclass(frozen=True, slots=True)
class Offer:
    """Plans with one `simplicity` (`crowded` aside): a `part` of the candidates that are solved
    together and share out the same with ZeRO, those at `place`. `bound_s` is a lower bound on all
    plans of these candidates. `whole` has their plans in any recompute modes.
    """

    simplicity: Simplicity
    place: int
    bound_s: float
    part: Part
    whole: Part

    @property
    def key(self) -> tuple[int, tuple[Schedule, ...]]:
        """What offers that differ in recompute modes alone have in common."""
        return self.place, self.whole.schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Chooses the simplest plan within the fraction `tolerance` of the fastest, which is multiplied
    by `Simplicity.times_tolerance`. `memory_bytes` is the whole memory
    of a device (None: unlimited), of which the restager may take a part. No more plans are looked at
    from `until` on, by `time.perf_counter()`. `crosses(mesh)` says whether tensor parallelism is
    over slow links, and should not be.
    """

    restager: Restager
    tolerance: float
    memory_bytes: int | None
    until: float = inf
    crosses: Callable[[MeshShape], bool] = lambda mesh: False

    def chosen(
        self,
        found: SearchResult,
        groups: Sequence[Sequence[int]],
        candidates: Sequence[Candidate],
    ) -> SearchResult:
        """The result of a search with the preferred plan in the place of the fastest. Unchanged if
        there is no plan. `groups` are indices of `candidates` that are solved together.

        The preferred plan is the simplest within the tolerance. If its tensor parallelism crosses
        nodes, it is the simplest of those that do not, if one of them is within `INSIDE`. After a
        search that its time ended, these are looked for first, since little time is left.
        """
        if found.best is None or self.tolerance <= 0:
            return found
        inner = [group for group in groups if not self.crosses(candidates[group[0]].mesh)]
        across, is_cut = self.crosses(found.best[0].mesh), found.status != "optimal"
        if across and is_cut and (inside := self._inside(found, inner, candidates)):
            return inside
        simplest = self._simplest(found, groups, candidates)
        if simplest.best is None or not self.crosses(simplest.best[0].mesh):
            return simplest
        if not across:
            return self._simplest(found, inner, candidates)
        return (None if is_cut else self._inside(found, inner, candidates)) or simplest

    def _inside(
        self,
        found: SearchResult,
        inner: Sequence[Sequence[int]],
        candidates: Sequence[Candidate],
    ) -> SearchResult | None:
        """The result with the simplest plan of the groups `inner`, whose tensor parallelism stays on
        fast links. None if no such plan was found within `INSIDE` of the fastest.
        """
        assert found.best is not None
        limit_s = (1 + INSIDE) * found.best[1].time_s
        near = [
            (bound_s, parts_of([candidates[number] for number in group]))
            for group in _as_simple(inner, candidates)
            if 0 < (bound_s := _least_s(found, group)) < limit_s
        ]
        near.sort(key=lambda turn: turn[0])
        parts, best = [part for _, part in near], None
        for some in (parts[:1], parts[1:]):  # the first alone, where the time may end
            within_s = limit_s if best is None else best.time_s
            best = fastest(self.restager, some, within_s, self.until)[0] or best
        if best is None:
            return None
        inside = replace(with_plan(found, candidates, best, KEPT), fastest=None)
        simplest = self._simplest(inside, inner, candidates)
        if simplest.best is None or simplest.best[1].time_s > limit_s:
            simplest = inside
        if inside.best is not None and inside.best[1].time_s <= found.best[1].time_s:
            return simplest  # the search had not found the fastest
        return replace(simplest, fastest=found.best, tp_inside=True)

    def _simplest(
        self,
        found: SearchResult,
        groups: Sequence[Sequence[int]],
        candidates: Sequence[Candidate],
    ) -> SearchResult:
        """The result with the simplest plan within the tolerance of the plan that it has; arguments
        as for `chosen`.
        """
        assert found.best is not None
        candidate, solution = found.best
        own = candidate_simplicity(candidate, self._is_crowded(solution.memory_bytes))
        bare = replace(own, crowded=False)
        limit_s = partial(self._limit_s, bare, solution.time_s)
        most_s = (1 + UNSPLIT * self.tolerance) * solution.time_s
        offers, left = _near(found, groups, candidates, bare, most_s, limit_s)
        offers.sort(key=lambda offer: (offer.simplicity, offer.place))
        bounds_s: dict[tuple[int, tuple[Schedule, ...]], float] = {}
        limits_s: dict[tuple[int, tuple[Schedule, ...]], float] = {}  # of the offers of one key
        for offer in offers:
            longest_s = limit_s(offer.simplicity)
            limits_s[offer.key] = max(limits_s.get(offer.key, 0.0), longest_s)
        for simplicity, alike in groupby(offers, key=lambda offer: offer.simplicity):
            open_ = []
            for offer in alike:
                try:
                    with stops_at(self.until):
                        check_time()
                        known_s = self._bound_s(offer, limits_s[offer.key], bounds_s)
                        if known_s < limit_s(simplicity):
                            open_.append(offer)
                except TimeIsOver:
                    left.add(simplicity)
            is_own = simplicity == bare
            longest_s = limit_s(simplicity)
            within_s = (1 + self._share(found)) * solution.time_s if is_own else longest_s
            parts = [offer.part for offer in open_ if offer.bound_s <= within_s]
            best, unsettled = fastest(self.restager, parts, within_s, self.until)
            if is_own:
                best, unsettled = best if _is_better(best, found) else None, 0
            held = solution if is_own and best is None else best
            if held is not None and self._is_crowded(held.memory_bytes):
                best = self._roomier([offer.part for offer in open_], longest_s) or best
            if best is not None:
                simplest = with_plan(found, candidates, best, "the simplest")
                return replace(simplest, simpler_left=_below(left, simplicity))
            if unsettled:
                left.add(simplicity)
        return replace(found, simpler_left=_below(left, bare))

    def _limit_s(self, own: Simplicity, fastest_s: float, simpler: Simplicity) -> float:
        """The longest that a plan with the simplicity `simpler` may take, in seconds, if the fastest
        takes `fastest_s` and has the simplicity `own`.
        """
        return (1 + own.allowed_more(simpler, self.tolerance)) * fastest_s

    @staticmethod
    def _share(found: SearchResult) -> float:
        """The fraction by which a plan as simple as the fastest may take longer, to replace it."""
        return _SAME if found.status == "optimal" else _AS_FAST

    def _bound_s(
        self,
        offer: Offer,
        most_s: float,
        known: dict[tuple[int, tuple[Schedule, ...]], float],
    ) -> float:
        """A lower bound in seconds on the plans of an offer in any recompute modes, raised up to
        `most_s`. `known` is a cache, since several offers differ only in these modes.
        """
        if offer.key not in known:
            known[offer.key], _ = self.restager.solver(offer.whole).raise_bounds(most_s)
        return known[offer.key]

    def _is_crowded(self, peak_bytes: int) -> bool:
        whole = self.memory_bytes
        return whole is not None and peak_bytes > (1 - FREE_SHARE) * whole

    def _roomier(self, parts: Sequence[Part], limit_s: float) -> Restaged | None:
        """The fastest plan of `parts` that is not crowded and takes less than `limit_s`, if one was
        found.
        """
        if self.memory_bytes is None:
            return None
        room = int((1 - FREE_SHARE) * self.memory_bytes)
        roomier = replace(self.restager, capacity_bytes=room)
        best, _ = fastest(roomier, parts, limit_s, self.until)
        return best


def fastest(
    restager: Restager, parts: Sequence[Part], upper_bound_s: float, until: float = inf
) -> tuple[Restaged | None, int]:
    """(the fastest plan found in `parts` that takes less than `upper_bound_s`, or None; the number
    of parts without a plan whose bound does not rule one out). Lower bounds come first. From
    `until` on, by `time.perf_counter()`, no more parts are looked at.
    """
    waiting, late = [], 0
    for number, part in enumerate(parts):
        if time.perf_counter() >= until:
            late = len(parts) - number
            break
        try:
            with stops_at(until):
                solver = restager.solver(part)
                bound_s, _ = solver.raise_bounds(upper_bound_s)
        except TimeIsOver:
            late = len(parts) - number
            break
        if bound_s < upper_bound_s:
            waiting.append((bound_s, number, solver))
    best, unsettled = None, late
    for bound_s, number, solver in sorted(waiting, key=lambda turn: turn[:2]):
        if bound_s >= upper_bound_s:
            break
        if time.perf_counter() >= until:
            unsettled += 1
            continue
        try:
            with stops_at(until):
                found, bound_s = restager.solved(parts[number], solver, upper_bound_s, until)
        except TimeIsOver:
            unsettled += 1
            continue
        unsettled += found is None and bound_s < upper_bound_s
        if found is not None:
            best, upper_bound_s = found, found.time_s
    return best, unsettled


def _below(kinds: Iterable[Simplicity], simplicity: Simplicity) -> tuple[Simplicity, ...]:
    """Those of `kinds` that are simpler than `simplicity`, in order."""
    return tuple(sorted(kind for kind in kinds if kind < simplicity))


def _is_better(best: Restaged | None, found: SearchResult) -> bool:
    """Whether a plan as simple as the fastest of a search is to replace it: always after a gap, and
    otherwise if it needs no more memory.
    """
    if best is None or found.best is None:
        return False
    return found.status != "optimal" or best.memory_bytes <= found.best[1].memory_bytes


def _as_simple(
    groups: Sequence[Sequence[int]], candidates: Sequence[Candidate]
) -> Iterator[Sequence[int]]:
    """The groups, parted by what counts in a plan's simplicity: whether ZeRO gathers parameters, and
    the size of its groups.
    """
    for group in groups:
        sharing: dict[tuple[bool, int], list[int]] = {}
        for number in group:
            one = candidates[number]
            sharing.setdefault((one.zero == 3, one.shard), []).append(number)
        yield from sharing.values()


def _near(
    found: SearchResult,
    groups: Sequence[Sequence[int]],
    candidates: Sequence[Candidate],
    own: Simplicity,
    most_s: float,
    limit_s: Callable[[Simplicity], float],
) -> tuple[list[Offer], set[Simplicity]]:
    """(the offers that are at most as complex as `own`; kinds of plans for whose candidates the
    search had no time). By its bounds, an offer may take at most `limit_s`. `most_s` is the highest
    of these limits.
    """
    offers: list[Offer] = []
    left: set[Simplicity] = set()
    seen: set[Hashable] = set()
    proved = found.status == "optimal"
    for place, group in enumerate(_as_simple(groups, candidates)):
        if (least_s := _least_s(found, group)) > most_s:
            continue
        # a search that had no time for candidates has the bound 0
        is_left, kind = not proved and least_s <= 0, _kind_of(candidates[group[0]])
        if is_left and kind in seen:
            continue
        of_group = _offers(place, [candidates[n] for n in group], least_s)
        near = [
            offer
            for offer in of_group
            if offer.simplicity <= own and least_s <= limit_s(offer.simplicity)
        ]
        if is_left:
            seen.add(kind)
            left |= {offer.simplicity for offer in near}
        else:
            offers += near
    return offers, left


def _offers(place: int, group: Sequence[Candidate], bound_s: float) -> Iterator[Offer]:
    """The plans of candidates that are solved together, by simplicity: with one recompute mode in
    all layers or with several, under each kind of schedule.
    """
    whole, first = parts_of(group), group[0]

    def simplicity(mode: str, schedule: Schedule) -> Simplicity:
        name = schedule.name if schedule.ranks > 1 else "none"
        return simplicity_of(
            first.mesh, first.zero, first.shard, schedule.stages_per_rank, mode, name
        )

    kind = partial(simplicity, "none")
    for _, alike in groupby(sorted(whole.schedules, key=kind), key=kind):
        schedules = tuple(alike)
        several = [("mixed", whole.modes)] if len(whole.modes) > 1 else []
        for name, modes in [*((mode, (mode,)) for mode in whole.modes), *several]:
            part = Part(whole.group, modes, schedules)
            all_modes = Part(whole.group, whole.modes, schedules)
            yield Offer(simplicity(name, schedules[0]), place, bound_s, part, all_modes)


def _kind_of(candidate: Candidate) -> Hashable:
    """What decides the simplicities of the plans of a candidate."""
    schedules = candidate.schedules or ((candidate.schedule, candidate.stages_per_rank),)
    return candidate.mesh, candidate.zero == 3, candidate.shard, schedules, candidate.modes


def candidate_simplicity(candidate: Candidate, is_crowded: bool = False) -> Simplicity:
    """The simplicity of a candidate with its choices."""
    return simplicity_of(
        candidate.mesh,
        candidate.zero,
        candidate.shard,
        candidate.stages_per_rank,
        candidate.recompute,
        candidate.schedule,
        is_crowded,
    )


def _least_s(found: SearchResult, group: Sequence[int]) -> float:
    """The lower bound in seconds that the search has for candidates that are solved together."""
    bounds = [found.outcomes[number]["bound_s"] for number in group]
    return min((bound for bound in bounds if bound is not None), default=float("inf"))


def with_plan(
    found: SearchResult, candidates: Sequence[Candidate], best: Restaged, reason: str
) -> SearchResult:
    """The result with `best` as its plan, for a `reason` in words. The fastest plan becomes one
    that was solved.
    """
    if found.best is None:
        raise ValueError("a search without a plan has no simpler one")
    outcomes = list(found.outcomes)
    for number, known in enumerate(outcomes):
        if known["outcome"] == "chosen":
            outcomes[number] = known | {"outcome": "solved"}
    (model,) = best.staged.models
    for number, candidate in enumerate(candidates):
        if _is_of(best.candidate, candidate):
            known = outcomes[number]
            # a search that time cut short stays one
            why = OUT_OF_TIME if known["reason"] == OUT_OF_TIME else reason
            outcomes[number] = outcome_data(
                best.candidate, best.staged.solution, "chosen", known["bound_s"] or 0.0, why
            )
    return replace(
        found,
        best=(best.candidate, best.staged.solution),
        model=model.model,
        origin=model.origin,
        groups=(),
        outcomes=tuple(outcomes),
        fastest=found.best,
    )


def _is_of(chosen: Candidate, candidate: Candidate) -> bool:
    """Whether a candidate with its choices is one of the plans of `candidate`."""
    same = (chosen.parameters, chosen.micro_batch) == (candidate.parameters, candidate.micro_batch)
    return same and candidate.recompute in (MIXED, chosen.recompute)
