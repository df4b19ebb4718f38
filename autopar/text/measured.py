"""How far predicted step times were from published runs, for plans of one kind, and the run that is
most like a plan. `benchmarks/fidelity/measured_errors.py` writes the figures.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from math import log2
from pathlib import Path
from typing import Any

from autopar.files import shipped_yaml
from autopar.ir.plan import Plan
from autopar.text.layout_words import is_experts
from autopar.text.units import percent

FILE = Path(__file__).with_name("measured.yaml")
PLAN_KINDS = (
    "experts",
    "fp8",
    "pipelines",
    "tensor parallelism",
    "FSDP or ZeRO-3",
    "data parallelism",
)
"""The kinds of plans, each of those that are none of the kinds before it."""
ANY_LAYOUT = "any layout"
"""The kind of all runs together."""


@dataclass(frozen=True, slots=True)
class PublishedRun:
    """A published run: experts and sequence of its model, device and number of devices, layout,
    measured seconds of a step, and predicted / measured - 1 as `error`. `fitted`: constants were
    fitted on it.
    """

    id: str
    source: str
    device: str
    devices: int
    seq: int
    step_time_s: float
    error: float
    experts: int = 0
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    fp8: bool = False
    fitted: bool = False

    def as_data(self) -> dict[str, Any]:
        """The run as plain data, without fields that have their default."""
        defaults = {field.name: field.default for field in fields(self)}
        return {key: value for key, value in asdict(self).items() if value != defaults[key]}


@dataclass(frozen=True, slots=True)
class KindError:
    """The errors of one kind of plans over `runs` published runs: the mean absolute relative error,
    the bias (negative: steps took longer than predicted), and the share within 10 %.
    """

    kind: str
    runs: int
    mean_error: float
    bias: float
    within_10: float


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is measured about plans like one: the errors of its kind, and the nearest run. `same_device`: a
    run on its kind of device was measured.
    """

    error: KindError
    nearest: PublishedRun
    same_device: bool

    def __str__(self) -> str:
        near = self.nearest
        words = (
            f"off by {percent(self.error.mean_error)} in the mean over {self.error.runs} published runs with {self.error.kind}; "
            f"nearest: {near.id} ({near.devices} x {near.device}), {100 * near.error:+.1f} %"
        )
        return words if self.same_device else f"{words}; no run on this device is known"


@lru_cache(maxsize=1)
def measured() -> tuple[dict[str, KindError], tuple[PublishedRun, ...]]:
    """(errors by kind, all runs) as the package ships them."""
    data = shipped_yaml(FILE)
    return (
        {row["kind"]: KindError(**row) for row in data["kinds"]},
        tuple(PublishedRun(**run) for run in data["runs"]),
    )


@lru_cache(maxsize=1)
def device_errors() -> dict[str, KindError]:
    """By device, the errors over the published runs on it."""
    by_device: dict[str, list[float]] = {}
    for run in measured()[1]:
        by_device.setdefault(run.device, []).append(run.error)
    return {
        device: KindError(
            kind=device,
            runs=len(errors),
            mean_error=sum(map(abs, errors)) / len(errors),
            bias=sum(errors) / len(errors),
            within_10=sum(abs(error) <= 0.1 for error in errors) / len(errors),
        )
        for device, errors in by_device.items()
    }


def plan_kind(run: PublishedRun) -> str:
    """The kind of a run, one of `PLAN_KINDS`."""
    if run.experts:
        return "experts"
    if run.fp8:
        return "fp8"
    if run.pp > 1:
        return "pipelines"
    if run.tp > 1:
        return "tensor parallelism"
    return "FSDP or ZeRO-3" if run.zero == 3 else "data parallelism"


def evidence(plan: Plan, device: str) -> Evidence | None:
    """What is measured about plans like this one, on devices called `device`; about plans of all
    kinds where no run of its kind is known. None for CPUs.
    """
    own, (kinds, runs) = _as_run(plan, device), measured()
    kind = plan_kind(own)
    if device == "cpu" or not runs:
        return None
    of_kind = [run for run in runs if plan_kind(run) == kind]
    nearest = min(of_kind or runs, key=lambda run: _distance(run, own))
    return Evidence(
        kinds[kind if of_kind else ANY_LAYOUT], nearest, any(run.device == device for run in runs)
    )


def _as_run(plan: Plan, device: str) -> PublishedRun:
    mesh, predicted = plan.mesh, plan.predicted
    experts = any(is_experts(op) for block in plan.blocks for op in block.ops)
    return PublishedRun(
        id="",
        source="",
        device=device,
        devices=mesh.num_devices,
        seq=max(plan.made_for.seq, 1),
        step_time_s=predicted.step_time_s,
        error=0.0,
        experts=int(experts),
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        ep=mesh.ep,
        zero=plan.zero,
        fp8=plan.made_for.software.get("matmul_dtype") == "fp8",
    )


def _distance(run: PublishedRun, own: PublishedRun) -> float:
    """How unlike two runs are: another device counts as 8 times as many devices, and so on by
    factors of two.
    """
    pairs = [(run.devices, own.devices), (run.seq, own.seq)]
    pairs += [(getattr(run, axis), getattr(own, axis)) for axis in ("tp", "pp", "cp", "ep")]
    apart = (
        sum(abs(log2(a / b)) for a, b in pairs) + abs(log2(run.step_time_s / own.step_time_s)) / 2
    )
    return apart + 3.0 * (run.device != own.device) + abs(run.zero - own.zero) / 3
