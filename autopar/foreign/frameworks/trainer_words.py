"""The options of Accelerate, DeepSpeed and the trainers above them, as the file of a job has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.foreign.job import Job
from autopar.foreign.target import Aspect, NotExpressible

SCRIPT = "the training script: "
"""What stands before options that belong into another file than that of the job."""
_MICRO = ("per_device_train_batch_size", "micro_batch_size")
"""A trainer's names of the micro-batch."""
_DP = ("dp_shard_size", "dp_replicate_size")
_CP = ("context_parallel_size", "sequence_parallel_degree", "sequence_parallel_size")

TRAINER_ASPECTS = (
    Aspect(("micro_batch",), f"({SCRIPT})?({'|'.join(_MICRO)}|train_micro_batch_size_per_gpu|gradient_accumulation_steps|"
           "train_batch_size)"),
    Aspect(("global_batch", "accumulation", "dp", "tp", "cp"), f"({SCRIPT})?(gradient_accumulation_steps|train_batch_size)"),
    Aspect(("recompute",), "gradient_checkpointing|disable_gradient_checkpointing|fsdp_activation_checkpointing"),
    Aspect(("tp",), "tensor_parallel_size|tensor_parallel\\.(auto)?tp_size"),
    Aspect(("cp",), f"{'|'.join(_CP)}"),
    Aspect(("tp", "cp", "dp", "copies", "zero"), f"{'|'.join(_DP)}|parallelism_config_(tp|cp|dp_\\w+)_size"),
    Aspect(("zero",), "distributed_type|fsdp_(version|reshard_after_forward|auto_wrap_policy|sharding_strategy)|zero_stage|stage"),
    Aspect(("offload",), "fsdp_offload_params|offload_(optimizer|param)(_device|\\.device)|(cpu_offload|cpu_offload_params)"),
)  # fmt: skip
"""What options say of a layout."""


def is_trainer(job: Job) -> bool:
    """Whether the options of a job are those of a trainer."""
    return any(name in job.flags for name in _MICRO)


def trainer_words(job: Job) -> dict[str, str]:
    """The options of a trainer's job by name. Raises NotExpressible if it cannot say the layout."""
    by, file = job.layout, job.flags
    gpus = job.gpus or by.tp * by.cp * (by.dp or 1)
    answers = 2 if any("a sample is a pair" in finding.what for finding in job.findings) else 1
    micro = next(name for name in _MICRO if name in file)
    if by.micro_batch % answers:
        raise NotExpressible(f"samples of pairs have no micro-batch of {by.micro_batch} sequences")
    found = {micro: str(by.micro_batch // answers)}
    found["gradient_accumulation_steps"] = str(by.micro_batches_on(gpus))
    found["gradient_checkpointing"] = str(by.recompute == "full").lower()
    cp = next((name for name in _CP if name in file), "")
    if by.tp > 1 or "tensor_parallel_size" in file:
        found["tensor_parallel_size"] = str(by.tp)
    if cp:
        found[cp] = str(by.cp)
    if "dp_shard_size" in file:
        found["dp_shard_size"] = str(by.dp_on(gpus) // by.copies)
    return found


def trainer_held(job: Job) -> dict[str, Any]:
    """The pins that a trainer's file cannot change: what shards stands in a file of its own."""
    by = job.layout
    found: dict[str, Any] = {"offload": by.offload}
    if by.dp_on(job.gpus or 1) * by.cp > 1:
        found |= {"zero": by.zero}
    if "tensor_parallel_size" not in job.flags:
        found["tp"] = by.tp
    if not any(name in job.flags for name in _CP):
        found["cp"] = by.cp
    return found


def in_script(job: Job) -> dict[str, str]:
    """The options of batches where they stand in the training script."""
    by, gpus = job.layout, job.gpus or 1
    return {
        f"{SCRIPT}per_device_train_batch_size": str(by.micro_batch),
        f"{SCRIPT}gradient_accumulation_steps": str(by.micro_batches_on(gpus)),
    }


def fsdp1_words(job: Job) -> dict[str, str]:
    """The options of Accelerate's FSDP 1. Raises NotExpressible if it cannot say the layout."""
    by, of = job.layout, "fsdp_config.fsdp_"
    if by.tp * by.cp > 1:
        raise NotExpressible("FSDP 1 has neither tensor nor context parallelism")
    strategy = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}[by.zero]
    return {
        "distributed_type": "FSDP",
        f"{of}sharding_strategy": strategy,
        f"{of}activation_checkpointing": str(by.recompute == "full").lower(),
        f"{of}offload_params": str(by.offload == "parameters").lower(),
    }


def deepspeed_words(job: Job) -> dict[str, str]:
    """The options of Accelerate's DeepSpeed. Raises NotExpressible if it cannot say the layout."""
    by, of = job.layout, "deepspeed_config."
    if (by.tp, by.cp) != _degrees(job.flags) or by.recompute != "none":
        raise NotExpressible("the block deepspeed_config says neither tp and cp nor recomputation")
    kept = {
        name: text for name, text in job.flags.items() if name.startswith("parallelism_config.")
    }
    return kept | {
        "distributed_type": "DEEPSPEED",
        f"{of}zero_stage": str(by.zero),
        f"{of}offload_optimizer_device": "none" if by.offload == "none" else "cpu",
        f"{of}offload_param_device": "cpu" if by.offload == "parameters" else "none",
        f"{of}gradient_accumulation_steps": str(by.micro_batches_on(job.gpus or 1)),
    }


def _degrees(flags: Mapping[str, str]) -> tuple[int, int]:
    """(tp, cp) that a file of Accelerate says in its own block. Raises NotExpressible if a size is
    not known.
    """
    options = {n: f"parallelism_config.parallelism_config_{n}_size" for n in ("tp", "cp", "sp")}
    sizes = {n: flags.get(option, "1") for n, option in options.items()}
    for name, text in sizes.items():
        if not text.isdigit():
            raise NotExpressible(f"the file says {options[name]}: {text}, which is no number")
    return int(sizes["tp"]), int(sizes["cp"]) * int(sizes["sp"])


def sharding_kind(flags: Mapping[str, str]) -> str:
    """What an Accelerate configuration shards with: 'FSDP2', 'FSDP1', 'DEEPSPEED' and others."""
    kind = flags.get("distributed_type", "NO").upper()
    version = flags.get("fsdp_config.fsdp_version", "1")
    return f"{kind}{version}" if kind == "FSDP" else kind
