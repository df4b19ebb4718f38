"""A covering array: few rows of a table, in which every pair of values still appears, and every combination of values of some columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

Combination = tuple[tuple[str, Any], ...]


def combinations_in(row: Mapping[str, Any], together: Sequence[str]) -> set[Combination]:
    """What a row shows: every pair of its values, and its values of the columns `together`.

    {a: 1, b: 2, c: 3}, together a b c  ->  a1 b2, a1 c3, b2 c3, a1 b2 c3
    """
    return {*combinations(row.items(), 2), tuple((name, row[name]) for name in together)}


def covering(rows: Sequence[Mapping[str, Any]], together: Sequence[str]) -> list[int]:
    """Numbers of rows, ascending, that show all that the rows show together.

    Greedy: next is the row that shows most of what is left, the first of equals, so that the same rows give the same answer everywhere.
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
