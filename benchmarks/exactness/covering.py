"""A covering array: few rows of a table, in which every pair of values still appears, and every combination of values of some columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Combination = tuple[tuple[str, Any], ...]


def combinations_in(row: Mapping[str, Any], together: Sequence[str]) -> set[Combination]:
    """The combinations of (column, value) pairs that a row has: every two of its columns, and all
    the columns `together`.

        {a: 1, b: 2, c: 3}, together a b c  ->  a1 b2, a1 c3, b2 c3, a1 b2 c3
    """
    return {*combinations(row.items(), 2), tuple((name, row[name]) for name in together)}


def covering(rows: Sequence[Mapping[str, Any]], together: Sequence[str]) -> list[int]:
    """Ascending indices of a few rows that have every combination (`combinations_in`) that some row
    has.

    The choice is greedy: the next row is the first of those that add most combinations. Rows that
    later ones make needless are dropped. Equal rows give the same answer on every machine.
    """
    shown = [combinations_in(row, together) for row in rows]
    left, chosen = set().union(*shown), []
    while left:
        best = max(range(len(rows)), key=lambda number: len(shown[number] & left))
        chosen.append(best)
        left -= shown[best]
    counts = Counter(combination for number in chosen for combination in shown[number])
    for number in list(chosen):  # what later rows have made needless
        if all(counts[combination] > 1 for combination in shown[number]):
            chosen.remove(number)
            counts.subtract(shown[number])
    return sorted(chosen)
