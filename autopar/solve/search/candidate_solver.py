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
        """Raises the bound by a formula, unless it reaches `upper_bound_s` already. Returns (a
        lower bound, an estimate of step seconds, 0 if there is none).
        """

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """Stages some placements; `raise_bounds` must be called before. Returns (the fastest
        `Staged` plan found below `upper_bound_s`, or None; a lower bound in seconds on all
        placements).

        After `time_limit_s` seconds a solver may stop if a plan is known: its own, or another if
        `upper_bound_s` is finite. Without a plan it goes on. A second call does not continue the first.
        """

    def narrow(
        self, upper_bound_s: float, splits: int, time_limit_s: float
    ) -> tuple[Staged | None, float]:
        """Splits families of placements, at most `splits` times and until `time_limit_s` seconds
        have passed. Returns (the best `Staged` plan found below `upper_bound_s`, or None; a lower
        bound on all placements). The first call bounds the family of all placements; the next ones
        continue from there.
        """
