"""What the processes of a search share."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from weakref import finalize

import numpy as np

from autopar.solve.search.workers import _MOST_PROCESSES

NOBODY = -1


class Board:
    """Numbers that all processes of a search see.  `is_shared`: whether there will be several.

    By candidate: `owner` (who refines it), `bound_s` and `estimate_s` (of those that were opened).  By cell: `opener`.  By kind of
    candidates: `too_much`, the micro-batch from which nothing fits.  Besides which processes are at work, by their numbers in the system.
    """

    def __init__(self, candidates: int, cells: int, kinds: int, is_shared: bool) -> None:
        self.is_shared = is_shared
        sizes = [
            1,
            2 * _MOST_PROCESSES,
            _MOST_PROCESSES,
            candidates,
            candidates,
            candidates,
            cells,
            kinds,
        ]
        self._file: int | None = None
        numbers = np.zeros(sum(sizes))
        if is_shared:
            self._file = os.memfd_create("autopar-search")
            finalize(self, os.close, self._file)
            os.ftruncate(self._file, numbers.nbytes)
            numbers = np.frombuffer(mmap.mmap(self._file, numbers.nbytes))
        parts = np.split(numbers, np.cumsum(sizes)[:-1])
        (
            self._best,
            self._working,
            self.busy,
            self.owner,
            self.bound_s,
            self.estimate_s,
            self.opener,
            self.too_much,
        ) = parts
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
        """A placement was found that takes so long."""
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
            free = (
                place
                for place, known in enumerate(self._working.astype(int).tolist())
                if not _is_alive(known)
            )
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
        estimate_s = np.where(
            (self.owner == NOBODY) & (self.bound_s < below_s), self.estimate_s, inf
        )
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
