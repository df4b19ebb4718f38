"""Worker processes: results by rank, and that no failure of a rank is silent or hangs."""

from __future__ import annotations

import ctypes
import os
import pickle
import platform
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.rewrite.collectives.axes import simulated_axes
from autopar.runtime.ranks import launch
from autopar.runtime.ranks.launch import WorkerError, WorkerPool, run_workers
from autopar.runtime.ranks.process_groups import mesh_axes

PROMPTLY_S = 10.0


def rank_sum(rank: int, factor: int) -> tuple[int, int, float]:
    value = torch.tensor([float(rank)])
    dist.all_reduce(value)
    return rank * factor, torch.get_num_threads(), value.item()


def pid(rank: int) -> int:
    return os.getpid()


def large(rank: int, scale: torch.Tensor) -> torch.Tensor:
    return torch.full((2_000_000,), float(rank)) * scale


def fail_on_rank_1(rank: int, kind: str) -> None:
    if rank == 1:
        if kind == "autopar":
            raise AutoparError("tp=3 does not divide 32 heads")
        if kind == "value":
            raise ValueError("a worker's own mistake")
        if kind == "exit":
            sys.exit(3)
        if kind == "unpicklable":
            return lambda: None
        if kind == "crash":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def sleep(rank: int) -> None:
    if rank == 1:
        time.sleep(60)


FAILURES = [
    ("autopar", AutoparError, r"^tp=3 does not divide 32 heads$"),
    (
        "value",
        WorkerError,
        r"(?s)rank 1 of 2 failed:.*fail_on_rank_1.*ValueError: a worker's own mistake",
    ),
    ("exit", WorkerError, r"rank 1 of 2 ended with exit code 3"),
    ("unpicklable", WorkerError, r"(?s)rank 1 of 2 failed:.*pickle"),
    ("kill", WorkerError, r"rank 1 of 2 was killed by SIGKILL before it returned a result$"),
    (
        "crash",
        WorkerError,
        r"(?s)rank 1 of 2 was killed by SIGSEGV before it returned a result:\nFatal.* in fail_on_rank_1(?!.*Extension)",
    ),
]


def test_run_workers_returns_results_by_rank():
    assert run_workers(rank_sum, 3, (10,)) == [(0, 1, 3.0), (10, 1, 3.0), (20, 1, 3.0)]


def test_run_workers_takes_closures():
    offset = 7
    assert run_workers(lambda rank: rank + offset, 2) == [7, 8]


@pytest.mark.slow
def test_run_workers_spawns_where_forking_is_unsafe(monkeypatch):
    assert launch._start_method() == "fork"
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert launch._start_method() == "spawn"
    assert run_workers(rank_sum, 2, (10,)) == [(0, 1, 1.0), (10, 1, 1.0)]


@pytest.mark.parametrize(("kind", "error", "message"), FAILURES)
def test_run_workers_reports_a_failing_rank(kind, error, message):
    start_s = time.monotonic()
    with pytest.raises(error, match=message):
        run_workers(fail_on_rank_1, 2, (kind,))
    assert time.monotonic() - start_s < PROMPTLY_S


def test_run_workers_times_out():
    with pytest.raises(WorkerError, match=r"rank\(s\) 1 of 2 did not finish within 1 s"):
        run_workers(sleep, 2, timeout_s=1.0)


def test_run_workers_wants_a_worker():
    with pytest.raises(AutoparError, match="nproc=0"):
        run_workers(pid, 0)


def test_pool_keeps_its_processes(pool2):
    first = pool2.run(pid)
    assert len(set(first)) == 2 and os.getpid() not in first
    assert pool2.run(pid) == first
    assert pool2.run(rank_sum, 5) == [(0, 1, 1.0), (5, 1, 1.0)]


def test_pool_carries_large_tensors(pool2):
    results = pool2.run(large, torch.full((2_000_000,), 2.0))
    assert [result.unique().tolist() for result in results] == [[0.0], [2.0]]


@pytest.mark.parametrize(("kind", "error", "message"), FAILURES)
def test_pool_survives_a_failing_rank(pool2, kind, error, message):
    with pytest.raises(error, match=message):
        pool2.run(fail_on_rank_1, kind)
    assert pool2.run(rank_sum, 1) == [(0, 1, 1.0), (1, 1, 1.0)]


