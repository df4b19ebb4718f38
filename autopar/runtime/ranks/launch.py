"""Starts ranks as processes of this machine, on CPU over gloo, for `autopar verify` and tests.

`run_workers` runs one function and ends. `WorkerPool` keeps its processes. Both start the same
worker loop. A failure on one rank (an exception, a kill, a timeout) ends all ranks at once, since
others may be waiting for it in a collective.

Results and arguments travel as plain pickles. (multiprocessing would send tensors as handles to
shared memory, which disappear with the sender.)
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.runtime.ranks.agreement import LostRanks

DEFAULT_TIMEOUT_S = 300.0
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of glibc's mallopt (malloc.h)."""
_GRACE_S = 0.5
"""Seconds to look for a killed rank after another rank has failed. A lost peer makes its partners'
collectives fail, so the killed rank is the cause.
"""


class WorkerError(RuntimeError):
    """A rank raised an exception, died or took too long. `rank` is the rank that caused it."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


def run_workers(
    function: Callable[..., Any], nproc: int, args: tuple = (), timeout_s: float = DEFAULT_TIMEOUT_S
) -> list[Any]:
    """[function(rank, *args) for each rank], run by `nproc` new processes in a gloo process group,
    which then end.

    The function may be a closure if processes can be forked (Linux, with CUDA and torch.distributed
    not initialized here). Raises AutoparError if a rank raised that. Raises WorkerError if a rank
    failed otherwise, died, or did not finish within `timeout_s` seconds.
    """
    workers = _Workers(nproc, (function, args), timeout_s)
    try:
        return workers.collect(timeout_s)
    finally:
        workers.stop()


class WorkerPool:
    """`nproc` ranks that are started once and reused. After a failed run, the next run starts new
    ones.

    By default, the workers are copies of this process at the first run where that is safe, so
    modules should be imported before. `start_method='spawn'` starts new interpreters, which CUDA
    needs.
    """

    def __init__(self, nproc: int, start_method: str | None = None) -> None:
        self.nproc, self.start_method = nproc, start_method
        self._workers: _Workers | None = None

    def run(
        self, function: Callable[..., Any], *args: Any, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[Any]:
        """[function(rank, *args) for each rank]. The function is sent by reference, so it must be
        defined at the top level of a module. `timeout_s` limits the seconds of this run. Raises as
        `run_workers`; the processes then end.
        """
        task = pickle.dumps((function, args))
        if self._workers is not None and not self._workers.alive():
            self.close()
        if self._workers is None:
            self._workers = _Workers(self.nproc, None, timeout_s, self.start_method)
        try:
            self._workers.send(task)
            return self._workers.collect(timeout_s)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes. A later `run` starts new ones."""
        if self._workers is not None:
            self._workers.stop()
            self._workers = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Workers:
    """The processes of one gloo world, with a pipe to each. `task`, (function, arguments), runs
    first; None waits for `send`.
    """

    def __init__(
        self,
        nproc: int,
        task: tuple[Callable[..., Any], tuple] | None,
        timeout_s: float,
        start_method: str | None = None,
    ) -> None:
        if nproc < 1:
            raise AutoparError(f"nproc={nproc} must be at least 1")
        context = multiprocessing.get_context(start_method or _start_method())
        self.directory = tempfile.TemporaryDirectory(prefix="autopar-", ignore_cleanup_errors=True)
        self.processes: list[Any] = []
        self.pipes: list[Connection] = []
        try:
            for rank in range(nproc):
                here, there = context.Pipe()
                process = context.Process(  # type: ignore[attr-defined]  # typeshed's BaseContext lacks it
                    target=_worker,
                    args=(rank, nproc, self.directory.name, there, task, timeout_s),
                    name=f"autopar-rank-{rank}",
                    daemon=True,
                )
                self.pipes.append(here)
                process.start()
                self.processes.append(process)
                there.close()  # so that the end of the worker ends the pipe
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def send(self, task: bytes) -> None:
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send_bytes(task)
            except OSError as error:
                raise self._death(rank) from error

    def collect(self, timeout_s: float) -> list[Any]:
        """The result of every rank, in order of rank. Raises the error of the first failure, or
        WorkerError after `timeout_s` seconds.
        """
        deadline_s = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {
                self.pipes[rank]: rank for rank in range(len(self.pipes)) if rank not in results
            }
            ended = wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            ready = [pipe for pipe in ended if isinstance(pipe, Connection)]
            if not ready:
                late = sorted(waiting.values())
                raise WorkerError(
                    f"rank(s) {', '.join(map(str, late))} of {len(self.pipes)} did not finish within {timeout_s:g} s",
                    late[0],
                )
            for pipe in ready:
                rank = waiting[pipe]
                try:
                    status, payload = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError) as error:
                    raise self._death(rank) from error
                if status != "result":
                    raise self._cause(rank, *payload)
                results[rank] = payload
        return [results[rank] for rank in range(len(self.pipes))]

    def stop(self) -> None:
        """Kill all processes. They hold nothing that needs an orderly exit, and may be stuck in a
        collective.
        """
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
            process.close()
        self.processes, self.pipes = [], []
        self.directory.cleanup()

    def _death(self, rank: int) -> WorkerError:
        process = self.processes[rank]
        process.join(10.0)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        words = f"rank {rank} of {len(self.pipes)} {how} before it returned a result"
        with contextlib.suppress(OSError):  # it died before it could make the file
            crash = _crash_file(self.directory.name, rank).read_text(errors="replace")
            words = f"{words}:\n{crash.partition('Extension modules:')[0].rstrip()}"
        return WorkerError(words.strip(": \n"), rank)

    def _cause(self, rank: int, is_autopar_error: bool, message: str, trace: str) -> Exception:
        """The exception to raise for a failure that `rank` reported: its AutoparError; the death of
        another rank, if one was killed; otherwise a WorkerError with `trace`.
        """
        failure = WorkerError(f"rank {rank} of {len(self.pipes)} failed:\n{trace}", rank)
        if is_autopar_error:
            error = AutoparError(message)
            error.__cause__ = failure
            return error
        # a moment before there is an exit code
        ended = wait([process.sentinel for process in self.processes], _GRACE_S)
        for other, process in enumerate(self.processes):
            if process.sentinel in ended:
                death = self._death(other)
                death.__cause__ = failure
                return death
        return failure


