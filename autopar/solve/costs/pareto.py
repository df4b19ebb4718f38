"""Pareto-optimal rows of costs."""

from __future__ import annotations

import numpy as np

_TOGETHER = 100
"""Number of rows that are compared with all others at once."""


def undominated(keys: np.ndarray) -> list[int]:
    """Indices of the rows of `keys` that no other row dominates. A row dominates another if it is
    at most as large in every column; of equal rows the first one stays. The indices are sorted by
    the rows' first column, then the next.
    """
    order = np.lexsort(keys.T[::-1])
    columns, found = keys[order].T, []
    # those that tell rows apart; the first of them ascends
    columns = columns[(columns != columns[:, :1]).any(axis=1)][1:]
    while len(order):
        here, rest = columns[:, :_TOGETHER], columns[:, _TOGETHER:]
        best = np.flatnonzero(~np.triu(_at_most(here, here), 1).any(axis=0))
        left = ~_at_most(here[:, best], rest).any(axis=0)
        found += order[best].tolist()
        order, columns = order[_TOGETHER:][left], rest[:, left]
    return found


def _at_most(columns: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A boolean matrix: whether row i of `columns` is at most row j of `others` in every column."""
    found = np.ones((columns.shape[1], others.shape[1]), dtype=bool)
    for one, other in zip(columns, others, strict=True):
        found &= one[:, None] <= other
    return found
