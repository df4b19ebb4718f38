"""How training frameworks hold memory, overlap and launch, by release: `software_of` makes a `Software` of the rows of `RULES`.

Each rule comes from the framework's source, its documentation or, where the rule says so, from runs of the framework.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autopar_cost_models.attention import FLASH_RATES
from autopar_cost_models.checks import nearest

from autopar.errors import AutoparError, shown
from autopar.ir.plan_checks import HALF
from autopar.request.framework_names import (
    FRAMEWORKS,
    framework_of,
    is_deepspeed,
    is_hugging_face,
    is_megatron,
    is_nanotron,
    is_nvidia,
    runs_on,
    since,
)
from autopar.request.software import Software

SHARDINGS = ("none", "zero", "dist_optimizer", "fsdp", "hsdp")
"""What shards over the data-parallel ranks: nothing, DeepSpeed's ZeRO, Megatron's distributed optimizer, FSDP, or FSDP in groups."""

SCALING_OF_RECIPE = {"delayed": "delayed", "current": "current", "tensorwise": "current", "rowwise": "rowwise", "blockwise": "block",
                     "mx": "block"}  # fmt: skip
"""The field `fp8_scaling` of `Software` for each fp8 recipe of a job."""
RECIPE_OF_SCALING = {"current": "tensorwise", "block": "blockwise"}
"""The recipe of a job for each `fp8_scaling` that jobs call otherwise."""

EAGER_ISSUE_S = 55e-6
"""Seconds of the host for an operation of the model in eager mode: Python of modules, hooks and
autograd besides the 24 us of the operation alone. Fit: layers of nanotron with one sequence take
4.5 ms for 78 operations, whatever their width.
"""

NETWORK_SLOWS_HOST = 0.47
"""For each rank of tp, how much longer the host takes to issue an operation where a pipeline runs
between nodes, as a share of its time. Fit: layers of nanotron on 2 nodes of 8 H100. With few
sequences they take 10, 15 and 23 ms with tp 2, 4 and 8, whatever their width. Where the pipeline
stays within a node, and without one, they take 4.4 to 5.5 ms. The likely cause is NCCL's threads
for the network, which wait busily (github.com/NVIDIA/nccl/issues/374): a collective over tp waits
for the rank whose host they hold up.
"""

ROUTING_OPERATIONS = 60
"""Operations of the host in a layer with experts that drop no tokens, besides those of the model, at
`EAGER_ISSUE_S` each. Fit: a layer of Megatron-Bridge's Qwen3 30B with one sequence takes 8.8 ms on
B200, and 9.4 to 9.6 ms on H100. The 104 operations of the model are 5.7 ms of that.
"""

LIVE_PARAMETERS = 1_000_000_000
"""Default of DeepSpeed's stage3_max_live_parameters, in scalars."""

