"""Jobs of trainers above Accelerate and DeepSpeed: Axolotl's YAML, and the arguments of Transformers'
`TrainingArguments` in a script, in YAML or in Python. LLaMA-Factory, ms-swift, TRL and
DeepSpeed-Chat take these too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks import accelerate, deepspeed
from autopar.foreign.frameworks.arguments import (
    Arguments,
    flat_texts,
    is_false,
    is_none,
    is_true,
    note_model,
    options_of,
    read_mapping,
    unread_files,
)
from autopar.foreign.frameworks.python_settings import settings_of
from autopar.foreign.frameworks.unknown import distinct_jobs, with_others
from autopar.foreign.job import Facts, Finding, Job
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.expansion import is_known
from autopar.foreign.texts.shell_words import CLOSE
from autopar.ir.layout import Layout

_MICRO = ("per_device_train_batch_size", "micro_batch_size")
_SEQ = ("max_seq_length", "max_length", "cutoff_len", "sequence_len", "model_max_length", "max_seq_len", "block_size")  # fmt: skip
_NEUTRAL = re.compile(
    r"(?!.*(fp8|quant|optim(izer)?$|offload|parallel|liger|compile|packing|attn|flash|bit$|neftune|freeze|unsloth|kernel)).*|sample_packing|packing|"
    r"attn_impl.*|flash_attn.*|flash_attention|eval_sample_packing|pad_to_sequence_len|.*compile.*=False"
)
"""All but options that change kernels, the dtype, what is trained or where it is held."""
_ADAM = re.compile(r"adamw?(_torch(_fused)?|_hf|_apex_fused)?", re.I)
"""Optimizers whose state is that of Adam in fp32."""
_OFFLOADING = ("offload", "offload_disk", "unsloth")
"""Values of `gradient_checkpointing` by which the inputs of layers wait in host memory."""


def reads_trainer(source: SourceFile) -> bool:
    """Whether a file has the batch size of a trainer."""
    text = source.text
    axolotl = re.search(r"^base_model:", text, re.MULTILINE) and "micro_batch_size" in text
    started = re.search(
        r"llamafactory-cli train|axolotl(\.cli\.| )train|\btrl (sft|dpo|grpo|kto|reward)|accelerate launch|"
        r"^\s*swift (sft|pt|rlhf)\b",
        text,
        re.MULTILINE,
    )
    return bool(axolotl or started) or "per_device_train_batch_size" in text


def read_trainer(source: SourceFile) -> Job:
    """The job of a trainer's arguments. Raises AutoparError if there are none."""
    values, findings, source = _values(source)
    if not any(name in values for name in _MICRO):
        where = next((f": {f.what}" for f in findings if f.kind == "unknown"), "")
        raise AutoparError(f"no job: {source.name} has none of {', '.join(_MICRO)}{where}")
    values |= {"bf16": "true"} if values.get("bf16") == "auto" else {}  # as the devices allow
    values = {name: value for name, value in values.items() if value != "auto"}
    job, args = _job_of(values, list(findings), source)

    def again(options: Mapping[str, str]) -> Job:
        return _job_of(options, [], source)[0]

    return with_others(job, again, values, sorted(args.open))


def _job_of(
    values: Mapping[str, str], findings: list[Finding], source: SourceFile
) -> tuple[Job, Arguments]:
    """The job of arguments by name, and the arguments as read."""
    args = Arguments(values, findings)
    base = _engine(args, source)
    layout = _layout(args, base.layout)
    if _are_pairs(args, source):
        args.find("note", "a sample is a pair of answers: priced as two sequences")
        batch = layout.global_batch and 2 * layout.global_batch
        layout = replace(layout, micro_batch=2 * layout.micro_batch, global_batch=batch)
    per_node = args.whole("nproc_per_node", "num_gpus", "NPROC_PER_NODE") or base.gpus_per_node
    nodes = args.whole("nnodes", "num_nodes", "num_machines")
    gpus = args.whole("num_processes") or (per_node * (nodes or 1) if per_node else base.gpus)
    args.read.update(n for n in ("optim", "optimizer") if _ADAM.fullmatch(args.values.get(n, "")))
    note_model(args, "model_name_or_path", "base_model", "model", "model_id")
    job = args.job(
        base.framework,
        _NEUTRAL,
        layout=layout,
        gpus=gpus,
        gpus_per_node=per_node,
        seq=args.whole(*_SEQ),
        facts=_facts(args, base.facts),
    )
    # what the engine's file leaves to the trainer is said here
    kept = [finding for finding in base.findings if not _LEFT.search(finding.what)]
    job = replace(job, findings=(*kept, *job.findings), unpriced=(*base.unpriced, *job.unpriced))
    return _with_engines(job, base), args


