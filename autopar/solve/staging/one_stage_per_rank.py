"""The best cut of a row of units into one stage a rank.

Every way to cut is looked at.  For each run of units the least recomputation that fits is known beforehand: the memory of a rank is that of
its stage, and no step gets shorter when a stage takes longer.  Cuts are found stage by stage, first to last: of all ways to give the first
units to the first stages only those are kept than which none is better in everything that the rest of the step depends on.  What is
minimised is the longest of some paths, which no step is shorter than:

    GPipe          sum forward + (m - 1) max forward + sum backward + (m - 1) max backward       (exact)
    1F1B and zero  for each rank r: the first forward until it gets there, all that r computes, the last backward from there to rank 0
    bubble         for each rank r: the first forward to the last rank and backward to r (or to rank 0, and the next forward from there to
                   r), then all that r computes but what it did before, then the last backward to rank 0
                   for each rank r: the first forward to the last rank and back to r, all that r computes up to its last forward, then that
                   micro-batch to the last rank and back to rank 0
    1F1B           where messages take time it may be longer to go, instead of all that r computes, to and fro through r and the next one
                   or two ranks, or through the first ranks up to r

A path of 1F1B has whole backwards.  One of zero bubble has, of gradients of weights, those of r that come before its last backward, and of
rank 0 the last; or all of r's, but then it ends there, since others may still be computing theirs.  The shortest message is added for each
hop, and the longest work once a step.  The schedules' closed form then prices the best of them, or all where they are few; CP-SAT, asked
for the same, took seconds for 16 stages and proved nothing for 64.

Where ranks have devices of several kinds each has a row of its own, and what forwards take so far depends on how the units were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce
from itertools import combinations, pairwise
from math import comb, inf
from typing import NamedTuple

import numpy as np
from autopar_cost_models import held_moments, late_moments

from autopar.solve.costs.pareto import undominated
from autopar.solve.costs.pipeline_cost import is_parted, stages_of
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.staging.staged_time import is_monotone, kinds_of, staged_step_s
from autopar.solve.staging.unit_row import Row

_MOST_RUNS = 20_000
"""Runs of units to choose from; where there are more, those furthest from an even deal are left out."""
_FEW = 200
"""Up to so many cuts all are priced."""
_LONGEST_LOOP = 3
"""Ranks of a loop of 1F1B that may begin anywhere: with 4 cuts take three times as long to find."""
_PRICED = 16
"""How many of the cuts whose longest path is shortest the closed form prices."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A stage that could be: units `first` to `end` on a rank, with the least recomputation that fits; or many, each number an array."""

    stage: int
    first: int | np.ndarray
    end: int | np.ndarray
    forward_s: float | np.ndarray
    backward_s: float | np.ndarray
    weight_s: float | np.ndarray  # part of `backward_s`
    total_s: float | np.ndarray  # forward and backward
    step_s: float | np.ndarray
    least_s: (
        float | np.ndarray
    )  # of a micro-batch, with the share of what it takes once a step (`Row.least`)
    amounts: np.ndarray | None
    room: tuple[
        int, float, int
    ]  # micro-batches held, bytes of the rank, and micro-batches that wait, as `Row.least` has them


_NUMBERS = ("first", "end", "forward_s", "backward_s", "weight_s", "total_s", "step_s", "least_s")


def staging_of_ranks(
    rows: Sequence[Row],
    schedule: Schedule,
    capacities: Sequence[int | None],
    upper_bound_s: float = inf,
) -> Staging | float:
    """`staging.best_staging` with one stage a rank, where `rows` has what units cost on each rank, and `capacities` the bytes of each."""
    base, limits = rows[0], [inf if capacity is None else capacity for capacity in capacities]
    if len(base) < schedule.ranks:
        return inf
    fixed_s = base.model.fixed_s
    runs, bound_s, is_free = _cut_freely(rows, schedule, limits, upper_bound_s - fixed_s)
    if runs is None:
        return bound_s + fixed_s
    sizes = [run.end - run.first for run in runs]
    return Staging(
        stages_of(sizes, base.blocks, len(base.model.segments)),
        _modes(rows, runs),
        bound_s + fixed_s,
        is_free,
    )


