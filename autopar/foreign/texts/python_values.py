"""The values of Python files that are read and never run: constants, configurations with fields, and
what is not known.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.foreign.texts.expansion import unknown


@dataclass(eq=False, slots=True)
class Record:
    """An object with fields: of a class that is not in the files, or of one that is.

    Attributes:
        kind: the last name of its class, or of the function that returned it.
        fields: its values by name; an argument without a name has its number.
        missing: what set other fields and is not in the files, such as 'base_config'; '' if the
            fields that are not here have the framework's defaults.
        level: how many conditions that are not known there were around the call that made it.
        weak: the fields that are arguments of what is missing, which may use them otherwise.
        cls: its class, if that is in the files.
        home: the record of which it was read as a field that the files do not set, by `id`; or 0.
    """

    kind: str
    fields: dict[str, Any] = field(default_factory=dict)
    missing: str = ""
    level: int = 0
    weak: frozenset[str] = frozenset()
    cls: Class | None = None
    home: int = 0

    def __str__(self) -> str:
        return unknown(self.missing or self.kind)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of several values, since a condition is not known. The last one is the most likely. `why`
    names what may have changed a value, and is not in the files: then others are possible too.
    """

    values: tuple[Any, ...]
    why: str = ""

    def __str__(self) -> str:
        return unknown(f"one of {', '.join(dict.fromkeys(map(text_of, self.values)))}"[:80])


@dataclass(frozen=True, slots=True)
class Unset:
    """The value that a field has before the file sets it."""

    def __str__(self) -> str:
        return "unset"


UNSET = Unset()


@dataclass(frozen=True, slots=True)
class Named:
    """A name of a module that is not in the files, such as `torch.bfloat16`.

    Attributes:
        path: its dotted path.
        ours: whether the module belongs to the job: it would stand beside the file.
    """

    path: str
    ours: bool = False

    def __str__(self) -> str:
        return self.path


@dataclass(eq=False, slots=True)
class Module:
    """A file, or the module of a library, by its dotted path. `names` are what it defines."""

    path: str
    file: str = ""
    names: dict[str, Any] = field(default_factory=dict)
    tree: ast.Module | None = None
    state: str = "new"


@dataclass(frozen=True, slots=True)
class Later:
    """An import that is followed when its name is used."""

    module: str
    name: str
    inside: str


@dataclass(eq=False, slots=True)
class PythonFunction:
    """A function of a file. `bound` are arguments that it has got, `self_` the object of a method."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    module: Module
    scope: Mapping[str, Any] = field(default_factory=dict)
    self_: Any = None
    cls: Class | None = None
    bound: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Class:
    """A class of a file with the values of its body and its bases."""

    name: str
    module: Module
    bases: tuple[Any, ...]
    body: dict[str, Any]

    def order(self) -> Iterator[Class]:
        """The class, then its bases that are in the files."""
        yield self
        for base in self.bases:
            if isinstance(base, Class):
                yield from base.order()

    def foreign(self) -> Iterator[Named]:
        """The bases that are not in the files."""
        for cls in self.order():
            yield from (base for base in cls.bases if isinstance(base, Named))

    def find(self, name: str) -> Any:
        """The value of a name in its body or in that of a base; `UNSET` without one."""
        return next((cls.body[name] for cls in self.order() if name in cls.body), UNSET)


MOST_LEAVES = 20_000
"""The most constants of a list or mapping that counts as known."""


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested lists and mappings, the first `MOST_LEAVES` and one more."""
    waiting, steps = [value], 0
    while waiting and steps <= MOST_LEAVES:
        item = waiting.pop()
        steps += 1
        if isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list | tuple | set):
            waiting += item
        else:
            yield item


def is_certain(value: Any) -> bool:
    """Whether a value is known as a constant, or as a list or mapping of such."""
    if isinstance(value, list | tuple | set | dict):
        sizes = list(_leaves(value))
        return len(sizes) < MOST_LEAVES and all(map(is_certain, sizes))
    return value is None or isinstance(value, bool | int | float | str)


def text_of(value: Any) -> str:
    """A value as the text of an option; the marker of an unknown value for what is not certain."""
    if isinstance(value, Named):
        return value.path.rpartition(".")[2] if not value.ours else unknown(value.path)
    if isinstance(value, Choice | Record):
        return str(value)
    if isinstance(value, list | tuple | set | dict) and not is_certain(value):
        return unknown("a list")
    if isinstance(value, PythonFunction | Class | Module | Later):
        return getattr(value, "name", "") or "a function"
    return str(value)