_LEFT = re.compile(r"auto: the trainer decides|_per_gpu does not stand|micro-batch stands in")
"""Findings on what the file of an engine leaves to the trainer."""


def _with_engines(job: Job, base: Job) -> Job:
    """The job with each engine that it may have, as far as `base` tells its engine's others. What the
    arguments of the trainer say is not open.
    """
    others = [
        replace(
            job,
            layout=replace(job.layout, zero=other.layout.zero, offload=other.layout.offload, tp=other.layout.tp, cp=other.layout.cp),
            findings=(),
        )
        for other in base.others
    ]  # fmt: skip
    return replace(job, others=distinct_jobs(job, others))


_PAIRED = re.compile(r"(^|[_/. ])(dpo|orpo|cpo|simpo|ipo|reward|rm|reward_trainer)($|[_/. ])", re.I)
"""Names of trainings whose samples are pairs: a chosen and a rejected answer."""
_KINDS = ("stage", "rl", "rlhf_type", "reward_model")
"""Options that name the kind of training: LLaMA-Factory's, Axolotl's, ms-swift's."""


def _are_pairs(args: Arguments, source: SourceFile) -> bool:
    """Whether one forward reads a chosen and a rejected answer for each sample."""
    kinds = [args.text(name) or "" for name in _KINDS]
    if any(kinds):
        return any(_PAIRED.search(kind) for kind in kinds) or kinds[-1].lower() == "true"
    program = "/".join(args.values.get("program", "").split("/")[-2:])
    called = re.search(r"\b(DPO|ORPO|CPO|Reward)Config\(", source.text) is not None
    trl = {"beta", "max_prompt_length"} <= set(args.values) and "num_generations" not in args.values
    named = re.search("kto|grpo|ppo", f"{program} {source.name}", re.I)
    return _PAIRED.search(program) is not None or ((called or trl) and not named)


def _values(source: SourceFile) -> tuple[dict[str, str], tuple[Finding, ...], SourceFile]:
    """The arguments by name, findings on them, and the source, whose files are also those that a
    script writes.
    """
    suffix = source.name.rsplit(".", 1)[-1].lower()
    if suffix in ("yaml", "yml", "json"):
        data = read_mapping(source.text, source.name)
        values = flat_texts({key: value for key, value in data.items() if value is not None})
        return {name: value for name, value in values.items() if not is_none(value)}, (), source
    if suffix == "py":
        settings = settings_of(source, lambda settings: _has_micro(settings.values), parts=True)
        values = {path.rpartition(".")[2]: value for path, value in settings.values.items()}
        return values, settings.findings, source
    script = source.script()
    found: dict[str, str] = {}
    findings = unread_files(script)
    written = replace(source, read_file=script.reader(source.read_file))
    for _, words in script.programs():
        options = _with_file(words, written, findings)
        if "swift" in words[0] and {"sft", "pt", "rlhf"} & set(words[:3]):
            options.setdefault(_MICRO[0], "1")
        if _has_micro(options):
            found = options
            scripts = [w for w in words if w.endswith(".py")] or list(words[:3])
            found["program"] = " ".join(scripts[-1:] if len(scripts) < 3 else scripts)
            if "swift" in words[0]:
                found = {"gradient_checkpointing": "true", "bf16": "true"} | found
    if (processes := script.exported("NPROC_PER_NODE")) is not None:
        found.setdefault("NPROC_PER_NODE", processes)
    return found, tuple(findings), written


def _with_file(
    words: tuple[str, ...], source: SourceFile, findings: list[Finding]
) -> dict[str, str]:
    """The options of a command over those of the YAML file that it gives its trainer: `--config FILE`
    of TRL, or the file behind `llamafactory-cli train` and `axolotl train`.
    """
    options = options_of(words)
    starts = any(_COMMANDS.search(word) for word in words)
    files = [
        word for word in words if re.search(r"\.(ya?ml|json)$", word) and not word.startswith("-")
    ]
    launch = options.get("config_file", "")
    named = [file for file in files if file in (options.get("config"), options.get("recipe"))]
    own = named or [file for file in files if starts and file not in (launch, *options.values())]
    if not own or _has_micro(options):
        return options
    text = source.read_file(own[-1])
    if text is None:
        if starts or named:
            what = f"the arguments stand in {own[-1]}, which is not beside the file"
            findings.append(Finding("unknown", what, legal=(f"put {own[-1]} beside it",)))
        return options
    values = flat_texts(read_mapping(text, own[-1]))
    base = {name: value for name, value in values.items() if not is_none(value)}
    return base | {name: value for name, value in options.items() if name != "config"}


