"""Predicts a measured run with the planner itself, with every choice pinned.

A run with a feature that the planner does not price is refused with the name of the feature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any

from autopar_cost_models import FITTED, SCHEDULES, FittedConstants
from autopar_cost_models.attention import FLASH_RATES
from torch import nn

from autopar import api
from autopar.annotate.buffers import outside_bytes
from autopar.errors import AutoparError, NoPlanFits
from autopar.foreign.limits.stage_cuts import stages_by_cost
from autopar.foreign.pinned import foreign_request, layout_request, price
from autopar.foreign.published.frameworks import (
    SAVING,
    bias_operations,
    gather_buffer_bytes,
    offloaded,
    offloads_where_tight,
    run_job,
    saves_where_tight,
)
from autopar.foreign.published.machines import device_of, network_of
from autopar.foreign.published.run import Run, RunPrediction
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models.base import NativeSpec
from autopar.models.shapes import config_of_shape
from autopar.request.framework_names import foreign_name, is_nanotron
from autopar.request.frameworks import SCALING_OF_RECIPE, fields_of
from autopar.request.plan_request import PlanRequest
from autopar.request.software import Software

_ALIKE = ("dp_overlap", "early_stop", "fused_accumulation", "fused_softmax", "late_gradients",
          "tp_overlap")  # fmt: skip
"""Fields of a run's software that `autopar.Software` has under the same name."""
_UNSUPPORTED: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("fp4 products", lambda run: run.precision.matmul == "fp4"),
    (
        "schedule {run.layout.schedule!r}",
        lambda run: run.layout.schedule not in ("none", *SCHEDULES),
    ),
)


@dataclass(frozen=True, slots=True)
class PredictionInputs:
    """Everything that a prediction depends on: run, cluster and software."""

    run: Run
    cluster: ClusterSpec
    software: Software


def evaluate(run: Run, fitted: FittedConstants = FITTED) -> RunPrediction:
    """The predicted step time, peak memory and breakdown of a run, with the constants `fitted` of
    the cost models (`settle`). Raises AutoparError if it cannot be predicted, with the reason.
    """
    return settle(case_of(run, fitted))


def settle(case: PredictionInputs) -> RunPrediction:
    """The prediction of a case. If it does not fit the GPU, and its framework has options that save
    memory (`saves_where_tight`, `offloads_where_tight`), it is predicted with these. Raises
    AutoparError if it cannot be predicted, with the reason.
    """
    run, found = case.run, price_run(case)
    if found.peak_memory_bytes > (run.machine.memory_bytes or inf) and saves_where_tight(run):
        return price_run(replace(case, software=replace(case.software, **SAVING)))
    return offloaded(run, found) if offloads_where_tight(run) else found


def case_of(run: Run, fitted: FittedConstants = FITTED) -> PredictionInputs:
    """The case of a run: its cluster and software, with the constants `fitted` of the cost models.
    Raises AutoparError for a GPU outside the catalogue.
    """
    cluster = cluster_of_run(run, fitted)
    return PredictionInputs(
        run, cluster, replace(_software(run, cluster.device.generation), fitted=fitted)
    )


def price_run(case: PredictionInputs) -> RunPrediction:
    """The predicted step time, peak memory and breakdown of a case. Raises AutoparError if it
    cannot be predicted, with the reason.
    """
    lacking = [text.format(run=case.run) for text, applies in _UNSUPPORTED if applies(case.run)]
    if lacking:
        raise AutoparError(f"the planner does not price {' or '.join(lacking)} yet")
    if case.run.one_layer:
        return _one_more(case)
    return _prediction(case, _pinned(case))


def plan_freely(case: PredictionInputs, memory_bytes: int, time_limit_s: float = 60.0) -> Plan:
    """The planner's own choice for the model, batch, cluster and software of a case, on GPUs with
    `memory_bytes`. Raises NoPlanFits if no plan fits, or none was found in time.

    Software that keeps a sharded input and gathers it again does so only under the
    sequence-parallelism pin. For such software the result is the better plan of two, with and
    without the pin, each found within `time_limit_s` seconds.
    """
    ways: list[dict[str, Any]] = [{}]
    if case.software.gathers_again:
        ways.append({"sequence_parallel": True})
    found, errors = [], []
    for pin in ways:
        try:
            request = _request(case, pin, memory_bytes)
            found.append(api.plan_traced(_traced(case.run), request, time_limit_s))
        except NoPlanFits as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda plan: plan.predicted.step_time_s)


def _pinned(case: PredictionInputs, layers: int | None = None) -> Plan:
    """The plan with the run's layout, for the run's number of layers or `layers`."""
    return price(_traced(case.run, layers), pinned_request(case))


