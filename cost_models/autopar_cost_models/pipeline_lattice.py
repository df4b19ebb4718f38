"""Critical paths of a pipeline with unequal chunks: paths that change ranks at a few micro-batches
of each lap.

During a lap every rank repeats the same operations. Moving a change of ranks within a lap therefore
changes the length of a path linearly, and the longest path changes ranks at an end of some rank's
lap. Here it may change at the first micro-batch of a lap, the last one and some between (`MARKS`).
On each rank these operations are *marks*. A fixed number of operations of each kind and chunk lies
between two marks.

A path through fewer ranks is still a path, so only selected ranks are considered (`_anchors`); a
micro-batch just passes the others. Eventually the marks advance by the same time every few rounds
(`PERIOD`). Those rounds are counted instead of walked.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from autopar_cost_models.pipeline_order import Order
from autopar_cost_models.pipeline_paths import Rows, run_ends, spread

# Chosen by the agreement with simulations of up to 16 ranks and 4 chunks, and the time that it takes.
MARKS = 4  # a lap, of each kind, at least; with a single chunk four times as many, since a round is then one lap
ANCHORS = 16  # most ranks looked at
ROUNDS = 4  # walked through at least
WALK = 1000  # marks for which there is always time: more of a lap, then more rounds
PERIOD = 3  # most rounds after which marks are asked whether they move alike
ALIKE = 1e-11  # of a moment: by so much the moves of marks may differ

_Mark = tuple[int, int, tuple[tuple[int, int], ...], int, int]
"""(anchor, duration, since, source, way): an operation at which the path may change ranks.

