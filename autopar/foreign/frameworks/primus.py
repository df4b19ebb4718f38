"""Primus: a YAML file that names a framework, its presets, a model, and what overrides them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import flat, is_none, read_mapping
from autopar.foreign.frameworks.bridge import job_over_recipe
from autopar.foreign.frameworks.extended import extended_file, merged_mappings
from autopar.foreign.frameworks.megatron_read import job_of_mapping
from autopar.foreign.frameworks.torchtitan_read import (
    EVERY_OPTION,
    TorchtitanOptions,
    job_of_options,
)
from autopar.foreign.frameworks.unknown import ALL_OPTIONS, SHAPE
from autopar.foreign.job import Finding, Job
from autopar.foreign.target import SourceFile

_PLACES = (
    "{name}",
    "primus/configs/{kind}/{framework}/{name}",
    "configs/{kind}/{framework}/{name}",
)
"""Where a preset lies: beside the file, or in the package."""
_SECTIONS = (
    "model",
    "training",
    "parallelism",
    "activation_checkpoint",
    "compile",
    "optimizer",
    "quantize",
    "experimental",
    "job",
    "float8",
)
"""Sections of torchtitan that stand in an override."""


def reads_primus(source: SourceFile) -> bool:
    """Whether a file is one of Primus: modules, each with its framework."""
    yaml = source.name.lower().endswith((".yaml", ".yml"))
    return (
        yaml
        and bool(re.search(r"^modules:", source.text, re.M))
        and bool(re.search(r"^\s+framework:", source.text, re.M))
    )


def read_primus(source: SourceFile) -> Job:
    """The job of the first module that trains. Raises AutoparError if it is one of a framework that
    autopar does not read.
    """
    data = read_mapping(source.text, source.name)
    name, module = next(_modules(data), ("", {}))
    framework = str(module.get("framework", "")).lower()
    if framework not in ("megatron", "torchtitan", "megatron_bridge"):
        raise AutoparError(
            f"{source.name} is a job of {framework or 'no framework'} (by Primus), which autopar does not read; "
            "of Primus it reads megatron, megatron_bridge and torchtitan"
        )
    findings: list[Finding] = []
    values: dict[str, object] = {}
    absent: list[str] = []
    for kind, key in (("modules", "config"), ("models", "model")):
        preset = module.get(key)
        if isinstance(preset, str):  # `${PRIMUS_MODEL:llama3_8B}.yaml`
            preset = re.sub(r"\$\{\w+:([^{}]*)\}", r"\1", preset)
        if isinstance(preset, str) and not is_none(preset):
            found = _preset(preset, kind, framework, source, findings)
            absent += [] if found is not None else [kind]
            values = merged_mappings(values, found or {})
    own = module.get("overrides")
    values = merged_mappings(values, own if isinstance(own, Mapping) else {})
    if framework == "torchtitan":
        return _of_torchtitan(values, findings, bool(absent))
    missing = (
        *((n for n in ALL_OPTIONS if n not in SHAPE) if "modules" in absent else ()),
        *(SHAPE if "models" in absent else ()),
    )
    if framework == "megatron_bridge":
        return job_over_recipe(values, findings)
    values.setdefault("framework", "megatron")
    job = job_of_mapping({"modules": {name: {"overrides": values}}}, missing)
    # presets list every option: those that override them are shown
    names = {str(name) for name in own} if isinstance(own, Mapping) else set()
    unpriced = tuple(text for text in job.unpriced if text.partition("=")[0] in names)
    return replace(job, findings=(*findings, *job.findings), unpriced=unpriced)


def _modules(data: Mapping[str, object]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """(name, values) of each module."""
    modules = data.get("modules")
    for name, module in modules.items() if isinstance(modules, Mapping) else ():
        if isinstance(module, Mapping) and "framework" in module:
            yield str(name), {str(key): value for key, value in module.items()}


def _preset(
    name: str, kind: str, framework: str, source: SourceFile, findings: list[Finding]
) -> Mapping[str, object] | None:
    """The values of a preset over what it extends; None with a finding if it is not there."""
    places = [place.format(name=name, kind=kind, framework=framework) for place in _PLACES]
    for place in places:
        if (found := extended_file(place, source, findings)) is not None:
            return found
    what = f"the values of {name} count too, which is not beside the file"
    legal = (f"put {name} beside the file", f"put {places[1]} in a folder above it")
    findings.append(Finding("unknown", what, legal=legal))
    return None


def _of_torchtitan(values: Mapping[str, object], findings: list[Finding], absent: bool) -> Job:
    """The job of torchtitan's sections."""
    found = {
        path: str(value)
        for path, value in flat(values).items()
        if path.partition(".")[0] in _SECTIONS and value is not None
    }
    return job_of_options(
        TorchtitanOptions(found, list(EVERY_OPTION) if absent else [], {}, findings)
    )
