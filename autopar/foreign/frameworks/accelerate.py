"""Hugging Face Accelerate: its YAML configuration, with FSDP, DeepSpeed or Megatron-LM behind it."""

from __future__ import annotations

import re
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import Arguments, flat_texts, is_true, read_mapping
from autopar.foreign.frameworks.trainer_words import (
    SCRIPT,
    TRAINER_ASPECTS,
    deepspeed_words,
    fsdp1_words,
    in_script,
    is_trainer,
    sharding_kind,
    trainer_held,
    trainer_words,
)
from autopar.foreign.frameworks.unknown import open_layout
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, head_findings, nodes_of
from autopar.ir.layout import Layout

_NEUTRAL = re.compile(
    r"compute_environment|debug|machine_rank|main_.*|rdzv_backend|same_network|tpu_.*|use_cpu|downcast_bf16|enable_cpu_affinity|gpu_ids|"
    r"dynamo_config\.(?!dynamo_mode)\w+|fsdp_config\.fsdp_(auto_wrap_policy|transformer_layer_cls_to_wrap|state_dict_type|sync_module_states|use_orig_params|"
    r"cpu_ram_efficient_loading|backward_prefetch.*|ignored_modules|min_num_params)|deepspeed_config\.(zero3_.*|deepspeed_multinode.*|"
    r"deepspeed_hostfile|deepspeed_moe.*)|mpirun_config.*|fp8_config\..*|commands?|command_file"
)
SCRIPT_MICRO = f"{SCRIPT}per_device_train_batch_size"
_ASIDE_OF_LAYOUTS = ("compute_environment", "machine_rank", "mixed_precision", "num_machines", "num_processes")  # fmt: skip
_TOP = frozenset(
    "compute_environment debug distributed_type mixed_precision use_cpu num_processes machine_rank num_machines gpu_ids main_process_ip "
    "main_process_port rdzv_backend same_network main_training_function enable_cpu_affinity fp8_config deepspeed_config fsdp_config "
    "parallelism_config megatron_lm_config mpirun_config downcast_bf16 tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file "
    "commands tpu_vm tpu_env dynamo_config fp16 dynamo_backend".split()
)
"""Keys of `ClusterConfig` (accelerate 1.15), and two that it converts. Others are refused."""


def _reads(source: SourceFile) -> bool:
    marks = r"^\s*[\"']?(distributed_type|compute_environment)[\"']?\s*:"
    of_deepspeed = re.search(r'^[\s{]*"zero_optimization"\s*:', source.text, re.MULTILINE)
    stray = of_deepspeed is not None and "deepspeed_config" not in source.text
    is_text = not source.text.startswith("#!") and not stray
    return is_text and re.search(marks, source.text, re.MULTILINE) is not None


def read_accelerate(source: SourceFile) -> Job:
    """The job of an Accelerate configuration. Raises AutoparError if it is none."""
    data = read_mapping(source.text, source.name)
    args = Arguments(_with_deepspeed(flat_texts(data), source))
    if not {"distributed_type", "fsdp_config", "parallelism_config"} & set(data):
        raise AutoparError(f"no job: {source.name} has neither distributed_type nor fsdp_config")
    odd = sorted(set(data) - _TOP)
    if odd:
        args.find(
            "refused",
            f"{', '.join(odd)} are no keys of Accelerate",
            f"The config file had unknown keys ({odd})",
            ("remove them",),
        )
    kind = (args.text("distributed_type") or "NO").upper()
    facts = _facts(args)
    gpus = args.whole("num_processes")
    nodes = args.whole("num_machines") or 1
    engines = {"DEEPSPEED": _deepspeed, "MEGATRON_LM": _megatron}
    layout = engines[kind](args) if kind in engines else _fsdp(args, sharded=kind == "FSDP")
    if kind in ("NO", "MULTI_CPU", "TPU", "XLA"):
        args.find("note", f"distributed_type {kind} is read as data parallelism without sharding")
    per_node = gpus // nodes if gpus and gpus % nodes == 0 else None
    args.find("unknown", "the micro-batch stands in the training script, not in this file",
              legal=("give --micro-batch", "autopar check the script that starts it"))  # fmt: skip
    job = args.job(
        "accelerate", _NEUTRAL, layout=layout, gpus=gpus, gpus_per_node=per_node, facts=facts
    )
    said = "deepspeed_config.gradient_accumulation_steps" in job.flags
    job = open_layout(job, micro_batch=(2, 8), accumulation=() if said else (4, 16))
    if "deepspeed_config.deepspeed_config_file" not in job.flags:
        return job
    return open_layout(job, zero=(0, 1, 2, 3), offload=("optimizer", "parameters"))


