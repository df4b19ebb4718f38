"""`Run`: one measured training run, with every field typed and checked.

Times are in seconds, memory in bytes, bandwidth in bytes per second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from math import gcd
from typing import Any

from autopar_cost_models import SCHEDULES
from autopar_cost_models.checks import finite, is_whole

from autopar.errors import AutoparError, shown
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape, check_known
from autopar.request.frameworks import SHARDINGS
from autopar.request.pins import PINS

_SCHEDULES = ("none", *SCHEDULES, "dual_pipe")
_DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8", "fp4")
RECIPES = ("", "delayed", "current", "tensorwise", "rowwise", "blockwise", "mx")
OPTIMIZERS = ("adam", "lamb", "sgd", "adafactor", "muon")
MEMORY_SCOPES = ("", "allocated", "reserved", "device", "analytic")


_MOST_SIZE = 10**12
"""The largest valid size of a machine or memory."""


def _whole(least: int, **values: int) -> None:
    for name, value in values.items():
        if not is_whole(value, least, _MOST_SIZE):
            raise AutoparError(
                f"{name}={shown(value)} must be a whole number from {least} to {_MOST_SIZE:,}"
            )


def _quantity(name: str, value: float | None, zero: bool = False) -> None:
    if value is not None and not (finite(value) and (value >= 0 if zero else value > 0)):
        raise AutoparError(
            f"{name}={shown(value)} must be a finite number {'>= 0' if zero else '> 0'}"
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """The GPUs of a run. `gpu` is the text of the file. `nvlink_domain` GPUs share the fast link.
    `nic_Bps` is the network's line rate per GPU and direction. `memory_bytes` is the driver's
    figure for one GPU, or None if the name does not tell. `system` is the node preset that the row
    names, or ''.
    """

    gpu: str
    gpus: int
    gpus_per_node: int
    nvlink_domain: int
    nic_Bps: float
    memory_bytes: int | None = None
    system: str = ""

    def __post_init__(self) -> None:
        if not self.gpu.strip():
            raise AutoparError("gpu is blank")
        names = ("gpus", "gpus_per_node", "nvlink_domain")
        _whole(1, **{name: getattr(self, name) for name in names})
        _quantity("nic_Bps", self.nic_Bps)
        if self.memory_bytes is not None:
            _whole(1, memory_bytes=self.memory_bytes)


@dataclass(frozen=True, slots=True)
class Precision:
    """The dtypes of a run.

    `matmul` is the dtype of linear layers; fp8 and fp4 apply only to those, and everything else is
    in `compute`. `recipe` is the fp8 scaling. `grads` is the dtype in which gradients are stored,
    `reduce` the one in which they are communicated.
    """

    matmul: str
    compute: str
    recipe: str
    grads: str
    reduce: str
    fp8_all_gather: bool = False

    def __post_init__(self) -> None:
        for name in ("matmul", "compute", "grads", "reduce"):
            check_known(f"dtype of {name}", getattr(self, name), _DTYPES)
        check_known("fp8 recipe", self.recipe, RECIPES)


@dataclass(frozen=True, slots=True)
class RunSoftware:
    """The software of a run. `flash`: attention is one kernel, `attention_kernel`. Otherwise
    `fused_softmax` says whether scale, mask and softmax are one kernel. `year` is that of the run,
    or None. `tp_overlap`, `pp_overlap` and `dp_overlap`: communication over these axes overlaps
    with compute. `early_stop`, `late_gradients` and `fused_accumulation` are those of
    `autopar.Software`. `drops_tokens`: experts have a capacity. `deepep`: each token is sent once
    to each node and rank. `sequential_experts`: experts run without grouped products.
    `sharding` names what shards over dp x cp: `zero` (DeepSpeed), `dist_optimizer` (Megatron),
    `fsdp`, or `hsdp`, which shards within groups. With `embedding_as_layer`, stages were cut as if
    embedding and head were a layer each. `padded_vocab` is the allocated vocabulary.
    """

    framework: str
    year: int | None
    flash: bool
    fused_softmax: bool
    compile: bool
    tp_overlap: bool
    pp_overlap: bool
    dp_overlap: bool
    optimizer: str
    dropout: float
    sharding: str
    padded_vocab: int
    embedding_as_layer: bool
    early_stop: bool = True
    late_gradients: bool = True
    fused_accumulation: bool = False
    attention_kernel: str = "flash2"
    async_tp: bool = False
    scatter_gather_p2p: bool = False
    drops_tokens: bool = False
    deepep: bool = False
    sequential_experts: bool = False

    def __post_init__(self) -> None:
        check_known("optimizer", self.optimizer, OPTIMIZERS)
        check_known("sharding", self.sharding, SHARDINGS)
        _whole(1, padded_vocab=self.padded_vocab)
        if not 0.0 <= self.dropout < 1.0:
            raise AutoparError(f"dropout={shown(self.dropout)} must be at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of a run; None means unpublished. `memory_scope` says what the memory
    counts: `allocated` tensors, the allocator's `reserved` memory, the whole `device`, or '' if
    that is unknown. An `analytic` figure is not a measurement. `memory_kind` is the file's text for
    it. `memory_of_first_rank`: it is that of the first pipeline rank, not of the fullest GPU.
    `parameters` is the published number of scalars. `out_of_memory`: the run is known to have
    failed for lack of memory.
    """

    step_time_s: float | None = None
    memory_bytes: float | None = None
    memory_scope: str = ""
    memory_kind: str = ""
    memory_of_first_rank: bool = False
    out_of_memory: bool = False
    parameters: float | None = None

    def __post_init__(self) -> None:
        check_known("memory_scope", self.memory_scope, MEMORY_SCOPES)
        for name in ("step_time_s", "memory_bytes", "parameters"):
            _quantity(name, getattr(self, name))

    @property
    def has_memory(self) -> bool:
        """Whether there is a measured memory to compare with."""
        return self.memory_bytes is not None and self.memory_scope != "analytic"


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run, on sequences of `seq` tokens. A `one_layer` run timed one layer alone,
    without embedding, head or optimizer.

    `complete`: the source printed everything that matters, and no option is unknown, so the run is
    scored. `defaulted` names unpublished fields that `defaults.DEFAULTS` filled in. `ignored` lists
    unknown options.
    """

    id: str
    source: str
    shape: ModelShape
    seq: int
    machine: Machine
    layout: Layout
    precision: Precision
    software: RunSoftware
    one_layer: bool = False
    measured: Measured = field(default_factory=Measured)
    complete: bool = True
    defaulted: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    notes: str = ""

    def __post_init__(self) -> None:
        self.shape.check()
        _whole(1, seq=self.seq)
        dims, by = self.shape, self.layout
        dp = by.dp_on(self.machine.gpus)
        if by.tp * by.pp * by.cp * dp != self.machine.gpus:
            product = f"tp={by.tp} x pp={by.pp} x cp={by.cp} x dp={dp}"
            ranks = by.tp * by.pp * by.cp * dp
            raise AutoparError(f"{product} = {ranks} ranks, but there are {self.machine.gpus} GPUs")
        check_known("schedule", by.schedule, _SCHEDULES)
        if wrong := PINS["recompute"].check(by.recompute):
            raise AutoparError(f"recompute={shown(by.recompute)} {wrong}")
        if by.zero not in (0, 1, 2, 3):
            raise AutoparError(f"zero={shown(by.zero)} is not a ZeRO stage; 0, 1, 2 and 3 are")
        if by.vpp > 1 and by.pp == 1:
            raise AutoparError(f"vpp={by.vpp} without a pipeline: pp is 1")
        if by.tp * dp * by.cp % by.ep:
            raise AutoparError(
                f"ep={by.ep} does not divide the {by.tp * dp * by.cp} ranks of tp x dp x cp"
            )
        if dims.heads % by.tp:
            raise AutoparError(f"tp={by.tp} does not divide {dims.heads} attention heads")
        if by.ep > 1 and (not dims.experts or dims.experts % by.ep):
            raise AutoparError(f"ep={by.ep} does not divide {dims.experts} experts")
        if by.pp * by.vpp > dims.layers + dims.mtp + 2:
            raise AutoparError(
                f"pp={by.pp} x vpp={by.vpp} is more stages than {dims.layers} layers, embedding and head fill"
            )
        if self.software.padded_vocab < dims.vocab:
            raise AutoparError(
                f"padded_vocab={self.software.padded_vocab} is below vocab={dims.vocab}"
            )
        rows = dp * by.micro_batch
        if self.global_batch % rows:
            raise AutoparError(
                f"global batch {self.global_batch} is no multiple of dp={dp} x micro_batch={by.micro_batch} = {rows}"
            )

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.layout.batch_on(self.machine.gpus)

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches of one data-parallel rank in a step."""
        return self.layout.micro_batches_on(self.machine.gpus)


