"""Writes a job as arguments of Megatron-LM."""

from __future__ import annotations

from autopar.foreign.frameworks.megatron_layout import counted_stages, layout_text
from autopar.foreign.frameworks.megatron_options import FP8_RECIPES, STRATEGIES
from autopar.foreign.job import Exported, Facts, Job
from autopar.foreign.limits.stage_cuts import even_stages
from autopar.foreign.target import NotExpressible, nodes_of, torchrun
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_STRATEGIES = {zero: name for name, zero in STRATEGIES.items()}
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
    found = {
        "num-layers": str(shape.layers),
        "hidden-size": str(shape.hidden),
        "ffn-hidden-size": str(shape.ffn),
        "num-attention-heads": str(shape.heads),
        "kv-channels": str(shape.head_dim),
        "vocab-size": str(shape.vocab),
        "position-embedding-type": {"learned": "learned_absolute"}.get(
            shape.positions, shape.positions
        ),
    }
    if shape.kv_heads != shape.heads:
        found |= {"group-query-attention": "", "num-query-groups": str(shape.kv_heads)}
    if shape.gated:  # as in Llama and what followed
        found |= {"swiglu": "", "normalization": "RMSNorm"}
    found |= {"disable-bias-linear": ""} if shape.gated or shape.experts else {}
    found |= {} if shape.tied else {"untie-embeddings-and-output-weights": ""}
    if shape.experts:
        found |= {
            "num-experts": str(shape.experts),
            "moe-router-topk": str(shape.top_k),
            "moe-ffn-hidden-size": str(shape.moe_ffn),
        }
        found |= (
            {"moe-shared-expert-intermediate-size": str(shape.shared_ffn)}
            if shape.shared_ffn
            else {}
        )
        dense = shape.first_dense
        found |= {"moe-layer-freq": f"[0]*{dense}+[1]*{shape.layers - dense}"} if dense else {}
        if bits := shape.expert_layers:
            times, rest = divmod(shape.layers, len(bits))
            parts = [f"[{','.join(bits)}]*{times}"] if times else []
            parts += [f"[{','.join(bits[:rest])}]"] if rest else []
            found["moe-layer-freq"] = "+".join(parts)
    found |= {"mtp-num-layers": str(shape.mtp)} if shape.mtp else {}
    if shape.latent:
        names = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
        found |= {"multi-latent-attention": ""} | dict(
            zip(names, map(str, shape.latent), strict=True)
        )
    return found


def _layout_flags(job: Job) -> dict[str, str]:
    by = job.layout
    found = {
        "tensor-model-parallel-size": str(by.tp),
        "pipeline-model-parallel-size": str(by.pp),
        "context-parallel-size": str(by.cp),
        "micro-batch-size": str(by.micro_batch),
    }
    found |= {"global-batch-size": str(by.global_batch)} if by.global_batch else {}
    found |= {"expert-model-parallel-size": str(by.ep)} if by.ep > 1 else {}
    found |= {"expert-tensor-parallel-size": str(by.etp)} if by.etp else {}
    found |= {"sequence-parallel": ""} if by.sequence_parallel else {}
    found |= {"use-tp-pp-dp-mapping": ""} if by.order else {}
    if by.group:
        found["microbatch-group-size-per-virtual-pipeline-stage"] = str(by.group)
    return found | _stage_flags(by, job.shape) | _sharding_flags(by) | _recompute_flags(by)


def _stage_flags(by: Layout, shape: ModelShape) -> dict[str, str]:
    if by.pp == 1:
        return {}
    stages = by.pp * by.vpp
    virtual = {"num-virtual-stages-per-pipeline-rank": str(by.vpp)} if by.vpp > 1 else {}
    if not by.stages or by.stages == even_stages(sum(by.stages), stages):
        return virtual
    if by.stages == counted_stages(sum(by.stages), stages, True, True):
        return virtual | {
            "account-for-embedding-in-pipeline-split": "",
            "account-for-loss-in-pipeline-split": "",
        }
    return {"pipeline-model-parallel-layout": layout_text(by.stages, shape.mtp)}


def _sharding_flags(by: Layout) -> dict[str, str]:
    found: dict[str, str] = {}
    if by.zero == 1:
        found = {"use-distributed-optimizer": ""}
        found |= {"num-distributed-optimizer-instances": str(by.copies)} if by.copies > 1 else {}
    elif by.zero > 1:
        found = {
            "use-megatron-fsdp": "",
            "data-parallel-sharding-strategy": _STRATEGIES[by.zero],
            "ckpt-format": "fsdp_dtensor",
        }
        found |= {"num-distributed-optimizer-instances": str(by.copies)} if by.copies > 1 else {}
    if by.offload == "optimizer":
        found |= {"optimizer-cpu-offload": "", "use-precision-aware-optimizer": ""}
    return found


def _recompute_flags(by: Layout) -> dict[str, str]:
    if by.recompute == "selective":
        return {"recompute-granularity": "selective"}
    if by.recompute != "full":
        return {}
    method = "block" if by.recompute_layers else "uniform"
    return {
        "recompute-granularity": "full",
        "recompute-method": method,
        "recompute-num-layers": str(by.recompute_layers or 1),
    }


def _facts_flags(facts: Facts, by: Layout) -> dict[str, str]:
    found = {facts.precision: ""} if facts.precision in ("bf16", "fp16") else {}
    if facts.fp8:
        found |= {"fp8-format": "hybrid", "fp8-recipe": _RECIPES[facts.fp8]}
    found |= {"grad-reduce-in-bf16": ""} if facts.grads == "bf16" else {}
    if facts.dp_overlap:
        found |= {"overlap-grad-reduce": ""} | ({"overlap-param-gather": ""} if by.zero else {})
    found |= {"tp-comm-overlap": ""} if facts.tp_overlap and by.sequence_parallel else {}
    found |= (
        {"no-overlap-p2p-communication": ""} if facts.pp_overlap is False and by.vpp > 1 else {}
    )
    found |= {"optimizer": facts.optimizer} if facts.optimizer and facts.optimizer != "adam" else {}
    found |= (
        {"cross-entropy-loss-fusion": "", "cross-entropy-fusion-impl": "te"}
        if facts.fused_loss
        else {}
    )
    found |= {"no-gradient-accumulation-fusion": ""} if facts.fused_accumulation is False else {}
    if facts.dropout is not None:
        found |= {"hidden-dropout": f"{facts.dropout:g}", "attention-dropout": f"{facts.dropout:g}"}
    return found


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
