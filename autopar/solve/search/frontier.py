"""Candidates that wait, best bound first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.solve.bounds.family import Family


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A family whose bound is below what is known: by its bound."""

    bound_s: float
    number: int
    family: Family = field(compare=False)


class Frontier:
    """Families that together have every placement that may still be the best, the one of the least bound first."""

    def __init__(self) -> None:
        self.pushed = self.popped = 0
        self.clear()

    def clear(self) -> None:
        """Forget all families."""
        self.waiting: list[Waiting] = []
        self.settled_s = inf  # the least bound of families that were not split further

    def push(self, family: Family, bound_s: float) -> None:
        """Put a family back, to wait with its bound."""
        heapq.heappush(self.waiting, Waiting(bound_s, self.pushed, family))
        self.pushed += 1

    def pop(self) -> Family:
        """Take the family of the least bound."""
        self.popped += 1
        return heapq.heappop(self.waiting).family

    def settle(self, bound_s: float) -> None:
        """Leave a family with its bound: it is not split further."""
        self.settled_s = min(self.settled_s, bound_s)

    def part(self) -> list[Waiting]:
        """Give every other family away, so that both parts have some of every bound."""
        self.waiting.sort()
        given, self.waiting = self.waiting[1::2], self.waiting[::2]
        return given

    def take(self, given: Sequence[Waiting]) -> None:
        """Have families that were given away."""
        self.waiting += given
        heapq.heapify(self.waiting)

    @property
    def bound_s(self) -> float:
        """No placement that is still looked for is faster."""
        return min(self.settled_s, self.waiting[0].bound_s if self.waiting else inf)
