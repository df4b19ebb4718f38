"""A row of the catalogue of GPUs, and how it becomes a `Device`."""

from __future__ import annotations

from dataclasses import dataclass

from autopar_cost_models import constants as c
from autopar_cost_models.fitted import FittedConstants
from autopar_cost_models.hardware import Device


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of the catalogue: a GPU. `matmul` and `fp8` are the best measured rates of a bf16 and
    an fp8 product, as fractions of the peak.

    If the device is limited to `power_W`, these are rates at `full_power_W`, and `device` scales
    them down.
    """

    name: str
    generation: str
    units: int
    tflops: dict[str, float]
    memory_MiB: int
    bandwidth_Bps: float
    matmul: float
    source: str
    fp8: float | None = None
    power_W: float | None = None
    full_power_W: float | None = None

    def device(self, fitted: FittedConstants) -> Device:
        """The row as a `Device` under these fitted constants."""
        slowed = 1.0
        if self.power_W and self.full_power_W:
            slowed = (self.power_W / self.full_power_W) ** fitted.power_exponent
        trained = slowed * fitted.matmul_efficiency(self.generation)
        other = {}
        if "fp8" in self.tflops and self.fp8:
            other["fp8"] = self.fp8 * trained * fitted.fp8_efficiency
        return Device(
            name=self.name,
            flops={dtype: rate * 1e12 for dtype, rate in self.tflops.items()},
            memory_bytes=self.memory_MiB * c.MIB,
            memory_bandwidth_Bps=self.bandwidth_Bps,
            launch_s=fitted.launch_s,
            matmul_efficiency=self.matmul * trained,
            bandwidth_efficiency=fitted.hbm_efficiency,
            reserved_bytes=int(fitted.reserved_bytes),
            source=self.source,
            compute_units=self.units,
            generation=self.generation,
            dtype_efficiency=other,
        )
