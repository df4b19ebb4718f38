"""The best deal of a row of units to ranks with several stages each.

Blocks are dealt evenly, or the first and the last stage get up to two fewer; every stage of a rank runs as many of its blocks in each mode,
with the least recomputation that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import accumulate, pairwise, product, takewhile
from math import inf

import numpy as np
from autopar_cost_models import held_moments, late_moments

from autopar.solve.pipeline import is_parted, stages_of
from autopar.solve.row import AlikeWays, Row, undominated
from autopar.solve.schedule import Schedule, Staging, is_monotone, staged_step_s

_MOST_SPREAD = 8
"""So many ways of a rank are tried that recompute more in all than the best, but less in some stage."""

_FEWER = 2
"""By how many blocks the first and the last stage may be shorter."""


def best_deal(row: Row, schedule: Schedule, capacity: float, upper_bound_s: float) -> Staging | float:
    """The best of the deals that are even but for a shorter first and last stage; the bound is that of these."""
    best, is_free, fits = None, True, False  # `fits`: some deal does, or may, for all that was looked at
    ranks, bound_s = schedule.ranks, upper_bound_s
    deals = [(sizes, runs_of(sizes)) for sizes in dealt_sizes(len(row), ranks * schedule.stages_per_rank)]
    least = [max(least_deal_s(row, schedule, runs), _least_held_s(row, schedule, runs, capacity)) for _, runs in deals]
    for least_s, (sizes, runs) in sorted(zip(least, deals, strict=True), key=lambda pair: pair[0]):
        known_s = best[0] if best else upper_bound_s
        if least_s >= known_s:
            fits = True
            break
        of_ranks = list(takewhile(bool, (_rank_modes(row, schedule, runs, rank, capacity, known_s) for rank in range(ranks))))
        if len(of_ranks) < ranks:
            is_free = False
            continue
        is_free, fits = is_free and not any(any(of.more_s) for of in of_ranks), True
        least_s = max(least_s, *(_waited_s(row, schedule, runs, rank, of.each_s) for rank, of in enumerate(of_ranks)))
        if least_s < known_s:
            time_s, once_s, of_ranks = _with_what_is_once(row, schedule, runs, of_ranks, least_s, known_s)
            if any(of.spread for of in of_ranks):
                time_s, once_s, of_ranks = _spread(row, schedule, runs, of_ranks, least_s, time_s, once_s)
            bound_s = min(bound_s, once_s if is_monotone(row, schedule) else least_s)
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
    row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], of_ranks: list[_RankModes], least_s: float, upper_bound_s: float
) -> tuple[float, float, list[_RankModes]]:
    """(seconds of a step of these stages, a bound of it with any way that fits, the way of each rank).

    A longer backward hides more of what is sent once a step, so that recomputation may shorten that.  The rank that takes longest for it
    runs in some way; all others recompute no less than they must, and take something for it.  How much longer that is is asked only where
    what is saved once a step alone could bring the step below `upper_bound_s`.
    """
    ranks, step_s = range(schedule.ranks), partial(_dealt_s, row, schedule, runs, least_s)
    least_once_s = [sum(row.once_s(*run) for run in runs[rank :: schedule.ranks]) for rank in ranks]
    once_s = [least + of.step_s for least, of in zip(least_once_s, of_ranks, strict=True)]
    longest = max(ranks, key=once_s.__getitem__)
    time_s, ways = step_s(of_ranks), of_ranks[longest].others  # it is its own bound: what other ranks take once is no longer
    rest_s = max((least_once_s[rank] for rank in ranks if rank != longest), default=0.0)
    saved_s = max((once_s[longest] - max(least_once_s[longest] + way.step_s, rest_s) for way in ways), default=0.0)
    if row.lines and time_s - saved_s >= upper_bound_s:
        return time_s, time_s - saved_s, of_ranks
    others = [[way if rank == longest else of_ranks[rank] for rank in ranks] for way in ways]
    bounds_s = [step_s([of if rank == longest else replace(of, step_s=0.0) for rank, of in enumerate(way)]) for way in others]
    tried = [of_ranks, *(() if row.lines else others)]  # a family needs its bound alone
    times_s = [time_s, *map(step_s, tried[1:])]
    best = times_s.index(min(times_s))
    return times_s[best], min([time_s, *bounds_s]), tried[best]


def _dealt_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], least_s: float, of_ranks: Sequence[_RankModes]) -> float:
    """Seconds of a step whose ranks recompute so, which takes `least_s` at least."""
    more_s = [of_ranks[n % schedule.ranks].more_s[n // schedule.ranks] for n in range(len(runs))]
    return max(staged_step_s([row] * schedule.ranks, schedule, runs, more_s, [of.step_s for of in of_ranks]), least_s)


def _spread(
    row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], of_ranks: list[_RankModes], least_s: float, time_s: float, once_s: float
) -> tuple[float, float, list[_RankModes]]:
    """The same with the ways of ranks of which another recomputes less in some stage: each rank has the one with which the step is
    shortest, rank by rank; what is least in each stage bounds them all."""
    step_s, found = partial(_dealt_s, row, schedule, runs, least_s), list(of_ranks)
    once_s = min(once_s, step_s([replace(of, more_s=of.floor_s, step_s=0.0) for of in of_ranks]))
    for rank, of in enumerate(() if row.lines else of_ranks):  # a family needs its bound alone
        for way in of.spread:
            tried = [*found[:rank], way, *found[rank + 1 :]]
            if (tried_s := step_s(tried)) < time_s:
                time_s, found = tried_s, tried
    return time_s, min(once_s, time_s), found


def least_deal_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]]) -> float:
    """Seconds that a step of these stages takes at least: a rank begins when the first micro-batch has come through the first stage of
    every rank before."""
    ranks = schedule.ranks
    each_s = [sum(row.total_s(first, end) for first, end in runs[rank::ranks]) for rank in range(ranks)]
    return max(_waited_s(row, schedule, runs, rank, took_s) for rank, took_s in enumerate(each_s))


def _waited_s(
    row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], rank: int, each_s: float | np.ndarray
) -> float | np.ndarray:
    """The same where a rank takes so long for a micro-batch."""
    parts = row.at.forward_s if schedule.name == "zero_bubble" else row.at.work_s
    return parts[runs[rank][0]] + row.micro_batches * each_s


def _least_held_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], capacity: float) -> float:
    """The same by the lines of a row."""
    each_s = (float(_lines_s(row, schedule, runs, rank, capacity).max(initial=0.0)) for rank in range(schedule.ranks))
    return max(_waited_s(row, schedule, runs, rank, took_s) for rank, took_s in enumerate(each_s)) if row.lines else 0.0


def _lines_s(row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], rank: int, capacity: float) -> np.ndarray:
    """`Row.lines_s` of a rank.  The block at one place of its stage runs in one mode in all stages of a rank, so that what blocks keep is
    held as often as, on average, in the stages that have such a place; if blocks are not alike, as often as in any stage."""
    mine = runs[rank :: schedule.ranks]
    sizes = tuple(end - first for first, end in mine)
    moments = held_moments(schedule.name, schedule.ranks, schedule.stages_per_rank, row.micro_batches)[rank]
    held = max(least_held(moment, sizes) if row.alike else min(moment) for moment in moments)
    return row.lines_s(mine, held, capacity)


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


def runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First and end unit of stages with so many units each."""
    return list(pairwise(accumulate(sizes, initial=0)))