REDUCE_BUCKET_BYTES = 2 * 500_000_000
"""Bytes of DeepSpeed's reduce_bucket_size: 5e8 elements in fp16. ZeRO-1 allocates it in pipelines
(stage_1_and_2.py, reduce_gradients).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkJob:
    """A training job, as far as it decides how its framework runs it.

    Attributes:
        framework: a text with a name of `FRAMEWORKS` in it, such as 'nemo 25.04'.  A name that is unknown gets the rules for all.
        version: the release, such as '0.15.1'.  '' if it is unknown.
        year: the year of the run, which counts where the version does not tell.  None if it is unknown, which counts as recent.
        compute: the dtype of activations: 'bf16', 'fp16' or 'fp32'.
        matmul: the dtype of linear layers: that of activations, 'fp8' or 'fp4'.
        recipe: how fp8 is scaled: a key of `SCALING_OF_RECIPE`, or ''.
        gradients: the dtype in which gradients are held.
        zero: the ZeRO stage, or the stage that FSDP amounts to.
        sharding: what shards: one of `SHARDINGS`.
        dp: the number of ranks over which it may shard, context parallelism included.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        sequence_parallel: tp shards positions between the products of a layer.
        scatters_messages: tp ranks send a part each of a pipeline's message.
        compiled: torch.compile is on.
        gpu: the name of the GPU, such as 'H100-80G-SXM'.  '' if it is unknown.
        experts: the number of routed experts of a layer.  0 if there are none.
        drops_tokens: experts have a capacity, and tokens beyond it are dropped.
        sequential_experts: experts of a rank run one after the other, without grouped products.
        expert_bias: experts add biases and clamp what they activate, as GPT-OSS's do.
        dispatches_once: tokens go to experts as `Software.dispatch` 'once' says.
    """

    framework: str
    version: str = ""
    year: int | None = None
    compute: str = "bf16"
    matmul: str = "bf16"
    recipe: str = ""
    gradients: str = "fp32"
    zero: int = 0
    sharding: str = "none"
    dp: int = 1
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    scatters_messages: bool = False
    compiled: bool = False
    gpu: str = ""
    experts: int = 0
    drops_tokens: bool = False
    sequential_experts: bool = False
    expert_bias: bool = False
    dispatches_once: bool = False

    def __post_init__(self) -> None:
        if self.sharding not in SHARDINGS:
            raise AutoparError(
                f"sharding={shown(self.sharding)} is not known; {nearest(self.sharding, list(SHARDINGS))}"
            )
        if self.recipe not in ("", *SCALING_OF_RECIPE):
            raise AutoparError(
                f"recipe={shown(self.recipe)} is not known; {nearest(self.recipe, list(SCALING_OF_RECIPE))}"
            )
        if self.zero not in (0, 1, 2, 3):
            raise AutoparError(f"zero={shown(self.zero)} is not a ZeRO stage; 0, 1, 2 and 3 are")

    def since(self, year: int, **releases: str) -> bool:
        """Whether the job runs a release that came out in `year` or later. `releases` names the first
        one by framework (with _ for -). It decides if the job has a version of such a framework.
        """
        first = releases.get(framework_of(self.framework).replace("-", "_"))
        if first and self.version:
            return _numbers(self.version) >= _numbers(first)
        return since(self.year, year)


def _numbers(version: str) -> list[int]:
    """The leading numbers of a version: [0, 15, 1] of '0.15.1rc3'. Raises AutoparError if there is
    none.
    """
    found = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    if found is None:
        raise AutoparError(f"version={shown(version)} has no numbers such as 0.15.1 at its start")
    return [int(part) for part in found[1].split(".")]


@dataclass(frozen=True, slots=True)
class Rule:
    """A field of `Software`, its value for jobs to which the rule applies, and the source. The first
    rule that applies decides a field.
    """

    field: str
    value: Any
    applies: Callable[[FrameworkJob], bool]
    source: str


def _on(job: FrameworkJob, *names: str) -> bool:
    return runs_on(job.framework, *names)


def _deepspeed(job: FrameworkJob) -> bool:
    return is_deepspeed(job.framework)


def _nvidia(job: FrameworkJob) -> bool:
    return is_nvidia(job.framework)


def _nanotron(job: FrameworkJob) -> bool:
    return is_nanotron(job.framework)


def _megatron(job: FrameworkJob) -> bool:
    return is_megatron(job.framework)


def _megatron_2_6(job: FrameworkJob) -> bool:
    """Whether the job runs Megatron-LM 2.6 (2021) or later, after DeepSpeed's fork."""
    return _megatron(job) and not _deepspeed(job) and job.since(2022)


def _full_precision_shards(job: FrameworkJob) -> bool:
    return job.zero == 3 and job.sharding in ("fsdp", "hsdp") and not _nvidia(job)


def _prefetches(job: FrameworkJob) -> bool:
    return job.sharding in ("fsdp", "hsdp") or (job.sharding == "zero" and job.zero == 3)


def _dropless(job: FrameworkJob) -> bool:
    """Whether the job's experts take all tokens, in NVIDIA's recipes or AutoModel's."""
    return job.experts > 0 and _nvidia(job) and not job.drops_tokens and job.since(2025)


def _gpu(job: FrameworkJob, *names: str) -> bool:
    return job.gpu.upper().startswith(names)


