"""What the processes of a search hand to others, and what they tell each other.

One process does a small search.  Of any other it forks helpers, which open cells and refine candidates that nobody else
does, by the `Board` that all see (`workers.py`); a process that has nothing better to do takes over what others have opened.  Whoever still
has work while another process could do some forks one more helper and lends it a part: every other candidate that is left to it, or,
where that are few, every other family of the one that it splits.  What a helper found comes back when it is done; what it was lent is
taken back if it dies.
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
"""Of so many candidates, or families of one, some are lent to a process that has nothing to do."""

Told = tuple[dict[int, Entry], list[tuple[int, Entry]]]
"""What a helper has found: entries by their number, and the best of them with its plan."""

Tell = Callable[[str], None]
"""Sends a line of progress to the process that called this one."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Candidates, by their numbers, that a helper was lent; or of the only one these families."""

    numbers: Sequence[int]
    families: Sequence[Waiting] | None = None


@dataclass(slots=True, kw_only=True)
class Sharing:
    """What one process shares with others. `cells` has the cell of each candidate by number; ops of one cell cost the same."""

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
        """How many processes there may be."""
        return self.state.limits.processes if self.may_fork else 1

    # ------------------------------------------------------------------------------------------------- helpers and loans

    def call_helpers(self, work: Callable[[int, Tell], Told]) -> None:
        """Call helpers, once, if there is more to do than one process does in a moment."""
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
        """The number in the system of one helper more that is at work; None if none can be started, and none is from now on."""
        process = self.team.call(number, work)
        if process is None:
            self.may_fork = False
        else:
            self.state.board.enter(process)
        return process

    def wait(self) -> bool:
        """Wait until helpers are done; whether one died.  Another process may work meanwhile."""
        if not self.team.helpers:
            return False
        self.state.board.leave()
        died = self.hear(self.state.start + 2 * self.state.limits.time_s)
        self.state.board.enter()
        return died

    def lend(self, borrow: Callable[[Loan, int, Tell], Told]) -> None:
        """Give a helper, which does `borrow`, a part of what is left to do here, if one more may work."""
        state = self.state
        if self.is_alone or not state.queue or not state.board.is_free(self.processes):
            return
        own = sorted(turn for turn in state.queue if state.board.owner[turn[-1]] == self.me)
        # a plan is told whole by who found it alone
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
        """Call a helper for a loan; what it stands for is not this process' any more, unless none can be called."""
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
        """Forget what the process has that called this one, but for how good its best plan is."""
        self.state.others_s, self.state.best = self.state.held_s, None
        self.state.progress, self.team, self.told, self.lent = tell, Team(tell), [], {}

    def begin_loan(self, loan: Loan) -> None:
        """Have what was lent, and nothing else, to work on."""
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
        """What is told of candidates, and of the best plan that this process found."""
        entries = self.state.entries
        best = [
            (number, entry.with_plan())
            for number, entry in enumerate(entries)
            if entry is self.state.best
        ]
        return {number: entries[number].alone() for number in numbers}, best

    def known_to(self) -> np.ndarray:
        """By candidate: who knows what became of it."""
        board = self.state.board
        return np.where(board.owner == NOBODY, board.opener[self.cells], board.owner)

    # --------------------------------------------------------------------------------------------------- what is told

    def hear(self, until: float | None = None) -> bool:
        """Keep what helpers tell who are done by now, or (`until` that time) all up to the first that died; whether one did."""
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
        """What a helper knew is lost."""
        state = self.state
        for place in np.flatnonzero(self.known_to() == number).tolist():
            bound_s, entry = float(state.board.bound_s[place]), state.entries[place]
            state.entries[place] = Entry(
                entry.candidate, entry.others, bound_s=bound_s if bound_s < inf else 0.0
            )
        state.board.give_up(number, state.held_s)

    def _end_loan(self, loan: Loan, told: Told | None) -> None:
        """Have what a helper found in what it was lent, or have that back."""
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
        """Have families of a candidate that were lent."""
        entry = self.state.entries[number]
        self._take_families(number, families)
        entry.bound_s = min([entry.bound_s, *(waiting.bound_s for waiting in families)])
        if entry.outcome != "open":
            entry.outcome = "open"
            self.state.put_back(number)

    def merge(self) -> None:
        """Have what helpers told."""
        state = self.state
        for entry in state.entries:
            entry.have_lent()
        for entries, _ in self.told:
            for number, entry in entries.items():
                # found here, after who tells of it had left it
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
        """Have an entry in the place of another of the same candidate."""
        if self.state.best is self.state.entries[number]:
            self.state.best = entry
        self.state.entries[number] = entry
