"""Writes a job as arguments of Megatron-LM."""

from __future__ import annotations

from autopar.foreign.frameworks.megatron_layout import counted_stages, layout_text
from autopar.foreign.frameworks.megatron_options import FP8_RECIPES, STRATEGIES
from autopar.foreign.job import Exported, Facts, Job
from autopar.foreign.limits.stage_cuts import even_stages
from autopar.foreign.target import NotExpressible, nodes_of, said, torchrun
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_STRATEGIES = {zero: name for name, zero in STRATEGIES.items()}
_POSITIONS = {"learned": "learned_absolute"}
_RECIPES = {scaling: name for name, scaling in FP8_RECIPES.items()}


def megatron_flags(job: Job) -> dict[str, str]:
    """The arguments of a job by name, as texts; '' for a switch. Raises NotExpressible if
    Megatron-LM cannot run it.
    """
    lacking = list(_lacking(job))
    if lacking:
        raise NotExpressible(f"Megatron-LM cannot say {'; '.join(lacking)}")
    found = _shape_flags(job.shape) if not job.shape.lacking else {}
    if job.seq:
        found |= {"seq-length": str(job.seq), "max-position-embeddings": str(job.seq)}
    return found | _layout_flags(job) | _facts_flags(job.facts, job.layout)


def _lacking(job: Job) -> list[str]:
    by, found = job.layout, []
    if by.schedule not in ("none", "1f1b", "interleaved_1f1b"):
        found.append(
            f"schedule {by.schedule}: the nearest is 1f1b, or interleaved_1f1b with virtual stages"
        )
    if by.order not in ("", "dp-pp"):
        found.append(
            f"the rank order {by.order}: it has tp-cp-ep-dp-pp and tp-cp-ep-pp-dp from the inside"
        )
    if by.recompute not in ("none", "selective", "full"):
        found.append(f"recompute {by.recompute}: the nearest are selective (core_attn) and full")
    if by.offload == "parameters":
        found.append("parameters in host memory: the nearest is --optimizer-cpu-offload")
    if job.facts.fp8 and job.facts.fp8 not in _RECIPES:
        found.append(f"fp8 scaled {job.facts.fp8}: it has {', '.join(FP8_RECIPES)}")
    if by.zero > 1 and by.pp > 1:
        found.append(
            f"ZeRO-{by.zero} in a pipeline: the nearest is ZeRO-1 (--use-distributed-optimizer)"
        )
    return found


def _shape_flags(shape: ModelShape) -> dict[str, str]:
    grouped = shape.kv_heads != shape.heads
    latent = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
    found: dict[str, object] = {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "kv-channels": shape.head_dim,
        "vocab-size": shape.vocab,
        "position-embedding-type": _POSITIONS.get(shape.positions, shape.positions),
        "group-query-attention": grouped,
        "num-query-groups": grouped and shape.kv_heads,
        "swiglu": shape.gated,  # as in Llama and what followed
        "normalization": shape.gated and "RMSNorm",
        "disable-bias-linear": shape.gated or shape.experts > 0,
        "untie-embeddings-and-output-weights": not shape.tied,
    }
    if shape.experts:
        found |= {
            "num-experts": shape.experts,
            "moe-router-topk": shape.top_k,
            "moe-ffn-hidden-size": shape.moe_ffn,
            "moe-shared-expert-intermediate-size": shape.shared_ffn or None,
            "moe-layer-freq": _layer_frequency(shape),
        }
    found |= {"mtp-num-layers": shape.mtp or None, "multi-latent-attention": bool(shape.latent)}
    return said(found | dict(zip(latent, shape.latent, strict=False)))


def _layer_frequency(shape: ModelShape) -> str | None:
    """Which layers have experts, as text; None if all have."""
    if bits := shape.expert_layers:
        times, rest = divmod(shape.layers, len(bits))
        parts = [f"[{','.join(bits)}]*{times}"] if times else []
        parts += [f"[{','.join(bits[:rest])}]"] if rest else []
        return "+".join(parts)
    dense = shape.first_dense
    return f"[0]*{dense}+[1]*{shape.layers - dense}" if dense else None


def _layout_flags(job: Job) -> dict[str, str]:
    by = job.layout
    found = said({
        "tensor-model-parallel-size": by.tp,
        "pipeline-model-parallel-size": by.pp,
        "context-parallel-size": by.cp,
        "micro-batch-size": by.micro_batch,
        "global-batch-size": by.global_batch,
        "expert-model-parallel-size": by.ep > 1 and by.ep,
        "expert-tensor-parallel-size": by.etp,
        "sequence-parallel": by.sequence_parallel,
        "use-tp-pp-dp-mapping": bool(by.order),
        "microbatch-group-size-per-virtual-pipeline-stage": by.group or None,
    })  # fmt: skip
    return found | _stage_flags(by, job.shape) | _sharding_flags(by) | _recompute_flags(by)