def pinned_request(case: PredictionInputs) -> PlanRequest:
    """The request for the plan with the run's layout."""
    run = case.run
    layout = replace(run.layout, stages=stages_of_run(run))
    return layout_request(layout, run.shape.layers, case.cluster, case.software, "bf16", run.id)


def _request(case: PredictionInputs, pin: dict[str, Any], memory_bytes: int) -> PlanRequest:
    device = replace(case.cluster.device, memory_bytes=memory_bytes)
    cluster = replace(case.cluster, device=device)
    return foreign_request(cluster, case.run.global_batch, pin, case.software, name=case.run.id)


def _prediction(case: PredictionInputs, plan: Plan) -> RunPrediction:
    predicted = plan.predicted
    return RunPrediction(
        predicted.step_time_s,
        max(predicted.peak_memory_bytes),
        predicted.breakdown,
        outside_bytes(plan.mesh, plan.shard, case.cluster.device),
        first_rank_bytes=predicted.peak_memory_bytes[0],
        kept_bytes=predicted.memory.get("kept", 0),
    )


def _one_more(case: PredictionInputs) -> RunPrediction:
    """The prediction for one layer inside a model: a model of three layers minus a model of two.

    It includes forward and backward, with the gradient of the layer's input. The time leaves out
    what runs once a step (update, reduction of gradients). The memory is what the layer adds.
    """
    two, three = (_prediction(case, _pinned(case, layers)) for layers in (2, 3))
    names = [name for name in three.breakdown if name != "step"]
    parts = {name: three.breakdown[name] - two.breakdown.get(name, 0.0) for name in names}
    memory_bytes = three.peak_memory_bytes - two.peak_memory_bytes
    return RunPrediction(sum(parts.values()), memory_bytes, parts)


def cluster_of_run(run: Run, fitted: FittedConstants = FITTED) -> ClusterSpec:
    """The cluster of a run, from the hardware catalogue. Raises AutoparError for a GPU outside
    it.
    """
    machine = run.machine
    per_node = min(machine.nvlink_domain, machine.gpus)
    if machine.gpus % per_node:  # a part of a rack: the most GPUs that divide evenly
        per_node = next(size for size in range(per_node, 0, -1) if machine.gpus % size == 0)
    device = device_of(machine.gpu)
    links, _ = network_of(device, per_node, machine.nic_Bps, machine.system, fitted)
    return ClusterSpec.make(
        device,
        machine.gpus // per_node,
        per_node,
        memory_bytes=machine.memory_bytes,
        name=machine.gpu,
        fitted=fitted,
        **links,
    )


def _software(run: Run, generation: str) -> Software:
    found = fields_of(run_job(run)) | {name: getattr(run.software, name) for name in _ALIKE}
    if run.precision.matmul == "fp8":
        found |= {"matmul_dtype": "fp8", "fp8_scaling": SCALING_OF_RECIPE[run.precision.recipe]}
    kernel = run.software.attention_kernel
    found["attention_kernel"] = kernel if (generation, kernel) in FLASH_RATES else None
    if found.get("routing_operations"):
        found["routing_operations"] += bias_operations(run)
    if buffers := gather_buffer_bytes(run):
        found["workspace_bytes"] = buffers
    return Software(
        compiled=run.software.compile, framework=foreign_name(run.software.framework), **found
    )


def model_of(run: Run, layers: int | None = None) -> nn.Module:
    """The model of a run with its true shapes, on the meta device in training mode, with fp32
    parameters and the padded vocabulary.

    `layers` shortens it; at least one routed layer remains. A `one_layer` run is a model of one
    layer with embedding and head.
    """
    return spec_of_run(run, layers).build("meta")


def spec_of_run(run: Run, layers: int | None = None) -> NativeSpec:
    """The spec of the model of a run; `layers` as for `model_of`. It builds the model, makes
    example inputs, and counts parameters and model FLOPs.
    """
    vocab, software = run.software.padded_vocab, run.software
    config = config_of_shape(run.shape, run.seq, vocab, software.flash, software.dropout, layers)
    return NativeSpec.of(run.id, config)


def _traced(run: Run, layers: int | None = None) -> TracedModel:
    return _traced_spec(replace(spec_of_run(run, layers), name=""), run.seq)


@lru_cache(maxsize=64)
def _traced_spec(spec: NativeSpec, seq: int) -> TracedModel:
    return api.trace_spec(spec, seq)


def stages_of_run(run: Run) -> tuple[int, ...]:
    """The layers of each stage as the framework of the run cuts the pipeline, for nanotron with one
    stage a rank; else (). Megatron, DeepSpeed and torchtitan deal layers evenly.
    """
    if not is_nanotron(run.software.framework) or run.layout.vpp > 1:
        return ()
    return stages_by_cost(run.shape, run.layout.pp, run.software.padded_vocab)
