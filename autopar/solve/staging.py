"""The best staging of a placement: where stages begin, and how many of their blocks run in which recompute mode.

    one stage a rank    every way to cut (`_cut_freely`).  For each run of units the least recomputation that fits is known beforehand: the
                        memory of a rank is that of its stage, and no step gets shorter when a stage takes longer
    several             blocks are dealt evenly, or the first and the last stage get up to two fewer (`_dealt`); every stage of a rank
                        runs as many of its blocks in each mode, with the least recomputation that fits

Cuts are found stage by stage, first to last: of all ways to give the first units to the first stages only those are kept than which none is
better in everything that the rest of the step depends on.  What is minimised is the longest of some paths, which no step is shorter than:

    GPipe          sum forward + (m - 1) max forward + sum backward + (m - 1) max backward       (exact)
    1F1B and zero  for each rank r: the first forward until it gets there, all that r computes, the last backward from there to rank 0
    bubble         for each rank r: the first forward to the last rank and backward to r, then all that r computes but the forwards that
                   it ran before its first backward, then the last backward to rank 0
    1F1B           for each rank r: the first forward to the last rank and back to r, all that r computes up to its last forward, then that
                   micro-batch to the last rank and back to rank 0

A path of 1F1B has whole backwards, one of zero bubble without gradients of weights, and none once r is done, since others may still be
computing those.  The shortest message is added for each hop, and the longest work once a step.  The schedules' closed form then prices the
best of them, or all where they are few; CP-SAT, asked for the same, took seconds for 16 stages and proved nothing for 64.

Where ranks have devices of several kinds each has a row of its own, and what forwards take so far depends on how the units were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, reduce
from itertools import accumulate, combinations, pairwise, product
from math import comb, inf
from typing import NamedTuple

import numpy as np
from autopar_cost_models import StageTimes, held_moments, late_moments, pipeline_time

from autopar.solve.pipeline import Stages, is_parted, longest_hop_s, stages_of
from autopar.solve.row import Row, undominated

_MOST_RUNS = 20_000
"""Runs of units to choose from; where there are more, those furthest from an even deal are left out."""
_FEW = 200
"""Up to so many cuts all are priced."""
_PRICED = 16
"""How many of the cuts whose longest path is shortest the closed form prices."""
_FEWER = 2
"""By how many blocks the first and the last stage may be shorter where a rank has several stages."""


@dataclass(frozen=True, slots=True)
class Staging:
    """`modes` has the recompute mode of each segment.  No staging of the placement that fits takes less than `bound_s`.  `is_free`: memory
    left out no staging that could be faster."""

    stages: Stages
    modes: tuple[str, ...]
    bound_s: float
    is_free: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline's schedule (one rank: 'gpipe'), how many ranks it has, and how many stages each."""

    name: str
    ranks: int
    stages_per_rank: int


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
    least_s: float | np.ndarray  # of a micro-batch, with the share of what it takes once a step (`Row.least`)
    amounts: np.ndarray | None


_NUMBERS = ("first", "end", "forward_s", "backward_s", "weight_s", "total_s", "step_s", "least_s")


def best_staging(
    row: Row, schedule: Schedule, capacity_bytes: int | None, upper_bound_s: float = inf
) -> Staging | float:
    """The staging of the least step time that fits each rank into `capacity_bytes` and takes less than `upper_bound_s`; if there is none, a
    bound of those that fit (infinity if none does)."""
    if schedule.stages_per_rank == 1:
        return staging_of_ranks([row] * schedule.ranks, schedule, [capacity_bytes] * schedule.ranks, upper_bound_s)
    if len(row) < schedule.ranks * schedule.stages_per_rank:
        return inf
    return _dealt(row, schedule, inf if capacity_bytes is None else capacity_bytes, upper_bound_s - row.model.fixed_s)


def staging_of_ranks(
    rows: Sequence[Row], schedule: Schedule, capacities: Sequence[int | None], upper_bound_s: float = inf
) -> Staging | float:
    """`best_staging` with one stage a rank, where `rows` has what units cost on each rank, and `capacities` the bytes of each."""
    base, limits = rows[0], [inf if capacity is None else capacity for capacity in capacities]
    if len(base) < schedule.ranks:
        return inf
    fixed_s = base.model.fixed_s
    runs, bound_s, is_free = _cut_freely(rows, schedule, limits, upper_bound_s - fixed_s)
    if runs is None:
        return bound_s + fixed_s
    sizes = [run.end - run.first for run in runs]
    return Staging(stages_of(sizes, base.blocks, len(base.model.segments)), _modes(rows, runs), bound_s + fixed_s, is_free)


