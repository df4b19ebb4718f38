"""The options of frameworks that move memory or time by more than 2 % and that no price counts.

Sources of names and meanings are the configuration classes of these versions.

- megatron-core 0.19: `TransformerConfig`, `ModelParallelConfig`, `OptimizerConfig`,
  `DistributedDataParallelConfig`
- torchtitan 0.3, DeepSpeed 0.19, Accelerate 1.15, Transformers 5.24, TRL 1.16, Axolotl 0.19
- LLaMA-Factory 0.9, ms-swift 4.6, verl 0.9, OpenRLHF 0.11
"""

from __future__ import annotations

from autopar.foreign.frameworks.weights import NO_ATTENTION, Weight

_HF = ("accelerate", "deepspeed", "transformers")
_MEGATRON = ("megatron", "bridge")
_HALF = r"(torch\.)?(bf16|fp16|b?float16|fp8|fp4|uint8)"
_ADAMS = (
    r"adamw?|fused_?adamw?|(deepspeed)?cpu_?adamw?|adamw_(torch(_fused|_xla)?|hf|apex_fused)|auto"
)

_OFFLOADS = (
    Weight("fine_grained_activation_offloading|cpu_offloading(_num_layers)?|enable_activation_offload|"
         "activation_offload(ing)?|activation_cpu_offload|activation_checkpointing.cpu_checkpointing|checkpoint_in_cpu",
         "activations in host memory"),
    Weight("gradient_checkpointing", "activations in host memory or on disk", value="offload(_disk)?|unsloth"),
    Weight("use_unsloth(_gc)?", "Unsloth's kernels, and checkpoints in host memory"),
    Weight("layer_offloading", "layers in host memory"),
    Weight("optimizer_offload_fraction|offload_optimizer.ratio", "a part of the optimizer's state in host memory",
         value=r"0?\.\d*[1-9]\d*", needs="offload"),
    Weight("overlap_cpu_optimizer_d2h_h2d", "transfers of the optimizer's state beside compute", "time", needs="offload"),
    Weight("use_torch_optimizer_for_cpu_offload", "another optimizer on the host", "time", needs="offload"),
    Weight("offload_(optimizer|param)[._]device", "state on disks", value="nvme"),
    Weight("(param|grad|optimizer)_offload", "weights and state that travel to the host and back in each step", "time"),
    Weight("zenflow[.].+|super_offload", "an optimizer on the host beside compute", needs="offload"),
)  # fmt: skip
"""Tensors that lie elsewhere."""

_RECOMPUTE = (
    Weight("recompute_modules", "other modules than the attention core that are computed again", needs="selective",
         value=r"(?s:.*)(moe|mlp|norm|proj|mla|shared|mhc|act\b)(?s:.*)"),
    Weight("recompute_num_layers|activations_checkpoint_num_layers", "inputs that are kept of every few layers alone",
         value=r"[2-9]|\d{2,}", needs="uniform"),
    Weight("moe_layer_recompute|mhc_recompute_layer_num|selective_checkpointing[.].+", "modules that are computed again"),
    Weight("num_micro_?batches_with_partial_activation_checkpoints", "micro-batches that are checkpointed in part"),
    Weight("distribute_saved_activations|(activation_checkpointing.)?partition_activations|deepspeed_partition_activations",
         "checkpoints that are shared out over tp", needs="tp"),
    Weight("activation_checkpoint.mode", "a budget of memory for activations", value="memory_budget"),
    Weight("tp_recompute_allgather", "all-gathers of tp that are computed again", needs="tp"),
)  # fmt: skip
"""What is computed again."""

