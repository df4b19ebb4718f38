"""What each framework can run, as restrictions of the plans that are searched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autopar.foreign.limits.stage_cuts import even_stages, stages_of_pipeline
from autopar.ir.mesh import MeshShape
from autopar.ir.model_shape import ModelShape
from autopar.request.restriction import Cuts, Limit, Only, Restriction

NO_PIPELINE = Only((1,), "has no pipeline")
NO_EXPERTS = Only((1,), "has no expert parallelism")
NO_CONTEXT = Only((1,), "has no context parallelism")
ONE_STAGE = Only((1,), "has one stage on a rank of the pipeline")
WHOLE_POSITIONS = Only((False,), "leaves activations between products whole over tp")
NO_OFFLOAD = Only(("none",), "has nothing in host memory")
OFFLOADS_ALL = Only(
    ("none", "parameters"), "moves the optimizer to host memory with the parameters alone"
)
OFFLOADS_OPTIMIZER = Only(("none", "optimizer"), "moves no parameters to host memory")
"""What several frameworks lack, by pin."""

ONE_ORDER = Limit("has one order of ranks", "no order", lambda choice: choice.mesh.order == "")
WHOLE_SHARDS = Limit(
    "shares out over all data-parallel ranks", "no shard", lambda choice: not choice.shard
)
"""Rules of several frameworks about layouts."""

MAPPINGS = (("pp", "dp", "ep", "cp", "tp"), ("dp", "pp", "ep", "cp", "tp"))
"""Orders of ranks, outermost first: tp-cp-ep-dp-pp, and that of `--use-tp-pp-dp-mapping`."""


def even_heads(shape: ModelShape) -> Limit:
    """The rule that tp shares out the heads of keys and values evenly, as far as they are known."""
    heads = shape.kv_heads or shape.heads
    return Limit(
        f"shares out {heads} heads of keys and values evenly over tp",
        f"a tp that divides {heads}",
        lambda choice: not (heads and heads % choice.mesh.tp),
    )


def even_experts(shape: ModelShape) -> Limit:
    """The rule that ep shares out the experts evenly."""
    experts = shape.experts
    return Limit(
        f"shares out {experts} experts evenly over ep",
        f"an ep that divides {experts}" if experts else "ep=1",
        lambda choice: choice.mesh.ep == 1 or (experts > 0 and experts % choice.mesh.ep == 0),
    )


def even_positions(seq: int) -> Limit:
    """The rule that 2 cp divides the tokens of a sequence."""
    return Limit(
        f"shares out {seq} tokens evenly over 2 cp",
        f"a cp whose double divides {seq}",
        lambda choice: choice.mesh.cp == 1 or seq % (2 * choice.mesh.cp) == 0,
    )


def openrlhf_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What OpenRLHF can run: ZeRO without a pipeline, tp below ZeRO-3, and ring attention."""
    return Restriction(
        "OpenRLHF",
        {"sequence_parallel": False, "pp": 1, "context_method": "ring"},
        ("none", "full"),
        (),
        {
            "pp": NO_PIPELINE,
            "ep": NO_EXPERTS,
            "sequence_parallel": WHOLE_POSITIONS,
            "context_method": Only(("ring",), "has ring attention alone"),
            "offload": OFFLOADS_OPTIMIZER,
        },
        (
            Limit(
                "has no tp under ZeRO-3",
                "zero=0, 1 or 2, or tp=1",
                lambda choice: choice.mesh.tp == 1 or choice.zero < 3,
            ),
            even_heads(shape),
            ONE_ORDER,
            WHOLE_SHARDS,
        ),
    )


def verl_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What verl's FSDP can run: ZeRO-3, or 2 that keeps what it gathered, with Ulysses."""

    def shards(choice: Any) -> bool:
        return choice.zero in (2, 3) + (0,) * (choice.mesh.dp * choice.mesh.cp == 1)

    beside = "under FSDP; its Megatron-LM has it (--target megatron)"
    return Restriction(
        "verl",
        {"pp": 1, "tp": 1, "context_method": "ulysses"},
        ("none", "full"),
        (),
        {
            "pp": Only((1,), f"has no pipeline {beside}"),
            "tp": Only((1,), f"has no tensor parallelism {beside}"),
            "ep": Only((1,), f"has no expert parallelism {beside}"),
            "context_method": Only(("ulysses",), "has Ulysses alone"),
            "offload": OFFLOADS_ALL,
        },
        (
            Limit("shards by FSDP", "zero=2 or 3", shards),
            Limit(
                f"shares out {shape.heads} attention heads evenly over cp",
                f"a cp that divides {shape.heads}",
                lambda choice: not (shape.heads and shape.heads % choice.mesh.cp),
            ),
            ONE_ORDER,
        ),
    )