def ramp(part: float, ranks: int, micro_batches: int) -> float:
    """Seconds of a step for each second of a micro-batch over all ranks, if a rank waits for `part` of what each before it takes: m t +
    part x (t of the ranks before) is least where all are equal."""
    part = min(max(part, 1e-9), 1.0)
    return part / (1 - (1 - part / micro_batches) ** ranks)


def quick_bound_s(row: Row, schedule: Schedule) -> float:
    """Seconds that no staging goes below, whatever fits, by a formula.

    A rank begins when the first micro-batch has come to it through the first stage of every rank before, and computes all of its share.  If
    t is what a micro-batch takes on a rank, the shares that keep m t + (t of the ranks before) equal are the best there are.  Under zero
    bubble only forwards count of the ranks before, which are at least so much of t as of the unit where they are least.  Stages of ranks
    with several are dealt, and each deal has its own bound.
    """
    micro, ranks, whole_s = row.micro_batches, schedule.ranks, row.total_s(0, len(row))
    if schedule.stages_per_rank > 1:
        deals = dealt_sizes(len(row), ranks * schedule.stages_per_rank)
        found = min((_least_s(row, schedule, _runs_of(sizes)) for sizes in deals), default=inf)
    elif ranks == 1:
        found = micro * whole_s
    else:
        work_s = np.diff(row.forward_s + row.backward_s)
        part = float(np.min(np.diff(row.forward_s) / np.maximum(work_s, 1e-300))) if schedule.name == "zero_bubble" else 1.0
        found = ramp(part, ranks, micro) * whole_s
    return float(found) * (1 - 1e-9) + row.model.fixed_s


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


# ------------------------------------------------------------------------------------------------------- one stage a rank


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
        row = rows[stage]
        if (found := row.least(first, end, held[stage], capacities[stage], late[stage] * is_parted(schedule.name, stage))) is None:
            limited.append(stage)
            return None
        more_s, amounts, least_s = found
        least_s *= bool(row.lines)  # a placement's own times say nearly as much
        forward_s, backward_s, weight_s = (x[end] - x[first] for x in (row.at.forward_s, row.at.backward_s, row.at.weight_s))
        if more_s:
            limited.append(stage)
        total_s, once_s = max(forward_s + backward_s + more_s, row.total_s(first, end)), row.once_s(first, end)
        return _Run(stage, first, end, forward_s, backward_s + more_s, min(weight_s, backward_s), total_s, once_s, least_s, amounts)

    if ranks == 1:
        found = [run(0, 0, units)]
        return (None, inf, False) if found[0] is None else (found, _step_of(rows, schedule, found), not limited)
    if comb(units - 1, ranks - 1) <= _FEW:
        return *_all_cuts(rows, schedule, run, upper_bound_s), not limited
    even, even_s = None, inf
    for ends in _first_ends(rows):
        tried = [run(stage, first, end) for stage, (first, end) in enumerate(pairwise([0, *ends]))]
        if None not in tried and (tried_s := _step_of(rows, schedule, tried)) < even_s:
            even, even_s = tried, tried_s
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
        more = np.round(np.cumsum(part * speeds / speeds.sum() + (1 - part) / ranks) * (units - ranks))  # besides one for each
        found.append(tuple((more.astype(int) + np.arange(1, ranks + 1)).tolist()))
    return list(dict.fromkeys(found))