_PRECISION = (
    Weight("(main_params|main_grads|exp_avg|exp_avg_sq)_dtype", "the optimizer's state in another dtype", "memory", value=_HALF),
    Weight("use_precision_aware_optimizer", "the precision-aware optimizer, which keeps remainders for master weights", "memory",
         needs="on device"),
    Weight("fp[48]_param(_gather)?", "weights that are held and gathered in fp8"),
    Weight("fp8_(dot_product|multi_head)_attention", "attention in fp8", "time"),
    Weight("fp4(_format)?", "products in fp4", "time"),
    Weight("compute_dtype", "products in fp4", "time", value="nv?fp4", frameworks=("bridge",)),
    Weight("first_last_layers_bf16|num_layers_at_(start|end)_in_bf16", "layers in bf16 beside fp8", "time", needs="fp8"),
    Weight("keep_fp8_transpose_cache|reuse_grad_buf_for_mxfp8_param_ag", "buffers of fp8 weights", "memory"),
    Weight("pure_bf16|bf16_master_weights_and_grads|bf16_optimizer_states|fp16_master_weights_and_grads",
         "master weights or state in half precision", "memory"),
    Weight("training.dtype|fsdp_config.model_dtype|model.fsdp_config.model_dtype|engine.model_dtype",
         "weights without a copy in fp32", "memory", value=_HALF),
    Weight("(torch_|model_)?dtype", "weights without a copy in fp32", "memory", value=_HALF, needs="unsharded", frameworks=("accelerate",)),
    Weight("training.mixed_precision_reduce", "gradients that are reduced in bf16", "time", value=_HALF),
    Weight("data_types.grad_accum_dtype", "gradients that add up in fp32", "memory", value="fp32|float32", frameworks=_HF),
    Weight("communication_data_type", "gradients that travel in fp32", "time", value="fp32|float32"),
    Weight("model.converters|[A-Za-z]*Converter", "products in a precision without a price",
         value=r"(?s:.*)(mx|grouped|nvfp4|int8|moe)(?s:.*)", frameworks=("torchtitan",)),
    Weight("quantize.(grouped_mm|linear.mx)[.].+", "products in a precision without a price", frameworks=("torchtitan",)),
    Weight("qat.(enabled?|weight_dtype|activation_dtype)|use_qat|compression_training[.].+|quant_recipe|modelopt_enabled|export_quant_cfg|use_kitchen",
         "quantization-aware training"),
    Weight("fp32_residual_connection|upcast_layernorm|upcast_lmhead_output", "activations in fp32"),
    Weight("amp.enabled|torch_autocast.enabled", "another kind of mixed precision"),
    Weight("half_precision_backend", "another kind of mixed precision", value="apex"),
)  # fmt: skip
"""Dtypes of weights, state and products."""

_OPTIMIZERS = (
    Weight("use_(galore|apollo|badam|adam_mini|muon)|galore|apollo|lisa_(activated_layers|n_layers)", "an optimizer without a price",
         frameworks=_HF),
    Weight("optim|optimizer", "an optimizer without a price", value=rf"(?!({_ADAMS})$)[\w@./+-]+", frameworks=_HF),
    Weight("optimizer.type|optimizer.name|optim.optimizer|optimizer_factory.name", "an optimizer without a price",
         value=rf"(?!({_ADAMS}|sgd)$)\w+", frameworks=("deepspeed", "accelerate", "torchtitan", "nanotron", "verl")),
    Weight("optimizer|optimizer.optimizer|optim_name", "an optimizer without a price", frameworks=_MEGATRON,
         value=r"(?!(dist_)?(adamw?|sgd|muon)$|(.*_)?fused_adam$|mcore_distributed_optim$)[a-z]\w+"),
    Weight("optim", "an optimizer without a price", value="(?!adamw?$).+", frameworks=("openrlhf",)),
    Weight("optimizer.early_step_in_backward|optimizer_in_bwd", "updates inside backward", "memory"),
    Weight("optimizer.implementation", "an optimizer with its state in bf16", "memory", value=".*bf16.*"),
    Weight("use_layer_wise_distributed_optimizer", "an optimizer that is shared out by layers", "memory"),
)  # fmt: skip
"""Optimizers with other state than Adam and SGD."""

