"""Critical paths of a pipeline whose chunks differ: paths that change ranks at a few micro-batches of each lap.

While a lap lasts, every rank repeats the same operations, so moving a change of ranks within a lap changes the length of a path linearly:
the longest one changes at an end of some rank's lap.  Here it may change with the first micro-batch of a lap, the last one and some between
(`MARKS`): on each rank these operations are *marks*, and a fixed number of operations of each kind and chunk lies between two of them.
A path through fewer ranks is still a path, so only ranks that stand out are looked at (`anchors`); a micro-batch passes the others.
After some rounds the longest path grows by the same amount with every round; those are not walked through.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from autopar_cost_models.pipeline_order import Order
from autopar_cost_models.pipeline_paths import Rows

MARKS = 4  # a lap: at least; with a single chunk, whose laps are long, three times as many
ROUNDS = 3  # walked through; more did not change the agreement with simulations
ANCHORS = 8  # most ranks looked at


@dataclass(frozen=True, slots=True)
class _Mark:
    """An operation where the path may change ranks.  Durations of an anchor are numbered forwards, backwards, weight gradients by lap."""

    anchor: int
    duration: int
    since: tuple[tuple[int, int], ...]
    """(duration, count): what the rank does between its mark before and this one, that mark included."""
    source: int
    """The mark that hands over the micro-batch, or -1: it is on the same rank or there is none."""
    wraps: bool
    """The micro-batch comes from the other end of the pipeline."""


def lattice_path_s(order: Order, forward: Rows, backward: Rows, weight: Rows | None, hop_s: float) -> float:
    """The longest path of the family.  Rows are in the order in which chunks run: forward first to last, backward last to first."""
    anchors = _anchors(order, forward, backward, weight)
    rounds = order.micro_batches // order.lap
    if rounds <= ROUNDS:
        return _walk_s(order, anchors, forward, backward, weight, hop_s)
    less_s, more_s = (
        _walk_s(replace(order, micro_batches=k * order.lap), anchors, forward, backward, weight, hop_s) for k in (ROUNDS - 1, ROUNDS)
    )
    return more_s + (rounds - ROUNDS) * (more_s - less_s)


def _anchors(order: Order, forward: Rows, backward: Rows, weight: Rows | None) -> tuple[int, ...]:
    """The ends of each run of equal ranks; of too many the first and last rank, then the slowest in each lap, then the slowest of all."""
    ranks = order.ranks
    loads = [[*forward[r], *backward[r], *(weight[r] if weight else ())] for r in range(ranks)]
    ends = [r for r in range(ranks) if r in (0, ranks - 1) or not loads[r - 1] == loads[r] == loads[r + 1]]
    if len(ends) <= ANCHORS:
        return tuple(ends)
    slowest = [max(ends, key=lambda r: forward[r][c] + backward[r][-1 - c]) for c in range(order.chunks)]
    ranking = [0, ranks - 1, *slowest, *sorted(ends, key=lambda r: -sum(loads[r]))]
    return tuple(sorted(list(dict.fromkeys(ranking))[:ANCHORS]))


def _walk_s(order: Order, anchors: tuple[int, ...], forward: Rows, backward: Rows, weight: Rows | None, hop_s: float) -> float:
    """The longest path through the marks, one after the other."""
    chunks = range(order.chunks)
    durations = [forward[r] + backward[r] + (weight[r] if weight else [0.0 for _ in chunks]) for r in anchors]
    arrivals = []  # [anchor][duration]: from the mark on the neighbouring anchor, through the ranks between, to here
    for a, rank in enumerate(anchors):
        above = range(anchors[a - 1] + 1, rank) if a else ()
        below = range(rank + 1, anchors[a + 1]) if a < len(anchors) - 1 else ()
        arrivals.append(
            [hop_s + sum(forward[k][c] + hop_s for k in above) for c in chunks]
            + [hop_s + sum(backward[k][c] + hop_s for k in below) for c in chunks]
        )
    clock_s = [0.0 for _ in anchors]  # start of the last mark
    ends_s: list[float] = []
    marks, tails = _marks(order, anchors)
    for mark in marks:
        row = durations[mark.anchor]
        start_s = clock_s[mark.anchor]
        for duration, count in mark.since:
            start_s += count * row[duration]
        if mark.source >= 0:
            start_s = max(start_s, ends_s[mark.source] + (hop_s if mark.wraps else arrivals[mark.anchor][mark.duration]))
        clock_s[mark.anchor] = start_s
        ends_s.append(start_s + row[mark.duration])
    return max(clock_s[a] + sum(count * durations[a][d] for d, count in tail) for a, tail in enumerate(tails))


@lru_cache(maxsize=256)
def _marks(order: Order, anchors: tuple[int, ...]) -> tuple[tuple[_Mark, ...], tuple[tuple[tuple[int, int], ...], ...]]:
    """The marks of all anchors, each after those it waits for, and for each anchor what it does from its last mark on."""
    lap, chunks, last = order.lap, order.chunks, order.ranks - 1
    parts = (MARKS if chunks > 1 else 3 * MARKS) - 1
    offsets = sorted({(lap - 1) * part // parts for part in range(parts + 1)})
    stride = max(lap, order.ranks)
    queue = []  # by a clock on which all operations take one tick
    for a, rank in enumerate(anchors):
        for number in range(order.laps):
            for offset in offsets:
                tick = number * stride + offset
                queue.append((tick + rank, 0, rank, a, number, offset))
                turned = tick + (chunks - 1) * stride + last + (order.per_hop - 1) * (last - rank)
                queue.append((turned, 1, -rank, a, number, offset))
    queue.sort()
    place: dict[tuple[int, int, int, int], int] = {}
    done = [[0] * (3 * chunks) for _ in anchors]
    marks: list[_Mark] = []
    for _, backward, _, a, number, offset in queue:
        now = _done_before(order, anchors[a], backward, number * lap + offset)
        chunk = number % chunks
        step, end = (1, len(anchors) - 1) if backward else (-1, 0)
        wraps = a == end and chunk > 0
        giver = (len(anchors) - 1 - end, number - 1) if wraps else (a + step, number)
        marks.append(
            _Mark(
                anchor=a,
                duration=backward * chunks + chunk,
                since=_difference(done[a], now),
                source=place[backward, *giver, offset] if wraps or a != end else -1,
                wraps=wraps,
            )
        )
        done[a] = now
        place[backward, a, number, offset] = len(marks) - 1
    every = _by_lap(order, order.forwards) * 3
    return tuple(marks), tuple(_difference(before, every) for before in done)


def _difference(before: list[int], now: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((i, new - old) for i, (old, new) in enumerate(zip(before, now, strict=True)) if new > old)


def _done_before(order: Order, rank: int, backward: int, number: int) -> list[int]:
    """How many operations of each duration a rank runs before forward (or backward) `number`."""
    depth, lag = order.warm_up[rank], order.lag[rank]
    forwards, backwards = (number + depth + 1, number) if backward else (number, number - depth)
    return _by_lap(order, forwards) + _by_lap(order, backwards) + _by_lap(order, backwards - lag)


def _by_lap(order: Order, count: int) -> list[int]:
    """The first `count` operations of a kind, by which lap of a round they are in."""
    rounds, rest = divmod(max(0, min(order.forwards, count)), order.lap * order.chunks)
    return [rounds * order.lap + max(0, min(order.lap, rest - chunk * order.lap)) for chunk in range(order.chunks)]
