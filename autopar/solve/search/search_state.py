"""What one process knows of a search."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

from autopar.solve.integer_program.placement_solver import OPTIMALITY_GAP, Solution
from autopar.solve.search.board import Board
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.staged_placement import Staged


def time_to_beat_s(time_s: float) -> float:
    """What a step must take less than to be faster than a plan: by more than rounding, and by less than what is proven."""
    return time_s * (1 - OPTIMALITY_GAP / 2)


@dataclass(slots=True, kw_only=True)
class SearchState:
    """The candidates, the best plan and the time. `queue` has open candidates that wait: (`Entry.turn`, number), the lowest first."""

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
        """What a step must take less than to be faster than the best plan."""
        return time_to_beat_s(self.best_s)

    @property
    def best_s(self) -> float:
        """The time of the best plan that any process has found."""
        return min(self.held_s, self.board.best_s)

    @property
    def held_s(self) -> float:
        """The time of the best plan that this process has, or those that called it or told it."""
        return self.others_s if self.best is None else min(self.others_s, time_of(self.best))

    def keep(self, entry: Entry, solution: Solution, staged: Staged | None = None) -> None:
        """A candidate has the best plan of all."""
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
        """Seconds until the limit, or 0. The limit is twice as long while no plan is known."""
        limit_s = self.limits.time_s * (1 if self.best_s < inf else 2)
        return max(limit_s - self.elapsed_s, 0.0)

    # ----------------------------------------------------------------------------------------------------------- queue

    def put_back(self, number: int) -> None:
        """Let a candidate wait for its turn."""
        heapq.heappush(self.queue, (*self.entries[number].turn, number))

    def take_out(self, numbers: Collection[int]) -> None:
        """Remove candidates from the queue."""
        self.queue = [turn for turn in self.queue if turn[-1] not in numbers]
        heapq.heapify(self.queue)

    # ------------------------------------------------------------------------------------------------------------- ends

    def prune(self, entry: Entry) -> bool:
        """Whether a candidate is left, since it cannot be faster than the best plan."""
        if entry.bound_s < self.wanted_s:
            return False
        if entry.bound_s == inf:
            entry.close("infeasible", "no placement fits its ranks, or none is consistent", inf)
        else:
            outcome = "solved" if entry.solution else "pruned"
            entry.close(outcome, f"takes at least {entry.bound_s:.6g} s", entry.bound_s)
        return True

    def close_in_time(self, entry: Entry) -> None:
        """Leave a candidate that is open when time ends."""
        if entry.outcome == "open" and (entry.solution is not None or not self.prune(entry)):
            outcome = "solved" if entry.solution else "unexplored"
            entry.close(outcome, "the time limit came first", entry.bound_s)


def time_of(entry: Entry) -> float:
    """Seconds of a step of the plan that a candidate has."""
    if entry.solution is None:
        raise ValueError(f"{entry.candidate} has no plan")
    return entry.solution.time_s
