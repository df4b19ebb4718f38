"""The best cut of a row of units into one stage per rank.

All cuts are considered. For each run of units, the least recomputation that fits is computed first:
a rank's memory depends only on its stage, and a slower stage never shortens a step. Cuts are built
stage by stage, first to last, by dynamic programming. Of all ways to put the first units into the
first stages, only Pareto-optimal ones are kept, in every quantity that the rest of the step depends
on.

The objective is the longest of some paths, a lower bound on the step (`longest_paths.py`). The
schedule's closed form then prices the best cuts, or all if they are few. CP-SAT took seconds for
the same problem with 16 stages and proved nothing for 64. If ranks have devices of several kinds,
each has its own row, and the forward time so far depends on how the units were cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, combinations, pairwise
from math import comb, inf

import numpy as np

from autopar.solve.costs.pareto import undominated
from autopar.solve.costs.pipeline_cost import stages_of
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.staging.least_recomputation import ways
from autopar.solve.staging.longest_paths import (
    NO_CUT,
    cut_of,
    extended,
    least_path_s,
    least_step_s,
    open_loops,
    path_s,
)
from autopar.solve.staging.stage_runs import RunFinder, StageRun, StageRuns
from autopar.solve.staging.staged_time import is_monotone, kinds_of, staged_step_s
from autopar.solve.staging.unit_row import UnitRow

_MOST_RUNS = 20_000
"""The largest number of candidate runs of units. If there are more, those furthest from an even
distribution are left out.
"""
_FEW = 200
"""Up to this many cuts, all are priced."""
_PRICED = 16
"""Number of cuts with the shortest longest path that the closed form prices."""


def staging_of_ranks(
    rows: Sequence[UnitRow],
    schedule: Schedule,
    capacities: Sequence[int | None],
    upper_bound_s: float = inf,
) -> Staging | float:
    """`best_staging` with one stage per rank: the best `Staging` below `upper_bound_s`, or else a
    lower bound in seconds, infinite if none fits. `rows` has the costs of units on each rank,
    `capacities` the bytes of each rank; None is unlimited.
    """
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


def _modes(rows: Sequence[UnitRow], runs: Sequence[StageRun]) -> tuple[str, ...]:
    """The recompute mode of each segment. Each run says how many blocks of each kind run in each
    mode; the first blocks of a stage recompute most. Segments that are no blocks run in the first
    mode.
    """
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
    rows: Sequence[UnitRow], schedule: Schedule, capacities: Sequence[float], upper_bound_s: float
) -> tuple[list[StageRun] | None, float, bool]:
    """(the best run for each stage, a lower bound on the seconds of all stagings that fit, whether
    memory excluded none).

    The runs are None if no staging that fits takes less than `upper_bound_s`. Seconds are without
    the constant part.
    """
    ranks, units, finder = schedule.ranks, len(rows[0]), RunFinder(rows, schedule, capacities)
    if ranks == 1:
        if (whole := finder.run(0, 0, units)) is None:
            return None, inf, False
        runs, _, bound_s = _best_ways(rows, schedule, [whole])
        return runs, bound_s, finder.is_free
    if schedule.sizes or comb(units - 1, ranks - 1) <= _FEW:
        return *_all_cuts(finder, upper_bound_s), finder.is_free
    known, known_s = _first_cut(finder, upper_bound_s)
    finder.is_free = True
    runs, complete = _runs(finder, known_s)
    if not runs:
        return known, known_s if known or complete else 0.0, finder.is_free
    chosen, bound_s = _choose(rows, schedule, runs, complete, known, known_s)
    return chosen, bound_s, finder.is_free


def _first_cut(finder: RunFinder, upper_bound_s: float) -> tuple[list[StageRun] | None, float]:
    """Tries a few cuts: (runs of the best, its step seconds) if it fits and takes less than
    `upper_bound_s`; otherwise (None, `upper_bound_s`).
    """
    best, best_s = None, upper_bound_s
    for ends in _first_ends(finder.rows):
        spans = enumerate(pairwise([0, *ends]))
        runs = [finder.run(stage, first, end) for stage, (first, end) in spans]
        if (tried := _all_fit(runs)) is not None:
            tried, tried_s, _ = _best_ways(finder.rows, finder.schedule, tried)
            if tried_s < best_s:
                best, best_s = tried, tried_s
    return best, best_s


def _all_fit(runs: Sequence[StageRun | None]) -> list[StageRun] | None:
    """The runs as a list if none is None; otherwise None."""
    found = [run for run in runs if run is not None]
    return found if len(found) == len(runs) else None


def _first_ends(rows: Sequence[UnitRow]) -> list[tuple[int, ...]]:
    """Cuts to try first, as the end unit of each stage: an even one. If devices differ, units in
    proportion to speed, and mixtures of both, since memory may require them.
    """
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


def _all_cuts(finder: RunFinder, upper_bound_s: float) -> tuple[list[StageRun] | None, float]:
    """(runs of the fastest of all cuts, a lower bound on the seconds of all cuts that fit). The
    runs are None if no cut that fits takes less than `upper_bound_s`. The bound is infinite if none
    fits. A schedule with fixed sizes has one cut.
    """
    rows, schedule, run = finder.rows, finder.schedule, cache(finder.run)
    units, fits = len(rows[0]), False
    found: list[tuple[float, list[StageRun]]] = []
    fixed = [tuple(accumulate(schedule.sizes[:-1]))] if schedule.sizes else None
    for inner in fixed or combinations(range(1, units), schedule.ranks - 1):
        ends = list(pairwise((0, *inner, units)))
        longest_s = max(row.total_s(*of_rank) for row, of_rank in zip(rows, ends, strict=True))
        if rows[0].micro_batches * longest_s >= upper_bound_s:
            fits = True  # for all that was looked at
            continue
        runs = _all_fit([run(stage, first, end) for stage, (first, end) in enumerate(ends)])
        if runs is not None:
            found.append((least_step_s(rows, schedule, runs), runs))
    best, best_s, bound_s = None, upper_bound_s, inf
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


def _runs(finder: RunFinder, known_s: float) -> tuple[list[StageRun], bool]:
    """(the runs that a staging faster than `known_s` may contain, stage by stage; whether these are
    all). If a stage has too many, those furthest from an even distribution are left out.
    """
    rows, ranks, units = finder.rows, finder.schedule.ranks, len(finder.rows[0])
    slack_s = known_s / rows[0].micro_batches * (1 + 1e-9)  # what a stage may take
    work_of = {id(row): row.before.forward_s + row.before.backward_s for row in kinds_of(rows)}
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
                if (one := finder.run(stage, first, end)) is None:
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
    """The largest number of consecutive units, anywhere in the row, that take at most `slack_s`; 0
    if there are none. `work_s` are prefix sums over units.
    """
    return next(
        (n for n in range(len(work_s) - 1, 0, -1) if np.min(work_s[n:] - work_s[:-n]) <= slack_s), 0
    )


def _choose(
    rows: Sequence[UnitRow],
    schedule: Schedule,
    runs: list[StageRun],
    complete: bool,
    known: list[StageRun] | None,
    known_s: float,
) -> tuple[list[StageRun] | None, float]:
    """(one run for each stage, with the lowest step time if that is less than `known_s`, otherwise
    `known`; a lower bound on the seconds of all stagings). `complete`: no staging faster than
    `known_s` uses runs other than `runs`.
    """
    of_stage = [[run for run in runs if run.stage == stage] for stage in range(schedule.ranks)]
    least_alone_s = inf if complete else _least_alone_s(rows, schedule)
    if not all(of_stage):
        return known, min(known_s, least_alone_s)
    cuts, steps = _chained(rows, schedule, of_stage, known_s)
    paths_s = np.asarray(path_s(rows[-1], schedule, cut_of(cuts)))
    final = np.argsort(paths_s, kind="stable")
    bound_s = min(float(paths_s[final[0]]), known_s) if len(final) else known_s
    best, best_s = known, known_s
    for cut in final[:_PRICED].tolist():
        if paths_s[cut] >= best_s:
            break
        found = []
        for mine, (runs_of, cuts_of) in zip(reversed(of_stage), reversed(steps), strict=True):
            found.append(mine[runs_of[cut]])
            cut = cuts_of[cut]
        found.reverse()
        found, found_s, _ = _best_ways(rows, schedule, found)
        if found_s < best_s:
            best, best_s = found, found_s
    return best, min(bound_s, least_alone_s)


def _chained(
    rows: Sequence[UnitRow],
    schedule: Schedule,
    of_stage: Sequence[Sequence[StageRun]],
    known_s: float,
) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
    """Builds cuts stage by stage from the runs `of_stage`, and keeps the Pareto-optimal ones whose
    longest path is below `known_s`.

    Returns (`PartialCut.numbers` of the cuts of all units; for each stage, the index of each cut's
    run and the index of the cut that it extends).
    """
    row, kinds = rows[-1], kinds_of(rows)
    totals_s = [[run.total_s for run in mine] for mine in of_stage]
    least_and_most_s = [(min(of), max(of)) for of in totals_s]
    cuts, steps = NO_CUT.numbers()[:, None], []
    ends = np.zeros(1, dtype=int)  # ascending: where each cut does
    for stage, mine in enumerate(of_stage):
        column = StageRuns.of(mine)
        place = np.searchsorted(ends, column.first)
        after = np.searchsorted(ends, column.first, "right")
        run_of = np.repeat(np.arange(len(mine)), after - place)
        before = np.concatenate([np.arange(*span) for span in zip(place, after, strict=True)])
        picked = column.picked(run_of)
        longer = extended(rows, kinds, schedule, cut_of(cuts[:, before]), picked)
        later = least_and_most_s[stage + 1 :]
        longer = longer._replace(loops_s=open_loops(longer, row.micro_batches, later))
        cuts = longer.numbers()
        near, end_of = np.flatnonzero(least_path_s(row, schedule, longer) < known_s), picked.end
        near = near[np.argsort(end_of[near], kind="stable")]
        same_end = np.split(near, np.flatnonzero(np.diff(end_of[near])) + 1)
        left = np.concatenate([of[undominated(cuts[:, of].T)] for of in same_end])
        cuts, ends = cuts[:, left], end_of[left]
        steps.append((run_of[left], before[left]))
    return cuts, steps


def _least_alone_s(rows: Sequence[UnitRow], schedule: Schedule) -> float:
    """A lower bound on the step seconds: all work on the fastest kind of device, divided evenly
    among the ranks.
    """
    return rows[0].micro_batches * min(row.total_s(0, len(row)) for row in rows) / schedule.ranks


def _best_ways(
    rows: Sequence[UnitRow], schedule: Schedule, runs: Sequence[StageRun]
) -> tuple[list[StageRun], float, float]:
    """(the runs with the recomputation that makes the step shortest, its seconds, a lower bound on
    all ways that fit).

    A longer backward hides more of the work once a step, of which the longest counts. For each
    possible length of that work, every rank recomputes as little as it must. If rows are lower
    bounds, the runs stay as they are and the least time once a step is used.
    """
    ends, ranks = [(run.first, run.end) for run in runs], range(len(runs))
    own = [rows[run.stage].at.backward_s for run in runs]
    more_s = [
        run.backward_s - (backward_s[end] - backward_s[first])
        for run, backward_s, (first, end) in zip(runs, own, ends, strict=True)
    ]
    longest_s = least_step_s(rows, schedule, runs)
    bound_s = max(staged_step_s(rows, schedule, ends, more_s), longest_s)
    if rows[0].is_bound:
        return list(runs), bound_s, bound_s
    ways_of = [ways(rows[run.stage], run.first, run.end, *run.room) for run in runs]
    least_s = [rows[run.stage].once_s([span]) for run, span in zip(runs, ends, strict=True)]
    place, best, best_s = [0 for _ in ranks], [0 for _ in ranks], inf
    while True:
        more_once_s = [float(ways_of[rank].step_s[place[rank]]) for rank in ranks]
        once_s = [least + more for least, more in zip(least_s, more_once_s, strict=True)]
        found_s = staged_step_s(
            rows,
            schedule,
            ends,
            [float(ways_of[rank].more_s[place[rank]]) for rank in ranks],
            more_once_s,
        )
        if found_s < best_s:
            best, best_s = list(place), found_s
        place = [at + (once_s[rank] == max(once_s)) for rank, at in enumerate(place)]
        if (
            any(at == len(ways_of[rank].more_s) for rank, at in enumerate(place))
            or found_s - max(once_s) + max(least_s) >= best_s
        ):
            break
    chosen = [
        replace(run, amounts=ways_of[rank].amounts[best[rank]]) for rank, run in enumerate(runs)
    ]
    best_s = max(best_s, longest_s)
    return chosen, best_s, best_s if all(of.is_complete for of in ways_of) else bound_s
