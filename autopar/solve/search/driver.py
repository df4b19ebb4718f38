"""The best-first branch and bound over candidates, in one process or several.

The candidate with the lowest estimate (bound plus expected excess) is refined next: a `Refiner`
raises its bound, solves it or splits it. A candidate is pruned as soon as its bound reaches the
time of the best plan, so a pruned candidate cannot contain a faster plan. The bound of the whole
search is the minimum over all candidates, including pruned and unexplored ones.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Protocol

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.ir.stop import TimeIsOver, stops_at
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.candidate import Candidate
from autopar.solve.integer_program.placement_solver import OPTIMALITY_GAP, Infeasible
from autopar.solve.search.board import NOBODY
from autopar.solve.search.candidate_state import Entry, FixedSolver
from autopar.solve.search.result import SearchResult
from autopar.solve.search.search_state import SearchState, time_of
from autopar.solve.search.work_sharing import Loan, Sharing, Told

_MUCH_BETTER = 0.9
"""A candidate that another process opened is opened here again if its estimate is at most this
fraction of the next one's.
"""

_DIVE_SHARE = 0.1
"""Share of the time limit after which candidates are solved while others are still opened, until
there is a plan.
"""

_FIRST_SHARE = 0.2
"""Share of the time limit in which candidates that are likely good are solved before others."""

_NAP_S = 0.02
"""Seconds that a process waits for others to open candidates."""


class Refiner(Protocol):
    """Opens and refines the candidates of a search by their index. A protocol: `UniformRefiner` is
    for devices of one kind, `MixedRefiner` for several.
    """

    opening_share: float  # of the time limit, after which no more candidates are opened in advance
    most_beside: int  # candidates of the best mesh that are solved in vain before others have turns
    without_plan: str  # status of a search that found no plan where none is proven not to exist

    def open(self, number: int) -> None:
        """Finds the first lower bound of candidate `number` and marks it as opened, or closes
        it.
        """

    def advance(self, number: int, at_once: bool) -> None:
        """Takes one step with the open candidate `number`: raises its bound, solves it, or splits
        it. `at_once`: repeat until it is solved or cannot be the best; `MixedRefiner` ignores this.
        """

    def cells_by_name(self) -> dict[Hashable, Cell]:
        """The cells that were made in this process, by the keys of the search."""

    def smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The candidate that needs least memory, with an `Infeasible` that says how much. None if
        no candidate has a consistent placement.
        """


