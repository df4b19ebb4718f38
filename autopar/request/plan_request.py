"""A request for a plan, as data."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar_cost_models import Device
from autopar_cost_models.checks import finite, is_whole

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster
from autopar.ir.mesh import MOST_DEVICES
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import PRECISIONS
from autopar.request.pins import Pins
from autopar.request.restriction import Restriction
from autopar.request.software import Software


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """A complete request for a plan. `global_batch` is in sequences per step.
    `micro_batch_mean`: micro-batches are allowed even if the mean of their losses is not the loss
    of the batch. `model_text` is what names the model on the command line; '' if it was given as an
    object. `tolerance`: the plan may take this fraction longer than the fastest if it is simpler.
    `runners_up`: the certificate gets the best plan of each family of layouts. The memory that a
    plan leaves free is that of the cluster (`headroom`). `restriction`: what another framework can
    run, or None. `asked`: the user's pins, if `pin` has those of the restriction too.
    `keeps_tp_inside`: with a tolerance, tensor parallelism inside nodes and off PCIe is preferred
    (`ir/simplicity.py`).

    Raises AutoparError for a batch, number of devices, precision or software that is not possible,
    also within the target.
    """

    cluster: Cluster
    global_batch: int
    pin: Pins
    precision: str
    model_name: str
    software: Software = field(default_factory=Software)
    micro_batch_mean: bool = False
    model_text: str = ""
    tolerance: float = 0.0
    runners_up: bool = False
    restriction: Restriction | None = None
    asked: Pins | None = None
    keeps_tp_inside: bool = True

    def __post_init__(self) -> None:
        if not is_whole(self.global_batch):
            raise AutoparError(
                f"global_batch={shown(self.global_batch)} must be a whole number >= 1"
            )
        if max(self.global_batch, self.cluster.num_devices) > MOST_DEVICES:
            raise AutoparError(
                f"global_batch={shown(self.global_batch)} on {self.cluster.num_devices} devices: "
                f"at most {MOST_DEVICES:,} of each can be planned"
            )
        if self.precision not in PRECISIONS:
            raise AutoparError(
                f"precision {shown(self.precision)} is not known; {', '.join(PRECISIONS)} are"
            )
        if not isinstance(self.software, Software):
            raise AutoparError(f"software is {shown(self.software)}, not an autopar.Software")
        if not finite(self.tolerance) or not 0 <= self.tolerance < 1:
            raise AutoparError(
                f"tolerance={shown(self.tolerance)} must be a fraction from 0 to less than 1, such as 0.02"
            )
        if self.restriction is not None and self.precision not in self.restriction.precisions:
            raise AutoparError(_precision_words(self.restriction, self.cluster, self.precision))
        for group in self.cluster.groups:
            _check_dtype(group.device, self.precision)
            self.software.check(group.device, self.precision)

    def within(self, restriction: Restriction) -> PlanRequest:
        """This request within what another framework can run; the user's pins stay."""
        asked = self.pin if self.asked is None else self.asked
        pin = restriction.pins_with(asked)
        return replace(self, pin=pin, restriction=restriction, asked=asked)

    @property
    def runs_here(self) -> bool:
        """Whether autopar's engine is to run the plan. Then only what it can run is searched, and the
        model is captured in the precision in which it runs.
        """
        return self.software.is_own

    @property
    def is_mixed(self) -> bool:
        """Whether the cluster has devices of several kinds."""
        return len(self.cluster.groups) > 1

    @property
    def compares_plans(self) -> bool:
        """Whether simpler plans and runners-up can be looked for after the search: not on devices
        of several kinds, nor with pinned stages.
        """
        return not self.is_mixed and self.pin.stages is None


def request_of(plan: Plan, cluster: Cluster) -> PlanRequest:
    """The request that a plan was made for on its `cluster`, as far as prices depend on it. Pins of a
    target are among those of the plan. Pins and software that a file of an earlier version does not
    say are the defaults.
    """
    made_for = plan.made_for
    return PlanRequest(
        cluster,
        plan.global_batch,
        Pins.of(made_for.pins),
        precision=plan.precision,
        model_name=plan.model_name,
        software=Software.from_data(made_for.software),
        micro_batch_mean=plan.micro_batch_mean,
        model_text=made_for.model,
    )


def _check_dtype(device: Device, precision: str) -> None:
    """Raises AutoparError if the device does not compute in `precision`."""
    if precision in device.flops:
        return
    others = [name for name in PRECISIONS if name in device.flops]
    if not others:
        raise AutoparError(f"device {device.name} has a rate of none of {', '.join(PRECISIONS)}")
    best = next((name for name in ("bf16", "fp16") if name in others), others[0])
    raise AutoparError(
        f"device {device.name} does not compute in {precision}; it has {', '.join(others)}: ask for precision {best} "
        f"(--precision {best})"
    )


def _precision_words(restriction: Restriction, cluster: Cluster, precision: str) -> str:
    """That a framework does not train in a precision, and in what it can on the devices."""
    known = [name for name in restriction.precisions if all(name in group.device.flops for group in cluster.groups)]  # fmt: skip
    instead = (
        f"ask for precision {known[0]} (--precision {known[0]})" if known else "use other devices"
    )
    return f"{restriction.name} trains in {' or '.join(restriction.precisions)}, not in {precision}; {instead}, or another target"


def choose_precision(cluster: Cluster) -> str:
    """The default precision for an fp32 model: bf16 on GPUs, fp16 if one of them has no bf16, fp32
    on CPUs.
    """
    if cluster.device_type == "cpu":
        return "fp32"
    has_bf16 = all("bf16" in group.device.flops for group in cluster.groups)
    has_fp16 = all("fp16" in group.device.flops for group in cluster.groups)
    return "fp16" if has_fp16 and not has_bf16 else "bf16"