def _all_cuts(rows: Sequence[Row], schedule: Schedule, run, upper_bound_s: float) -> tuple[list[_Run] | None, float]:
    """The best of all cuts, each priced, if it takes less than `upper_bound_s`; a bound."""
    run, units, best, best_s, found = cache(run), len(rows[0]), None, upper_bound_s, []
    for inner in combinations(range(1, units), schedule.ranks - 1):
        runs = [run(stage, first, end) for stage, (first, end) in enumerate(pairwise((0, *inner, units)))]
        if None not in runs:
            found.append((_least_step_s(rows, schedule, runs), runs))
    for least_s, runs in sorted(found, key=lambda pair: pair[0]):
        if least_s >= best_s:
            break
        if (found_s := _step_of(rows, schedule, runs)) < best_s:
            best, best_s = runs, found_s
    if found and not _is_monotone(rows[0], schedule):
        return best, min(best_s, min(least_s for least_s, _ in found))
    return best, best_s if found else inf


def _is_monotone(row: Row, schedule: Schedule) -> bool:
    """Whether what stages of a row take is a bound of what those of all its placements do.  Under zero bubble a step may take longer where
    more of the same backward is gradients of parameters, so that paths alone are."""
    return schedule.name != "zero_bubble" or not row.lines


def _runs(rows: Sequence[Row], schedule: Schedule, run, known_s: float) -> tuple[list[_Run], bool]:
    """The runs that a staging faster than `known_s` can have, and whether they are all there."""
    ranks, units, micro = schedule.ranks, len(rows[0]), rows[0].micro_batches
    slack_s = known_s / micro * (1 + 1e-9)  # what a stage may take
    work_of = {id(row): row.forward_s + row.backward_s for row in _kinds(rows)}
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
            mine = sorted(mine, key=lambda one: abs(one.end - even) + abs(one.first - units * stage / ranks))[:room]
        found += mine
        starts = {one.end for one in mine}
    return found, complete


def _longest(work_s: np.ndarray, slack_s: float) -> int:
    """How many units a stage can have that takes no more than `slack_s`; `work_s`: of the units before each."""
    return next((n for n in range(len(work_s) - 1, 0, -1) if np.min(work_s[n:] - work_s[:-n]) <= slack_s), 0)


class _Cut(NamedTuple):
    """The first units in the first stages, in seconds, or many such cuts, each field an array: `work_s` all backward so far (GPipe: all
    work), `reached_s` the longest path that turns at one of these ranks, `turned_s` the longest that turns at the last, as far as these
    ranks are on it (GPipe: slowest forward), `slowest_s` the slowest backward of GPipe, of 1F1B the longest that turns at the last rank
    twice, as far as it is known, `step_s` the longest work once a step; `least_s` and `left_s` are paths as `reached_s` and `turned_s`
    through ranks that take the least with what they take once a step.  `shift_s`: what the forwards so far take more than these units
    would on the last of the ranks."""

    work_s: float | np.ndarray
    reached_s: float | np.ndarray
    turned_s: float | np.ndarray
    slowest_s: float | np.ndarray
    step_s: float | np.ndarray
    least_s: float | np.ndarray
    left_s: float | np.ndarray
    shift_s: float | np.ndarray


_NO_CUT = _Cut(0.0, 0.0, -inf, 0.0, 0.0, 0.0, -inf, 0.0)


def _choose(
    rows: Sequence[Row], schedule: Schedule, runs: list[_Run], complete: bool, known: list[_Run] | None, known_s: float
) -> tuple[list[_Run] | None, float]:
    """The runs of the least step time, if that is less than `known_s`; else `known`.  With a bound of all stagings."""
    row, kinds = rows[-1], _kinds(rows)
    of_stage = [[run for run in runs if run.stage == stage] for stage in range(schedule.ranks)]
    cuts, ends, steps = np.array(_NO_CUT)[:, None], np.zeros(1, dtype=int), []  # `ends`, ascending: where each cut does
    for mine in of_stage:
        if not mine:
            return known, known_s if complete else min(known_s, _least_alone_s(rows, schedule))
        column = _together(mine)
        place, after = np.searchsorted(ends, column.first), np.searchsorted(ends, column.first, "right")
        run_of = np.repeat(np.arange(len(mine)), after - place)
        cut_of = np.concatenate([np.arange(*span) for span in zip(place, after, strict=True)])
        picked = _picked(column, run_of)
        longer = _extended(rows, kinds, schedule, _Cut(*cuts[:, cut_of]), picked)
        cuts = np.stack(np.broadcast_arrays(*longer))
        near, end_of = np.flatnonzero(_least_path_s(row, schedule, longer) < known_s), picked.end
        near = near[np.argsort(end_of[near], kind="stable")]
        same_end = np.split(near, np.flatnonzero(np.diff(end_of[near])) + 1)
        left = np.concatenate([of[undominated(cuts[:, of].T)] for of in same_end])
        cuts, ends = cuts[:, left], end_of[left]
        steps.append((run_of[left], cut_of[left]))
    paths_s = _path_s(row, schedule, _Cut(*cuts))
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
        if (found_s := _step_of(rows, schedule, found)) < best_s:
            best, best_s = found, found_s
    return best, bound_s if complete else min(bound_s, _least_alone_s(rows, schedule))


