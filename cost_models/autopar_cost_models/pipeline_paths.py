"""Critical paths of a pipeline: lower bounds on its time. The longest path is taken as the time.

A path follows the work of a rank, in its order, and moves from rank to rank with a micro-batch. The
longest of *all* paths is the makespan. The family here is: *ramp up* to the first backward of some
rank r, *work* of rank r up to its last forward, *ramp down*.

- Ramp up: the first micro-batch passes all stages and returns to rank r. Any rank on the way may
  instead delay it by the work that it runs before (warm-up, or a lap of a slow chunk).
- Work: what rank r does between its first backward and its last forward. With a single chunk and
  messages that take time, loops through ranks may take longer: forward to some rank and back, which
  advances one micro-batch per rank.
- Ramp down: the mirror image of ramp up. If time runs backwards, the last backward is the first
  forward.

For uniform stages this is the textbook result: (m - 1) periods of the slowest rank plus one pass
through the pipeline.
"""

from __future__ import annotations

from functools import partial

from autopar_cost_models.pipeline_order import Order

Rows = list[list[float]]
"""Seconds of one operation, indexed [rank][lap of a round]."""

_SPREAD = 4
"""Number of ranks, spread over the pipeline, that are always considered."""


def pivot_path_s(
    order: Order,
    forward: Rows,
    backward: Rows,
    weight: Rows | None,
    hop_s: float,
    least: bool = False,
) -> float:
    """Seconds of the longest path of a family, which is a lower bound on the schedule's time. A
    path ramps up to the first backward of some rank, follows its work (or loops through ranks) up
    to its last forward, and ramps down.

    Rows are in the order in which chunks run: forward first to last, backward last to first.
    `least` restricts the paths to those that exist for all rows with equal or longer times.
    """
    up_end, up = _ramp_s(order, forward, backward, None, hop_s, least)
    extra = _mirrored(weight) if weight else weight
    down_end, down = _ramp_s(order, _mirrored(backward), _mirrored(forward), extra, hop_s, least)
    best_s = 0.0
    for rank in range(order.ranks):
        if order.warm_up[rank] < order.forwards - 1:
            path_s = up[rank] + _work_s(order, rank, forward, backward, weight) + down[rank]
        else:  # no steady state: all forwards, then all backwards
            path_s = max(up_end[rank], up[rank] - backward[rank][0]) + down_end[rank]
        best_s = max(best_s, path_s)
    if order.chunks == 1 and hop_s:
        columns = [f + b for (f,), (b,) in zip(forward, backward, strict=True)]
        weights = [w for (w,) in weight] if weight else [0.0] * order.ranks
        looping_s = partial(_looping_s, order, columns, weights, hop_s)
        for first, last in (
            () if least else _loops(columns, weights, hop_s, run_ends(forward, backward, weight))
        ):
            heavy = max(range(first, last + 1), key=columns.__getitem__)
            for rank, arc in {(first, 0), (heavy, 0), (heavy, heavy - first)}:
                if order.micro_batches - 2 - order.warm_up[rank] >= arc:
                    path_s = looping_s(first, rank, last, arc)
                    best_s = max(best_s, up[rank] + path_s + down[rank])
        from_first = {(0, last) for last in range(1, order.ranks)}
        for first, last in from_first | {
            (last - more, last) for more in (1, 2) for last in range(more, order.ranks)
        }:
            if order.micro_batches - 2 >= order.warm_up[first]:
                path_s = looping_s(first, first, last, 0)
                best_s = max(best_s, up[first] + path_s + down[first])
    return best_s


