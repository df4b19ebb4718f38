"""The best distribution (deal) of a row of units to ranks with several stages each.

Blocks are dealt evenly, except that the first and the last stage may get up to two fewer. Every
stage of a rank runs the same number of blocks in each mode, with the least recomputation that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import accumulate, pairwise, product
from math import inf

import numpy as np
from autopar_cost_models import held_moments

from autopar.ir.stop import check_time
from autopar.solve.costs.pareto import undominated
from autopar.solve.costs.pipeline_cost import stages_of
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.staging.rank_ways import RankChoice, before_s, fitting
from autopar.solve.staging.staged_time import is_monotone, staged_step_s
from autopar.solve.staging.unit_row import UnitRow

_MOST_SPREAD = 8
"""Number of ways for a rank that are tried although they recompute more in total than the best,
because they recompute less in some stage.
"""

FEWER = 2
"""The largest number of blocks by which the first and the last stage may be shorter."""


def best_deal(
    row: UnitRow, schedule: Schedule, capacity: float, upper_bound_s: float
) -> Staging | float:
    """The fastest `Staging`, over all deals (`unit_deals`), that fits each rank into `capacity`
    bytes and takes less than `upper_bound_s`. `upper_bound_s` does not include the constant seconds
    of a step.

    If there is none, a lower bound on the step seconds of the deals that fit; infinite if none
    fits.
    """
    best: tuple[float, tuple[int, ...], list[list[int]]] | None = None
    is_free, fits = True, False  # `fits`: some deal does, or may, for all that was looked at
    ranks, bound_s = schedule.ranks, upper_bound_s
    deals = [(sizes, runs_of(sizes)) for sizes in unit_deals(schedule, len(row))]
    lines_s = _lines_s(row, schedule, capacity)
    least = [
        max(
            least_deal_s(row, schedule, runs),
            _waited_s(row, schedule, runs, each_s.max(axis=1, initial=0.0)),
        )
        for (_, runs), each_s in zip(deals, lines_s, strict=True)
    ]
    for number in sorted(range(len(deals)), key=least.__getitem__):
        check_time()
        sizes, runs = deals[number]
        least_s, known_s = least[number], best[0] if best else upper_bound_s
        if least_s >= known_s:
            fits = True
            break
        found = fitting(row, schedule, runs, capacity, lines_s[number], known_s)
        if found is None:
            is_free = False
            continue
        (of_ranks, each_s), fits = found, True
        least_s = max(least_s, _waited_s(row, schedule, runs, each_s))
        is_free = is_free and not any(of.ways.more_s[of.place] for of in of_ranks)
        if least_s < known_s:
            time_s, once_s, of_ranks = _with_spread(row, schedule, runs, of_ranks, least_s, known_s)
            bound_s = min(bound_s, once_s if is_monotone(row, schedule) else least_s)
            if time_s < known_s:
                modes = [of_ranks[n % ranks].modes(n // ranks) for n in range(len(runs))]
                best = time_s, sizes, modes
    if best is None:
        return bound_s + row.model.fixed_s if fits or is_free else inf
    return _staging(row, *best, bound_s, is_free)


def _staging(
    row: UnitRow,
    time_s: float,
    sizes: tuple[int, ...],
    modes: list[list[int]],
    bound_s: float,
    is_free: bool,
) -> Staging:
    """The staging with `sizes[i]` units in stage i; `modes[stage][unit]` is an index into
    `row.modes`. Its `bound_s` is the smaller of `time_s` and `bound_s`, plus fixed seconds.
    `is_free` as in `Staging`.
    """
    of_segments = [row.modes[0]] * len(row.model.segments)
    for unit, mode in enumerate(mode for stage in modes for mode in stage):
        of_segments[row.blocks[unit]] = row.modes[mode]
    return Staging(
        stages_of(sizes, row.blocks, len(row.model.segments)),
        tuple(of_segments),
        min(time_s, bound_s) + row.model.fixed_s,
        is_free,
    )


def _with_spread(
    row: UnitRow,
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    of_ranks: list[RankChoice],
    least_s: float,
    upper_bound_s: float,
) -> tuple[float, float, list[RankChoice]]:
    """(step seconds of these stages, a lower bound for any ways that fit, the chosen way of each
    rank).

    Like `_with_what_is_once`, which it calls. It then tries, rank by rank, ways that recompute less
    in some stage, and keeps one if the step becomes shorter. The minimum for each stage separately
    gives the bound.
    """
    spread = [of.spread() for of in of_ranks]
    time_s, once_s, found = _with_what_is_once(
        row, schedule, runs, of_ranks, least_s, upper_bound_s
    )
    if not any(map(len, spread)):
        return time_s, once_s, found
    floors_s = [of.floor_s for of in found]
    floor_s = _stepped_s(row, schedule, runs, floors_s, [0.0] * len(found))
    once_s = min(once_s, max(floor_s, least_s))
    for rank, of in enumerate(() if row.lines else found):  # a family needs its bound alone
        for place in undominated(of.ways.of_stages_s[spread[rank]])[:_MOST_SPREAD]:
            tried = [*found[:rank], of.at(spread[rank][place]), *found[rank + 1 :]]
            if (tried_s := _dealt_s(row, schedule, runs, least_s, tried)) < time_s:
                time_s, found = tried_s, tried
    return time_s, min(once_s, time_s), found


def _with_what_is_once(
    row: UnitRow,
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    of_ranks: list[RankChoice],
    least_s: float,
    upper_bound_s: float,
) -> tuple[float, float, list[RankChoice]]:
    """(step seconds of these stages, a lower bound for any ways that fit, the chosen way of each
    rank).

    A longer backward hides more communication that runs once a step, so recomputation may shorten
    that. The rank with the longest time once a step is tried in every way; all others recompute as
    little as possible. If the row has lines (lower bounds), the ways stay as in `of_ranks`, and
    other ways only lower the bound.
    """
    ranks, step_s = range(schedule.ranks), partial(_dealt_s, row, schedule, runs, least_s)
    least_once_s = [row.once_s(runs[rank :: schedule.ranks]) for rank in ranks]
    once_s = [least + of.step_s for least, of in zip(least_once_s, of_ranks, strict=True)]
    longest = max(ranks, key=once_s.__getitem__)
    time_s, ways = (
        step_s(of_ranks),
        of_ranks[longest].others(),
    )  # it is its own bound: what other ranks take once is no longer
    rest_s = max((least_once_s[rank] for rank in ranks if rank != longest), default=0.0)
    saved_s = max(
        (once_s[longest] - max(least_once_s[longest] + way.step_s, rest_s) for way in ways),
        default=0.0,
    )
    if row.lines and time_s - saved_s >= upper_bound_s:
        return time_s, time_s - saved_s, of_ranks
    others = [[way if rank == longest else of_ranks[rank] for rank in ranks] for way in ways]
    bounds_s = [
        step_s(way, [of.step_s * (rank == longest) for rank, of in enumerate(way)])
        for way in others
    ]
    tried = [of_ranks, *(() if row.lines else others)]  # a family needs its bound alone
    times_s = [time_s, *map(step_s, tried[1:])]
    best = times_s.index(min(times_s))
    return times_s[best], min([time_s, *bounds_s]), tried[best]


def _dealt_s(
    row: UnitRow,
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    least_s: float,
    of_ranks: Sequence[RankChoice],
    more_once_s: Sequence[float] | None = None,
) -> float:
    """Step seconds, without the constant part, if each rank recomputes as `of_ranks` says; at least
    `least_s`. `more_once_s` overrides, by rank, the extra seconds once a step.
    """
    more_once_s = [of.step_s for of in of_ranks] if more_once_s is None else more_once_s
    return max(
        _stepped_s(row, schedule, runs, [of.more_s for of in of_ranks], more_once_s), least_s
    )


def _stepped_s(
    row: UnitRow,
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    more_s: Sequence[Sequence[float]],
    more_once_s: Sequence[float],
) -> float:
    """Step seconds of the stages `runs`, (first, end) units of each, if backward takes
    `more_s[rank][stage]` seconds longer. `more_once_s`: by rank, extra seconds once a step. Without
    the constant part.
    """
    by_run = [more_s[n % schedule.ranks][n // schedule.ranks] for n in range(len(runs))]
    return staged_step_s([row] * schedule.ranks, schedule, runs, by_run, more_once_s)


def least_deal_s(row: UnitRow, schedule: Schedule, runs: Sequence[tuple[int, int]]) -> float:
    """A lower bound on the step seconds of the stages `runs`, without the constant part. A rank
    starts when the first micro-batch has passed the first stage of every earlier rank, and then
    computes all its work.
    """
    ranks = schedule.ranks
    each_s = [
        sum(row.total_s(first, end) for first, end in runs[rank::ranks]) for rank in range(ranks)
    ]
    return _waited_s(row, schedule, runs, np.array(each_s))


def _waited_s(
    row: UnitRow, schedule: Schedule, runs: Sequence[tuple[int, int]], each_s: np.ndarray
) -> float:
    """As `least_deal_s`, if rank r takes `each_s[r]` seconds for a micro-batch, over all its
    stages.
    """
    return float((before_s(row, schedule, runs) + row.micro_batches * each_s).max())


def _lines_s(row: UnitRow, schedule: Schedule, capacity: float) -> np.ndarray:
    """Lower bounds on the seconds of a micro-batch, with its share of seconds once a step: an array
    [deal, rank, line]. Deals are those of `unit_deals`, lines those of `row`; -inf where a line
    does not apply. `capacity` is bytes of a rank. `least_recomputation.lines_s` is the same for one
    stage a rank, and says how.
    """
    ranks, count, lines = schedule.ranks, schedule.stages_per_rank, row.lines
    deals = unit_deals(schedule, len(row))
    if not lines:
        return np.zeros((len(deals), ranks, 0))
    ends = ends_of(schedule, len(row))
    of_ranks = partial(sums_of_ranks, schedule, ends)
    held = np.array([_held(schedule, row.micro_batches, sizes, row.alike) for sizes in deals])
    moments = (
        np.array([np.maximum.reduceat(row.least_moments, of[:-1]) for of in ends])
        .reshape(-1, count, ranks)
        .max(axis=1)
    )
    # its other stages may be fullest while the last keeps less
    of_last = [row.least_moments[start:].max() for start in ends[:, -2]]
    moments[:, -1] = np.maximum(np.array(of_last) - row.last.most_freed, row.last.transient)
    of_ties, of_ties_s = 0, 0.0
    for tie in row.ties.every:
        # as `TiedParameters.borrowed`
        has = (of_ranks(np.array(tie.read)) > 0) & (of_ranks(np.array(tie.paid)) == 0)
        of_ties, of_ties_s = of_ties + has * tie.static_bytes, of_ties_s + has * tie.step_s
    room = capacity - row.model.fixed_bytes - of_ties - moments
    kept_s, static_s = (
        np.array([getattr(line.price, name) for line in lines])[:, None, None]
        for name in ("kept_s", "static_s")
    )
    price = kept_s / held
    most = np.maximum(price, static_s)
    with np.errstate(invalid="ignore"):  # nothing times all the memory that there may be
        worth_s = np.where(most > 0, most * room, 0.0)
    found = (
        of_ranks(row.lines_least_s)
        - worth_s
        + np.maximum(price - static_s, 0.0) * of_ranks(row.before.static)
    )
    waits = np.array([line.price.late > 0 or line.price.late_by_ends > 0 for line in lines])[
        :, None, None
    ]
    return np.where(waits, -inf, found + of_ties_s / row.micro_batches).transpose(1, 2, 0)


@lru_cache(maxsize=4096)
def _held(
    schedule: Schedule, micro_batches: int, sizes: tuple[int, ...], alike: bool
) -> tuple[float, ...]:
    """For each rank, a lower bound on how many micro-batches' kept bytes it holds at its peak.
    `sizes` are the units of each stage.

    `alike`: all blocks have one class. The block at one place of a stage then has the same mode in
    all stages of a rank. Its count is therefore the average over the stages with that place. If
    blocks differ, it is the minimum over stages.
    """
    ranks = schedule.ranks
    moments = held_moments(schedule.name, ranks, schedule.stages_per_rank, micro_batches)
    return tuple(
        max(
            least_held(moment, sizes[rank::ranks]) if alike else float(min(moment)) for moment in of
        )
        for rank, of in enumerate(moments)
    )


@lru_cache(maxsize=65536)
def least_held(moment: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """A lower bound on how many micro-batches' kept bytes a rank holds. `moment` has the
    micro-batches that each of its stages holds, `sizes` their numbers of units.

    The block at one place has the same mode in all stages of a rank. Therefore any mixture of
    places is held at least as often as the minimum over places.
    """
    held = (
        [h for h, size in zip(moment, sizes, strict=True) if size > place]
        for place in range(max(sizes))
    )
    return min(sum(of) / len(of) for of in held)


@lru_cache(maxsize=1024)
def dealt_sizes(units: int, count: int) -> tuple[tuple[int, ...], ...]:
    """The deals of `units` units to `count` stages: for each, the number of units of each stage.
    Sizes differ by at most one, except that the first and the last may be up to `FEWER` shorter.
    Empty if there are too few units.
    """
    found: dict[tuple[int, ...], None] = {}
    for fewer in product(range(FEWER + 1), repeat=2):
        each, more = divmod(units + sum(fewer), count)
        # stages that get one more: the ends last
        order = sorted(range(count), key=lambda stage: (stage in (0, count - 1), stage))
        sizes = [each] * count
        for stage in order[:more]:
            sizes[stage] += 1
        sizes[0] -= fewer[0]
        sizes[-1] -= fewer[1]
        if min(sizes) > 0:
            found[tuple(sizes)] = None
    return tuple(found)


def unit_deals(schedule: Schedule, units: int) -> tuple[tuple[int, ...], ...]:
    """The deals of `units` units that a schedule allows: its own sizes if these are fixed, otherwise
    those of `dealt_sizes`. For each deal, the number of units of each stage.
    """
    if schedule.sizes:
        return (schedule.sizes,)
    return dealt_sizes(units, schedule.ranks * schedule.stages_per_rank)


@lru_cache(maxsize=1024)
def ends_of(schedule: Schedule, units: int) -> np.ndarray:
    """For each deal of `unit_deals`, as a row: the unit at which each stage begins, and the end of
    the last. No rows if there is no deal.
    """
    starts = np.array([(0, *sizes) for sizes in unit_deals(schedule, units)], int).reshape(
        -1, schedule.ranks * schedule.stages_per_rank + 1
    )
    return np.cumsum(starts, axis=1)


def sums_of_ranks(schedule: Schedule, ends: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """The sum over the stages of each rank, as an array [..., deal, rank]. `ends` come from
    `ends_of`; `sums` are prefix sums over units, along the last axis.
    """
    each = np.diff(sums[..., ends], axis=-1)
    return each.reshape(*each.shape[:-1], schedule.stages_per_rank, schedule.ranks).sum(axis=-2)


def runs_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The (first, end) unit of each stage, if stage i has `sizes[i]` units."""
    return list(pairwise(accumulate(sizes, initial=0)))
