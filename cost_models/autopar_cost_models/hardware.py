"""The data types of devices, hosts and links. The catalogue of them is in `catalogue.py`.

Rates are *dense*: datasheets since Ampere also print a doubled figure "with sparsity". `fp32` is
the rate without tensor cores, which PyTorch uses for float32 matmuls unless TF32 is allowed. `fp64`
is the tensor-core rate, which cuBLAS uses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar_cost_models.checks import fraction, nearest, positive, text, whole
from autopar_cost_models.constants import DISPATCH_S
from autopar_cost_models.curves import Curve, curve
from autopar_cost_models.echo import shown

DTYPES = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
ITEMSIZE = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
LINK_KINDS = ("plain", "nvlink", "pcie", "network")
MEASURED_TRANSFERS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
"""The transfers for which a link may have measured curves."""


@dataclass(frozen=True, slots=True)
class Host:
    """One device's share of its host when all devices of the host use it. It has memory, memory
    bandwidth, and the bandwidth of the device-host link in each direction.

    Achieved rate = figure * efficiency.
    """

    memory_bytes: int
    memory_bandwidth_Bps: float
    link_bandwidth_Bps: float
    source: str
    memory_efficiency: float = 1.0
    link_efficiency: float = 1.0

    def __post_init__(self) -> None:
        text("source of the host", self.source)
        whole("host memory_bytes", self.memory_bytes)
        for name in ("memory_bandwidth_Bps", "link_bandwidth_Bps"):
            object.__setattr__(self, name, positive(f"host {name}", getattr(self, name)))
        for name in ("memory_efficiency", "link_efficiency"):
            object.__setattr__(self, name, fraction(f"host {name}", getattr(self, name)))

    @property
    def achieved_memory_Bps(self) -> float:
        """Achieved bytes/s of memory traffic of an optimizer in host memory."""
        return self.memory_bandwidth_Bps * self.memory_efficiency

    @property
    def achieved_link_Bps(self) -> float:
        """Achieved bytes/s of large copies between host and device."""
        return self.link_bandwidth_Bps * self.link_efficiency


_TABLES = {
    "flops": "FLOP/s, e.g. {'bf16': 989e12}",
    "dtype_efficiency": "shares, e.g. {'fp8': 0.7}",
    "matmul_curves": "curves, {'bf16': [[1e6, 1e-5], ...]}",
}
"""The fields of `Device` that are tables by dtype, each with a description of its values for error
messages.
"""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. Achieved rate = figure * efficiency.

    `flops` has the dense FLOP/s of each dtype, and `launch_s` the seconds between two dependent
    kernels. `reserved_bytes` is memory that tensors cannot use. `dtype_efficiency` overrides
    `matmul_efficiency` for single dtypes. `compute_units` is the number of multiprocessors that
    share the tiles of a matmul (1: no tile quantization). `generation` selects the attention rates.

    Measurements of `autopar calibrate` replace rates. `matmul_curves` maps a dtype to a curve:
    seconds of a square matrix product by its FLOPs. `memory_curve` has the seconds of an
    element-wise kernel by the bytes that it reads and writes. Both include the launch. `dispatch_s`
    is the host's time to issue an operation (None: see `issue_s`).
    """

    name: str
    flops: dict[str, float] = field(hash=False)  # dtype -> dense FLOP/s
    memory_bytes: int
    memory_bandwidth_Bps: float
    launch_s: float
    matmul_efficiency: float
    bandwidth_efficiency: float
    reserved_bytes: int
    source: str
    compute_units: int = 1
    generation: str = "other"
    dtype_efficiency: dict[str, float] = field(default_factory=dict, hash=False)
    matmul_curves: dict[str, Curve] = field(default_factory=dict, hash=False)
    memory_curve: Curve | None = field(default=None, hash=False)
    dispatch_s: float | None = None

    def __post_init__(self) -> None:
        text("device name", self.name)
        text(f"source of device {self.name}", self.source)
        text(f"generation of device {self.name}", self.generation)
        self._check_tables()
        prefix = f"device {self.name}:"
        whole(f"{prefix} memory_bytes", self.memory_bytes)
        whole(f"{prefix} reserved_bytes", self.reserved_bytes, least=0)
        whole(f"{prefix} compute_units", self.compute_units)
        if self.reserved_bytes >= self.memory_bytes:
            raise ValueError(
                f"{prefix} reserved_bytes={self.reserved_bytes} leaves nothing of memory_bytes={self.memory_bytes}"
            )
        # Stored as floats, so that a figure written as an int gives the same device, and the same hash of a cluster.
        for name, value in self._floats().items():
            object.__setattr__(self, name, value)

    def _check_tables(self) -> None:
        prefix = f"device {self.name}:"
        for name, what in _TABLES.items():
            table = getattr(self, name)
            if not isinstance(table, dict) or (name == "flops" and not table):
                raise ValueError(f"{prefix} {name}={shown(table)} must map dtypes to {what}")
        for name in _TABLES:
            for dtype in getattr(self, name):
                if dtype not in DTYPES:
                    raise ValueError(
                        f"{prefix} {name} has the unknown dtype {shown(dtype)}; {nearest(dtype, list(DTYPES))}"
                    )
        if unknown := [dtype for dtype in self.matmul_curves if dtype not in self.flops]:
            raise ValueError(
                f"{prefix} matmul_curves has {unknown[0]}, of which flops has no rate; flops has {', '.join(self.flops)}"
            )

    def _floats(self) -> dict[str, object]:
        """By name, the fields that are numbers, tables of numbers or curves, converted to floats.
        Raises ValueError for an invalid one.
        """
        prefix = f"device {self.name}:"
        floats: dict[str, object] = {
            "flops": {
                dtype: positive(f"{prefix} flops[{dtype}]", rate)
                for dtype, rate in self.flops.items()
            },
            "memory_bandwidth_Bps": positive(
                f"{prefix} memory_bandwidth_Bps", self.memory_bandwidth_Bps
            ),
            "launch_s": positive(f"{prefix} launch_s", self.launch_s, zero_allowed=True),
            "matmul_efficiency": fraction(f"{prefix} matmul_efficiency", self.matmul_efficiency),
            "bandwidth_efficiency": fraction(
                f"{prefix} bandwidth_efficiency", self.bandwidth_efficiency
            ),
            "dtype_efficiency": {
                dtype: fraction(f"{prefix} dtype_efficiency[{dtype}]", share)
                for dtype, share in self.dtype_efficiency.items()
            },
        }
        floats["matmul_curves"] = {
            dtype: curve(f"{prefix} matmul_curves[{dtype}]", c)
            for dtype, c in self.matmul_curves.items()
        }
        if self.memory_curve is not None:
            floats["memory_curve"] = curve(f"{prefix} memory_curve", self.memory_curve)
        if self.dispatch_s is not None:
            floats["dispatch_s"] = positive(
                f"{prefix} dispatch_s", self.dispatch_s, zero_allowed=True
            )
        return floats

    @property
    def usable_bytes(self) -> int:
        """Bytes of device memory that tensors can use."""
        return self.memory_bytes - self.reserved_bytes

    @property
    def achieved_bandwidth_Bps(self) -> float:
        """Achieved bytes/s of device memory."""
        return self.memory_bandwidth_Bps * self.bandwidth_efficiency

    @property
    def issue_s(self) -> float:
        """Seconds that the host takes to issue an operation; 0 on a CPU, where this is part of the
        operation's time.
        """
        if self.generation == "cpu":
            return 0.0
        return DISPATCH_S if self.dispatch_s is None else self.dispatch_s

    def peak_flops(self, dtype: str) -> float:
        """Datasheet FLOP/s of a dtype. Raises ValueError if the device lacks the dtype."""
        if dtype not in self.flops:
            raise ValueError(
                f"device {self.name} has no {shown(dtype)} rate; it has {', '.join(self.flops)}"
            )
        return self.flops[dtype]

    def achieved_flops(self, dtype: str) -> float:
        """Achieved FLOP/s of a large matmul in a dtype. Raises ValueError if the device lacks the
        dtype.
        """
        return self.peak_flops(dtype) * self.dtype_efficiency.get(dtype, self.matmul_efficiency)


