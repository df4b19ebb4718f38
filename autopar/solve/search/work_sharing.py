"""One of the processes of a search: what it takes on, what it hands to others, and what they tell each other.

One process does a small search.  Of any other it forks helpers, which open cells and refine candidates that nobody else
does, by the `Board` that all see (`workers.py`); a process that has nothing better to do takes over what others have opened.  Whoever still
has work while another process could do some forks one more helper and lends it a part: every other candidate that is left to it, or,
where that are few, every other family of the one that it splits.  What a helper found comes back when it is done; what it was lent is
taken back if it dies.
"""

from __future__ import annotations

import heapq
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from autopar.solve.integer_program.placement_solver import OPTIMALITY_GAP
from autopar.solve.search.board import NOBODY, Board
from autopar.solve.search.candidate_state import NONE_LENT, Entry
from autopar.solve.search.frontier import Frontier, Waiting
from autopar.solve.search.workers import Team

_ALONE_S, _MANY = 0.5, 100
"""A search that takes longer, or has so many candidates, is shared out to several processes: of two plans that are equally fast a small
search always finds the same."""

_MUCH_BETTER = 0.9
"""A candidate that another process has opened is opened again here if it is likely to take so much of what the next one does."""

_LENT = 4
"""Of so many candidates, or families of one, some are lent to a process that has nothing to do."""

_NAP_S = 0.02
"""How long a process waits for others to open candidates."""

Told = tuple[dict[int, Entry], list[tuple[int, Entry]]]
"""What a helper has found: entries by their number, and the best of them with its plan."""


@dataclass(frozen=True, slots=True)
class Loan:
    """Candidates, by their numbers, that a helper was lent; or of the only one these families."""

    numbers: Sequence[int]
    families: Sequence[Waiting] | None = None


