"""Turns the measurements of all ranks into a ClusterSpec."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from autopar_cost_models import FITTED, Device, Link
from autopar_cost_models.catalogue import ETHERNET
from autopar_cost_models.checks import is_whole
from autopar_cost_models.constants import CPU_RESERVED_BYTES
from autopar_cost_models.curves import Curve, best_rate

from autopar.calibrate.measure import (
    CPU_EFFORT,
    CUDA_EFFORT,
    Effort,
    KernelMeasurements,
    Points,
    measure_kernels,
    measure_messages,
    measure_transfers,
)
from autopar.calibrate.operations import count_operations
from autopar.errors import AutoparError, shown
from autopar.ir.cluster import ClusterSpec
from autopar.runtime.ranks.launch import WorkerPool

CPU_PROCESSES = 4
_TIMEOUT_S = 1800.0  # of one part, on a busy machine


def calibrate(
    nproc: int | None = None,
    device_type: str | None = None,
    effort: Effort | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> ClusterSpec:
    """This machine, measured, as a cluster of one node with `nproc` devices: CPU processes over
    gloo, or its GPUs over NCCL.

    All devices work at once during a measurement, as when a plan runs; CPU processes share the
    cores. It takes about a minute. Raises AutoparError for an invalid argument, and for devices
    that the machine does not have.

    Args:
        nproc: number of devices. Default: 4 processes, or all GPUs.
        device_type: 'cpu' or 'cuda'. Default: 'cuda' if there is a GPU.
        effort: what to measure, and how often.
        progress: called with a line of text at each step.
    """
    gpus = torch.cuda.device_count()
    device_type = device_type or ("cuda" if gpus else "cpu")
    if device_type not in ("cpu", "cuda"):
        raise AutoparError(f"device {shown(device_type)} is not known; cpu and cuda are")
    if device_type == "cuda" and not gpus:
        raise AutoparError("no CUDA device is visible to this process; calibrate with --device cpu")
    nproc = nproc if nproc is not None else (gpus if device_type == "cuda" else CPU_PROCESSES)
    if not is_whole(nproc):
        raise AutoparError(f"nproc={shown(nproc)} must be a whole number >= 1")
    if device_type == "cuda" and nproc > gpus:
        raise AutoparError(
            f"nproc={nproc} is more than the {gpus} CUDA device(s) of this machine; use --nproc {gpus} or less"
        )
    effort = effort or (CUDA_EFFORT if device_type == "cuda" else CPU_EFFORT)
    with WorkerPool(nproc, "spawn" if device_type == "cuda" else None) as pool:
        progress(f"measuring kernels on {nproc} {device_type} device(s)")
        kernels = pool.run(
            measure_kernels,
            device_type,
            effort,
            count_operations(device_type),
            timeout_s=_TIMEOUT_S,
        )
        transfers: dict[str, dict[int, list[Points]]] = {}
        for size in (size for size in range(2, nproc + 1) if nproc % size == 0):
            progress(f"measuring collectives in groups of {size}")
            for found in pool.run(
                measure_transfers, nproc, size, device_type, effort, timeout_s=_TIMEOUT_S
            ):
                for name, points in found.items():
                    transfers.setdefault(name, {}).setdefault(size, []).append(points)
        if nproc > 1:
            progress("measuring messages")
            pairs = pool.run(measure_messages, nproc, device_type, effort, timeout_s=_TIMEOUT_S)
            transfers["point_to_point"] = {2: pairs[: nproc // 2 * 2]}
    return assembled_cluster(device_type, kernels, transfers)


def assembled_cluster(
    device_type: str,
    kernels: Sequence[KernelMeasurements],
    transfers: dict[str, dict[int, list[Points]]],
) -> ClusterSpec:
    """The cluster of one node that consists of these ranks; `kernels` has the measurements of each.
    `transfers` is name of a transfer -> group size -> the points of each rank. It is empty for one
    rank.
    """
    first, nproc, cpu = kernels[0], len(kernels), device_type == "cpu"
    memory = merged_curve([found.memory for found in kernels])
    operation_s = statistics.median(found.operation_s for found in kernels)
    # on CPU an operation waits for itself
    launch_s = max(operation_s, memory[0][1]) if cpu else memory[0][1]

    def in_a_step(points: Curve) -> Curve:
        """Points whose times contain the cost of the smallest operation, with that replaced by the
        cost of an operation within a step.
        """
        least_s = memory[0][1]
        return tuple((size, max(seconds - least_s, 0.0) + launch_s) for size, seconds in points)

    matmuls = {
        dtype: in_a_step(merged_curve([found.matmuls[dtype] for found in kernels]))
        for dtype in first.matmuls
    }
    source = f"measured by autopar calibrate on {nproc} {'CPU processes' if cpu else first.name} at once, torch {torch.__version__}"
    device = Device(
        name=first.name,
        flops={dtype: best_rate(points) for dtype, points in matmuls.items()},
        memory_bytes=first.memory_bytes // nproc if cpu else first.memory_bytes,
        memory_bandwidth_Bps=memory[-1][0] / memory[-1][1],
        launch_s=launch_s,
        matmul_efficiency=1.0,
        bandwidth_efficiency=1.0,
        reserved_bytes=CPU_RESERVED_BYTES if cpu else int(FITTED.reserved_bytes),
        source=f"{source} ({platform.machine()})",
        compute_units=first.compute_units,
        generation=first.generation,
        matmul_curves=matmuls,
        memory_curve=in_a_step(memory),
        dispatch_s=None if cpu else operation_s,
    )
    curves = {
        name: {size: merged_curve(points) for size, points in by_size.items()}
        for name, by_size in transfers.items()
    }
    intra = replace(ETHERNET, source="one device: no link")
    if curves:
        messages = curves["point_to_point"][2]
        latency_s, (size_bytes, most_s) = messages[0][1], messages[-1]
        bandwidth_Bps = size_bytes / max(most_s - latency_s, most_s / 2)
        intra = Link(bandwidth_Bps, latency_s, source, curves=curves)
    return ClusterSpec.make(
        device,
        1,
        nproc,
        name=f"calibrated {device_type}:{nproc}",
        **{
            f"intra_{key}": getattr(intra, key)
            for key in ("bandwidth_Bps", "latency_s", "source", "efficiency", "kind", "curves")
        },
        **{
            f"inter_{key}": getattr(ETHERNET, key)
            for key in ("bandwidth_Bps", "latency_s", "source", "efficiency", "kind")
        },
    )


def merged_curve(ranks: Sequence[Points]) -> Curve:
    """One curve of (size, seconds) from the points of several ranks, which have the same sizes: the
    median at each size.

    If noise makes a larger size seem faster, both points get their mean (isotonic regression by
    pooling adjacent violators, Barlow et al. 1972).
    """
    pools: list[tuple[float, int]] = []  # (mean seconds, points)
    for place in range(len(ranks[0])):
        seconds, count = statistics.median(found[place][1] for found in ranks), 1
        while pools and pools[-1][0] > seconds:
            before_s, others = pools.pop()
            seconds = (before_s * others + seconds * count) / (others + count)
            count += others
        pools.append((seconds, count))
    fitted = [seconds for seconds, count in pools for _ in range(count)]
    return tuple((size, seconds) for (size, _), seconds in zip(ranks[0], fitted, strict=True))
