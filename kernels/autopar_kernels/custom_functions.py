"""A user's autograd.Function as one op, `autopar::custom_function`, with the backward that the user wrote.

A graph holds the tensors and sizes of a call.  The function and its other arguments are kept here, under the name that the op's last
argument gives; every process that captures the model keeps them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autopar_kernels.registration import register_composite


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for an argument that changes from call to call: entry `index` of the op's operand list
    'tensors' or 'sizes'.
    """

    list: str
    index: int


@dataclass(frozen=True, slots=True)
class KeptCall:
    """A function and the flattened arguments of one call. A `_Place` stands for each tensor and
    symbolic size; `structure` is the pytree to restore them.
    """

    function: type[torch.autograd.Function]
    arguments: tuple
    structure: pytree.TreeSpec

    def describes(self, other: KeptCall) -> bool:
        """Whether the other call has the same function and equal arguments. Arguments other than
        numbers, texts and the like must be the same objects.
        """
        same = self.function is other.function and self.structure == other.structure
        return same and all(
            a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and a == b)
            for a, b in zip(self.arguments, other.arguments, strict=True)
        )

    def __str__(self) -> str:
        words = [
            "_"
            if isinstance(each, _Place)
            else repr(each)
            if isinstance(each, _PLAIN)
            else type(each).__name__
            for each in self.arguments
        ]
        return f"{self.function.__module__}.{self.function.__qualname__}({', '.join(words)})"


_PLAIN = (int, float, complex, str, type(None), torch.dtype, torch.device, _Place)
_KEPT: dict[str, KeptCall] = {}
_SINGLE: dict[str, bool] = {}


def keep_call(
    function: type[torch.autograd.Function], args: Sequence[Any]
) -> tuple[list[Tensor], list[Any], str]:
    """Keep a call under a name that is unique in this process; an equal call keeps its name.
    Returns (tensors, symbolic sizes, name), the operands of `autopar::custom_function`.
    """
    flat, structure = pytree.tree_flatten(tuple(args))
    operands: dict[str, list] = {"tensors": [], "sizes": []}
    arguments = []
    for each in flat:
        kind = (
            "tensors"
            if isinstance(each, Tensor)
            else "sizes"
            if isinstance(each, torch.SymInt)
            else ""
        )
        arguments.append(_Place(kind, len(operands[kind])) if kind else each)
        if kind:
            operands[kind].append(each)
    call = KeptCall(function, tuple(arguments), structure)
    name, number = str(call), 1
    while not _KEPT.setdefault(name, call).describes(call):
        number += 1
        name = f"{call} #{number}"
    return operands["tensors"], operands["sizes"], name


def custom_function(tensors: list[Tensor], sizes: list[int], name: str) -> list[Tensor]:
    """Call the function that was kept as `name` with these tensors and sizes. Returns its results
    as a list, and its own backward is used. Raises NotImplementedError if a result is no tensor.
    """
    call = _KEPT[name]
    lists: dict[str, list[Any]] = {"tensors": tensors, "sizes": sizes}
    flat = [
        lists[each.list][each.index] if isinstance(each, _Place) else each
        for each in call.arguments
    ]
    # on the meta device, what the function makes itself must be there too
    place = torch.device("meta") if any(x.is_meta for x in tensors) else nullcontext()
    with place:
        result = call.function.apply(*pytree.tree_unflatten(flat, call.structure))
    results = [result] if isinstance(result, Tensor) else list(result)
    if not all(isinstance(each, Tensor) for each in results):
        raise NotImplementedError("it returns something that is no tensor")
    _SINGLE[name] = isinstance(result, Tensor)
    return results


def returns_tensor(name: str) -> bool:
    """Whether the function, which has run, returns one tensor rather than a tuple."""
    return _SINGLE[name]


register_composite(
    "custom_function(Tensor[] tensors, SymInt[] sizes, str name) -> Tensor[]", custom_function
)
OP = torch.ops.autopar.custom_function.default
"""Looked up here, since torch.export keeps whole only the ops that were looked up before."""
