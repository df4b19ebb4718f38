"""Prices the layout of a job with the planner itself, with every choice pinned."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import gcd
from typing import Any

from autopar_cost_models import DEVICES

from autopar import api
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models.base import ModelSpec, NativeSpec
from autopar.models.moe import MoEConfig
from autopar.predict.defaults import complete
from autopar.predict.evaluate import RECOMPUTE_PINS, SCHEDULE_PINS, UNLIMITED_BYTES, case_of
from autopar.predict.models import run_config
from autopar.predict.run import Degrees, Dims, Latent, Machine, Precision, Run, RunSoftware
from autopar.request.options import TOLERANCE
from autopar.request.pins import EVEN, Pins
from autopar.request.plan_request import PlanRequest
from autopar.request.restriction import Restriction
from autopar.request.software import SIXTEEN_BITS, Software
from autopar.targets.job import Facts, Job, Layout, ModelShape
from autopar.targets.model_shape import shape_of_spec
from autopar.targets.registry import target_of
from autopar.targets.target import Target

_SCHEDULES = {pin: words for words, pin in SCHEDULE_PINS.items()}
_RECOMPUTE = {pin: words for words, pin in RECOMPUTE_PINS.items()}


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
        recipe = found.state_recipe if facts.precision in SIXTEEN_BITS else None
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
        pins = layout_pins(layout, self.gpus, self.job.shape.layers)
        key = tuple(pins.items()), layout.batch_on(self.gpus)
        if key not in self._plans:
            request = self.request_of(layout, unlimited(self.cluster))
            # one or two candidates: helper processes would take longer to start than to search
            self._plans[key] = api.plan_traced(self.traced, request, 60.0, processes=1)
        return self._plans[key]

    def request_of(self, layout: Layout, cluster: ClusterSpec) -> PlanRequest:
        """The request for the plan with a layout on a cluster with as many devices."""
        pins = layout_pins(layout, self.gpus, self.job.shape.layers)
        return self._request(Pins.of(pins), layout.batch_on(self.gpus), cluster)

    def best(self, restriction: Restriction, time_limit_s: float) -> Plan:
        """The simplest plan within a restriction that takes little more than the fastest, and leaves
        memory free, as `api.plan` by default, with the software of this job. Raises NoPlanFits if
        there is none.
        """
        batch = self.job.layout.batch_on(self.gpus)
        request = self._request(Pins.of(self.held), batch, self.cluster.kept_free()).within(
            restriction
        )
        return api.plan_traced(self.traced, replace(request, tolerance=TOLERANCE), time_limit_s)

    def _request(self, pin: Pins, batch: int, cluster: ClusterSpec) -> PlanRequest:
        precision = self.job.facts.precision
        name = self.spec.name
        return PlanRequest(cluster, batch, pin, precision, False, name, software=self.software)


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
    return JobSetting(known, target, cluster, spec or spec_of_shape(shape, length))


def unlimited(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with devices of unlimited memory."""
    return replace(cluster, device=replace(cluster.device, memory_bytes=UNLIMITED_BYTES))


def layout_pins(layout: Layout, gpus: int, layers: int) -> dict[str, Any]:
    """The pins that fix a layout on `gpus` devices, for a model with `layers` layers."""
    dp = layout.dp_on(gpus)
    number = layout.micro_batches_on(gpus)
    pin: dict[str, Any] = {
        name: getattr(layout, name) for name in ("tp", "pp", "cp", "micro_batch")
    }
    # experts that are shared out over tp too are priced as split over it
    pin |= {"dp": dp, "ep": gcd(layout.ep, dp), "recompute": mode_of(layout, layers)}
    zero = layout.zero if dp * layout.cp > 1 else 0
    pin |= {"zero": zero} | ({"shard": layout.shard_on(gpus)} if zero else {})
    if layout.pp > 1:
        # with fewer micro-batches than ranks, 1F1B runs all forwards first
        early = layout.schedule == "1f1b" and number < layout.pp
        stages = "-".join(map(str, layout.stages)) if layout.stages else EVEN
        pin |= {
            "vpp": layout.vpp,
            "schedule": "gpipe" if early else layout.schedule,
            "stages": stages,
        }
    pin |= {"sequence_parallel": layout.sequence_parallel} if layout.tp > 1 else {}
    pin |= {"offload": layout.offload} if layout.offload != "none" else {}
    return pin | ({"order": layout.order} if layout.order else {})


def mode_of(layout: Layout, layers: int) -> str:
    """The recompute mode that prices a layout: if only some layers of each stage are computed again,
    the nearest `every-k`.
    """
    each = layers // (layout.pp * layout.vpp) if layers else 0
    some = layout.recompute_layers
    if layout.recompute != "full" or not some or some >= each:
        return layout.recompute
    every = max(1, round(each / some))
    return f"every-{every}" if every > 1 else "full"