def _stage_flags(by: Layout, shape: ModelShape) -> dict[str, str]:
    if by.pp == 1:
        return {}
    stages, layers = by.pp * by.vpp, sum(by.stages)
    even = not by.stages or by.stages == even_stages(layers, stages)
    counted = not even and by.stages == counted_stages(layers, stages, True, True)
    virtual = said({
        "num-virtual-stages-per-pipeline-rank": by.vpp > 1 and by.vpp,
        "account-for-embedding-in-pipeline-split": counted,
        "account-for-loss-in-pipeline-split": counted,
    })  # fmt: skip
    if even or counted:
        return virtual
    return {"pipeline-model-parallel-layout": layout_text(by.stages, shape.mtp)}


def _sharding_flags(by: Layout) -> dict[str, str]:
    fsdp, offloads = by.zero > 1, by.offload == "optimizer"
    return said({
        "use-distributed-optimizer": by.zero == 1,
        "use-megatron-fsdp": fsdp,
        "data-parallel-sharding-strategy": fsdp and _STRATEGIES[by.zero],
        "ckpt-format": fsdp and "fsdp_dtensor",
        "num-distributed-optimizer-instances": by.zero > 0 and by.copies > 1 and by.copies,
        "optimizer-cpu-offload": offloads,
        "use-precision-aware-optimizer": offloads,
    })  # fmt: skip


def _recompute_flags(by: Layout) -> dict[str, str]:
    full = by.recompute == "full"
    return said({
        "recompute-granularity": by.recompute if full or by.recompute == "selective" else None,
        "recompute-method": full and ("block" if by.recompute_layers else "uniform"),
        "recompute-num-layers": full and (by.recompute_layers or 1),
    })  # fmt: skip


def _facts_flags(facts: Facts, by: Layout) -> dict[str, str]:
    fused, dropout = bool(facts.fused_loss), None if facts.dropout is None else f"{facts.dropout:g}"
    return said({
        facts.precision: facts.precision in ("bf16", "fp16"),
        "fp8-format": bool(facts.fp8) and "hybrid",
        "fp8-recipe": bool(facts.fp8) and _RECIPES[facts.fp8],
        "grad-reduce-in-bf16": facts.grads == "bf16",
        "overlap-grad-reduce": facts.dp_overlap,
        "overlap-param-gather": bool(facts.dp_overlap and by.zero),
        "tp-comm-overlap": bool(facts.tp_overlap and by.sequence_parallel),
        "no-overlap-p2p-communication": facts.pp_overlap is False and by.vpp > 1,
        "optimizer": facts.optimizer if facts.optimizer not in (None, "", "adam") else None,
        "cross-entropy-loss-fusion": fused,
        "cross-entropy-fusion-impl": fused and "te",
        "no-gradient-accumulation-fusion": facts.fused_accumulation is False,
        "hidden-dropout": dropout,
        "attention-dropout": dropout,
    })  # fmt: skip


def write_megatron(job: Job) -> Exported:
    """A launch script of Megatron-LM. Raises NotExpressible if it cannot run the job."""
    flags = megatron_flags(job)
    by = job.layout
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if by.tp * by.cp > 1 and by.zero < 2 else {}
    _, nodes = nodes_of(job)
    lines = [
        f"    --{name}{' ' + _quoted(value) if value else ''}" for name, value in flags.items()
    ]
    head = ["#!/bin/bash", *(f"export {name}={value}" for name, value in env.items())]
    text = "\n".join(
        [*head, "ARGS=(", *lines, ")", f'{torchrun(job)} pretrain_gpt.py "${{ARGS[@]}}"', ""]
    )
    losses = (
        []
        if not job.shape.lacking
        else ["the model: add its arguments (--num-layers, --hidden-size, ...)"]
    )
    slurm = f"srun --nodes {nodes} --ntasks-per-node 1 bash train.sh"
    return Exported(
        "megatron-core 0.19",
        text,
        slurm if nodes > 1 else "bash train.sh",
        env,
        tuple(losses),
        "train.sh",
    )


def _quoted(value: str) -> str:
    plain = all(character.isalnum() or character in "._-/" for character in value)
    return value if plain else f"'{value}'"
