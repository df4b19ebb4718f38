"""Which constants of an exported graph are parameters or buffers of the model.

torch.export knows a tensor of the model where forward reads it as an attribute of a module, and takes any other for a constant.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.trace.user_lines import line_of_node


def read_as_attributes(exported: torch.export.ExportedProgram, registered: Registered) -> None:
    """Have the program read the parameters and buffers that it takes for constants as what they are.

    Fake tensors among the constants would crash torch's passes.  Raises AutoparError for a part of a parameter that trains, and for what
    was made of fake tensors.
    """
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    own = {spec.target.removeprefix("model."): spec for spec in specs if spec.kind.name in ("PARAMETER", "BUFFER")}
    for spec in [spec for spec in specs if spec.kind.name == "CONSTANT_TENSOR"]:
        constant, node = exported.constants[spec.target], nodes[spec.arg.name]
        registered.refuse_changes(constant, node)
        name = registered.name(constant)
        if name is not None:
            node.replace_all_uses_with(nodes[own[name].arg.name])
            exported.graph.erase_node(node)
            specs.remove(spec)
            del exported.constants[spec.target]


class Registered:
    """Which parameter or buffer a constant is.  What forward reads from a list is that of the copy of the model, whose tensors are fake.  A
    closure has the model's own, or what was detached from it, which look alike: of those that train nothing can be read so."""

    def __init__(self, model: nn.Module, structure: nn.Module, copies: dict[int, Any]) -> None:
        """`copies`: what `copy.deepcopy` remembers of the structure."""
        self._names: dict[tuple, str] = {}
        self._trained: dict[int, list[tuple[int, float, str]]] = defaultdict(list)  # by storage: where in it, and which
        fakes, own = ([*m.named_buffers(), *m.named_parameters()] for m in (structure, model))
        self._dtypes = {name: tensor.dtype for name, tensor in fakes}
        for name, tensor in (*((name, tensor) for name, tensor in own if not tensor.requires_grad), *fakes):
            if _lies(tensor):
                self._names[_place(tensor)] = name
        for name, tensor in (*own, *fakes):
            if tensor.requires_grad and _lies(tensor):
                self._trained[_storage(tensor)].append((*_extent(tensor), name))
        for tensor in copies.get(id(copies), ()):  # what was copied, views of parameters too
            if isinstance(tensor, torch.Tensor) and _lies(tensor) and (name := self._part_of(tensor)) and _lies(copies[id(tensor)]):
                self._trained[_storage(copies[id(tensor)])].append((0, float("inf"), name))

    def name(self, constant: torch.Tensor) -> str | None:
        """Its name; None if it is no parameter and no buffer.  Raises AutoparError if it is a part of a parameter, or cannot be told."""
        if not _lies(constant):
            return None
        name = self._names.get(_place(constant))
        if name is not None and constant.dtype == self._dtypes[name]:
            return name
        if (own := self._part_of(constant)) is not None:
            raise AutoparError(
                f"forward or the loss reads {tuple(constant.shape)} in {constant.dtype} of parameter {own!r} past the module's attributes, "
                "which torch.export takes for a constant, so that it would not train; read the parameter as an attribute of the module, in "
                "forward"
            )
        if isinstance(constant, FakeTensor):
            raise AutoparError(
                f"forward reads a tensor of shape {tuple(constant.shape)} that is made of parameters or buffers before it runs, which "
                "torch.export takes for a constant; make it in forward, of attributes of the module"
            )
        return None

    def refuse_changes(self, constant: torch.Tensor, node: Node) -> None:
        """Raise AutoparError if `constant`, which `node` stands for, is a part of a parameter that forward changes in place."""
        name = self._part_of(constant) if _lies(constant) else None
        change = _change_of(node) if name is not None else None
        if change is not None:
            raise AutoparError(
                f"forward changes parameter {name!r} in place{line_of_node(change)}, by {change.target}, past the optimizer: use the "
                "changed value as a new tensor (weight.clamp(...) instead of weight.data.clamp_(...)), or change it after the step"
            )

    def _part_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that trains of which a tensor has a part."""
        first, end = _extent(tensor)
        return next((name for start, stop, name in self._trained.get(_storage(tensor), ()) if first < stop and start < end), None)


def _change_of(node: Node) -> Node | None:
    """The op that changes what a node stands for in place, seen through views."""
    for user in node.users:
        schema = user.target._schema if isinstance(user.target, torch._ops.OpOverload) else None
        if schema is None or user.args[:1] != (node,):
            continue
        if schema.is_mutable:
            return user
        if any(result.alias_info is not None for result in schema.returns) and (found := _change_of(user)) is not None:
            return found
    return None


def _lies(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a storage: a sparse one does not."""
    return tensor.layout == torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> tuple:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes of its storage from the first that it has to the last."""
    first = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return first, first
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return first, first + (last + 1) * tensor.element_size()
