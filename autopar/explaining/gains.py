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


def gain_words(n: Numbers, place: int) -> list[str | Number]:
    """The gain at index `place` as a sentence. `n` looks up the data of a report."""
    at = f"report.gains.{place}"
    gain = n.value(at)
    return [
        f"{gain['change']}, with {gain['option']}: a step takes ",
        n.ms(f"{at}.step_time_s"), ", ", n.percent(f"{at}.saved"), " less",
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


def _possible(request: PlanRequest) -> Iterator[tuple[str, Any, str]]:
    """The changes that the software does not have yet and the devices can run."""
    in_fp8 = request.precision == "bf16" and all(
        "fp8" in group.device.flops for group in request.cluster.groups
    )
    for field, value, change in _CHANGES:
        if (in_fp8 or value != "fp8") and getattr(request.software, field) != value:
            yield field, value, change