The durations of an anchor are numbered: forwards by lap, then backwards by lap, then weight
gradients by lap. `since` lists what the anchor runs between its previous mark and this one:
(duration, how often). `source` is the mark that hands over the micro-batch; -1 if there is none or
it is on the same anchor. `way` is the way from there: the duration, or 2 * chunks if the
micro-batch comes from the other end of the pipeline.
"""


def lattice_path_s(
    order: Order,
    forward: Rows,
    backward: Rows,
    weight: Rows | None,
    hop_s: float,
    least: bool = False,
) -> float:
    """Seconds of the longest path that changes ranks only at a few micro-batches of each lap (the
    marks). It is a lower bound on the schedule's time.

    Rows are in the order in which chunks run: forward first to last, backward last to first.
    `least` restricts the paths to those that exist for all rows with equal or longer times.
    """
    anchors = spread(order.ranks) if least else _anchors(order, forward, backward, weight)
    rounds = order.micro_batches // order.lap
    per_round = 2 * len(anchors) * order.chunks * len(_offsets(order))
    kept = max(ROUNDS, WALK // per_round)
    while kept < rounds:
        time_s, ends_s = _walk_s(
            replace(order, micro_batches=kept * order.lap),
            anchors,
            forward,
            backward,
            weight,
            hop_s,
        )
        period, moved_s = _repeats(ends_s)
        left = (rounds - kept) % period if period else 0
        if period and not left:
            return time_s + (rounds - kept) // period * moved_s
        kept = kept + left if left else 2 * kept
    return _walk_s(order, anchors, forward, backward, weight, hop_s)[0]


def _repeats(ends_s: list[list[float]]) -> tuple[int, float]:
    """(period in rounds after which all marks advance alike, by how many seconds), confirmed over
    two periods; (0, ...) if they do not. `ends_s` is indexed [round][mark].
    """
    slack_s = ALIKE * max(ends_s[-1])
    for period in range(1, min(PERIOD, len(ends_s) // 3) + 1):
        pairs = zip(ends_s[-2 * period :], ends_s[-3 * period : -period], strict=True)
        moved_s = [
            late - early
            for lates, earlies in pairs
            for late, early in zip(lates, earlies, strict=True)
        ]
        if max(moved_s) - min(moved_s) <= slack_s:
            return period, moved_s[-1]
    return 0, 0.0


def _anchors(order: Order, forward: Rows, backward: Rows, weight: Rows | None) -> tuple[int, ...]:
    """The ranks at which paths may turn: some spread over the pipeline, and the ends of runs of
    equal ranks. If these are too many, the slowest in each lap and then the slowest overall are
    taken.

    With fewer micro-batches than ranks, turning inside a run of equal ranks can also lengthen a
    path, so every rank is a candidate.
    """
    ends = (
        run_ends(forward, backward, weight)
        if order.micro_batches >= order.ranks
        else list(range(order.ranks))
    )
    slowest = [
        max(ends, key=lambda r: forward[r][c] + backward[r][-1 - c]) for c in range(order.chunks)
    ]
    ranking = [
        *spread(order.ranks),
        *slowest,
        *sorted(ends, key=lambda r: -sum(forward[r]) - sum(backward[r])),
    ]
    return tuple(sorted(list(dict.fromkeys(ranking))[:ANCHORS]))


def _offsets(order: Order) -> list[int]:
    """The micro-batches of a lap that have marks, as indices into the lap."""
    rounds = min(ROUNDS, order.micro_batches // order.lap)
    wanted = max(
        MARKS if order.chunks > 1 else 4 * MARKS, WALK // (2 * order.ranks * order.chunks * rounds)
    )
    return sorted({(order.lap - 1) * part // (wanted - 1) for part in range(wanted)})


def _walk_s(
    order: Order,
    anchors: tuple[int, ...],
    forward: Rows,
    backward: Rows,
    weight: Rows | None,
    hop_s: float,
) -> tuple[float, list[list[float]]]:
    """(seconds of the longest path through the marks, end times of the marks of forwards by
    [round][mark]).
    """
    chunks = range(order.chunks)
    durations = [forward[r] + backward[r] + (weight[r] if weight else []) for r in anchors]
    ways = []  # [anchor][way]: from the mark on the neighbouring anchor, through the ranks between, to here
    for a, rank in enumerate(anchors):
        above = range(anchors[a - 1] + 1, rank) if a else ()
        below = range(rank + 1, anchors[a + 1]) if a < len(anchors) - 1 else ()
        down = [hop_s + sum(forward[k][c] + hop_s for k in above) for c in chunks]
        up = [hop_s + sum(backward[k][c] + hop_s for k in below) for c in chunks]
        ways.append(down + up + [hop_s])
    clocks_s = [0.0] * len(anchors)  # start of the last mark
    ends_s: list[float] = []
    marks, tails, rounds = _marks(order, anchors)
    for a, duration, since, source, way in marks:
        row = durations[a]
        start_s = clocks_s[a]
        for i, count in since:
            start_s += count * row[i]
        if source >= 0:
            arrival_s = ends_s[source] + ways[a][way]
            if arrival_s > start_s:
                start_s = arrival_s
        clocks_s[a] = start_s
        ends_s.append(start_s + row[duration])
    time_s = max(
        clocks_s[a] + sum(count * durations[a][i] for i, count in tail)
        for a, tail in enumerate(tails)
    )
    return time_s, [[ends_s[mark] for mark in of_round] for of_round in rounds]


@lru_cache(maxsize=256)
def _marks(
    order: Order, anchors: tuple[int, ...]
) -> tuple[list[_Mark], list[tuple[tuple[int, int], ...]], list[list[int]]]:
    """Three lists. The first has the marks of all anchors, each after the marks it waits for. The
    second has, for each anchor, (duration, how often) of its operations after its last mark. The
    third has, for each round, the indices of the marks of forwards.
    """
    lap, chunks, last = order.lap, order.chunks, order.ranks - 1
    kinds = 3 if order.weights else 2
    stride = max(lap, order.ranks)
    queue = []  # by a clock on which all operations take one tick
    for a, rank in enumerate(anchors):
        for number in range(order.forwards // lap):
            for offset in _offsets(order):
                tick = number * stride + offset
                queue.append((tick + rank, 0, rank, a, number, offset))
                turned = tick + (chunks - 1) * stride + last + (order.per_hop - 1) * (last - rank)
                queue.append((turned, 1, -rank, a, number, offset))
    queue.sort()
    place: dict[tuple[int, int, int, int], int] = {}
    done = [[0] * (kinds * chunks) for _ in anchors]
    marks: list[_Mark] = []
    for _, backward, _, a, number, offset in queue:
        now = _done_before(order, anchors[a], backward, number * lap + offset)[: kinds * chunks]
        duration = backward * chunks + number % chunks
        step, end = (1, len(anchors) - 1) if backward else (-1, 0)
        source, way = -1, duration
        if a != end:
            source = place[backward, a + step, number, offset]
        elif number % chunks:
            source, way = place[backward, len(anchors) - 1 - end, number - 1, offset], 2 * chunks
        place[backward, a, number, offset] = len(marks)
        marks.append((a, duration, _difference(done[a], now), source, way))
        done[a] = now
    every = _by_lap(order, order.forwards) * kinds
    tails = [_difference(before, every) for before in done]
    laps = range(order.forwards // lap)
    rounds = [
        [
            place[0, a, number, offset]
            for number in of
            for a in range(len(anchors))
            for offset in _offsets(order)
        ]
        for of in (laps[first : first + chunks] for first in range(0, len(laps), chunks))
    ]
    return marks, tails, rounds


def _difference(before: list[int], now: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple(
        (i, new - old) for i, (old, new) in enumerate(zip(before, now, strict=True)) if new > old
    )


def _done_before(order: Order, rank: int, backward: int, number: int) -> list[int]:
    """How many operations a rank runs before its forward `number`, or its backward `number` if
    `backward` is 1. They are counted by duration: forwards by lap, backwards by lap, weight
    gradients by lap.
    """
    depth, lag = order.warm_up[rank], order.lag[rank]
    forwards, backwards = (number + depth + 1, number) if backward else (number, number - depth)
    return _by_lap(order, forwards) + _by_lap(order, backwards) + _by_lap(order, backwards - lag)


def _by_lap(order: Order, count: int) -> list[int]:
    """How many of the first `count` operations of a kind lie in each lap of a round."""
    rounds, rest = divmod(max(0, min(order.forwards, count)), order.lap * order.chunks)
    return [
        rounds * order.lap + max(0, min(order.lap, rest - chunk * order.lap))
        for chunk in range(order.chunks)
    ]
