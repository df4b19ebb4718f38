"""What one rank measures, while all others do the same: kernels as eager training runs them, and collectives as the engine runs them.

Kernels find their operands as those of a step do, which are more than a cache holds: in memory.  On CPU the clock is the host's.  On CUDA
events on the stream are the clock; work that is under way when kernels are issued lets the host run ahead, so that the events see
kernels and the gaps between them.  What an operation costs besides is asked of small models (`operations.py`).

Collectives are the primitives of `rewrite/collectives/primitives.py`, with the copies that they make. Groups of one size tile the ranks
and run at once, as those of a mesh axis do. Each collective follows some work, as in a step, and is what that takes longer than the work
alone: the ranks do not arrive together, and on CPU one that waits may have lost its core. Back to back, in lockstep, they are faster than
that.
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

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
MOST = 200  # repetitions between two readings of the clock; kernels ahead of a device, whose queue holds about 1000
BLOCKERS = (
    16  # products of 4096**3 that keep a device busy while a chain is issued: some 10 ms in tf32
)
WORK = 4  # products before a collective: milliseconds
LEAST_S = 1e-6  # of a transfer that noise hides
IN_A_ROW = 16  # operations
# of operands that take turns, and of results that stay as long: more than a cache holds
POOL_BYTES = 2**26
POOL_TENSORS = 256  # at most
ROWS = 4  # of a tensor whose second dim a collective gathers or scatters, as it does positions of a micro-batch
Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure.  Sizes are sides of square matrices, and bytes of one tensor; a point is timed `rounds` times for `point_s`
    seconds each; a product that takes over `longest_s` seconds is the last of its curve."""

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
    messages=tuple(4**k for k in range(3, 15)), dtypes=tuple(DTYPES),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a rank found out about its device.  `operation_s` is what an operation costs the host, its kernel aside."""

    name: str
    memory_bytes: int
    compute_units: int
    generation: str
    matmuls: dict[str, Points]
    memory: Points
    operation_s: float


def measure_kernels(rank: int, device_type: str, effort: Effort, operations: float) -> Kernels:
    """The kernels of this rank's device, and what one of so many `operations` of a small model's layer costs the host.  All ranks of the
    (gloo) world call it at once."""
    device = _device(rank, device_type)
    clock = _Clock(device, effort)
    memory = _memory_curve(clock)
    matmuls = {dtype: points for dtype in effort.dtypes if (points := _matmul_curve(clock, dtype))}
    return Kernels(
        *_identity(device),
        matmuls,
        memory,
        layers_s(clock.host_s, 2 * effort.rounds, device) / operations,
    )


def measure_transfers(
    rank: int, ranks: int, size: int, device_type: str, effort: Effort
) -> dict[str, Points]:
    """The collectives among `size` neighbours, over NCCL on CUDA.  All `ranks` of the world call it."""
    device = _device(rank, device_type)
    clock, group = _Clock(device, effort), _group(rank, ranks, size, device)
    return {
        name: _transfer_curve(clock, lambda n, p=prepare: p(n, group, device))
        for name, prepare in _COLLECTIVES.items()
    }


def _device(rank: int, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _identity(device: torch.device) -> tuple[str, int, int, str]:
    """Name, bytes of memory, compute units and generation of a device.  Bytes of a CPU are the host's."""
    if device.type == "cpu":
        import os

        return "cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 1, "cpu"
    found = torch.cuda.get_device_properties(device)
    generation = {
        (8, 0): "ampere",
        (8, 6): "ampere",
        (8, 9): "ada",
        (9, 0): "hopper",
        (10, 0): "blackwell",
        (10, 3): "blackwell",
    }
    return (
        found.name,
        found.total_memory,
        found.multi_processor_count,
        generation.get((found.major, found.minor), "other"),
    )


