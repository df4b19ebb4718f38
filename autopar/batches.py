"""Batches: what a user passes as example inputs and to `Engine.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.errors import AutoparError

ExampleInputs = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


def input_names(example_inputs: ExampleInputs) -> tuple[str, ...]:
    """Flat names of a batch's tensors: the keys of a mapping, or `arg0`, `arg1`, ..."""
    if isinstance(example_inputs, Mapping):
        return tuple(example_inputs)
    return tuple(f"arg{i}" for i in range(len(example_inputs)))


def batch_tensors(batch: ExampleInputs | torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a batch by flat name.  Raises AutoparError for anything that is not a mapping or sequence of tensors."""
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if not isinstance(batch, (Mapping, Sequence)) or isinstance(batch, str):
        raise AutoparError(f"a batch is a mapping from argument names to tensors, or a tuple of tensors; this is a {type(batch).__name__}")
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = dict(zip(input_names(batch), values, strict=True))
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise AutoparError(f"batch entry {name!r} is a {type(value).__name__}; autopar takes tensors only")
    if not tensors:
        raise AutoparError("the batch holds no tensor")
    return tensors
