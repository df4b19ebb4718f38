"""`evaluate`: a run priced by the planner itself, with everything pinned.

A model is made of alike layers: it is traced at a depth that shows each kind of layer twice and deepened to its own.  What the planner
does not price yet is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from autopar_cost_models.attention import FLASH_RATES

from autopar import api
from autopar.annotate.setting import Software
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.traced import TracedModel
from autopar.models.base import NativeSpec
from autopar.predict.machines import gpu_model
from autopar.predict.memory import memory_fields
from autopar.predict.models import spec_of
from autopar.predict.run import Run, RunPrediction
from autopar.trace.deepen import deepened

UNLIMITED_BYTES = 2**50
"""The memory of the GPUs that are planned for: whether a layout fits is for the scores to say."""

_UNSUPPORTED: tuple[tuple[str, Callable[[Run], bool]], ...] = (
    ("fp4 products", lambda run: run.precision.matmul == "fp4"),
    ("recomputation of kind {run.degrees.recompute!r}", lambda run: run.degrees.recompute not in _RECOMPUTE),
    ("sharding within groups (HSDP)", lambda run: run.degrees.sharding == "hsdp"),
    ("one layer without embedding and optimizer", lambda run: run.dims.one_layer),
    ("predictors of later tokens (mtp={run.dims.mtp})", lambda run: run.dims.mtp > 0),
    ("schedule {run.degrees.schedule!r}", lambda run: run.degrees.schedule not in _SCHEDULES),
)
_RECOMPUTE = {"none": "none", "full": "full", "attention": "selective"}
_SCHEDULES = {"none": None, "gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved_1f1b", "zero_bubble": "zero_bubble"}
_SCALINGS = {"delayed": "delayed", "current": "current", "tensorwise": "current", "rowwise": "current", "blockwise": "block",
             "mx": "block"}  # fmt: skip
_DEVICES = {"A100": "a100-80g", "H100": "h100", "H200": "h200", "B200": "b200", "B300": "b300", "GB200": "gb200", "GB300": "gb300"}
_HBM2E_BPS = 2.4e12  # the H100 with HBM2e of torchtitan's runs (their benchmarks' notes)


def evaluate(run: Run) -> RunPrediction:
    """Step time, peak memory and breakdown of a run.  Raises AutoparError naming what cannot be predicted."""
    lacking = [text.format(run=run) for text, applies in _UNSUPPORTED if applies(run)]
    if lacking:
        raise AutoparError(f"the planner does not price {' or '.join(lacking)} yet")
    cluster = cluster_of(run)
    roomy = replace(cluster, device=replace(cluster.device, memory_bytes=UNLIMITED_BYTES))
    spec, traced = _traced(run)
    inputs = spec.example_inputs(2, run.dims.seq)
    options = {"precision": "bf16", "traced": traced, "software": _software(run, cluster.device.generation)}
    plan = api.plan(spec.build("meta"), roomy, inputs, run.global_batch, _pins(run), **options)
    return RunPrediction(plan.predicted.step_time_s, max(plan.predicted.peak_memory_bytes), plan.predicted.breakdown)


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
    )  # fmt: skip
    return replace(spec, device=replace(spec.device, memory_bandwidth_Bps=_HBM2E_BPS)) if "HBM2e" in machine.gpu else spec


def _software(run: Run, generation: str) -> Software:
    fp8 = {"matmul_dtype": "fp8", "fp8_scaling": _SCALINGS[run.precision.recipe]} if run.precision.matmul == "fp8" else {}
    kernel = run.software.attention_kernel
    attention = kernel if (generation, kernel) in FLASH_RATES else None
    return Software(compiled=run.software.compile, attention_kernel=attention, **fp8, **memory_fields(run))


def _traced(run: Run) -> tuple[NativeSpec, TracedModel]:
    period = run.dims.window_every
    shallow = run.dims.first_dense + 2 * period
    more, rest = divmod(run.dims.layers - shallow, period)
    if more <= 0 or rest:
        shallow, more = run.dims.layers, 0
    return _deep(replace(spec_of(run, shallow), name=""), run.dims.seq, period, more)


@lru_cache(maxsize=64)
def _deep(spec: NativeSpec, seq: int, period: int, more: int) -> tuple[NativeSpec, TracedModel]:
    traced = api.trace(spec.build("meta"), spec.example_inputs(2, seq), None, "bf16")
    return spec, deepened(traced, period, more) if more else traced


def _pins(run: Run) -> dict[str, Any]:
    by = run.degrees
    zero = by.zero if by.dp * by.cp > 1 else 0
    pin: dict[str, Any] = {"tp": by.tp, "pp": by.pp, "cp": by.cp, "dp": by.dp, "ep": by.ep, "micro_batch": by.micro_batch, "zero": zero}
    pin["recompute"] = _RECOMPUTE[by.recompute]
    if by.pp > 1:
        pin |= {"vpp": by.vpp, "schedule": _SCHEDULES[by.schedule]}
    return pin | ({"sequence_parallel": by.sp} if by.tp > 1 else {})