@dataclass(frozen=True, slots=True)
class _RankModes:
    """How the stages of a rank recompute: by stage the mode of each unit and by how much its backward takes longer, and what they take more
    than at least once a step; `each_s`: seconds of a micro-batch, with their share of those once a step, that no way goes below which fits.
    `others`: ways that recompute more and take less once a step; `spread`: ways that recompute more in all, but less in some stage (one
    of them for a family); each stage takes `floor_s` more at least in all of them."""

    modes: list[list[int]]
    more_s: Sequence[float]
    step_s: float
    each_s: float
    others: tuple[_RankModes, ...] = ()
    spread: tuple[_RankModes, ...] = ()
    floor_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ways:
    """The ways to run the stages of a rank, whichever rank it is: arrays by way.  `of_stages_s`: by how much backward of each stage takes
    longer; `each_s`: of a micro-batch, with its share of those once a step; `kept`, `late` and `moments` are bytes by stage; `fixed_bytes`:
    of what no way changes."""

    of_stages: tuple[AlikeWays, ...]
    of_stages_s: np.ndarray
    more_s: np.ndarray
    step_s: np.ndarray
    each_s: np.ndarray
    lines: np.ndarray
    kept: np.ndarray
    late: np.ndarray
    moments: np.ndarray
    fixed_bytes: int