@dataclass(frozen=True, slots=True)
class Link:
    """A link between devices: line rate per device (or network interface) and direction, latency of
    a ring step, and achieved over line rate.

    `kind` selects the collective model. `plain` is alpha-beta; the others follow NCCL's protocols
    for that medium, scaled so that `latency_s` is a step of the LL128 protocol (`nccl.py`).
    `multicast_efficiency` is the achieved over line rate of reductions inside the switch (NVLS); 0
    means none.

    `curves` are measured and replace all of the above for groups inside a node. They map a transfer
    (one of `MEASURED_TRANSFERS`) to ranks of the group, to a curve of seconds by bytes. The bytes are those
    of the whole tensor; for point_to_point, which has only ranks 2, those of the message.
    """

    bandwidth_Bps: float
    latency_s: float
    source: str
    efficiency: float = 1.0
    kind: str = "plain"
    multicast_efficiency: float = 0.0
    curves: dict[str, dict[int, Curve]] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "bandwidth_Bps", positive("link bandwidth_Bps", self.bandwidth_Bps)
        )
        object.__setattr__(
            self, "latency_s", positive("link latency_s", self.latency_s, zero_allowed=True)
        )
        object.__setattr__(self, "efficiency", fraction("link efficiency", self.efficiency))
        text("link source", self.source)
        if self.kind not in LINK_KINDS:
            raise ValueError(
                f"link kind={shown(self.kind)} is unknown; {nearest(self.kind, list(LINK_KINDS))}"
            )
        share = positive("link multicast_efficiency", self.multicast_efficiency, zero_allowed=True)
        object.__setattr__(
            self,
            "multicast_efficiency",
            fraction("link multicast_efficiency", share) if share else 0.0,
        )
        object.__setattr__(self, "curves", _link_curves(self.curves))

    @property
    def achieved_Bps(self) -> float:
        """Achieved bytes/s of large messages."""
        return self.bandwidth_Bps * self.efficiency


def _link_curves(given: object) -> dict[str, dict[int, Curve]]:
    """Measured curves of a link, validated. Raises ValueError for unknown transfers, invalid group
    sizes and invalid curves.
    """
    if not isinstance(given, dict):
        raise ValueError(
            f"link curves={shown(given)} must map transfers to curves by ranks, e.g. {{'all_reduce': {{2: [[1024, 1e-4], ...]}}}}"
        )
    found: dict[str, dict[int, Curve]] = {}
    for name, by_ranks in given.items():
        if name not in MEASURED_TRANSFERS:
            raise ValueError(
                f"link curves of {shown(name)}: the transfer is unknown; {nearest(name, list(MEASURED_TRANSFERS))}"
            )
        if not isinstance(by_ranks, dict) or not by_ranks:
            raise ValueError(
                f"link curves[{name}]={shown(by_ranks)} must map numbers of ranks to curves, e.g. {{2: [[1024, 1e-4], ...]}}"
            )
        found[name] = {
            whole(f"link curves[{name}]: ranks", ranks, least=2): curve(
                f"link curves[{name}][{ranks}]", points
            )
            for ranks, points in by_ranks.items()
        }
    return found
