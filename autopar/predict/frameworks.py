"""Facts about the frameworks of measured runs, as fields of `Software`: memory, and options that
runs do not print.

Each rule comes from the framework's source, its documentation or, where the rule says so, from runs
of the framework. No rule uses measurements of the run that is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar.predict.run import Run
from autopar.predict.stacks import (
    is_deepspeed,
    is_megatron,
    is_nanotron,
    is_nvidia,
    runs_on,
    since,
)

BF16_OPTIMIZER_SINCE = 2022
"""First year of DeepSpeed's BF16_Optimizer with pipelines (release 0.6, pull request 1801). Before,
gradients were always 16-bit.
"""

DEEPSPEED_BATCHES_SINCE = 2022
"""First year in which DeepSpeed gathers many parameters at once (release 0.5.9, pull request 1453:
68 -> 116 TFLOP/s for 50e9 parameters on 64 A100).
"""

FUSED_NORMS_SINCE = 2026
"""First year that surely has torch's fused rms_norm in eager mode (pull request 153666, mid-2025,
"around 9x speedup vs unfused"). A run of 2025 may predate it.
"""

LIVE_PARAMETERS = 1_000_000_000
"""Default of DeepSpeed's stage3_max_live_parameters, in scalars."""

REDUCE_BUCKET_BYTES = 2 * 500_000_000
"""Bytes of DeepSpeed's reduce_bucket_size: 5e8 elements in fp16. ZeRO-1 allocates it in pipelines
(stage_1_and_2.py, reduce_gradients).
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A field of `Software`, its value for runs to which the rule applies, and the reason. The
    first rule that applies decides a field.
    """

    field: str
    value: Any
    applies: Callable[[Run], bool]
    reason: str


def _runs_on(run: Run, *names: str) -> bool:
    return runs_on(run.software.framework, *names)


def _deepspeed(run: Run) -> bool:
    return is_deepspeed(run.software.framework)


def _nvidia(run: Run) -> bool:
    return is_nvidia(run.software.framework)


def _nanotron(run: Run) -> bool:
    return is_nanotron(run.software.framework)


def _megatron(run: Run) -> bool:
    return is_megatron(run.software.framework)


def _recent(run: Run, year: int) -> bool:
    return since(run.software.year, year)


def _full_precision_shards(run: Run) -> bool:
    return run.degrees.zero == 3 and run.degrees.sharding in ("fsdp", "hsdp") and not _nvidia(run)


