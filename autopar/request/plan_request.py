"""A request for a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar_cost_models.checks import is_whole

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster
from autopar.ir.mesh import MOST
from autopar.ir.plan_checks import PRECISIONS
from autopar.request.pins import Pins
from autopar.request.restriction import Restriction
from autopar.request.software import Software


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A complete request for a plan. `global_batch` is in sequences per step. `runnable`: only
    plans that the engine can run. `micro_batch_mean`: micro-batches are allowed even if the mean of
    their losses is not the loss of the batch. `restriction`: what another framework can run, or None.

    Raises AutoparError for a batch, number of devices, precision or software that is not possible.
    """

    cluster: Cluster
    global_batch: int
    pin: Pins
    precision: str
    runnable: bool
    model_name: str
    software: Software = field(default_factory=Software)
    micro_batch_mean: bool = False
    restriction: Restriction | None = None

    def __post_init__(self) -> None:
        if not is_whole(self.global_batch):
            raise AutoparError(
                f"global_batch={shown(self.global_batch)} must be a whole number >= 1"
            )
        if max(self.global_batch, self.cluster.num_devices) > MOST:
            raise AutoparError(
                f"global_batch={shown(self.global_batch)} on {self.cluster.num_devices} devices: at most {MOST:,} of each can be planned"
            )
        if self.precision not in PRECISIONS:
            raise AutoparError(
                f"precision {shown(self.precision)} is not known; {', '.join(PRECISIONS)} are"
            )
        if not isinstance(self.software, Software):
            raise AutoparError(f"software is {shown(self.software)}, not an autopar.Software")
        for group in self.cluster.groups:
            self.software.check(group.device, self.precision)

    def within(self, restriction: Restriction) -> PlanRequest:
        """This request within what another framework can run; the user's pins stay."""
        return replace(self, pin=restriction.pins_with(self.pin), restriction=restriction)

    @property
    def is_mixed(self) -> bool:
        """Whether the cluster has devices of several kinds."""
        return len(self.cluster.groups) > 1


def choose_precision(cluster: Cluster) -> str:
    """The default precision for an fp32 model: bf16 on GPUs, fp32 on CPUs."""
    return "fp32" if cluster.device_type == "cpu" else "bf16"
