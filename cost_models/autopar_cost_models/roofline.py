"""Time of one kernel: the roofline model of Williams, Waterman and Patterson (CACM 52(4), 2009), plus the launch.

    time = max(flops / achieved FLOP/s, bytes / achieved B/s) + launch
"""

from __future__ import annotations

from autopar_cost_models.checks import positive
from autopar_cost_models.hardware import Device


def matmul_time_s(flops: float, size_bytes: float, device: Device, dtype: str) -> float:
    """Seconds for a matmul-like kernel of `flops` FLOPs (2 per multiply-add) that moves `size_bytes` through device memory."""
    positive("flops", flops, zero_allowed=True)
    return max(flops / device.achieved_flops(dtype), _stream_s(size_bytes, device)) + device.launch_s


def memory_time_s(size_bytes: float, device: Device) -> float:
    """Seconds for an element-wise, normalization or copy kernel that reads and writes `size_bytes` in total."""
    return _stream_s(size_bytes, device) + device.launch_s


def arithmetic_intensity(device: Device, dtype: str) -> float:
    """FLOPs per byte above which a matmul is bound by compute: the ridge of the roofline."""
    return device.achieved_flops(dtype) / device.achieved_bandwidth_Bps


def _stream_s(size_bytes: float, device: Device) -> float:
    positive("size_bytes", size_bytes, zero_allowed=True)
    return size_bytes / device.achieved_bandwidth_Bps
