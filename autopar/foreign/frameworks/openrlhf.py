"""OpenRLHF: launch scripts of its trainers, which run DeepSpeed. Options have names with dots since
version 0.10; the earlier names are read too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks import deepspeed
from autopar.foreign.frameworks.arguments import Arguments, note_model, options_of, unread_files
from autopar.foreign.frameworks.unknown import with_open
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, nodes_of
from autopar.ir.layout import Layout

_NAMES = {
    "zero": ("ds.zero_stage", "zero_stage"),
    "micro": ("train.micro_batch_size", "micro_train_batch_size"),
    "batch": ("train.batch_size", "train_batch_size"),
    "tp": ("ds.tensor_parallel_size", "ds_tensor_parallel_size"),
    "cp": ("ds.ring_attn_size", "ring_attn_size"),
    "offload": ("ds.adam_offload", "adam_offload"),
    "recompute": ("model.gradient_checkpointing_enable", "gradient_checkpointing"),
    "overlap": ("ds.overlap_comm", "overlap_comm"),
    "seq": ("data.max_len", "max_len"),
    "packed": ("ds.packing_samples", "packing_samples"),
}
"""Names of options: of version 0.10 and later, and of the ones before."""
_OF_ACTOR = "actor.gradient_checkpointing_enable"
"""The name in reinforcement learning, where several models are trained."""
_PAIRS = ("train_dpo", "train_rm")
"""Trainers whose samples are pairs of answers, which one forward reads together."""
_NEUTRAL = re.compile(
    r"(data|logger|ckpt|eval|algo|rollout|reward|critic|ref|vllm|adam|muon)\..*|(actor|model)\.(?!liger|compile|fp8|quant|freeze)\w+|"
    r"train\.(seed|max_epochs|num_episodes|agent_\w+|async_\w+|colocate_\w+|ema_\w+|enable_ema|full_determinism_enable|partial_rollout_enable|"
    r"dynamic_batch_enable)|ds\.(attn_implementation|enable_sleep|lora\.\w+|ring_attn_head_stride|use_universal_ckpt|value_head_prefix)|"
    r"trainer|module|m|pretrain|(save|load|ckpt|eval|logging|wandb|tensorboard|max_(ckpt|samples|epochs|norm|num|mem))_?.*|(input|output|label|chosen|rejected|prompt|"
    r"image|tokenizer|dataset|train_|disable_|apply_|best_|use_(wandb|tensorboard|ms|ds|kl|cpu)).*|(actor|critic)?_?learning_rate|l2|lr_.*|min_lr.*|"
    r"adam_(betas|eps|weight_decay)|seed|beta|kl_.*|init_kl_coef|gamma|lambd|lambda|eps_clip.*|value_clip|temperature|top_p|n_samples_per_prompt|"
    r"(actor|critic|ref|reward|vllm|rollout|remote|colocate|micro_rollout|generate|prompt_max|advantage|normalize|reward)_?.*|async_.*|enable_.*|"
    r"flash_attn|lora_.*|target_modules|num_episodes|local_rank|nnodes|nproc_per_node|num_(gpus|nodes)|master_(addr|port)|include|rdzv_.*|node_rank|"
    r"gradient_checkpointing_use_reentrant|ring_head_stride|perf|full_determinism|overlong_.*|dynamic_filtering.*|freezing_.*|multiturn|pretrain_mode|"
    r"nll_loss_coef|label_smoothing|ipo|loss|aux_loss_coef|compute_fp32_loss|margin_loss|samples?_.*|ema_.*|address|runtime_env_json|working_dir"
)
"""Options that change neither time nor memory of training."""
_BATCH = "train_batch_size"


def _reads(source: SourceFile) -> bool:
    trainer = re.search(r"openrlhf[./]cli|\btrain_(ppo\w*|sft|dpo|rm|kto|kd)\.py", source.text)
    known = re.search(r"--(ds\.zero_stage|train\.(micro_)?batch_size)\b", source.text)
    named = "micro_train_batch_size" in source.text or (trainer and known) is not None
    return named and not source.name.endswith(".py")


def _read(source: SourceFile) -> Job:
    """The job of a launch script. Of reinforcement learning it is the update of the actor. Raises
    AutoparError if no command starts a trainer of OpenRLHF.
    """
    script = source.script()
    values, trainer = dict[str, str](), ""
    known = {name for names in _NAMES.values() for name in names}
    for _, words in script.programs():
        options = options_of(words)
        if len(known & set(options)) > len(known & set(values)):
            values = options
            trainer = next((m[1] for w in words if (m := re.search(r"(train_\w+)", w))), "")
    if not values:
        raise AutoparError(f"no job: no command of {source.name} has options of OpenRLHF")
    findings = unread_files(script)
    return with_open(lambda options: _job_of(options, trainer, findings), values)


def _job_of(
    values: Mapping[str, str], trainer: str, findings: list[Finding]
) -> tuple[Job, Arguments]:
    """The job of options by name, and the arguments as read."""
    args = Arguments({**values, "trainer": trainer}, list(findings))
    layout, seq = _layout(args, args.text("trainer") or "")
    nodes = args.whole("nnodes", "num_nodes", "actor.num_nodes", "actor_num_nodes")
    per_node = args.whole(
        "nproc_per_node", "num_gpus", "actor.num_gpus_per_node", "actor_num_gpus_per_node"
    )
    _note(args, trainer)
    job = args.job(
        "openrlhf",
        _NEUTRAL,
        layout=layout,
        gpus=per_node * (nodes or 1) if per_node else None,
        gpus_per_node=per_node,
        seq=seq,
        facts=_facts(args, layout),
    )
    return job, args


def _layout(args: Arguments, trainer: str) -> tuple[Layout, int | None]:
    """(the layout, the tokens of a sequence)."""
    prompt, answer = args.whole("prompt_max_len"), args.whole("generate_max_len")
    seq = args.whole(*_NAMES["seq"]) or (prompt + answer if prompt and answer else None)
    micro = args.whole(*_NAMES["micro"])
    tokens = args.whole("train.max_tokens_per_gpu", "train_max_tokens_per_gpu")
    if args.flag("train.dynamic_batch_enable", "use_dynamic_batch") and tokens and seq:
        tokens *= (args.whole(*_NAMES["cp"]) or 1) * (args.whole(*_NAMES["tp"]) or 1)
        micro = max(1, tokens // seq)
        args.find("note", f"micro-batches hold {tokens} tokens: priced as {micro} of {seq}")
    elif micro is None:
        args.open.add(_NAMES["micro"][0])
        args.find("unknown", "the micro-batch does not stand in the file",
                  legal=("give --micro-batch",))  # fmt: skip
    answers = 1 + (trainer in _PAIRS)
    if answers > 1:
        args.find("note", f"a sample of {trainer} is a pair: priced as two sequences")
    if (group := args.whole("ds.zpg", "zpg", least=0)) and group > 1:
        args.find("note", f"parameters are shared out over {group} ranks: priced as over all")
    zero = args.whole(*_NAMES["zero"], least=0)
    return Layout(
        tp=args.whole(*_NAMES["tp"]) or 1,
        cp=args.whole(*_NAMES["cp"]) or 1,
        micro_batch=answers * (micro or 1),
        global_batch=answers * (args.whole(*_NAMES["batch"]) or 128),
        zero=2 if zero is None else zero,
        offload="optimizer" if args.flag(*_NAMES["offload"]) else "none",
        recompute="full" if args.flag(*_NAMES["recompute"], _OF_ACTOR) else "none",
    ), seq


def _facts(args: Arguments, layout: Layout) -> Facts:
    dtype = args.text("ds.param_dtype", "param_dtype", "data_type")
    if dtype is None:
        earlier = "micro_train_batch_size" in args.values
        dtype = "bf16" if args.flag("bf16") or not earlier else "fp32"
    grads = args.text("ds.grad_accum_dtype", "grad_accum_dtype")
    return Facts(
        dtype if dtype in ("bf16", "fp16") else "fp32",
        grads=grads if grads in ("bf16", "fp32") else None,
        # DeepSpeed's default is to overlap under ZeRO-3
        dp_overlap=bool(args.flag(*_NAMES["overlap"])) or layout.zero == 3,
        compile=bool(args.flag("ds.deepcompile", "deepcompile")),
        dropout=0.0,
    )


def _note(args: Arguments, trainer: str) -> None:
    note_model(args, "model.model_name_or_path", "actor.model_name_or_path", "pretrain")
    if "ppo" in trainer:
        args.find("note", "priced is the update of the actor")
    if args.flag(*_NAMES["packed"]):
        args.find("note", "samples are packed without padding: priced as all of the full length")


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What DeepSpeed refuses at start, in the options of OpenRLHF."""
    batch, stage = _name(job, "batch"), _name(job, "zero")
    pairs = job.flags.get("trainer") in _PAIRS

    def said(text: str) -> str:
        if found := re.fullmatch(rf"{_BATCH}: (\d+)", text):
            return f"--{batch} {int(found[1]) // (1 + pairs)}"
        return re.sub(r"zero_optimization\.stage: ", f"--{stage} ", text)

    found = [
        replace(finding, legal=tuple(map(said, finding.legal)))
        for finding in deepspeed.deepspeed_refusals(job, gpus)
    ]
    if job.layout.tp > 1 and job.facts.precision != "bf16":
        what = f"tp={job.layout.tp} in {job.facts.precision}"
        theirs = "BF16 is required for tensor parallel training"
        found.append(Finding("refused", what, theirs, ("--ds.param_dtype bf16",)))
    packed = _name(job, "packed")
    if job.layout.cp > 1 and job.flags and not job.flags.keys() & set(_NAMES["packed"]):
        what = f"ring attention over cp={job.layout.cp} without packed samples"
        theirs = "packing_samples must be enabled when using ring attention"
        found.append(Finding("refused", what, theirs, (f"--{packed}",)))
    return found