def _modes(rows: Sequence[Row], runs: Sequence[_Run]) -> tuple[str, ...]:
    """The mode of each segment: the first blocks of a stage recompute most."""
    found = [rows[0].modes[0]] * len(rows[0].model.segments)
    for run in runs:
        row, left = rows[run.stage], run.amounts.copy()
        for unit in range(run.first, run.end):
            kind = row.kind[unit]
            mode = max(np.flatnonzero(left[kind]))
            left[kind, mode] -= 1
            found[row.blocks[unit]] = row.modes[mode]
    return tuple(found)


def _cut_freely(
    rows: Sequence[Row], schedule: Schedule, capacities: Sequence[float], upper_bound_s: float
) -> tuple[list[_Run] | None, float, bool]:
    """(the runs of the stages, a bound of the time of all stagings, whether memory left nothing out)."""
    ranks, units, micro, limited = schedule.ranks, len(rows[0]), rows[0].micro_batches, []
    held, late = [1], [0]
    if ranks > 1:
        held = [most for ((most,),) in held_moments(schedule.name, ranks, 1, micro)]
        late = [most for (((most,), _),) in late_moments(schedule.name, ranks, 1, micro)]

    def run(stage: int, first: int, end: int) -> _Run | None:
        row, room = (
            rows[stage],
            (held[stage], capacities[stage], late[stage] * is_parted(schedule.name, stage)),
        )
        if (found := row.least(first, end, *room)) is None:
            limited.append(stage)
            return None
        more_s, amounts, least_s = found
        forward_s, backward_s, weight_s = (
            x[end] - x[first] for x in (row.at.forward_s, row.at.backward_s, row.at.weight_s)
        )
        if more_s:
            limited.append(stage)
        total_s, once_s = (
            max(forward_s + backward_s + more_s, row.total_s(first, end)),
            row.once_s([(first, end)]),
        )
        weight_s = min(weight_s, backward_s)
        return _Run(
            stage,
            first,
            end,
            forward_s,
            backward_s + more_s,
            weight_s,
            total_s,
            once_s,
            least_s,
            amounts,
            room,
        )

    if ranks == 1:
        if (found := run(0, 0, units)) is None:
            return None, inf, False
        runs, _, bound_s = _best_ways(rows, schedule, [found])
        return runs, bound_s, not limited
    if comb(units - 1, ranks - 1) <= _FEW:
        return *_all_cuts(rows, schedule, run, upper_bound_s), not limited
    even, even_s = None, inf
    for ends in _first_ends(rows):
        tried = [run(stage, first, end) for stage, (first, end) in enumerate(pairwise([0, *ends]))]
        if None not in tried:
            tried, tried_s, _ = _best_ways(rows, schedule, tried)
            even, even_s = min((even, even_s), (tried, tried_s), key=lambda pair: pair[1])
    known = even if even_s < upper_bound_s else None
    limited.clear()
    runs, complete = _runs(rows, schedule, run, min(even_s, upper_bound_s))
    if not runs:
        return known, even_s if known else (upper_bound_s if complete else 0.0), not limited
    chosen, bound_s = _choose(rows, schedule, runs, complete, known, min(even_s, upper_bound_s))
    return chosen, bound_s, not limited