_KERNELS = (
    Weight("(enable_|use_)?liger(_kernel|_loss|_kernel_config)?|liger_(?!kernel$)\\w+|dpo_use_liger_kernel", "Liger's kernels"),
    Weight("plugins", "plugins with kernels", value=r"(?s:.*)(liger|cut_cross|kernels|spectrum)(?s:.*)", frameworks=_HF),
    Weight("cut_cross_entropy|(chunked|flash_attn)_cross_entropy|use_fused_linear_ce|use_cce|fused_linear_cross_entropy(_loss)?|"
         "use_fused_kernels|entropy_checkpointing|entropy_from_logits_with_chunking", "a loss that keeps no logits"),
    Weight("cross_entropy_fusion_impl", "a loss that keeps no logits", value="linear"),
    Weight("tiled_mlp(.enabled)?|use_tiled_mlp", "MLPs in tiles"),
    Weight("dynamo_mode", "CUDA graphs, and kernels that are tuned", value="reduce.overhead|max.autotune.*"),
    Weight("torch_compile(_mode|_backend)?|compile(.enabled?)?", "torch.compile", needs="uncompiled",
         value="true|max.autotune.*|reduce.overhead|inductor"),
    Weight("(ds.)?deepcompile|compile.deepcompile|enable_compiled_autograd", "a compiler without a price"),
    Weight("attn_impl(ementation)?|attention_backend|_attn_implementation|eager_attention|backend.attn", "attention without flash kernels",
         value="eager|unfused|local|true"),
    Weight("flash_attn", "attention without flash kernels", value="disabled", frameworks=_HF),
    Weight("s2_attention|shift_attn|use_sparse_attention|sparse_attention.mode|window_size|sliding_window|experimental_attention_variant|"
         "linear_attention_type|mixture_of_depths", "attention to some positions alone"),
    Weight("cuda_graph_impl|enable_cuda_graph|external_cuda_graph|enable_full_iteration_cuda_graph|optimizer_cuda_graph|"
         "cuda_graph_modules", "CUDA graphs", value="(?!none$).+", frameworks=_MEGATRON),
    Weight("packing|neat_packing|sample_packing|padding_free|batch_flattening|(ds.)?packing_samples|sequence_packing(.enabled)?|enable_sequence_packing|"
         "packed_sequence(_size|.packed_sequence_size)?|packed_sequence_specs.packed_sequence_size|reset_attention_mask|block_diag_attn",
         "packed samples, whose attention stays within each", "time"),
    Weight("dynamic_batching.enabled", "micro-batches with a number of tokens"),
    Weight("progressive_layer_drop.enabled|data_efficiency.enabled|curriculum_learning.enabled", "layers or tokens that are left out"),
    Weight("auto_find_batch_size", "a micro-batch that is found at run time"),
)  # fmt: skip
"""Kernels, and what of a sequence is computed."""

_EXPERTS = (
    Weight("moe_shared_expert_overlap|overlap_moe_expert_parallel_comm|ep_overlap_early_attn_memory_release",
         "the travel of tokens beside compute", needs="ep"),
    Weight("delay_wgrad_compute", "gradients of weights that are computed later", needs="ep"),
    Weight("defer_embedding_wgrad_compute", "gradients of weights that are computed later", needs="pp"),
    Weight("moe_token_dispatcher_type", "another travel of tokens than all-to-all", value="allgather|flex", needs="ep"),
    Weight("moe_enable_deepep|expert_parallel_comm_backend|(moe_)?(token_)?dispatcher|enable_deepep|use_deepep",
         "another travel of tokens than all-to-all", value="true|deepep|hybrid_?ep|uccl\\w*", needs="ep"),
    Weight("moe_expert_capacity_factor|moe_pad_expert_input_to_capacity|moe_token_dropping|moe_train_capacity_factor",
         "a capacity of experts",
         value="(?!-).+", needs="experts"),
    Weight("moe_use_legacy_grouped_gemm", "other kernels of experts", needs="experts"),
    Weight("experts_impl(ementation)?", "other kernels of experts", value="eager|batched_mm", needs="experts"),
    Weight("moe_latent_size|moe_extended_tp", "experts of another shape", needs="experts"),
)  # fmt: skip
"""Experts, and the travel of their tokens."""

