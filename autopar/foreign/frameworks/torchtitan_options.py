"""The job that torchtitan's options say, by name."""

from __future__ import annotations

import ast
import re

from autopar.foreign.frameworks.arguments import Arguments
from autopar.foreign.frameworks.torchtitan_models import FLAVORS
from autopar.foreign.job import Facts, Job
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

PARALLELISM, TRAINING = "parallelism.", "training."
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
FLAVOR = re.compile(r"([a-z0-9]+?)_(\d+b)(_.*)?")
"""The name of a configuration of the registry, with that of its model and flavor."""
WRITTEN = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
SCHEDULE_NAMES = {name.lower(): schedule for schedule, name in WRITTEN.items()}
_NEUTRAL = re.compile(
    r"(job|profiling|profiler|metrics|lr_scheduler|checkpoint|comm|validation|validator|memory_estimation|debug|"
    r"dataloader|override)\..*|experimental\.custom_\w+|fault_tolerance\.(?!enable)\w+|optimizer\.(lr|eps|weight_decay|beta.*|name|implementation)|training\.(steps|max_norm|dataset.*|gc_.*|dataloader.*|"
    r"mixed_precision_reduce)|model\.(hf_assets_path|tokenizer_path|print_after_conversion)|compile\.(components|backend)|"
    r"parallelism\.(context_parallel_(load_balancer|rotate_method)|spmd_backend|pipeline_parallel_schedule_csv)|module|config|"
    r"activation_checkpoint\.(per_op_.*|preserve_rng.*|determinism.*|debug|early_stop)|nproc.*|nnodes|rdzv.*|local_ranks.*|role|tee|hf_assets_path|m|"
    r"quantize\.(grouped_mm|linear)\..*|model\.norm_type|training\.(warmup_steps|(shuffle_)?seed)|node_rank|max_restarts|master_(addr|port)|float8\.enable_float8_linear"
)


_ANYWAY = tuple(
    f"{PARALLELISM}{name}"
    for name in (
        "pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers", "enable_sequence_parallel",
        "pipeline_parallel_schedule", "num_pp_microbatches",
    )
)  # fmt: skip
"""Options that need no price where they do not count."""


def torchtitan_job(args: Arguments) -> Job:
    """The job that options say."""
    shape = _shape(args)
    layout, seq = _layout(args, shape)
    converters = (args.text("model.converters") or "").lower()
    fp8 = _fp8(args)
    facts = Facts(
        precision="fp32" if args.text(f"{TRAINING}mixed_precision_param") == "float32" else "bf16",
        fp8=fp8 if "float8" in converters else "",
        compile=bool(args.flag("compile.enable")),
        tp_overlap=bool(
            args.flag(
                f"{PARALLELISM}enable_async_tensor_parallel", "compile.enable_async_tensor_parallel"
            )
        ),
        dropout=0.0,
    )
    args.flag(f"{TRAINING}disable_cuda_graphs")
    for name in _ANYWAY:
        args.text(name)
    for name, text in (
        (f"{TRAINING}num_tokens_per_train_step", "-1"),
        (f"{TRAINING}dtype", "float32"),
    ):
        args.read |= {name} if args.values.get(name) == text else set()
    per_node, nodes = args.whole("nproc_per_node"), args.whole("nnodes")
    gpus = per_node * nodes if per_node and nodes else None
    devices = {"gpus": gpus, "gpus_per_node": per_node}
    return args.job(
        "torchtitan", _NEUTRAL, shape=shape, layout=layout, seq=seq, facts=facts, **devices
    )


def _fp8(args: Arguments) -> str:
    recipe = args.text("quantize.linear.float8.recipe_name", "float8.recipe_name") or "tensorwise"
    for name in (
        "enable_fsdp_float8_all_gather",
        "precompute_float8_dynamic_scale_for_fsdp",
        "filter_fqns",
    ):
        args.text(f"quantize.linear.float8.{name}")
    return "rowwise" if recipe.startswith("rowwise") else "tensorwise"


def _shape(args: Arguments) -> ModelShape:
    name, flavor = args.text("model.name", "module") or "", args.text("model.flavor") or ""
    config = args.text("config") or ""
    if not flavor and (found := FLAVOR.fullmatch(config)):
        name, flavor = found[1], found[2]
    shape = FLAVORS.get((name.lower(), flavor.lower()))
    if shape is None and (name or flavor):
        args.find("note", f"the dimensions of {name} {flavor} are not known here: give --model")
    return shape or ModelShape()


