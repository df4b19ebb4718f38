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
    return max(
        up[rank] + _between_s(order, rank, forward, backward, weight, hop_s) + down[rank]
        if order.warm_up[rank] < order.forwards - 1
        else up_end[rank] + down_end[rank]  # no steady state: all forwards, then all backwards
        for rank in range(order.ranks)
    )


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


def _between_s(order: Order, rank: int, forward: Rows, backward: Rows, weight: Rows | None, hop_s: float) -> float:
    """Seconds from the end of the first backward of `rank` to the start of its last forward, in its own order of work."""
    lap, total, depth = order.lap, order.forwards, order.warm_up[rank]
    seconds = _done_s(forward[rank], lap, total - 1) - _done_s(forward[rank], lap, depth + 1)
    seconds += _done_s(backward[rank], lap, total - 1 - depth) - backward[rank][0]
    if weight:
        seconds += _done_s(weight[rank], lap, max(0, total - 1 - depth - order.lag[rank]))
    return seconds
