"""Critical paths of a pipeline: sums of stage times that no execution of the order can beat; the longest one is the time.

A path goes along the work of a rank, in its order, and from rank to rank with a micro-batch.  The longest of *all* paths is the makespan.
The family here is: *ramp up* to the first backward of some rank r, *work* of rank r up to its last forward, *ramp down*.

    ramp up    the first micro-batch through all stages and back to rank r; any rank on the way may instead hold it up by the work
               that it puts before it (warm-up, or a lap of a slow chunk)
    work       what rank r does between its first backward and its last forward, or where messages take time and the warm-up is only one
               forward deeper per rank, loops over ranks r..i: forward to rank i and back, which advances i - r + 1 micro-batches
    ramp down  the mirror image of ramp up: run time backwards, and the last backward is the first forward

Uniform stages give the textbook: (m - 1) periods of the slowest rank plus one pass through the pipeline.
"""

from __future__ import annotations

from autopar_cost_models.pipeline_order import Order

Rows = list[list[float]]
"""[rank][lap of a round]: seconds of one operation."""


def pivot_path_s(order: Order, forward: Rows, backward: Rows, weight: Rows | None, hop_s: float) -> float:
    """The longest path of the family.  Rows are in the order in which chunks run: forward first to last, backward last to first."""
    up_end, up = ramp_s(order, forward, backward, None, hop_s)
    mirror = [rows and [row[::-1] for row in rows] for rows in (backward, forward, weight)]
    down_end, down = ramp_s(order, *mirror, hop_s)
    best_s = 0.0
    for rank in range(order.ranks):
        if order.warm_up[rank] < order.forwards - 1:
            path_s = up[rank] + _between_s(order, rank, forward, backward, weight) + down[rank]
        else:  # no steady state: all forwards, then all backwards
            path_s = max(up_end[rank], up[rank] - backward[rank][0]) + down_end[rank]
        best_s = max(best_s, path_s)
    if order.chunks == 1 and hop_s:
        columns = [f + b for (f,), (b,) in zip(forward, backward, strict=True)]
        weights = [w for (w,) in weight] if weight else [0.0] * order.ranks
        for first, last in _loops(columns, weights, hop_s):
            heavy = max(range(first, last + 1), key=columns.__getitem__)
            for rank in {first, heavy}:
                for arc in {0, rank - first}:
                    if order.micro_batches - 2 - order.warm_up[rank] >= arc:
                        path_s = _looping_s(order, first, rank, last, arc, columns, weights, hop_s)
                        best_s = max(best_s, up[rank] + path_s + down[rank])
    return best_s


def _loops(columns: list[float], weights: list[float], hop_s: float) -> list[tuple[int, int]]:
    """Loops first..last worth a look: for each first rank the best last one at the rate of the fastest-growing loop, and all of its own.

    A loop of n ranks advances n micro-batches in sum(columns) + 2 (n - 1) hops + the weight gradient of its first rank.  The greatest
    ratio is found by Dinkelbach's method ("On nonlinear fractional programming", Management Science 13, 1967): guess the ratio, find
    the best run of ranks for that guess, take its ratio for the next guess.
    """
    ranks = len(columns)
    rate_s = 0.0
    while True:
        best, gain, last = (rate_s, 0), 0.0, ranks - 1
        found: list[tuple[int, int]] = []
        for rank in reversed(range(ranks)):
            if gain <= 0.0:
                gain, last = 0.0, rank
            gain += columns[rank] + 2 * hop_s - rate_s
            found.append((rank, last))
            length = last - rank + 1
            ratio = rate_s + (gain - 2 * hop_s + weights[rank]) / length
            best = max(best, (ratio, rank))
        if best[0] <= rate_s * (1 + 1e-12):
            return found + [(best[1], last) for last in range(best[1] + 1, ranks)]
        rate_s = best[0]


def _looping_s(
    order: Order, first: int, rank: int, last: int, arc: int, columns: list[float], weights: list[float], hop_s: float
) -> float:
    """Seconds from the end of the first backward of `rank` to the start of its last forward, by loops first..last that contain it.

    Each loop goes up to rank `first`, down to rank `last` and back; `rank` itself works off the micro-batches that fill no loop.
    At the end the path may go up to rank `first` and back once more (`arc` ranks; 0: it stays).
    """
    size = last - first + 1
    times, rest = divmod(order.micro_batches - 2 - order.warm_up[rank] - arc, size)
    end = times * size + rest  # number of the backward that the last forward follows
    path_s = times * (sum(columns[first : last + 1]) + 2 * (size - 1) * hop_s)
    path_s += weights[first] * sum(1 for turn in range(0, times * size, size) if turn >= order.lag[first])
    arc_s = sum(columns[first : first + arc]) + 2 * arc * hop_s
    top = first if arc else rank
    arc_s += weights[top] if end >= order.lag[top] else 0.0
    rest_s = rest * columns[rank] + weights[rank] * max(0, min(rest, end - order.lag[rank]))
    if rest and rank == first:
        shorter_s = sum(columns[first : first + rest]) + 2 * (rest - 1) * hop_s
        rest_s = max(rest_s, shorter_s + (weights[first] if end - rest >= order.lag[first] else 0.0))
    return path_s + rest_s + arc_s


