"""Reads jobs of torchtitan: TOML files of 0.2 and earlier, flags, and functions of its registry in
Python.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import Arguments, flat_texts, options_of
from autopar.foreign.frameworks.python_settings import Settings, settings_of
from autopar.foreign.frameworks.torchtitan_options import (
    FLAVOR,
    MODE,
    OPTION,
    PARALLELISM,
    TRAINING,
    torchtitan_job,
)
from autopar.foreign.frameworks.unknown import unstated, with_others
from autopar.foreign.job import Finding, Job
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.expansion import is_known, shown_value

EARLIER = {
    "training.data_parallel_replicate_degree": f"{PARALLELISM}data_parallel_replicate_degree",
    "training.data_parallel_shard_degree": f"{PARALLELISM}data_parallel_shard_degree",
    "training.data_parallel_degree": f"{PARALLELISM}data_parallel_shard_degree",
    "training.tensor_parallel_degree": f"{PARALLELISM}tensor_parallel_degree",
    "training.compile": "compile.enable",
    "experimental.pipeline_parallel_degree": f"{PARALLELISM}pipeline_parallel_degree",
    "experimental.pipeline_parallel_schedule": f"{PARALLELISM}pipeline_parallel_schedule",
    "experimental.pipeline_parallel_microbatches": f"{PARALLELISM}pipeline_parallel_microbatches",
    "experimental.context_parallel_degree": f"{PARALLELISM}context_parallel_degree",
    "experimental.enable_async_tensor_parallel": f"{PARALLELISM}enable_async_tensor_parallel",
}
"""Today's names of options of 2024."""


_SIZES = tuple(f"{TRAINING}{name}" for name in ("local_batch_size", "batch_size", "seq_len"))
_STARTS = re.compile(r"^--(parallelism|training|job)\.|torchtitan|(^|/)(train\.py|run_train\.sh)$")
"""Words of a command that starts a training."""


def looks_like_torchtitan(source: SourceFile) -> bool:
    """Whether the text sets degrees of torchtitan."""
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
        or re.search(r"--job\.config[_-]file|torchtitan\.train\b", text) is not None
        or re.search(r"^[^#\n]*\bCONFIG_FILE=\S*\.toml", text, re.MULTILINE) is not None
    )


def read_torchtitan(source: SourceFile) -> Job:
    """The job of a TOML file, of flags in a script, or of a function in Python, which is parsed and
    never run. Raises AutoparError if there is none.
    """
    name = source.name.lower()
    if name.endswith(".toml"):
        found = TorchtitanOptions({OPTION: "2"} | _of_toml(source))  # the default of 0.2
    elif name.endswith(".py"):
        found = _of_python(source)
    else:
        found = _of_script(source)
    if not found.missing and not any(
        key.startswith((PARALLELISM, TRAINING)) for key in found.values
    ):
        raise AutoparError(
            f"no job: {source.name} sets nothing of parallelism or training of torchtitan"
        )
    return job_of_options(found)


def job_of_options(found: TorchtitanOptions) -> Job:
    """The job of options, with all that it may be besides."""
    args = Arguments(found.values)
    args.findings += found.findings
    job = torchtitan_job(args)
    names = [*unstated(found.missing, found.values), *sorted(args.open)]

    def read(options: Mapping[str, str]) -> Job:
        return torchtitan_job(Arguments(options))

    job = with_others(job, read, found.values, names, found.choices)
    if job.unknown:
        return job
    # what a base sets is all said in the file
    kept = tuple(
        finding
        for finding in job.findings
        if finding not in found.findings or finding.kind != "unknown"
    )
    return replace(job, findings=kept)


@dataclass(slots=True)
class TorchtitanOptions:
    """Options by name, those that something sets which was not read, the values of those that have
    several, and findings.
    """

    values: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)


OF_SECTION = {
    "parallelism": [
        f"{PARALLELISM}{name}"
        for name in (
            "tensor_parallel_degree", "pipeline_parallel_degree", "context_parallel_degree", "expert_parallel_degree",
            "data_parallel_replicate_degree", "data_parallel_shard_degree", "fsdp_reshard_after_forward",
            "pipeline_parallel_schedule", "enable_sequence_parallel",
        )
    ],
    "training": [
        f"{TRAINING}{name}"
        for name in (
            "local_batch_size", "global_batch_size", "seq_len", "enable_cpu_offload", "mixed_precision_param",
        )
    ],
    "compile": ["compile.enable"],
}  # fmt: skip
"""The options of weight of a part of the configuration."""
EVERY_OPTION = [
    *OF_SECTION["parallelism"],
    *OF_SECTION["training"],
    *OF_SECTION["compile"],
    MODE,
    "model.converters",
]
"""All options of weight."""


def _of_toml(source: SourceFile) -> dict[str, str]:
    try:
        data: Mapping[str, Any] = tomllib.loads(source.text)
    except tomllib.TOMLDecodeError as error:
        raise AutoparError(f"{source.name} is no TOML: {error}") from None
    found = flat_texts(data)
    if pp := found.get("experimental.pipeline_parallel_degree"):  # a micro-batch for each rank
        found.setdefault("experimental.pipeline_parallel_microbatches", pp)
    return {EARLIER.get(name, name): value for name, value in found.items()}