def _layout(args: Arguments, shape: ModelShape) -> tuple[Layout, int]:
    pp = args.whole(f"{PARALLELISM}pipeline_parallel_degree") or 1
    tp, cp = (
        args.whole(f"{PARALLELISM}tensor_parallel_degree") or 1,
        args.whole(f"{PARALLELISM}context_parallel_degree") or 1,
    )
    replicas = args.whole(f"{PARALLELISM}data_parallel_replicate_degree") or 1
    text = args.text(f"{PARALLELISM}data_parallel_shard_degree") or "-1"
    shard = int(text) if re.fullmatch(r"\d{1,8}", text) and int(text) else None
    args.text(MODE)
    ac = args.values.get(MODE, "selective").lower()
    option = args.text(OPTION) or "op"
    every = (
        "op"
        if option == "op"
        else f"every-{option}"
        if option.isdigit() and int(option) > 1
        else "full"
    )
    recompute = {"none": "none", "full": "full"}.get(ac, every)
    if ac == "memory_budget":
        args.find("note", "activation_checkpoint.mode memory_budget: priced as selective by op")
        recompute = "op"
    schedule = SCHEDULE_NAMES.get(
        re.sub(
            r"[ _-]", "", (args.text(f"{PARALLELISM}pipeline_parallel_schedule") or "1F1B").lower()
        )
    )
    if schedule is None:
        args.find("note", "this pipeline schedule is not priced: priced as interleaved 1F1B")
        schedule = "interleaved_1f1b"
    reshard = args.text(f"{PARALLELISM}fsdp_reshard_after_forward") or "default"
    sharded = shard != 1 or cp > 1
    zero = (2 if reshard == "never" or (reshard == "default" and pp > 1) else 3) if sharded else 0
    vpp, stages = _stages(args, shape, pp, schedule) if pp > 1 else (1, ())
    micro_batch, batch, accumulation, seq = _batches(args, pp)
    sequence_parallel = tp > 1 and args.flag(f"{PARALLELISM}enable_sequence_parallel") is not False
    ep = args.whole(f"{PARALLELISM}expert_parallel_degree") or 1
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=replicas * shard if shard else None,
        ep=ep,
        etp=args.whole(f"{PARALLELISM}expert_tensor_parallel_degree") or (1 if ep > 1 else None),
        vpp=vpp,
        stages=stages,
        micro_batch=micro_batch,
        global_batch=batch,
        accumulation=accumulation,
        zero=zero,
        copies=replicas if sharded else 1,
        recompute=recompute,
        schedule=schedule if pp > 1 else "none",
        sequence_parallel=sequence_parallel,
        offload="parameters" if args.flag(f"{TRAINING}enable_cpu_offload") else "none",
    ), seq


def _batches(args: Arguments, pp: int) -> tuple[int, int | None, int, int]:
    """(micro-batch, global batch or None, micro-batches of a rank without one, tokens of a
    sequence), from the names of 0.2 and 0.3 or from those that count tokens.
    """
    seq = args.whole(f"{TRAINING}seq_len", f"{TRAINING}max_context_length") or 2048
    tokens = args.whole(f"{TRAINING}num_tokens_per_microbatch_per_dp_rank")
    if tokens is not None:
        step = (
            args.whole(f"{TRAINING}num_tokens_per_train_step")
            if args.values.get(f"{TRAINING}num_tokens_per_train_step") != "-1"
            else None
        )
        number = args.whole(f"{PARALLELISM}num_pp_microbatches") or 1
        return max(1, tokens // seq), step // seq if step else None, number if pp > 1 else 1, seq
    local = args.whole(f"{TRAINING}local_batch_size", f"{TRAINING}batch_size") or 8
    text = args.values.get(f"{TRAINING}global_batch_size", "-1")
    batch = args.whole(f"{TRAINING}global_batch_size") if text != "-1" else None
    args.read.add(f"{TRAINING}global_batch_size")
    number = args.whole(f"{PARALLELISM}pipeline_parallel_microbatches") or 0
    inside = args.whole(f"{PARALLELISM}pipeline_parallel_microbatch_size") or 1
    inside = max(1, local // number) if number else inside
    if pp == 1:
        return local, batch, 1, seq
    return inside, batch, 1 if batch else max(1, local // inside), seq


def split_layers(layers: int, stages: int, first: int, last: int) -> tuple[int, ...]:
    """The layers of each stage: as if embedding and head were `first` and `last` layers, with one
    more for the first stages if they do not divide. () if a stage would be left without.
    """
    each, more = divmod(layers + first + last, stages)
    sizes = [each + (number < more) for number in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return tuple(sizes) if min(sizes) >= 0 and max(first, last) <= each else ()


def _stages(
    args: Arguments, shape: ModelShape, pp: int, schedule: str
) -> tuple[int, tuple[int, ...]]:
    parts = args.text(f"{PARALLELISM}module_fqns_per_model_part")
    if parts:
        try:
            data = ast.literal_eval(parts)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            data = [part.split(",") for part in parts.split()] if "[" not in parts else None
        if isinstance(data, list) and all(isinstance(part, list) for part in data):
            sizes = tuple(sum(str(name).startswith("layers.") for name in part) for part in data)
            return max(1, len(sizes) // pp), sizes
        args.find("unknown", "module_fqns_per_model_part is no list of lists of names")
    first = args.whole(f"{PARALLELISM}pipeline_parallel_first_stage_less_layers", least=0)
    last = args.whole(f"{PARALLELISM}pipeline_parallel_last_stage_less_layers", least=0)
    ends = (1 if first is None else first, 1 if last is None else last)
    each = args.whole(f"{PARALLELISM}pipeline_parallel_layers_per_stage")
    single = schedule in ("1f1b", "gpipe")
    count = (
        -(-(shape.layers + sum(ends)) // each)
        if each and shape.layers
        else pp * (1 if single else 2)
    )
    sizes = split_layers(shape.layers, count, *ends) if shape.layers else ()
    even = len(set(sizes)) == 1
    return max(1, count // pp), () if even else sizes


def torchtitan_stages(job: Job) -> tuple[int, tuple[int, ...]]:
    """As `_stages`, for a job whose layers are known now."""
    return _stages(Arguments(job.flags), job.shape, job.layout.pp, job.layout.schedule)