RULES: tuple[Rule, ...] = (
    Rule("fused_kernels", True, _megatron, "Apex and Transformer Engine norms, fused bias and activation"),
    Rule("loss_kernel", "fused", lambda run: _runs_on(run, "megatron-core", "megatron-bridge") and _recent(run, 2025),
         "cross_entropy_fusion_impl='te' in Megatron-Bridge's performance recipes"),
    Rule("loss_kernel", "fused", lambda run: _runs_on(run, "llm-foundry"), "loss_fn: fused_crossentropy, llm-foundry's default"),
    Rule("loss_kernel", "in_place", _megatron, "Megatron's vocab_parallel_cross_entropy"),
    Rule("gathers_again", True, _megatron, "Megatron's linear layers save their shard of the input (Korthikanti et al. 2022, 4.2.2)"),
    Rule("gathers_again", True, lambda run: _nanotron(run) and run.degrees.pp > 1,
         "nanotron's tp_recompute_allgather; scripts/scaling_benchmarks.py ran layouts with a pipeline again, with a later version"),
    Rule("loss_kernel", "beside", _nanotron, "nanotron's sharded_cross_entropy writes the softmax beside its input, which forward holds"),
    Rule("state_recipe", "copied_gradients", lambda run: _nanotron(run) and run.degrees.zero == 0 and run.degrees.dp > 1,
         "nanotron without ZeRO adds up gradients in fp32 buffers beside the 16-bit buckets of DDP (src/nanotron/trainer.py, make_ddp)"),
    Rule("keeps_fp8", True, lambda run: run.precision.matmul == "fp8" and (_nvidia(run) or run.precision.recipe == "delayed"),
         "Transformer Engine saves inputs of linear layers in fp8; torchao saves them as they came"),
    Rule("fp8_weight_copies", True, lambda run: run.precision.matmul == "fp8" and _runs_on(run, "nemo"),
         "Transformer Engine caches the fp8 weight and its transpose over micro-batches; Megatron-Bridge holds parameters in fp8 instead"),
    Rule("keeps_stage_outputs", False, lambda run: _megatron(run) and not _deepspeed(run), "Megatron's deallocate_pipeline_outputs"),
    Rule("state_recipe", "fsdp", _full_precision_shards, "FSDP shards fp32 parameters and casts what it gathers"),
    Rule("state_recipe", "deepspeed_bf16",
         lambda run: _deepspeed(run) and run.precision.compute == "bf16" and run.degrees.pp > 1 and _recent(run, BF16_OPTIMIZER_SINCE),
         "DeepSpeed's BF16_Optimizer"),
    Rule("state_recipe", "deepspeed_fp16", _deepspeed, "DeepSpeed's ZeRO optimizers hold gradients in 16 bits"),
    Rule("state_recipe", "bf16_gradients", lambda run: _megatron(run) and run.precision.grads in ("bf16", "fp8", "fp4"),
         "grad_reduce_in_fp32 is off in NVIDIA's performance recipes"),
    Rule("workspace_bytes", REDUCE_BUCKET_BYTES,
         lambda run: _deepspeed(run) and run.precision.compute == "fp16" and run.degrees.zero * run.degrees.pp > 1,
         "DeepSpeed's contiguous gradient bucket"),
    Rule("sharded_interfaces", 1, lambda run: _deepspeed(run) and run.degrees.zero == 3 and not _recent(run, DEEPSPEED_BATCHES_SINCE),
         "DeepSpeed gathered parameter by parameter, in shards too small for more than one ring through the nodes"),
    Rule("scatters_messages", True, lambda run: run.software.scatter_gather_p2p or _deepspeed(run),
         "the row says so; DeepSpeed's pipelines do with tensor parallelism (PipelineEngine.is_pipe_partitioned)"),
    Rule("deepspeed_passes", True, lambda run: _deepspeed(run) and _megatron(run) and run.degrees.pp > 1,
         "530B parameters on 2240 A100 in one layout: 60.1 s for 240 micro-batches with Megatron-DeepSpeed (MT-NLG, arXiv:2201.11990), "
         "55.45 s for 280 with Megatron-LM (Narayanan et al., SC 2021): 14 ms a layer and micro-batch"),
    Rule("fp8_gathers", True, lambda run: run.precision.recipe in ("tensorwise", "current", "delayed"),
         "one scale for a tensor is known before it is gathered: torchtitan's docs/float8.md, \"for TP (by default for Float8Linear)\"; "
         "Transformer Engine gathers in fp8 too"),
    Rule("composite_norms", True, lambda run: _runs_on(run, "torchtitan") and not _recent(run, FUSED_NORMS_SINCE),
         "torch.nn.RMSNorm and the models' own norms had no kernel of their own in eager mode"),
    Rule("fused_optimizer", False, lambda run: _runs_on(run, "llm-foundry"),
         "composer.optim.DecoupledAdamW updates parameter by parameter, operation by operation"),
    Rule("root_unit", True, lambda run: run.degrees.zero == 3 and not _deepspeed(run), "FSDP's root unit has what is in no block"),
    Rule("live_parameters", LIVE_PARAMETERS, lambda run: _deepspeed(run) and run.degrees.zero == 3, "DeepSpeed gathers by submodule"),
)  # fmt: skip


SAVING: dict[str, Any] = {"gathers_again": True}
"""Fields of `Software` that save memory, and that a framework switches on where a layout does not
fit without them.
"""


def saves_where_tight(run: Run) -> bool:
    """Whether a run that does not fit is assumed to use what `SAVING` has: nanotron's
    tp_recompute_allgather is an option that runs do not print.
    """
    return _nanotron(run)


def framework_fields(run: Run) -> dict[str, Any]:
    """The fields of `Software` that follow from a run's framework, by name, with their values.
    Fields without a rule that applies are left out.
    """
    found: dict[str, Any] = {}
    for rule in RULES:
        if rule.field not in found and rule.applies(run):
            found[rule.field] = rule.value
    return found
