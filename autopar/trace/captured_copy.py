"""Lets forward see the copy of the model that is captured, and keeps the user's model as it is.

Attributes are copied with the model. Variables of functions are not: a hook or a loss may reach the
user's model itself by a variable, `self` of an outer function or a weak reference.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.trace.python_state import Functions
from autopar.trace.registered_tensors import joined_name

_REGISTRIES = ("_parameters", "_buffers", "_modules")


@contextlib.contextmanager
def in_the_copy(
    model: nn.Module, functions: Functions, copies: Mapping[int, Any]
) -> Iterator[None]:
    """A context in which variables that `functions` read hold the copies of the modules of `model`.
    `copies` maps the id of an object to its copy.

    Puts back what the modules of `model` hold. Raises AutoparError, with the name, if that changed.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_untouched(model))
        for _, _, value, put in functions.places():
            own = _copied(value, copies)
            if own is not value:
                stack.callback(put, value)
                put(own)
        yield


def _copied(value: Any, copies: Mapping[int, Any]) -> Any:
    """What stands for `value` in the copy of the model; itself if that is no part of the model."""
    if isinstance(value, nn.Module):
        return copies.get(id(value), value)
    if isinstance(value, weakref.ReferenceType) and isinstance(module := value(), nn.Module):
        own = copies.get(id(module), module)
        return value if own is module else weakref.ref(own)
    if isinstance(value, types.MethodType) and isinstance(value.__self__, nn.Module):
        own = copies.get(id(value.__self__), value.__self__)
        return value if own is value.__self__ else types.MethodType(value.__func__, own)
    return value


@contextlib.contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    before = [
        (path, module, dict(vars(module)), {kind: dict(vars(module)[kind]) for kind in _REGISTRIES})
        for path, module in model.named_modules()
    ]
    changed = ""
    try:
        yield
    finally:
        for path, module, attributes, registries in before:
            changed = changed or _put_back(vars(module), attributes, path)
            for kind, registry in registries.items():
                changed = changed or _put_back(vars(module)[kind], registry, path)
    if changed:
        raise AutoparError(
            f"forward changes {changed!r} of the model through an object outside of the model. autopar captures a copy of the model: "
            "reach the module by self, or by a variable of the function"
        )


def _put_back(holder: dict[str, Any], before: dict[str, Any], path: str) -> str:
    """Let `holder` hold what it did. Returns the name of an entry that was another; '' if none."""
    missing = object()
    found = [
        k for k in {**before, **holder} if holder.get(k, missing) is not before.get(k, missing)
    ]
    if found:
        holder.clear()
        holder.update(before)
    return joined_name(path, found[0]) if found else ""