def _name(job: Job, what: str) -> str:
    """The name of an option in the version that a job is written for."""
    if what == "recompute" and _OF_ACTOR in job.flags:
        return _OF_ACTOR
    now, before = _NAMES[what]
    return before if _NAMES["micro"][1] in job.flags else now


def _flags_of(job: Job) -> dict[str, str]:
    """The options of a job by name, as texts. Raises NotExpressible if OpenRLHF cannot run it."""
    by = job.layout
    if by.offload == "parameters":
        raise NotExpressible(
            "OpenRLHF cannot say parameters in host memory: the nearest is --ds.adam_offload"
        )
    deepspeed.deepspeed_config(job)  # raises for what DeepSpeed cannot run
    answers = 2 if job.flags.get("trainer") in _PAIRS else 1
    batch = by.batch_on(job.gpus or by.tp * by.cp)
    if batch % answers:
        raise NotExpressible(f"OpenRLHF cannot say {batch} sequences of pairs: the nearest is one more")  # fmt: skip
    found: Mapping[str, str | None] = {
        "zero": str(by.zero),
        "micro": str(max(1, by.micro_batch // answers)),
        "batch": str(batch // answers),
        "tp": str(by.tp) if by.tp > 1 else None,
        "cp": str(by.cp) if by.cp > 1 else None,
        "packed": "" if by.cp > 1 else None,
        "offload": "" if by.offload == "optimizer" else None,
        "recompute": "" if by.recompute == "full" else None,
        "overlap": "" if job.facts.dp_overlap and by.zero < 3 else None,
        "seq": str(job.seq) if job.seq else None,
    }
    return {_name(job, what): text for what, text in found.items() if text is not None}


def _held(job: Job) -> dict[str, Any]:
    """The pins that a job's file cannot change: ring attention packs samples, which has no price."""
    return {"cp": job.layout.cp}


def _write(job: Job) -> Exported:
    """A launch script of OpenRLHF's supervised fine-tuning. Raises NotExpressible if it cannot run
    the job.
    """
    per_node, nodes = nodes_of(job)
    flags = _flags_of(job) | {"ds.param_dtype": job.facts.precision}
    several = f" --num_nodes {nodes}" if nodes > 1 else ""
    lines = [f"deepspeed --num_gpus {per_node}{several} --module openrlhf.cli.train_sft"]
    lines += [f"--{name} {text}".strip() for name, text in flags.items()]
    text = "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"
    losses = ("the model and the data: set --model.model_name_or_path and --data.dataset",)
    return Exported("openrlhf 0.11", text, "bash train.sh", {}, losses, "train.sh")


OPENRLHF = Target(
    LIMITS["openrlhf"],
    _reads,
    _read,
    _refusals,
    _write,
    _flags_of,
    dashes="--",
    held=_held,
)
"""OpenRLHF."""
