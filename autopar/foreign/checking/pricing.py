"""Prices the layout of a job with the planner itself, with every choice pinned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from autopar_cost_models import DEVICES

from autopar import api
from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import target_of
from autopar.foreign.job import Facts, Job
from autopar.foreign.pinned import foreign_request, layout_request, price
from autopar.foreign.published.defaults import complete
from autopar.foreign.published.evaluate import (
    case_of,
)
from autopar.foreign.published.run import (
    Run,
    row_of_layout,
    row_of_shape,
    run_of_row,
)
from autopar.foreign.target import Target
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import HALF
from autopar.ir.traced import TracedModel
from autopar.models.base import ModelSpec
from autopar.models.shapes import shape_of_spec, spec_of_shape
from autopar.request.options import TOLERANCE
from autopar.request.plan_request import PlanRequest
from autopar.request.restriction import Restriction
from autopar.request.software import Software


@dataclass(frozen=True)
class JobSetting:
    """A job on a cluster, with the model that it trains.

    Attributes:
        job: the job, with the devices of the cluster, and with the dimensions and length of the model.
        target: its framework.
        cluster: the cluster.
        spec: the model.
    """

    job: Job
    target: Target
    cluster: ClusterSpec
    spec: ModelSpec
    _plans: dict[tuple[Any, ...], Plan] = field(default_factory=dict, compare=False, repr=False)

    @property
    def gpus(self) -> int:
        """The number of devices."""
        return self.cluster.num_devices

    @property
    def seq(self) -> int:
        """Tokens of a sequence."""
        return self.job.seq or 0

    @property
    def held(self) -> dict[str, Any]:
        """The pins that the file of the job cannot change."""
        return dict(self.target.held(self.job)) if self.target.held else {}

    @cached_property
    def traced(self) -> TracedModel:
        """The captured model."""
        return api.trace_spec(replace(self.spec, name=""), self.seq)

    @cached_property
    def run(self) -> Run:
        """The job as a run of `autopar predict`, whose tables fill in what its file does not say.
        Raises AutoparError for a layout that no framework can start.
        """
        return run_of(self, self.job.layout)

    @cached_property
    def software(self) -> Software:
        """The software of the job: what its file says, the rest by the framework."""
        facts = self.job.facts
        found = case_of(self._startable()).software
        if facts.fused_loss is not None:
            found = replace(found, loss_kernel="fused" if facts.fused_loss else "in_place")
        if facts.precision == "bf16":
            return found
        recipe = found.state_recipe if facts.precision in HALF else None
        return replace(found, state_recipe=recipe, matmul_dtype=None)

    def of(self, job: Job) -> JobSetting:
        """The setting of another job with the same model, which is not captured again."""
        other = replace(self, job=job, _plans={})
        if "traced" in vars(self):
            vars(other)["traced"] = self.traced
        return other

    def running(self, software: Software) -> JobSetting:
        """The setting of the same job with other software."""
        other = self.of(self.job)
        vars(other)["software"] = software
        return other

    def _startable(self) -> Run:
        """The job as a run; with its devices data-parallel if no framework can start its layout."""
        try:
            return self.run
        except AutoparError:
            by = Layout(dp=self.gpus, global_batch=self.gpus, zero=self.job.layout.zero)
            return run_of(self, by)

    def plan_of(self, layout: Layout) -> Plan:
        """The plan with a layout, on devices with unlimited memory. Raises AutoparError if it cannot
        be priced.
        """
        request = self.request_of(layout, self.cluster)
        key = tuple(request.pin.items()), request.global_batch
        if key not in self._plans:
            self._plans[key] = price(self.traced, request)
        return self._plans[key]

    def request_of(self, layout: Layout, cluster: ClusterSpec) -> PlanRequest:
        """The request for the plan with a layout on a cluster with as many devices."""
        words = self.job.facts.precision, self.spec.name
        layers, pins = self.job.shape.layers, self._way_of(layout)
        return layout_request(layout, layers, cluster, self.software, *words, **pins)

    def _way_of(self, layout: Layout) -> dict[str, str]:
        """The pin of the framework's own context parallelism, as in the search; {} without one, or if
        heads that are repeated for it have no price.
        """
        shape = self.job.shape
        method = self.target.limits.restriction(shape, self.seq).pin.get("context_method", "")
        heads = shape.kv_heads or shape.heads
        whole = heads and heads % (layout.tp * layout.cp) == 0
        possible = layout.cp > 1 and (whole or method == "ring")
        return {"context_method": method} if method and possible else {}

    def best(self, restriction: Restriction, time_limit_s: float) -> Plan:
        """The simplest plan within a restriction that takes little more than the fastest, and leaves
        memory free, as `api.plan` by default, with the software of this job. Raises NoPlanFits if
        there is none.
        """
        batch = self.job.layout.batch_on(self.gpus)
        request = self._request(self.cluster.kept_free(), batch, self.held).within(restriction)
        return api.plan_traced(self.traced, replace(request, tolerance=TOLERANCE), time_limit_s)

    def _request(self, cluster: ClusterSpec, batch: int, pin: Mapping[str, Any]) -> PlanRequest:
        words = self.job.facts.precision, self.spec.name
        return foreign_request(cluster, batch, pin, self.software, *words)


def job_setting(
    job: Job, cluster: ClusterSpec, model: str | None = None, seq: int | None = None
) -> JobSetting:
    """The setting of a job. `model` (a MODEL text) and `seq` replace what the file says. Raises
    AutoparError if the framework is not known, or if the model or the length of sequences cannot be
    determined.
    """
    from autopar.models import parse_model

    spec = parse_model(model) if model is not None else None
    length = seq or job.seq or (spec.max_seq if spec else 0)
    if not length:
        raise AutoparError("the tokens of a sequence cannot be determined: give --seq")
    shape = job.shape if spec is None else shape_of_spec(spec) or ModelShape()
    target = target_of(job.framework)

    def on_cluster(of: Job) -> Job:
        tokens = seq or of.seq or length
        known = replace(of, gpus=cluster.num_devices, seq=tokens, others=())
        if spec is None:
            return known
        known = replace(known, shape=shape)
        if not (target.stages and of.layout.pp > 1 and shape.layers):
            return known
        vpp, stages = target.stages(known)
        return replace(known, layout=replace(known.layout, vpp=vpp, stages=stages))

    known = replace(on_cluster(job), others=tuple(map(on_cluster, job.others)))
    return JobSetting(
        known, target, cluster, spec or spec_of_shape("the job's model", shape, length)
    )


def run_of(setting: JobSetting, by: Layout) -> Run:
    """A job with the layout `by` as a run of `autopar predict`. Raises AutoparError for a layout that
    no framework can start.
    """
    job, gpus = setting.job, setting.gpus
    facts, device = job.facts, setting.cluster.device
    shape = job.shape if not job.shape.lacking else _stand_in(setting, by)
    topology = setting.cluster.topology
    machine = {
        "framework": setting.target.limits.software,
        "gpu": _known_gpu(setting.cluster),
        "gpus": gpus,
        "gpus_per_node": topology.devices_per_node,
        "nvlink_domain": topology.devices_per_node,
        "nic_Bps": topology.inter.bandwidth_Bps,
        "memory_bytes": device.memory_bytes,
    }
    software = {
        "seq": setting.seq,
        "sharding": _sharding(by, setting.target),
        "embedding_as_layer": False,
        "matmul": "fp8" if facts.fp8 else facts.precision,
        "compute": facts.precision,
        "recipe": facts.fp8,
    }
    stated = row_of_shape(shape.complete()) | row_of_layout(by, gpus) | machine | software
    row, filled = complete(stated | _optional(facts))
    return run_of_row("job", row, source="", defaulted=filled)


def _optional(facts: Facts) -> dict[str, Any]:
    """What the job's file says of the software, by field of a run. What it leaves open is left
    out.
    """
    names = ("grads", "dp_overlap", "tp_overlap", "compile", "pp_overlap", "optimizer", "dropout", "fused_accumulation")  # fmt: skip
    found = {name: getattr(facts, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _known_gpu(cluster: ClusterSpec) -> str:
    """The cluster's device, or one of the catalogue of its generation: what software does on it
    depends on that alone.
    """
    device = cluster.device
    alike = [name for name, known in DEVICES.items() if known.generation == device.generation]
    return device.name if device.name in DEVICES or not alike else alike[0]


def _sharding(by: Layout, target: Target) -> str:
    """What shards over the data-parallel ranks, a row of `SHARDINGS`."""
    if by.zero == 0:
        return "none"
    name = (
        "fsdp"
        if by.zero > 1 and target.limits.sharding == "dist_optimizer"
        else target.limits.sharding
    )
    return "hsdp" if name == "fsdp" and by.copies > 1 else name


def _stand_in(setting: JobSetting, by: Layout) -> ModelShape:
    """A shape for the tables of predictions if that of the model is not known: only whether fields
    apply depends on it.
    """
    layers = max(setting.spec.num_layers, by.pp * by.vpp)
    vocab = max(setting.spec.vocab, 1)
    return ModelShape(layers, 64 * by.tp, by.tp, by.tp, 64, 256 * by.tp, vocab, gated=True)
