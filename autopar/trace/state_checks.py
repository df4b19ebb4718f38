"""Checks of what forward has registered: modules, tensors that share memory, and tied tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.trace.checkpointed_reads import Versions
from autopar.trace.known_values import user_attributes
from autopar.trace.registered_tensors import (
    RegisteredTensor,
    has_tensors,
    joined_name,
    refuse,
    refuse_shared,
    same_module,
    storage_of,
)


class ModulesBefore:
    """The children of each module of a model before forward runs, and which buffers are kept."""

    def __init__(self, model: nn.Module) -> None:
        self._children = {name: (m, dict(m._modules)) for name, m in model.named_modules()}
        self._kept = {name: set(m._non_persistent_buffers_set) for name, m in model.named_modules()}

    def check(self, entries: Mapping[str, RegisteredTensor]) -> None:
        """Raise AutoparError if forward replaced or removed a module with tensors, or a name.
        `entries` are the registered tensors before forward.
        """
        for path, (module, children) in self._children.items():
            for key in {*children, *module._modules}:
                before, after = children.get(key), module._modules.get(key)
                if not same_module(before, after) and any(map(has_tensors, (before, after))):
                    raise AutoparError(
                        f"forward {'adds' if before is None else 'replaces'} module {joined_name(path, key)!r}, whose tensors no optimizer "
                        "and no checkpoint would know: make all modules in __init__, and choose among them in forward"
                    )
            for key in self._kept[path] ^ module._non_persistent_buffers_set:
                if (name := joined_name(path, key)) in entries:
                    refuse(name, "with another `persistent`", "register it once, in __init__")
            for key, parameter in module._parameters.items():
                if parameter is not None and (name := joined_name(path, key)) not in entries:
                    raise AutoparError(
                        f"forward registers parameter {name!r}, which no optimizer would know: register it in __init__"
                    )


def check_attributes(
    entries: Mapping[str, RegisteredTensor], before: Mapping[str, dict[str, Any]]
) -> None:
    """Raise AutoparError if forward sets an attribute of a registered tensor. `before` has the
    attributes before forward, by the name of the tensor.
    """
    missing = object()
    for name, entry in entries.items():
        now, old = user_attributes(entry.tensor), before[name]
        for key in {**old, **now}:
            if now.get(key, missing) is not old.get(key, missing):
                raise AutoparError(
                    f"forward sets attribute {key!r} of the tensor {name!r}, which no step after capture would keep: register a buffer for "
                    "it, and assign that"
                )


def check_sharing(entries: Mapping[str, RegisteredTensor], now: Mapping[str, Tensor]) -> None:
    """Raise AutoparError unless exactly those names share memory that shared it before. `now` are
    the tensors after forward, by name.
    """
    firsts: dict[int, str] = {}
    holders: dict[int, str] = {}
    for name, tensor in now.items():
        before = entries[name].tensor
        first = firsts.setdefault(id(before), name)
        if now[first] is not tensor:
            refuse(name, f"alone: it was {first!r} too", "use copy_, or assign both")
        holder = holders.setdefault(storage_of(tensor), first)
        apart = storage_of(entries[holder].tensor) != storage_of(before)
        if apart and tensor.numel() and storage_of(tensor):
            refuse_shared(name, repr(holder), "")


def check_ties(entries: Mapping[str, RegisteredTensor], before: Versions, now: Versions) -> None:
    """Raise AutoparError if forward changes a tensor that has several names. torch.export fails."""
    firsts: dict[int, str] = {}
    for name, entry in entries.items():
        first = firsts.setdefault(id(entry.tensor), name)
        if first != name and now[name] != before[name]:
            raise AutoparError(
                f"forward changes {name!r}, which is the same tensor as {first!r}: torch.export cannot follow a change of a "
                "tensor with two names; register it once"
            )
