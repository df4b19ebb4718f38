"""The remaining families of a candidate, best bound first."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from autopar.solve.bounds.family import Family


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A family of placements in the queue, with its lower bound. Sorted by bound, then by order of
    arrival.
    """

    bound_s: float
    number: int
    family: Family = field(compare=False)


class Frontier:
    """A priority queue of families (sets of placements), the lowest bound first. Together they
    contain every placement of a candidate that may still be optimal.
    """

    def __init__(self) -> None:
        self.pushed = self.popped = 0
        self.clear()

    def clear(self) -> None:
        """Removes all families, and forgets settled ones."""
        self.waiting: list[Waiting] = []
        self.settled_s = inf  # the least bound of families that were not split further

    def push(self, family: Family, bound_s: float) -> None:
        """Adds a family with its lower bound in seconds."""
        heapq.heappush(self.waiting, Waiting(bound_s, self.pushed, family))
        self.pushed += 1

    def pop(self) -> Family:
        """Remove and return the family with the lowest bound."""
        self.popped += 1
        return heapq.heappop(self.waiting).family

    def settle(self, bound_s: float) -> None:
        """Records the bound of a family that is done and leaves the queue; `bound_s` takes it into
        account.
        """
        self.settled_s = min(self.settled_s, bound_s)

    def part(self) -> list[Waiting]:
        """Removes and returns every second family in the order of bounds, so that both halves have
        families of all bounds.
        """
        self.waiting.sort()
        given, self.waiting = self.waiting[1::2], self.waiting[::2]
        return given

    def take(self, given: Sequence[Waiting]) -> None:
        """Add families that another process gave away."""
        self.waiting += given
        heapq.heapify(self.waiting)

    @property
    def bound_s(self) -> float:
        """A lower bound in seconds on all placements of the remaining and settled families;
        infinite if there are none.
        """
        return min(self.settled_s, self.waiting[0].bound_s if self.waiting else inf)
