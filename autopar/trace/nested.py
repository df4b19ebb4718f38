"""Batches that nest: mappings, sequences and dataclasses of tensors and Python values, taken apart
into entries by flat name, and put together again.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from autopar.errors import AutoparError, shown

_PLAIN = (NoneType, bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device)
"""Types of entries that are no tensors: forward is captured with their values."""


def leaves(batch: Any, what: str = "the batch") -> dict[str, Any]:
    """What a batch holds, by flat name, in order: keys and places on the way, joined by dots, such
    as 'inputs.ids' or 'images.0'. Entries of a sequence as a whole are `arg0`, `arg1`, ...

    Raises AutoparError if a key of the batch is no text, or two entries have one name. `what` names
    the batch in the message.
    """
    found: dict[str, Any] = {}
    for name, value in _walk(batch, "", "arg", what):
        if name in found:
            raise AutoparError(f"{what} has two entries that are called {name!r}; rename one")
        found[name] = value
    return found


def rebuilt(batch: Any, entries: Mapping[str, Any], name: str = "", prefix: str = "arg") -> Any:
    """A batch nested like `batch`, with the values of `entries` by flat name; entries that are not
    there stay as they are.
    """
    items = _items(batch, prefix)
    if items is None:
        return entries.get(name, batch)
    parts = {key: rebuilt(value, entries, _joined(name, key), "") for key, value in items}
    if isinstance(batch, Mapping):
        new: Any = copy.copy(batch)
        if new is batch:
            return parts
        for key in batch:
            new[key] = parts[key]
        return new
    if dataclasses.is_dataclass(batch):
        new = copy.copy(batch)
        for key, value in parts.items():
            object.__setattr__(new, key, value)
        return new
    values = list(parts.values())
    if hasattr(batch, "_fields"):
        return type(batch)(*values)
    return values if isinstance(batch, list) else tuple(values)


def is_plain(value: Any) -> bool:
    """Whether an entry of a batch is a Python value that forward may be captured with."""
    return isinstance(value, _PLAIN)


def check_plain(given: Mapping[str, Any], planned: Mapping[str, Any]) -> None:
    """Raise AutoparError if a batch has other Python values than the one with which forward was
    captured. Values that are None may be missing. Both are by flat name.
    """
    for name, value in given.items():
        if name not in planned:
            raise AutoparError(
                f"batch entry {name!r} is {shown(value)}; the example batch has no such entry: leave it out, or give an example with it"
            )
    for name, value in planned.items():
        if name not in given and value is None:
            continue
        if name not in given:
            raise AutoparError(
                f"the batch lacks {name!r}, which is {shown(value)} in the example batch: give each batch that value"
            )
        if type(given[name]) is not type(value) or given[name] != value:
            raise AutoparError(
                f"batch entry {name!r} is {shown(given[name])}, and {shown(value)} in the example batch: forward was captured with that "
                f"value, which is the same for all batches. {_remedy(value)}"
            )


def _remedy(value: Any) -> str:
    if isinstance(value, int | float):
        return "A number that differs is an input if it is a tensor, in the example too: torch.tensor(value)"
    return "Leave out what forward does not read, or make an engine for each value"


def _walk(batch: Any, name: str, prefix: str, what: str) -> Iterator[tuple[str, Any]]:
    if isinstance(batch, Mapping):
        for key in batch:
            if not isinstance(key, str):
                raise AutoparError(
                    f"{what} has the key {shown(key)}; keys are texts, such as the names of arguments of forward"
                )
    items = _items(batch, prefix)
    if items is None:
        yield name, batch
        return
    for key, value in items:
        yield from _walk(value, _joined(name, key), "", what)


def _items(value: Any, prefix: str) -> list[tuple[str, Any]] | None:
    """(flat key, value) of the entries of a container; None for any other value."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | torch.Size):
        keys = getattr(value, "_fields", None) if not prefix else None
        keys = keys or [f"{prefix}{place}" for place in range(len(value))]
        return list(zip(keys, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not prefix:
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return None


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