def _with_deepspeed(values: dict[str, str], source: SourceFile) -> dict[str, str]:
    """The values, with those of the file of DeepSpeed that they name, if it is beside."""
    path = values.get("deepspeed_config.deepspeed_config_file", "")
    if not path or (text := source.read_file(path)) is None:
        return values
    inner, of = flat_texts(read_mapping(text, path)), "deepspeed_config."
    names = {
        "zero_optimization.stage": "zero_stage",
        "zero_optimization.offload_param.device": "offload_param_device",
        "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    found = {
        of + name: inner[path] for path, name in names.items() if inner.get(path, "auto") != "auto"
    }
    precision = next(
        (name for name in ("bf16", "fp16") if is_true(inner.get(f"{name}.enabled", "False"))), ""
    )
    found |= {"mixed_precision": precision} if precision else {}
    return {k: v for k, v in values.items() if not k.endswith("deepspeed_config_file")} | found


def _facts(args: Arguments) -> Facts:
    precision = args.text("mixed_precision") or "no"
    backend = args.text("dynamo_config.dynamo_backend") or "NO"
    engine = (args.text("fp8_config.backend", "fp8_config.fp8_config_backend") or "").upper()
    scaling = "delayed" if engine in ("TE", "MSAMP") else "tensorwise"
    names = {"bf16": "bf16", "fp16": "fp16", "fp8": "bf16"}
    return Facts(
        names.get(precision, "fp32"),
        scaling if precision == "fp8" else "",
        compile=backend.upper() != "NO",
    )


def _sizes(args: Arguments) -> dict[str, int]:
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    found = {n: args.whole(f"parallelism_config.parallelism_config_{n}_size") or 1 for n in names}
    for name in ("cp_backend", "cp_comm_strategy", "sp_backend"):
        args.text(f"parallelism_config.parallelism_config_{name}")
    return found


def _fsdp(args: Arguments, sharded: bool) -> Layout:
    size = _sizes(args)
    has = any(name.startswith("parallelism_config.") for name in args.values)
    version = args.whole("fsdp_config.fsdp_version") or 1
    strategy = (args.text("fsdp_config.fsdp_sharding_strategy") or "").upper()
    reshard = (args.text("fsdp_config.fsdp_reshard_after_forward") or "").upper()
    kept = strategy in ("SHARD_GRAD_OP", "2") or reshard in ("FALSE", "SHARD_GRAD_OP")
    zero = (
        0
        if not sharded or strategy in ("NO_SHARD", "3") or reshard == "NO_SHARD"
        else 2
        if kept
        else 3
    )
    if sharded and has and version < 2:
        args.find("refused", "parallelism_config with FSDP 1", "ParallelismConfig is only compatible DistributedType.FSDP (version 2)",
                  ("fsdp_version: 2",))  # fmt: skip
    if strategy.startswith("HYBRID") or strategy in ("4", "5"):
        args.find(
            "note",
            "hybrid sharding shards within a node, and its number of copies follows from the nodes",
        )
    dp = size["dp_replicate"] * size["dp_shard"] if has else None
    if size["sp"] > 1:
        args.find(
            "refused",
            f"sequence parallelism (sp {size['sp']}) needs DeepSpeed",
            "sp_backend=deepspeed",
            ("distributed_type: DEEPSPEED",),
        )
    if size["cp"] > 1 and not sharded:
        args.find(
            "refused",
            f"context parallelism (cp {size['cp']}) needs FSDP 2",
            "cp needs FSDP2",
            ("distributed_type: FSDP",),
        )
    return Layout(
        tp=size["tp"],
        cp=size["cp"] * size["sp"],
        dp=dp,
        copies=size["dp_replicate"] if zero else 1,
        zero=zero,
        recompute="full" if args.flag("fsdp_config.fsdp_activation_checkpointing") else "none",
        offload="parameters" if args.flag("fsdp_config.fsdp_offload_params") else "none",
    )


