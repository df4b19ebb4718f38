"""The interface of a candidate that is solved together with its stages and recompute modes."""

from __future__ import annotations

from typing import Protocol

from autopar.solve.search.frontier import Frontier
from autopar.solve.search.staged_placement import Staged


class CandidateSolver(Protocol):
    """Bounds and solves one candidate: placement, schedule, stages and recompute modes together. A
    protocol, without code.

    Bounds are lower bounds on step seconds of all placements. Only plans that take less than
    `upper_bound_s` are searched.
    """

    frontier: Frontier | None  # the families that are left, once the root is bounded

    def raise_bounds(self, upper_bound_s: float) -> tuple[float, float]:
        """Raises the bound by a formula. Returns (a lower bound, an estimate of step seconds)."""

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """Stages some placements. Returns (the best plan below `upper_bound_s`, or None; a lower
        bound on all placements).
        """

    def narrow(
        self, upper_bound_s: float, splits: int, time_limit_s: float
    ) -> tuple[Staged | None, float]:
        """Splits families of placements, at most `splits` times. Returns (the best plan found below
        `upper_bound_s`, or None; a lower bound on all placements). The next call continues from
        there.
        """
