"""The job that Megatron-LM's options say, by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from autopar.foreign.frameworks.arguments import Arguments, is_false, is_none
from autopar.foreign.frameworks.megatron_layout import counted_stages, ended_stages, layout_stages
from autopar.foreign.frameworks.megatron_shape import megatron_shape
from autopar.foreign.frameworks.unknown import SHAPE, with_others
from autopar.foreign.job import Facts, Job, Unmodelled
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

FP8_RECIPES = {
    "tensorwise": "tensorwise",
    "delayed": "delayed",
    "mxfp8": "mx",
    "blockwise": "blockwise",
}
"""The scaling of fp8 by `--fp8-recipe`."""
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
"""The ZeRO stage by `--data-parallel-sharding-strategy`."""

_MICRO_BATCH = ("micro_batch_size", "per_device_train_batch_size", "ppo_micro_batch_size_per_gpu")
"""Names of the micro-batch."""

NEUTRAL = re.compile(
    r"(decoupled_)?(min_)?lr(_.*)?|.*data_(path|cache_path|args_path|parallel_random_init).*|data_cache.*|(no_)?(save|load)(_.*)?|"
    r"log(_.*)?|.*_log_.*|tensorboard.*|wandb.*|tokenizer.*|split|seed|train_(iters|samples|data_path)|eval.*|valid.*|test.*|"
    r"(start_|end_)?weight_decay.*|clip_grad|(adam|sgd|muon|lion)_.*|init_method.*|exit_.*|distributed_(timeout|backend|store).*|"
    r"rotary.*|(layer)?norm_epsilon|num_workers|dataloader.*|mock_data|manual_gc.*|no_(initialization|bias_gelu_fusion|mmap.*)|"
    r"vocab_file|merge_file|vocab_extra_ids|override_opt.*|(use_)?dist_ckpt.*|ckpt_.*|async_save|use_mcore_models|transformer_impl|"
    r"master_(addr|port)|node_rank|rank|local_rank|rdzv_.*|(no_)?create_attention_mask.*|reset_.*|eod_mask_loss|"
    r"moe_(aux_loss|z_loss|router_(score|topk_scaling|bias|load|dtype|num_groups|group_topk|enable|pre_softmax)).*|"
    r"no_check_for_nan.*|check_for_.*|attention_softmax_in_fp32|apply_.*|normalization|train_.*|max_position_embeddings|"
    r"hysteresis|(initial_|min_)?loss_scale.*|rope_.*|use_rope.*|one_logger.*|no_one_logger|timing_.*|profile.*|finetune|"
    r"empty_unused_memory_level|(fim|bert|ict|vision|retriever|adlr|iter_per|img|num_classes|num_channels|dino|inference|rl|grpo|swin)_?.*|"
    r"attention_dropout|attention_backend|calculate_per_token_loss|disable_bias_linear|add_(bias_linear|qkv_bias)|qk_layernorm|"
    r"make_vocab_size_divisible_by|enable_experimental|auto_detect_ckpt.*|use_checkpoint.*|fp8_(margin|interval|amax.*|wgrad)|"
    r"no_(load|save|position|rope|persist|masked|bias|one|data).*|num_dataset.*|nproc_per_node|nnodes|tee|redirects|max_restarts|"
    r"mtp_loss.*|sft.*|config|yaml_cfg|use_flash_attn|export|name|explicit_log_dir|exp_.*|seed_.*|barrier_with.*|deterministic_mode|"
    r"q_lora_rank|kv_lora_rank|qk_(head|pos_emb_head)_dim|v_head_dim|encoder_seq_length|decoder_.*|params_dtype|"
    r"accumulate_allreduce_grads_in_fp32|consumed.*|iteration|model_type|world_size|data_parallel_size|overlap_p2p_comm|"
    r"tiktoken.*|pretrained_checkpoint|trust_remote_code|role|structured_logs.*|label|[cg]pu_bind.*|kill_on_bad_exit|container_.*|mpi|unbuffered|mscale.*|beta_(fast|slow)|original_max_.*|yarn.*|dist_.*|ddp_(bucket|num|pad|average).*|bf16|fp16|is_.*|use_(ring|cpu_init|one).*|"
    r"data_(impl|prefix)|.*_dir|output_.*|dataset.*|split_dataset.*|num_train_epochs|epochs|max_(steps|epochs|padding|prompt|response|num_seqs).*|"
    r".*_tokenizer.*|extra_vocab_size|(deepspeed|codecarbon|kill_switch|trigger|special_tokens)_.*|deepspeed|abort_on_.*|embed_layernorm|"
    r"universal_.*|no_pipeline_parallel|DDP_impl|no_query_key.*|(no_)?persist_.*|bias|(bias|masked)_.*fusion|fp16_lm_.*|"
    r"fp32_residual.*|ffn_dropout|native_amp.*|megatron_amp.*|mcore_gpt|optim_name|precision|pre_process|post_process|headscale|"
    r"transformer_block_type|attention_type|openai_gelu|normalize_attention.*|use_(scaled_init|emha|flash_attention|kl|dynamic|fused).*|"
    r"do_layer_norm.*|(sync|batch)_(batch|p2p)_comm|reduce_amax|gradient_as_bucket_view|grad_(div_ar|allreduce_chunk).*|onnx_safe|restore_.*|"
    r"resume.*|gen_shape|get_attention_mask.*|mmap_.*|model(_name.*|_author)?|framework|template|stage|do_train|finetuning_type|learning_rate|"
    r"(preprocessing|logging|stderr)_.*|work(_group|space)|user_name|description|defaults|auto_continue.*|disable_last_saving|create_wandb.*|"
    r"moe_(router_force|eval_|min_|per_layer|loss_coeff).*|norm_(init|target).*|no_shared_fs|multiple_of|hidden_dim_.*|membind|keep_last|"
    r"rampup_save.*|packing|intermediate_size|(adv|entropy|kl|clip|loss_agg|norm_adv|filter)_.*|path|truncation|n|return_raw.*|"
    r"ppo_(mini|max|epochs).*|of_a_prompt|use_(mbridge|torch_compile)|.*_timeout|main_params_dtype|average_in_collective|pipeline_dtype|"
    r"autocast.*|.*_dtype_for_.*|cuda_graph_warmup_steps|max_lr|(limit_)?(val|test)_.*|strategy|accelerator|accumulate_grad_batches|cuda_graph_scope|(max_read|max_write)_concurrency|"
    r"chunk_size_MB|drop_layers|[A-Z_]+|qkv_bias|fp8_(hybrid|e4m3)|transformer_engine|gc_interval|grad_sync_dtype|(param|grad|optimizer)_offload|fsdp_(sharding_strategy|grad_reduce_dtype)|"
    r"cpu_offloading_(num_layers|activations|weights)|use_transformer_engine.*|layernorm_zero.*|add_non_thinking.*|lora_.*|target_modules|enabled|freeze_moe_router|cuda_graph_modules|fused_linear_logprobs_.*|scheduler|track_moe_metrics|time_limit|dependency|max_(grad_norm|num_(steps|epochs))|activation_checkpointing|"
    r"sglang_.*|(rollout|over_sampling|num_rollout|n_samples|dynamic_sampling|custom|logprob|generation|actor_num|colocate|ref_load)_?.*|"
    r"hf_checkpoint|prompt_data|(input|label)_key|rm_(type|url)|advantage_.*|eps_clip.*|use_(tis|opd)|tis_.*|balance_data|(num_steps_per|update_weight).*|"
    r"address|runtime_env_json|master_port.*|(betas|eps|keep_top_k|metric_name|higher_is_better|save_period)|make_sequence_length_.*|num_(prompts|generations)_per.*|(preserve|fp8)_.*_(graph|history)"
)
"""Options that change neither time nor memory as predicted here, or that need no price of their
own. All others are listed as not priced.
"""


def megatron_job(
    values: Mapping[str, str],
    resolved: bool = False,
    missing: Iterable[str] = (),
    choices: Mapping[str, Iterable[str]] | None = None,
) -> Job:
    """The job that options by name say, with all that it may be besides.

    Args:
        values: the options.
        resolved: whether they are a dump, in which all options stand.
        missing: options that something sets which was not read.
        choices: the values that an option may have.
    """

    def read(options: Mapping[str, str]) -> Job:
        return _job_of(Arguments(options), resolved)

    args = Arguments(values)
    job = _job_of(args, resolved)
    names = [*missing, *sorted(args.open)]
    if job.shape.lacking:  # it has no price without a model that is given
        names = [name for name in names if name not in SHAPE]
    return with_others(job, read, values, names, choices)


def _job_of(args: Arguments, resolved: bool) -> Job:
    """The job that options say."""
    values = args.values
    shape = megatron_shape(args, resolved)
    layout = _layout(args, shape)
    facts = _facts(args, layout)
    gpus, per_node = _devices(args)
    seq = args.whole("seq_length", "encoder_seq_length", "max_length", "seq_len", "cutoff_len")
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if ramp := args.text(name):
            args.find(
                "note",
                f"the batch grows at first ({name} {ramp}): times are those of the full batch",
            )
    if not resolved and all(is_none(values.get(name) or "none") for name in _MICRO_BATCH):
        args.open.add("micro_batch_size")
        args.find("unknown", "micro_batch_size does not stand in the file",
                  legal=("give --micro-batch",))  # fmt: skip
    args.flag("disable_bias_linear")
    _unpriced_values(args)
    args.read.update(name for name in args.values if name.startswith("env_"))
    devices = {"gpus": gpus, "gpus_per_node": per_node}
    neutral = None if resolved else NEUTRAL
    job = args.job("megatron", neutral, shape=shape, layout=layout, seq=seq, facts=facts, **devices)
    return replace(job, unmodelled=_several_meshes(args))


def _several_meshes(args: Arguments) -> tuple[Unmodelled, ...]:
    """The part that no price counts if the meshes of a pipeline differ in tp, cp, ep or dp."""
    text = args.values.get("hetero_process_meshes", "") if args.flag("enable_hetero") else ""
    sizes = re.findall(r"\d{1,4}", text)
    meshes = {tuple(sizes[at : at + 4]) for at in range(0, len(sizes) - 4, 5)}
    what = "stages with other degrees of tp, cp, ep or dp than the first"
    option = f"hetero_process_meshes={text[:60]}"
    return (Unmodelled(what, option, place="instead"),) if len(meshes) > 1 else ()


def _layout(args: Arguments, shape: ModelShape) -> Layout:
    tp = args.whole("tensor_model_parallel_size") or 1
    pp = args.whole("pipeline_model_parallel_size") or 1
    if args.flag("enable_hetero"):
        return _layout_of_meshes(args)
    vpp, stages = _stages(args, shape, pp)
    recompute, recompute_layers = _recompute(args)
    dp = args.whole("data_parallel_size")
    cp = args.whole("context_parallel_size", "ds_sequence_parallel_size") or 1
    group = (
        args.whole(
            "microbatch_group_size_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage"
        )
        or 0
    )
    schedule = "none" if pp == 1 else "interleaved_1f1b" if vpp > 1 else "1f1b"
    sequence_parallel = bool(args.flag("sequence_parallel")) and tp > 1
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=dp,
        ep=args.whole("expert_model_parallel_size", "moe_expert_parallel_size") or 1,
        etp=args.whole("expert_tensor_parallel_size"),
        vpp=vpp,
        stages=stages,
        micro_batch=args.whole(*_MICRO_BATCH) or 1,
        global_batch=args.whole("global_batch_size"),
        accumulation=args.whole("gradient_accumulation_steps") or 1
        if "global_batch_size" not in args.values
        else 1,
        zero=_zero(args),
        copies=args.whole("num_distributed_optimizer_instances") or 1,
        recompute=recompute,
        recompute_layers=recompute_layers,
        schedule=schedule,
        sequence_parallel=sequence_parallel,
        offload=_offload(args),
        order="dp-pp" if args.flag("use_tp_pp_dp_mapping") else "",
        group=0 if group == pp else group,
    )


def _layout_of_meshes(args: Arguments) -> Layout:
    """The layout of FlagScale's pipeline over several meshes of devices, each with its own tp, cp,
    ep, dp and pp.
    """
    split = re.findall(r"\d{1,4}", args.text("hetero_pipeline_layer_split") or "")
    sizes = [int(n) for n in re.findall(r"\d{1,4}", args.text("hetero_process_meshes") or "")]
    meshes = [sizes[at : at + 5] for at in range(0, len(sizes) - 4, 5)]
    kinds = set((args.text("hetero_device_types") or "").split())
    args.text("hetero_current_device_type")
    others = {name: value for name, value in args.values.items() if not name.startswith(("enable_hetero", "hetero_"))}  # fmt: skip
    plain = Arguments(others, args.findings)
    if not meshes:
        args.find("unknown", "hetero_process_meshes does not say the meshes of the pipeline")
        meshes = [[1, 1, 1, 1, 1]]
    tp, cp, ep, dp, _ = meshes[0]
    pp = sum(mesh[4] for mesh in meshes)
    plain.values |= {
        "tensor_model_parallel_size": str(tp), "context_parallel_size": str(cp),
        "expert_model_parallel_size": str(ep), "pipeline_model_parallel_size": str(pp), "data_parallel_size": str(dp),
    }  # fmt: skip
    by = _layout(plain, megatron_shape(plain, False))
    args.read |= plain.read
    args.open |= plain.open
    if len(kinds) > 1:
        args.find(
            "note",
            f"the stages lie on {', '.join(sorted(kinds))}: priced on the devices of --cluster",
        )
    stages = tuple(map(int, split)) if len(split) == pp else ()
    return replace(by, stages=stages)


def _stages(args: Arguments, shape: ModelShape, pp: int) -> tuple[int, tuple[int, ...]]:
    """(stages of a rank, layers of each stage or () if dealt evenly). A layout counts alone."""
    layout = args.text("pipeline_model_parallel_layout")
    virtual = args.whole(
        "num_virtual_stages_per_pipeline_rank", "virtual_pipeline_model_parallel_size"
    )
    each = args.whole("num_layers_per_virtual_pipeline_stage")
    first = args.whole("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
    last = args.whole("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")
    both = "embedding" in (args.text("pp_partition_method") or "")  # of Megatron-DeepSpeed
    embedding = both or bool(args.flag("account_for_embedding_in_pipeline_split"))
    loss = both or bool(args.flag("account_for_loss_in_pipeline_split"))
    if layout:
        stages = layout_stages(layout.strip("'\""))
        vpp = max(1, len(stages) // pp)
        if virtual is not None and virtual != vpp:
            args.find("contradiction", f"the layout has {len(stages)} stages, {vpp} for each of {pp} ranks; the {virtual} virtual stages "
                      "beside it do not count")  # fmt: skip
        return vpp, tuple(stage.count("t") for stage in stages)
    counted = shape.layers + embedding + loss
    vpp = virtual or (max(1, counted // pp // each) if each and pp > 1 else 1)
    if pp == 1:
        return virtual or 1, ()
    if first is not None or last is not None:
        return vpp, ended_stages(shape.layers, pp, vpp, first, last)
    if embedding or loss:
        return vpp, counted_stages(shape.layers, pp * vpp, embedding, loss)
    return vpp, ()


def megatron_stages(job: Job) -> tuple[int, tuple[int, ...]]:
    """As `_stages`, for a job whose layers are known now."""
    return _stages(Arguments(job.flags), job.shape, job.layout.pp)


def _zero(args: Arguments) -> int:
    """The ZeRO stage."""
    fsdp = args.flag("use_megatron_fsdp", "use_custom_fsdp")
    strategy = args.text("data_parallel_sharding_strategy")
    if fsdp:
        if strategy not in (None, *STRATEGIES):
            args.find(
                "refused",
                f"data_parallel_sharding_strategy {strategy} is not known",
                legal=tuple(STRATEGIES),
            )
        args.flag("use_distributed_optimizer")
        return STRATEGIES.get(strategy or "no_shard", 0)
    if args.flag("deepspeed") and "zero_stage" in args.values:
        stage = args.whole("zero_stage", least=0) or 0
        if not stage and args.flag("bf16"):
            args.find("note", "DeepSpeed's optimizer for bf16 shares out its state as ZeRO-1 does")
        return stage or int(bool(args.flag("bf16")))
    if args.flag("fsdp"):  # of NeMo
        kind = args.text("fsdp_sharding_strategy") or "full"
        if kind == "hybrid":
            args.find("note", "hybrid sharding shards within a node: priced as over all devices")
        args.text("fsdp_sharded_checkpoint")
        return 2 if kind == "grad" else 3
    if args.flag("use_torch_fsdp2"):
        return 2 if args.flag("torch_fsdp2_no_reshard_after_forward") else 3
    return int(bool(args.flag("use_distributed_optimizer")))


def _recompute(args: Arguments) -> tuple[str, int]:
    """(recompute mode, layers of each stage that are computed again; 0 for all)."""
    granularity = args.text("recompute_granularity", "activations_checkpoint_granularity")
    if granularity is None and args.flag("recompute_activations"):
        granularity = "selective"
    method = args.text("recompute_method", "activations_checkpoint_method")
    layers = args.whole("recompute_num_layers", "activations_checkpoint_num_layers", least=0)
    # before 2022 a method was enough; Megatron-DeepSpeed has a switch
    earlier = method and "recompute_method" not in args.values
    if granularity is None and (earlier or args.flag("checkpoint_activations")):
        granularity = "full"
    args.flag("deepspeed_activation_checkpointing")
    if granularity == "full" and method == "block" and layers == 0:
        return "none", 0
    modules = (args.text("recompute_modules") or "").replace(",", " ").split()
    if granularity == "selective":
        more = [name for name in modules if name.strip("'\"[]") not in ("core_attn", "")]
        if more:
            args.find(
                "note",
                f"recompute_modules {' '.join(more)}: priced as if only core_attn were computed again",
            )
        return "selective", 0
    if granularity == "full":
        if method == "block" and layers:
            return "full", layers
        if layers and layers > 1:
            args.find(
                "note",
                f"recompute_num_layers {layers} with method uniform keeps the input of every {layers}th layer; priced as if of each",
            )
        return "full", 0
    if method or layers:
        args.find(
            "contradiction",
            "recompute_method or recompute_num_layers stand without recompute_granularity: nothing is computed again",
            legal=("--recompute-granularity full",),
        )
    return "none", 0


def _offload(args: Arguments) -> str:
    fraction = args.number("optimizer_offload_fraction")
    if args.flag("offload_param"):  # of DeepSpeed
        return "parameters"
    if not args.flag("optimizer_cpu_offload", "cpu_optimizer"):
        return "none"
    if fraction is not None and fraction < 1:
        args.find(
            "note",
            f"optimizer_offload_fraction {fraction:g}: priced as if all of the optimizer's state were in host memory",
        )
    return "optimizer"


def _facts(args: Arguments, layout: Layout) -> Facts:
    bf16, fp16 = args.flag("bf16"), args.flag("fp16")
    fp8 = args.text("fp8_format", "fp8") or ""
    fp8 = "" if is_false(fp8) else fp8
    if args.values.keys().isdisjoint(("fp8_format", "fp8")):  # of 2023
        fp8 = "hybrid" if args.flag("fp8_hybrid") or args.flag("fp8_e4m3") else ""
    recipe = args.text("fp8_recipe")
    narrow = args.flag("grad_reduce_in_bf16")
    # Megatron-LM accumulates in fp32 under bf16 also where its option is off
    wide = args.flag("grad_reduce_in_fp32")
    wide = args.flag("accumulate_allreduce_grads_in_fp32") or wide
    grads = "bf16" if narrow or wide is False else "fp32" if wide or narrow is False else None
    fusion = (
        args.flag("cross_entropy_loss_fusion") and args.text("cross_entropy_fusion_impl") == "te"
    )
    dropout = args.number("hidden_dropout")
    accumulates = args.flag("no_gradient_accumulation_fusion")
    if args.flag("gradient_accumulation_fusion") is False:
        accumulates = True
    overlaps = args.flag("overlap_grad_reduce")
    args.flag("overlap_param_gather")
    off = args.flag("no_overlap_p2p_communication")
    on = args.flag("overlap_p2p_comm")
    optimizer = (args.text("optimizer") or "").removeprefix("dist_") or None
    if optimizer not in (None, "adam", "adamw", "sgd", "muon"):
        args.find("note", f"optimizer {optimizer}: priced as Adam")
    return Facts(
        precision="bf16"
        if bf16 or (bf16 is None and fp16 is None and fp8)
        else "fp16"
        if fp16
        else "fp32",
        fp8=FP8_RECIPES.get(recipe or "delayed", "delayed") if fp8 else "",
        grads=grads,
        dp_overlap=bool(overlaps),
        tp_overlap=bool(args.flag("tp_comm_overlap", "ub_tp_comm_overlap")),
        pp_overlap=layout.vpp > 1 and not off and on is not False,
        optimizer=optimizer if optimizer in ("adam", "sgd", "muon") else None,
        dropout=0.1 if dropout is None else dropout,
        fused_loss=bool(fusion),
        fused_accumulation=not accumulates,
    )


def _devices(args: Arguments) -> tuple[int | None, int | None]:
    """(devices, devices of a node), as far as the launcher says them."""
    world = args.whole("world_size")
    per_node = args.whole(
        "nproc_per_node", "gpus_per_node", "devices", "n_gpus_per_node", "num_gpus"
    )
    nodes = args.text("nnodes", "num_nodes")
    if nodes and (elastic := re.fullmatch(r"(\d+):(\d+)", nodes)):
        args.find("note", f"nnodes {nodes} is elastic: priced for {elastic[2]} nodes")
        nodes = elastic[2]
    count = int(nodes) if nodes and re.fullmatch(r"\d{1,7}", nodes) else None
    if world is None and per_node and count:
        world = per_node * count
    return world, per_node


def _unpriced_values(args: Arguments) -> None:
    """Marks options as read whose default value changes nothing."""
    names = (
        "cp_comm_type moe_token_dispatcher_type moe_grouped_gemm moe_permute_fusion moe_router_topk moe_router_load_balancing_type "
        "use_precision_aware_optimizer "
        "cross_entropy_fusion_impl ckpt_format recompute_activations m max_position_embeddings use_distributed_optimizer"
    )
    for name in names.split():
        args.text(name)
