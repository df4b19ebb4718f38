"""Devices and links as data: datasheet figures in SI units, each with its source.

Rates are *dense* (datasheets of Ampere and later also print a doubled figure "with sparsity").  `fp32` is the rate without tensor
cores, which is what PyTorch uses for float32 matmuls unless TF32 is allowed; `fp64` is the tensor-core rate, which cuBLAS uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar_cost_models import constants as c
from autopar_cost_models.checks import fraction, nearest, positive, text, whole

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator.  Achieved rate = figure * efficiency; `reserved_bytes` is memory that no tensor can use."""

    name: str
    flops: dict[str, float] = field(hash=False)  # dtype -> dense FLOP/s
    memory_bytes: int
    memory_bandwidth_Bps: float
    launch_s: float
    matmul_efficiency: float
    bandwidth_efficiency: float
    reserved_bytes: int
    source: str

    def __post_init__(self) -> None:
        text("device name", self.name)
        text(f"source of device {self.name}", self.source)
        if not isinstance(self.flops, dict) or not self.flops:
            raise ValueError(f"device {self.name}: flops={self.flops!r} must map dtypes to FLOP/s, e.g. {{'bf16': 989e12}}")
        for dtype in self.flops:
            if dtype not in DTYPES:
                raise ValueError(f"device {self.name}: flops has the unknown dtype {dtype!r}; {nearest(str(dtype), list(DTYPES))}")
        prefix = f"device {self.name}:"
        whole(f"{prefix} memory_bytes", self.memory_bytes)
        whole(f"{prefix} reserved_bytes", self.reserved_bytes, least=0)
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(f"{prefix} reserved_bytes={self.reserved_bytes} leaves nothing of memory_bytes={self.memory_bytes}")
        # Stored as floats, so that a figure written as an int gives the same device, and the same hash of a cluster.
        floats = {
            "flops": {dtype: positive(f"{prefix} flops[{dtype}]", rate) for dtype, rate in self.flops.items()},
            "memory_bandwidth_Bps": positive(f"{prefix} memory_bandwidth_Bps", self.memory_bandwidth_Bps),
            "launch_s": positive(f"{prefix} launch_s", self.launch_s, zero_allowed=True),
            "matmul_efficiency": fraction(f"{prefix} matmul_efficiency", self.matmul_efficiency),
            "bandwidth_efficiency": fraction(f"{prefix} bandwidth_efficiency", self.bandwidth_efficiency),
        }
        for name, value in floats.items():
            object.__setattr__(self, name, value)

    @property
    def usable_bytes(self) -> int:
        """Memory that tensors can use."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def achieved_bandwidth_Bps(self) -> float:
        return self.memory_bandwidth_Bps * self.bandwidth_efficiency

    def peak_flops(self, dtype: str) -> float:
        """Datasheet FLOP/s of a dtype.  ValueError if the device lacks it."""
        if dtype not in self.flops:
            raise ValueError(f"device {self.name} has no {dtype!r} rate; it has {', '.join(self.flops)}")
        return self.flops[dtype]

    def achieved_flops(self, dtype: str) -> float:
        """FLOP/s that a large matmul reaches."""
        return self.peak_flops(dtype) * self.matmul_efficiency


@dataclass(frozen=True, slots=True)
class Link:
    """What connects devices: line rate per device and direction, time of one step of a ring, achieved / line rate."""

    bandwidth_Bps: float
    latency_s: float
    source: str
    efficiency: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "bandwidth_Bps", positive("link bandwidth_Bps", self.bandwidth_Bps))
        object.__setattr__(self, "latency_s", positive("link latency_s", self.latency_s, zero_allowed=True))
        object.__setattr__(self, "efficiency", fraction("link efficiency", self.efficiency))
        text("link source", self.source)

    @property
    def achieved_Bps(self) -> float:
        return self.bandwidth_Bps * self.efficiency


def _gpu(name: str, tflops: dict[str, float], memory_MiB: int, bandwidth_Bps: float, efficiency: float, source: str) -> Device:
    return Device(name, {dtype: rate * 1e12 for dtype, rate in tflops.items()}, memory_MiB * c.MIB, bandwidth_Bps, c.KERNEL_LAUNCH_S,
                  efficiency, c.HBM_EFFICIENCY, c.CUDA_RESERVED_BYTES, source)


_AMPERE = {"fp64": 19.5, "fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0}
_HOPPER = {"fp64": 67.0, "fp32": 67.0, "tf32": 494.5, "bf16": 989.5, "fp16": 989.5, "fp8": 1979.0}
_B200 = {"fp64": 37.0, "fp32": 75.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp64": 40.0, "fp32": 80.0, "tf32": 1250.0, "bf16": 2500.0, "fp16": 2500.0, "fp8": 5000.0}

# Memory is what nvidia-smi reports as the total, since the "GB" of datasheets are neither 1e9 bytes nor quite 2**30.
_CATALOGUE = (
    _gpu("a100-40g", _AMPERE, 40960, 1.555e12, c.MATMUL_EFFICIENCY_AMPERE,
         "NVIDIA A100 Tensor Core GPU datasheet (SXM4 40 GB); memory: nvidia-smi, github.com/modal-labs/modal-client/pull/2797"),
    _gpu("a100-80g", _AMPERE, 81920, 2.039e12, c.MATMUL_EFFICIENCY_AMPERE,
         "NVIDIA A100 Tensor Core GPU datasheet (SXM4 80 GB); memory: nvidia-smi, github.com/modal-labs/modal-client/pull/2797"),
    _gpu("h100", _HOPPER, 81559, 3.35e12, c.MATMUL_EFFICIENCY_HOPPER,
         "NVIDIA H100 Tensor Core GPU datasheet (SXM5 80 GB), half of the figures with sparsity; memory: nvidia-smi, "
         "github.com/modal-labs/modal-client/pull/2797"),
    _gpu("h200", _HOPPER, 143771, 4.8e12, c.MATMUL_EFFICIENCY_HOPPER,
         "NVIDIA H200 Tensor Core GPU datasheet (SXM 141 GB), half of the figures with sparsity; memory: nvidia-smi"),
    _gpu("b200", _B200, 182630, 7.7e12, c.MATMUL_EFFICIENCY_BLACKWELL,
         "NVIDIA Blackwell datasheet, HGX B200 (180 GB), half of the figures with sparsity; memory: 178.35 GiB by device query, "
         "github.com/pytorch/ao/pull/4002"),
    _gpu("gb200", _GB200, 189471, 8.0e12, c.MATMUL_EFFICIENCY_BLACKWELL,
         "NVIDIA Blackwell datasheet, GB200 NVL72 (186 GB per GPU), half of the figures with sparsity; memory: nvidia-smi"),
    Device("cpu", {"fp64": c.CPU_FP64_FLOPS, "fp32": c.CPU_FP32_FLOPS, "bf16": c.CPU_BF16_FLOPS, "fp16": c.CPU_BF16_FLOPS},
           c.CPU_MEMORY_BYTES, c.CPU_COPY_BPS, c.CPU_LAUNCH_S, 1.0, 1.0, c.CPU_RESERVED_BYTES,
           "measured on one thread of an AMD EPYC (Zen 3), see constants.py; memory assumed"),
)

DEVICES: dict[str, Device] = {device.name: device for device in _CATALOGUE}
"""The catalogue, by name."""

NVLINK3 = Link(300e9, c.NVLINK_STEP_S, "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions", c.NVLINK3_EFFICIENCY)
NVLINK4 = Link(450e9, c.NVLINK_STEP_S, "NVIDIA H100 datasheet: NVLink 900 GB/s, both directions", c.NVLINK4_EFFICIENCY)
NVLINK5 = Link(900e9, c.NVLINK_STEP_S, "NVIDIA Blackwell datasheet: NVLink 1.8 TB/s, both directions", c.NVLINK5_EFFICIENCY)
HDR200 = Link(25e9, c.NETWORK_STEP_S, "NVIDIA DGX A100 datasheet: 8 x 200 Gb/s HDR InfiniBand", c.INFINIBAND_EFFICIENCY)
NDR400 = Link(50e9, c.NETWORK_STEP_S, "NVIDIA DGX H100, H200, B200 and GB200 datasheets: one 400 Gb/s ConnectX-7 per GPU",
              c.INFINIBAND_EFFICIENCY)
GLOO = Link(c.GLOO_BPS, c.GLOO_STEP_S, "assumed, to be fitted by calibration (constants.py)")
ETHERNET = Link(c.ETHERNET_BPS, c.ETHERNET_STEP_S, "assumed: 10 Gb/s Ethernet (constants.py)")

LINKS: dict[str, Link] = {"nvlink3": NVLINK3, "nvlink4": NVLINK4, "nvlink5": NVLINK5, "hdr200": HDR200, "ndr400": NDR400,
                          "gloo": GLOO, "ethernet": ETHERNET}


def device(name: str) -> Device:
    """The catalogue entry `name`.  ValueError with the nearest names if there is none."""
    found = DEVICES.get(name.lower()) if isinstance(name, str) else None
    if found is None:
        raise ValueError(f"unknown device {name!r}; {nearest(str(name), list(DEVICES))}")
    return found