_COMMANDS = re.compile(
    r"(^|/)(llamafactory-cli|axolotl|trl|train\.py)$|axolotl\.cli\.train|llamafactory\."
)
"""Commands that take a file with the arguments of a trainer."""


def _has_micro(values: Mapping[str, str]) -> bool:
    return any(path.rpartition(".")[2] == _MICRO[0] for path in values)


_OF_TRL: dict[str, Job] = {
    **{f"zero{stage}": Job("deepspeed", layout=Layout(zero=stage)) for stage in (1, 2, 3)},
    **{name: Job("accelerate", layout=Layout(zero=3)) for name in ("fsdp1", "fsdp2")},
    **{name: Job("accelerate") for name in ("multi_gpu", "single_gpu")},
}
"""The configurations of Accelerate that TRL ships, by name."""


_OF_DEEPSPEED = ("deepspeed", "deepspeed_config", "ds_config", "dist_config.config_file")
_OF_ACCELERATE = ("config_file", "accelerate_config")


def _file(args: Arguments, source: SourceFile, *names: str) -> str | None:
    """The file that the first of these options names; '' if none is set, None if its name is not
    known. A folder that is not known is taken to be that of the script, if the file is there.
    """
    value = next((args.values[name] for name in names if args.values.get(name)), "")
    beside = value.rpartition(CLOSE)[2].lstrip("/")
    if not is_known(value) and beside and source.read_file(beside) is not None:
        args.read.update(names)
        return beside
    return args.text(*names) if not is_known(value) else args.text(*names) or ""


def _engine(args: Arguments, source: SourceFile) -> Job:
    """The job of what shards: DeepSpeed or FSDP, from its file or from the arguments."""
    file, launch = (_file(args, source, *names) for names in (_OF_DEEPSPEED, _OF_ACCELERATE))
    if file is None or launch is None:
        return _sharded_somehow("accelerate" if launch is None else "deepspeed")
    if launch in _OF_TRL:
        return _OF_TRL[launch]
    for name, read_engine in (
        (file, deepspeed.read_deepspeed),
        (launch, accelerate.read_accelerate),
    ):
        if not re.search(r"\.(json|ya?ml)$", name):
            continue
        text = source.read_file(name)
        if text is not None:
            return read_engine(SourceFile(text, name.rpartition("/")[2], source.read_file))
        args.find("unknown", f"sharding stands in {name}, which is not beside the file",
                  legal=(f"put {name} beside it", f"autopar check {name}"))  # fmt: skip
        return _sharded_somehow("deepspeed" if name == file else "accelerate")
    if (launched := _of_launcher(args)) is not None:
        return launched
    stage = re.search(r"zero[_-]?(\d)", file)
    if stage or "zero_stage" in args.values:
        zero = int(stage[1]) if stage else args.whole("zero_stage", least=0) or 0
        offload = ("parameters" if zero == 3 else "optimizer") if "offload" in file else "none"
        return Job("deepspeed", layout=Layout(zero=zero, offload=offload))
    layout = _fsdp(args)
    if (
        not layout.zero
        and "fsdp" not in args.values
        and not source.name.endswith((".sh", ".slurm"))
    ):
        args.find("unknown", "the file does not say what shards the states",
                  legal=("autopar check a script with the command that starts it, beside its files",))  # fmt: skip
        return _sharded_somehow("accelerate")
    return Job("accelerate", layout=layout)


def _sharded_somehow(framework: str) -> Job:
    """The job of an engine whose file is not there."""
    found = [Layout(zero=zero) for zero in (1, 2, 3)]
    found += [Layout(zero=3, offload="parameters"), Layout(zero=2, offload="optimizer")]
    others = tuple(Job(framework, layout=layout) for layout in found)
    return Job(framework, others=others)


_DEEPSPEED = ("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_accumulation_steps",
              "deepspeed_config_file")  # fmt: skip
"""Options of `accelerate launch` that its file has in the block of DeepSpeed."""


