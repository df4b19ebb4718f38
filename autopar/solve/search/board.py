"""Memory shared by the processes of a search."""

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
    """Numbers that all processes of a search can read and write. They lie in shared memory if
    `is_shared`, that is, if there will be several processes.

    By candidate: `owner` (the process that refines it), `bound_s` and `estimate_s` (once it is
    opened). By cell (candidates whose ops cost the same): `opener`. By kind of candidates:
    `too_much`, the smallest micro-batch for which nothing fits. By process: `busy`, 1 while it
    opens candidates. Also the ids of the working processes.
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
        """Step seconds of the fastest placement that any process has found; infinite if none."""
        return float(self._best[0])

    def found(self, time_s: float) -> None:
        """Records a placement that takes `time_s`: lowers `best_s` to it if that is larger."""
        with self._alone():
            self._best[0] = min(self._best[0], time_s)

    def lose(self, best_s: float) -> None:
        """Sets the best time to `best_s`, after a process died with its plan."""
        with self._alone():
            self._best[0] = best_s

    def is_free(self, most: int) -> bool:
        """Whether fewer than `most` living processes work, so that another one may."""
        return sum(map(_is_alive, self._working.astype(int).tolist())) < most

    def enter(self, process: int | None = None) -> None:
        """Records that a process works, by its id; by default this process. Does nothing if all
        places are taken.
        """
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
        """Records that a process no longer works, by its id; by default this process. A dead
        process does not count in any case.
        """
        process = process or os.getpid()
        with self._alone():
            self._working[self._working == process] = 0

    def take(self, numbers: np.ndarray, place: int, who: int) -> bool:
        """Claims entry `place` of `numbers` (`owner` or `opener`) for the process `who`, if it is
        free. Returns whether `who` has it now.
        """
        if numbers[place] == NOBODY:
            with self._alone():
                if numbers[place] == NOBODY:
                    numbers[place] = who
        return bool(numbers[place] == who)

    def waiting(self, below_s: float) -> int | None:
        """The index of the opened candidate with the lowest estimate among those that no process
        refines. None if none has a bound below `below_s`.
        """
        estimate_s = np.where(
            (self.owner == NOBODY) & (self.bound_s < below_s), self.estimate_s, inf
        )
        number = int(estimate_s.argmin()) if len(estimate_s) else 0
        return number if len(estimate_s) and estimate_s[number] < inf else None

    def give_up(self, who: int, best_s: float) -> None:
        """Frees all candidates and cells of the process `who`, which died, and sets the best time
        to `best_s`, since its plan is lost.
        """
        with self._alone():
            self.busy[who] = 0
            self.owner[self.owner == who] = NOBODY
            self.opener[self.opener == who] = NOBODY
        self.lose(best_s)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no other process writes to the board. The lock of a process that dies
        is released.
        """
        if self._file is None:
            yield
            return
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def _is_alive(process: int) -> bool:
    """Whether a process with this id exists; False for 0."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process > 0