def _least_alone_s(rows: Sequence[Row], schedule: Schedule) -> float:
    """What all the work takes at least, shared out evenly."""
    return rows[0].micro_batches * min(row.total_s(0, len(row)) for row in rows) / schedule.ranks


def _together(runs: Sequence[_Run]) -> _Run:
    """The runs of one stage, each number an array."""
    return replace(runs[0], amounts=None, **{name: np.array([getattr(run, name) for run in runs]) for name in _NUMBERS})


def _picked(runs: _Run, chosen: np.ndarray) -> _Run:
    """Of runs that are `_together` some, maybe several times."""
    return replace(runs, **{name: getattr(runs, name)[chosen] for name in _NUMBERS})


def _kinds(rows: Sequence[Row]) -> list[Row]:
    """The rows that differ."""
    return list({id(row): row for row in rows}.values())


def _extended(rows: Sequence[Row], kinds: Sequence[Row], schedule: Schedule, cut: _Cut, run: _Run) -> _Cut:
    """One more stage; `kinds`: the rows that differ."""
    row, before = rows[run.stage], rows[max(run.stage - 1, 0)]
    micro, rank, last = row.micro_batches, run.stage, schedule.ranks - 1
    step_s = np.maximum(cut.step_s, run.step_s)
    if schedule.name == "gpipe":
        slowest = np.maximum(cut.turned_s, run.forward_s), np.maximum(cut.slowest_s, run.backward_s)
        least_s = 0.0
        if row.lines:
            later_s = reduce(np.minimum, [kind.work_s[-1] - kind.work_s[run.end] for kind in kinds])
            least_s = np.maximum(cut.least_s, cut.work_s + later_s + micro * run.least_s)
        return _Cut(cut.work_s + run.total_s, 0.0, *slowest, step_s, least_s, 0.0, 0.0)
    shift_s = cut.shift_s if before is row else cut.shift_s + before.forward_s[run.first] - row.forward_s[run.first]
    ahead, forward_s = min(last - rank + 1, micro), shift_s + row.forward_s[run.first]  # forwards before the first backward; before
    if schedule.name == "zero_bubble":
        before_s, back_s, hops = 0.0, run.backward_s - run.weight_s, (rank, 2 * last - rank)
    else:
        before_s, back_s, hops = cut.work_s, run.backward_s, (2 * rank, 2 * last)
    reached_s = before_s + forward_s + micro * run.total_s + hops[0] * row.hop_s
    turned_s = before_s + (micro - ahead) * run.total_s + ahead * run.backward_s + hops[1] * row.hop_s
    slowest_s = cut.slowest_s
    if micro > ahead and schedule.name == "1f1b":
        twice_s = before_s + forward_s + (micro - ahead + 1) * run.total_s + 2 * (2 * last - rank) * row.hop_s
        slowest_s = np.maximum(slowest_s + 2 * run.total_s, twice_s)
    work_s, reached_s = cut.work_s + run.backward_s, np.maximum(cut.reached_s, reached_s)
    turned_s = np.maximum(cut.turned_s + back_s, turned_s)
    if not row.lines:
        return _Cut(work_s, reached_s, turned_s, slowest_s, step_s, 0.0, -inf, shift_s)
    through_s = reduce(np.minimum, [kind.work_s[run.first] for kind in kinds]) if schedule.name != "zero_bubble" else 0.0
    least_s = np.maximum(before_s + forward_s, through_s) + micro * run.least_s
    own_s = row.backward_s[run.end] - row.backward_s[run.first]  # a backward takes so much at least, which all least times hold
    left_s = before_s + (micro - ahead) * run.least_s + ahead * own_s
    left_s = np.maximum(cut.left_s + back_s, left_s)
    return _Cut(work_s, reached_s, turned_s, slowest_s, step_s, np.maximum(cut.least_s, least_s), left_s, shift_s)


