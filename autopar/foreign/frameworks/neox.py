"""EleutherAI's GPT-NeoX: its YAML, which is also JSON with comments, and names DeepSpeed's options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import Arguments, flat_texts, read_mapping
from autopar.foreign.frameworks.extended import merged_mappings
from autopar.foreign.frameworks.unknown import unstated, with_others
from autopar.foreign.frameworks.weights import NO_ATTENTION
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import (
    NotExpressible,
    SourceFile,
    Target,
    divisors_near,
    head_findings,
    multiples_near,
    nodes_of,
)
from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_MICRO, _STEPS, _BATCH = (
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_Z = "zero_optimization."
_MARKS = re.compile(r"(pipe|model)[-_]parallel[-_]size|data[-_]impl|checkpoint[-_]factor")
"""Options of GPT-NeoX that few others have."""
_COUNTED = re.compile(
    r".*(fp8|quant|bnb|moe|mamba|rwkv|mup|lora|adapter|soft_prompt|attention_config|sparsity|te_|train_impl|partition_activations|"
    r"checkpoint_in_cpu|dpo|kto|rm_|offload).*"
)
"""Options that change kernels, what is trained or where it is held."""
_NEUTRAL = re.compile(
    rf"(?!{_COUNTED.pattern}$).*|checkpoint_(factor|scale).*|.*_path.*|te_fp8.*|warmup|rms_norm.*|norm.*"
)


def _reads(source: SourceFile) -> bool:
    text = source.text
    yaml = source.name.lower().endswith((".yml", ".yaml", ".json"))
    if not yaml or not _MARKS.search(text):
        return False
    try:
        names = {name.replace("-", "_") for name in read_mapping(text, source.name)}
    except AutoparError:
        return False
    own = names & {"pipe_parallel_size", "model_parallel_size", "data_impl", "checkpoint_factor", "lr_decay_style"}  # fmt: skip
    return len(own) > 1 or (bool(own) and bool(names & {_MICRO, "num_attention_heads"}))


def _read(source: SourceFile) -> Job:
    """The job of a configuration. GPT-NeoX merges several files, so that one alone may lack values.
    Raises AutoparError if it is none.
    """
    data = {
        name.replace("-", "_"): value
        for name, value in read_mapping(source.text, source.name).items()
    }
    values = flat_texts(merged_mappings({}, data))
    if {"pipe_parallel_size", "model_parallel_size", _MICRO, "hidden_size", "data_impl"}.isdisjoint(
        values
    ):
        raise AutoparError(f"no job: {source.name} has no options of GPT-NeoX")
    job = _job_of(Arguments(values))
    args = Arguments(values)
    _job_of(args)
    missing = unstated(_lacking(values), values)
    if missing:
        what = (
            f"{', '.join(missing)} do not stand in the file: another file of the job may set them"
        )
        job = replace(job, findings=(*job.findings, Finding("unknown", what, legal=("give one file with all of them",))))  # fmt: skip

    def again(options: Mapping[str, str]) -> Job:
        return _job_of(Arguments(options))

    return with_others(job, again, values, (*missing, *sorted(args.open)))


def _lacking(values: Mapping[str, str]) -> list[str]:
    """The options that another file of the job may set."""
    batches = [name for name in (_MICRO, _STEPS, _BATCH) if name in values]
    lacking = [_MICRO] if _MICRO not in values and len(batches) < 2 else []
    if not {"precision", "fp16.enabled", "bf16.enabled", "fp16.fp16"} & set(values):
        lacking.append("precision")
    return lacking + (
        [f"{_Z}stage"]
        if "hidden_size" in values and f"{_Z}stage" not in values and _Z not in str(values)
        else []
    )


def _job_of(args: Arguments) -> Job:
    pp, tp = args.whole("pipe_parallel_size", least=0) or 1, args.whole("model_parallel_size") or 1
    micro, batch, steps = args.whole(_MICRO), args.whole(_BATCH), args.whole(_STEPS)
    shape = _shape(args)
    layout = Layout(
        tp=tp,
        pp=pp,
        micro_batch=micro or 1,
        global_batch=batch,
        accumulation=1 if batch else steps or 1,
        zero=args.whole(f"{_Z}stage", "zero_stage", least=0) or 0,
        recompute=_recompute(args),
        schedule="1f1b" if pp > 1 else "none",
        sequence_parallel=bool(args.flag("sequence_parallel")) and tp > 1,
        offload=_offload(args),
    )
    per_node, nodes = args.whole("num_gpus"), args.whole("num_nodes") or 1
    gpus = args.whole("global_num_gpus") or (per_node * nodes if per_node else None)
    return args.job(
        "gpt-neox",
        _NEUTRAL,
        shape=shape,
        layout=layout,
        gpus=gpus,
        gpus_per_node=per_node,
        seq=args.whole("seq_length"),
        facts=_facts(args),
    )


def _recompute(args: Arguments) -> str:
    every = args.whole("checkpoint_num_layers") or 1
    if not args.flag("checkpoint_activations"):
        return "none"
    if every > 1:
        args.find("note", f"checkpoint_num_layers {every} keeps the input of every {every}th layer; priced as if of each")  # fmt: skip
    return "full"


def _offload(args: Arguments) -> str:
    devices = [args.text(f"{_Z}offload_{what}.device") or "none" for what in ("param", "optimizer")]
    state = devices[1] != "none" or bool(args.flag(f"{_Z}cpu_offload"))
    return "parameters" if devices[0] != "none" else "optimizer" if state else "none"


def _facts(args: Arguments) -> Facts:
    named = (args.text("precision") or "").lower()
    fp16 = bool(args.flag("fp16.enabled", "fp16.fp16")) or named == "fp16"
    bf16 = bool(args.flag("bf16.enabled")) or named in ("bfloat16", "bf16")
    grads = args.text("data_types.grad_accum_dtype")
    optimizer = (args.text("optimizer.type", "optimizer_type") or "adam").lower()
    if optimizer not in ("adam", "adamw", "sgd"):
        args.find("note", f"optimizer {optimizer}: priced as Adam")
    return Facts(
        "fp16" if fp16 else "bf16" if bf16 else "fp32",
        grads="fp32" if grads in ("fp32", "float32") else None,
        dp_overlap=args.flag(f"{_Z}overlap_comm"),
        optimizer="sgd" if optimizer == "sgd" else None,
        dropout=args.number("hidden_dropout") or 0.0,
    )


def _shape(args: Arguments) -> ModelShape:
    hidden, heads = args.whole("hidden_size") or 0, args.whole("num_attention_heads") or 0
    kind = (args.text("activation", "mlp_type") or "gelu").lower()
    gated = any(word in kind for word in ("swiglu", "geglu", "glu", "llama"))
    args.text("norm")
    factor = args.number("expansion_factor")
    width = args.whole("intermediate_size") or int((factor or 4) * hidden)
    multiple = args.whole("mlp_multiple_of") or 1
    # a gated MLP keeps a third of the width for its gate, and rounds up after
    unit = multiple if gated else 2 * multiple
    width = int(width * 2 / 3) // 2 if gated else width
    experts = args.whole("moe_num_experts", "num_experts") or 1
    every = args.whole("moe_expert_interval", "expert_interval") or 1
    ffn = -(-width // unit) * unit
    return ModelShape(
        layers=args.whole("num_layers") or 0,
        hidden=hidden,
        heads=heads,
        kv_heads=args.whole("num_kv_heads") or heads,
        head_dim=hidden // heads if heads else 0,
        ffn=ffn,
        experts=experts if experts > 1 else 0,
        top_k=(args.whole("moe_top_k") or 1) if experts > 1 else 0,
        moe_ffn=ffn if experts > 1 else 0,
        expert_layers="0" * (min(every, 1000) - 1) + "1" if experts > 1 and every > 1 else "",
        vocab=_vocabulary(args),
        gated=gated,
        tied=not args.flag("no_weight_tying"),
        positions="rope" if (args.text("pos_emb") or "learned") == "rotary" else "learned",
    )


def _vocabulary(args: Arguments) -> int:
    """The tokens of the vocabulary: as said, or those of the tokenizer; 0 if they are not known."""
    size = args.whole("padded_vocab_size", "vocab_size")
    kind, file = args.text("tokenizer_type") or "", args.text("vocab_file") or ""
    args.whole("make_vocab_size_divisible_by")
    if size:
        return size
    known = 50257 if "GPT2BPE" in kind or "gpt2-vocab" in file else 0
    known = known or (50277 if "20B_tokenizer" in file else 0)
    if known:
        args.find("note", f"the vocabulary of {known} is that of the tokenizer {file or kind}")
    return known


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What GPT-NeoX refuses at start."""
    by, found = job.layout, list[Finding]()
    if gpus % (by.tp * by.pp):
        what = f"{gpus} devices are no multiple of pipe_parallel_size {by.pp} x model_parallel_size {by.tp}"
        legal = tuple(
            f"model_parallel_size: {d}" for d in divisors_near(max(1, gpus // by.pp), by.tp)
        )
        found.append(Finding("refused", what, "(global_num_gpus / pp_size) / mp_size must be a whole number", legal))  # fmt: skip
        return found
    rows, batch = by.micro_batch * by.dp_on(gpus), by.global_batch
    steps = job.flags.get(_STEPS, "")
    if batch and (
        batch % rows or (steps.isdigit() and _MICRO in job.flags and batch != rows * int(steps))
    ):
        legal = tuple(f"{_BATCH}: {n}" for n in multiples_near(rows, batch))
        found.append(Finding("refused", f"{_BATCH} {batch} is not {by.micro_batch} x {steps or 'steps'} x {by.dp_on(gpus)}",
                             "train_batch_size is not equal to micro_batch_per_gpu * gradient_acc_step * world_size",
                             legal))  # fmt: skip
    hidden, heads = job.shape.hidden, job.shape.heads
    attends = not any(part.what == NO_ATTENTION for part in job.unmodelled)  # mamba has no heads
    if heads and hidden % heads and attends:
        what = f"{heads} attention heads do not divide a hidden size of {hidden}"
        legal = tuple(f"num_attention_heads: {d}" for d in divisors_near(hidden, heads))
        found.append(Finding("refused", what, f"{hidden} is not divisible by {heads}", legal))
    found += head_findings(job, "num_attention_heads must be divisible by model_parallel_size", "model_parallel_size:")  # fmt: skip
    if by.pp > 1 and by.zero > 1:
        found.append(Finding("refused", f"ZeRO-{by.zero} with a pipeline", "ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism",
                             (f"{_Z}stage: 1", "pipe_parallel_size: 0")))  # fmt: skip
    return found


def _config_of(job: Job) -> dict[str, Any]:
    """The options of a layout. Raises NotExpressible if GPT-NeoX cannot run it."""
    by, lacking = job.layout, []
    if by.cp * by.ep * by.vpp > 1:
        lacking.append(
            f"cp={by.cp} ep={by.ep} with {by.vpp} stages a rank: the nearest is one of each"
        )
    if by.recompute not in ("none", "full") or by.recompute_layers:
        lacking.append(
            f"recompute {by.recompute}: the nearest is checkpoint_activations (all layers)"
        )
    if by.schedule not in ("none", "1f1b"):
        lacking.append(f"schedule {by.schedule}: the nearest is 1f1b")
    if by.copies > 1 or by.order:
        lacking.append("copies of shards, or another rank order")
    if by.offload == "parameters":
        lacking.append("parameters in host memory: the nearest is the optimizer's state there")
    if len(set(by.stages)) > 1:
        lacking.append(
            f"stages of {'-'.join(map(str, by.stages))} layers: it shares them out evenly"
        )
    if lacking:
        raise NotExpressible(f"GPT-NeoX cannot say {'; '.join(lacking)}")
    gpus = job.gpus or by.tp * by.pp
    return {
        "pipe_parallel_size": by.pp if by.pp > 1 else 1,
        "model_parallel_size": by.tp,
        "sequence_parallel": by.sequence_parallel,
        _MICRO: by.micro_batch,
        _STEPS: by.micro_batches_on(gpus),
        "zero_optimization": {"stage": by.zero} | ({"offload_optimizer": {"device": "cpu"}} if by.offload == "optimizer" else {}),
        "checkpoint_activations": by.recompute == "full",
        "precision": {"bf16": "bfloat16"}.get(job.facts.precision, job.facts.precision),
    }  # fmt: skip


def _flags_of(job: Job) -> dict[str, str]:
    """The options by path, as texts."""
    return flat_texts(_config_of(job))


def _write(job: Job) -> Exported:
    """The options of a layout as YAML. Raises NotExpressible if GPT-NeoX cannot run the job."""
    import yaml

    per_node, nodes = nodes_of(job)
    devices = {"num_gpus": per_node, "num_nodes": nodes}
    text = yaml.safe_dump(_config_of(job) | devices, sort_keys=False)
    losses = ["the model, the optimizer and the data: give them in a second file"]
    launch = "python ./deepy.py train.py layout.yml model.yml"
    return Exported("gpt-neox 2.0", text, launch, {}, tuple(losses), "layout.yml")


NEOX = Target(
    LIMITS["gpt-neox"],
    _reads,
    _read,
    _refusals,
    _write,
    _flags_of,
)
"""GPT-NeoX."""
