"""Reads jobs of torchtitan: TOML files of 0.2 and earlier, flags, and functions of its registry in
Python.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from autopar.errors import AutoparError
from autopar.targets.arguments import Arguments, flat_texts, options_of
from autopar.targets.job import Finding, Job
from autopar.targets.python_settings import settings_of
from autopar.targets.shell import read_script
from autopar.targets.target import Source
from autopar.targets.torchtitan_options import MODE, OPTION, P, T, job_of

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


_SIZES = tuple(f"{T}{name}" for name in ("local_batch_size", "batch_size", "seq_len"))
_STARTS = re.compile(r"^--(parallelism|training|job)\.|torchtitan|(^|/)(train\.py|run_train\.sh)$")
"""Words of a command that starts a training."""


def looks_like_torchtitan(source: Source) -> bool:
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


def read_torchtitan(source: Source) -> Job:
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
    return job_of(args)


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
    script = read_script(source.text, source.read_file, source.args)
    found, findings = dict[str, str](), list[Finding]()
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
            found = _of_toml(Source(text, path)) | found
        else:
            if not any(key.startswith(P) or key in _SIZES for key in found):
                raise AutoparError(
                    f"no job: the values of {source.name} stand in {path}, which is not beside it: "
                    f"put it there, or autopar check {path}"
                )
            what = f"values stand in {path}, which is not beside the file: the defaults are read"
            findings.append(Finding("unknown", what, legal=(f"put {path} beside it",)))
    if "module" not in found:  # before 0.3
        found.setdefault(OPTION, "2")
    for variable in ("NGPU", "CONFIG", "MODULE"):
        if (value := script.exported(variable)) is not None:
            found.setdefault({"NGPU": "nproc_per_node"}.get(variable, variable.lower()), value)
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