def _hybrid_ep(job: FrameworkJob) -> bool:
    """Whether a job without drops sends tokens by HybridEP: in Megatron-Bridge's recipes for GB200 and
    GB300, and for DeepSeek-V3 (256 experts) on all GPUs (moe_flex_dispatcher_backend). Those for
    GPT-OSS, whose experts have biases, name no dispatcher, and so take megatron-core's all-to-all.
    """
    return (
        _dropless(job)
        and not job.expert_bias
        and (_gpu(job, "GB200", "GB300") or job.experts >= 256)
    )


def _all_to_all(job: FrameworkJob) -> bool:
    """Whether a job's tokens go to experts by megatron-core's all-to-all: not by HybridEP, nor by
    DeepEP as on H100.
    """
    if not (job.experts and _nvidia(job) and job.since(2024)) or _on(job, "automodel"):
        return False
    return not (_hybrid_ep(job) or _sends_once(job))


def _sends_once(job: FrameworkJob) -> bool:
    """Whether tokens go to experts as `Software.dispatch` 'once' says."""
    recipe = _dropless(job) and not job.expert_bias and (_gpu(job, "H100") or job.experts >= 256)
    return job.dispatches_once or recipe


def _expert_graphs(job: FrameworkJob) -> bool:
    """Whether a job without drops replays all but experts as CUDA graphs: since 2026 in
    Megatron-Bridge's recipes for GB200 and GB300, but for GPT-OSS in those for GB300 and B300.
    """
    if not _dropless(job):
        return False
    if job.expert_bias:
        return _gpu(job, "GB300", "B300")
    return job.since(2026) and _gpu(job, "GB200", "GB300")


def _always(job: FrameworkJob) -> bool:
    return True