def _deepspeed(args: Arguments) -> Layout:
    size, of = _sizes(args), "deepspeed_config."
    parameters, state = (
        args.text(f"{of}offload_param_device"),
        args.text(f"{of}offload_optimizer_device"),
    )
    if path := args.text(f"{of}deepspeed_config_file"):
        args.find(
            "unknown",
            f"the stage of ZeRO stands in {path}, which is not beside the file",
            legal=(f"put {path} beside it", f"autopar check {path}"),
        )
    offload = (
        "parameters"
        if parameters not in (None, "none")
        else "optimizer"
        if state not in (None, "none")
        else "none"
    )
    return Layout(
        tp=size["tp"],
        cp=size["cp"] * size["sp"],
        accumulation=args.whole(f"{of}gradient_accumulation_steps") or 1,
        zero=args.whole(f"{of}zero_stage", least=0) or 0,
        offload=offload,
    )


def _megatron(args: Arguments) -> Layout:
    of = "megatron_lm_config.megatron_lm_"
    tp, pp = args.whole(f"{of}tp_degree") or 1, args.whole(f"{of}pp_degree") or 1
    args.whole(f"{of}num_micro_batches")
    return Layout(
        tp=tp,
        pp=pp,
        zero=int(bool(args.flag(f"{of}use_distributed_optimizer"))),
        recompute="selective" if args.flag(f"{of}recompute_activations") else "none",
        schedule="1f1b" if pp > 1 else "none",
        sequence_parallel=bool(args.flag(f"{of}sequence_parallelism")) and tp > 1,
    )


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What Accelerate refuses at start."""
    by, found = job.layout, []
    total = by.tp * by.cp * by.pp * by.dp_on(gpus)
    if total != gpus:
        legal = (
            [f"parallelism_config_dp_shard_size: {gpus // (by.tp * by.cp * by.copies)}"]
            if gpus % (by.tp * by.cp * by.copies) == 0
            else []
        )
        found.append(Finding("refused", f"dp_replicate x dp_shard x tp x cp = {total}, and there are {gpus} processes",
                             f"ParallelismConfig total_size ({total}) does not match num_processes ({gpus})", tuple(legal)))  # fmt: skip
    size = _sizes(Arguments(job.flags))
    replicated = size["dp_replicate"]
    if by.tp * by.cp > 1 and replicated > 1 and size["dp_shard"] == 1:
        found.append(Finding("refused", "tp or cp with copies and without shards",
                             "Tensor/Context parallelism (tp/cp_size > 1) cannot be used with pure data parallelism",
                             (f"parallelism_config_dp_shard_size: {replicated}, parallelism_config_dp_replicate_size: 1",)))  # fmt: skip
    if size["cp"] > 1 and size["sp"] > 1:
        found.append(
            Finding(
                "refused",
                "cp and sp together",
                "Context Parallelism (CP) and Sequence Parallelism (SP) are mutually exclusive",
                ("parallelism_config_sp_size: 1", "parallelism_config_cp_size: 1"),
            )
        )
    return [*found, *late_findings(job)]


def late_findings(job: Job) -> list[Finding]:
    """A finding if tp does not divide the heads, or cp the sequence. Transformers' plans fail late
    there, with a shape.
    """
    by = job.layout
    found = [*head_findings(job, "shape ... is invalid for input of size", "tp")]
    if job.seq and by.cp > 1 and job.seq % (2 * by.cp):
        found.append(
            Finding(
                "refused",
                f"{job.seq} tokens are no multiple of 2 x cp = {2 * by.cp}",
                "sequence length must be divisible",
            )
        )
    return found


def _lacking(by: Layout) -> list[str]:
    """What of a layout Accelerate cannot say, each with the nearest that it can."""
    lacking = []
    if by.pp > 1:
        lacking.append(f"a pipeline (pp={by.pp}): the nearest is FSDP with tp")
    if by.ep > 1:
        lacking.append(
            f"expert parallelism (ep={by.ep}): the nearest is Transformers' DistributedConfig"
        )
    if by.zero == 1 or (by.zero == 0 and by.tp * by.cp > 1 and (by.dp or 1) * by.cp > 1):
        lacking.append(
            f"ZeRO-{by.zero} with tp={by.tp} cp={by.cp}: the nearest is FSDP with fsdp_reshard_after_forward: false (ZeRO-2)"
        )
    if by.recompute not in ("none", "full"):
        lacking.append(
            f"recompute {by.recompute}: the nearest is fsdp_activation_checkpointing (all layers)"
        )
    if by.recompute == "full" and not by.zero:
        lacking.append(
            "recomputation without FSDP: it is an option of the model there (gradient_checkpointing_enable)"
        )
    if by.offload == "optimizer":
        lacking.append(
            "the optimizer's state alone in host memory: the nearest is fsdp_offload_params"
        )
    if by.sequence_parallel:
        lacking.append("sequence parallelism over tp: the nearest is sequence_parallel=false")
    return lacking


def _config_of(job: Job) -> dict[str, Any]:
    """The configuration as nested data. Raises NotExpressible if Accelerate cannot run the job."""
    by = job.layout
    if lacking := _lacking(by):
        raise NotExpressible(f"Accelerate cannot say {'; '.join(lacking)}")
    gpus = job.gpus or by.tp * by.cp * (by.dp or 1)
    dp = by.dp_on(gpus)
    data: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if by.zero else "MULTI_GPU",
        "mixed_precision": "fp8"
        if job.facts.fp8
        else {"fp32": "no"}.get(job.facts.precision, job.facts.precision),
        "num_machines": nodes_of(job)[1],
        "num_processes": gpus,
        "machine_rank": 0,
    }
    if by.zero:
        data["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": by.zero == 3,
            "fsdp_activation_checkpointing": by.recompute == "full",
            "fsdp_offload_params": by.offload == "parameters",
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        }
    if by.zero or by.tp * by.cp > 1:
        sizes = {
            "dp_replicate": by.copies if by.zero else dp,
            "dp_shard": dp // by.copies if by.zero else 1,
            "tp": by.tp,
            "cp": by.cp,
        }
        data["parallelism_config"] = {
            f"parallelism_config_{name}_size": size for name, size in sizes.items()
        }
    if job.facts.compile:
        data["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return data


def _flags_of(job: Job) -> dict[str, str]:
    """The configuration by path, as texts."""
    return flat_texts(_config_of(job))


def _words_of(job: Job) -> dict[str, str]:
    """The options of a job in the words of its file: a trainer's, or Accelerate's. Raises
    NotExpressible if these cannot say the layout.
    """
    if is_trainer(job):
        return trainer_words(job)
    kind = sharding_kind(job.flags)
    if kind == "MEGATRON_LM":
        raise NotExpressible("Accelerate hands megatron_lm_config on to Megatron-LM")
    if kind == "DEEPSPEED":
        return deepspeed_words(job) | {SCRIPT_MICRO: str(job.layout.micro_batch)}
    if kind == "FSDP1":
        return fsdp1_words(job) | in_script(job)
    found = _flags_of(job) | in_script(job)
    return {name: text for name, text in found.items() if name not in _ASIDE_OF_LAYOUTS}


def _held(job: Job) -> dict[str, Any]:
    """The pins that a job's file cannot change."""
    if is_trainer(job):
        return trainer_held(job)
    by, kind = job.layout, sharding_kind(job.flags)
    found: dict[str, Any] = {}
    if kind in ("FSDP1", "DEEPSPEED"):
        found = {"tp": by.tp, "cp": by.cp}
    if kind in ("DEEPSPEED", "NO", "MULTI_GPU"):
        found["recompute"] = by.recompute
    return found


def _write(job: Job) -> Exported:
    """An Accelerate configuration. Raises NotExpressible if Accelerate cannot run the job."""
    import yaml

    by, gpus = job.layout, job.gpus or 1
    number = by.micro_batches_on(gpus)
    losses = (
        f"batches: set per_device_train_batch_size={by.micro_batch} and gradient_accumulation_steps={number} in the training script",
        *((f"sequences of {job.seq} tokens: the data decides",) if job.seq else ()),
    )
    text = yaml.safe_dump(dict(_config_of(job)), sort_keys=False)
    return Exported(
        "accelerate 1.15",
        text,
        "accelerate launch --config_file accelerate.yaml train.py",
        {},
        losses,
        "accelerate.yaml",
    )


ACCELERATE = Target(
    LIMITS["accelerate"],
    _reads,
    read_accelerate,
    _refusals,
    _write,
    _flags_of,
    words=_words_of,
    aspects=TRAINER_ASPECTS,
    held=_held,
)
"""Hugging Face Accelerate."""