def _first_ends(rows: Sequence[Row]) -> list[tuple[int, ...]]:
    """Where stages may end, to begin with: evenly; where devices differ also by their speed, and in between, as memory may ask for."""
    units, ranks = len(rows[0]), len(rows)
    if len({id(row) for row in rows}) == 1:
        return [tuple(units * (stage + 1) // ranks for stage in range(ranks))]
    speeds = 1 / np.array([max(row.total_s(0, units), 1e-300) for row in rows])
    found = []
    for part in (1.0, 0.75, 0.5, 0.25, 0.0):
        more = np.round(
            np.cumsum(part * speeds / speeds.sum() + (1 - part) / ranks) * (units - ranks)
        )  # besides one for each
        found.append(tuple((more.astype(int) + np.arange(1, ranks + 1)).tolist()))
    return list(dict.fromkeys(found))


def _all_cuts(
    rows: Sequence[Row], schedule: Schedule, run, upper_bound_s: float
) -> tuple[list[_Run] | None, float]:
    """The best of all cuts, each priced, if it takes less than `upper_bound_s`; a bound."""
    run, units, best, best_s, found, fits = cache(run), len(rows[0]), None, upper_bound_s, [], False
    for inner in combinations(range(1, units), schedule.ranks - 1):
        ends = list(pairwise((0, *inner, units)))
        longest_s = max(row.total_s(*of_rank) for row, of_rank in zip(rows, ends, strict=True))
        if rows[0].micro_batches * longest_s >= upper_bound_s:
            fits = True  # for all that was looked at
            continue
        runs = [run(stage, first, end) for stage, (first, end) in enumerate(ends)]
        if None not in runs:
            found.append((_least_step_s(rows, schedule, runs), runs))
    bound_s = inf
    for least_s, runs in sorted(found, key=lambda pair: pair[0]):
        if least_s >= best_s:
            break
        runs, found_s, of_runs_s = _best_ways(rows, schedule, runs)
        bound_s = min(bound_s, of_runs_s)
        if found_s < best_s:
            best, best_s = runs, found_s
    if found and not is_monotone(rows[0], schedule):
        return best, min(best_s, min(least_s for least_s, _ in found))
    return best, min(best_s, bound_s) if found or fits else inf


def _runs(rows: Sequence[Row], schedule: Schedule, run, known_s: float) -> tuple[list[_Run], bool]:
    """The runs that a staging faster than `known_s` can have, and whether they are all there."""
    ranks, units, micro = schedule.ranks, len(rows[0]), rows[0].micro_batches
    slack_s = known_s / micro * (1 + 1e-9)  # what a stage may take
    work_of = {id(row): row.forward_s + row.backward_s for row in kinds_of(rows)}
    longest_of = {key: _longest(work_s, slack_s) for key, work_s in work_of.items()}
    longest = [longest_of[id(row)] for row in rows]
    starts, found, complete = {0}, [], True
    for stage, row in enumerate(rows):
        work_s, room = work_of[id(row)].tolist(), max(_MOST_RUNS // ranks, units)
        later = sum(longest[stage + 1 :])
        even = units * (stage + 1) / ranks
        mine = []
        for first in sorted(starts):
            latest = units if stage == ranks - 1 else units - (ranks - 1 - stage)
            for end in range(max(first + 1, units - later), latest + 1):
                if work_s[end] - work_s[first] > slack_s:
                    break
                if (one := run(stage, first, end)) is None:
                    break
                if max(one.total_s, one.least_s) <= slack_s:
                    mine.append(one)
        if len(mine) > room:
            complete = False
            mine = sorted(
                mine, key=lambda one: abs(one.end - even) + abs(one.first - units * stage / ranks)
            )[:room]
        found += mine
        starts = {one.end for one in mine}
    return found, complete


def _longest(work_s: np.ndarray, slack_s: float) -> int:
    """How many units a stage can have that takes no more than `slack_s`; `work_s`: of the units before each."""
    return next(
        (n for n in range(len(work_s) - 1, 0, -1) if np.min(work_s[n:] - work_s[:-n]) <= slack_s), 0
    )


_LOOPS = [(ranks, within) for ranks in range(2, _LONGEST_LOOP + 1) for within in range(1, ranks)]
"""Loops that are not closed yet: through so many ranks, of which so many are there."""


class _Cut(NamedTuple):
    """The first units in the first stages, in seconds, or many such cuts, each field an array: `work_s` all backward so far (GPipe: all
    work), `reached_s` the longest path that turns at one of these ranks, `turned_s` the longest that turns at the last, as far as these
    ranks are on it (GPipe: slowest forward), `slowest_s` the slowest backward of GPipe, of others the longest that turns at the last rank
    twice, as far as it is known, `step_s` the longest work once a step; `least_s` and `left_s` are paths as `reached_s` and `turned_s`
    through ranks that take the least with what they take once a step.  `shift_s`: what the forwards so far take more than these units
    would on the last of the ranks.  `first_s`: a micro-batch on the first rank.  `loops_s`: of 1F1B (`_LOOPS`) the paths that loop through
    the last of these ranks and others to come, without what those take."""

    work_s: float | np.ndarray
    reached_s: float | np.ndarray
    turned_s: float | np.ndarray
    slowest_s: float | np.ndarray
    step_s: float | np.ndarray
    least_s: float | np.ndarray
    left_s: float | np.ndarray
    shift_s: float | np.ndarray
    first_s: float | np.ndarray
    loops_s: Sequence[float | np.ndarray]

    def numbers(self) -> np.ndarray:
        """[field, cut]: all that tells cuts apart."""
        *fields, loops_s = self
        return np.stack(np.broadcast_arrays(*fields, *loops_s))


_NO_CUT = _Cut(0.0, 0.0, -inf, 0.0, 0.0, 0.0, -inf, 0.0, 0.0, [-inf] * len(_LOOPS))


def _cut_of(numbers: np.ndarray) -> _Cut:
    """Of `_Cut.numbers`."""
    fields, loops_s = np.split(numbers, [len(_Cut._fields) - 1])
    return _Cut(*fields, loops_s)


def _choose(
    rows: Sequence[Row],
    schedule: Schedule,
    runs: list[_Run],
    complete: bool,
    known: list[_Run] | None,
    known_s: float,
) -> tuple[list[_Run] | None, float]:
    """The runs of the least step time, if that is less than `known_s`; else `known`.  With a bound of all stagings."""
    row, kinds = rows[-1], kinds_of(rows)
    of_stage = [[run for run in runs if run.stage == stage] for stage in range(schedule.ranks)]
    stages = [
        (min(run.total_s for run in mine), max(run.total_s for run in mine)) if mine else (0.0, 0.0)
        for mine in of_stage
    ]
    cuts, ends, steps = (
        _NO_CUT.numbers()[:, None],
        np.zeros(1, dtype=int),
        [],
    )  # `ends`, ascending: where each cut does
    for mine in of_stage:
        if not mine:
            return known, known_s if complete else min(known_s, _least_alone_s(rows, schedule))
        column = _together(mine)
        place, after = (
            np.searchsorted(ends, column.first),
            np.searchsorted(ends, column.first, "right"),
        )
        run_of = np.repeat(np.arange(len(mine)), after - place)
        cut_of = np.concatenate([np.arange(*span) for span in zip(place, after, strict=True)])
        picked = _picked(column, run_of)
        longer = _extended(rows, kinds, schedule, _cut_of(cuts[:, cut_of]), picked)
        longer = longer._replace(
            loops_s=_open_loops(longer, row.micro_batches, stages[len(steps) + 1 :])
        )
        cuts = longer.numbers()
        near, end_of = np.flatnonzero(_least_path_s(row, schedule, longer) < known_s), picked.end
        near = near[np.argsort(end_of[near], kind="stable")]
        same_end = np.split(near, np.flatnonzero(np.diff(end_of[near])) + 1)
        left = np.concatenate([of[undominated(cuts[:, of].T)] for of in same_end])
        cuts, ends = cuts[:, left], end_of[left]
        steps.append((run_of[left], cut_of[left]))
    paths_s = _path_s(row, schedule, _cut_of(cuts))
    final = np.argsort(paths_s, kind="stable")
    bound_s = min(float(paths_s[final[0]]), known_s) if len(final) else known_s
    best, best_s = known, known_s
    for cut in final[:_PRICED].tolist():
        if paths_s[cut] >= best_s:
            break
        found = []
        for mine, (run_of, cut_of) in zip(reversed(of_stage), reversed(steps), strict=True):
            found.append(mine[run_of[cut]])
            cut = cut_of[cut]
        found.reverse()
        found, found_s, _ = _best_ways(rows, schedule, found)
        if found_s < best_s:
            best, best_s = found, found_s
    return best, bound_s if complete else min(bound_s, _least_alone_s(rows, schedule))


def _least_alone_s(rows: Sequence[Row], schedule: Schedule) -> float:
    """What all the work takes at least, shared out evenly."""
    return rows[0].micro_batches * min(row.total_s(0, len(row)) for row in rows) / schedule.ranks


def _together(runs: Sequence[_Run]) -> _Run:
    """The runs of one stage, each number an array."""
    return replace(
        runs[0],
        amounts=None,
        **{name: np.array([getattr(run, name) for run in runs]) for name in _NUMBERS},
    )


def _picked(runs: _Run, chosen: np.ndarray) -> _Run:
    """Of runs that are `_together` some, maybe several times."""
    return replace(runs, **{name: getattr(runs, name)[chosen] for name in _NUMBERS})


def _extended(
    rows: Sequence[Row], kinds: Sequence[Row], schedule: Schedule, cut: _Cut, run: _Run
) -> _Cut:
    """One more stage; `kinds`: the rows that differ."""
    row, before = rows[run.stage], rows[max(run.stage - 1, 0)]
    micro, rank, last = row.micro_batches, run.stage, schedule.ranks - 1
    step_s = np.maximum(cut.step_s, run.step_s)
    if not schedule.alternates:
        slowest = np.maximum(cut.turned_s, run.forward_s), np.maximum(cut.slowest_s, run.backward_s)
        least_s = 0.0
        if row.lines:
            later_s = reduce(np.minimum, [kind.work_s[-1] - kind.work_s[run.end] for kind in kinds])
            least_s = np.maximum(cut.least_s, cut.work_s + later_s + micro * run.least_s)
        return _Cut(
            cut.work_s + run.total_s, 0.0, *slowest, step_s, least_s, 0.0, 0.0, 0.0, cut.loops_s
        )
    shift_s = (
        cut.shift_s
        if before is row
        else cut.shift_s + before.forward_s[run.first] - row.forward_s[run.first]
    )
    forward_s, ahead = (
        shift_s + row.forward_s[run.first],
        min(last - rank + 1, micro),
    )  # of stages before; before the first backward
    parts = schedule.splits_backward
    back_s = run.backward_s - run.weight_s if parts else run.backward_s
    weights = max(micro - 1 - rank, 0) if parts else micro  # before the last backward
    reached_s = (
        cut.work_s + forward_s + _worked_s(run, micro, micro, weights) + 2 * rank * row.hop_s
    )
    turned_s = cut.work_s + _worked_s(run, micro - ahead, micro, weights) + 2 * last * row.hop_s
    if parts:
        reached_s = np.maximum(reached_s, forward_s + micro * run.total_s + rank * row.hop_s)
        turned_s = np.maximum(
            turned_s, _worked_s(run, micro - ahead, micro, micro) + (2 * last - rank) * row.hop_s
        )
    if rank and micro > schedule.ranks:  # by rank 0
        left = micro - rank
        again_s = (
            _worked_s(run, micro - schedule.ranks, left, left - 2 if parts else left)
            + 2 * (last + rank) * row.hop_s
        )
        turned_s = np.maximum(turned_s, 2 * cut.work_s + forward_s + again_s)
    work_s, reached_s = (
        cut.work_s + (back_s if rank else run.backward_s),
        np.maximum(cut.reached_s, reached_s),
    )
    turned_s = np.maximum(cut.turned_s + back_s, turned_s)
    slowest_s, *loops = _twice(row, schedule, cut, run, forward_s)
    if not row.lines:
        return _Cut(work_s, reached_s, turned_s, slowest_s, step_s, 0.0, -inf, shift_s, *loops)
    through_s = reduce(np.minimum, [kind.work_s[run.first] for kind in kinds]) if not parts else 0.0
    before_s = 0.0 if parts else cut.work_s
    least_s = np.maximum(before_s + forward_s, through_s) + micro * run.least_s
    own_s = (
        row.backward_s[run.end] - row.backward_s[run.first]
    )  # a backward takes so much at least, which all least times hold
    left_s = before_s + (micro - ahead) * run.least_s + ahead * own_s
    left_s = np.maximum(cut.left_s + back_s, left_s)
    return _Cut(
        work_s,
        reached_s,
        turned_s,
        slowest_s,
        step_s,
        np.maximum(cut.least_s, least_s),
        left_s,
        shift_s,
        *loops,
    )


def _worked_s(run: _Run, forwards: int, backwards: int, weights: int) -> float | np.ndarray:
    """So many forwards and backwards of a stage, so many of these with gradients of weights: no less where forward and backward together,
    or any part of them but gradients of weights, take longer."""
    whole = min(forwards, weights)
    parts_s = (forwards - whole) * run.forward_s + (weights - whole) * run.backward_s
    return whole * run.total_s + parts_s + (backwards - weights) * (run.backward_s - run.weight_s)


def _twice(
    row: Row, schedule: Schedule, cut: _Cut, run: _Run, forward_s: float | np.ndarray
) -> tuple[float | np.ndarray, float | np.ndarray, Sequence[float | np.ndarray]]:
    """(`slowest_s`, `first_s`, `loops_s`) with one more stage; `forward_s`: of the stages before.

    Between the first backward of a rank and its last forward the path works there.  Under 1F1B it may loop: a micro-batch goes on through
    some ranks and comes back, once for as many micro-batches as these are.  Under zero bubble it would gain only where a message takes
    longer than gradients of weights.
    """
    micro, rank, last = row.micro_batches, run.stage, schedule.ranks - 1
    parts, first_s = schedule.splits_backward, cut.first_s if rank else run.total_s
    between = micro - 2 - last + rank  # micro-batches of this rank; the one before has one less
    if between < 0:
        return cut.slowest_s, 0.0 if parts else first_s, cut.loops_s
    ways_s = cut.work_s + forward_s + 2 * (2 * last - rank) * row.hop_s
    if parts:
        weights = max(between + 1 - rank, 0) + (
            rank == 0
        )  # the last backward of the first rank has its own after it
        twice_s = ways_s + _worked_s(run, between + 2, between + 2, weights)
        return np.maximum(cut.slowest_s + _worked_s(run, 2, 2, 0), twice_s), 0.0, cut.loops_s
    twice_s = ways_s + 2 * run.total_s
    found, loops_s = [cut.slowest_s + 2 * run.total_s, twice_s + between * run.total_s], []
    if between > rank > 0:  # through all ranks so far
        whole_s = cut.work_s + run.backward_s + forward_s + run.forward_s
        times, rest = divmod(between - rank, rank + 1)
        found.append(
            (times + 2) * whole_s + rest * first_s + (4 * last + 2 * times * rank) * row.hop_s
        )
    known_s = dict(zip(_LOOPS, cut.loops_s, strict=True))
    for ranks, within in _LOOPS:
        times, rest = divmod(between - within + 1, ranks)
        if within == 1:
            loops_s.append(
                twice_s + (times + rest) * run.total_s + 2 * times * (ranks - 1) * row.hop_s
            )
        else:
            loops_s.append(known_s[ranks, within - 1] + (times + 2) * run.total_s)
        if within == ranks - 1:
            times = (between - within) // ranks
            found.append(known_s[ranks, within] + (times + 2) * run.total_s)
    return reduce(np.maximum, found), first_s, loops_s


def _open_loops(
    cut: _Cut, micro_batches: int, later: Sequence[tuple[float, float]]
) -> list[float | np.ndarray]:
    """`loops_s` of cuts, but for those that cannot become the longest path; `later`: of each stage to come what it takes, from so many
    seconds to so many."""
    found, between = [], micro_batches - 2 - len(later)  # as in `_twice`
    for (ranks, within), loop_s in zip(_LOOPS, cut.loops_s, strict=True):
        missing = later[: ranks - within]
        if within + len(missing) < ranks:
            found.append(-inf)
            continue
        times = (between - within + 1) // ranks
        most_s = loop_s + (times + 2) * sum(most for _, most in missing)
        found.append(
            np.where(most_s > cut.slowest_s + 2 * sum(least for least, _ in missing), loop_s, -inf)
        )
    return found


def _path_s(row: Row, schedule: Schedule, cut: _Cut) -> float | np.ndarray:
    """The longest path through all stages, of which the last has `row`."""
    if not schedule.alternates:
        slowest_s = (row.micro_batches - 1) * (cut.turned_s + cut.slowest_s)
        return np.maximum(
            cut.work_s + slowest_s + 2 * (schedule.ranks - 1) * row.hop_s + cut.step_s, cut.least_s
        )
    whole_s = cut.shift_s + row.forward_s[-1]  # all forwards of a micro-batch
    paths_s = (
        np.maximum(np.maximum(cut.reached_s, whole_s + cut.turned_s), cut.slowest_s) + cut.step_s
    )
    return np.maximum(np.maximum(paths_s, cut.least_s), whole_s + cut.left_s)


def _least_path_s(row: Row, schedule: Schedule, cut: _Cut) -> float | np.ndarray:
    """The longest path however the rest is cut, at least."""
    if not schedule.alternates:
        return _path_s(row, schedule, cut)
    return np.maximum(np.maximum(cut.reached_s, cut.slowest_s) + cut.step_s, cut.least_s)


def _best_ways(
    rows: Sequence[Row], schedule: Schedule, runs: Sequence[_Run]
) -> tuple[list[_Run], float, float]:
    """The ways to recompute with which a step of these stages is shortest, its seconds, and a bound of those of all ways that fit.

    A longer backward hides more of what is done once a step, whose longest counts: for each length of that every rank recomputes as little
    as it must.  Of rows that are bounds the least once a step is asked.
    """
    ends, ranks = [(run.first, run.end) for run in runs], range(len(runs))
    own = [rows[run.stage].at.backward_s for run in runs]
    more_s = [
        run.backward_s - (backward_s[end] - backward_s[first])
        for run, backward_s, (first, end) in zip(runs, own, ends, strict=True)
    ]
    path_s = _least_step_s(rows, schedule, runs)
    bound_s = max(staged_step_s(rows, schedule, ends, more_s), path_s)
    if rows[0].is_bound:
        return list(runs), bound_s, bound_s
    ways = [rows[run.stage].ways(run.first, run.end, *run.room) for run in runs]
    least_s = [rows[run.stage].once_s([span]) for run, span in zip(runs, ends, strict=True)]
    place, best, best_s = [0 for _ in ranks], [0 for _ in ranks], inf
    while True:
        more_once_s = [float(ways[rank].step_s[place[rank]]) for rank in ranks]
        once_s = [least + more for least, more in zip(least_s, more_once_s, strict=True)]
        found_s = staged_step_s(
            rows,
            schedule,
            ends,
            [float(ways[rank].more_s[place[rank]]) for rank in ranks],
            more_once_s,
        )
        if found_s < best_s:
            best, best_s = list(place), found_s
        place = [at + (once_s[rank] == max(once_s)) for rank, at in enumerate(place)]
        if (
            any(at == len(ways[rank].more_s) for rank, at in enumerate(place))
            or found_s - max(once_s) + max(least_s) >= best_s
        ):
            break
    chosen = [replace(run, amounts=ways[rank].amounts[best[rank]]) for rank, run in enumerate(runs)]
    best_s = max(best_s, path_s)
    return chosen, best_s, best_s if all(of.is_complete for of in ways) else bound_s


def _least_step_s(rows: Sequence[Row], schedule: Schedule, runs: Sequence[_Run]) -> float:
    """The longest path through these stages."""
    kinds = kinds_of(rows)
    cut = reduce(lambda cut, run: _extended(rows, kinds, schedule, cut, run), runs, _NO_CUT)
    return float(_path_s(rows[-1], schedule, cut))
