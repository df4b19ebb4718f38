"""Settings in functions of Python that return a configuration, such as recipes. The text is read as it
would run, with the files that it imports, and never run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.job import Finding
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.python_calls import Returned
from autopar.foreign.texts.python_reader import PythonReader
from autopar.foreign.texts.python_values import (
    UNSET,
    Choice,
    Class,
    Later,
    Module,
    PythonFunction,
    Record,
    Unset,
    text_of,
)

MOST_TOTAL = 300_000
"""The most steps that are spent on all functions of a file."""
_LATER = (
    ("finetune", "sft", "peft", "lora"),
    ("debug", "test"),
    ("trainer", "model", "common", "args", "override", "performance"),
)
"""Words in the names of functions that count only if there is no other, the last ones last."""


@dataclass(slots=True)
class Settings:
    """What a function sets.

    Attributes:
        function: its name; '' if the statements of the file are read.
        values: texts by path: `part.name` of `config.part.name = ...`.
        kinds: the class of each part, by its path.
        weak: the paths of arguments of functions that are not in the files.
        choices: the texts that a value may have, by path, where a condition is not known.
        doubted: what may have changed a value and is not in the files, by path.
        missing: what set other values of a part and is not in the files, by the path of the part.
        findings: which other functions there are, and what was assumed.
    """

    function: str = ""
    values: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    weak: set[str] = field(default_factory=set)
    choices: dict[str, tuple[str, ...]] = field(default_factory=dict)
    doubted: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()

    def add(self, prefix: str, record: Record, seen: set[int]) -> None:
        """Adds the fields of a record, whose path is `prefix`."""
        self.kinds[prefix] = record.kind
        if record.missing:
            self.missing[prefix] = record.missing
        if id(record) in seen or len(seen) > 2_000:
            return
        seen = seen | {id(record)}
        for name, value in record.fields.items():
            if isinstance(value, Record) and value.home == id(record) and not value.fields:
                continue  # it was looked at alone
            path = f"{prefix}.{name}" if prefix else name
            self._set(path, value, seen)
            if name in record.weak:
                self.weak.add(path)

    def _set(self, path: str, value: Any, seen: set[int]) -> None:
        """Adds the value of a path."""
        if isinstance(value, Choice):
            found = [item for item in value.values if not isinstance(item, Record)]
            if value.why:
                self.doubted[path] = value.why
            else:
                self.choices[path] = tuple(text_of(item) for item in found)
            value = next((v for v in reversed(value.values) if isinstance(v, Record)), value.values[-1])  # fmt: skip
        if isinstance(value, Record):
            self.add(path, value, seen)
            if value.missing or (value.home and not value.fields):  # it may be a number
                self.values[path] = text_of(value)
        elif isinstance(value, dict):
            self.add(path, Record("dict", {str(k): v for k, v in value.items()}), seen)
        elif not isinstance(value, PythonFunction | Class | Module | Later | Unset):
            self.values[path] = text_of(value)
            for number, item in enumerate(value if isinstance(value, list | tuple) else ()):
                if isinstance(item, Record):
                    self.add(f"{path}.{number}", item, seen)


Fits = Callable[[Settings], bool]


def settings_of(source: SourceFile, fits: Fits, parts: bool = False) -> Settings:
    """The settings of a function of a Python file, by default of the first that `fits` accepts. One of
    a toy or for fine-tuning counts only if there is no other. With `parts`, they are those of each
    object that is made there, by its class. Raises AutoparError if the text is no Python, or has no
    such function.
    """
    reader = PythonReader(source.read_module)
    module = reader.parsed(source.text, source.name, "__main__")
    reader.modules[source.name] = module
    with suppress(Returned):
        reader.load(module)
    own = [name for name, value in module.names.items() if isinstance(value, PythonFunction)]
    names = own or [n for n, v in module.names.items() if isinstance(v, Later)]
    if source.function:
        if not isinstance(reader.plain(module.names.get(source.function)), PythonFunction):
            raise AutoparError(
                f"{source.name} has no function {source.function}; it has {', '.join(own) or 'none'}"
            )
        names = [source.function]
    found: dict[str, Settings] = {}
    spent = 0
    for name in names:
        function = reader.plain(module.names[name])
        if not isinstance(function, PythonFunction) or spent > MOST_TOTAL:
            continue
        reader.steps, reader.unsure, before = 0, 0, len(reader.records)
        try:
            value = reader.called(function, [], {}, name)
        except AutoparError:
            if source.function:
                raise
            continue
        finally:
            spent += reader.steps
        scope = {key: item for key, item in reader.last.items() if not key.startswith("@")}
        candidates = _candidates(reader, value, scope, reader.records[before:], parts)
        settings = next((s for s in candidates if fits(s)), None)
        if settings is not None or source.function:
            found[name] = settings or Settings()
    notes = tuple(Finding("note", note) for note in reader.notes)
    if not found:
        rest = _candidates(reader, None, module.names, reader.records, parts)
        settings = next((s for s in rest if fits(s)), Settings())
        settings.findings = notes
        return settings
    name = min(found, key=_order)
    others = [other for other in found if other != name and not other.startswith("_")]
    note = f"read from function {name}; for {', '.join(others[:6])}{' and others' if others[6:] else ''} give {source.name}:NAME"
    settings = found[name]
    settings.function = name
    settings.findings = (*([Finding("note", note)] if others else []), *notes)
    return settings


def _order(name: str) -> tuple[bool, int]:
    """How late a function comes among those that set options."""
    ranks = [rank for rank, words in enumerate(_LATER, 1) if any(word in name for word in words)]
    return name.startswith("_"), max(ranks, default=0)


def _candidates(
    reader: PythonReader, value: Any, scope: Mapping[str, Any], made: list[Record], parts: bool
) -> Iterator[Settings]:
    """The settings of what a function returns, then those of its names, the last first."""
    if parts:
        settings = Settings()
        for record in made:
            settings.add(record.kind, record, set())
        yield settings
        return
    likely = reader.likely(value)
    values = likely if isinstance(likely, tuple | list) else [likely]
    names = [reader.likely(item) for item in reversed(list(scope.values())) if item is not UNSET]
    for record in [*values, *names]:
        if isinstance(record, Record) and record.kind not in ("arguments", "ArgumentParser"):
            settings = Settings()
            settings.add("", record, set())
            yield settings