_COMMUNICATION = (
    Weight("zero_quantized_(weights|gradients|nontrainable_weights)", "weights and gradients that travel quantized", "time"),
    Weight("zero_hpz_partition_size|mics_shard_size|(ds.)?zpg", "parameters that are shared out within groups", value=r"[2-9]|\d{2,}"),
    Weight("(fsdp_)?sharding_strategy", "sharding within a node", value="_?hybrid.*|[45]"),
    Weight("fsdp", "sharding within a node", value=".*hybrid.*", frameworks=_HF),
    Weight("(fsdp_)?backward_prefetch(_policy)?", "gathers that wait for compute", "time", value="no_prefetch"),
    Weight("(fsdp_)?auto_wrap_policy", "units of FSDP that are no layers", value="no_wrap|size_based_wrap"),
    Weight("fsdp_double_buffer|enable_fsdp_symm_mem", "buffers of communication", "memory"),
    Weight("outer_dp_sharding_strategy", "state that is shared out over groups too", value="(?!no_shard$).+"),
    Weight("cp_comm_type|context_parallel_rotate_method|(parallelism_config_)?cp_comm_strategy", "another exchange between ranks of cp",
         value="a2a|a2a[+]p2p|alltoall", needs="cp"),
    Weight("(hybrid|dynamic)_context_parallel|hierarchical_context_parallel_sizes", "groups of cp by the length of sequences"),
    Weight("disable_loss_parallel", "logits that are whole over tp", needs="tp"),
    Weight("pipeline_parallel_schedule", "a schedule without a price", needs="pp", frameworks=("torchtitan",),
         value="(?!(1f1b|gpipe|interleaved1f1b|interleavedzerobubble)$).+"),
    Weight("pipeline_parallel_schedule_csv", "a schedule without a price", needs="pp"),
    Weight("fault_tolerance.enable|use_local_sgd", "groups that synchronize after several steps", "time"),
    Weight("elasticity.enabled", "another number of data-parallel groups"),
    Weight("use_no_sync_for_gradient_accumulation", "gradients that stay whole between micro-batches", "memory"),
    Weight("mtp.enable(_train)?", "extra predictors of the model", frameworks=("verl",)),
    Weight("check_weight_hash_across_dp_replicas_interval", "weights that are compared in each step", "time", value="[1-9]|10"),
)  # fmt: skip
"""Sharding and communication."""

_ARCHITECTURES = (
    Weight("hybrid_(layer|override)_pattern|hybrid_(attention|mlp)_ratio|is_hybrid_model|mamba_(num_heads|ssm_ngroups)",
         "state-space layers (Mamba) among the model's", place="instead", value="(?!0(\\.0)?$).+"),
    Weight("attention_config", NO_ATTENTION, place="instead", value="(?s:.*)(mamba|rwkv|gmlp|amlp)(?s:.*)"),
    Weight("entrypoint|program|script", "layers of RWKV", place="instead", value="(?s:.*)rwkv(?s:.*)"),
    Weight("partition_activations", "inputs of layers that are shared out over tp", "memory", needs="tp"),
)  # fmt: skip
"""Layers that autopar has no model of."""

WEIGHT_RULES = (
    *_ARCHITECTURES,
    *_OFFLOADS,
    *_RECOMPUTE,
    *_PRECISION,
    *_OPTIMIZERS,
    *_KERNELS,
    *_EXPERTS,
    *_COMMUNICATION,
)
"""All rules on training itself."""
