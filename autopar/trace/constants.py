"""Which constants of an exported graph are parameters or buffers of the model.

torch.export knows a tensor of the model where forward reads it as an attribute of a module, and takes any other for a constant.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import AutoparError
from autopar.trace.python_state import Snapshot

_Byte = int | torch.SymInt
"""The place of a byte in a storage."""


def read_as_attributes(exported: torch.export.ExportedProgram, registered: Registered) -> None:
    """Have the program read the parameters and buffers that it takes for constants as what they are.

    Fake tensors among the constants would crash torch's passes.  Raises AutoparError for a part of a parameter that trains, and for what
    was made of fake tensors.
    """
    nodes = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    specs = exported.graph_signature.input_specs
    own = {
        spec.target.removeprefix("model."): spec
        for spec in specs
        if spec.kind.name in ("PARAMETER", "BUFFER")
    }
    for spec in [spec for spec in specs if spec.kind.name == "CONSTANT_TENSOR"]:
        constant, node = exported.constants[spec.target], nodes[spec.arg.name]
        name = registered.name(constant)
        if name is not None:
            node.replace_all_uses_with(nodes[own[name].arg.name])
            exported.graph.erase_node(node)
            specs.remove(spec)
            del exported.constants[spec.target]


class Aliases:
    """Places beside the modules' registers that hold a parameter or buffer of the model: lists, dicts and plain attributes.

    torch.export puts tensors of its own into the registers while forward runs; these places are then to hold the same ones.
    """

    def __init__(self, model: nn.Module, state: Snapshot) -> None:
        names = {id(tensor): name for name, tensor in _registered(model).items()}
        self._places = [
            (state.puts[path], names[id(tensor)])
            for path, tensor in state.tensors.items()
            if id(tensor) in names
        ]

    def refresh(self, model: nn.Module) -> None:
        """Put what the registers hold now into the other places."""
        tensors = _registered(model) if self._places else {}
        for put, name in self._places:
            put(tensors[name])


def _registered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


class Registered:
    """Which parameter or buffer a constant is.  What forward reads from a list is that of the copy of the model, whose tensors are fake.  A
    closure has the model's own, or what was detached from it, which look alike: of those that train nothing can be read so."""

    def __init__(self, model: nn.Module, structure: nn.Module, copies: dict[int, Any]) -> None:
        """`copies`: what `copy.deepcopy` remembers of the structure."""
        self._names: dict[tuple, str] = {}
        # by storage: where in it, and which
        self._trained: dict[int, list[tuple[_Byte, _Byte | float, str]]] = defaultdict(list)
        fakes, own = ([*m.named_buffers(), *m.named_parameters()] for m in (structure, model))
        self._dtypes = {name: tensor.dtype for name, tensor in fakes}
        for name, tensor in (
            *((name, tensor) for name, tensor in own if not tensor.requires_grad),
            *fakes,
        ):
            if _lies(tensor):
                self._names[_place(tensor)] = name
        for name, tensor in (*own, *fakes):
            if tensor.requires_grad and _lies(tensor):
                self._trained[_storage(tensor)].append((*_extent(tensor), name))
        for tensor in copies.get(id(copies), ()):  # what was copied, views of parameters too
            if (
                isinstance(tensor, torch.Tensor)
                and _lies(tensor)
                and (part := self._part_of(tensor))
                and _lies(copies[id(tensor)])
            ):
                self._trained[_storage(copies[id(tensor)])].append((0, float("inf"), part))

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
        if isinstance(constant, FakeTensor) or constant.grad_fn is not None:
            raise AutoparError(
                f"forward reads a tensor of shape {tuple(constant.shape)} that is made of parameters or buffers before it runs, which "
                "torch.export takes for a constant; make it in forward, of attributes of the module"
            )
        return None

    def _part_of(self, tensor: torch.Tensor) -> str | None:
        """The parameter that trains of which a tensor has a part."""
        first, end = _extent(tensor)
        return next(
            (
                name
                for start, stop, name in self._trained.get(_storage(tensor), ())
                if first < stop and start < end
            ),
            None,
        )


def _lies(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in a storage: a sparse one does not."""
    return tensor.layout == torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> tuple:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _extent(tensor: torch.Tensor) -> tuple[_Byte, _Byte]:
    """The bytes of its storage from the first that it has to the last."""
    first = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return first, first
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size()
