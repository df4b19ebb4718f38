"""What ran: a saved plan or the job of another framework, which can be priced on other clusters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar import api
from autopar.errors import AutoparError
from autopar.foreign.checking.pricing import job_setting
from autopar.foreign.frameworks.registry import read_job
from autopar.foreign.pinned import price, unlimited
from autopar.foreign.verdicts import withheld
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.planning.model_facts import as_planned
from autopar.request.pins import Pins, pins_of
from autopar.request.plan_request import PlanRequest, request_of
from autopar.runtime.state.precision import captured_in
from autopar.text.plan_words import named_cluster


@dataclass(frozen=True, slots=True)
class Price:
    """The seconds of a plan, by what a measured run tells."""

    plan: Plan

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.plan.predicted.step_time_s

    @property
    def waiting_s(self) -> float:
        """Seconds of a step in which devices wait for the host."""
        return self.plan.predicted.breakdown.get("host", 0.0)

    @property
    def compute_s(self) -> float:
        """Seconds of a step in which a rank computes forward and backward. Without a pipeline."""
        parts = self.plan.predicted.breakdown
        return sum(parts.get(name, 0.0) for name in ("forward", "backward", "recompute"))

    @property
    def exchange_s(self) -> float:
        """Seconds of a step in which layouts change inside passes. Without a pipeline."""
        parts = self.plan.predicted.breakdown
        return parts.get("conversion", 0.0) + parts.get("edge", 0.0)


@dataclass(frozen=True, slots=True)
class WhatRan:
    """What ran, on a cluster.

    Attributes:
        name: its file.
        cluster: the cluster.
        traced: the model.
        global_batch: sequences of a step.
        seq: tokens of a sequence.
        request: the request for its plan on a cluster.
    """

    name: str
    cluster: ClusterSpec
    traced: TracedModel
    global_batch: int
    seq: int
    request: Callable[[ClusterSpec], PlanRequest]

    def priced(self, cluster: ClusterSpec) -> Price:
        """Its price on a cluster of as many devices."""
        request = self.request(unlimited(cluster))
        return Price(price(self.traced, request))


def saved_plan(
    path: str, cluster: ClusterSpec | None, model: str | None, seq: int | None
) -> WhatRan:
    """A saved plan. `cluster`, `model` and `seq` replace what its file says. Raises AutoparError if the
    file is no plan, or does not say its model or cluster and none is given.
    """
    plan = Plan.load(path)
    spec = cluster or named_cluster(plan)
    text = model or plan.made_for.model
    if spec is None or not text:
        lacks = "cluster: give --cluster" if spec is None else "model: give --model"
        raise AutoparError(f"the plan {path} does not say its {lacks}")
    if spec.num_devices != plan.mesh.num_devices:
        raise AutoparError(
            f"the plan {path} is for {plan.mesh.num_devices} devices, and {spec.name} has {spec.num_devices}: give its own --cluster"
        )
    native = parse_model(text)
    length = seq or plan.made_for.seq or native.max_seq or 512
    pins = Pins.of(pins_of(plan))

    def request(on: ClusterSpec) -> PlanRequest:
        return replace(request_of(plan, on), pin=pins)

    traced = api.trace_spec(native, length, captured_in(plan.precision, not plan.framework))
    if as_planned(traced, plan).model_hash != plan.model_hash:
        raise AutoparError(
            f"the plan {path} was made for {plan.model_name} on sequences of {plan.made_for.seq} tokens, and not for {text} on {length}: "
            "leave --model and --seq out, or give those of the plan"
        )
    return WhatRan(path, spec.one_kind, traced, plan.global_batch, length, request)


def job_file(path: str, cluster: ClusterSpec, model: str | None, seq: int | None) -> WhatRan:
    """The job in a file of another framework. `model` and `seq` replace what it says. Raises
    AutoparError if it cannot be read, or if parts of the job have no price.
    """
    setting = job_setting(read_job(path), cluster, model, seq)
    if reasons := withheld(setting.job, cluster.num_devices):
        raise AutoparError(f"{path} has no price to compare a run with: {'; '.join(reasons)}")
    layout = setting.job.layout

    def request(on: ClusterSpec) -> PlanRequest:
        return setting.request_of(layout, on)

    batch = layout.batch_on(cluster.num_devices)
    return WhatRan(path, cluster, setting.traced, batch, setting.seq, request)
