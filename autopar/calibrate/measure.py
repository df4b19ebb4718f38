"""Measurements of one rank while all others do the same: kernels as eager training runs them, and
collectives as the engine runs them.

Operands of kernels come from memory, as in a training step, because together they exceed the
caches. On CPU the host's clock is used. On CUDA, events on the stream are used. Kernels are issued
while the device is busy, so that the host runs ahead and events see only kernels and the gaps
between them. Other costs of an operation are measured with small models (`operations.py`).

Collectives are the primitives of `rewrite/collectives/primitives.py`, including the copies that
they make. Groups of one size tile the ranks and run at once, as the groups of a mesh axis do. Each
collective follows some compute, as in a step. Its time is that of both, less that of the compute
alone. Ranks then do not arrive together, and on CPU a waiting rank may have lost its core.
Back-to-back collectives in lockstep would be faster than those of a step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.calibrate.operations import layers_s
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split
from autopar.rewrite.collectives.primitives import apply_primitive

_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_MOST = 200  # repetitions between two readings of the clock, and kernels in a device's queue, which holds about 1000

# products of 4096**3 that keep a device busy while a chain is issued: some 10 ms in tf32
BLOCKERS = 16
_WORK = 4  # products before a collective: milliseconds
LEAST_S = 1e-6  # of a transfer that noise hides
IN_A_ROW = 16  # operations
# of operands that take turns, and of results that stay as long: more than a cache holds
POOL_BYTES = 2**26
POOL_TENSORS = 256  # at most
_ROWS = 4  # of a tensor whose second dim a collective gathers or scatters, as it does positions of a micro-batch
Points = list[tuple[float, float]]
Work = Callable[[], object]
Sized = tuple[float, Work]
"""(size in bytes, work of that size)."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.

    `sides` are sides of square matrices; `tensors` and `messages` are bytes of one tensor. A point
    is timed `rounds` times, for `point_s` seconds each. A product that takes over `longest_s`
    seconds is the last of its curve.
    """

    sides: tuple[int, ...]
    tensors: tuple[int, ...]
    messages: tuple[int, ...]
    dtypes: tuple[str, ...]
    rounds: int = 5
    point_s: float = 0.06
    longest_s: float = 0.2


CPU_EFFORT = Effort(
    sides=(16, 32, 64, 128, 256, 512, 1024), tensors=tuple(4**k for k in range(1, 13)), messages=tuple(4**k for k in range(3, 13)),
    dtypes=("fp64", "fp32", "bf16"),
)  # fmt: skip
CUDA_EFFORT = Effort(
    sides=(32, 64, 128, 256, 512, 1024, 2048, 4096, 8192), tensors=tuple(4**k for k in range(1, 15)),
    messages=tuple(4**k for k in range(3, 15)), dtypes=tuple(_DTYPES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class KernelMeasurements:
    """Measurements of one rank's device.

    Attributes:
        name, memory_bytes, compute_units, generation: what the device is.
        matmuls: for each dtype that the device supports, (FLOPs, seconds) of products of square
            matrices.
        memory: (bytes, seconds) of element-wise kernels.
        operation_s: the host's seconds for an operation, without its kernel.
    """

    name: str
    memory_bytes: int
    compute_units: int
    generation: str
    matmuls: dict[str, Points]
    memory: Points
    operation_s: float


def measure_kernels(
    rank: int, device_type: str, effort: Effort, operations: float
) -> KernelMeasurements:
    """The measured kernels of this rank's device, and the host's time for one operation. All ranks
    of the (gloo) world must call it at once. `operations` is the number of operations that plans
    count in one layer of each small model.
    """
    device = _device(rank, device_type)
    clock = _Clock(device, effort)
    memory = _memory_curve(clock)
    matmuls = {dtype: points for dtype in effort.dtypes if (points := _matmul_curve(clock, dtype))}
    operation_s = layers_s(clock.host_s, 2 * effort.rounds, device) / operations
    return KernelMeasurements(*_identity(device), matmuls, memory, operation_s)


def measure_transfers(
    rank: int, ranks: int, size: int, device_type: str, effort: Effort
) -> dict[str, Points]:
    """(bytes, seconds) points of each collective, by its name, among groups of `size` neighbours;
    over NCCL on CUDA. All `ranks` of the world must call it.
    """
    device = _device(rank, device_type)
    clock, group = _Clock(device, effort), _group(rank, ranks, size, device)
    return {
        name: _transfer_curve(clock, partial(_collective, name, group=group, device=device))
        for name in _COLLECTIVES
    }


def _device(rank: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _identity(device: torch.device) -> tuple[str, int, int, str]:
    """Name, memory bytes, compute units and generation of a device. For a CPU, the memory is the
    host's.
    """
    if device.type == "cpu":
        import os

        return "cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1, "cpu"
    found = torch.cuda.get_device_properties(device)
    generation = _GENERATIONS.get((found.major, found.minor), "other")
    return found.name, found.total_memory, found.multi_processor_count, generation


_GENERATIONS = {
    (7, 0): "volta",
    (7, 5): "turing",
    **dict.fromkeys(((8, 0), (8, 6)), "ampere"),
    (8, 9): "ada",
    (9, 0): "hopper",
    **dict.fromkeys(((10, 0), (10, 3)), "blackwell"),
    (12, 0): "blackwell-rtx",
}
"""GPU generation by compute capability."""


class _Clock:
    """Times work that all ranks run at the same time."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort
        self.blocker = torch.ones(4096, 4096, device=device) if device.type == "cuda" else None

    def slowest_s(self, work: Work) -> float:
        """Seconds to run `work` once after a warm-up: the maximum over ranks."""
        self.run(work, 1, False)
        slowest = torch.tensor(self.run(work, 1, False)[0], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return max(float(slowest), 1e-7)

    def run(self, work: Work, times: int, ahead: bool) -> tuple[float, float]:
        """(seconds on the device, seconds on the host) to run `work` `times` times. For a GPU, the
        latter are the seconds to issue it; for a CPU both are equal. `ahead`: issue it while the
        device is still busy. All ranks must call it.
        """
        if dist.is_initialized():
            dist.barrier()
        if self.device.type == "cpu":
            start = time.perf_counter()
            for _ in range(times):
                work()
            took_s = time.perf_counter() - start
            return took_s, took_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        if ahead and self.blocker is not None:
            for _ in range(BLOCKERS):
                torch.mm(self.blocker, self.blocker)
        begin.record()
        start = time.perf_counter()
        for _ in range(times):
            work()
        host_s = time.perf_counter() - start
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1e3, host_s

    def host_s(self, work: Work) -> float:
        """Host seconds to run `work` once (for a GPU, to issue it), as the mean of repeated
        runs.
        """
        times = max(1, int(self.effort.point_s / self.slowest_s(work)))
        return self.run(work, times, False)[1] / times

    def curve(self, works: list[tuple[float, Work, int]], ahead: bool) -> Points:
        """(size, seconds of one operation) for each entry (size, work, number of operations in it)
        of `works`.

        `ahead` as for `run`. Each round visits all sizes in turn, so that a disturbance does not
        affect one point alone. A point is the median of its rounds.
        """
        queued = max(operations for *_, operations in works)
        most = _MOST // queued if ahead and self.device.type == "cuda" else _MOST
        plan = [
            (*work, max(1, min(most, int(self.effort.point_s / self.slowest_s(work[1])))))
            for work in works
        ]
        seconds: dict[float, list[float]] = {size: [] for size, *_ in works}
        for _ in range(self.effort.rounds):
            for size, work, operations, times in plan:
                seconds[size].append(self.run(work, times, ahead)[0] / (times * operations))
        return [(size, statistics.median(found)) for size, found in seconds.items()]


# ------------------------------------------------------------------------------------------------------------------- kernels


def _in_turn(
    operation: Callable[[Tensor, Tensor], Tensor], make: Callable[[], Tensor], operations: int
) -> Work:
    """Work of `operations` operations that cycle through several operand tensors, which `make`
    creates, and several results, so that operands are not in a cache.
    """
    tensors = [make()]
    count = min(POOL_TENSORS, POOL_BYTES // tensors[0].nbytes)
    tensors += [make() for _ in range(max(1, count - 1))]
    results: list[Tensor | None] = [None] * len(tensors)
    turns = itertools.cycle(range(len(tensors)))

    def work() -> None:
        for turn in itertools.islice(turns, operations):
            results[turn] = operation(tensors[turn], tensors[turn - 1])

    return work


def _memory_curve(clock: _Clock) -> Points:
    """Seconds of an element-wise kernel, by the bytes of its two operands and its result
    together.
    """
    works = []
    for size in clock.effort.tensors:
        make = partial(torch.ones, max(size // 4, 1), device=clock.device)
        works.append((3.0 * size, _in_turn(torch.mul, make, IN_A_ROW), IN_A_ROW))
    return clock.curve(works, ahead=True)


def _matmul_curve(clock: _Clock, dtype: str) -> Points:
    """Seconds of a product of square matrices, by its FLOPs. Empty if the device does not support
    the dtype.
    """
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        works = []
        for side in clock.effort.sides:
            make = partial(torch.rand, side, side, device=clock.device, dtype=_DTYPES[dtype])
            once_s = clock.slowest_s(_in_turn(torch.mm, make, 1))
            length = max(1, min(IN_A_ROW, int(clock.effort.point_s / once_s)))
            works.append((2.0 * side**3, _in_turn(torch.mm, make, length), length))
            if once_s > clock.effort.longest_s:
                break
        return clock.curve(works, ahead=True)
    except RuntimeError as error:  # a device that lacks the dtype says so in many words
        if "not implemented" not in str(error) and "not supported" not in str(error).lower():
            raise
        return []
    finally:
        torch.set_float32_matmul_precision(precision)


# --------------------------------------------------------------------------------------------------------------- collectives


def _group(rank: int, ranks: int, size: int, device: torch.device) -> AxisGroup:
    """The `AxisGroup` of this rank and its neighbours, `size` ranks together; `size` divides
    `ranks`.

    It creates the process groups of all ranks (NCCL for a CUDA device, otherwise gloo), so every
    rank must call it.
    """
    groups = _groups(ranks, size, device)
    return AxisGroup("measured", size, rank % size, groups[rank // size].group_name)


def _groups(ranks: int, size: int, device: torch.device) -> list[dist.ProcessGroup]:
    """All process groups of `size` neighbours, by rank. Ranks left over are in none. Every rank
    must call it.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    starts = range(0, ranks - size + 1, size)
    return [dist.new_group(list(range(at, at + size)), backend=backend) for at in starts]


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _collective(name: str, size_bytes: int, group: AxisGroup, device: torch.device) -> Sized:
    """A collective as (size in bytes, work), on fp32 tensors of about `size_bytes` over all ranks,
    with dims that the group size divides.
    """
    if name == "all_to_all":  # from shards of the second dim to shards of the third
        side = max(round((size_bytes / (4 * _ROWS)) ** 0.5 / group.size), 1) * group.size
        shard = torch.ones(_ROWS, side // group.size, side, device=device)
        sides = Split(1, side), Split(2, side)
        return shard.nbytes * group.size, lambda: apply_primitive(name, shard, group, *sides)
    columns = max(size_bytes // (4 * _ROWS * group.size), 1) * group.size
    whole, split = torch.ones(_ROWS, columns, 1, device=device), Split(1, columns)
    have = split if name == "all_gather" else None
    want = split if name == "reduce_scatter" else None
    tensor = whole[:, : columns // group.size].contiguous() if have else whole
    return whole.nbytes, lambda: apply_primitive(name, tensor, group, have, want)


def _transfer_curve(clock: _Clock, prepare: Callable[[int], Sized]) -> Points:
    works = dict(map(prepare, clock.effort.messages))  # small sizes may round up to one
    side = 256 if clock.device.type == "cpu" else 2048
    x = torch.ones(side, side, device=clock.device)

    def compute() -> None:
        for _ in range(_WORK):
            torch.mm(x, x)

    def between(transfer: Work) -> Work:
        def work() -> None:
            compute()
            transfer()

        return work

    timed = [(0.0, compute, 1), *((size, between(work), 1) for size, work in works.items())]
    points = clock.curve(timed, ahead=False)
    return [(size, max(seconds - points[0][1], LEAST_S)) for size, seconds in points[1:]]


def measure_messages(rank: int, ranks: int, device_type: str, effort: Effort) -> Points:
    """Seconds of a message by its bytes: half of a round trip, in all pairs of neighbours at once.
    With an odd number of ranks, the last one is idle. All `ranks` must call it.
    """
    device = _device(rank, device_type)
    pairs = _groups(ranks, 2, device)
    group = pairs[rank // 2] if rank // 2 < len(pairs) else None

    def prepare(size_bytes: int) -> tuple[float, Work, int]:
        message = torch.ones(size_bytes // 4, device=device)

        def work() -> None:
            for sender in (0, 1) if group is not None else ():
                if rank % 2 == sender:
                    dist.send(message, rank ^ 1, group)
                else:
                    dist.recv(message, rank ^ 1, group)

        return float(message.nbytes), work, 2

    return _Clock(device, effort).curve([prepare(size) for size in effort.messages], ahead=False)
