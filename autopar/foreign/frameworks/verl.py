"""verl with FSDP: overrides in Hydra's form in a launch script, of reinforcement learning and of
supervised fine-tuning. verl with Megatron-LM is read as Megatron-LM's options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import (
    Arguments,
    flat_texts,
    is_none,
    note_model,
    options_of,
    unread_files,
)
from autopar.foreign.frameworks.extended import extended_mapping
from autopar.foreign.frameworks.megatron_mapping import overrides_of
from autopar.foreign.frameworks.unknown import with_open
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, multiples_near, nodes_of
from autopar.ir.layout import Layout

_ACTOR, _MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
_NAMES = {
    "micro": (f"{_ACTOR}ppo_micro_batch_size_per_gpu", "data.micro_batch_size_per_gpu", "data.micro_batch_size"),
    "batch": (f"{_ACTOR}ppo_mini_batch_size", "data.train_batch_size"),
    "cp": (f"{_ACTOR}ulysses_sequence_parallel_size", "ulysses_sequence_parallel_size", "engine.ulysses_sequence_parallel_size"),
    "recompute": (f"{_MODEL}enable_gradient_checkpointing", "model.enable_gradient_checkpointing"),
    "offload": (f"{_ACTOR}fsdp_config.offload_policy", "model.fsdp_config.offload_params", "engine.offload_policy"),
    "group": (f"{_ACTOR}fsdp_config.fsdp_size", "model.fsdp_config.fsdp_size", "engine.fsdp_size"),
    "reshard": (f"{_ACTOR}fsdp_config.reshard_after_forward", "model.fsdp_config.reshard_after_forward", "engine.reshard_after_forward"),
}  # fmt: skip
"""Paths of options: of reinforcement learning, then of supervised fine-tuning."""
_KNOWN = frozenset(name for names in _NAMES.values() for name in names)
_STRATEGY = (f"{_ACTOR}strategy", "model.strategy", "engine.strategy", "engine")
_COUNTED = re.compile(
    r"(actor_rollout_ref\.(actor|model)|model|engine)\.(.*\.)?"
    r"[\w.]+"
)
"""Options of what is trained. All others need no price."""
_PLAIN = (
    r"(.*\.)?(optim|policy_loss|checkpoint|profiler|router_replay|wrap_policy|override_config|tool_config|mtp|lora)\..*|"
    r"(.*\.)?(clip_ratio(_\w+)?|tau_\w+|loss_\w+|entropy_coeff|calculate_\w+|use_kl_loss|kl_loss_\w+|ppo_epochs|shuffle|data_loader_seed|"
    r"grad_clip|rollout_n|use_orig_params|seed|full_determinism|forward_(prefetch|only)|strategy|path|hf_config_path|tokenizer_path|use_shm|"
    r"trust_remote_code|custom_chat_template|external_lib|lora_(rank|alpha|adapter_path)|target_modules|exclude_modules|pad_to_\w+|"
    r"use_remove_padding|use_torch_compile|_target_|min_num_params|freeze_vision_tower|model_type|partial_pretrain|enable_gradient_checkpointing|"
    r"entropy_from_logits_chunk_size|(param|optimizer)_offload|ulysses_sequence_parallel_size|ppo_\w+|use_dynamic_bsz|nccl_timeout)"
)
_NEUTRAL = re.compile(rf"(?!{_COUNTED.pattern}$).*|{_PLAIN}")
"""Options that change neither time nor memory, and those of other parts."""


def _reads(source: SourceFile) -> bool:
    text = source.text
    known = re.search(
        r"actor_rollout_ref\.(actor|model)\.|verl\.trainer\.(fsdp_)?sft|^actor_rollout_ref:",
        text,
        re.M,
    )
    is_script = not source.name.endswith(".py")
    return known is not None and is_script and not _has_megatron(source)


def _has_megatron(source: SourceFile) -> bool:
    """Whether Megatron-LM trains the actor. Branches of a script that are not taken do not count."""
    text = re.sub(r"#.*", "", source.text).lower()
    if "megatron" not in text:
        return False
    if re.search(r"config[-_]name\S*megatron|ppo_megatron_trainer", text):
        return True
    try:
        values, _ = _values(source)
    except AutoparError:
        return True
    kinds = {values.get(name, "").lower() for name in _STRATEGY}
    inside = any(path.startswith(f"{_ACTOR}megatron.") for path in values)
    return "megatron" in kinds or inside or not _KNOWN & set(values)


def _read(source: SourceFile) -> Job:
    """The job of a launch script or of a whole configuration. Of reinforcement learning it is the
    update of the actor. Raises AutoparError if no command has overrides of verl.
    """
    values, findings = _values(source)
    if not _KNOWN & set(values):
        raise AutoparError(f"no job: no command of {source.name} has overrides of verl")
    return with_open(lambda options: _job_of(options, findings), values)


def _job_of(values: Mapping[str, str], findings: list[Finding]) -> tuple[Job, Arguments]:
    """The job of overrides by path, and the arguments as read."""
    args = Arguments(values, list(findings))
    per_node = args.whole("nproc_per_node", "trainer.n_gpus_per_node")
    nodes = args.whole("nnodes", "trainer.nnodes") or 1
    gpus = per_node * nodes if per_node else None
    layout, seq = _layout(args, gpus)
    _note(args)
    for name in ("entropy_checkpointing", "use_torch_compile"):
        args.flag(f"{_ACTOR}{name}")
    facts = Facts("bf16", dropout=0.0)
    job = args.job("verl", _NEUTRAL, layout=layout, gpus=gpus, gpus_per_node=per_node, seq=seq,
                   facts=facts)  # fmt: skip
    return job, args


def _values(source: SourceFile) -> tuple[dict[str, str], list[Finding]]:
    """The options by path, and findings on them."""
    if re.search(r"^actor_rollout_ref:", source.text, re.MULTILINE):
        data, findings = extended_mapping(source)
        found = {path: "" if is_none(text) else text for path, text in flat_texts(data).items()}
        return {path: text for path, text in found.items() if text}, findings
    script = source.script()
    values: dict[str, str] = {}
    for _, words in script.programs():
        found = overrides_of(words) | _plain(words)
        if len(_KNOWN & set(found)) > len(_KNOWN & set(values)):
            values = {path.lstrip("+"): text for path, text in found.items()} | _launcher(words)
    return values, unread_files(script)


def _plain(words: tuple[str, ...]) -> dict[str, str]:
    """The overrides without a dot in their path, such as `ulysses_sequence_parallel_size=2`."""
    found = [re.fullmatch(r"\+{0,2}(ulysses_sequence_parallel_size|engine)=(.*)", w) for w in words]
    return {match[1]: match[2] for match in found if match}


def _launcher(words: tuple[str, ...]) -> dict[str, str]:
    options = options_of(words)
    return {name: options[name] for name in ("nproc_per_node", "nnodes") if name in options}


def _layout(args: Arguments, gpus: int | None) -> tuple[Layout, int | None]:
    """(the layout, the tokens of a sequence)."""
    sizes = [args.whole("data.max_prompt_length"), args.whole("data.max_response_length")]
    seq = args.whole("data.max_length") or (sizes[0] + sizes[1] if sizes[0] and sizes[1] else None)
    cp = args.whole(*_NAMES["cp"]) or 1
    answers = args.whole("actor_rollout_ref.rollout.n") or 1
    batch = args.whole(*_NAMES["batch"])
    kind = (args.text(*_STRATEGY) or "fsdp").lower()
    kept = kind == "fsdp2" and args.flag(*_NAMES["reshard"]) is False
    group = args.text(*_NAMES["group"]) or "-1"
    copies = 1
    if group.isdigit() and gpus and gpus % int(group) == 0:
        copies = gpus // int(group)
    elif group.isdigit():
        args.leave_out("groups that share out parameters", f"fsdp_size={group}")
    zero = 0 if group == "1" else 2 if kept else 3
    return Layout(
        cp=cp,
        micro_batch=_micro(args, cp, seq, gpus),
        global_batch=batch * answers if batch else None,
        zero=zero,
        copies=copies if zero else 1,
        recompute="full" if args.flag(*_NAMES["recompute"]) else "none",
        offload="parameters" if args.flag(*_NAMES["offload"]) else "none",
    ), seq


def _micro(args: Arguments, cp: int, seq: int | None, gpus: int | None) -> int:
    """The sequences of a micro-batch on a data-parallel rank."""
    tokens = args.whole(f"{_ACTOR}ppo_max_token_len_per_gpu", "data.max_token_len_per_gpu")
    if args.flag(f"{_ACTOR}use_dynamic_bsz", "data.use_dynamic_bsz"):
        held = (tokens or 16384) * cp
        micro = max(1, held // seq) if seq else 1
        args.find("note", f"micro-batches hold {held} tokens: priced as {micro} of {seq}")
        return micro
    own, total = args.whole(*_NAMES["micro"]), args.whole(f"{_ACTOR}ppo_micro_batch_size")
    if own is None and total and gpus:  # of all ranks, in earlier versions
        return max(1, total * cp // gpus)
    if own is None:
        args.open.add(_NAMES["micro"][0])
        args.find("unknown", "the micro-batch does not stand in the file",
                  legal=("give --micro-batch",))  # fmt: skip
    return own or 1


def _note(args: Arguments) -> None:
    note_model(args, f"{_MODEL}path", "model.path", "model.partial_pretrain")
    if any(name.startswith(_ACTOR) for name in args.values):
        args.find("note", "priced is the update of the actor")
    moved = (f"{_ACTOR}fsdp_config.param_offload", f"{_ACTOR}fsdp_config.optimizer_offload")
    if any([args.flag(name) for name in moved]):
        args.find("note", "what fsdp_config offloads is on the devices during the update, and priced there")  # fmt: skip


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What verl refuses at start."""
    by, heads, found = job.layout, job.shape.heads, list[Finding]()
    if gpus % by.cp:
        found.append(Finding("refused", f"sp={by.cp} does not divide {gpus} devices",
                             "world_size must be divisible by ulysses_sequence_parallel_size"))  # fmt: skip
        return found
    dp, answers = by.dp_on(gpus), _answers(job)
    rows = by.micro_batch * dp
    if by.batch_on(gpus) % rows and not job.flags.get(f"{_ACTOR}use_dynamic_bsz"):
        legal = [n for n in multiples_near(rows, by.batch_on(gpus)) if n % answers == 0]
        found.append(Finding("refused", f"{by.batch_on(gpus)} sequences of a step are no multiple of {by.micro_batch} x {dp}",
                             "normalized ppo_mini_batch_size should be divisible by ppo_micro_batch_size_per_gpu",
                             tuple(f"{_name(job, 'batch')}={n // answers}" for n in legal)))  # fmt: skip
    if heads and heads % by.cp:
        found.append(Finding("refused", f"sp={by.cp} does not divide {heads} attention heads",
                             "num_heads must be divisible by ulysses sequence parallel size"))  # fmt: skip
    return found