def _start_method() -> str:
    """The start method: 'fork' where that is safe (0.1 s), otherwise 'spawn' (about 10 s of
    imports).
    """
    safe = sys.platform == "linux" and not torch.cuda.is_initialized() and not dist.is_initialized()
    return "fork" if safe else "spawn"


def _crash_file(directory: str, rank: int) -> Path:
    """The file in which a crashing rank writes the stacks of its threads."""
    return Path(directory, f"rank-{rank}.crash")


def _worker(
    rank: int, nproc: int, directory: str, pipe: Connection, task: tuple | None, timeout_s: float
) -> None:
    """The loop of one rank: run the given task, then each that arrives through the pipe, until the
    pipe closes or a task fails.
    """
    # Ctrl-C reaches all processes of the terminal; the parent ends its workers itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    crash = _crash_file(directory, rank).open("w")
    faulthandler.enable(crash)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    if (inductor := sys.modules.get("torch._inductor.async_compile")) is not None:
        inductor.AsyncCompile.pool.cache_clear()  # a fork has no threads of its parent's, and would wait for them to compile
    _keep_freed_memory()
    try:
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(directory, "store"), nproc)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=nproc,
            timeout=timedelta(seconds=timeout_s + 60),
        )
        while True:
            function, args = task if task is not None else pickle.loads(_receive(pipe))
            task = None
            pipe.send_bytes(pickle.dumps(("result", function(rank, *args))))
    except Exception as error:
        trace = "".join(traceback.format_exception(error))
        pipe.send_bytes(
            pickle.dumps(
                (
                    "error",
                    (
                        isinstance(error, AutoparError) and not isinstance(error, LostRanks),
                        str(error),
                        trace,
                    ),
                )
            )
        )
        # stay until killed: closed sockets would fail the other ranks too and hide the cause
        _receive(pipe)


def _keep_freed_memory() -> None:
    """Make the C library (glibc) reuse freed memory, as torch's allocator does on a GPU. By default
    it returns large tensors to the system, and page faults then slow down some steps on some
    ranks.
    """
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):  # the parent has closed its end
        os._exit(0)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
