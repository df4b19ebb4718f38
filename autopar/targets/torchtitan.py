"""torchtitan: TOML files of 0.2 and earlier, flags, and functions of its registry in Python."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from autopar.errors import AutoparError
from autopar.request.restriction import Restriction
from autopar.targets.arguments import Arguments, flat_texts, options_of
from autopar.targets.job import Exported, Facts, Finding, Job, Layout, ModelShape
from autopar.targets.megatron_layout import even_stages
from autopar.targets.python_settings import settings_of
from autopar.targets.shell import read_script
from autopar.targets.target import (
    NotExpressible,
    Source,
    Target,
    divisors_near,
    head_findings,
    heads_divide,
    multiples_near,
    torchrun,
)

P, T = "parallelism.", "training."
MODE, OPTION = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
EARLIER = {
    "training.data_parallel_replicate_degree": f"{P}data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": f"{P}data_parallel_shard_degree",
    "training.data_parallel_degree": f"{P}data_parallel_shard_degree",
    "training.tensor_parallel_degree": f"{P}tensor_parallel_degree",
    "training.compile": "compile.enable",
    "experimental.pipeline_parallel_degree": f"{P}pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": f"{P}pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": f"{P}pipeline_parallel_microbatches",
    "experimental.context_parallel_degree": f"{P}context_parallel_degree",
    "experimental.enable_async_tensor_parallel": f"{P}enable_async_tensor_parallel",
}
"""Today's names of options of 2024."""
FLAVORS: dict[tuple[str, str], ModelShape] = {
    ("llama3", "8b"): ModelShape(32, 4096, 32, 8, 128, 14336, 128256, gated=True),
    ("llama3", "70b"): ModelShape(80, 8192, 64, 8, 128, 28672, 128256, gated=True),
    ("llama3", "405b"): ModelShape(126, 16384, 128, 8, 128, 53248, 128256, gated=True),
    ("llama2", "7b"): ModelShape(32, 4096, 32, 32, 128, 11008, 32000, gated=True),
    ("llama2", "13b"): ModelShape(40, 5120, 40, 40, 128, 13824, 32000, gated=True),
    ("llama2", "70b"): ModelShape(80, 8192, 64, 8, 128, 28672, 32000, gated=True),
    ("qwen3", "0.6b"): ModelShape(28, 1024, 16, 8, 128, 3072, 151936, gated=True, tied=True),
    ("qwen3", "1.7b"): ModelShape(28, 2048, 16, 8, 128, 6144, 151936, gated=True, tied=True),
    ("qwen3", "8b"): ModelShape(36, 4096, 32, 8, 128, 12288, 151936, gated=True),
    ("qwen3", "14b"): ModelShape(40, 5120, 40, 8, 128, 17408, 151936, gated=True),
    ("qwen3", "32b"): ModelShape(64, 5120, 64, 8, 128, 25600, 151936, gated=True),
    ("qwen3", "30b-a3b"): ModelShape(
        48, 2048, 32, 4, 128, 6144, 151936, experts=128, top_k=8, moe_ffn=768, gated=True
    ),
    ("deepseek_v3", "16b"): ModelShape(
        27,
        2048,
        16,
        16,
        128,
        10944,
        102400,
        experts=64,
        top_k=6,
        moe_ffn=1408,
        shared_ffn=2816,
        first_dense=1,
        gated=True,
        latent=(0, 512, 128, 64, 128),
    ),
    ("deepseek_v3", "671b"): ModelShape(
        61,
        7168,
        128,
        128,
        128,
        18432,
        129280,
        experts=256,
        top_k=8,
        moe_ffn=2048,
        shared_ffn=2048,
        first_dense=3,
        gated=True,
        latent=(1536, 512, 128, 64, 128),
    ),
}
"""Dimensions by model and flavor: those of the models' published config.json files."""
WRITTEN = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
}
_POLICIES = {"none": "none", "full": "full", "op": "selective"}
SCHEDULES = {name.lower(): schedule for schedule, name in WRITTEN.items()}
_V_SCHEDULES = "ZBVZeroBubble|DualPipeV"
"""Schedules in which the first and the last stage lie on one rank."""
_NEUTRAL = re.compile(
    r"(job|profiling|profiler|metrics|lr_scheduler|checkpoint|comm|validation|validator|memory_estimation|fault_tolerance|experimental|debug|"
    r"dataloader|override)\..*|optimizer\.(lr|eps|weight_decay|beta.*|name|implementation)|training\.(steps|max_norm|dataset.*|gc_.*|dataloader.*|"
    r"mixed_precision_reduce)|model\.(hf_assets_path|tokenizer_path|print_after_conversion)|compile\.(components|backend)|"
    r"parallelism\.(context_parallel_(load_balancer|rotate_method)|spmd_backend|pipeline_parallel_schedule_csv)|module|config|"
    r"activation_checkpoint\.(per_op_.*|preserve_rng.*|determinism.*|debug|early_stop)|nproc.*|nnodes|rdzv.*|local_ranks.*|role|tee|hf_assets_path|m|"
    r"quantize\.(grouped_mm|linear)\..*|model\.norm_type|training\.warmup_steps|float8\.enable_float8_linear"
)


