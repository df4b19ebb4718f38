"""Seconds of one kernel: the roofline model of Williams, Waterman and Patterson (CACM 52(4), 2009),
plus the launch.

    time = max(flops / achieved FLOP/s, bytes / achieved B/s) + launch

A measured device (`curves.py`) has curves in place of both rates. Curves of products are of square
matrices. A less square product moves more bytes for the same FLOPs; only these extra bytes can make
it memory-bound.

`matmul.py` and `attention.py` refine the achieved rate by shape.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar_cost_models.checks import nearest, positive
from autopar_cost_models.curves import curve_s
from autopar_cost_models.echo import shown
from autopar_cost_models.fitted import FITTED, FittedConstants
from autopar_cost_models.hardware import ITEMSIZE, Device, Host


def matmul_time_s(flops: float, size_bytes: float, device: Device, dtype: str) -> float:
    """Seconds of a matmul-like kernel of `flops` FLOPs (2 per multiply-add) that moves `size_bytes`
    through device memory.
    """
    positive("flops", flops, zero_allowed=True)
    return product_s(flops, size_bytes, device, dtype) + device.launch_s


def memory_time_s(size_bytes: float, device: Device) -> float:
    """Seconds of an element-wise, normalization or copy kernel that reads and writes `size_bytes`
    in total.
    """
    return stream_s(size_bytes, device) + device.launch_s


def chain_time_s(
    kernel_bytes: Sequence[float], external_bytes: float, device: Device, compiled: bool
) -> float:
    """Seconds of a sequence of element-wise operations.

    Eager mode runs one kernel for each, which moves `kernel_bytes[i]`. A compiler fuses them into
    one kernel that moves only the bytes that enter and leave the chain, `external_bytes`.
    """
    if compiled:
        return memory_time_s(external_bytes, device) if kernel_bytes else 0.0
    return sum(memory_time_s(size_bytes, device) for size_bytes in kernel_bytes)


# Bytes that one Adam update moves per parameter.  One fused kernel reads gradient, master weight and two moments and writes the last three,
# plus the working copy in mixed precision.  Without it (`foreach`: lerp, mul, addcmul, sqrt, div, add, addcdiv, each over all tensors, see
# torch/optim/adam.py) 18 fp32 accesses and the copy.
_ADAM_BYTES = {"fp32": (28, 72), "fp64": (56, 144), "bf16": (30, 74), "fp16": (30, 74)}


def optimizer_time_s(numel: float, device: Device, precision: str, fused: bool = True) -> float:
    """Seconds of one Adam update of `numel` parameters under a precision recipe of `memory.py`: by
    one fused kernel, or without `fused` by seven kernels that move more bytes. ValueError for an
    unknown precision.
    """
    positive("numel", numel, zero_allowed=True)
    if precision not in _ADAM_BYTES:
        raise ValueError(
            f"unknown precision {shown(precision)}; {nearest(precision, list(_ADAM_BYTES))}"
        )
    kernels = 1 if fused else 7
    return (
        stream_s(numel * _ADAM_BYTES[precision][0 if fused else 1], device)
        + kernels * device.launch_s
    )


def offloaded_update_time_s(
    numel: float, host: Host, precision: str, gradient_bytes: float, parameter_bytes: float
) -> float:
    """Seconds of one Adam update of `numel` parameters in host memory, by one fused pass.

    `gradient_bytes` cross the link to the host, the update runs, and `parameter_bytes` go back, one
    after the other (`autopar/runtime/state/parameters.py`).
    """
    positive("numel", numel, zero_allowed=True)
    if precision not in _ADAM_BYTES:
        raise ValueError(
            f"unknown precision {shown(precision)}; {nearest(precision, list(_ADAM_BYTES))}"
        )
    return (
        link_time_s(gradient_bytes + parameter_bytes, host)
        + numel * _ADAM_BYTES[precision][0] / host.achieved_memory_Bps
    )


def link_time_s(size_bytes: float, host: Host) -> float:
    """Seconds to move `size_bytes` in one direction between a device and its host, without
    latency.
    """
    positive("size_bytes", size_bytes, zero_allowed=True)
    return size_bytes / host.achieved_link_Bps


def overlapped_s(compute_s: float, transfer_s: float, fitted: FittedConstants = FITTED) -> float:
    """Seconds of compute and a collective that run at the same time.

    The collective occupies multiprocessors, so compute runs at 1 - s of its speed (s =
    `overlap_slowdown`). Compute that outlasts the collective ends at compute_s + s * transfer_s.
    Otherwise the collective ends last. The result is the maximum of both.
    """
    positive("compute_s", compute_s, zero_allowed=True)
    positive("transfer_s", transfer_s, zero_allowed=True)
    return (
        max(transfer_s, compute_s + fitted.overlap_slowdown * transfer_s)
        if compute_s
        else transfer_s
    )


def arithmetic_intensity(device: Device, dtype: str) -> float:
    """FLOPs per byte above which a matmul is compute-bound: the ridge point of the roofline."""
    return device.achieved_flops(dtype) / device.achieved_bandwidth_Bps


def product_s(flops: float, size_bytes: float, device: Device, dtype: str) -> float:
    """Seconds of a matmul-like kernel, without the effect of its shape and without the launch."""
    measured = device.matmul_curves.get(dtype)
    if measured is None:
        return max(flops / device.achieved_flops(dtype), stream_s(size_bytes, device))
    square_bytes = 3 * (flops / 2) ** (2 / 3) * ITEMSIZE[dtype]
    return max(
        curve_s(measured, flops) - device.launch_s,
        stream_s(max(size_bytes - square_bytes, 0.0), device),
        0.0,
    )


def stream_s(size_bytes: float, device: Device) -> float:
    """Seconds to move `size_bytes` through device memory, without the launch."""
    positive("size_bytes", size_bytes, zero_allowed=True)
    if device.memory_curve is not None:
        return max(curve_s(device.memory_curve, size_bytes) - device.launch_s, 0.0)
    return size_bytes / device.achieved_bandwidth_Bps