@dataclass(slots=True, kw_only=True)
class Sharing(ABC):
    """A process of a search.  A subclass says how candidates are opened and refined."""

    time_limit_s: float
    progress: Callable[[str], None]
    processes: int  # how many there may be
    entries: list[Entry] = field(default_factory=list)  # of candidates that are solved together
    places: list[tuple[int, int]] = field(
        default_factory=list
    )  # by entry: number of its cell (whose ops cost the same), of its kind
    queue: list[tuple[bool, float, int]] = field(
        default_factory=list
    )  # (`Entry.turn`, entry number): the lowest first
    best: Entry | None = None
    start: float = field(default_factory=time.perf_counter)
    me: int = 0  # number of this process, or of the one that lent it its part
    is_alone: bool = True  # no helpers were called yet
    told: list[Told] = field(default_factory=list)  # by helpers
    lent: dict[int, Loan] = field(default_factory=dict)  # by number of the helper in the system
    away: set[int] = field(default_factory=set)  # candidates that were lent
    held_s: float = inf  # time of the best plan that those had that called this process
    board: Board = field(init=False)
    team: Team = field(init=False)

    @abstractmethod
    def _open_all(self) -> None:
        """Open what nobody has opened."""

    @abstractmethod
    def _open(self, number: int) -> None:
        """The first bounds of a candidate."""

    @abstractmethod
    def _refine(self, number: int) -> None:
        """Raise the bound of a candidate that this process owns, or solve it, and put it back."""

    @abstractmethod
    def _refine_beside(self) -> None:
        """Refine what is near the best plan, which was just found."""

    @abstractmethod
    def _prune(self, entry: Entry) -> bool:
        """Whether a candidate is left, since it cannot be faster than the best plan."""

    # ---------------------------------------------------------------------------------------------------------------- work

    def _complete(self, work: Callable[[], None]) -> None:
        """Do what there is to do, what helpers were to do that died too, and have what they tell."""
        try:
            work()
            while self._wait():
                work()
        finally:
            self.team.dismiss()
        self._merge()

    def _wait(self) -> bool:
        """Wait until helpers are done; whether one died.  Another process may work meanwhile."""
        if not self.team.helpers:
            return False
        self.board.leave()
        died = self._hear(self.start + 2 * self.time_limit_s)
        self.board.enter()
        return died

    def _work(self) -> None:
        """Open and refine candidates until there is none left that nobody refines."""
        self._open_all()
        while (number := self._next()) is not None:
            best = self.best
            self._refine(number)
            if self.best is not best:
                self._refine_beside()
            self._share_out()
        self._end()

    def _work_off(self) -> None:
        """Refine what this process has, and nothing else."""
        while self.queue and self._time_left():
            *_, number = heapq.heappop(self.queue)
            if self.entries[number].outcome == "open":  # else it was there twice
                self._refine(number)
            self._hear()
            self._lend()
        self._end()

    def _end(self) -> None:
        """Leave candidates of which something is left when time ends."""
        for *_, number in self.queue:
            self._close_in_time(self.entries[number])
        self.queue.clear()

    def _close_in_time(self, entry: Entry) -> None:
        """Leave a candidate that is open when time ends."""
        if entry.outcome == "open" and (entry.solution is not None or not self._prune(entry)):
            entry.close(
                "solved" if entry.solution else "unexplored",
                "the time limit came first",
                entry.bound_s,
            )

    def _next(self) -> int | None:
        """The number of the candidate to go on with, which nobody else does; None if there is none, or no time."""
        board = self.board
        while self._time_left():
            while self.queue and board.owner[self.queue[0][-1]] not in (self.me, NOBODY):
                heapq.heappop(self.queue)
            other = board.waiting(self._wanted_s) if board.is_shared else None
            if self.queue and (other is None or not self._is_better(other)):
                *_, number = heapq.heappop(self.queue)
            elif other is not None:
                number = other
            elif board.busy.any():
                time.sleep(_NAP_S)
                if self._hear():
                    self._open_all()
                continue
            else:
                return None
            if self._take(number):
                return number
        return None

    def _is_better(self, other: int) -> bool:
        """Whether a candidate that nobody refines is so much more promising than the next one here that it is opened again."""
        is_split, estimate_s, _ = self.queue[0]
        return self.entries[other].outcome == "unexplored" and (
            is_split or self.board.estimate_s[other] < _MUCH_BETTER * estimate_s
        )

    def _take(self, number: int) -> bool:
        """Whether this process owns a candidate that is left, from now on if nobody did."""
        entry = self.entries[number]
        if number in self.away or not self.board.take(self.board.owner, number, self.me):
            return False
        if entry.outcome == "unexplored" and not entry.is_opened:
            self._open(number)
        return entry.outcome == "open"

    # ------------------------------------------------------------------------------------------------------------- helpers

    def _share_out(self) -> None:
        """Call helpers if there is more to do than one process does in a moment; hear what they tell, and lend."""
        takes_long = len(self.entries) >= _MANY or time.perf_counter() - self.start > _ALONE_S
        if self.processes > 1 and self.is_alone and takes_long:
            self.is_alone = False
            for number in range(1, self.processes):
                self.board.busy[number] = 1
                if self._call(number, self._help) is None:
                    self.board.busy[number:] = 0
                    break
        if self._hear():
            self._open_all()
        self._lend()

    def _call(self, number: int, work: Callable[[int, Callable[[str], None]], Any]) -> int | None:
        """The number in the system of one helper more that is at work; None if none can be started, and none is from now on."""
        process = self.team.call(number, work)
        if process is None:
            self.processes = 1
        else:
            self.board.enter(process)
        return process

    def _lend(self) -> None:
        """Give a helper a part of what is left to do here, if one more may work."""
        if self.is_alone or not self.queue or not self.board.is_free(self.processes):
            return
        own = sorted(turn for turn in self.queue if self.board.owner[turn[-1]] == self.me)
        may = [
            number for *_, number in own if self.entries[number] is not self.best
        ]  # a plan is told whole by who found it alone
        whole = [
            number for number in may if not self.entries[number].splits
        ]  # of others some may be lent
        if len(whole) >= _LENT:
            self._lend_to_one(Loan(whole[1::2]))
        elif own:
            *_, number = own[0]
            entry = self.entries[number]
            frontier = entry.joint.frontier if entry.joint is not None and entry.splits else None
            if frontier is not None and len(frontier.waiting) >= _LENT:
                self._lend_to_one(Loan([number], frontier.part()))

    def _lend_to_one(self, loan: Loan) -> None:
        """Call a helper for a loan; what it stands for is not this process' any more, unless none can be called."""
        process = self._call(NOBODY, partial(self._borrow, loan))
        if process is None:
            if loan.families is not None:
                self.entries[loan.numbers[0]].joint.frontier.take(loan.families)
            return
        self.lent[process] = loan
        if loan.families is None:
            self.away.update(loan.numbers)
            self.queue = [turn for turn in self.queue if turn[-1] not in self.away]
            heapq.heapify(self.queue)

    def _help(self, me: int, tell: Callable[[str], None]) -> Told:
        """What a helper does, and what it tells in the end."""
        self._begin_to_help(tell)
        self.me = me
        try:
            self._complete(self._work)
        finally:
            self.board.busy[me] = 0
        known = np.flatnonzero(self._known_to() == me).tolist()
        return self._told_of(
            [number for number in known if self.entries[number].outcome != "open"]
        )  # else another had it, who died since

    def _borrow(self, loan: Loan, _: int, tell: Callable[[str], None]) -> Told:
        """What a helper does that was lent something."""
        self._begin_to_help(tell)
        self.queue = [(*self.entries[number].turn, number) for number in loan.numbers]
        heapq.heapify(self.queue)
        if loan.families is not None:
            entry = self.entries[loan.numbers[0]]
            entry.joint.frontier, entry.lent = Frontier(), NONE_LENT
            entry.joint.frontier.take(loan.families)
        self._complete(self._work_off)
        return self._told_of(loan.numbers)

    def _begin_to_help(self, tell: Callable[[str], None]) -> None:
        """Forget what the process has that called this one, but for how good its best plan is."""
        self.held_s = self._held_s
        self.progress, self.team, self.best, self.told, self.lent = tell, Team(tell), None, [], {}

    def _told_of(self, numbers: Sequence[int]) -> Told:
        best = [
            (number, replace(entry, joint=None, prepared=None))
            for number, entry in enumerate(self.entries)
            if entry is self.best
        ]
        return {number: self.entries[number].alone() for number in numbers}, best

    def _known_to(self) -> np.ndarray:
        """By candidate: who knows what became of it."""
        opener = self.board.opener[[cell for cell, _ in self.places]]
        return np.where(self.board.owner == NOBODY, opener, self.board.owner)

    # --------------------------------------------------------------------------------------------------------- what is told

    def _hear(self, until: float | None = None) -> bool:
        """Keep what helpers tell who are done by now, or (`until` that time) all up to the first that died; whether one did."""
        died = False
        for number, process, told in list(self.team.results(until)):
            self.board.leave(process)
            died = died or told is None
            if told is None:
                self.progress("a process of the search was killed: others do its part")
            if (loan := self.lent.pop(process, None)) is not None:
                self._end_loan(loan, told)
            elif told is not None:
                self.told.append(told)
            else:
                self._redo(number)
        return died

    def _redo(self, number: int) -> None:
        """What a helper knew is lost."""
        for place in np.flatnonzero(self._known_to() == number).tolist():
            bound_s, entry = float(self.board.bound_s[place]), self.entries[place]
            self.entries[place] = Entry(
                entry.candidate, entry.others, bound_s=bound_s if bound_s < inf else 0.0
            )
        self.board.give_up(number, self._held_s)

    def _end_loan(self, loan: Loan, told: Told | None) -> None:
        """Have what a helper found in what it was lent, or have that back."""
        if told is None:
            self.board.lose(self._held_s)
            self.away.difference_update(loan.numbers)
            if loan.families is not None:
                self._take_back(loan)
            else:
                for number in loan.numbers:
                    heapq.heappush(self.queue, (*self.entries[number].turn, number))
        elif loan.families is not None:
            entries, best = told
            for number, found in entries.items():
                self.entries[number].lent = min(
                    self.entries[number].lent, (found.bound_s, found.outcome, found.reason)
                )
            self.told.append(({}, best))
        else:
            self.told.append(told)

    def _take_back(self, loan: Loan) -> None:
        """Have families that were lent."""
        (number,) = loan.numbers
        entry = self.entries[number]
        entry.joint.frontier.take(loan.families)
        entry.bound_s = min([entry.bound_s, *(waiting.bound_s for waiting in loan.families)])
        if entry.outcome != "open":
            entry.outcome = "open"
            heapq.heappush(self.queue, (*entry.turn, number))

    def _merge(self) -> None:
        """Have what helpers told."""
        for entry in self.entries:
            entry.have_lent()
        for entries, _ in self.told:
            for number, entry in entries.items():
                if (
                    self.entries[number] is not self.best
                ):  # found here, after who tells of it had left it
                    self.entries[number] = entry
        for _, best in self.told:
            for number, entry in best:
                known, time_s = self.entries[number], entry.solution.time_s
                if known.solution is None or time_s <= known.solution.time_s:
                    self._have(number, replace(entry, bound_s=min(entry.bound_s, known.bound_s)))
                if self.best is None or time_s < self.best.solution.time_s:
                    self.best = self.entries[number]

    def _have(self, number: int, entry: Entry) -> None:
        """Have an entry in the place of another of the same candidate."""
        if self.best is self.entries[number]:
            self.best = entry
        self.entries[number] = entry

    # ---------------------------------------------------------------------------------------------------- what all know

    @property
    def _wanted_s(self) -> float:
        """What a step must take less than to be faster than the best plan: by more than rounding, and by less than what is proven."""
        return self._best_s * (1 - OPTIMALITY_GAP / 2)

    @property
    def _best_s(self) -> float:
        """The time of the best plan that anyone has found."""
        return min(self._held_s, self.board.best_s)

    @property
    def _held_s(self) -> float:
        """The time of the best plan that this process has, or those that called it."""
        told_s = (entry.solution.time_s for _, best in self.told for _, entry in best)
        return min([self.held_s, *told_s, *([self.best.solution.time_s] if self.best else [])])

    def _time_left(self) -> float:
        """Seconds until the limit, or 0."""
        limit_s = self.time_limit_s * (1 if self._best_s < inf else 2)
        return max(limit_s - (time.perf_counter() - self.start), 0.0)