_MEMORY: tuple[Rule, ...] = (
    Rule("loss_kernel", "fused", lambda job: _on(job, "megatron-core", "megatron-bridge") and job.since(2025, megatron_core="0.12"),
         "cross_entropy_fusion_impl='te' in Megatron-Bridge's performance recipes"),
    Rule("loss_kernel", "fused", lambda job: _on(job, "llm-foundry"), "loss_fn: fused_crossentropy, llm-foundry's default"),
    Rule("loss_kernel", "in_place", _megatron, "Megatron's vocab_parallel_cross_entropy"),
    Rule("gathers_again", True, _megatron, "Megatron's linear layers save their shard of the input (Korthikanti et al. 2022, 4.2.2)"),
    Rule("gathers_again", True, lambda job: _nanotron(job) and job.pp > 1,
         "nanotron's tp_recompute_allgather; scripts/scaling_benchmarks.py ran layouts with a pipeline again, with a later version"),
    Rule("loss_kernel", "beside", _nanotron, "nanotron's sharded_cross_entropy writes the softmax beside its input, which forward holds"),
    Rule("state_recipe", "copied_gradients", _nanotron,
         "nanotron adds the 16-bit gradients of a micro-batch to fp32 buffers once backward has ended, and frees them then "
         "(src/nanotron/optim/gradient_accumulator.py, FP32GradientAccumulator.backward)"),
    Rule("keeps_fp8", True, lambda job: job.matmul == "fp8" and (_nvidia(job) or job.recipe == "delayed"),
         "Transformer Engine saves inputs of linear layers in fp8; torchao saves them as they came"),
    Rule("fp8_weight_copies", True, lambda job: job.matmul == "fp8" and _on(job, "nemo"),
         "Transformer Engine caches the fp8 weight and its transpose over micro-batches; Megatron-Bridge holds parameters in fp8 instead"),
    Rule("keeps_stage_outputs", False, lambda job: _megatron(job) and not _deepspeed(job), "Megatron's deallocate_pipeline_outputs"),
    Rule("state_recipe", "fsdp", _full_precision_shards,
         "FSDP shards fp32 parameters and casts what it gathers; Accelerate makes them fp32 (utils/fsdp_utils.py, fsdp2_prepare_model)"),
    Rule("state_recipe", "deepspeed_bf16",
         lambda job: _deepspeed(job) and job.compute == "bf16" and job.pp > 1 and job.since(2022, deepspeed="0.6"),
         "DeepSpeed's BF16_Optimizer (release 0.6, pull request 1801); before, gradients were always 16-bit"),
    Rule("state_recipe", "deepspeed_fp16", _deepspeed, "DeepSpeed's ZeRO optimizers hold gradients in 16 bits"),
    Rule("state_recipe", "bf16_gradients", lambda job: _megatron(job) and job.gradients in ("bf16", "fp8", "fp4"),
         "grad_reduce_in_fp32 is off in NVIDIA's performance recipes"),
    Rule("workspace_bytes", REDUCE_BUCKET_BYTES, lambda job: _deepspeed(job) and job.compute == "fp16" and job.zero * job.pp > 1,
         "DeepSpeed's contiguous gradient bucket"),
    Rule("root_unit", True, lambda job: job.zero == 3 and not _deepspeed(job), "FSDP's root unit has what is in no block"),
    Rule("frozen", "sharded in fp32", lambda job: job.zero == 3 and _on(job, "torchtitan", "llm-foundry"),
         "they build models in fp32 (torchtitan's training.dtype), and FSDP shards all parameters"),
    Rule("frozen", "sharded", lambda job: job.zero == 3 and job.sharding != "none",
         "fully_shard takes all parameters of a module, and Accelerate makes only trained ones fp32 (utils/fsdp_utils.py); so do DeepSpeed "
         "(zero/parameter_offload.py, _convert_to_zero_parameters) and Megatron-FSDP (model_weight_buffer)"),
    Rule("live_parameters", LIVE_PARAMETERS, lambda job: _deepspeed(job) and job.zero == 3, "DeepSpeed gathers by submodule"),
)  # fmt: skip
_TIME: tuple[Rule, ...] = (
    Rule("fused_kernels", True, _megatron, "Apex and Transformer Engine norms, fused bias and activation"),
    Rule("joins_products", True, lambda job: _megatron(job) and not _on(job, "automodel"),
         "Megatron's linear_qkv and linear_fc1 (core/transformer/attention.py and mlp.py)"),
    Rule("joins_products", True, _nanotron, "nanotron's qkv_proj and gate_up_proj (src/nanotron/models/llama.py)"),
    Rule("fused_softmax", False, lambda job: not (_megatron(job) or _deepspeed(job)),
         "only Megatron-LM has fused scale-mask-softmax kernels"),
    Rule("composite_norms", True, lambda job: _on(job, "torchtitan") and not job.since(2026),
         "torch's fused rms_norm came in mid-2025 (pull request 153666, \"around 9x speedup vs unfused\"); a run of 2025 may predate it"),
    Rule("composite_norms", True, lambda job: is_hugging_face(job.framework), "LlamaRMSNorm of transformers is written op by op, in fp32"),
    Rule("fused_optimizer", False, lambda job: _on(job, "llm-foundry"),
         "composer.optim.DecoupledAdamW updates parameter by parameter, operation by operation"),
    Rule("attention_kernel", "cudnn", _nvidia, "Transformer Engine calls cuDNN"),
    Rule("attention_kernel", "flash2", lambda job: job.since(2023),
         "FlashAttention-2 (arXiv:2307.08691) is what PyTorch and flash-attn run"),
    Rule("attention_kernel", "flash1", _always, "FlashAttention (arXiv:2205.14135)"),
    Rule("dp_overlap", True, lambda job: _prefetches(job) or (_nvidia(job) and job.zero > 0),
         "FSDP and DeepSpeed prefetch (stage3_prefetch_bucket_size, overlap_comm); NVIDIA's recipes set overlap_grad_reduce"),
    Rule("dp_overlap", False, _always, "gradients are reduced, and parameters gathered, once backward has ended"),
    Rule("tp_overlap", True, lambda job: _nvidia(job) and job.tp > 1 and job.sequence_parallel,
         "Transformer Engine's user buffers (tp_comm_overlap)"),
    Rule("late_gradients", True, _megatron_2_6, "Megatron-LM's async_tensor_model_parallel_allreduce (v2.6, 2021)"),
    Rule("late_gradients", False, _always, "DTensor's tensor parallelism waits at once"),
    Rule("fused_accumulation", True, _megatron_2_6, "Megatron-LM's gradient_accumulation_fusion (v2.6, 2021)"),
    Rule("early_stop", False, lambda job: _megatron(job) or _deepspeed(job),
         "Megatron-LM's own checkpoint function runs a block to its end; torch.utils.checkpoint stops at the last tensor that is needed"),
    Rule("sharded_interfaces", 1, lambda job: _deepspeed(job) and job.zero == 3 and not job.since(2022, deepspeed="0.5.9"),
         "DeepSpeed gathered parameter by parameter, in shards too small for more than one ring through the nodes, until pull request "
         "1453: 68 -> 116 TFLOP/s for 50e9 parameters on 64 A100"),
    Rule("scatters_messages", True, lambda job: job.scatters_messages or _deepspeed(job),
         "the job says so; DeepSpeed's pipelines do with tensor parallelism (PipelineEngine.is_pipe_partitioned)"),
    Rule("deepspeed_passes", True, lambda job: _deepspeed(job) and _megatron(job) and job.pp > 1,
         "530B parameters on 2240 A100 in one layout: 60.1 s for 240 micro-batches with Megatron-DeepSpeed (MT-NLG, arXiv:2201.11990), "
         "55.45 s for 280 with Megatron-LM (Narayanan et al., SC 2021): 14 ms a layer and micro-batch"),
    Rule("fp8_gathers", True, lambda job: job.recipe in ("tensorwise", "current", "delayed"),
         "one scale for a tensor is known before it is gathered: torchtitan's docs/float8.md, \"for TP (by default for Float8Linear)\"; "
         "Transformer Engine gathers in fp8 too"),
    Rule("issue_s", EAGER_ISSUE_S, lambda job: not job.compiled, "`EAGER_ISSUE_S`; torch.compile joins the Python of many operations"),
    Rule("network_slows_host", NETWORK_SLOWS_HOST, _nanotron,
         "`NETWORK_SLOWS_HOST`; no run of another framework shows it"),
    Rule("routing_operations", ROUTING_OPERATIONS, lambda job: _dropless(job) and not _hybrid_ep(job),
         "`ROUTING_OPERATIONS`: megatron-core's token dispatcher sorts, counts and permutes, and waits for the tokens of each expert "
         "(moe/token_dispatcher.py, _maybe_dtoh_and_synchronize), and so does DeepEP; not where tokens are dropped and padded"),
    Rule("dispatch", "once", _sends_once,
         "the job says so; Megatron-Bridge's recipes have DeepEP on H100 (scripts/performance/run_script.py, enable_deepep), and HybridEP "
         "for DeepSeek-V3 (256 experts)"),
    Rule("dispatch_overlap", True, lambda job: _hybrid_ep(job) and _gpu(job, "H100") and not job.since(2026),
         "overlap_moe_expert_parallel_comm for DeepSeek-V3 on H100 in Megatron-Bridge 0.1 (scripts/performance/run_script.py, A2A_1F1B)"),
    Rule("cuda_graphs", "all", lambda job: job.experts > 0 and job.drops_tokens and _nvidia(job) and _gpu(job, "B200", "GB200"),
         "cuda_graphs: true for Qwen3 with token drop in Megatron-Bridge 0.1 (scripts/performance/configs/qwen3)"),
    Rule("cuda_graphs", "but experts", _expert_graphs,
         "cuda_graph_scope=[attn, moe_router, moe_preprocess] in Megatron-Bridge's recipes for GB200 and GB300, none for H100, B200, B300; "
         "for GPT-OSS in those for GB300 and B300 (releases 0.2 to 0.4, scripts/performance/configs/gpt_oss)"),
    Rule("sorts_by_expert", True, _all_to_all,
         "megatron-core's MoEAlltoAllTokenDispatcher sorts tokens by local expert, or transposes them if it drops and pads "
         "(moe/token_dispatcher.py, dispatch_postprocess, combine_preprocess)"),
    Rule("permutes_by_op", True, lambda job: job.experts > 0 and _on(job, "nemo") and not _on(job, "automodel"),
         "moe_permute_fusion came with megatron-core 0.11 (March 2025); NeMo's Mixtral leaves it off "
         "(nemo/collections/llm/gpt/model/mixtral.py; moe/moe_utils.py, permute and unpermute)"),
    Rule("sequential_experts", True, lambda job: job.sequential_experts,
         "megatron-core's SequentialMLP, where moe_grouped_gemm is off, concatenates the results of its experts (moe/experts.py)"),
    Rule("expert_bias", True, lambda job: job.expert_bias and _megatron(job),
         "megatron-core's TEGroupedMLP._apply_bias splits the result by expert, adds a weighted bias to each part and joins the parts"),
    Rule("clamps_experts", True, lambda job: job.expert_bias and _megatron(job) and not _on(job, "automodel"),
         "megatron-core clamps and concatenates before the fused kernel (fusions/fused_bias_geglu.py, weighted_bias_quick_geglu_impl)"),
    Rule("recomputes_activation", True, lambda job: job.expert_bias and _dropless(job) and _gpu(job, "H100", "B200", "GB200")
         and not _on(job, "automodel"),
         "recompute_modules=[layernorm, moe_act] in Megatron-Bridge's recipes for GPT-OSS on H100, B200 and GB200 (releases 0.2 to 0.4)"),
)  # fmt: skip
RULES = (*_MEMORY, *_TIME)
"""All rules: what a framework holds, and how it runs. autopar itself is the defaults of `Software`."""


