"""Several processes that work on the candidates of one search.

Helpers are forked from the searching process, so they start with its state. From then on all
processes share only a `Board` of numbers. It holds which process opens which cell and refines which
candidate, the estimates, and the best time found. A helper sends its results through a pipe when it
is done.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import connection, current_process, get_all_start_methods, get_context
from typing import Any

_MOST_PROCESSES = 8
"""The largest number of processes. More have too little work, since the candidates of one cell are
best opened by one process.
"""

_PR_SET_PDEATHSIG = 1  # of Linux' prctl

_STUCK_S, _STUCK_SHARE, _STUCK_LEAST_S = 60.0, 0.1, 1.0
"""When a busy helper counts as stuck: the most seconds after the end of the time limit, the share
of the limit, and the fewest seconds.
"""


def processes_for_search() -> int:
    """The number of processes that a search may use: one for each core available to this process,
    at most 8. 1 where processes cannot be forked.
    """
    can_fork = (
        "fork" in get_all_start_methods()
        and hasattr(os, "memfd_create")
        and not current_process().daemon
    )
    return min(len(os.sched_getaffinity(0)), _MOST_PROCESSES) if can_fork else 1


def patience_s(limit_s: float) -> float:
    """Seconds after the end of a time limit for which helpers are waited for."""
    return min(max(_STUCK_SHARE * limit_s, _STUCK_LEAST_S), _STUCK_S)


@dataclass(slots=True)
class _Helper:
    number: int
    process: Any
    pipe: connection.Connection


@dataclass(slots=True)
class Team:
    """The helper processes of one process. `progress` is called with their progress messages.
    `stuck_s` is as for `results`.
    """

    progress: Callable[[str], None]
    helpers: list[_Helper] = field(default_factory=list)
    stuck_s: float = _STUCK_S

    def call(self, number: int, work: Callable[[int, Callable[[str], None]], Any]) -> int | None:
        """Fork a helper that runs `work(number, tell)`; `results` yields what it returns. Returns
        its process id, or None if it cannot be started.
        """
        context = get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_help, args=(number, work, theirs, os.getpid()), daemon=False
        )  # it may call some itself
        with warnings.catch_warnings():  # other threads of ours wait for input or draw a spinner: helpers need none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            # until the helper is one that we dismiss
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
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
        """Yields (number, process id, result) of helpers that are done, and removes them. The
        result is None for one that died; then no more are waited for. An exception in a helper is
        raised here.

        `until` is the time (`perf_counter`) by which helpers should be done. Up to `stuck_s` seconds
        more are waited, and the rest count as dead. None does not wait.
        """
        died = False
        while self.helpers and not died:
            left_s = 0.0 if until is None else max(until + self.stuck_s - time.perf_counter(), 0.0)
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
        """Kills all helpers and waits for their end."""
        for helper in list(self.helpers):
            self._dismiss(helper)


def _help(
    number: int,
    work: Callable[[int, Callable[[str], None]], Any],
    pipe: connection.Connection,
    parent: int,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller is interrupted, and stops us
    # end when the process that forked this one does
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    try:
        message = "done", work(number, lambda text: pipe.send(("progress", text)))
    except Exception as error:  # of any kind: it is raised where the search was begun
        message = "error", error
    pipe.send(message)
