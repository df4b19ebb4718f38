"""The state of an optimizer together with that of optimizers inside it, as in Lookahead and SAM.
Classes that are not torch's may keep state in attributes, such as a count of steps.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, shown


def members(optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.optim.Optimizer]]:
    """The optimizer as '', and each one in its attributes with state of its own as 'ATTRIBUTE.', or
    'ATTRIBUTE.KEY.' if the attribute is a list, tuple or dict.
    """
    return list(_members(optimizer, "", set()))


def _members(
    optimizer: torch.optim.Optimizer, prefix: str, seen: set[int]
) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    seen.add(id(optimizer.state))
    yield prefix, optimizer
    for name, attribute in vars(optimizer).items():
        places: Iterable[tuple[Any, Any]] = [("", attribute)]
        if isinstance(attribute, list | tuple):
            places = ((f"{place}.", value) for place, value in enumerate(attribute))
        elif isinstance(attribute, dict):
            places = ((f"{key}.", value) for key, value in attribute.items())
        for place, inner in places:
            if isinstance(inner, torch.optim.Optimizer) and id(inner.state) not in seen:
                yield from _members(inner, f"{prefix}{name}.{place}", seen)


def states(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """The state of each parameter that has some. Keys of inner optimizers begin as in `members`.
    Raises AutoparError for state that belongs to no parameter.
    """
    found: dict[Tensor, dict[str, Any]] = {}
    for prefix, inner in members(optimizer):
        for parameter, state in inner.state.items():
            if not isinstance(parameter, Tensor):
                raise AutoparError(
                    f"{type(optimizer).__name__} keeps state under {shown(parameter)}, which is no parameter, so that a checkpoint cannot "
                    "hold it. Keep it in the state of a parameter, or in an option of a parameter group"
                )
            if state:
                found.setdefault(parameter, {}).update(
                    {f"{prefix}{key}": value for key, value in state.items()}
                )
    return found


def set_state(
    optimizer: torch.optim.Optimizer, parameter: Tensor, state: Mapping[str, Any]
) -> None:
    """Replace the state of a parameter, with keys as in `states`; {} removes it."""
    left = dict(state)
    for prefix, inner in reversed(members(optimizer)):
        own = {key: left.pop(key) for key in list(left) if key.startswith(prefix)}
        inner.state.pop(parameter, None)
        if own:
            inner.state[parameter] = {key[len(prefix) :]: value for key, value in own.items()}


def attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of attributes of the optimizer and of inner ones that are data, by name: numbers, texts,
    None, tensors, and lists, tuples, deques and dicts of these. Tensors are on the CPU. What torch's own
    classes keep is left out.
    """
    return {
        f"{prefix}{name}": data
        for prefix, inner in members(optimizer)
        for name, value in _own(inner).items()
        if (data := _data(value)) is not _OTHER
    }


def digests(values: Mapping[str, Any]) -> dict[str, int]:
    """A number for each of `attributes`, which almost always differs where the attribute does."""

    def told(value: Any) -> Any:
        if isinstance(value, Tensor):
            content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            return tuple(value.shape), value.dtype, zlib.crc32(content)
        if isinstance(value, list):
            return [told(entry) for entry in value]
        if isinstance(value, dict):
            return {key: told(entry) for key, entry in value.items()}
        return value

    return {name: zlib.crc32(repr(told(value)).encode()) for name, value in values.items()}


def set_attributes(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Set `attributes`: tensors, lists, deques and dicts in place."""
    device = next(p.device for group in optimizer.param_groups for p in group["params"])
    for prefix, inner in reversed(members(optimizer)):
        for name, value in values.items():
            key = name.removeprefix(prefix)
            if name.startswith(prefix) and "." not in key and not _is_torchs(inner):
                setattr(inner, key, _put(vars(inner).get(key), value, device))


_OTHER = object()


def _is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")


def _own(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The attributes that the class of the optimizer has beyond those of torch's base class."""
    if _is_torchs(optimizer):
        return {}
    common = {"_opt_called", *vars(torch.optim.SGD([torch.zeros(1)], 0.1))}
    return {name: value for name, value in vars(optimizer).items() if name not in common}


def _data(value: Any) -> Any:
    """A copy of `value` of plain types, or `_OTHER` if it is no data."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return _OTHER if isinstance(value, nn.Parameter) else value.detach().cpu().clone()
    if isinstance(value, list | tuple | deque):
        found = [_data(entry) for entry in value]
        return _OTHER if any(entry is _OTHER for entry in found) else found
    if isinstance(value, dict):
        entries = {key: _data(entry) for key, entry in value.items()}
        plain = all(isinstance(key, str | int) for key in entries)
        other = any(entry is _OTHER for entry in entries.values())
        return entries if plain and not other else _OTHER
    return _OTHER


def _put(old: Any, new: Any, device: torch.device) -> Any:
    """The value of an attribute that was `old`, and is now to be `new`, as `_data` copied it."""
    if isinstance(new, Tensor):
        if isinstance(old, Tensor) and old.shape == new.shape:
            return old.copy_(new)
        return new.to(device) if new.dim() else new
    if isinstance(new, list):
        before = list(old) if isinstance(old, list | tuple | deque) else []
        before += [None] * (len(new) - len(before))
        found = [_put(one, other, device) for one, other in zip(before, new, strict=False)]
        if isinstance(old, list | deque):
            old.clear()
            old.extend(found)
            return old
        return tuple(found) if isinstance(old, tuple) else found
    if isinstance(new, dict):
        entries = old if isinstance(old, dict) else {}
        found_entries = {key: _put(entries.get(key), one, device) for key, one in new.items()}
        entries.clear()
        entries.update(found_entries)
        return entries
    return new