def fields_of(job: FrameworkJob) -> dict[str, Any]:
    """The fields of `Software` that follow from a job's framework, by name, with their values.
    Fields without a rule that applies are left out.
    """
    found: dict[str, Any] = {}
    if framework_of(job.framework) == "autopar":
        return found
    for rule in RULES:
        if rule.field not in found and rule.applies(job):
            found[rule.field] = rule.value
    return found


def software_as_pinned(framework: str, generation: str, **facts: Any) -> Software:
    """As `software_of`, with what a framework shards by ZeRO with, by its stage in `facts`. By
    default, Megatron-LM and its kin shard optimizer states.
    """
    if is_megatron(framework) and not is_deepspeed(framework):
        facts = {"zero": 1} | facts
    if zero := facts.get("zero"):
        sharded = "fsdp" if zero == 3 else "dist_optimizer"
        facts["sharding"] = "zero" if is_deepspeed(framework) else sharded
    return software_of(framework, generation=generation, **facts)


def software_of(framework: str, version: str = "", generation: str = "", **facts: Any) -> Software:
    """How a framework runs a job, as a `Software`.

    Args:
        framework: a text with a name of `framework_names.FRAMEWORKS` in it.
        version: its release, such as '0.15.1'.  '' is a recent one.
        generation: that of the devices ('hopper').  The framework's kernel of attention counts only if its rate was measured there.
        facts: further fields of `FrameworkJob`, such as zero=3.

    Raises AutoparError for a framework, version or fact that is not known.
    """
    if framework_of(framework) == "other":
        raise AutoparError(
            f"framework={shown(framework)} is not known; {nearest(framework, list(FRAMEWORKS))}"
        )
    try:
        job = FrameworkJob(framework=framework, version=version, **facts)
    except TypeError:
        known = [name for name in FrameworkJob.__slots__ if name not in ("framework", "version")]
        wrong = next(name for name in facts if name not in known)
        raise AutoparError(
            f"{wrong}={shown(facts[wrong])} is no fact of a job; {nearest(wrong, known)}"
        ) from None
    if version:
        _numbers(version)
    fields = fields_of(job)
    if (generation, fields.get("attention_kernel")) not in FLASH_RATES:
        fields.pop("attention_kernel", None)
    if job.compute not in HALF:  # all that is held is in fp32
        fields.pop("state_recipe", None)
    if job.matmul == "fp8":
        fields |= {"matmul_dtype": "fp8", "fp8_scaling": SCALING_OF_RECIPE[job.recipe or "delayed"]}
    return Software(compiled=job.compiled, **fields)