def test_pool_times_out_and_survives(pool2):
    with pytest.raises(WorkerError, match="did not finish"):
        pool2.run(sleep, timeout_s=0.5)
    assert pool2.run(rank_sum, 1) == [(0, 1, 1.0), (1, 1, 1.0)]


def test_pool_replaces_a_worker_that_died_idle():
    with WorkerPool(2) as pool:
        before = pool.run(pid)
        os.kill(before[0], signal.SIGKILL)
        deadline_s = time.monotonic() + PROMPTLY_S
        while pool._workers.alive() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert set(pool.run(pid)).isdisjoint(before)


def test_pool_refuses_a_closure_and_stays_usable(pool2):
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        pool2.run(lambda rank: rank)
    assert len(pool2.run(pid)) == 2


def test_closed_pool_leaves_no_process():
    pool = WorkerPool(2)
    pids = pool.run(pid)
    pool.close()
    pool.close()
    assert not any(_runs(process) for process in pids)


def test_workers_end_with_a_killed_parent():
    pids = _printed(
        "pool = test_launch.WorkerPool(3)\n"
        "print(*pool.run(test_launch.pid), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert len(pids) == 3
    deadline_s = time.monotonic() + PROMPTLY_S
    while any(_runs(process) for process in pids) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(_runs(process) for process in pids)


def _printed(program: str) -> list[int]:
    """The numbers that a program prints in a fresh process."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", f"import os, signal, test_launch\n{program}"],
        check=False,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return [int(word) for word in done.stdout.split()]


def _runs(process: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --------------------------------------------------------------------------------------------------------------- process groups


def describe_mesh(rank: int, shape: MeshShape) -> dict:
    mesh, axes = mesh_axes(shape, "cpu")
    value = {}
    for axis, group in axes.items():
        summand = torch.tensor([rank])
        if group.group_name is not None:
            dist.all_reduce(summand, group=mesh.get_group(axis))
        value[axis] = (group.size, group.index, summand.item())
    return {"names": mesh.mesh_dim_names, "axes": value}


def wrong_world(rank: int) -> None:
    mesh_axes(MeshShape(tp=3), "cpu")


def test_mesh_axes_number_ranks_row_major(pool4):
    shape = MeshShape(dp=2, tp=2)
    for rank, found in enumerate(pool4.run(describe_mesh, shape)):
        dp, tp = divmod(rank, 2)
        assert found["names"] == ("pp", "dp", "ep", "cp", "tp")
        alone = dict.fromkeys(("pp", "ep", "cp"), (1, 0, rank))
        assert found["axes"] == alone | {"dp": (2, dp, tp + tp + 2), "tp": (2, tp, 4 * dp + 1)}
        simulated = simulated_axes(shape, rank)
        assert {axis: (group.size, group.index) for axis, group in simulated.items()} == {
            a: v[:2] for a, v in found["axes"].items()
        }


def test_one_device_needs_no_process_group():
    mesh, axes = mesh_axes(MeshShape(), "cpu")
    assert mesh is None and all(
        group.size == 1 and group.group_name is None for group in axes.values()
    )


def test_wrong_world_size_names_both_numbers(pool2):
    with pytest.raises(
        AutoparError,
        match=r"the mesh \(tp=2\) has 2 device\(s\), but no process group is initialized",
    ):
        mesh_axes(MeshShape(tp=2), "cpu")
    with pytest.raises(
        AutoparError,
        match=r"the mesh \(tp=3\) has 3 device\(s\), but the process group has 2 rank\(s\)",
    ):
        pool2.run(wrong_world)
    with pytest.raises(AutoparError, match="rank 4"):
        simulated_axes(MeshShape(tp=4), 4)


def faults(rank: int) -> int:
    """Pages that are faulted in by tensors of 144 MB in all that three times take the place of others which are gone."""
    for turn in range(4):
        if turn == 1:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        kept = [torch.ones(2**18 * size) for size in (1, 8, 2, 7, 3, 6, 4, 5) * 2]
        kept.clear()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_ranks_keep_the_memory_that_they_free():
    """By itself the C library gives it back until it has seen such tensors for a while: some 34,000 pages here, in fresh processes."""
    assert max(_printed("print(*test_launch.WorkerPool(2).run(test_launch.faults))")) < 9_000
