"""The state of a search in one process."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.solve.integer_program.placement_solver import OPTIMALITY_GAP, Solution
from autopar.solve.search.board import Board
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.staged_placement import Staged
from autopar.solve.search.workers import patience_s

_WITHOUT_PLAN_SHARE = 0.3
"""Share of the time limit by which a step may be later as long as no plan is known."""


def time_to_beat_s(time_s: float) -> float:
    """The time that a faster plan must stay below: lower than `time_s` by more than rounding, but
    by less than the optimality gap.
    """
    return time_s * (1 - OPTIMALITY_GAP / 2)


@dataclass(slots=True, kw_only=True)
class SearchState:
    """What one process knows of a search: its candidates, the best plan and the time. `queue` has
    the waiting open candidates as (`Entry.turn`, index), the lowest first.
    """

    entries: list[Entry]
    limits: SearchLimits
    progress: Callable[[str], None]
    board: Board
    queue: list[tuple[bool, float, int]] = field(default_factory=list)
    best: Entry | None = None
    others_s: float = inf  # time of the best plan of processes that called this one or told it
    start: float = field(default_factory=time.perf_counter)

    # ------------------------------------------------------------------------------------------------------- best plan

    @property
    def wanted_s(self) -> float:
        """The time in seconds that a plan must stay below to be faster than the best one."""
        return time_to_beat_s(self.best_s)

    @property
    def best_s(self) -> float:
        """Step seconds of the best plan that any process has found; infinite if none."""
        return min(self.held_s, self.board.best_s)

    @property
    def held_s(self) -> float:
        """Step seconds of the best plan known to this process: its own, or one reported by the
        process that started it or by its helpers. Infinite if none.
        """
        return self.others_s if self.best is None else min(self.others_s, time_of(self.best))

    def keep(self, entry: Entry, solution: Solution, staged: Staged | None = None) -> None:
        """Stores a candidate's solution in `entry`, makes it the best one, and reports its time to
        other processes and as progress. Does not compare with the best so far.
        """
        entry.solution, entry.staged, self.best = solution, staged, entry
        self.board.found(solution.time_s)
        self.progress(f"{entry.chosen()}: {solution.time_s * 1e3:.3f} ms")

    # ------------------------------------------------------------------------------------------------------------ time

    @property
    def elapsed_s(self) -> float:
        """Seconds since the search began."""
        return time.perf_counter() - self.start

    @property
    def time_left_s(self) -> float:
        """Seconds until the limit, at least 0."""
        return max(self.limits.time_s - self.elapsed_s, 0.0)

    @property
    def stop_s(self) -> float:
        """The time, by `time.perf_counter()`, at which a step that is under way stops: the limit,
        or later as long as no plan is known. What follows a search needs no time without a plan.
        """
        limit_s, more_s = self.limits.time_s, 0.0
        if self.best_s == inf:
            more_s = max(_WITHOUT_PLAN_SHARE * limit_s, patience_s(limit_s))
        return self.start + limit_s + more_s

    # ----------------------------------------------------------------------------------------------------------- queue

    def put_back(self, number: int) -> None:
        """Puts candidate `number` into the queue, at the place of its `turn`."""
        heapq.heappush(self.queue, (*self.entries[number].turn, number))

    def take_out(self, numbers: Collection[int]) -> None:
        """Removes the candidates with these indices from the queue."""
        self.queue = [turn for turn in self.queue if turn[-1] not in numbers]
        heapq.heapify(self.queue)

    # ------------------------------------------------------------------------------------------------------------- ends

    def prune(self, entry: Entry) -> bool:
        """Closes a candidate if its bound proves that it cannot be faster than the best plan.
        Returns whether it was closed.
        """
        if entry.bound_s < self.wanted_s:
            return False
        if entry.bound_s == inf:
            entry.close("infeasible", "no placement fits its ranks, or none is consistent", inf)
        else:
            outcome = "solved" if entry.solution else "pruned"
            entry.close(outcome, f"takes at least {entry.bound_s:.6g} s", entry.bound_s)
        return True

    def close_in_time(self, entry: Entry) -> None:
        """Closes a candidate that is still open at the end of the time: pruned if possible,
        'solved' if it has a plan, otherwise 'unexplored'. Leaves others as they are.
        """
        if entry.outcome == "open" and (entry.solution is not None or not self.prune(entry)):
            outcome = "solved" if entry.solution else "unexplored"
            entry.close(outcome, OUT_OF_TIME, entry.bound_s)


def time_of(entry: Entry) -> float:
    """Step seconds of the plan in `entry`. Raises ValueError if it has none."""
    if entry.solution is None:
        raise ValueError(f"{entry.candidate} has no plan")
    return entry.solution.time_s
