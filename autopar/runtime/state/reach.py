"""Finds the tensors that a function of the user reads besides its arguments, and puts others in
their place.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from autopar.trace.python_state import globals_of

_EMPTY = object()
_DEEPEST, _MOST = 6, 10_000
"""How many levels of containers and objects are looked through, and how many objects at most."""


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors that a value holds or that a function reads: in its closure, defaults and
    globals, in bound objects, containers, modules and attributes.
    """
    seen: set[int] = set()
    left = [(value, 0)]
    while left and len(seen) < _MOST:
        one, depth = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            yield one
        elif depth < _DEEPEST:
            left += [(part, depth + 1) for part in _parts(one)]


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from _read_by(value).values()
    elif isinstance(value, types.MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType):
        yield from vars(value).values()


def _read_by(function: types.FunctionType) -> dict[str, Any]:
    """By name, what a function reads: variables of its closure, defaults, and globals."""
    found = {
        name: cell.cell_contents
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        )
        if _filled(cell)
    }
    found |= {f"default {k}": value for k, value in enumerate(function.__defaults__ or ())}
    found |= {f"keyword {key}": value for key, value in (function.__kwdefaults__ or {}).items()}
    own = function.__globals__
    return found | {
        f"global {name}": own[name] for name in globals_of(function.__code__) if name in own
    }


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not _EMPTY
    except ValueError:
        return False


def rebound(hook: Any, memo: dict[int, Any]) -> Any:
    """The function `hook`, reading copies in which `memo` (as of copy.deepcopy) replaces tensors.
    What reads none of them is returned as it is.
    """
    if isinstance(hook, functools.partial):
        return functools.partial(rebound(hook.func, memo), *hook.args, **hook.keywords)
    if not isinstance(hook, types.FunctionType) or id(hook) in memo:
        return hook
    memo[id(hook)] = hook  # it may read itself

    def other(value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return rebound(value, memo) if value.__globals__ is hook.__globals__ else value
        reads = any(id(tensor) in memo for tensor in tensors_of(value))
        return copy.deepcopy(value, memo) if reads else value

    cells = tuple(
        types.CellType(other(cell.cell_contents)) if _filled(cell) else cell
        for cell in hook.__closure__ or ()
    )
    names = [name for name in globals_of(hook.__code__) if name in hook.__globals__]
    replaced = {name: other(hook.__globals__[name]) for name in names}
    own = hook.__globals__
    if any(replaced[name] is not own[name] for name in names):
        own = own | replaced
    found = types.FunctionType(hook.__code__, own, hook.__name__, hook.__defaults__, cells)
    if hook.__defaults__:
        found.__defaults__ = tuple(map(other, hook.__defaults__))
    found.__kwdefaults__ = hook.__kwdefaults__ and {
        key: other(value) for key, value in hook.__kwdefaults__.items()
    }
    return found
