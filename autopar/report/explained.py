"""Explains a plan: makes its report, with or without the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.explaining.collective_counts import block_collectives
from autopar.explaining.gains import gains, home
from autopar.explaining.lints import lint
from autopar.explaining.plan_report import BlockCounts
from autopar.foreign.limits.asked_software import software_like
from autopar.ir.cluster import Cluster
from autopar.ir.deadline import Deadline
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models.rows import BatchDims
from autopar.planning.model_facts import as_planned
from autopar.report.block_graph import block_graph
from autopar.report.report import Report
from autopar.report.simulated_step import simulated_step
from autopar.request.arguments import check_again, check_arguments, parsed_cluster
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, request_of
from autopar.request.software import Software
from autopar.text.plan_words import cluster_of

if TYPE_CHECKING:
    from torch import nn


def explain(
    plan: Plan,
    counts: BlockCounts | None = None,
    *,
    model: nn.Module | None = None,
    example_inputs: Any = None,
    cluster: Cluster | str | None = None,
    loss_fn: Callable | None = None,
    traced: TracedModel | None = None,
    pin: Mapping[str, Any] | None = None,
    software: Software | str | None = None,
    batch_dims: BatchDims | None = None,
) -> Report:
    """The report on a plan. Printed, it is a text; a notebook shows it as a page.

        report = autopar.explain(plan, model=model, example_inputs=batch)
        report.save("report.html")

    Args:
        plan: the plan.
        counts: the collectives of each block, as `explaining.collective_counts.block_collectives`
            returns them. By default they are counted if the model is given.
        model: the model that was planned. With it the page also has the timeline of a step, memory
            over time, and a block as a graph.
        example_inputs: as for `autopar.plan`; needed with `model`.
        cluster: the plan's cluster, a `ClusterSpec` or a text; for plan files of earlier versions.
        loss_fn: as for `autopar.plan`.
        traced: the result of `autopar.api.trace`, in the place of `model`.
        pin: the pins that the plan was made under; for plan files of earlier versions.
        software: the software that it was made for, as for `autopar.plan`; for plan files of earlier
            versions.
        batch_dims: as for `autopar.plan`.

    Raises:
        AutoparError: an argument is of a wrong kind, the plan is for another model, cluster, pins or
            software, or the cluster is not known and the model is given.
    """
    check_arguments({name: value for name, value in locals().items() if value is not None})
    if plan is None:
        raise AutoparError("plan is None, not a Plan: read a file of one with autopar.Plan.load")
    at = cluster_of(plan, cluster if cluster is None else parsed_cluster(cluster))
    if isinstance(software, str):
        pins = plan.made_for.pins if pin is None else pin
        software = software_like(software, Software(), at, pins, plan.precision)
    check_again(plan, "pins", None if pin is None else dict(Pins.of(pin)), plan.made_for.pins)
    check_again(plan, "software", software and software.as_data(), plan.made_for.software)
    if model is not None and traced is None:
        traced = _traced(plan, model, example_inputs, loss_fn, batch_dims)
    if traced is None:
        findings = lint(plan, at) if at is not None else []
        return Report(plan, at, findings=findings, counts=counts)
    if at is None:
        raise AutoparError(
            f"the plan's cluster {plan.cluster_name!r} is not one that a name describes: give cluster=, such as the path of its file"
        )
    request = request_of(plan, at)
    if not plan.made_for.cluster:
        request = replace(request, pin=Pins.of(pin or {}), software=software or Software())
    return full_report(plan, traced, request, counts=counts)


def full_report(
    plan: Plan,
    traced: TracedModel,
    request: PlanRequest,
    counts: BlockCounts | None = None,
    command: str = "",
    is_drawn: bool = True,
    deadline: Deadline | None = None,
) -> Report:
    """The report on a plan, with its timeline and the graph of a block if it `is_drawn`. `request` is
    what the plan was made for, as in `plan_costs`; `command` is the command line that makes it.
    Other software is priced until the `deadline`.
    Raises AutoparError if the plan is for another model or cluster.
    """
    from autopar import api

    planned = as_planned(traced, plan)
    api.check_plan(plan, planned, request.cluster)
    timeline = simulated_step(plan, traced, request) if is_drawn else None
    at = plan, traced, request, timeline.step_s if timeline else None, deadline
    return Report(
        plan,
        request.cluster,
        timeline=timeline,
        findings=lint(plan, request.cluster, planned),
        counts=counts if counts is not None else block_collectives(planned, plan),
        graph=block_graph(plan, traced, request) if is_drawn else None,
        command=command,
        home=home(*at),
        gains=gains(*at),
    )


def _traced(
    plan: Plan,
    model: nn.Module,
    example_inputs: Any,
    loss_fn: Callable | None,
    batch_dims: BatchDims | None,
) -> TracedModel:
    """The model traced as for `autopar.plan`, in the precision in which it was for the plan."""
    from autopar import api
    from autopar.runtime.state.precision import captured_in

    inputs = example_inputs if example_inputs is not None else api.default_inputs(model)
    captured = captured_in(plan.precision, not plan.framework)
    return api.trace(model, inputs, loss_fn, captured, batch_dims=batch_dims)
