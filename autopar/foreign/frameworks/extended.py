"""Configurations that stand on others: YAML that extends other files, and commands that name the
configuration which they override.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import read_mapping
from autopar.foreign.job import FilePart, Finding
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.expansion import is_known

_MOST_DEPTH = 8
"""The most files that extend each other in a row."""

_KEYS = ("defaults", "extends", "includes", "base_config", "config", "model")
"""Keys whose values can be files that the mapping around them extends."""


_PATHS = re.compile("dir|path|file|name|model|data|token|ckpt|check|save|load|result|log|proj")
"""Overrides whose value has slashes and is no configuration."""


def extended_mapping(source: SourceFile) -> tuple[Mapping[str, object], list[Finding]]:
    """The mapping of a YAML or JSON file over the files that it extends, and a finding for each that
    is not there. Raises AutoparError if a file is no mapping.
    """
    findings: list[Finding] = []
    data = _over_bases(read_mapping(source.text, source.name), "", source, findings, 0)
    return data, findings


def extended_file(
    path: str, source: SourceFile, findings: list[Finding]
) -> Mapping[str, object] | None:
    """The mapping of another file over what it extends; None if it is not there."""
    return None if source.read_file(path) is None else _read(path, "", source, findings, 0)


def winning_parts(source: SourceFile) -> tuple[FilePart, ...]:
    """The files of a YAML file's `defaults` that come behind `_self_`, and so count more than it."""
    if not source.name.lower().endswith((".yaml", ".yml")) or "_self_" not in source.text:
        return ()
    try:
        bases = list(_bases(read_mapping(source.text, source.name)))
    except AutoparError:
        return ()
    behind = bases[bases.index(_OWN) + 1 :] if _OWN in bases else []
    texts = [(base, source.read_file(base.name)) for base in behind]
    parts = [(base, _package(base, "", source), text) for base, text in texts if text is not None]
    return tuple(FilePart(under, base.name, text) for base, under, text in parts if under)


def named_configurations(
    words: Iterable[str], source: SourceFile
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
        found = merged_mappings(found, _read(file, "", source, findings, 0))
    for group, name in groups:
        if not _PATHS.search(group):
            base = _read(f"{group}/{name}.yaml", "", source, findings, 0)
            found = merged_mappings(found, {group: base})
    return found, findings


@dataclass(frozen=True, slots=True)
class _Base:
    """A file that a mapping extends. `under` is the key under which its values stand; '' for none.
    `group` is that of Hydra, whose choice another file may replace, and `needed` whether it must be
    there.
    """

    name: str
    under: str = ""
    group: str = ""
    needed: bool = True


_OWN = _Base("_self_")
"""The place of a mapping's own values among what it extends."""


def _over_bases(
    data: Mapping[str, object], folder: str, source: SourceFile, findings: list[Finding], depth: int
) -> Mapping[str, object]:
    """A mapping of a file in `folder` over what it and the mappings in it extend."""
    own: dict[str, object] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            inner = {str(k): v for k, v in value.items()}
            value = _over_bases(inner, folder, source, findings, depth)
        own = merged_mappings(own, {key: value})
    bases = list(_bases(data))
    found: dict[str, object] = {}
    for base in [*bases, *([] if _OWN in bases else [_OWN])]:
        if base is _OWN:
            found = merged_mappings(found, own)
            continue
        values = _read(base.name, folder, source, findings, depth, base.needed)
        under = _package(base, folder, source)
        for part in reversed(under.split(".") if under else ()):
            values = {part: values}
        found = merged_mappings(found, values)
    return found


def _bases(data: Mapping[str, object]) -> Iterator[_Base]:
    """Each file that a mapping extends, in order. Of a group of Hydra the last choice counts."""
    found: list[_Base] = []
    for key in _KEYS:
        value = data.get(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str) and item.endswith((".yaml", ".yml")):
                found.append(_Base(item))
            elif key == "defaults":
                found += _of_hydra(item)
    chosen = {base.group: base for base in found if base.group}
    for base in found:
        if not base.group:
            yield base
        elif base.group in chosen:
            yield chosen.pop(base.group)


def _of_hydra(item: object) -> Iterator[_Base]:
    """What an entry of Hydra's `defaults` names: `base`, `group: name`, `override /group: name`,
    `optional group: name`, `group@package: name`.
    """
    if item == "_self_":
        yield _OWN
    elif isinstance(item, str) and re.fullmatch(r"[\w./@-]+", item):
        path, _, package = item.partition("@")
        group = path.strip("/").rpartition("/")[0]
        under = package or group.replace("/", ".")
        yield _Base(f"{path.lstrip('/')}.yaml", "" if under in ("_global_", "_here_") else under)
    for group, name in item.items() if isinstance(item, Mapping) else ():
        words = str(group).split()
        path, _, package = words[-1].partition("@")
        path = path.strip("/")
        under = package or path.replace("/", ".")
        under = "" if under in ("_global_", "_here_", "_group_") else under
        for choice in name if isinstance(name, list) else [name]:
            if isinstance(choice, str) and re.fullmatch(r"[\w/.-]+", choice) and choice != "_none_":
                file = choice if choice.endswith((".yaml", ".yml")) else f"{choice}.yaml"
                several = isinstance(name, list)
                yield _Base(
                    f"{path}/{file}",
                    under,
                    "" if several else words[-1].lstrip("/"),
                    "optional" not in words,
                )


def _read(
    name: str,
    folder: str,
    source: SourceFile,
    findings: list[Finding],
    depth: int,
    needed: bool = True,
) -> Mapping[str, object]:
    """The mapping of another file over what it extends; {} with a finding if it is not there."""
    path = posixpath.normpath(posixpath.join(folder, name))
    text = source.read_file(path) if depth < _MOST_DEPTH else None
    if text is None and not needed:
        return {}
    if text is None:
        what = f"the values of {name} count too, which is not beside the file"
        findings.append(Finding("unknown", what, legal=(f"put {name} beside the file",)))
        return {}
    inside = posixpath.dirname(path)
    return _over_bases(read_mapping(text, name), inside, source, findings, depth + 1)


def _package(base: _Base, folder: str, source: SourceFile) -> str:
    """The path of keys under which the values of a file stand: Hydra's directive in it counts."""
    text = source.read_file(posixpath.normpath(posixpath.join(folder, base.name))) or ""
    said = re.search(r"^#\s*@package\s+(\S+)", text, re.M)
    if said is None or said[1] == "_group_":
        return base.under
    return "" if said[1] == "_global_" else said[1]


def merged_mappings(base: Mapping[str, object], over: Mapping[str, object]) -> dict[str, object]:
    """Nested mappings, of which the second counts where both have a value."""
    found = dict(base)
    for key, value in over.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        found[key] = merged_mappings(old, value) if both else value  # type: ignore[arg-type]
    return found
