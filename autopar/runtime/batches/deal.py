"""Batches that data-parallel ranks and micro-batches do not divide: which rows each rank runs, and what they count.

Micro-batch k of all ranks has `ranks x rows` slots.  Rows that do not fill all of them run in several, the same number for each, and the
loss of the micro-batch is divided by that number.  So every rank runs equally many micro-batches of one shape, as collectives and
pipelines want, and every row counts once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count


@dataclass(frozen=True, slots=True)
class MicroBatchRows:
    """Which rows one micro-batch runs, over all data-parallel ranks. A slot is a place for one row.

    `distinct` is the number of different rows. If it is less than the number of slots, the rows
    repeat: a rank continues at row `first` after row `first + distinct - 1`. Rank r's slots begin
    `r * stride` rows after row `first` of the global batch, counted in this way. The sum of losses
    over all slots is multiplied by `weight`.
    """

    first: int
    stride: int
    distinct: int
    weight: float


@dataclass(frozen=True, slots=True)
class Deal:
    """A global batch of `batch` rows as micro-batches, which `parts` describes in order. Each of
    `ranks` data-parallel ranks runs `rows` rows of each.

    `evenly`: each rank runs its own share of the batch, in order, so that no rank needs rows of
    another.
    """

    batch: int
    ranks: int
    rows: int
    parts: tuple[MicroBatchRows, ...]
    evenly: bool = False

    @property
    def slots(self) -> int:
        """Slots (places for a row) in one micro-batch, over all ranks."""
        return self.ranks * self.rows

    def place(self, part: MicroBatchRows, rank: int) -> tuple[int, int]:
        """(first, distance): this rank's rows of the micro-batch begin at row `first + rank *
        distance` of the global batch, which is how dropout numbers rows. If rows repeat, the
        distance is 0.
        """
        if part.distinct >= self.slots:
            return part.first, part.stride
        return part.first + rank * part.stride % part.distinct, 0

    def held(self, part: MicroBatchRows, rank: int) -> list[int]:
        """The `rows` rows that a rank runs in a micro-batch, as numbers in the global batch; a
        number may repeat.
        """
        first = rank * part.stride
        if part.distinct >= self.slots:
            return list(range(part.first + first, part.first + first + self.rows))
        return [part.first + slot % part.distinct for slot in range(first, first + self.rows)]


def even_deal(batch: int, ranks: int, rows: int) -> Deal:
    """The deal in which each rank runs its own share in order, and no row twice. `ranks` must
    divide `batch`, and `rows` must divide each share.
    """
    share = batch // ranks
    parts = tuple(
        MicroBatchRows(first, share, ranks * rows, 1.0) for first in range(0, share, rows)
    )
    return Deal(batch, ranks, rows, parts, evenly=True)


def deal(
    batch: int,
    ranks: int,
    most: int,
    fits: Callable[[int], bool] = lambda number: True,
    once: bool = False,
    consecutive: bool = False,
) -> Deal | None:
    """Choose how a global batch runs that ranks and micro-batches do not divide: the deal that
    computes least. None if no deal satisfies `once` and `consecutive`.

    Args:
        batch: rows of all ranks, at least 1.
        ranks: data-parallel ranks.
        most: the most rows that a rank may run in one micro-batch.
        fits: whether a pipeline can run this number of micro-batches; from some number on it can.
        once: no row may run twice.
        consecutive: the rows of a rank follow one another in the global batch.
    """
    found = []
    for rows in range(1, min(most, -(-batch // ranks)) + 1):
        sizes = _sizes(batch, ranks * rows)
        repeats = next(k for k in count() if fits(len(sizes) + k))
        if once and (repeats or sizes[-1] < ranks * rows):
            continue
        if consecutive and any(size % rows for size in sizes):
            continue
        work = (len(sizes) + repeats) * (rows + 1)  # a micro-batch costs about a row more
        found.append((work, -rows, _deal(batch, ranks, rows, sizes, repeats)))
    return min(found, key=lambda each: each[:2])[2] if found else None


def rows_of_rank(batch: int, ranks: int, rank: int) -> tuple[int, int]:
    """(first row, number of rows) of a rank: shares differ by one row at most, and the first ranks have the longer ones."""
    least, longer = divmod(batch, ranks)
    return rank * least + min(rank, longer), least + (rank < longer)


def _sizes(batch: int, slots: int) -> list[int]:
    """The number of distinct rows of each micro-batch, in order: `slots` while enough rows are
    left, then divisors of `slots`. They add up to `batch`.
    """
    full, left = divmod(batch, slots)
    found = [slots] * full
    while left:
        found.append(next(size for size in range(left, 0, -1) if slots % size == 0))
        left -= found[-1]
    return found


def _deal(batch: int, ranks: int, rows: int, sizes: list[int], repeats: int) -> Deal:
    """The Deal with `sizes[k]` distinct rows in micro-batch k. The last micro-batch runs `repeats`
    more times, and its weight is divided among these runs.
    """
    parts, first = [], 0
    for size in sizes:
        parts.append(MicroBatchRows(first, rows, size, size / (ranks * rows)))
        first += size
    last = parts.pop()
    parts += [replace(last, weight=last.weight / (repeats + 1))] * (repeats + 1)
    return Deal(batch, ranks, rows, tuple(parts))