def accelerate_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What Accelerate can run: FSDP 2 with tensor and context parallelism, or copies alone."""

    def shards(choice: Any) -> bool:
        mesh = choice.mesh
        plain = mesh.tp * mesh.cp == 1 or mesh.dp * mesh.cp == 1
        return choice.zero > 1 or (choice.zero == 0 and plain)

    def computes_again(choice: Any) -> bool:
        return choice.recompute == "none" or choice.zero > 0

    return Restriction(
        "Accelerate",
        {"sequence_parallel": False, "pp": 1},
        ("none", "full"),
        (),
        {
            "pp": NO_PIPELINE,
            "ep": NO_EXPERTS,
            "sequence_parallel": WHOLE_POSITIONS,
            "zero": Only((0, 2, 3), "has no ZeRO-1"),
            "offload": OFFLOADS_ALL,
        },
        (
            Limit("shards by FSDP, and has copies only without tp and cp", "zero=2 or 3", shards),
            Limit("computes again under FSDP alone", "zero=2 or 3", computes_again),
            even_heads(shape),
            even_positions(seq),
            ONE_ORDER,
        ),
    )


def transformers_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What `DistributedConfig` can run: FSDP with tp, or a pipeline with tp."""

    def shards(choice: Any) -> bool:
        return choice.zero == (3 if choice.mesh.dp > 1 else 0)

    def experts(choice: Any) -> bool:
        return choice.mesh.ep == 1 or (choice.mesh.tp == 1 and not choice.shard)

    def sizes(mesh: MeshShape, stages_per_rank: int) -> tuple[int, ...]:
        return even_stages(shape.layers, mesh.pp * stages_per_rank)

    return Restriction(
        "Transformers",
        {"sequence_parallel": False, "cp": 1},
        ("none", "full"),
        ("gpipe",),
        {
            "cp": NO_CONTEXT,
            "vpp": ONE_STAGE,
            "sequence_parallel": WHOLE_POSITIONS,
            "zero": Only((0, 3), "has FSDP as ZeRO-3 alone"),
            "offload": OFFLOADS_ALL,
        },
        (
            Limit(
                "has no data parallelism in a pipeline",
                "pp=1 or dp=1",
                lambda choice: choice.mesh.pp == 1 or choice.mesh.dp == 1,
            ),
            Limit("shards data-parallel ranks by FSDP", "zero=3, or dp=1 and zero=0", shards),
            Limit("has no tp beside expert parallelism", "ep=1 or tp=1", experts),
            even_heads(shape),
            ONE_ORDER,
        ),
        Cuts("deals layers evenly", sizes) if shape.layers else None,
        precisions=("bf16", "fp32"),
    )


def torchtitan_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What torchtitan can run: FSDP or copies, tp with sequence parallelism, cp, pipelines."""

    def positions(choice: Any) -> bool:
        mesh = choice.mesh
        return seq % (2 * mesh.cp * mesh.tp if mesh.cp > 1 else mesh.tp) == 0

    def shards(choice: Any) -> bool:
        mesh = choice.mesh
        copies = choice.zero == 0 and mesh.cp == 1
        return choice.zero > 1 or mesh.dp * mesh.cp == 1 or copies

    return Restriction(
        "torchtitan",
        {"sequence_parallel": True},
        ("none", "op", "full"),
        ("1f1b", "gpipe", "interleaved_1f1b"),
        {"zero": Only((0, 2, 3), "has no ZeRO-1"), "offload": OFFLOADS_ALL},
        (
            Limit("has copies only without cp", "zero=2 or 3, or cp=1", shards),
            Limit(
                "keeps gathered parameters in a pipeline (ZeRO-2)",
                "zero=2 or pp=1",
                lambda choice: choice.mesh.pp == 1 or choice.zero < 3,
            ),
            even_heads(shape),
            Limit(
                f"shares out {seq} tokens evenly over 2 cp x tp",
                f"a cp and tp with which 2 x cp x tp divides {seq}",
                positions,
            ),
            even_experts(shape),
            Limit(
                "has whole experts beside tp",
                "ep=1 or tp=1",
                lambda choice: choice.mesh.ep == 1 or choice.mesh.tp == 1,
            ),
            ONE_ORDER,
        ),
        precisions=("bf16", "fp32"),
    )


def nanotron_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What nanotron can run: tp with reduce-scatter, pipelines that it cuts by cost, ZeRO-1. With
    dimensions that are not known, it is not known where it cuts. Cuts that leave a rank without a
    layer are left out.
    """

    def sizes(mesh: MeshShape, stages_per_rank: int) -> tuple[int, ...]:
        found = stages_of_pipeline(shape, mesh.pp, mesh.tp) if stages_per_rank == 1 else ()
        return found if all(found) else ()

    return Restriction(
        "nanotron",
        {"sequence_parallel": True, "cp": 1},
        ("none", "full"),
        ("1f1b", "gpipe"),
        {
            "cp": NO_CONTEXT,
            "vpp": ONE_STAGE,
            "zero": Only((0, 1), "has no ZeRO-2 and ZeRO-3"),
            "offload": NO_OFFLOAD,
        },
        (
            Limit("shards by ZeRO-1", "zero=0 or 1", lambda choice: choice.zero < 2),
            even_heads(shape),
            ONE_ORDER,
            WHOLE_SHARDS,
        ),
        Cuts(
            "cuts by the cost of layers and head, and a rank would have no layer"
            if shape.layers
            else "cuts by the dimensions of the model, which are not known",
            sizes,
        ),
    )


