"""Hugging Face Transformers: its `DistributedConfig`, as JSON or as a call in Python."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.accelerate import late_findings
from autopar.foreign.frameworks.arguments import Arguments, read_mapping
from autopar.foreign.frameworks.trainer_words import in_script
from autopar.foreign.frameworks.unknown import open_layout, with_others
from autopar.foreign.job import Exported, Facts, Finding, Job
from autopar.foreign.limits.frameworks import LIMITS
from autopar.foreign.target import NotExpressible, SourceFile, Target, divisors_near, torchrun
from autopar.foreign.texts.expansion import unknown
from autopar.ir.layout import Layout

_SIZES = ("tp_size", "fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
_NEUTRAL = re.compile(
    r"fsdp_plan|ep_implementation|enable_sequence_parallel|tp_plan|ep_plan|enable_expert_parallel"
)


def _reads(source: SourceFile) -> bool:
    return (
        "DistributedConfig(" in source.text
        or re.search(r'"(tp_size|fsdp_size|pp_size)"\s*:', source.text, re.MULTILINE) is not None
    )


def _read(source: SourceFile) -> Job:
    """The job of a `DistributedConfig`: JSON, or the first such call in Python, which is parsed and
    never run. Raises AutoparError if there is none.
    """
    values = _of_call(source) if "DistributedConfig(" in source.text else _of_json(source)
    args = Arguments(values)
    job = _job_of(args)
    if args.open:
        job = replace(job, gpus=None)
    args.find("unknown", "the micro-batch stands in the training script, not in DistributedConfig",
              legal=("give --micro-batch",))  # fmt: skip
    job = replace(job, findings=tuple(args.findings))

    def again(options: Mapping[str, str]) -> Job:
        return replace(_job_of(Arguments(options)), gpus=None)

    job = with_others(job, again, values, sorted(args.open))
    return open_layout(job, micro_batch=(2, 8), accumulation=(4, 16))


def _job_of(args: Arguments) -> Job:
    """The job of the arguments of a `DistributedConfig`."""
    sizes = {name: args.whole(name) or 1 for name in _SIZES}
    fsdp, replicas = sizes["fsdp_size"], sizes["dp_replicate_size"]
    tp, pp = sizes["tp_size"], sizes["pp_size"]
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=fsdp * replicas,
        ep=sizes["ep_size"],
        etp=1 if sizes["ep_size"] > 1 else None,
        zero=3 if fsdp > 1 else 0,
        copies=replicas if fsdp > 1 else 1,
        schedule="gpipe" if pp > 1 else "none",
        offload="parameters" if args.flag("fsdp_cpu_offload") else "none",
    )
    precision = "bf16" if args.flag("fsdp_mixed_precision") is not False else "fp32"
    gpus = tp * pp * fsdp * replicas
    return args.job("transformers", _NEUTRAL, layout=layout, gpus=gpus, facts=Facts(precision))


def _of_json(source: SourceFile) -> dict[str, str]:
    data = read_mapping(source.text, source.name)
    inner = data.get("distributed_config", data)
    if not isinstance(inner, dict) or not set(inner) & set(_SIZES):
        raise AutoparError(f"no job: {source.name} has none of {', '.join(_SIZES)}")
    return {str(key): str(value) for key, value in inner.items()}


def _of_call(source: SourceFile) -> dict[str, str]:
    return call_arguments(source, "DistributedConfig")


def call_arguments(source: SourceFile, name: str) -> dict[str, str]:
    """The keyword arguments of the first call of `name` in a Python text. A value that is no
    constant is not known. Raises AutoparError if the text is not Python or has no such call.
    """
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AutoparError(f"{source.name} is no Python: {error}") from None
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == name:
            return {key.arg: _constant(key.value) for key in node.keywords if key.arg}
    raise AutoparError(f"no job: {source.name} has no call of {name}")


def _constant(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    try:
        return json.dumps(ast.literal_eval(node))
    except (ValueError, TypeError):
        return unknown(ast.unparse(node)[:60])


def _refusals(job: Job, gpus: int) -> list[Finding]:
    """What `DistributedConfig` refuses."""
    by, found = job.layout, []
    dp = by.dp or 1
    if dp > 1 and by.pp > 1:
        found.append(
            Finding(
                "refused",
                f"fsdp_size x dp_replicate_size = {dp} with pp_size={by.pp}",
                "Combining FSDP with pipeline parallelism is not supported yet.",
                ("pp_size=1", f"fsdp_size=1, tp_size={by.tp}"),
            )
        )
    if by.ep > 1 and by.ep % by.tp:
        found.append(Finding("refused", f"ep_size={by.ep} is no multiple of tp_size={by.tp}", "`ep_size` must be a multiple of `tp_size`.",
                             (f"ep_size={by.tp}", f"ep_size={2 * by.tp}")))  # fmt: skip
    if by.ep > 1 and dp // by.copies * by.tp % by.ep:
        legal = tuple(f"ep_size={d}" for d in divisors_near(dp // by.copies * by.tp, by.ep))
        found.append(
            Finding(
                "refused",
                f"ep_size={by.ep} does not divide fsdp_size x tp_size",
                "`ep_size` must divide `fsdp_size * tp_size`.",
                legal,
            )
        )
    total = by.tp * by.pp * dp
    if total != gpus:
        found.append(Finding("refused", f"the sizes multiply to {total}, and there are {gpus} devices", "WORLD_SIZE must be divisible",
                             (f"fsdp_size={max(1, gpus // (by.tp * by.pp * by.copies))}",)))  # fmt: skip
    return [*found, *late_findings(job)]


def _config_of(job: Job) -> dict[str, Any]:
    """The arguments of `DistributedConfig`. Raises NotExpressible if it cannot say the job."""
    by, lacking = job.layout, []
    dp = by.dp_on(job.gpus or by.tp * by.pp * by.cp)
    if by.cp > 1:
        lacking.append(f"cp={by.cp}: the nearest is Accelerate's parallelism_config_cp_size")
    if dp > 1 and by.zero != 3:
        lacking.append(f"ZeRO-{by.zero} over {dp} ranks: the nearest is fsdp_size (ZeRO-3)")
    if dp > 1 and by.pp > 1:
        lacking.append(f"dp={dp} with pp={by.pp}: the nearest is pp=1")
    if by.ep > 1 and by.tp > 1 and by.ep % by.tp:
        lacking.append(f"ep={by.ep} with tp={by.tp}: ep_size is a multiple of tp_size")
    if by.sequence_parallel:
        lacking.append("sequence parallelism over tp: the nearest is sequence_parallel=false")
    if by.recompute not in ("none", "full"):
        lacking.append(
            f"recompute {by.recompute}: the nearest is gradient_checkpointing (all layers)"
        )
    if by.offload == "optimizer":
        lacking.append(
            "the optimizer's state alone in host memory: the nearest is fsdp_cpu_offload"
        )
    if by.stages and len(set(by.stages)) > 1:
        lacking.append(
            f"stages of {'-'.join(map(str, by.stages))} layers: its pipeline deals layers evenly"
        )
    if lacking:
        raise NotExpressible(f"Transformers' DistributedConfig cannot say {'; '.join(lacking)}")
    data: dict[str, Any] = {
        "tp_size": by.tp,
        "fsdp_size": dp // by.copies,
        "dp_replicate_size": by.copies,
        "pp_size": by.pp,
    }
    data |= {"ep_size": by.ep} if by.ep > 1 else {}
    data |= {"fsdp_cpu_offload": True} if by.offload == "parameters" else {}
    return data | {"fsdp_mixed_precision": job.facts.precision != "fp32"}


def _flags_of(job: Job) -> dict[str, str]:
    """The arguments as texts."""
    return {name: str(value) for name, value in _config_of(job).items()}


def _words_of(job: Job) -> dict[str, str]:
    """The arguments as texts, with the batches, which stand in the training script."""
    return _flags_of(job) | in_script(job)


def _held(job: Job) -> dict[str, Any]:
    """The pins that a job's file cannot change: recomputation stands in the training script."""
    return {"recompute": job.layout.recompute}


def _write(job: Job) -> Exported:
    """The JSON of a `DistributedConfig`. Raises NotExpressible if it cannot say the job."""
    by, gpus = job.layout, job.gpus or 1
    number = by.micro_batches_on(gpus)
    losses = [
        f"batches: set per_device_train_batch_size={by.micro_batch} and gradient_accumulation_steps={number} in TrainingArguments"
    ]
    losses += (
        ["recomputation: set gradient_checkpointing=True in TrainingArguments"]
        if by.recompute == "full"
        else []
    )
    losses += [f"sequences of {job.seq} tokens: the data decides"] if job.seq else []
    text = json.dumps(_config_of(job), indent=2) + "\n"
    launch = f"{torchrun(job)} train.py"
    return Exported("transformers 5.24", text, launch, {}, tuple(losses), "distributed.json")


TRANSFORMERS = Target(
    LIMITS["transformers"],
    _reads,
    _read,
    _refusals,
    _write,
    _flags_of,
    words=_words_of,
    held=_held,
)
"""Hugging Face Transformers."""
