"""Identifies constants of an exported graph that are parameters or buffers of the model.

torch.export recognizes a tensor of the model only if forward reads it as a module attribute. It
treats any other tensor as a constant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import AutoparError
from autopar.trace.python_state import Snapshot

_Byte = int | torch.SymInt
"""The place of a byte in a storage."""


def read_as_attributes(exported: torch.export.ExportedProgram, registered: Registered) -> None:
    """Make the program read parameters and buffers as such, in place, where export treated them as
    constants. They leave `exported.constants`; real constants stay there. `registered` tells which
    constant is which tensor of the model.

    Fake tensors among the constants would crash torch's passes. Raises AutoparError for a part of a
    trained parameter, and for constants computed from fake tensors.
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
    """A record of the places outside the modules' registries that hold a parameter or buffer of the
    model: lists, dicts and plain attributes.

    While forward runs, torch.export puts its own tensors into the registries. These places must
    then hold the same tensors, which `refresh` sees to.
    """

    def __init__(self, model: nn.Module, state: Snapshot) -> None:
        names = {id(tensor): name for name, tensor in _registered(model).items()}
        self._places = [
            (state.puts[path], names[id(tensor)])
            for path, tensor in state.tensors.items()
            if id(tensor) in names
        ]

    @property
    def names(self) -> frozenset[str]:
        """The names of the parameters and buffers that have such places."""
        return frozenset(name for _, name in self._places)

    def refresh(self, model: nn.Module) -> None:
        """Put the tensors that are now in the registries of `model` into the recorded places."""
        tensors = _registered(model) if self._places else {}
        for put, name in self._places:
            put(tensors[name])


def _registered(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


class Registered:
    """Maps a constant of an exported graph to the parameter or buffer that it is, by `name`.

    If forward reads a tensor from a list, it is the fake tensor of the copied model. A closure
    holds the original model's tensor, or a detached one, which look the same. Trained parameters
    therefore cannot be read from closures.
    """

    def __init__(
        self,
        model: nn.Module,
        structure: nn.Module,
        copies: dict[int, Any],
        made: Collection[int],
    ) -> None:
        """`copies` is the memo of the `copy.deepcopy` that made `structure` from `model`. `made`
        are the addresses of storages of tensors that an earlier call made of the model's tensors.
        """
        self._made = made
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
        """The name of the parameter or buffer that `constant` is; None if it is neither. Raises
        AutoparError if it only shares memory with a trained parameter, or is computed from tensors
        of the model before forward.
        """
        if not _lies(constant) or _storage(constant) in self._made:
            return None
        name = self._names.get(_place(constant))
        if name is not None and constant.dtype == self._dtypes[name]:
            return name
        if (own := self._part_of(constant)) is not None:
            raise AutoparError(
                f"forward or the loss reads {tuple(constant.shape)} in {constant.dtype} of parameter {own!r} past the module's attributes, "
                "which torch.export takes for a constant, so that it would not train. Read the parameter as an attribute of the module, in "
                "forward"
            )
        if isinstance(constant, FakeTensor) or constant.grad_fn is not None:
            raise AutoparError(
                f"forward reads a tensor of shape {tuple(constant.shape)} that is made of parameters or buffers before it runs, which "
                "torch.export takes for a constant. Make it in forward, of attributes of the module"
            )
        return None

    def _part_of(self, tensor: torch.Tensor) -> str | None:
        """The name of the first trained parameter whose memory overlaps that of `tensor`, or None."""
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
    """Whether a tensor is strided, with a storage; false for sparse ones."""
    return tensor.layout == torch.strided


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> tuple:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _extent(tensor: torch.Tensor) -> tuple[_Byte, _Byte]:
    """The byte range (start, end) that a tensor occupies in its storage."""
    first = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return first, first
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, first + (last + 1) * tensor.element_size()
