"""Configurations that stand on others: YAML that extends other files, and commands that name the
configuration which they override.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping

from autopar.targets.arguments import read_mapping
from autopar.targets.expansion import is_known
from autopar.targets.job import Finding
from autopar.targets.target import Source

MOST_DEPTH = 8
"""The most files that extend each other in a row."""

_KEYS = ("defaults", "extends", "includes", "base_config", "config", "model")
"""Keys whose values can be files that the mapping around them extends."""


_PATHS = re.compile("dir|path|file|name|model|data|token|ckpt|check|save|load|result|log|proj")
"""Overrides whose value has slashes and is no configuration."""


def extended_mapping(source: Source) -> tuple[Mapping[str, object], list[Finding]]:
    """The mapping of a YAML or JSON file over the files that it extends, and a finding for each that
    is not there. Raises AutoparError if a file is no mapping.
    """
    findings: list[Finding] = []
    data = _over_bases(read_mapping(source.text, source.name), "", source, findings, 0)
    return data, findings


def named_configurations(
    words: Iterable[str], source: Source
) -> tuple[Mapping[str, object], list[Finding]]:
    """The configurations that a command with overrides names, as `--config-name NAME` or as
    `training=gpt3/5b`, and a finding for each that is not there.
    """
    text = " ".join(filter(is_known, words))
    groups = re.findall(r"(?:^|\s)\+?([a-z_]+)=([\w.-]+(?:/[\w.-]+)+)(?=\s|$)", text)
    found: Mapping[str, object] = {}
    findings: list[Finding] = []
    for name in re.findall(r"--config-name[ =]['\"]?([\w./-]+)", text):
        file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
        found = _merged(found, _read(file, "", source, findings, 0))
    for group, name in groups:
        if not _PATHS.search(group):
            base = _read(f"{group}/{name}.yaml", "", source, findings, 0)
            found = _merged(found, {group: base})
    return found, findings


def _over_bases(
    data: Mapping[str, object], folder: str, source: Source, findings: list[Finding], depth: int
) -> Mapping[str, object]:
    """A mapping of a file in `folder` over what it and the mappings in it extend."""
    found: dict[str, object] = {}
    for name, group in _bases(data):
        base = _read(name, folder, source, findings, depth)
        found = _merged(found, {group: base} if group else base)
    for key, value in data.items():
        if isinstance(value, Mapping):
            inner = {str(k): v for k, v in value.items()}
            value = _over_bases(inner, folder, source, findings, depth)
        found = _merged(found, {key: value})
    return found


def _bases(data: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """(file, the key under which its values stand or '') of each file that a mapping extends."""
    for key in _KEYS:
        value = data.get(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item.endswith((".yaml", ".yml")):
                yield item, ""
            elif key == "defaults" and isinstance(item, str) and re.fullmatch(r"[\w./-]+", item):
                if item != "_self_":
                    yield f"{item}.yaml", ""
            elif key == "defaults" and isinstance(item, Mapping):
                for group, name in item.items():  # Hydra: a file of a folder, under its name
                    if isinstance(name, str) and re.fullmatch(r"[\w/-]+", str(group)):
                        yield f"{group}/{name}.yaml", str(group).replace("/", ".")


def _read(
    name: str, folder: str, source: Source, findings: list[Finding], depth: int
) -> Mapping[str, object]:
    """The mapping of another file over what it extends; {} with a finding if it is not there."""
    path = posixpath.normpath(posixpath.join(folder, name))
    text = source.read_file(path) if depth < MOST_DEPTH else None
    if text is None:
        what = f"the values of {name} count too, which is not beside the file"
        findings.append(Finding("unknown", what, legal=(f"put {name} beside the file",)))
        return {}
    inside = posixpath.dirname(path)
    return _over_bases(read_mapping(text, name), inside, source, findings, depth + 1)


def _merged(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Nested mappings, of which the second counts where both have a value."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return found