def _of_launcher(args: Arguments) -> Job | None:
    """The job that options of `accelerate launch` say, such as `--use_fsdp`; None without any."""
    deepspeed_on, fsdp_on = args.flag("use_deepspeed"), args.flag("use_fsdp")
    sizes = {n: v for n, v in args.values.items() if n.startswith("parallelism_config_")}
    if not (deepspeed_on or fsdp_on or sizes):
        return None
    fsdp = {n: v for n, v in args.values.items() if n.startswith("fsdp_") and n != "fsdp_config"}
    zero = {n: args.values[n] for n in _DEEPSPEED if n in args.values}
    kept = {
        n: args.values[n]
        for n in ("num_processes", "num_machines", "mixed_precision")
        if n in args.values
    }
    kind = "DEEPSPEED" if deepspeed_on else "FSDP" if fsdp_on else "MULTI_GPU"
    data: dict[str, object] = {"distributed_type": kind, **kept}
    data |= {"fsdp_config": fsdp} if fsdp_on else {}
    data |= {"deepspeed_config": zero} if deepspeed_on else {}
    data |= {"parallelism_config": sizes} if sizes else {}
    args.read.update((*sizes, *fsdp, *zero, *kept, "use_parallelism_config"))
    return accelerate.read_accelerate(SourceFile(json.dumps(data), "accelerate.json"))


def _fsdp(args: Arguments) -> Layout:
    words = (args.text("fsdp") or "").replace(",", " ").strip("[]'\" ").split()
    names = {word.strip("'\"") for word in words}
    inside = {path.removeprefix("fsdp_config.").removeprefix("fsdp_"): value
              for path, value in args.values.items() if path.startswith("fsdp_config.")}  # fmt: skip
    args.read.update(path for path in args.values if path.startswith("fsdp_config."))
    if not names and not inside and "dp_shard_size" not in args.values:
        return Layout()
    strategy = inside.get("sharding_strategy", "").upper()
    kept = "shard_grad_op" in names or strategy == "SHARD_GRAD_OP"
    kept = kept or is_false(inside.get("reshard_after_forward", "true"))
    whole = "no_shard" in names or strategy == "NO_SHARD"
    if "hybrid" in f"{names}{strategy}".lower():
        args.find("note", "hybrid sharding shards within a node: priced as over all devices")
    offload = "offload" in names or is_true(inside.get("offload_params", "false"))
    full = is_true(inside.get("activation_checkpointing", "false"))
    return Layout(
        zero=0 if whole else 2 if kept else 3,
        offload="parameters" if offload else "none",
        recompute="full" if full else "none",
    )


def _layout(args: Arguments, base: Layout) -> Layout:
    shard, copies = args.whole("dp_shard_size"), args.whole("dp_replicate_size") or 1
    ep = args.whole("expert_parallel_size") or 1
    if ep > 1:
        ranks = f"{(shard or 1) * copies} x {ep} data-parallel ranks"
        args.find("note", f"expert_parallel_size multiplies the devices in Axolotl: {ranks}")
    if args.values.get("gradient_checkpointing", "").lower() in _OFFLOADING:
        args.read.add("gradient_checkpointing")
        args.find("note", "gradient_checkpointing moves the inputs of layers to host memory: priced on the devices")  # fmt: skip
        recompute: bool | None = True
    else:
        recompute = args.flag("gradient_checkpointing")
    if "finetuning_type" in args.values and recompute is None:  # LLaMA-Factory's default
        recompute = not args.flag("disable_gradient_checkpointing")
    batch = args.whole("train_batch_size", "global_batch_size")
    micro = args.whole(*_MICRO) or 1
    return replace(
        base,
        tp=args.whole("tensor_parallel_size") or base.tp,
        cp=args.whole("context_parallel_size", "sequence_parallel_size") or base.cp,
        dp=shard * copies * ep if shard else base.dp,
        ep=ep,
        copies=copies if shard and base.zero else base.copies,
        micro_batch=micro,
        global_batch=batch or (base.global_batch if not args.values.get(_MICRO[0]) else None),
        accumulation=1 if batch else args.whole("gradient_accumulation_steps") or 1,
        recompute="full" if recompute else base.recompute,
    )


def _facts(args: Arguments, base: Facts) -> Facts:
    if args.flag("fp8"):
        base = replace(base, fp8="delayed" if args.text("fp8_backend") == "te" else "tensorwise")
        args.flag("fp8_enable_fsdp_float8_all_gather")
    dtype = (args.text("torch_dtype", "dtype") or "").removeprefix("torch.")
    if args.flag("bf16") or dtype in ("bfloat16", "bf16"):
        return replace(base, precision="bf16", dropout=0.0)
    if args.flag("fp16"):
        return replace(base, precision="fp16", dropout=0.0)
    named = {"bf16", "fp16"} & set(args.values)
    return replace(base, precision="fp32" if named else base.precision, dropout=0.0)
