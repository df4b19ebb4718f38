"""Which constants of an exported graph are parameters or buffers of the model.

torch.export knows a tensor of the model where forward reads it as an attribute of a module, and takes any other for a constant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autopar.errors import AutoparError


class Registered:
    """Which parameter or buffer a constant is: one that forward reads from a list, whose copy has the fake tensor, or from a closure, which
    has the model's own."""

    def __init__(self, model: nn.Module, structure: nn.Module, copies: dict[int, Any]) -> None:
        """`copies`: what `copy.deepcopy` remembers of the structure."""
        self._names: dict[tuple, str] = {}
        self._parameters: dict[int, str] = {}  # by storage, that of a view too
        for module in (model, structure):
            for name, tensor in (*module.named_buffers(), *module.named_parameters()):
                self._names[_place(tensor)] = name
            self._parameters |= {_storage(parameter): name for name, parameter in module.named_parameters()}
        self._dtypes = {name: tensor.dtype for name, tensor in (*structure.named_buffers(), *structure.named_parameters())}
        for tensor in copies.get(id(copies), ()):  # what was copied
            if isinstance(tensor, torch.Tensor) and _storage(tensor) in self._parameters:
                self._parameters[_storage(copies[id(tensor)])] = self._parameters[_storage(tensor)]

    def name(self, constant: torch.Tensor) -> str | None:
        """Its name; None if it is no parameter and no buffer.  Raises AutoparError if it is a part of a parameter, or cannot be told."""
        name = self._names.get(_place(constant))
        if name is not None and constant.dtype == self._dtypes[name]:
            return name
        if (own := self._parameters.get(_storage(constant))) is not None:
            raise AutoparError(
                f"forward or the loss reads {tuple(constant.shape)} in {constant.dtype} of parameter {own!r} past the module's attributes, "
                "which torch.export takes for a constant, so that it would not train; read the parameter as an attribute of the module"
            )
        if isinstance(constant, FakeTensor):
            raise AutoparError(
                f"forward reads a tensor of shape {tuple(constant.shape)} that is made of parameters or buffers before it runs, which "
                "torch.export takes for a constant; make it in forward, of attributes of the module"
            )
        return None


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _place(tensor: torch.Tensor) -> tuple:
    return _storage(tensor), tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