def _reads(source: Source) -> bool:
    text = source.text
    return (
        re.search(
            r"^\[parallelism\]|--parallelism\.|^\s*parallelism\s*=\s*ParallelismConfig\(",
            text,
            re.MULTILINE,
        )
        is not None
        or "data_parallel_shard_degree" in text
        or "tensor_parallel_degree" in text
    )


def read(source: Source) -> Job:
    """The job of a TOML file, of flags in a script, or of a function in Python, which is parsed and
    never run. Raises AutoparError if there is none.
    """
    name, findings = source.name.lower(), tuple[Finding, ...]()
    if name.endswith(".toml"):
        values = {OPTION: "2"} | _of_toml(source)  # the default of 0.2
    elif name.endswith(".py"):
        values, findings = _of_python(source)
    else:
        values, findings = _of_script(source)
    if not any(key.startswith((P, T)) for key in values):
        raise AutoparError(
            f"no job: {source.name} sets nothing of parallelism or training of torchtitan"
        )
    args = Arguments(values)
    args.findings += findings
    return _job(args)


def _of_toml(source: Source) -> dict[str, str]:
    try:
        data: Mapping[str, Any] = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        raise AutoparError(f"{source.name} is no TOML: {error}") from None
    found = flat_texts(data)
    if pp := found.get("experimental.pipeline_parallel_degree"):  # a micro-batch for each rank
        found.setdefault("experimental.pipeline_parallel_microbatches", pp)
    return {EARLIER.get(name, name): value for name, value in found.items()}


def _of_script(source: Source) -> tuple[dict[str, str], tuple[Finding, ...]]:
    script = read_script(source.text, source.read_file)
    found, findings = dict[str, str](), list[Finding]()
    for words, _ in script.commands:
        policies = [word for word in words if word.startswith("activation-checkpoint:")]
        found |= options_of(word for word in words if word not in policies)
        found |= {MODE: policies[-1].partition(":")[2].replace("-", "_")} if policies else {}
    for name in [name for name in found if ".no_" in name]:
        found[name.replace(".no_", ".", 1)] = "False"
        del found[name]
    path = found.pop("job.config_file", "") or script.variables.get("CONFIG_FILE", "")
    if isinstance(path, str) and path.endswith(".toml"):
        if text := source.read_file(path):
            found = _of_toml(Source(text, path)) | found
        else:
            what = f"values stand in {path}, which is not beside the file: the defaults are read"
            findings.append(Finding("unknown", what, legal=(f"put {path} beside it",)))
    if "module" not in found:  # before 0.3
        found.setdefault(OPTION, "2")
    for variable in ("NGPU", "CONFIG", "MODULE"):
        if variable in script.variables:
            found.setdefault(
                {"NGPU": "nproc_per_node"}.get(variable, variable.lower()), script.text_of(variable)
            )
    return found, tuple(findings)


_SECTIONS = {
    "ParallelismConfig": P,
    "parallelism": P,
    "TrainingConfig": T,
    "training": T,
    "CompileConfig": "compile.",
    "compile": "compile.",
}
"""Where the settings of a class, or of a part of the configuration, belong."""
_POLICY_CLASSES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def _of_python(source: Source) -> tuple[dict[str, str], tuple[Finding, ...]]:
    def fits(values: Mapping[str, str]) -> bool:
        return not {"ParallelismConfig", "TrainingConfig"}.isdisjoint(values)

    settings = settings_of(source.text, source.name, source.function, fits)
    found: dict[str, str] = {}
    for path, value in settings.values.items():
        section, _, name = path.rpartition(".")
        if section in _SECTIONS:
            found[_SECTIONS[section] + name] = value
        found |= {MODE: _POLICY_CLASSES[path]} if path in _POLICY_CLASSES else {}
    found["model.flavor"] = settings.values.get("model_registry.0", "")
    found["model.name"] = re.sub(r"_(\d|debug).*", "", settings.function)
    if "Float8LinearConverter" in settings.values:
        found["model.converters"] = "float8"
    return found, settings.findings


