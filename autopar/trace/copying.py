"""Copies a model with other tensors as parameters and buffers, and everything else unchanged. Lets
forward see the copy, and keeps the user's model as it is.
"""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from autopar.errors import AutoparError, one_line
from autopar.trace.python_state import Functions, children
from autopar.trace.registered_tensors import joined_name

_REGISTRIES = ("_parameters", "_buffers", "_modules")

_SHARED = (
    io.IOBase, ProcessGroup, threading.Thread, threading.Event, threading.Condition, threading.Semaphore, threading.local,
    type(threading.Lock()), type(threading.RLock()), types.ModuleType, weakref.ReferenceType,
)  # fmt: skip
"""Types whose objects the copy shares with the model: they cannot be copied, and no tensor depends
on them.
"""


def meta_copy(model: nn.Module) -> nn.Module:
    """A deep copy of the module with parameters and buffers on the meta device. Tied tensors stay
    tied.
    """
    return copy_with(model, lambda tensor: torch.empty_like(tensor, device="meta"))


def copy_with(
    model: nn.Module,
    make: Callable[[torch.Tensor], torch.Tensor],
    memo: dict[int, Any] | None = None,
) -> nn.Module:
    """A deep copy of the module with `make(tensor)` in place of each parameter and buffer. `memo`
    becomes the memo of `copy.deepcopy`, which maps the id of an object to its copy.

    Other tensors in attributes are copied; those that autograd computed lose their history. Locks,
    files, process groups and the like are shared with the model. Raises AutoparError, with the
    attribute's name, if an object can be neither copied nor shared, or a lazy parameter has no
    shape yet.
    """
    memo = {} if memo is None else memo
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise AutoparError(_scripted(name, module))
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise AutoparError(
                f"parameter {name!r} has no shape yet, as lazy modules have before their first call: call the model once "
                "on a batch, under torch.no_grad(), and pass it then"
            )
        memo[id(parameter)] = nn.Parameter(make(parameter), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = make(buffer)
    kept = []  # keeps alive what `memo` knows by address
    for path, value in held_objects(model):
        if id(value) in memo:
            continue
        if isinstance(value, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
            raise AutoparError(_iterator(path, value))
        if isinstance(value, torch.Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, _SHARED):
            memo[id(value)] = value
        else:
            continue
        kept.append(value)
    try:
        return copy.deepcopy(model, memo)
    except (
        Exception
    ) as error:  # whatever `__deepcopy__` or `__reduce__` of the user's classes raise
        raise AutoparError(_why_not_copied(model, memo, error)) from error


def _scripted(name: str, module: torch.jit.ScriptModule) -> str:
    traced = isinstance(module, torch.jit.TracedModule)
    made = "torch.jit.trace" if traced else "torch.jit.script or torch.jit.load"
    return (
        f"{f'module {name!r}' if name else 'the model'} ({module.original_name}) comes from {made}, and its code is no Python "
        "that autopar can shard: put the nn.Module that it was made of in its place. Names are the same, so that "
        "load_state_dict(scripted.state_dict()) fills it. Scripted functions may stay"
    )


def held_objects(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields (path, object) for everything that module attributes hold, at any depth, each object
    once. Modules of the model and registered parameters and buffers are left out.
    """
    seen: set[int] = set()
    found = [(name, module) for name, module in model.named_modules()]
    seen.update(id(module) for _, module in found)
    stack = [
        (f"{name}{step}".lstrip("."), value)
        for name, module in found
        for step, value in children(module)
    ]
    while stack:
        path, value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        stack += [(path + step, child) for step, child in children(value)]


def _why_not_copied(model: nn.Module, memo: dict[int, Any], error: Exception) -> str:
    """The text of an error that names the innermost object that cannot be copied. If there is none,
    it names the model with `error`.
    """
    for path, value in reversed(list(held_objects(model))):
        if isinstance(value, nn.Module) or id(value) in memo:
            continue
        try:
            copy.deepcopy(value, dict(memo))
        except Exception as inner:
            if any(not _can_be_copied(child, memo) for _, child in children(value)):
                continue
            return (
                f"attribute {path!r} of the model holds a {type(value).__name__}, which cannot be copied ({one_line(inner)}): autopar "
                f"captures a copy of the model; set it to None before this call, or give {type(value).__name__} a __deepcopy__"
            )
    return (
        f"the model, a {type(model).__name__}, cannot be copied ({type(error).__name__}: {one_line(error)}): autopar captures a copy; does "
        "copy.deepcopy(model) run?"
    )


def _can_be_copied(value: Any, memo: dict[int, Any]) -> bool:
    try:
        copy.deepcopy(value, dict(memo))
    except Exception:
        return False
    return True


def _iterator(path: str, value: Any) -> str:
    return (
        f"attribute {path!r} of the model holds a {type(value).__name__}, which cannot be copied: capture would use up the model's own; "
        "keep what it yields in a list or a buffer, or hold it outside of the model"
    )


@contextlib.contextmanager
def in_the_copy(
    model: nn.Module, functions: Functions, copies: Mapping[int, Any]
) -> Iterator[None]:
    """A context in which variables that `functions` read hold the copies of the modules of `model`.
    `copies` maps the id of an object to its copy.

    Attributes are copied with the model. Variables of functions are not: a hook or a loss may reach
    the user's model itself by a variable, `self` of an outer function or a weak reference.

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