def neox_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What GPT-NeoX can run: tp, pipelines by 1F1B, and DeepSpeed's ZeRO."""

    def piped(choice: Any) -> bool:
        return choice.mesh.pp == 1 or choice.zero < 2

    return Restriction(
        "GPT-NeoX",
        {"cp": 1, "ep": 1, "sequence_parallel": True},
        ("none", "full"),
        ("1f1b",),
        {"cp": NO_CONTEXT, "ep": NO_EXPERTS, "vpp": ONE_STAGE, "zero": Only((0, 1, 2, 3), "has ZeRO"), "offload": OFFLOADS_OPTIMIZER},
        (
            Limit("has ZeRO-2 and 3 without a pipeline", "zero=0 or 1, or pp=1", piped),
            even_heads(shape),
            ONE_ORDER,
            WHOLE_SHARDS,
        ),
    )  # fmt: skip


def deepspeed_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What a configuration of DeepSpeed can say: ZeRO without a pipeline, tp, and Ulysses."""
    heads = shape.kv_heads or shape.heads

    def splits(choice: Any) -> bool:
        return not (heads and heads % (choice.mesh.tp * choice.mesh.cp))

    return Restriction(
        "DeepSpeed",
        {"sequence_parallel": False, "pp": 1, "context_method": "ulysses"},
        ("none", "full"),
        (),
        {
            "pp": Only((1,), "has pipelines as code (PipelineModule), not in its configuration"),
            "ep": Only((1,), "has expert parallelism as code, not in its configuration"),
            "sequence_parallel": WHOLE_POSITIONS,
            "context_method": Only(("ulysses",), "has Ulysses alone"),
            "shard": Only((0,), "has copies of shards by zero_hpz_partition_size alone"),
        },
        (
            Limit(
                f"shares out {heads} heads of keys and values evenly over tp or cp",
                f"a tp or cp that divides {heads}",
                splits,
            ),
            Limit(
                "has tp or Ulysses, not both",
                "tp=1 or cp=1",
                lambda choice: choice.mesh.tp == 1 or choice.mesh.cp == 1,
            ),
            Limit(
                "has no tp under ZeRO-3",
                "zero=0, 1 or 2, or tp=1",
                lambda choice: choice.mesh.tp == 1 or choice.zero < 3,
            ),
            ONE_ORDER,
            WHOLE_SHARDS,
        ),
    )


def megatron_restriction(shape: ModelShape, seq: int) -> Restriction:
    """What Megatron-LM can run of a model with sequences of `seq` tokens."""
    groups = shape.kv_heads or shape.heads

    def heads(choice: Any) -> bool:
        tp = choice.mesh.tp
        even = not (groups and groups % tp and tp % groups)
        return even and not (shape.heads and shape.heads % tp)

    def rounds(choice: Any) -> bool:
        pp = choice.mesh.pp
        return pp == 1 or choice.stages_per_rank == 1 or choice.num_microbatches % pp == 0

    def shards(choice: Any) -> bool:
        mesh = choice.mesh
        return choice.zero < 2 or mesh.pp * mesh.tp * mesh.cp * mesh.ep == 1

    return Restriction(
        "Megatron-LM",
        {"sequence_parallel": True},
        ("none", "selective", "full"),
        ("1f1b", "interleaved_1f1b"),
        {"offload": OFFLOADS_OPTIMIZER},
        (
            Limit(
                f"shares out {shape.heads} heads evenly over tp, and {groups} of keys and values "
                "evenly or in copies",
                f"a tp that divides {shape.heads} and divides or is a multiple of {groups}",
                heads,
            ),
            even_positions(seq),
            even_experts(shape),
            Limit("has ZeRO-2 and 3 for data parallelism alone", "zero=0 or 1", shards),
            Limit(
                "has two orders of ranks, tp-cp-ep-dp-pp and tp-cp-ep-pp-dp from the inside",
                "no order",
                lambda choice: choice.mesh.order == "" or choice.mesh.placed in MAPPINGS,
            ),
            Limit(
                "wants a multiple of pp micro-batches with several stages a rank",
                "vpp=1, or a micro_batch with which pp divides the micro-batches",
                rounds,
            ),
        ),
    )


def bridge_restriction(shape: ModelShape, seq: int) -> Restriction:
    """As Megatron-LM's, without fp32, for which no recipe has a `mixed_precision`."""
    found = megatron_restriction(shape, seq)
    return replace(found, name="Megatron-Bridge", precisions=("bf16", "fp16"))
