"""The least recomputation with which a run of units fits."""

from __future__ import annotations

from math import inf
from operator import sub

import numpy as np

from autopar.solve.staging.recompute_options import BlockOptions, Ways
from autopar.solve.staging.unit_row import UnitRow

_ROUNDING = 1e-9
"""Slack of a number of micro-batches."""


def least(
    row: UnitRow, first: int, end: int, held: int, capacity_bytes: float, late: int = 0
) -> tuple[float, np.ndarray, float] | None:
    """The fastest way to run units `first` to `end` as a stage that fits, and a bound; None if no
    way fits. Returns (seconds that recomputation adds to backward, amounts, a lower bound in
    seconds).

    Amounts count blocks by [kind, recompute mode]. The bound holds for a micro-batch in all ways
    that fit, with its share of seconds once a step. It is 0 for a row without lines. `held` is the
    number of micro-batches held. `late` is the number that wait for gradients of parameters; with
    0, backward is not split.
    """
    own = end == len(row), row.sent(end), *map(id, row.ties.borrowed([(first, end)]))
    key = (
        *map(sub, row.sorts_before[end], row.sorts_before[first]),
        *own,
        held,
        capacity_bytes,
        late,
    )
    if key not in row.known_least:
        row.known_least[key] = _least(row, first, end, held, capacity_bytes, late)
    return row.known_least[key]


def ways(
    row: UnitRow, first: int, end: int, held: int, capacity_bytes: float, late: int = 0
) -> Ways:
    """The `Ways` to recompute in a stage with units `first` to `end` that fit, fastest first; each
    slower one takes less time once a step. Arguments as in `least`. Empty if no way fits.
    """
    options, fits = _fitting(row, first, end, held, capacity_bytes, late)
    each_s = np.array([kind.step_s for kind in row.recompute.kinds])
    once_s = (options.amounts[fits] * each_s).sum(axis=(1, 2))
    front = np.flatnonzero(once_s < np.minimum.accumulate(np.concatenate([[inf], once_s[:-1]])))
    return Ways(
        options.more_s[fits][front],
        once_s[front],
        options.amounts[fits][front],
        row.recompute.are_few(_counts(row, first, end)),
    )


def _least(
    row: UnitRow, first: int, end: int, held: int, capacity_bytes: float, late: int
) -> tuple[float, np.ndarray, float] | None:
    options, fits = _fitting(row, first, end, held, capacity_bytes, late)
    if not len(fits):
        return None
    least_s = 0.0
    if row.lines:  # without, a placement's own times say nearly as much
        each_s = row.with_more_s([(first, end)], options.least_s[fits], options.work_s[fits])
        of_lines = lines_s(row, first, end, held, capacity_bytes, late) + options.lines[fits]
        least_s = float(np.maximum(each_s, of_lines.max(axis=1)).min())
    return float(options.more_s[fits[0]]), options.amounts[fits[0]], least_s


def _counts(row: UnitRow, first: int, end: int) -> tuple[int, ...]:
    """Number of blocks of each kind in units `first` to `end`."""
    return tuple(map(sub, row.counts[end], row.counts[first]))


def _fitting(
    row: UnitRow, first: int, end: int, held: int, capacity_bytes: float, late: int
) -> tuple[BlockOptions, np.ndarray]:
    """(all options to recompute in units `first` to `end`, indices of those that fit in
    `capacity_bytes`). Arguments as in `least`.
    """
    at = row.at
    room = (
        capacity_bytes
        - row.memory([(first, end)])
        - held * (at.kept[end] - at.kept[first] + row.sent(end))
    )
    room += max(late - 1, 0) * row.last.freed_parted * (end == len(row))
    options = row.recompute.options(_counts(row, first, end), late > 0)
    waiting = options.late + (late > 0) * (at.late[end] - at.late[first])
    moment = row.moment(first, end, options.moment, waiting, late > 0)
    return options, np.flatnonzero(held * options.more_kept + late * waiting + moment <= room)


def lines_s(
    row: UnitRow, first: int, end: int, held: float, capacity_bytes: float, late: int = 0
) -> np.ndarray:
    """For each line: a lower bound on a rank's seconds of a micro-batch, with its share of seconds
    once a step.

    The rank has this run and holds `held` times what it keeps in `capacity_bytes`, of which `late`
    micro-batches wait for gradients of parameters. Each block runs in the mode in which its line is
    least. `interleaved.py` has the same for several runs.

    Kept bytes (K) and static bytes (S) satisfy held K + S <= room. Their value is therefore at most
    room at the larger of both prices, less a correction for the other kind, by its lower bound. A
    waiting micro-batch includes the peak of its backward in what it holds, or on top. The others
    hold L instead of K, so held ((1 - part) K + part L) + S <= room for any part up to (late - 1) /
    held. They have freed what the last segment keeps: at most `most_freed` for each that is counted
    as if it kept everything.
    """
    at, ends, last = row.at, end == len(row), row.last
    static, kept = at.static[end] - at.static[first], at.least_kept[end] - at.least_kept[first]
    moment = int(row.least_moments[first:end].max())
    # one of them counts all that the last segment keeps
    moment = max(moment - last.most_freed * ends, last.transient * ends)
    ties = row.ties.borrowed([(first, end)])
    fixed = sum(tie.static_bytes for tie in ties) + row.model.fixed_bytes
    room = capacity_bytes - fixed - held * row.sent(end) - moment
    ties_s = sum(tie.step_s for tie in ties) / row.micro_batches
    beside, found = at.beside[end] > at.beside[first], np.full(len(row.lines), -inf)
    for number, line in enumerate(row.lines if held else ()):
        price = line.price
        if max(price.late, price.late_by_ends * beside) * held > max(late - 1, 0) + _ROUNDING:
            continue
        least_s, kept_s = line.least_s[end] - line.least_s[first], price.kept_s / held
        if kept_s > 0 or price.static_s > 0:
            given_back = max(late - 1 - price.late_by_ends * held, 0.0) * last.most_freed * ends
            least_s -= max(kept_s, price.static_s) * (room + given_back)
            least_kept = held * kept * (1 - max(price.late, price.late_by_ends))
            least_s += (
                max(kept_s - price.static_s, 0.0) * static
                + max(price.static_s - kept_s, 0.0) * least_kept
            )
        found[number] = least_s + ties_s
    return found