def spread(ranks: int) -> tuple[int, ...]:
    """Up to `_SPREAD` ranks, evenly spread over a pipeline and including the first and the last."""
    count = min(_SPREAD, ranks)
    return tuple((ranks - 1) * part // max(count - 1, 1) for part in range(count))


def run_ends(forward: Rows, backward: Rows, weight: Rows | None) -> list[int]:
    """Ranks that differ from a neighbour, and the first and the last. Among equal ranks a path
    seldom becomes longer by turning in the middle.
    """
    loads = list(zip(forward, backward, weight or forward, strict=True))
    last = len(loads) - 1
    return [
        r for r in range(last + 1) if r in (0, last) or not loads[r - 1] == loads[r] == loads[r + 1]
    ]


def _mirrored(rows: Rows) -> Rows:
    """Rows with time reversed: each rank's durations in the opposite order."""
    return [row[::-1] for row in rows]


def _lap_ends_s(order: Order, first: Rows, extra: Rows | None, hop_s: float) -> list[float]:
    """By rank, when the first operation of kind `first` in the last lap of the ramp-up ends.
    `extra` are the durations of weight gradients that run before, if time is reversed.
    """
    ends_s: list[float] = []  # of a lap
    for chunk in range(order.chunks):
        arrival_s = ends_s[-1] + hop_s if chunk else 0.0  # of its micro-batch, at each rank in turn
        free_s = [0.0] * order.ranks
        if chunk:  # the lap before keeps the rank busy until then
            more = order.lap - 1
            free_s = [
                end_s + more * row[chunk - 1] for end_s, row in zip(ends_s, first, strict=True)
            ]
        if extra:
            free_s = [
                busy_s + _extra_s(order, rank, extra, chunk) for rank, busy_s in enumerate(free_s)
            ]
        ends_s = []
        for busy_s, row in zip(free_s, first, strict=True):
            end_s = (arrival_s if arrival_s > busy_s else busy_s) + row[chunk]
            ends_s.append(end_s)
            arrival_s = end_s + hop_s
    return ends_s


def _ramp_s(
    order: Order, first: Rows, turn: Rows, extra: Rows | None, hop_s: float, least: bool
) -> tuple[list[float], list[float]]:
    """By rank: (when operation number `warm_up` of kind `first` ends, when the first operation of
    kind `turn` ends), under the longest path tried.

    Up to operation number j of `first`, a rank also runs the `extra` operations up to number j +
    lag. These are the weight gradients when time is reversed. `least` as in `pivot_path_s`.
    """
    lap, last, ranks = order.lap, order.chunks - 1, order.ranks
    ends_s = _lap_ends_s(order, first, extra, hop_s)
    warm_s: list[float] = []
    travel_s: dict[int, list[float]] = {}  # chunk -> [rank]: a micro-batch from rank 0 to there
    slow = 0  # the slowest rank so far in the last lap: it spaces out what follows, where there are several laps as a rule only
    always = spread(ranks) if order.chunks > 1 else ()
    for rank in range(ranks):
        if first[rank][last] >= first[slow][last]:
            slow = rank
        count = min(order.warm_up[rank], order.forwards - 1) + 1
        end_s = ends_s[rank] + _span_s(order, rank, first, extra, last * lap + 1, count)
        for before in (k for k in (always if least and always else {*always, slow}) if k < rank):
            chunk = (count - 1) // lap % order.chunks
            if chunk not in travel_s:
                travel_s[chunk] = [0.0]
                for k in range(1, ranks):
                    travel_s[chunk].append(travel_s[chunk][-1] + first[k][chunk] + hop_s)
            passed_s = travel_s[chunk][rank] - travel_s[chunk][before]
            end_s = max(
                end_s,
                ends_s[before]
                + _span_s(order, before, first, extra, last * lap + 1, count)
                + passed_s,
            )
        warm_s.append(end_s)

    turned_s = [0.0] * ranks
    arrival_s = 0.0
    for rank in reversed(range(ranks)):
        turned_s[rank] = max(warm_s[rank], arrival_s) + turn[rank][0]
        arrival_s = turned_s[rank] + hop_s
    return warm_s, turned_s


def _done_s(row: list[float], lap: int, count: int) -> float:
    """Seconds of the first `count` operations of a rank. An operation takes row[0] in the first
    lap, row[1] in the second, and so on in cycles.
    """
    rounds, rest = divmod(count, lap * len(row))
    chunk, part = divmod(rest, lap)
    return lap * (rounds * sum(row) + sum(row[:chunk])) + (part * row[chunk] if part else 0.0)


def _span_s(
    order: Order, rank: int, first: Rows, extra: Rows | None, start: int, stop: int
) -> float:
    """Seconds of a rank's operations start..stop-1 of kind `first`, and of the `extra` operations
    (weight gradients, if time is reversed; None without) that run with them.
    """
    lap = order.lap
    if order.chunks == 1 or stop <= order.chunks * lap:  # all in the last lap
        total_s = (stop - start) * first[rank][-1]
    else:
        total_s = _done_s(first[rank], lap, stop) - _done_s(first[rank], lap, start)
    if extra:
        lag, most = order.lag[rank], order.forwards
        total_s += _done_s(extra[rank], lap, min(most, stop + lag)) - _done_s(
            extra[rank], lap, min(most, start + lag)
        )
    return total_s


def _extra_s(order: Order, rank: int, extra: Rows, chunk: int) -> float:
    """Seconds of the `extra` operations after the first operation of the previous lap (for chunk 0,
    from the start), up to the first operation of this lap, that of `chunk`.
    """
    lap, row, ahead = order.lap, extra[rank], order.lag[rank] + 1
    if ahead <= lap:
        return ahead * row[chunk] + ((lap - ahead) * row[chunk - 1] if chunk else 0.0)
    stop = min(order.forwards, chunk * lap + ahead)
    start = min(order.forwards, (chunk - 1) * lap + ahead) if chunk else 0
    return _done_s(row, lap, stop) - _done_s(row, lap, start)


def _work_s(order: Order, rank: int, forward: Rows, backward: Rows, weight: Rows | None) -> float:
    """Seconds of the work of `rank` between its first backward and its last forward."""
    lap, total, depth = order.lap, order.forwards, order.warm_up[rank]
    if order.chunks == 1:
        seconds = (total - 2 - depth) * (forward[rank][0] + backward[rank][0])
        return seconds + (
            max(0, total - 1 - depth - order.lag[rank]) * weight[rank][0] if weight else 0.0
        )
    seconds = _done_s(forward[rank], lap, total - 1) - _done_s(forward[rank], lap, depth + 1)
    seconds += _done_s(backward[rank], lap, total - 1 - depth) - backward[rank][0]
    if weight:
        seconds += _done_s(weight[rank], lap, max(0, total - 1 - depth - order.lag[rank]))
    return seconds


def _loops(
    columns: list[float], weights: list[float], hop_s: float, ends: list[int]
) -> list[tuple[int, int]]:
    """Candidate loops, as (first rank, last rank): for each first rank, the best last rank at the
    rate of the fastest-growing loop, and further last ranks.

    A loop of n ranks advances n micro-batches in sum(columns) + 2 (n - 1) hops + the weight
    gradient of its first rank. Dinkelbach's method finds the greatest ratio ("On nonlinear
    fractional programming", Management Science 13, 1967): guess the ratio, find the best run of
    ranks for that guess, take its ratio as the next guess.
    """
    rate_s = 0.0
    while True:
        best_s, best, gain_s, last = rate_s, 0, 0.0, 0
        found: dict[int, int] = {}
        for rank in reversed(range(len(columns))):
            if gain_s <= 0.0:
                gain_s, last = 0.0, rank
            gain_s += columns[rank] + 2 * hop_s - rate_s
            found[rank] = last
            ratio_s = rate_s + (gain_s - 2 * hop_s + weights[rank]) / (last - rank + 1)
            if ratio_s > best_s:
                best_s, best = ratio_s, rank
        if best_s <= rate_s * (1 + 1e-9):
            return [(rank, found[rank]) for rank in found] + [
                (best, last) for last in ends if last > best
            ]
        rate_s = best_s


def _looping_s(
    order: Order,
    columns: list[float],
    weights: list[float],
    hop_s: float,
    first: int,
    rank: int,
    last: int,
    arc: int,
) -> float:
    """Seconds from the end of the first backward of `rank` to the start of its last forward, along
    loops first..last that contain it.

    Each loop goes up to rank `first`, down to rank `last` and back. `rank` itself processes the
    micro-batches that fill no loop. At the end the path may go up to rank `first` and back once
    more (`arc` ranks; 0: it does not).
    """
    size, lag = last - first + 1, order.lag[first]
    times, rest = divmod(order.micro_batches - 2 - order.warm_up[rank] - arc, size)
    end = times * size + rest  # number of the backward that the last forward follows
    path_s = times * (sum(columns[first : last + 1]) + 2 * (size - 1) * hop_s)
    # turns 0, size, 2 size, ... that are late enough
    path_s += weights[first] * max(0, times - -(-lag // size))
    top = first if arc else rank
    arc_s = (
        sum(columns[first : first + arc])
        + 2 * arc * hop_s
        + (weights[top] if end >= order.lag[top] else 0.0)
    )
    rest_s = rest * columns[rank] + weights[rank] * max(0, min(rest, end - order.lag[rank]))
    if rest and rank == first:
        shorter_s = sum(columns[first : first + rest]) + 2 * (rest - 1) * hop_s
        rest_s = max(rest_s, shorter_s + (weights[first] if end - rest >= lag else 0.0))
    return path_s + rest_s + arc_s