@dataclass(slots=True, kw_only=True)
class Driver:
    """A search by branch and bound, in one process or several. `members` has the candidate indices
    of each entry; `order` is the order in which entries are opened. Those of `first` are solved
    before.
    """

    state: SearchState
    refiner: Refiner
    sharing: Sharing
    members: Sequence[Sequence[int]]
    order: Sequence[int] = field(default=())
    first: Sequence[int] = field(default=())

    def run(self) -> SearchResult:
        """Searches all candidates, waits for other processes, and returns the merged result."""
        self._complete(self._work)
        return self._result()

    def _complete(self, work: Callable[[], None]) -> None:
        """Runs `work`, waits for helper processes, runs `work` again for helpers that died, and
        merges all results. Helpers are stopped in any case.
        """
        try:
            work()
            while self.sharing.wait():
                work()
        finally:
            self.sharing.team.dismiss()
        self.sharing.merge()

    def _work(self) -> None:
        """Opens and refines candidates until each remaining one is refined by another process, or
        no time is left.
        """
        self._solve_first()
        self._open_all()
        while (number := self._next()) is not None:
            best = self.state.best
            self._refine(number)
            if self.state.best is not best:
                self._refine_beside()
            self._share_out()
        self._end()

    def _work_off(self) -> None:
        """Refines only the candidates in this process's queue, until none or no time is left. It is
        the work of a helper with a loan.
        """
        while self.state.queue and self.state.time_left_s:
            *_, number = heapq.heappop(self.state.queue)
            if self.state.entries[number].outcome == "open":  # else it was there twice
                self._refine(number)
            self.sharing.hear()
            self.sharing.lend(self._borrow)
        self._end()

    def _end(self) -> None:
        """Closes the candidates that are still in the queue, and empties it."""
        for *_, number in self.state.queue:
            self.state.close_in_time(self.state.entries[number])
        self.state.queue.clear()

    # ------------------------------------------------------------------------------------------------------ candidates

    def _solve_first(self) -> None:
        """Solves the entries of `first`, or finds that they cannot be the best, for a fifth of the
        time at most. Only the process that began the search does, while helpers open others.
        """
        state, sharing = self.state, self.sharing
        if sharing.me:
            return
        for number in self.first:
            if state.elapsed_s > _FIRST_SHARE * state.limits.time_s:
                break
            if state.board.take(state.board.opener, sharing.cells[number], sharing.me):
                if self._take(number):
                    self._refine(number, at_once=True)
                self._share_out()

    def _open_all(self) -> None:
        """Opens all candidates that no process has opened, in `order`. Stops once the refiner's
        share of the time is spent.
        """
        state, sharing = self.state, self.sharing
        state.board.busy[sharing.me] = 1
        for place, number in enumerate(self.order):
            entry = state.entries[number]
            if (
                entry.outcome != "unexplored"
                or entry.is_opened
                or state.board.owner[number] not in (sharing.me, NOBODY)
            ):
                continue
            if state.elapsed_s > state.limits.time_s * self.refiner.opening_share:
                share = f"{self.refiner.opening_share:.0%} of the time"
                state.progress(
                    f"{share} is spent on annotating {place} of {len(state.entries)} candidates"
                )
                break
            if state.board.take(state.board.opener, sharing.cells[number], sharing.me):
                self._open(number)
                if entry.outcome == "open":
                    state.put_back(number)
                self._share_out()
                self._dive()
        state.board.busy[sharing.me] = 0

    def _dive(self) -> None:
        """Solves the most promising open candidate if no plan is known after a tenth of the time. A
        plan excludes candidates that are opened later, and is an answer if time runs out.
        """
        state = self.state
        late = state.elapsed_s > _DIVE_SHARE * state.limits.time_s
        if late and state.queue and state.best_s == inf:
            *_, number = heapq.heappop(state.queue)
            if self._take(number):
                self._refine(number, at_once=True)

    def _open(self, number: int) -> None:
        """Finds the first bound of candidate `number`, and writes it to the board for other
        processes. If the time ends before that, the candidate stays unexplored.
        """
        entry, board = self.state.entries[number], self.state.board
        try:
            with stops_at(self.state.stop_s):
                self.refiner.open(number)
        except TimeIsOver:
            entry.outcome, entry.is_opened, entry.solver = "unexplored", False, None
        if entry.is_opened:
            board.bound_s[number], board.estimate_s[number] = entry.bound_s, entry.estimate_s

    def _refine(self, number: int, at_once: bool = False) -> None:
        """Takes one step with candidate `number`, unless it can be pruned, and puts it back in the
        queue if it is still open. `at_once`: steps until it is solved or cannot be the best. A step
        that the end of the time stops leaves the candidate open, with the bound that it had.
        """
        entry = self.state.entries[number]
        if not self.state.prune(entry):
            with suppress(TimeIsOver), stops_at(self.state.stop_s):
                self.refiner.advance(number, at_once)
        if entry.outcome == "open":
            self.state.put_back(number)

    def _refine_beside(self) -> None:
        """Solves the most promising unsolved candidates with the best plan's mesh, such as the next
        micro-batch, which is often better. Stops after the refiner's `most_beside` in a row without
        a better plan.
        """
        state, missed = self.state, 0
        if state.best is None:
            return
        mesh = shape_of(state.best.candidate)
        numbers = [
            number
            for number, entry in enumerate(state.entries)
            if shape_of(entry.candidate) == mesh and not entry.is_solved
        ]
        for number in sorted(numbers, key=self._likely_s):
            best = state.best
            if missed == self.refiner.most_beside or not state.time_left_s:
                break
            if self._likely_s(number) < state.wanted_s and self._take(number):
                state.take_out({number})
                self._refine(number, at_once=True)
                missed = 0 if state.best is not best else missed + state.entries[number].is_solved

    def _likely_s(self, number: int) -> float:
        """The estimated step seconds of candidate `number`, from this process or the one that
        opened it; infinite if none did.
        """
        entry = self.state.entries[number]
        return entry.estimate_s if entry.is_opened else float(self.state.board.estimate_s[number])

    def _next(self) -> int | None:
        """The index of the next candidate to refine, which this process now owns. None if none or
        no time is left. Waits while other processes open candidates.
        """
        state, board, me = self.state, self.state.board, self.sharing.me
        while state.time_left_s:
            while state.queue and board.owner[state.queue[0][-1]] not in (me, NOBODY):
                heapq.heappop(state.queue)
            other = board.waiting(state.wanted_s) if board.is_shared else None
            if state.queue and (other is None or not self._is_better(other)):
                *_, number = heapq.heappop(state.queue)
            elif other is not None:
                number = other
            elif board.busy.any():
                time.sleep(_NAP_S)
                if self.sharing.hear():
                    self._open_all()
                continue
            else:
                return None
            if self._take(number):
                return number
        return None

    def _is_better(self, other: int) -> bool:
        """Whether candidate `other`, which no process refines, is to be opened here again before
        the next one in the queue is refined. False if it is open here. True if the next one is
        split into families, or if the estimate of `other` is below 0.9 of the next one's.
        """
        is_split, estimate_s, _ = self.state.queue[0]
        return self.state.entries[other].outcome == "unexplored" and (
            is_split or self.state.board.estimate_s[other] < _MUCH_BETTER * estimate_s
        )

    def _take(self, number: int) -> bool:
        """Claims candidate `number` for this process and opens it if necessary. Returns whether
        this process has it and it is open.
        """
        entry, board = self.state.entries[number], self.state.board
        if number in self.sharing.away or not board.take(board.owner, number, self.sharing.me):
            return False
        if entry.outcome == "unexplored" and not entry.is_opened:
            self._open(number)
        return entry.outcome == "open"

    # --------------------------------------------------------------------------------------------------------- helpers

    def _share_out(self) -> None:
        """Starts helper processes if there is enough work, receives results, and lends work to a
        new helper if one may start.
        """
        self.sharing.call_helpers(self._help)
        if self.sharing.hear():
            self._open_all()
        self.sharing.lend(self._borrow)

    def _help(self, me: int, tell: Callable[[str], None]) -> Told:
        """What a helper process runs, as process number `me`: the same search. Returns its results;
        `tell` sends a line of progress.
        """
        self.sharing.begin_to_help(tell)
        self.sharing.me = me
        try:
            self._complete(self._work)
        finally:
            self.state.board.busy[me] = 0
        known = np.flatnonzero(self.sharing.known_to() == me).tolist()
        # of those that are open another process became the owner, and died since
        closed = [number for number in known if self.state.entries[number].outcome != "open"]
        return self.sharing.told_of(closed)

    def _borrow(self, loan: Loan, _: int, tell: Callable[[str], None]) -> Told:
        """What a helper process with a loan runs: only the lent work. Returns the results for it;
        `tell` sends a line of progress.
        """
        self.sharing.begin_to_help(tell)
        self.sharing.begin_loan(loan)
        self._complete(self._work_off)
        return self.sharing.told_of(loan.numbers)

    # ---------------------------------------------------------------------------------------------------------- result

    def _result(self) -> SearchResult:
        state, best, smallest = self.state, self.state.best, None
        for entry in state.entries:  # of what a process that was killed had, nobody takes what cannot be faster, nor what is late
            if entry.outcome == "unexplored":
                state.prune(entry)
            state.close_in_time(entry)
        bound_s = min((entry.bound_s for entry in state.entries), default=inf)
        if best is not None:
            best.outcome, time_s = "chosen", time_of(best)
            bound_s = min(bound_s, time_s)
            status = "optimal" if time_s - bound_s <= OPTIMALITY_GAP * time_s else "feasible"
        elif any(entry.outcome == "unexplored" for entry in state.entries):
            status = "time limit"
        else:
            status = "infeasible" if bound_s == inf else self.refiner.without_plan
            smallest = self.refiner.smallest()
        model, origin, groups = (None, None, ()) if best is None else _models_of(best)
        pairs = (
            zip(numbers, entry.outcomes(), strict=True)
            for numbers, entry in zip(self.members, state.entries, strict=True)
        )
        ordered = sorted(chain.from_iterable(pairs), key=lambda pair: pair[0])
        glances_s = {
            number: float(glance_s)
            for numbers, glance_s in zip(self.members, state.board.bound_s, strict=True)
            for number in numbers
        }
        return SearchResult(
            status=status,
            best=None if best is None or best.solution is None else (best.chosen(), best.solution),
            model=model,
            origin=origin,
            bound_s=bound_s,
            outcomes=tuple(outcome for _, outcome in ordered),
            smallest=smallest,
            solve_time_s=state.elapsed_s,
            groups=groups,
            cells=self.refiner.cells_by_name(),
            glances_s=tuple(glances_s[number] for number in sorted(glances_s)),
        )


def shape_of(candidate: Candidate) -> MeshShape:
    """The candidate's mesh without the order of its ranks and their assignment to groups of
    devices.
    """
    return replace(candidate.mesh, order="", deal="")


def _models_of(
    best: Entry,
) -> tuple[AnnotatedModel, tuple[tuple[int, str], ...] | None, tuple[AnnotatedModel, ...]]:
    """(model, origin, groups) of the best entry, for the fields of `SearchResult` of the same
    names.
    """
    if best.staged is not None:
        first, *others = best.staged.models
        groups = tuple(own.model for own in (first, *others)) if others else ()
        return first.model, first.origin, groups
    if not isinstance(best.solver, FixedSolver):
        raise TypeError(f"{best.candidate} is the best, but its model is lost")
    return best.solver.model, None, ()