def _answers(job: Job) -> int:
    text = job.flags.get("actor_rollout_ref.rollout.n", "1")
    return int(text) if text.isdigit() and int(text) else 1


def _name(job: Job, what: str) -> str:
    """The path of an option in the trainer of a job."""
    names = _NAMES[what]
    supervised = any(name.startswith("data.micro_batch_size") for name in job.flags)
    return next((n for n in names if n in job.flags), names[supervised])


def _flags_of(job: Job) -> dict[str, str]:
    """The overrides of a job by path. Raises NotExpressible if verl's FSDP cannot run it."""
    by, lacking = job.layout, []
    if by.tp * by.pp * by.ep > 1:
        lacking.append(
            f"tp={by.tp} pp={by.pp} ep={by.ep} with FSDP: the nearest is its Megatron-LM"
        )
    if by.zero == 1 or (by.zero == 0 and (by.dp or 1) * by.cp > 1):
        lacking.append(f"ZeRO-{by.zero}: the nearest is reshard_after_forward=False (ZeRO-2)")
    if by.recompute not in ("none", "full"):
        lacking.append(f"recompute {by.recompute}: the nearest is that of all layers")
    if by.offload == "optimizer":
        lacking.append("the optimizer's state alone in host memory: the nearest is offload_policy")
    gpus = job.gpus or by.cp
    if by.batch_on(gpus) % _answers(job):
        lacking.append(
            f"{by.batch_on(gpus)} sequences of {_answers(job)} answers: the nearest is a multiple"
        )
    if lacking:
        raise NotExpressible(f"verl cannot say {'; '.join(lacking)}")
    found = {
        "micro": str(by.micro_batch),
        "batch": str(by.batch_on(gpus) // _answers(job)),
        "cp": str(by.cp),
        "recompute": str(by.recompute == "full"),
        "group": str(by.shard_on(gpus) or -1),
        "reshard": str(by.zero != 2),
        "offload": str(by.offload == "parameters"),
    }
    return {_name(job, what): text for what, text in found.items()}


def _words_of(job: Job) -> dict[str, str]:
    """The overrides of a job by path, in the trainer of its file. Raises NotExpressible as `_flags_of`."""
    found = _flags_of(job)
    if job.layout.zero == 2:  # what is gathered is kept by FSDP 2 alone
        supervised = any(name.startswith("data.micro_batch_size") for name in job.flags)
        name = "model.strategy" if supervised else f"{_ACTOR}strategy"
        found[next((n for n in _STRATEGY if n in job.flags), name)] = "fsdp2"
    return found


def _write(job: Job) -> Exported:
    """A launch script of verl. Raises NotExpressible if its FSDP cannot run the job."""
    found = _flags_of(job) | {f"{_ACTOR}strategy": "fsdp2"}
    per_node, nodes = nodes_of(job)
    found |= {"trainer.n_gpus_per_node": str(per_node), "trainer.nnodes": str(nodes)}
    lines = [
        "python3 -m verl.trainer.main_ppo",
        *(f"{path}={text}" for path, text in found.items()),
    ]
    losses = ["the model, the data and the rollout"]
    losses += (
        [f"sequences of {job.seq} tokens: data.max_prompt_length and data.max_response_length"]
        if job.seq
        else []
    )
    text = "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"
    return Exported("verl 0.7", text, "bash train.sh", {}, tuple(losses), "train.sh")


VERL = Target(
    LIMITS["verl"],
    _reads,
    _read,
    _refusals,
    _write,
    _flags_of,
    words=_words_of,
)
"""verl with FSDP."""
