"""What a job may be besides, where its file does not tell a value: the file is read again with other
values for what is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import DEVICE_COUNTS, Arguments, is_none
from autopar.foreign.job import Job

Options = Mapping[str, str]
LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
)  # fmt: skip
BATCHES = ("micro_batch_size", "global_batch_size")
SHARDING = (
    "use_distributed_optimizer", "use_megatron_fsdp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances",
    "overlap_grad_reduce", "overlap_param_gather",
)  # fmt: skip
PRECISION = ("bf16", "fp16", "fp8", "grad_reduce_in_fp32")
OPTIMIZER = ("optimizer", "use_distributed_optimizer", "optimizer_cpu_offload")
COMPUTE = (
    "recompute_granularity", "cross_entropy_loss_fusion", "hidden_dropout", "gradient_accumulation_fusion",
    "tp_comm_overlap",
)  # fmt: skip
SHAPE = (
    "num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "ffn_hidden_size", "vocab_size",
    "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size", "mtp_num_layers", "gated_linear_unit",
    "share_embeddings_and_output_weights", "position_embedding_type", "multi_latent_attention",
)  # fmt: skip
ALL_OPTIONS: tuple[str, ...] = (
    *LAYOUT,
    *BATCHES,
    *SHARDING,
    *PRECISION,
    *OPTIMIZER,
    *COMPUTE,
    *SHAPE,
    "seq_length",
)
"""Options of Megatron-LM that move time or memory, by what sets them."""

_SIZES = ("1", "2", "3", "4", "8")
_SWITCH = ("true", "false")
_DEGREES = ("1", "2", "8")
VALUES: dict[str, tuple[str, ...]] = {
    "sequence_parallel": _SWITCH,
    "pipeline_model_parallel_layout": ("Et|tL",),
    "account_for_embedding_in_pipeline_split": _SWITCH,
    "account_for_loss_in_pipeline_split": _SWITCH,
    "micro_batch_size": _SIZES,
    "global_batch_size": ("1", "64", "96", "1024"),
    "seq_length": ("2048", "4096", "8192"),
    "use_distributed_optimizer": _SWITCH,
    "use_megatron_fsdp": _SWITCH,
    "data_parallel_sharding_strategy": ("optim", "optim_grads_params"),
    "overlap_grad_reduce": _SWITCH,
    "overlap_param_gather": _SWITCH,
    "bf16": _SWITCH,
    "fp16": _SWITCH,
    "precision": ("fp32", "fp16", "bfloat16"),
    "fp8": ("none", "hybrid"),
    "fp8_format": ("none", "hybrid"),
    "grad_reduce_in_fp32": _SWITCH,
    "optimizer": ("adam", "sgd"),
    "optimizer_cpu_offload": _SWITCH,
    "recompute_granularity": ("none", "full", "selective"),
    "cross_entropy_loss_fusion": _SWITCH,
    "hidden_dropout": ("0", "0.1"),
    "gradient_accumulation_fusion": _SWITCH,
    "tp_comm_overlap": _SWITCH,
    "num_layers": ("32", "33"),
    "hidden_size": ("4096", "8192"),
    "num_attention_heads": ("32", "64"),
    "num_query_groups": ("1", "8"),
    "kv_channels": ("64", "128"),
    "ffn_hidden_size": ("14336", "16384"),
    "vocab_size": ("32000", "128256"),
    "num_moe_experts": ("none", "64"),
    "moe_ffn_hidden_size": ("1024", "2048"),
    "mtp_num_layers": ("none", "1"),
    "gated_linear_unit": _SWITCH,
    "share_embeddings_and_output_weights": _SWITCH,
    "position_embedding_type": ("rope", "learned_absolute"),
    "multi_latent_attention": _SWITCH,
    "swiglu": _SWITCH,
    "group_query_attention": _SWITCH,
    "untie_embeddings_and_output_weights": _SWITCH,
    "recompute_method": ("uniform", "block"),
    "enable_gradient_checkpointing": _SWITCH,
    "gradient_checkpointing_enable": _SWITCH,
    "adam_offload": _SWITCH,
    "reshard_after_forward": _SWITCH,
    "offload_policy": _SWITCH,
    "offload_params": _SWITCH,
    "use_dynamic_bsz": _SWITCH,
    "recompute_layer": _SWITCH,
    "accumulate_grad_in_fp32": _SWITCH,
    "tp_mode": ("ALL_REDUCE", "REDUCE_SCATTER"),
    "mixed_precision": ("no", "bf16", "fp16"),
    "dtype": ("bfloat16", "float32"),
    "param_dtype": ("bf16", "fp32"),
    "optim": ("adamw_torch", "sgd"),
    "gradient_checkpointing": _SWITCH,
    "pipeline_parallel_schedule": ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble"),
    "mode": ("none", "full", "selective"),
    "selective_ac_option": ("op", "2"),
    "fsdp_reshard_after_forward": ("default", "never", "always"),
    "data_parallel_shard_degree": ("-1", "1", "2"),
    "zero_stage": ("0", "1", "2", "3"),
    "stage": ("0", "1", "2", "3"),
    "enable": _SWITCH,
    "enabled": _SWITCH,
    "enable_cpu_offload": _SWITCH,
    "enable_sequence_parallel": _SWITCH,
    "device": ("none", "cpu"),
    **dict.fromkeys(DEVICE_COUNTS, ()),
}  # fmt: skip
"""Plausible values of an option, by the last part of its name. Devices are those of the cluster that
is asked about, so that none is taken for them.
"""
_JOINED = (
    {"pipeline_model_parallel_size": "2", "virtual_pipeline_model_parallel_size": "2"},
    {"tensor_model_parallel_size": "2", "sequence_parallel": "true"},
    {"num_moe_experts": "64", "moe_router_topk": "2", "expert_model_parallel_size": "2"},
    {"use_distributed_optimizer": "true", "overlap_grad_reduce": "true"},
    {"use_distributed_optimizer": "true", "bf16": "true"},
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": "1"},
)
"""Options that count together."""
_SHARED = {
    "virtual_pipeline_model_parallel_size": ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage",
                                             "pipeline_model_parallel_layout"),
    "gated_linear_unit": ("swiglu", "quick_geglu", "activation"),
    "num_moe_experts": ("num_experts",),
    "fp8": ("fp8_format", "fp8_hybrid"),
    "share_embeddings_and_output_weights": ("untie_embeddings_and_output_weights",),
    "grad_reduce_in_fp32": ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32"),
    "bf16": ("fp16", "params_dtype"),
    "fp16": ("bf16", "params_dtype"),
    "num_query_groups": ("num_key_value_heads", "group_query_attention"),
    "hidden_size": (), "seq_length": ("encoder_seq_length", "max_length", "cutoff_len"),
    "recompute_granularity": ("recompute_activations", "activations_checkpoint_granularity"),
    "optimizer_cpu_offload": ("cpu_optimizer",),
    "data_parallel_sharding_strategy": (),
    "micro_batch_size": ("per_device_train_batch_size", "ppo_micro_batch_size_per_gpu"),
    "account_for_embedding_in_pipeline_split": ("pipeline_model_parallel_layout", "num_layers_in_first_pipeline_stage"),
    "account_for_loss_in_pipeline_split": ("pipeline_model_parallel_layout", "num_layers_in_last_pipeline_stage"),
    "tp_comm_overlap": ("ub_tp_comm_overlap",),
    "gradient_accumulation_fusion": ("no_gradient_accumulation_fusion",),
}  # fmt: skip
"""Other options that say the same as one, so that a file with them states it."""


def unstated(names: Iterable[str], stated: Iterable[str]) -> tuple[str, ...]:
    """Those of the options `names` that a file which states others leaves open."""
    known = set(stated)
    return tuple(
        name
        for name in dict.fromkeys(names)
        if name not in known and known.isdisjoint(_SHARED.get(name, ()))
    )


def with_others(
    job: Job,
    read: Callable[[Options], Job],
    options: Options,
    names: Iterable[str],
    choices: Mapping[str, Iterable[str]] | None = None,
) -> Job:
    """The job with all that it may be besides.

    Args:
        job: the job that `read(options)` gives.
        read: the job that options by name say.  It may raise AutoparError.
        options: those of the file.
        names: those whose value is not known.
        choices: the values that an option can have, where the file tells these.
    """
    chosen = dict(choices or {})
    names = tuple(dict.fromkeys([*names, *chosen]))
    changes = [
        {name: value}
        for name in names
        for value in chosen.get(name) or VALUES.get(name.rpartition(".")[2], _DEGREES)
        if options.get(name) != value
        and not (is_none(value) and is_none(options.get(name, "none")))
    ]
    changes += [joined for joined in map(dict, _JOINED) if len(set(joined) & set(names)) > 1
                and all(name in names or options.get(name) == v for name, v in joined.items())]  # fmt: skip
    found = list(job.others)
    for change in changes:
        try:
            other = read({**options, **change})
        except AutoparError:
            continue
        found += [replace(one, others=(), findings=()) for one in (other, *other.others)]
    return replace(job, others=distinct_jobs(job, found))


def with_open(read: Callable[[Options], tuple[Job, Arguments]], options: Options) -> Job:
    """The job that `read` gives for options by name, with all that it may be besides: `read` tells
    by the arguments which of them have no known value.
    """
    job, args = read(options)
    return with_others(job, lambda changed: read(changed)[0], options, sorted(args.open))


def distinct_jobs(job: Job, others: Iterable[Job]) -> tuple[Job, ...]:
    """Those of `others` that differ from a job and from each other in what is priced or refused."""
    found = [job]
    for other in others:
        if not any(_like(other, known) for known in found):
            found.append(other)
    return tuple(found[1:])


def _like(one: Job, other: Job) -> bool:
    """Whether two jobs have the same dimensions, layout, facts and options."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("layout", "shape", "facts", "seq", "gpus", "flags")
    )


def open_layout(job: Job, **fields: Sequence[Any]) -> Job:
    """The job with others for fields of the layout that its file leaves to another one: the values
    that each may have.
    """
    found = list(job.others)
    for one in (job, *job.others):
        found += [
            replace(one, layout=replace(one.layout, **{name: value}), others=(), findings=())
            for name, values in fields.items()
            for value in values
        ]
    return replace(job, others=distinct_jobs(job, found))


def each(job: Job, change: Callable[[Job], Job]) -> Job:
    """The job after a change, which is made to all that it may be too."""
    changed = change(replace(job, others=()))
    return replace(changed, others=distinct_jobs(changed, map(change, job.others)))