def _path_s(row: Row, schedule: Schedule, cut: _Cut) -> float | np.ndarray:
    """The longest path through all stages, of which the last has `row`."""
    if schedule.name == "gpipe":
        slowest_s = (row.micro_batches - 1) * (cut.turned_s + cut.slowest_s)
        return np.maximum(cut.work_s + slowest_s + 2 * (schedule.ranks - 1) * row.hop_s + cut.step_s, cut.least_s)
    whole_s = cut.shift_s + row.forward_s[-1]  # all forwards of a micro-batch
    paths_s = np.maximum(np.maximum(cut.reached_s, whole_s + cut.turned_s), cut.slowest_s) + cut.step_s
    return np.maximum(np.maximum(paths_s, cut.least_s), whole_s + cut.left_s)


def _least_path_s(row: Row, schedule: Schedule, cut: _Cut) -> float | np.ndarray:
    """The longest path however the rest is cut, at least."""
    if schedule.name == "gpipe":
        return _path_s(row, schedule, cut)
    return np.maximum(np.maximum(cut.reached_s, cut.slowest_s) + cut.step_s, cut.least_s)


# ------------------------------------------------------------------------------------------------------- several stages a rank


def _dealt(row: Row, schedule: Schedule, capacity: float, upper_bound_s: float) -> Staging | float:
    """The best of the deals that are even but for a shorter first and last stage; the bound is that of these."""
    best, is_free, fits = None, True, False  # `fits`: some deal does, or may, for all that was looked at
    ranks, bound_s = schedule.ranks, upper_bound_s
    deals = [(sizes, _runs_of(sizes)) for sizes in dealt_sizes(len(row), ranks * schedule.stages_per_rank)]
    least = [max(_least_s(row, schedule, runs), _least_held_s(row, schedule, runs, capacity)) for _, runs in deals]
    for least_s, (sizes, runs) in sorted(zip(least, deals, strict=True), key=lambda pair: pair[0]):
        known_s = best[0] if best else upper_bound_s
        if least_s >= known_s:
            fits = True
            break
        of_ranks = [_rank_modes(row, schedule, runs, rank, capacity) for rank in range(ranks)]
        if None in of_ranks:
            is_free = False
            continue
        is_free, fits = is_free and not any(any(of.more_s) for of in of_ranks), True
        least_s = max(least_s, _waited_s(row, schedule, runs, [of.each_s for of in of_ranks]))
        if least_s < known_s:
            time_s, once_s, of_ranks = _with_what_is_once(row, schedule, runs, of_ranks, least_s)
            bound_s = min(bound_s, once_s if _is_monotone(row, schedule) else least_s)
            if time_s < known_s:
                best = time_s, sizes, [of_ranks[n % ranks].modes[n // ranks] for n in range(len(runs))]
    if best is None:
        return bound_s + row.model.fixed_s if fits or is_free else inf
    time_s, sizes, modes = best
    found = [row.modes[0]] * len(row.model.segments)
    for unit, mode in enumerate(mode for stage in modes for mode in stage):
        found[row.blocks[unit]] = row.modes[mode]
    bound_s = min(time_s, bound_s) + row.model.fixed_s
    return Staging(stages_of(sizes, row.blocks, len(row.model.segments)), tuple(found), bound_s, is_free)


def _with_what_is_once(
    row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], of_ranks: list[_RankModes], least_s: float
) -> tuple[float, float, list[_RankModes]]:
    """(seconds of a step of these stages, a bound of it with any way that fits, the way of each rank).

    A longer backward hides more of what is sent once a step, so that recomputation may shorten that.  The rank that takes longest for it
    runs in some way; all others recompute no less than they must, and take something for it.
    """
    ranks = range(schedule.ranks)

    def step_s(found: Sequence[_RankModes]) -> float:
        more_s = [found[n % schedule.ranks].more_s[n // schedule.ranks] for n in range(len(runs))]
        return max(_step_s([row] * schedule.ranks, schedule, runs, more_s, [of.step_s for of in found]), least_s)

    once_s = [sum(row.once_s(*run) for run in runs[rank :: schedule.ranks]) + of_ranks[rank].step_s for rank in ranks]
    longest = max(ranks, key=once_s.__getitem__)
    others = [[way if rank == longest else of_ranks[rank] for rank in ranks] for way in of_ranks[longest].others]
    times_s = [step_s(of_ranks), *map(step_s, others)]  # the first is its own bound: what other ranks take once is no longer
    bounds_s = [step_s([of if rank == longest else replace(of, step_s=0.0) for rank, of in enumerate(way)]) for way in others]
    best = times_s.index(min(times_s))
    return times_s[best], min([times_s[0], *bounds_s]), [of_ranks, *others][best]


def _least_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]]) -> float:
    """Seconds that a step of these stages takes at least: a rank begins when the first micro-batch has come through the first stage of
    every rank before."""
    ranks = schedule.ranks
    return _waited_s(row, schedule, runs, [sum(row.total_s(first, end) for first, end in runs[rank::ranks]) for rank in range(ranks)])