@dataclass(frozen=True, slots=True)
class RunPrediction:
    """The prediction for a run. `breakdown` has the seconds of each part of the step;
    `peak_memory_bytes` is for the fullest GPU. `outside_bytes` of them are not torch's: the CUDA
    context and the buffers of communicators. `first_rank_bytes` is the peak of the first pipeline
    rank; None if there is one rank. `kept_bytes` of the peak are activations that wait for backward.
    """

    step_time_s: float
    peak_memory_bytes: float
    breakdown: dict[str, float] = field(default_factory=dict)
    outside_bytes: float = 0.0
    first_rank_bytes: float | None = None
    kept_bytes: float = 0.0

    def __post_init__(self) -> None:
        _quantity("predicted step_time_s", self.step_time_s)
        _quantity("predicted peak_memory_bytes", self.peak_memory_bytes, zero=True)

    def memory_bytes(self, scope: str, first_rank: bool = False) -> float:
        """The bytes that a measurement of this scope counts, on the fullest GPU or on the
        `first_rank` of the pipeline. Torch's allocator sees no context and no communicator.
        """
        torch_alone = scope in ("allocated", "reserved")
        size_bytes = self.peak_memory_bytes
        if first_rank and self.first_rank_bytes is not None:
            size_bytes = self.first_rank_bytes
        return size_bytes - (self.outside_bytes if torch_alone else 0.0)


