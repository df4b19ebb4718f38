"""What would shorten a plan's step without another layout: other software, with which the same
choices are priced again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.ir.deadline import Deadline
from autopar.ir.plan import Plan
from autopar.text.numbers import Number, Numbers

if TYPE_CHECKING:
    from autopar.ir.traced import TracedModel
    from autopar.request.plan_request import PlanRequest

LEAST = 0.01
"""The fraction of a step from which a change is worth naming."""
_CHANGES: tuple[tuple[str, Any, str], ...] = (
    ("compiled", True, "torch.compile"),
    ("fused_accumulation", True, "products that add to the gradient of their weight (Megatron)"),
    ("fused_kernels", True, "one kernel for norms, activations and rotary positions each"),
    ("dp_overlap", True, "communication of parameters and gradients beside compute"),
    ("tp_overlap", True, "asynchronous tensor parallelism"),
    ("dispatch", "once", "tokens that travel to each node once (DeepEP)"),
    ("cuda_graphs", "all", "CUDA graphs"),
    ("matmul_dtype", "fp8", "linear layers in fp8, which change the numbers"),
)
"""Fields of `Software`, other values of them, and what these are. What takes least effort comes first."""
HOME, HOME_LEAST = "megatron-core", 0.03
"""A framework whose software is tried as a whole, and the fraction of a step that it has to save."""
_OPTIONS = {"compiled": "--compile", "matmul_dtype": "--fp8 delayed"}
"""The options of commands that predict with a change. Others are arguments of `Software`."""


@dataclass(frozen=True, slots=True)
class Gain:
    """A change of the software: a field of `Software`, the change as text, and the option that predicts
    with it. Then seconds of a step, and the fraction of the step that is saved.
    """

    field: str
    change: str
    option: str
    step_time_s: float
    saved: float


@dataclass(frozen=True, slots=True)
class Home:
    """What the software of `HOME` makes of a plan: seconds of a step, and the fraction that is saved."""

    step_time_s: float
    saved: float


def gain_words(n: Numbers, place: int) -> list[str | Number]:
    """The gain at index `place` as a sentence. `n` looks up the data of a report."""
    at = f"report.gains.{place}"
    gain = n.value(at)
    return [
        f"{gain['change']}, with {gain['option']}: a step takes ",
        n.ms(f"{at}.step_time_s"), ", ", n.percent(f"{at}.saved"), " less",
    ]  # fmt: skip


def home_words(n: Numbers) -> list[str | Number]:
    """What another framework's software makes of the plan, as a sentence; [] if nothing is known."""
    if n.value("report").get("home") is None:
        return []
    return [
        "Faster software: Megatron-Core's, as NVIDIA's recipes set it, takes ", n.ms("report.home.step_time_s"),
        " for these choices, ", n.percent("report.home.saved"), f" less; --target megatron --software {HOME} plans for it.",
    ]  # fmt: skip


def gains(
    plan: Plan,
    traced: TracedModel,
    request: PlanRequest,
    step_s: float | None = None,
    deadline: Deadline | None = None,
) -> list[Gain]:
    """The changes of the software that save `LEAST` of the simulated step of a plan on GPUs, what
    takes least effort first. Each is alone, and the layout stays. `request` is what the plan was
    made for. `step_s` is the replayed step time, if it is known. From the
    `deadline` on, no more changes are priced. Raises AutoparError as `plan_costs`.
    """
    from autopar.recheck.replay import replay  # torch, which the words do not need

    if request.cluster.device_type != "cuda" or (deadline is not None and deadline.is_over):
        return []
    before_s = step_s if step_s is not None else replay(plan, traced, request).replayed_s
    found = []
    for field, value, change in _possible(request):
        if deadline is not None and deadline.is_over:
            break
        software = replace(request.software, **{field: value})
        after_s = replay(plan, traced, replace(request, software=software)).replayed_s
        option = _OPTIONS.get(field, f"software=Software({field}={value!r}) in Python")
        found.append(Gain(field, change, option, after_s, 1 - after_s / before_s))
    return [gain for gain in found if gain.saved >= LEAST]


def home(
    plan: Plan,
    traced: TracedModel,
    request: PlanRequest,
    step_s: float | None = None,
    deadline: Deadline | None = None,
) -> Home | None:
    """What the software of `HOME` makes of a plan on GPUs, if it saves `HOME_LEAST` and the plan fits
    then. None for what is no language model, on devices of several kinds, and without time.
    Arguments and errors are those of `gains`.
    """
    from autopar.recheck.replay import replay
    from autopar.request.frameworks import software_as_pinned

    cluster, late = request.cluster, deadline is not None and deadline.is_over
    if cluster.device_type != "cuda" or len(cluster.groups) > 1 or late:
        return None
    if plan.made_for.rows != "tokens":
        return None
    now, generation = request.software, cluster.groups[0].device.generation
    before_s = step_s if step_s is not None else replay(plan, traced, request).replayed_s
    other = software_as_pinned(HOME, generation, compute=plan.precision, compiled=now.compiled)
    other = replace(other, matmul_dtype=now.matmul_dtype, fp8_scaling=now.fp8_scaling)
    after = replay(plan, traced, replace(request, software=other))
    saved = 1 - after.replayed_s / before_s
    fits = max(after.predicted_bytes) <= cluster.groups[0].room_bytes
    return Home(after.replayed_s, saved) if fits and saved >= HOME_LEAST else None


def _possible(request: PlanRequest) -> Iterator[tuple[str, Any, str]]:
    """The changes that the software does not have yet and the devices can run."""
    in_fp8 = request.precision == "bf16" and all(
        "fp8" in group.device.flops for group in request.cluster.groups
    )
    for field, value, change in _CHANGES:
        if (in_fp8 or value != "fp8") and getattr(request.software, field) != value:
            yield field, value, change