def ramp_s(order: Order, first: Rows, turn: Rows, extra: Rows | None, hop_s: float) -> tuple[list[float], list[float]]:
    """Way in: [rank] -> (end of operation number warm_up of kind `first`, end of the first operation of kind `turn`).

    Each `first` number j follows, on its rank, the `extra` up to number j + lag: the weight gradients, when time runs backwards.
    """
    lap, last, ranks = order.lap, order.chunks - 1, order.ranks
    ends: list[float] = []
    for chunk in range(order.chunks):
        before, ends = ends, []
        for rank in range(ranks):
            duration_s = first[rank][chunk]
            start_s = 0.0
            if rank or chunk:  # the micro-batch arrives
                start_s = (ends[-1] if rank else before[-1]) + hop_s
            if chunk:  # or the rank is busy with the lap before
                start_s = max(start_s, before[rank] + (lap - 1) * first[rank][chunk - 1] + _extra_s(order, rank, extra, chunk))
            elif extra:
                start_s = max(start_s, _extra_s(order, rank, extra, 0))
            ends.append(start_s + duration_s)

    warm: list[float] = []
    slow = 0  # the slowest rank so far in the last lap: it spaces out what follows
    for rank in range(ranks):
        if first[rank][last] >= first[slow][last]:
            slow = rank
        count = min(order.warm_up[rank], order.forwards - 1) + 1
        chunk = (count - 1) // lap % order.chunks
        end_s = 0.0
        for source in {slow, rank}:
            held_s = _span_s(order, source, first, extra, last * lap + 1, count)
            travel_s = sum(first[k][chunk] + hop_s for k in range(source + 1, rank + 1))
            end_s = max(end_s, ends[source] + held_s + travel_s)
        warm.append(end_s)

    turned = [0.0] * ranks
    for rank in reversed(range(ranks)):
        arrival_s = turned[rank + 1] + hop_s if rank < ranks - 1 else 0.0
        turned[rank] = max(warm[rank], arrival_s) + turn[rank][0]
    return warm, turned


def _done_s(row: list[float], lap: int, count: int) -> float:
    """Seconds of the first `count` operations of a rank whose laps take row[0], row[1], ..., row[0], ... each."""
    rounds, rest = divmod(count, lap * len(row))
    chunk, part = divmod(rest, lap)
    return lap * (rounds * sum(row) + sum(row[:chunk])) + (part * row[chunk] if part else 0.0)


def _span_s(order: Order, rank: int, first: Rows, extra: Rows | None, start: int, stop: int) -> float:
    """Seconds of operations start..stop-1 of kind `first` and of the `extra` that come with them."""
    total_s = _done_s(first[rank], order.lap, stop) - _done_s(first[rank], order.lap, start)
    if extra:
        lag, most = order.lag[rank], order.forwards
        total_s += _done_s(extra[rank], order.lap, min(most, stop + lag)) - _done_s(extra[rank], order.lap, min(most, start + lag))
    return total_s


def _extra_s(order: Order, rank: int, extra: Rows | None, chunk: int) -> float:
    """Seconds of `extra` after the first operation of the lap before, up to the first of this lap."""
    if not extra:
        return 0.0
    stop = chunk * order.lap + 1 + order.lag[rank]
    start = stop - order.lap if chunk else 0
    return _done_s(extra[rank], order.lap, min(order.forwards, stop)) - _done_s(extra[rank], order.lap, min(order.forwards, start))


def _between_s(order: Order, rank: int, forward: Rows, backward: Rows, weight: Rows | None) -> float:
    """Seconds from the end of the first backward of `rank` to the start of its last forward, in its own order of work."""
    lap, total, depth = order.lap, order.forwards, order.warm_up[rank]
    seconds = _done_s(forward[rank], lap, total - 1) - _done_s(forward[rank], lap, depth + 1)
    seconds += _done_s(backward[rank], lap, total - 1 - depth) - backward[rank][0]
    if weight:
        seconds += _done_s(weight[rank], lap, max(0, total - 1 - depth - order.lag[rank]))
    return seconds