class _Clock:
    """Times work that all ranks do at once."""

    def __init__(self, device: torch.device, effort: Effort) -> None:
        self.device, self.effort = device, effort
        self.blocker = torch.ones(4096, 4096, device=device) if device.type == "cuda" else None

    def slowest_s(self, work: Callable[[], object]) -> float:
        """Seconds of doing `work` once, the longest of all ranks, after a warm-up."""
        self.run(work, 1, False)
        slowest = torch.tensor(self.run(work, 1, False)[0], dtype=torch.float64)
        if dist.is_initialized():
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return max(float(slowest), 1e-7)

    def run(self, work: Callable[[], object], times: int, ahead: bool) -> tuple[float, float]:
        """(seconds on the device, seconds of the host) of doing `work` so often.  `ahead`: issue it while the device is still busy."""
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
        if ahead:
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

    def host_s(self, work: Callable[[], object]) -> float:
        """Seconds that `work` takes the host."""
        times = max(1, int(self.effort.point_s / self.slowest_s(work)))
        return self.run(work, times, False)[1] / times

    def curve(self, works: list[tuple[float, Callable[[], object], int]], ahead: bool) -> Points:
        """(size, seconds) of each (size, work, operations in it).

        The rounds go over all sizes in turn, so that a disturbance does not hit one point alone; a point is the median of its rounds.
        """
        most = (
            MOST // max(operations for _, _, operations in works)
            if ahead and self.device.type == "cuda"
            else MOST
        )
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
) -> Callable[[], object]:
    """So many operations on tensors that take turns, as their results do."""
    first = make()
    tensors = [
        first,
        *(make() for _ in range(max(1, min(POOL_TENSORS, POOL_BYTES // first.nbytes) - 1))),
    ]
    results: list[Tensor | None] = [None] * len(tensors)
    turns = itertools.cycle(range(len(tensors)))

    def work() -> None:
        for turn in itertools.islice(turns, operations):
            results[turn] = operation(tensors[turn], tensors[turn - 1])

    return work


def _memory_curve(clock: _Clock) -> Points:
    """Seconds of an element-wise kernel by the bytes of its two operands and its result."""
    works = []
    for size in clock.effort.tensors:
        make = partial(torch.ones, max(size // 4, 1), device=clock.device)
        works.append((3.0 * size, _in_turn(torch.mul, make, IN_A_ROW), IN_A_ROW))
    return clock.curve(works, ahead=True)


def _matmul_curve(clock: _Clock, dtype: str) -> Points:
    """Seconds of a product of square matrices by its FLOPs; empty where the device has no such product."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        works = []
        for side in clock.effort.sides:
            make = partial(torch.rand, side, side, device=clock.device, dtype=DTYPES[dtype])
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
    """This rank's group of `size` neighbours.  All ranks make all groups."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    groups = [
        dist.new_group(list(range(first, first + size)), backend=backend)
        for first in range(0, ranks, size)
    ]
    return AxisGroup("measured", size, rank % size, groups[rank // size].group_name)


def _tensor(size_bytes: int, ranks: int, device: torch.device) -> tuple[Tensor, int]:
    """A tensor (ROWS, columns, 1) of fp32 of about `size_bytes`, whose columns divide over the ranks, and its columns."""
    columns = max(size_bytes // (4 * ROWS * ranks), 1) * ranks
    return torch.ones(ROWS, columns, 1, device=device), columns


def _all_reduce(
    size_bytes: int, group: AxisGroup, device: torch.device
) -> tuple[float, Callable[[], object]]:
    whole, _ = _tensor(size_bytes, group.size, device)
    return whole.nbytes, lambda: apply_primitive("all_reduce", whole, group)


def _all_gather(
    size_bytes: int, group: AxisGroup, device: torch.device
) -> tuple[float, Callable[[], object]]:
    whole, columns = _tensor(size_bytes, group.size, device)
    shard = whole[:, : columns // group.size].contiguous()
    return whole.nbytes, lambda: apply_primitive("all_gather", shard, group, Split(1, columns))


def _reduce_scatter(
    size_bytes: int, group: AxisGroup, device: torch.device
) -> tuple[float, Callable[[], object]]:
    whole, columns = _tensor(size_bytes, group.size, device)
    return whole.nbytes, lambda: apply_primitive(
        "reduce_scatter", whole, group, None, Split(1, columns)
    )


def _all_to_all(
    size_bytes: int, group: AxisGroup, device: torch.device
) -> tuple[float, Callable[[], object]]:
    """From shards of the second dim to shards of the third."""
    side = max(round((size_bytes / (4 * ROWS)) ** 0.5 / group.size), 1) * group.size
    shard = torch.ones(ROWS, side // group.size, side, device=device)
    return shard.nbytes * group.size, lambda: apply_primitive(
        "all_to_all", shard, group, Split(1, side), Split(2, side)
    )


_COLLECTIVES: dict[str, Callable[[int, AxisGroup, torch.device], tuple[float, Callable[[], object]]]] = {
    "all_reduce": _all_reduce, "all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_to_all": _all_to_all,
}  # fmt: skip


def _transfer_curve(
    clock: _Clock, prepare: Callable[[int], tuple[float, Callable[[], object]]]
) -> Points:
    works = dict(map(prepare, clock.effort.messages))  # small sizes may round up to one
    side = 256 if clock.device.type == "cpu" else 2048
    x = torch.ones(side, side, device=clock.device)

    def compute() -> None:
        for _ in range(WORK):
            torch.mm(x, x)

    def between(transfer: Callable[[], object]) -> Callable[[], object]:
        return lambda: (compute(), transfer())

    points = clock.curve(
        [(0.0, compute, 1), *((size, between(work), 1) for size, work in works.items())],
        ahead=False,
    )
    return [(size, max(seconds - points[0][1], LEAST_S)) for size, seconds in points[1:]]


def measure_messages(rank: int, ranks: int, device_type: str, effort: Effort) -> Points:
    """Seconds of a message: half of a round trip, in all pairs of neighbours at once.  The last rank of an odd number looks on."""
    device = _device(rank, device_type)
    backend = "nccl" if device.type == "cuda" else "gloo"
    pairs = [
        dist.new_group([first, first + 1], backend=backend) for first in range(0, ranks - 1, 2)
    ]
    group = pairs[rank // 2] if rank // 2 < len(pairs) else None

    def prepare(size_bytes: int) -> tuple[float, Callable[[], object], int]:
        message = torch.ones(size_bytes // 4, device=device)

        def work() -> None:
            for sender in (0, 1) if group is not None else ():
                if rank % 2 == sender:
                    dist.send(message, rank ^ 1, group)
                else:
                    dist.recv(message, rank ^ 1, group)

        return float(message.nbytes), work, 2

    return _Clock(device, effort).curve([prepare(size) for size in effort.messages], ahead=False)