def _job(args: Arguments) -> Job:
    shape = _shape(args)
    layout, seq = _layout(args, shape)
    converters = (args.text("model.converters") or "").lower()
    fp8 = _fp8(args)
    facts = Facts(
        precision="fp32" if args.text(f"{T}mixed_precision_param") == "float32" else "bf16",
        fp8=fp8 if "float8" in converters else "",
        compile=bool(args.flag("compile.enable")),
        tp_overlap=bool(
            args.flag(f"{P}enable_async_tensor_parallel", "compile.enable_async_tensor_parallel")
        ),
        dropout=0.0,
    )
    args.flag(f"{T}disable_cuda_graphs")
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
    if not flavor and (found := re.fullmatch(r"([a-z0-9]+?)_(\d+b)(_.*)?", config)):
        name, flavor = found[1], found[2]
    shape = FLAVORS.get((name.lower(), flavor.lower()))
    if shape is None and (name or flavor):
        args.find("note", f"the dimensions of {name} {flavor} are not known here: give --model")
    return shape or ModelShape()


def _layout(args: Arguments, shape: ModelShape) -> tuple[Layout, int]:
    pp = args.whole(f"{P}pipeline_parallel_degree") or 1
    tp, cp = (
        args.whole(f"{P}tensor_parallel_degree") or 1,
        args.whole(f"{P}context_parallel_degree") or 1,
    )
    replicas = args.whole(f"{P}data_parallel_replicate_degree") or 1
    text = args.text(f"{P}data_parallel_shard_degree") or "-1"
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
    schedule = SCHEDULES.get(
        re.sub(r"[ _-]", "", (args.text(f"{P}pipeline_parallel_schedule") or "1F1B").lower())
    )
    if schedule is None:
        args.find("note", "this pipeline schedule is not priced: priced as interleaved 1F1B")
        schedule = "interleaved_1f1b"
    reshard = args.text(f"{P}fsdp_reshard_after_forward") or "default"
    sharded = shard != 1 or cp > 1
    zero = (2 if reshard == "never" or (reshard == "default" and pp > 1) else 3) if sharded else 0
    vpp, stages = _stages(args, shape, pp, schedule) if pp > 1 else (1, ())
    micro_batch, batch, accumulation, seq = _batches(args, pp)
    sequence_parallel = tp > 1 and args.flag(f"{P}enable_sequence_parallel") is not False
    return Layout(
        tp=tp,
        pp=pp,
        cp=cp,
        dp=replicas * shard if shard else None,
        ep=args.whole(f"{P}expert_parallel_degree") or 1,
        etp=args.whole(f"{P}expert_tensor_parallel_degree"),
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
        offload="parameters" if args.flag(f"{T}enable_cpu_offload") else "none",
    ), seq


