"""Work sharing between the processes of a search (work stealing), and the messages between them.

A small search runs in one process. Otherwise it forks helpers, which open cells and refine
candidates that no other process does, coordinated by the shared `Board` (`workers.py`). An idle
process takes over candidates that others have opened. A process with work left while another one
could work forks one more helper and lends it a part. The part is every other remaining candidate
or, if these are few, every other family of the one that it splits. A helper returns its results
when it is done. If it dies, the lender takes the loan back.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from autopar.solve.search.board import NOBODY
from autopar.solve.search.candidate_state import NONE_LENT, Entry
from autopar.solve.search.frontier import Waiting
from autopar.solve.search.search_state import SearchState, time_of
from autopar.solve.search.workers import Team

_LENT = 4
"""The smallest number of candidates, or of families of one candidate, from which some are lent to
an idle process.
"""

Told = tuple[dict[int, Entry], list[tuple[int, Entry]]]
"""The results of a helper: entries by index, and the best of them with its plan."""

Tell = Callable[[str], None]
"""A function that sends a line of progress to the parent process."""


@dataclass(frozen=True, slots=True)
class Loan:
    """What a helper process was lent: the candidates with these indices, or `families` of the only
    one.
    """

    numbers: Sequence[int]
    families: Sequence[Waiting] | None = None


@dataclass(slots=True, kw_only=True)
class Sharing:
    """What one process shares with others: its helper processes, its loans and what helpers
    reported. `cells` has the cell of each candidate by index; ops of one cell cost the same.
    """

    state: SearchState
    team: Team
    cells: Sequence[int]
    me: int = 0  # number of this process, or of the one that lent it its part
    is_alone: bool = True  # no helpers were called yet
    may_fork: bool = True
    told: list[Told] = field(default_factory=list)  # by helpers
    lent: dict[int, Loan] = field(default_factory=dict)  # by number of the helper in the system
    away: set[int] = field(default_factory=set)  # candidates that were lent

    @property
    def processes(self) -> int:
        """The number of processes that may work at once; 1 once forking has failed."""
        return self.state.limits.processes if self.may_fork else 1

    # ------------------------------------------------------------------------------------------------- helpers and loans

    def call_helpers(self, work: Callable[[int, Tell], Told]) -> None:
        """Starts all allowed helpers, each of which runs `work`. This happens once, as soon as the
        search has many candidates or has taken longer than `SearchLimits.alone_s`.
        """
        state, limits = self.state, self.state.limits
        takes_long = (
            len(state.entries) >= limits.alone_candidates or state.elapsed_s > limits.alone_s
        )
        if self.processes > 1 and self.is_alone and takes_long:
            self.is_alone = False
            for number in range(1, self.processes):
                state.board.busy[number] = 1
                if self._call(number, work) is None:
                    state.board.busy[number:] = 0
                    break

    def _call(self, number: int, work: Callable[[int, Tell], Told]) -> int | None:
        """Starts one more helper as process `number`. Returns its process id; None if it cannot be
        started, and then no more are tried.
        """
        process = self.team.call(number, work)
        if process is None:
            self.may_fork = False
        else:
            self.state.board.enter(process)
        return process

    def wait(self) -> bool:
        """Waits until all helpers are done or one died. Returns whether one died. Another process
        may work meanwhile.
        """
        if not self.team.helpers:
            return False
        self.state.board.leave()
        died = self.hear(self.state.start + self.state.limits.time_s)
        self.state.board.enter()
        return died

    def lend(self, borrow: Callable[[Loan, int, Tell], Told]) -> None:
        """Starts a helper with a part of the remaining work, if helpers were called before and one
        more process may work. The part is every second candidate of this process that is not split,
        or every second family of the one that it splits. Does nothing if both are few.
        """
        state = self.state
        if self.is_alone or not state.queue or not state.board.is_free(self.processes):
            return
        own = sorted(turn for turn in state.queue if state.board.owner[turn[-1]] == self.me)
        # a whole plan is sent only by the process that found it
        may = [number for *_, number in own if state.entries[number] is not state.best]
        # of others some may be lent
        whole = [number for number in may if not state.entries[number].is_split]
        if len(whole) >= _LENT:
            self._lend_to_one(Loan(whole[1::2]), borrow)
        elif own:
            *_, number = own[0]
            entry = state.entries[number]
            frontier = entry.frontier if entry.is_split else None
            if frontier is not None and len(frontier.waiting) >= _LENT:
                self._lend_to_one(Loan([number], frontier.part()), borrow)

    def _lend_to_one(self, loan: Loan, borrow: Callable[[Loan, int, Tell], Told]) -> None:
        """Starts a helper that runs `borrow` with a loan, and takes lent candidates out of the
        queue. If no helper can be started, lent families go back to the frontier.
        """
        process = self._call(NOBODY, partial(borrow, loan))
        if process is None:
            if loan.families is not None:
                self._take_families(loan.numbers[0], loan.families)
            return
        self.lent[process] = loan
        if loan.families is None:
            self.away.update(loan.numbers)
            self.state.take_out(self.away)

    def _take_families(self, number: int, families: Sequence[Waiting]) -> None:
        frontier = self.state.entries[number].frontier
        if frontier is None:
            raise ValueError(f"candidate {number} has families, but is not split here")
        frontier.take(families)

    # -------------------------------------------------------------------------------------------------- in a helper

    def begin_to_help(self, tell: Tell) -> None:
        """Drops the parent's best plan (its time stays), helpers, results and loans; candidates
        stay as they are. `tell` becomes the way to report progress.
        """
        self.state.others_s, self.state.best = self.state.held_s, None
        self.state.progress, self.team, self.told, self.lent = (
            tell,
            Team(tell, stuck_s=self.team.stuck_s),
            [],
            {},
        )

    def begin_loan(self, loan: Loan) -> None:
        """Makes the loan the only work of this process: its queue, and its families if it has
        some.
        """
        state = self.state
        state.queue = [(*state.entries[number].turn, number) for number in loan.numbers]
        heapq.heapify(state.queue)
        if loan.families is not None:
            (number,) = loan.numbers
            if (frontier := state.entries[number].frontier) is not None:
                frontier.clear()
            self._take_families(number, loan.families)
            state.entries[number].lent = NONE_LENT

    def told_of(self, numbers: Sequence[int]) -> Told:
        """The results to send to the process that started this one. The first part has copies of
        the entries with these indices, by index. The second is a list with (index, entry) of the
        best plan that this process found; empty if it found none.
        """
        entries = self.state.entries
        best = [
            (number, entry.with_plan())
            for number, entry in enumerate(entries)
            if entry is self.state.best
        ]
        return {number: entries[number].alone() for number in numbers}, best

    def known_to(self) -> np.ndarray:
        """For each candidate, the number of the process that has its result: its owner, or else the
        one that opened its cell. -1 if neither exists.
        """
        board = self.state.board
        return np.where(board.owner == NOBODY, board.opener[self.cells], board.owner)

    # --------------------------------------------------------------------------------------------------- what is told

    def hear(self, until: float | None = None) -> bool:
        """Receives the results of helpers that are done, and takes back the work of those that
        died. With `until` (a time), waits for all helpers up to the first that died. Returns
        whether one died.
        """
        died = False
        for number, process, told in list(self.team.results(until)):
            self.state.board.leave(process)
            died = died or told is None
            if told is None:
                self.state.progress("a process of the search was killed: others do its part")
            if (loan := self.lent.pop(process, None)) is not None:
                self._end_loan(loan, told)
            elif told is not None:
                self._keep(told)
            else:
                self._redo(number)
        return died

    def _keep(self, told: Told) -> None:
        self.told.append(told)
        for _, entry in told[1]:
            self.state.others_s = min(self.state.others_s, time_of(entry))

    def _redo(self, number: int) -> None:
        """Resets the candidates of the dead helper `number`, so that others refine them again.
        Their finite bounds stay.
        """
        state = self.state
        for place in np.flatnonzero(self.known_to() == number).tolist():
            bound_s, entry = float(state.board.bound_s[place]), state.entries[place]
            state.entries[place] = Entry(
                entry.candidate, entry.others, bound_s=bound_s if bound_s < inf else 0.0
            )
        state.board.give_up(number, state.held_s)

    def _end_loan(self, loan: Loan, told: Told | None) -> None:
        """Keeps what a helper found in its loan. If it died (`told` is None), takes the loan
        back.
        """
        if told is None:
            self.state.board.lose(self.state.held_s)
            self.away.difference_update(loan.numbers)
            if loan.families is not None:
                self._take_back(loan.numbers[0], loan.families)
            else:
                for number in loan.numbers:
                    self.state.put_back(number)
        elif loan.families is not None:
            entries, best = told
            for number, found in entries.items():
                entry = self.state.entries[number]
                entry.lent = min(entry.lent, (found.bound_s, found.outcome, found.reason))
            self._keep(({}, best))
        else:
            self._keep(told)

    def _take_back(self, number: int, families: Sequence[Waiting]) -> None:
        """Puts lent families of candidate `number` back into its frontier, lowers its bound to
        theirs, and opens it again if it was closed.
        """
        entry = self.state.entries[number]
        self._take_families(number, families)
        entry.bound_s = min([entry.bound_s, *(waiting.bound_s for waiting in families)])
        if entry.outcome != "open":
            entry.outcome = "open"
            self.state.put_back(number)

    def merge(self) -> None:
        """Merges the results of all helpers into the entries of this process. The fastest plan of
        all becomes the best.
        """
        state = self.state
        for entry in state.entries:
            entry.have_lent()
        for entries, _ in self.told:
            for number, entry in entries.items():
                # found here, after the sender had left this candidate
                if state.entries[number] is not state.best:
                    state.entries[number] = entry
        for _, best in self.told:
            for number, entry in best:
                known, time_s = state.entries[number], time_of(entry)
                if known.solution is None or time_s <= known.solution.time_s:
                    self._have(number, replace(entry, bound_s=min(entry.bound_s, known.bound_s)))
                if state.best is None or time_s < time_of(state.best):
                    state.best = state.entries[number]

    def _have(self, number: int, entry: Entry) -> None:
        """Replaces entry `number` by `entry`, which is for the same candidate; also as the best
        one, if it was that.
        """
        if self.state.best is self.state.entries[number]:
            self.state.best = entry
        self.state.entries[number] = entry