def run_of(setting: JobSetting, by: Layout) -> Run:
    """A job with the layout `by` as a run of `autopar predict`. Raises AutoparError for a layout that
    no framework can start.
    """
    job, gpus = setting.job, setting.gpus
    facts, device = job.facts, setting.cluster.device
    dims = dims_of(job.shape, setting.seq) if not job.shape.lacking else _stand_in(setting, by)
    topology = setting.cluster.topology
    stated: dict[str, Any] = {f.name: getattr(dims, f.name) for f in fields(dims)}
    stated |= {
        "framework": setting.target.software,
        "gpu": _known_gpu(setting.cluster),
        "gpus": gpus,
        "gpus_per_node": topology.devices_per_node,
    }
    stated |= {"nvlink_domain": topology.devices_per_node, "nic_Bps": topology.inter.bandwidth_Bps}
    stated |= {"memory_bytes": device.memory_bytes}
    stated |= {
        "tp": by.tp,
        "pp": by.pp,
        "cp": by.cp,
        "dp": by.dp_on(gpus),
        "ep": gcd(by.ep, by.dp_on(gpus)),
        "vpp": by.vpp,
    }
    stated |= {
        "sp": by.sequence_parallel,
        "zero": by.zero,
        "micro_batch": by.micro_batch,
        "global_batch": by.batch_on(gpus),
    }
    stated |= {"sharding": _sharding(by, setting.target), "shard_group": by.shard_on(gpus) or None}
    recompute = _RECOMPUTE.get(by.recompute, "layers")  # the others are `every-k`
    schedule = _SCHEDULES.get(by.schedule, by.schedule)
    stated |= {"recompute": recompute, "schedule": schedule, "embedding_as_layer": False}
    stated |= {
        "matmul": "fp8" if facts.fp8 else facts.precision,
        "compute": facts.precision,
        "recipe": facts.fp8,
    }
    row, filled = complete(stated | _optional(facts))

    def make(kind: type) -> Any:
        return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})

    return Run(
        "job",
        "",
        make(Dims),
        make(Machine),
        make(Degrees),
        make(Precision),
        make(RunSoftware),
        row["global_batch"],
        defaulted=filled,
    )


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
    name = "fsdp" if by.zero > 1 and target.sharding == "dist_optimizer" else target.sharding
    return "hsdp" if name == "fsdp" and by.copies > 1 else name


def _stand_in(setting: JobSetting, by: Layout) -> Dims:
    """Dimensions for the tables of predictions if those of the model are not known: only whether
    fields apply depends on them.
    """
    layers = max(setting.spec.num_layers, by.pp * by.vpp)
    return Dims(
        "llama",
        layers,
        64 * by.tp,
        by.tp,
        by.tp,
        64,
        256 * by.tp,
        max(setting.spec.vocab, 1),
        setting.seq,
        False,
        "rope",
        "swiglu",
    )


def dims_of(shape: ModelShape, seq: int) -> Dims:
    """The dimensions that predictions use, for sequences of `seq` tokens. Raises AutoparError if the
    shape lacks any, or no reference model has them.
    """
    if shape.lacking:
        raise AutoparError(
            f"the model's {', '.join(shape.lacking)} cannot be determined: give --model, such as llama3-8b or hf:config.json"
        )
    plain = shape.heads * shape.head_dim == shape.hidden and shape.kv_heads in (0, shape.heads)
    family = "moe" if shape.experts else "gpt" if plain and not shape.gated else "llama"
    moe_ffn = shape.moe_ffn or shape.ffn
    return Dims(
        family=family,
        layers=shape.layers,
        hidden=shape.hidden,
        heads=shape.heads,
        kv_heads=shape.kv_heads or shape.heads,
        head_dim=shape.head_dim or shape.hidden // shape.heads,
        ffn=shape.ffn or 4 * shape.hidden,
        vocab=shape.vocab,
        seq=seq,
        tied_embeddings=shape.tied,
        positions=shape.positions,
        activation={"gpt": "gelu", "moe": "swiglu"}.get(
            family, "swiglu" if shape.gated else "relu2"
        ),
        experts=shape.experts,
        top_k=shape.top_k,
        moe_ffn=moe_ffn if shape.experts else 0,
        shared_experts=-(-shape.shared_ffn // moe_ffn) if shape.experts else 0,
        first_dense=shape.first_dense or _dense_layers(shape),
        mla=_latent(shape),
        mtp=shape.mtp if shape.experts else 0,
    )


def _latent(shape: ModelShape) -> Latent | None:
    if not shape.latent or not shape.experts:
        return None
    query, *rest = shape.latent
    return Latent(query or shape.hidden, *rest)


def spec_of_shape(shape: ModelShape, seq: int) -> NativeSpec:
    """The spec of a reference model with these dimensions. Raises AutoparError as `dims_of`."""
    config = run_config(dims_of(shape, seq))
    if isinstance(config, MoEConfig) and shape.expert_layers:
        config = replace(config, first_dense=0, expert_layers=shape.expert_layers)
    return NativeSpec.of("the job's model", config)


def _dense_layers(shape: ModelShape) -> int:
    """How many layers have no experts, where they alternate with others; one fewer if all have none."""
    bits = shape.expert_layers
    whole = (bits * shape.layers)[: shape.layers]
    return min(whole.count("0"), max(shape.layers - 1, 0))