def _batches(args: Arguments, pp: int) -> tuple[int, int | None, int, int]:
    """(micro-batch, global batch or None, micro-batches of a rank without one, tokens of a
    sequence), from the names of 0.2 and 0.3 or from those that count tokens.
    """
    seq = args.whole(f"{T}seq_len", f"{T}max_context_length") or 2048
    tokens = args.whole(f"{T}num_tokens_per_microbatch_per_dp_rank")
    if tokens is not None:
        step = (
            args.whole(f"{T}num_tokens_per_train_step")
            if args.values.get(f"{T}num_tokens_per_train_step") != "-1"
            else None
        )
        number = args.whole(f"{P}num_pp_microbatches") or 1
        return max(1, tokens // seq), step // seq if step else None, number if pp > 1 else 1, seq
    local = args.whole(f"{T}local_batch_size", f"{T}batch_size") or 8
    text = args.values.get(f"{T}global_batch_size", "-1")
    batch = args.whole(f"{T}global_batch_size") if text != "-1" else None
    args.read.add(f"{T}global_batch_size")
    number = args.whole(f"{P}pipeline_parallel_microbatches") or 0
    inside = args.whole(f"{P}pipeline_parallel_microbatch_size") or 1
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
    parts = args.text(f"{P}module_fqns_per_model_part")
    if parts:
        try:
            data = ast.literal_eval(parts)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            data = [part.split(",") for part in parts.split()] if "[" not in parts else None
        if isinstance(data, list) and all(isinstance(part, list) for part in data):
            sizes = tuple(sum(str(name).startswith("layers.") for name in part) for part in data)
            return max(1, len(sizes) // pp), sizes
        args.find("unknown", "module_fqns_per_model_part is no list of lists of names")
    first = args.whole(f"{P}pipeline_parallel_first_stage_less_layers", least=0)
    last = args.whole(f"{P}pipeline_parallel_last_stage_less_layers", least=0)
    ends = (1 if first is None else first, 1 if last is None else last)
    each = args.whole(f"{P}pipeline_parallel_layers_per_stage")
    single = schedule in ("1f1b", "gpipe")
    count = (
        -(-(shape.layers + sum(ends)) // each)
        if each and shape.layers
        else pp * (1 if single else 2)
    )
    sizes = split_layers(shape.layers, count, *ends) if shape.layers else ()
    even = len(set(sizes)) == 1
    return max(1, count // pp), () if even else sizes


def stages_for(job: Job) -> tuple[int, tuple[int, ...]]:
    """As `_stages`, for a job whose layers are known now."""
    return _stages(Arguments(job.flags), job.shape, job.layout.pp, job.layout.schedule)


def refusals(job: Job, gpus: int) -> list[Finding]:
    """What torchtitan refuses at start."""
    by, shape, found = job.layout, job.shape, list[Finding]()

    def refuse(what: str, theirs: str, *legal: str) -> None:
        found.append(Finding("refused", what, theirs, legal))

    fixed = by.tp * by.pp * by.cp
    total = fixed * by.dp_on(gpus)
    if total != gpus:
        legal = (
            [f"--{P}data_parallel_shard_degree {gpus // fixed // by.copies}"]
            if gpus % (fixed * by.copies) == 0
            else []
        )
        legal += (
            []
            if legal
            else [
                f"--{P}tensor_parallel_degree {d}"
                for d in divisors_near(gpus // (by.pp * by.cp) or 1, by.tp)
            ]
        )
        refuse(
            f"replicate x shard x cp x tp x pp = {total}, and there are {gpus} devices",
            "Invalid parallel dims: ... != WORLD_SIZE",
            *legal,
        )
    if job.seq and job.seq % (2 * by.cp * by.tp if by.cp > 1 else by.tp):
        unit = 2 * by.cp * by.tp if by.cp > 1 else by.tp
        refuse(f"{job.seq} tokens are no multiple of {unit}", "seq_len must be divisible by tp and 2 x cp",
               *(f"--{T}seq_len {n}" for n in multiples_near(unit, job.seq)))  # fmt: skip
    words = "n_heads must be divisible by tensor_parallel_degree"
    found += head_findings(job, words, f"--{P}tensor_parallel_degree")
    rows = by.micro_batch * by.dp_on(gpus)
    if by.batch_on(gpus) % rows:
        refuse(f"global batch {by.batch_on(gpus)} is no multiple of {rows}",
               "global batch size must be multiple of local batch size times data-parallel degree",
               *(f"--{T}global_batch_size {n}" for n in multiples_near(rows, by.batch_on(gpus))))  # fmt: skip
    region = by.dp_on(gpus) // by.copies * by.cp * by.tp
    if by.ep > 1 and region % by.ep:
        refuse(f"ep={by.ep} does not divide dp_shard x cp x tp = {region}", "expert_parallel_degree must divide dp_shard * cp * tp",
               *(f"--{P}expert_parallel_degree {d}" for d in divisors_near(region, by.ep)))  # fmt: skip
    if by.ep > 1 and shape.experts and shape.experts % by.ep:
        refuse(f"ep={by.ep} does not divide {shape.experts} experts", "num_experts must be divisible by expert_parallel_degree",
               *(f"--{P}expert_parallel_degree {d}" for d in divisors_near(shape.experts, by.ep)))  # fmt: skip
    if by.pp > 1:
        found += _refusals_of_pipeline(job)
    return [*found, *_refusals_of_config(job)]


def _refusals_of_pipeline(job: Job) -> Iterator[Finding]:
    """What torchtitan refuses while it cuts a model into stages."""
    by, schedule = job.layout, job.flags.get(f"{P}pipeline_parallel_schedule", "")

    def refused(what: str, theirs: str, *legal: str) -> Finding:
        return Finding("refused", what, theirs, legal)

    if by.stages and len(by.stages) % by.pp:
        yield refused(f"{len(by.stages)} stages are not divisible by pp={by.pp}",
               "Number of virtual stages must be divisible by pipeline parallel size")  # fmt: skip
    if by.vpp == 1 and by.schedule == "interleaved_1f1b":
        yield refused("an interleaved schedule with one stage a rank", "Multi-stage schedule requires at least 2 stages per rank",
               f"--{P}pipeline_parallel_schedule 1F1B")  # fmt: skip
    elif by.vpp > 1 and by.schedule in ("1f1b", "gpipe"):
        yield refused(f"schedule {WRITTEN[by.schedule]} with {by.vpp} stages a rank",
               "Single stage schedule requires exactly 1 stage per rank", f"--{P}pipeline_parallel_schedule Interleaved1F1B")  # fmt: skip
    elif by.vpp != 2 and re.fullmatch(_V_SCHEDULES, schedule, re.I):
        yield refused(f"a V schedule with {by.vpp} stages a rank", "v schedules assume 2 stages per rank",
               f"--{P}pipeline_parallel_schedule Interleaved1F1B")  # fmt: skip


def _refusals_of_config(job: Job) -> Iterator[Finding]:
    """What torchtitan 0.3 refuses while it reads the flags."""
    by, args = job.layout, Arguments(job.flags)
    off = args.flag(f"{T}disable_cuda_graphs")
    if "module" in job.flags and by.pp > 1 and not off:
        yield Finding("refused", f"pp={by.pp} with CUDA graphs", "CUDA graphs do not support pipeline parallelism yet.",
                      (f"--{T}disable_cuda_graphs", f"--{P}pipeline_parallel_degree 1"))  # fmt: skip
    local, size = args.whole(f"{T}local_batch_size"), by.micro_batch
    if by.pp > 1 and local and local % size:
        legal = [f"--{T}local_batch_size {n}" for n in multiples_near(size, local)]
        legal += [f"--{P}pipeline_parallel_microbatch_size {d}" for d in divisors_near(local, size)]
        yield Finding("refused", f"local batch {local} is no multiple of the micro-batch {size} of the pipeline",
                      "must be evenly divisible by parallelism.pipeline_parallel_microbatch_size", tuple(legal))  # fmt: skip
    budget, compiled = args.text(MODE) == "memory_budget", args.flag("compile.enable")
    if budget and not compiled:
        yield Finding("refused", "a memory budget without torch.compile",
                      "Memory budget activation checkpointing requires the model to be compiled",
                      ("--compile.enable", "activation-checkpoint:selective"))  # fmt: skip
    if args.flag("compile.enable_async_tensor_parallel") and not compiled:
        yield Finding("refused", "asynchronous tensor parallelism without torch.compile",
                      "Async TP requires 'model' in --compile.components and --compile.enable", ("--compile.enable",))  # fmt: skip


def restriction(shape: ModelShape, seq: int) -> Restriction:
    """What torchtitan can run: FSDP or copies, tp with sequence parallelism, cp, pipelines."""

    def allows(choice: Any) -> bool:
        mesh = choice.mesh
        unit = 2 * mesh.cp * mesh.tp if mesh.cp > 1 else mesh.tp
        sharded = choice.zero > 1 or mesh.dp * mesh.cp == 1 or (choice.zero == 0 and mesh.cp == 1)
        return (
            heads_divide(shape, mesh.tp)
            and seq % unit == 0
            and sharded
            and mesh.order == ""
            and not (mesh.pp > 1 and choice.zero == 3)
            and (mesh.ep == 1 or (shape.experts > 0 and shape.experts % mesh.ep == 0))
        )

    return Restriction(
        "torchtitan",
        {"sequence_parallel": True},
        ("none", "op", "full"),
        ("1f1b", "gpipe", "interleaved_1f1b"),
        allows,
    )


def flags_of(job: Job) -> dict[str, str]:
    """The flags of a job, by name. Raises NotExpressible if torchtitan cannot run it."""
    by, lacking = job.layout, []
    if by.zero == 1:
        lacking.append("ZeRO-1: the nearest is FSDP with fsdp_reshard_after_forward never (ZeRO-2)")
    if by.recompute not in _POLICIES or by.recompute_layers:
        lacking.append(f"recompute {by.recompute}: the nearest are selective by op, and full")
    if by.schedule not in ("none", *WRITTEN):
        lacking.append(f"schedule {by.schedule}: it has {', '.join(WRITTEN.values())}")
    if by.order:
        lacking.append(
            f"the rank order {by.order}: it has tp, cp, shard, replicate, pp from the inside"
        )
    if by.offload == "optimizer":
        lacking.append(
            "the optimizer's state alone in host memory: the nearest is training.enable_cpu_offload"
        )
    if by.zero == 0 and by.cp > 1:
        lacking.append("cp without FSDP")
    if lacking:
        raise NotExpressible(f"torchtitan cannot say {'; '.join(lacking)}")
    dp = by.dp_on(job.gpus or by.tp * by.pp * by.cp)
    batch = by.batch_on(job.gpus or by.tp * by.pp * by.cp)
    replicas, shards = (by.copies, dp // by.copies) if by.zero else (dp, 1)
    found = {
        f"{P}data_parallel_replicate_degree": str(replicas),
        f"{P}data_parallel_shard_degree": str(shards),
    }
    found |= {f"{P}tensor_parallel_degree": str(by.tp), f"{P}context_parallel_degree": str(by.cp)}
    found |= {f"{P}pipeline_parallel_degree": str(by.pp), f"{P}expert_parallel_degree": str(by.ep)}
    found |= {} if by.sequence_parallel or by.tp == 1 else {f"{P}enable_sequence_parallel": "False"}
    found |= (
        {f"{P}fsdp_reshard_after_forward": "never" if by.zero == 2 else "always"} if by.zero else {}
    )
    local = batch // dp if by.pp > 1 else by.micro_batch
    found |= {f"{T}local_batch_size": str(local), f"{T}global_batch_size": str(batch)}
    found |= {f"{T}seq_len": str(job.seq)} if job.seq else {}
    if by.pp > 1:
        found |= {
            f"{P}pipeline_parallel_schedule": WRITTEN[by.schedule],
            f"{P}pipeline_parallel_microbatch_size": str(by.micro_batch),
        }
        found |= _parts(by, job.shape)
    if by.pp * by.ep > 1:
        found[f"{T}disable_cuda_graphs"] = "True"
    found["activation-checkpoint"] = _POLICIES[by.recompute]
    found |= {f"{T}enable_cpu_offload": "True"} if by.offload == "parameters" else {}
    return found | ({"compile.enable": "True"} if job.facts.compile else {})


def _parts(by: Layout, shape: ModelShape) -> dict[str, str]:
    """The modules of each stage, if its layers are known."""
    sizes = by.stages or even_stages(shape.layers, by.pp * by.vpp)
    parts, at = list[str](), 0
    for number, size in enumerate(sizes):
        names = ["tok_embeddings"] if number == 0 else []
        names += [f"layers.{layer}" for layer in range(at, at + size)]
        names += ["norm", "lm_head"] if number == len(sizes) - 1 else []
        parts.append(",".join(names))
        at += size
    return {f"{P}module_fqns_per_model_part": " ".join(parts)} if parts else {}


def write(job: Job) -> Exported:
    """A launch script of torchtitan 0.3. Raises NotExpressible if torchtitan cannot run the job."""
    flags = flags_of(job)
    policy = flags.pop("activation-checkpoint")
    flavors = [name for name, shape in FLAVORS.items() if shape == job.shape]
    name, size = flavors[0] if flavors else ("MODULE", "CONFIG")
    config = f"{name}_{size}" if flavors else size
    words = [f"--module {name}", f"--config {config}"]
    # what is true by its presence has a form of its own
    words += [f"--{n}" if v == "True" else f"--{_off(n)}" if v == "False" else f"--{n} {v}"
              for n, v in flags.items()]  # fmt: skip
    lines = [f"{torchrun(job)} -m torchtitan.train", *words, f"activation-checkpoint:{policy}"]
    losses = [] if flavors else ["the model: set --module and --config"]
    losses += ["fp8: the function of --config names its converters"] if job.facts.fp8 else []
    text = "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"
    return Exported("torchtitan 0.3", text, "bash train.sh", {}, tuple(losses), "train.sh")


def _off(name: str) -> str:
    """The flag that sets an option to false."""
    section, _, key = name.rpartition(".")
    return f"{section}.no-{key}"


TORCHTITAN = Target(
    "torchtitan",
    "torchtitan 0.3",
    _reads,
    read,
    refusals,
    restriction,
    write,
    "torchtitan",
    flags_of,
    ("titan",),
    dashes="--",
    zero=(0, 2, 3),
    stages=stages_for,
)
"""torchtitan."""
