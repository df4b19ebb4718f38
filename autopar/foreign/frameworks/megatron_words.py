"""Megatron-LM's options as the file of a job has them: its release, and its fork."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.foreign.frameworks.megatron_write import megatron_flags
from autopar.foreign.job import Job
from autopar.foreign.limits.restrictions import ONE_STAGE
from autopar.foreign.limits.stage_cuts import even_stages
from autopar.foreign.target import Aspect, NotExpressible
from autopar.ir.mesh import MeshShape
from autopar.request.restriction import Cuts, Restriction

CONNECTIONS = "env_CUDA_DEVICE_MAX_CONNECTIONS"
MEGATRON_ASPECTS = (
    Aspect(("tp",), "tensor_model_parallel_size"),
    Aspect(
        ("pp", "vpp", "stages", "schedule"),
        "pipeline_model_parallel_(size|layout)|num_layers_per_virtual_pipeline_stage|num_virtual_stages_per_pipeline_rank|"
        "virtual_pipeline_model_parallel_size|(decoder_(first|last)_pipeline_num_layers|num_layers_in_(first|last)_pipeline_stage)|"
        "account_for_(embedding|loss)_in_pipeline_split|pp_partition_method",
    ),
    Aspect(("cp",), "context_parallel_size|ds_sequence_parallel_size"),
    Aspect(("ep", "etp"), "expert_(model|tensor)_parallel_size|moe_expert_parallel_size"),
    Aspect(("sequence_parallel", "tp"), "sequence_parallel|tp_comm_overlap"),
    Aspect(("micro_batch",), "micro_batch_size"),
    Aspect(("global_batch", "accumulation"), "global_batch_size|gradient_accumulation_steps"),
    Aspect(
        ("zero", "copies"),
        "use_distributed_optimizer|use_(megatron|custom)_fsdp|data_parallel_sharding_strategy|ckpt_format|"
        "num_distributed_optimizer_instances|overlap_param_gather|use_torch_fsdp2|fsdp",
    ),
    Aspect(("zero", "tp", "cp"), CONNECTIONS),
    Aspect(
        ("recompute", "recompute_layers"),
        "recompute_(granularity|method|num_layers|modules|activations)|(deepspeed_activation_|checkpoint_)\\w*|activations_checkpoint_\\w+",
    ),
    Aspect(("offload",), "optimizer_cpu_offload|use_precision_aware_optimizer|optimizer_offload_fraction"),
    Aspect(("order",), "use_tp_pp_dp_mapping"),
    Aspect(("group", "vpp", "pp"), "microbatch_group_size_per_(virtual_pipeline_stage|vp_stage)"),
)  # fmt: skip
"""What options say of a layout; those of a recipe of Megatron-Bridge too, by the end of their path."""


_MODERN = ("use-megatron-fsdp", "pipeline-model-parallel-layout", "optimizer-cpu-offload", "use-tp-pp-dp-mapping")  # fmt: skip
"""Options that Megatron-DeepSpeed does not have."""


def is_fork(flags: Mapping[str, str]) -> bool:
    """Whether a job runs Megatron-DeepSpeed, which lacks options of megatron-core."""
    return not flags.keys().isdisjoint(("deepspeed", "DDP_impl", "zero_stage"))


def megatron_words(job: Job) -> dict[str, str]:
    """The arguments of a job by name, in the words of its file. Environment variables are among them,
    as `env_NAME`. Raises NotExpressible if the file's Megatron-LM cannot run it.
    """
    found, by, file = megatron_flags(job), job.layout, job.flags
    if is_fork(file):
        found = _of_fork(job, found)
    each = "num-virtual-stages-per-pipeline-rank"
    stages = by.pp * by.vpp
    earlier = each.replace("-", "_") not in file and job.shape.layers % stages == 0
    if each in found and job.shape.layers and earlier:  # an option of all versions
        del found[each]
        found["num-layers-per-virtual-pipeline-stage"] = str(job.shape.layers // stages)
    for name in ("use-distributed-optimizer", "ckpt-format"):
        if by.zero > 1 and name.replace("-", "_") in file:
            found.setdefault(name, file[name.replace("-", "_")])
    if CONNECTIONS in file or file.get("nproc_per_node"):
        if by.zero < 2 and by.tp * by.cp > 1:
            found[CONNECTIONS] = "1"
        elif by.zero < 2 and CONNECTIONS in file:
            found[CONNECTIONS] = file[CONNECTIONS]
    return found


def _of_fork(job: Job, found: dict[str, str]) -> dict[str, str]:
    """The options of Megatron-DeepSpeed."""
    by, file = job.layout, job.flags
    if lacking := [name for name in _MODERN if name in found]:
        raise NotExpressible(f"Megatron-DeepSpeed has no --{lacking[0]}")
    names = {"expert-model-parallel-size": "moe-expert-parallel-size"}
    if "ds_sequence_parallel_size" in file:
        names["context-parallel-size"] = "ds-sequence-parallel-size"
    elif by.cp == 1:
        found.pop("context-parallel-size", None)
    found = {names.get(name, name): text for name, text in found.items()}
    if "deepspeed" in file:
        found.pop("use-distributed-optimizer", None)
    if "checkpoint_activations" in file or "deepspeed_activation_checkpointing" in file:
        modes = ("recompute-granularity", "recompute-method", "recompute-num-layers")
        for name in modes:
            found.pop(name, None)
        if by.recompute == "selective":
            raise NotExpressible("Megatron-DeepSpeed has no selective recomputation beside --checkpoint-activations")  # fmt: skip
        again = ("checkpoint_activations", "deepspeed_activation_checkpointing")
        found |= {n.replace("_", "-"): "" for n in again if n in file and by.recompute == "full"}
    return found


def megatron_held_pins(job: Job) -> dict[str, Any]:
    """The pins that a job's file cannot change: the ZeRO stage of DeepSpeed stands in a file of its
    own.
    """
    if "deepspeed" not in job.flags:
        return {}
    return {"zero": job.layout.zero, "offload": job.layout.offload} if job.layout.zero else {}


def within(job: Job, restriction: Restriction) -> Restriction:
    """What the fork of a job's file can run: stages of equally many layers, and under DeepSpeed no
    stages in turns.
    """
    if not is_fork(job.flags):
        return restriction

    def sizes(mesh: MeshShape, stages_per_rank: int) -> tuple[int, ...]:
        return even_stages(job.shape.layers, mesh.pp * stages_per_rank)

    found = replace(restriction, cuts=Cuts("deals layers evenly", sizes))
    if "deepspeed" not in job.flags:
        return found
    return replace(found, schedules=("1f1b",), only={**restriction.only, "vpp": ONE_STAGE})