def _of_script(source: SourceFile) -> TorchtitanOptions:
    script = source.script()
    found, findings, missing = dict[str, str](), list[Finding](), list[str]()
    for _, words in script.programs():
        if not any(_STARTS.search(word) for word in words):
            continue
        policies = [word for word in words if word.startswith("activation-checkpoint:")]
        found |= options_of(word for word in words if word not in policies)
        found |= {MODE: policies[-1].partition(":")[2].replace("-", "_")} if policies else {}
    for name in [name for name in found if ".no_" in name]:
        found[name.replace(".no_", ".", 1)] = "False"
        del found[name]
    found = {EARLIER.get(name, name): value for name, value in found.items()}
    path = found.pop("job.config_file", "") or script.exported("CONFIG_FILE")
    if isinstance(path, str) and path.endswith(".toml"):
        if text := script.reader(source.read_file)(path):
            found = _of_toml(SourceFile(text, path)) | found
        else:
            if not any(key.startswith(PARALLELISM) or key in _SIZES for key in found):
                raise AutoparError(
                    f"no job: the values of {source.name} stand in {path}, which is not beside it: "
                    f"put it there, or autopar check {path}"
                )
            what = f"values stand in {path}, which is not beside the file"
            findings.append(Finding("unknown", what, legal=(f"put {path} beside it",)))
            missing += EVERY_OPTION
    if "module" not in found:  # before 0.3
        found.setdefault(OPTION, "2")
    for variable in ("NGPU", "CONFIG", "MODULE"):
        if (value := script.exported(variable)) is not None:
            found.setdefault({"NGPU": "nproc_per_node"}.get(variable, variable.lower()), value)
    options = TorchtitanOptions(found, missing, {}, findings)
    if "config" in found:
        _add_registry(options, source)
    return options


def _add_registry(options: TorchtitanOptions, source: SourceFile) -> None:
    """Adds what the function of the registry sets that `--config` names, if its file is there."""
    name, module = options.values["config"], options.values.get("module", "")
    files = (f"torchtitan/models/{module}/config_registry.py", "config_registry.py")
    text = next(filter(None, map(source.read_file, files)), None) if is_known(name) else None
    if text is not None:
        try:
            base = _of_python(SourceFile(text, "config_registry.py", function=name))
        except AutoparError:
            text = None
        else:
            options.values = base.values | options.values
            options.missing += base.missing
            options.choices |= base.choices
    if text is None:
        options.missing += [
            n for n in EVERY_OPTION if n not in _NEVER or not FLAVOR.fullmatch(name)
        ]
        what = f"the configuration {shown_value(name)} sets what the command leaves out, and is not beside the file"
        legal = ("put config_registry.py beside it", "give the options in the command too")
        options.findings.append(Finding("unknown", what, legal=legal))


_NEVER = (
    f"{TRAINING}mixed_precision_param", f"{TRAINING}enable_cpu_offload", f"{PARALLELISM}enable_sequence_parallel", "model.converters",
    f"{PARALLELISM}pipeline_parallel_schedule",
)  # fmt: skip
"""What no configuration of torchtitan's own registry sets, unless its name says so."""


_SECTIONS = {
    "parallelism": PARALLELISM,
    "training": TRAINING,
    "compile": "compile.",
}
"""Where the settings of a part of the configuration belong."""
_POLICY_CLASSES = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}


def _of_python(source: SourceFile) -> TorchtitanOptions:
    def fits(settings: Settings) -> bool:
        kinds = settings.kinds
        return bool({"parallelism", "training"} & set(kinds)) and "actor_rollout" not in kinds

    settings = settings_of(source, fits)
    found = TorchtitanOptions(findings=list(settings.findings))
    for path, value in settings.values.items():
        section, _, name = path.rpartition(".")
        if section in _SECTIONS:
            found.values[_SECTIONS[section] + name] = value
            known = [text for text in settings.choices.get(path, ()) if is_known(text)]
            found.choices |= {_SECTIONS[section] + name: tuple(known)} if known else {}
            found.missing += [_SECTIONS[section] + name] if path in settings.doubted else []
    policy = settings.kinds.get("activation_checkpoint", "")
    found.values |= {MODE: _POLICY_CLASSES[policy]} if policy in _POLICY_CLASSES else {}
    if settings.values.get("activation_checkpoint") == "None":
        found.values[MODE] = "none"
    found.values["model.flavor"] = settings.values.get("model_spec.0", "")
    found.values["model.name"] = re.sub(r"^graph_trainer_|_(\d|debug).*", "", settings.function)
    if any(kind.startswith("Float8LinearConverter") for kind in settings.kinds.values()):
        found.values["model.converters"] = "float8"
    whole = "" in settings.missing
    for section in _SECTIONS:
        if section in settings.missing or (whole and section not in settings.kinds):
            found.missing += OF_SECTION[section]
    if whole and not policy:
        found.missing.append(MODE)
    for name in dict.fromkeys(settings.missing.values()):
        if name == settings.missing.get("") or name in (settings.missing.get(s) for s in _SECTIONS):
            what = f"{name} sets values too, and is not in the files beside this one"
            legal = ("put the file that defines it in the place from which it is imported",)
            found.findings.append(Finding("unknown", what, legal=legal))
    return found