def _waited_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], each_s: Sequence[float]) -> float:
    """The same where each rank takes so long for a micro-batch."""
    parts = row.at.forward_s if schedule.name == "zero_bubble" else row.at.work_s
    return max(parts[runs[rank][0]] + row.micro_batches * took_s for rank, took_s in enumerate(each_s))


def _least_held_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], capacity: float) -> float:
    """The same by the lines of a row.  The block at one place of its stage runs in one mode in all stages of a rank, so that what blocks
    keep is held as often as, on average, in the stages that have such a place; if blocks are not alike, as often as in any stage."""
    if not row.lines:
        return 0.0
    ranks, each_s = schedule.ranks, []
    moments = held_moments(schedule.name, ranks, schedule.stages_per_rank, row.micro_batches)
    for rank in range(ranks):
        mine = runs[rank::ranks]
        sizes = tuple(end - first for first, end in mine)
        held = max(least_held(moment, sizes) if row.alike else min(moment) for moment in moments[rank])
        each_s.append(row.least_s(mine, held, capacity))
    return _waited_s(row, schedule, runs, each_s)


@lru_cache(maxsize=65536)
def least_held(moment: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """How often a rank holds, at least, what its blocks keep: the block at one place of its stage runs in one mode in all stages of a rank,
    so that no mixture of places is held less than the least of them."""
    held = ([h for h, size in zip(moment, sizes, strict=True) if size > place] for place in range(max(sizes)))
    return min(sum(of) / len(of) for of in held)


def dealt_sizes(units: int, count: int) -> list[tuple[int, ...]]:
    """Sizes of stages: even but for the first and the last, which may be up to `_FEWER` shorter.  Those in the middle are longest."""
    found: dict[tuple[int, ...], None] = {}
    for fewer in product(range(_FEWER + 1), repeat=2):
        each, more = divmod(units + sum(fewer), count)
        order = sorted(range(count), key=lambda stage: (stage in (0, count - 1), stage))  # who gets one more: the ends last
        sizes = [each] * count
        for stage in order[:more]:
            sizes[stage] += 1
        sizes[0] -= fewer[0]
        sizes[-1] -= fewer[1]
        if min(sizes) > 0:
            found[tuple(sizes)] = None
    return list(found)


def _runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First and end unit of stages with so many units each."""
    return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class _RankModes:
    """How the stages of a rank recompute: by stage the mode of each unit and by how much its backward takes longer, and what they take more
    than at least once a step; `each_s`: seconds of a micro-batch, with their share of those once a step, that no way goes below which fits.
    `others`: ways that recompute more and take less once a step."""

    modes: list[list[int]]
    more_s: list[float]
    step_s: float
    each_s: float
    others: tuple[_RankModes, ...] = ()


def _rank_modes(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], rank: int, capacity: float) -> _RankModes | None:
    """The least recomputation with which a rank of a pipeline with stages `runs` fits; None if none does."""
    of = schedule.name, schedule.ranks, schedule.stages_per_rank, row.micro_batches
    runs, held, turns = runs[rank :: schedule.ranks], np.array(held_moments(*of)[rank]), late_moments(*of)[rank]
    parted = [is_parted(schedule.name, rank + number * schedule.ranks) for number in range(len(runs))]
    longest = max(end - first for first, end in runs)
    ways = [row.alike_ways(first, end, longest) for first, end in runs]
    more_s, step_s = (sum(getattr(way, part) for way in ways) for part in ("more_s", "step_s"))
    kept, late, moments = [], [], []
    for (first, end), way, two in zip(runs, ways, parted, strict=True):
        kept.append(row.at.kept[end] - row.at.kept[first] + row.sent(end) + way.more_kept)
        late.append((row.at.late[end] - row.at.late[first] + way.late) * two)
        moments.append(row.moment(first, end, way.parted if two else way.transient, two))
    most = (held @ kept).max(axis=0)
    if len(runs) > 1 and runs[-1][1] == len(row) and not parted[-1]:  # as in `pipeline.fullest_of`, for all ways at once
        fullest = np.maximum(most + moments[-1], (held[:, :-1] @ kept[:-1]).max(axis=0) + np.max(moments[:-1], axis=0))
    else:
        fullest = most + np.max([np.array(counts) @ late + moments[chunk] for counts, chunk in turns], axis=0)
    static = sum(row.memory(first, end) for first, end in runs) - (len(runs) - 1) * row.model.fixed_bytes
    fits = static + row.passing(runs) + fullest <= capacity
    if not fits.any():
        return None
    best = int(np.where(fits, more_s, inf).argmin())
    each_s = row.with_more_s(runs, float((more_s + step_s / row.micro_batches)[fits].min()))
    quicker = np.flatnonzero(fits & (step_s < step_s[best]))
    others = quicker[undominated(np.stack([*(way.more_s[quicker] for way in ways), step_s[quicker]], axis=1))] if len(quicker) else quicker
    found = [
        _RankModes([way.modes[place].tolist() for way in ways], [float(way.more_s[place]) for way in ways], float(step_s[place]), each_s)
        for place in (best, *others.tolist())
    ]  # fmt: skip
    return replace(found[0], others=tuple(found[1:]))


def _step_s(
    rows: Sequence[Row], schedule: Schedule, runs: Sequence[tuple[int, int]], more_s: Sequence[float], more_once_s: Sequence[float] = ()
) -> float:
    """The step of stages with so many seconds of recomputation, as `pipeline.pipelined` prices it but for what nothing changes.
    `more_once_s`: by rank, what it takes once a step more than at least."""
    ranks, micro, times = schedule.ranks, rows[0].micro_batches, []
    for number, ((first, end), more) in enumerate(zip(runs, more_s, strict=True)):
        at = rows[number % ranks].at
        forward_s, backward_s, weight_s = (x[end] - x[first] for x in (at.forward_s, at.backward_s, at.weight_s))
        times.append(StageTimes(forward_s, backward_s + more, min(weight_s, backward_s) if times else backward_s + more))
    more_once_s = more_once_s or [0.0] * ranks
    step_s = max(sum(rows[rank].once_s(*run) for run in runs[rank::ranks]) + more_once_s[rank] for rank in range(ranks))
    if ranks == 1:
        return micro * times[0].total_s + step_s
    hop_s = longest_hop_s([row.model for row in _kinds(rows)], [rows[0].arriving[first] for first, _ in runs[1:]])
    return pipeline_time(schedule.name, times, ranks, micro, hop_s).time_s + step_s


def _step_of(rows: Sequence[Row], schedule: Schedule, runs: Sequence[_Run]) -> float:
    own = [rows[run.stage].at.backward_s for run in runs]
    more_s = [run.backward_s - (backward_s[run.end] - backward_s[run.first]) for run, backward_s in zip(runs, own, strict=True)]
    priced_s = _step_s(rows, schedule, [(run.first, run.end) for run in runs], more_s)
    return max(priced_s, _least_step_s(rows, schedule, runs))


def _least_step_s(rows: Sequence[Row], schedule: Schedule, runs: Sequence[_Run]) -> float:
    """The longest path through these stages."""
    kinds = _kinds(rows)
    cut = reduce(lambda cut, run: _extended(rows, kinds, schedule, cut, run), runs, _NO_CUT)
    return float(_path_s(rows[-1], schedule, cut))