def run_of_row(id: str, row: Mapping[str, Any], **more: Any) -> Run:
    """The run of a row with all fields, in the words of its file. `more` are other fields of `Run`.
    Raises AutoparError for a layout that contradicts itself.
    """

    def make(kind: type) -> Any:
        return kind(**{f.name: row[f.name] for f in fields(kind) if f.name in row})

    return Run(
        id=id,
        shape=shape_of_row(row),
        seq=row["seq"],
        one_layer=row.get("one_layer", False),
        machine=make(Machine),
        layout=_layout_of_row(row),
        precision=make(Precision),
        software=make(RunSoftware),
        **more,
    )


def shape_of_row(row: Mapping[str, Any]) -> ModelShape:
    """The shape of a row, in the words of its file."""
    named = {f.name: row[f.name] for f in fields(ModelShape) if f.name in row}
    shared = row.get("shared_experts", 0) * row.get("moe_ffn", 0)
    named |= {"tied": row["tied_embeddings"], "gated": row["activation"] == "swiglu"}
    return ModelShape(**named | {"shared_ffn": shared, "latent": row.get("mla", ())})


def row_of_shape(shape: ModelShape) -> dict[str, Any]:
    """The fields of a row that state a complete shape: `shape_of_row` backwards."""
    row = {f.name: getattr(shape, f.name) for f in fields(ModelShape)}
    shared = -(-shape.shared_ffn // shape.moe_ffn) if shape.experts else 0
    return row | {"tied_embeddings": shape.tied, "shared_experts": shared, "mla": shape.latent}


_LAYOUT = "tp pp cp dp ep vpp micro_batch global_batch zero recompute schedule".split()
"""Fields of a layout that rows have under the same name."""


def _layout_of_row(row: Mapping[str, Any]) -> Layout:
    """The layout of a row. Groups of `shard_group` ranks that shard (HSDP) hold copies."""
    found = Layout(**{name: row[name] for name in _LAYOUT}, sequence_parallel=row["sp"])
    ranks, group = row["dp"] * row["cp"], row["shard_group"]
    if group is None:
        return found
    _whole(1, shard_group=group)
    if ranks % group:
        raise AutoparError(f"a sharding group of {group} does not divide dp x cp = {ranks}")
    return replace(found, copies=ranks // group if row["sharding"] == "hsdp" else 1)


def row_of_layout(layout: Layout, gpus: int) -> dict[str, Any]:
    """The fields of a row that state a layout on `gpus` devices."""
    row = {name: getattr(layout, name) for name in _LAYOUT}
    dp = layout.dp_on(gpus)
    row |= {"dp": dp, "ep": gcd(layout.ep, dp), "global_batch": layout.batch_on(gpus)}
    return row | {"sp": layout.sequence_parallel, "shard_group": layout.shard_on(gpus) or None}


Evaluate = Callable[[Run], RunPrediction]
"""The type of a function that predicts one run. It raises AutoparError, with the reason, for a run
that it cannot predict.
"""
