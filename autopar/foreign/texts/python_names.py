"""Names, fields and copies of what Python files define that are read and never run."""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.texts.python_values import (
    UNSET,
    Choice,
    Class,
    Later,
    Module,
    Named,
    PythonFunction,
    Record,
    is_certain,
)

_MOST_STEPS = 60_000
"""The most statements and calls that are read."""


class Names(ABC):
    """Looks up and sets names in a scope: a mapping of names, with the scope around it as '@outer'."""

    def __init__(self, read_file: Callable[[str], str | None]) -> None:
        self.read_file = read_file
        self.modules: dict[str, Module] = {}
        self.unsure = self.depth = self.steps = 0
        self.records: list[Record] = []  # in the order in which they are made
        self.scopes: list[dict[str, Any]] = []  # of the functions that are read
        self.last: dict[str, Any] = {}  # the names of the function that was read last
        self.wildcards: list[Named] = []  # `from X import *` of what is not in the files
        self.notes: list[str] = []

    @abstractmethod
    def call(self, node: ast.Call, scope: dict[str, Any], module: Module) -> Any:
        """The value of a call."""

    @abstractmethod
    def called(self, function: Any, args: list[Any], named: dict[str, Any], text: str) -> Any:
        """The value of a function or class with arguments."""

    @abstractmethod
    def imported(self, later: Later) -> Any:
        """What an import gives."""

    @abstractmethod
    def load(self, module: Module) -> Module:
        """A module with the names that its statements define."""

    @abstractmethod
    def run(self, body: Sequence[ast.stmt], scope: dict[str, Any], module: Module) -> None:
        """Reads statements in a scope."""

    @abstractmethod
    def assign(self, target: ast.expr, value: Any, scope: dict[str, Any], module: Module) -> None:
        """Assigns a value to a target."""

    def count(self) -> None:
        """Counts a step. Raises AutoparError if there are too many."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise AutoparError(
                f"the file takes more than {_MOST_STEPS:,} steps to read: give a file with the values"
            )

    def note(self, text: str, value: Any) -> None:
        """Notes what is assumed, if a number or a switch rests on it."""
        if isinstance(value, bool | int) and text not in self.notes:
            self.notes.append(text)

    def made(self, record: Record) -> Record:
        """The record, which is new."""
        self.records.append(record)
        return record

    def likely(self, value: Any) -> Any:
        """The most likely one of several values: the last that is an object, or the last."""
        if not isinstance(value, Choice):
            return value
        objects = [item for item in value.values if isinstance(item, Record)]
        return self.likely((objects or value.values)[-1])

    def plain(self, value: Any) -> Any:
        """A value with an import followed."""
        return self.imported(value) if isinstance(value, Later) else value

    def name(self, name: str, scope: dict[str, Any], module: Module) -> Any:
        """The value of a name."""
        around: Any = scope
        while isinstance(around, dict):
            if name in around:
                value = around[name]
                if isinstance(value, Later):
                    value = self.imported(value)
                    dict.__setitem__(around, name, value)  # no attribute of a class
                return value
            around = around.get("@outer")
        if name in module.names:
            return self.plain(module.names[name])
        if self.wildcards and not name.startswith("_") and name not in dir(__builtins__):
            return Named(f"{self.wildcards[-1].path}.{name}", True)
        return Named(name)

    def field(self, holder: Any, name: str) -> Any:
        """The value of a field, or of a name of a module."""
        holder = self.likely(holder)
        match holder:
            case Module():
                return self._of_module(holder, name)
            case Named():
                return Named(f"{holder.path}.{name}", holder.ours)
            case Class():
                value = holder.find(name)
                return self.plain(value) if value is not UNSET else Named(f"{holder.name}.{name}")
            case Record():
                return self.of_record(holder, name)
        return Record(name, level=self.unsure)

    def _of_module(self, module: Module, name: str) -> Any:
        value = self.load(module).names.get(name, UNSET)
        if value is not UNSET:
            return self.plain(value)
        if module.file.endswith("__init__.py"):  # a file of the package
            return self.imported(Later(f".{name}", "", module.file))
        return Named(f"{module.path}.{name}")

    def of_record(self, holder: Record, name: str) -> Any:
        """The value of a field of a configuration, or of its class."""
        if name in holder.fields:
            return self.plain(holder.fields[name])
        value = holder.cls.find(name) if holder.cls is not None else UNSET
        if isinstance(value, PythonFunction):
            bound = PythonFunction(value.node, value.module, value.scope, holder, value.cls)
            decorators = getattr(value.node, "decorator_list", [])
            names = [ast.unparse(decorator) for decorator in decorators]
            if "staticmethod" in names:
                return value
            return self.called(bound, [], {}, name) if "property" in names else bound
        if value is not UNSET:
            return self.plain(value)
        made = Record(name, missing=holder.missing, level=holder.level, home=id(holder))
        holder.fields[name] = made
        return holder.fields[name]

    def set_field(self, holder: Any, name: str, value: Any) -> None:
        """Sets a field of a configuration."""
        holder = self.likely(holder)
        if isinstance(holder, Class):
            holder.body[name] = value
        if isinstance(holder, Record):
            holder.weak -= {name}
            self.put(holder.fields, name, value, holder.level)

    def put(self, names: dict[Any, Any], name: Any, value: Any, level: int | None = None) -> None:
        """Sets a name. Under a condition that is not known, the value is one of two."""
        level = names.get("@level", 0) if level is None else level
        old = names.get(name, UNSET)
        if self.unsure <= level or old is value or (is_certain(value) and old == value and type(old) is type(value)):  # fmt: skip
            names[name] = value
            return
        before = old.values if isinstance(old, Choice) else (old,)
        names[name] = Choice((*before, value)) if len(before) < 20 else value

    def truth_of(self, value: Any) -> bool | None:
        """Whether a value counts as true; None if the files do not tell."""
        match value:
            case Choice():
                found = {self.truth_of(item) for item in value.values}
                return found.pop() if len(found) == 1 and not value.why else None
            case Record():
                return None if value.missing or not (value.cls or value.fields) else True
            case Named():
                return False if value.path.endswith("TYPE_CHECKING") else None
            case PythonFunction() | Class() | Module():
                return True
            case None | bool() | int() | float() | str() | list() | tuple() | dict() | set():
                return bool(value)
        return None

    def copied(self, value: Any, seen: dict[int, Any] | None = None) -> Any:
        """A deep copy of a value."""
        seen = {} if seen is None else seen
        if id(value) in seen:
            return seen[id(value)]
        self.count()
        if isinstance(value, Record):
            copy = Record(value.kind, {}, value.missing, self.unsure, value.weak, value.cls)
            seen[id(value)] = self.made(copy)
            copy.fields |= {name: self.copied(inner, seen) for name, inner in value.fields.items()}
            return copy
        if isinstance(value, dict):
            seen[id(value)] = found = dict[Any, Any]()
            found |= {name: self.copied(inner, seen) for name, inner in value.items()}
            return found
        if isinstance(value, list):
            return [self.copied(inner, seen) for inner in value]
        return value
