"""`evaluate`: a run priced by the planner itself, with everything pinned.

A model is made of alike layers, so that it is traced and planned at two small depths and extended to its own; memory as well.  What the
planner does not search yet (pipelines, fp8, selective recomputation) is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar import api
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.predict.machines import gpu_model
from autopar.predict.models import spec_of
from autopar.predict.run import Run, RunPrediction

UNLIMITED_BYTES = 2**50
"""The memory of the GPUs that are planned for: whether a layout fits is for the scores to say."""

_UNSUPPORTED: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("pipelines (pp={run.degrees.pp})", lambda run: run.degrees.pp > 1),
    ("{run.precision.matmul} products", lambda run: run.precision.matmul in ("fp8", "fp4")),
    ("recomputation of kind {run.degrees.recompute!r}", lambda run: run.degrees.recompute not in ("none", "full")),
    ("sharding within groups (HSDP)", lambda run: run.degrees.sharding == "hsdp"),
    ("one layer without embedding and optimizer", lambda run: run.dims.one_layer),
    ("predictors of later tokens (mtp={run.dims.mtp})", lambda run: run.dims.mtp > 0),
)
_DEVICES = {"A100": "a100-80g", "H100": "h100", "H200": "h200", "B200": "b200", "GB200": "gb200"}
_HBM2E_BPS = 2.4e12  # the H100 with HBM2e of torchtitan's runs (their benchmarks' notes)


def evaluate(run: Run) -> RunPrediction:
    """Step time, peak memory and breakdown of a run.  Raises AutoparError naming what cannot be predicted."""
    lacking = [text.format(run=run) for text, applies in _UNSUPPORTED if applies(run)]
    if lacking:
        raise AutoparError(f"the planner does not price {' or '.join(lacking)} yet")
    cluster = cluster_of(run)
    shallow = run.dims.first_dense + 1
    plans = [_plan(run, cluster, layers) for layers in (shallow, shallow + 1)]
    return _extended(plans, run.dims.layers - shallow)


def cluster_of(run: Run) -> ClusterSpec:
    """The cluster of a run from the hardware catalogue.  Raises AutoparError for a GPU outside it."""
    machine, model = run.machine, gpu_model(run.machine.gpu)
    if model not in _DEVICES:
        raise AutoparError(f"gpu {machine.gpu!r} is not in the catalogue; {', '.join(_DEVICES)} are")
    per_node = min(machine.nvlink_domain, machine.gpus)
    if machine.gpus % per_node:  # a part of a rack: as many GPUs of it as divide evenly
        per_node = next(size for size in range(per_node, 0, -1) if machine.gpus % size == 0)
    spec = ClusterSpec.make(
        _DEVICES[model], machine.gpus // per_node, per_node, memory_bytes=machine.memory_bytes, inter_bandwidth_Bps=machine.nic_Bps,
        name=machine.gpu,
    )
    return replace(spec, device=replace(spec.device, memory_bandwidth_Bps=_HBM2E_BPS)) if "HBM2e" in machine.gpu else spec


def _plan(run: Run, cluster: ClusterSpec, layers: int) -> Plan:
    by, spec = run.degrees, spec_of(run, layers)
    pin: dict[str, Any] = {"tp": by.tp, "cp": by.cp, "dp": by.dp, "ep": by.ep, "micro_batch": by.micro_batch,
                           "zero": by.zero if by.dp * by.cp > 1 else 0, "recompute": by.recompute}
    if by.tp > 1:
        pin["sequence_parallel"] = by.sp
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=UNLIMITED_BYTES))
    inputs = spec.example_inputs(2, run.dims.seq)
    return api.plan(spec.build("meta"), roomy, inputs, global_batch=run.global_batch, pin=pin, precision="bf16")


def _extended(plans: list[Plan], more_layers: int) -> RunPrediction:
    """A model of `more_layers` beyond the first plan's, each costing what the second plan's layer adds."""
    first, second = (plan.predicted for plan in plans)

    def extend(a: float, b: float) -> float:
        return max(a + (b - a) * more_layers, 0.0)

    breakdown = {name: extend(time_s, second.breakdown.get(name, 0.0)) for name, time_s in first.breakdown.items()}
    memory = extend(max(first.peak_memory_bytes), max(second.peak_memory_bytes))
    return RunPrediction(extend(first.step_time_s, second.step_time_s), memory, breakdown)
