"""Several processes that go through the candidates of one search together.

Helpers are forked from the process that searches, so that they know what it knows.  From then on all share a `Board` of numbers alone: who
opens which cell, who refines which candidate, what that is likely to take, and the time of the best placement that any of them has found.
What a helper has found comes back through a pipe when it is done.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from multiprocessing import connection, current_process, get_all_start_methods, get_context
from typing import Any
from weakref import finalize

import numpy as np

NOBODY = -1

_MOST_PROCESSES = 8
"""More have too little to do: candidates of one cell are best opened once."""

_PR_SET_PDEATHSIG = 1  # of Linux' prctl

_STUCK_S = 60.0
"""A helper that has not answered so long after the time was over is given up."""


def processes_for_search() -> int:
    """How many processes a search may use here: one for each core that this one may run on."""
    can_fork = "fork" in get_all_start_methods() and hasattr(os, "memfd_create") and not current_process().daemon
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if can_fork else 1


class Board:
    """Numbers that all processes of a search see.  `is_shared`: whether there will be several.

    By candidate: `owner` (who refines it), `bound_s` and `estimate_s` (of those that were opened).  By cell: `opener`.  By kind of
    candidates: `too_much`, the micro-batch from which nothing fits.  Besides which processes are at work, by their numbers in the system.
    """

    def __init__(self, candidates: int, cells: int, kinds: int, is_shared: bool) -> None:
        self.is_shared = is_shared
        sizes = [1, 2 * _MOST_PROCESSES, _MOST_PROCESSES, candidates, candidates, candidates, cells, kinds]
        self._file: int | None = None
        numbers = np.zeros(sum(sizes))
        if is_shared:
            self._file = os.memfd_create("autopar-search")
            finalize(self, os.close, self._file)
            os.ftruncate(self._file, numbers.nbytes)
            numbers = np.frombuffer(mmap.mmap(self._file, numbers.nbytes))
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        self._best, self._working, self.busy, self.owner, self.bound_s, self.estimate_s, self.opener, self.too_much = parts
        for part in (self._best, self.bound_s, self.estimate_s, self.too_much):
            part[:] = inf
        for part in (self.owner, self.opener):
            part[:] = NOBODY
        self.enter()

    @property
    def best_s(self) -> float:
        """The time of the best placement found."""
        return float(self._best[0])

    def found(self, time_s: float) -> None:
        with self._alone():
            self._best[0] = min(self._best[0], time_s)

    def lose(self, best_s: float) -> None:
        """What a process found is lost; `best_s`: what is known to be found."""
        with self._alone():
            self._best[0] = best_s

    def is_free(self, most: int) -> bool:
        """Whether one process more may work, if there may be so `most`."""
        return sum(map(_is_alive, self._working.astype(int).tolist())) < most

    def enter(self, process: int | None = None) -> None:
        """A process is at work; None: this one."""
        process = process or os.getpid()
        with self._alone():
            free = (place for place, known in enumerate(self._working.astype(int).tolist()) if not _is_alive(known))
            if (place := next(free, None)) is not None:
                self._working[place] = process

    def leave(self, process: int | None = None) -> None:
        """A process is not at work any more; one that is dead is not, either way.  None: this one."""
        process = process or os.getpid()
        with self._alone():
            self._working[self._working == process] = 0

    def take(self, numbers: np.ndarray, place: int, who: int) -> bool:
        """Whether `who` has what `numbers` (`owner`, `opener`) tell of a place, from now on if nobody had it."""
        if numbers[place] == NOBODY:
            with self._alone():
                if numbers[place] == NOBODY:
                    numbers[place] = who
        return bool(numbers[place] == who)

    def waiting(self, below_s: float) -> int | None:
        """The most promising candidate that was opened and that nobody refines; None if none may be faster than `below_s`."""
        estimate_s = np.where((self.owner == NOBODY) & (self.bound_s < below_s), self.estimate_s, inf)
        number = int(estimate_s.argmin()) if len(estimate_s) else 0
        return number if len(estimate_s) and estimate_s[number] < inf else None

    def give_up(self, who: int, best_s: float) -> None:
        """What a process had is nobody's again, and what it found is lost; `best_s`: what is known to be found."""
        with self._alone():
            self.busy[who] = 0
            self.owner[self.owner == who] = NOBODY
            self.opener[self.opener == who] = NOBODY
        self.lose(best_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process writes meanwhile.  The lock of a process that dies is gone with it."""
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _is_alive(process: int) -> bool:
    """Whether there is such a process; 0: there is none."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0


@dataclass(slots=True)
class _Helper:
    number: int
    process: Any
    pipe: connection.Connection


@dataclass(slots=True)
class Team:
    """The helpers of one process.  `progress` hears what they tell."""

    progress: Callable[[str], None]
    helpers: list[_Helper] = field(default_factory=list)

    def call(self, number: int, work: Callable[[int, Callable[[str], None]], Any]) -> int | None:
        """Fork a helper, which does `work(number, tell)`; `results` gives what that returns.  Its number in the system, or None if that
        lets us have none."""
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_help, args=(number, work, theirs, os.getpid()), daemon=False)  # it may call some itself
        with warnings.catch_warnings():  # other threads of ours wait for input or draw a spinner: helpers need none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the helper is one that we dismiss
            try:
                process.start()
                self.helpers.append(_Helper(number, process, ours))
            except OSError as error:  # no memory, or too many processes
                ours.close()
                self.progress(f"no process more can be started ({error})")
                return None
            finally:
                theirs.close()
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return process.pid

    def results(self, until: float | None) -> Iterator[tuple[int, int, Any]]:
        """(number, number in the system, result) of helpers that are done; None is the result of one that died, after which no more are
        waited for.  `until`: the time (`perf_counter`) when helpers should be done, for which to wait; None: do not wait."""
        died = False
        while self.helpers and not died:
            left_s = 0.0 if until is None else max(until + _STUCK_S - time.perf_counter(), 0.0)
            ready = connection.wait([helper.pipe for helper in self.helpers], left_s)
            for helper in [helper for helper in self.helpers if helper.pipe in ready]:
                for result in self._heard(helper):
                    died = died or result is None
                    yield helper.number, helper.process.pid, result
            if not ready and until is not None:
                for helper in list(self.helpers):
                    self._dismiss(helper)
                    yield helper.number, helper.process.pid, None
            if not ready:
                return

    def _heard(self, helper: _Helper) -> Iterator[Any]:
        try:
            kind, content = helper.pipe.recv()
        except (EOFError, OSError):
            kind, content = "done", None
        if kind == "progress":
            self.progress(content)
            return
        self._dismiss(helper)
        if kind == "error":
            raise content
        yield content

    def _dismiss(self, helper: _Helper) -> None:
        helper.process.kill()
        helper.process.join()
        helper.pipe.close()
        self.helpers.remove(helper)

    def dismiss(self) -> None:
        """Stop all helpers."""
        for helper in list(self.helpers):
            self._dismiss(helper)


def _help(number: int, work: Callable[[int, Callable[[str], None]], Any], pipe: connection.Connection, parent: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who called us is told to stop, and stops us
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # end when the one that forked this process does
    if os.getppid() != parent:
        return
    try:
        message = "done", work(number, lambda text: pipe.send(("progress", text)))
    except Exception as error:  # of any kind: it is raised where the search was begun
        message = "error", error
    pipe.send(message)
