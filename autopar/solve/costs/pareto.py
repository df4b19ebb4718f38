"""Pareto-optimal rows of costs."""

from __future__ import annotations

import numpy as np

_MANY = 100
"""More rows than this may be compared level by level."""

_TOGETHER = 1024
"""Number of rows that are compared with all others at once."""

_FEW = 32
"""Up to this many levels of the narrow columns, rows are compared level by level."""


def undominated(keys: np.ndarray) -> list[int]:
    """Indices of the rows of `keys` that no other row dominates. A row dominates another if it is
    at most as large in every column; of equal rows the first one stays. The indices are sorted by
    the rows' first column, then the next.
    """
    order = np.lexsort(keys.T[::-1])
    # those that tell rows apart; the first of them ascends, so that only earlier rows dominate
    columns = keys[order].T
    columns = columns[(columns != columns[:, :1]).any(axis=1)][1:]
    if not len(columns):
        return order[:1].tolist()
    if len(order) > _MANY:
        ranks = [np.unique(column, return_inverse=True)[1] for column in columns]
        unlike = {ranked.tobytes(): ranked for ranked in ranks}.values()
        wide, *narrow = sorted(unlike, key=lambda ranked: -int(ranked.max()))
        levels, level_of = _levels(narrow, len(order))
        if len(levels) <= _FEW:
            return order[_by_levels(wide, levels, level_of)].tolist()
    return order[_by_sets(columns)].tolist()


def _levels(narrow: list[np.ndarray], count: int) -> tuple[np.ndarray, np.ndarray]:
    """(the distinct rows of the columns `narrow` as an array [level, column], the level of each of
    the `count` rows).
    """
    codes = np.zeros(count, dtype=int)
    for column in narrow:
        codes = codes * (int(column.max()) + 1) + column
    _, first, level_of = np.unique(codes, return_index=True, return_inverse=True)
    rows = np.array(narrow, dtype=int).reshape(len(narrow), count)
    return rows[:, first].T, level_of


def _by_levels(wide: np.ndarray, levels: np.ndarray, level_of: np.ndarray) -> np.ndarray:
    """Indices of the rows that no earlier row dominates. Row i has the rank `wide[i]` in one
    column, and `levels[level_of[i]]` in the others. For each level, the rows at most there need
    only be compared in the one column.
    """
    found = np.zeros(len(wide), dtype=bool)
    most = int(wide.max()) + 1
    for number, level in enumerate(levels):
        is_below = (levels <= level).all(axis=1)[level_of]
        least = np.minimum.accumulate(np.where(is_below, wide, most))
        before = np.concatenate([[most], least[:-1]])
        found |= (level_of == number) & (wide < before)
    return np.flatnonzero(found)


def _by_sets(columns: np.ndarray) -> np.ndarray:
    """Indices of the rows that no earlier row dominates, by sets of the rows that are at most as
    large as each. `columns` is indexed [column, row].
    """
    found, left = [np.zeros(0, dtype=int)], np.arange(columns.shape[1])
    while len(left):
        here, rest = columns[:, left[:_TOGETHER]], columns[:, left[_TOGETHER:]]
        turn = np.arange(here.shape[1])
        earlier = _at_most(np.vstack([here, turn]), np.vstack([here, turn - 1]))
        best = np.flatnonzero(~earlier.any(axis=1))
        found.append(left[:_TOGETHER][best])
        left = left[_TOGETHER:]
        if len(left):
            left = left[~_at_most(here[:, best], rest).any(axis=1)]
    return np.concatenate(found)


def _at_most(columns: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The set of the rows of `columns` that are at most as large as each row of `others`, in every
    column. Sets are bits of whole numbers, in an array [row of `others`, number].
    """
    count = columns.shape[1]
    places, found = np.arange(count), np.zeros(0)
    bits, words = np.uint64(1) << (places % 64).astype(np.uint64), places // 64
    for number, (one, other) in enumerate(zip(columns, others, strict=True)):
        order = np.argsort(one)
        sets = np.zeros((count + 1, -(-count // 64)), np.uint64)  # of the first rows in this order
        sets[places + 1, words[order]] = bits[order]
        np.bitwise_or.accumulate(sets, axis=0, out=sets)
        of_others = sets[np.searchsorted(one[order], other, side="right")]
        found = found & of_others if number else of_others
    return found