def _ways(row: Row, runs: Sequence[tuple[int, int]], parted: tuple[bool, ...]) -> _Ways:
    """Those of stages `runs`; ranks whose stages are alike have them in common."""
    ends = ((first == 0, end == len(row), row.sent(first) if first else 0, row.sent(end)) for first, end in runs)
    key = tuple((tuple(row.sorts[first:end]), *at_ends) for (first, end), at_ends in zip(runs, ends, strict=True)), parted
    if key not in row.known_stages:
        row.known_stages[key] = _all_ways(row, runs, parted)
    return row.known_stages[key]


def _all_ways(row: Row, runs: Sequence[tuple[int, int]], parted: Sequence[bool]) -> _Ways:
    longest = max(end - first for first, end in runs)
    ways = tuple(row.alike_ways(first, end, longest) for first, end in runs)
    more_s, work_s, step_s, lines = (sum(getattr(way, part) for way in ways) for part in ("more_s", "work_s", "step_s", "lines"))
    kept, late, moments = [], [], []
    for (first, end), way, two in zip(runs, ways, parted, strict=True):
        kept.append(row.at.kept[end] - row.at.kept[first] + row.sent(end) + way.more_kept)
        late.append((row.at.late[end] - row.at.late[first] + way.late) * two)
        moments.append(row.moment(first, end, way.parted if two else way.transient, late[-1], two))
    static = sum(row.memory(first, end) for first, end in runs) - (len(runs) - 1) * row.model.fixed_bytes
    once_s = step_s / row.micro_batches
    return _Ways(
        ways, np.stack([way.more_s for way in ways], axis=1), more_s, step_s, row.with_more_s(runs, more_s + once_s, work_s + once_s),
        lines, np.array(kept), np.array(late), np.array(moments), static + row.passing(runs),
    )  # fmt: skip


def _rank_modes(
    row: Row, schedule: Schedule, runs: Sequence[tuple[int, int]], rank: int, capacity: float, upper_bound_s: float = inf
) -> _RankModes | None:
    """The least recomputation with which a rank of a pipeline with stages `runs` fits; None if none does.  By the lines of a row, ways are
    left out with which a step takes `upper_bound_s`; if all are, `each_s` is infinite."""
    of = schedule.name, schedule.ranks, schedule.stages_per_rank, row.micro_batches
    all_runs, runs = runs, runs[rank :: schedule.ranks]
    held, turns = np.array(held_moments(*of)[rank]), late_moments(*of)[rank]
    parted = tuple(is_parted(schedule.name, rank + number * schedule.ranks) for number in range(len(runs)))
    ways = _ways(row, runs, parted)
    kept, late, moments, step_s, each_s = ways.kept, ways.late, ways.moments, ways.step_s, ways.each_s
    most = (held @ kept).max(axis=0)
    if len(runs) > 1 and runs[-1][1] == len(row) and not parted[-1]:  # as in `pipeline.fullest_of`, for all ways at once
        fullest = np.maximum(most + moments[-1], (held[:, :-1] @ kept[:-1]).max(axis=0) + np.max(moments[:-1], axis=0))
    else:
        fullest = most + np.max([np.array(counts) @ late + moments[chunk] for counts, chunk in turns], axis=0)
    fits = ways.fixed_bytes + fullest <= capacity
    if not fits.any():
        return None
    if row.lines:
        each_s = np.maximum(each_s, (_lines_s(row, schedule, all_runs, rank, capacity) + ways.lines).max(axis=1))
        fits &= _waited_s(row, schedule, all_runs, rank, each_s) < upper_bound_s
        if not fits.any():
            return _RankModes([], [], 0.0, inf)
    best, least_s, of_stages_s = int(np.where(fits, ways.more_s, inf).argmin()), float(each_s[fits].min()), ways.of_stages_s
    quicker = np.flatnonzero(fits & (step_s < step_s[best]))
    others = quicker[undominated(np.column_stack([of_stages_s[quicker], step_s[quicker]]))] if len(quicker) else quicker
    less = np.flatnonzero(fits & (of_stages_s < of_stages_s[best]).any(axis=1))
    spread = less[:1] if row.lines or not len(less) else less[undominated(of_stages_s[less])[:_MOST_SPREAD]]
    found = [
        _RankModes([way.modes[place].tolist() for way in ways.of_stages], of_stages_s[place].tolist(), float(step_s[place]), least_s)
        for place in (best, *others.tolist(), *spread.tolist())
    ]  # fmt: skip
    own = 1 + len(others)
    floor_s = tuple(of_stages_s[fits].min(axis=0).tolist())
    return replace(found[0], others=tuple(found[1:own]), spread=tuple(found[own:]), floor_s=floor_s)
