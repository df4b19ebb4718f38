"""Batches: what a user passes as example inputs and to `Engine.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.errors import AutoparError, shown
from autopar.ops.work import positions

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
            raise AutoparError(f"batch entry {shown(name)} is a {type(value).__name__}; autopar takes tensors only")
    if not tensors:
        raise AutoparError("the batch holds no tensor")
    return tensors


def shorter_lengths(example_inputs: ExampleInputs, buckets: Sequence[int]) -> list[int]:
    """The buckets that are shorter than the example, ascending.  AutoparError if one is no length, or longer."""
    longest = positions(batch_tensors(example_inputs).values())
    for length in buckets:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= longest:
            raise AutoparError(
                f"buckets={shown(tuple(buckets))}: {shown(length)} is no length of 1 to {longest}, that of "
                "example_inputs, for which the plan is made; give an example of the longest length"
            )
    return sorted({*buckets} - {longest})


def shortened(example_inputs: ExampleInputs, length: int) -> ExampleInputs:
    """An example like this one with rows of another length: meta tensors, each a storage of its own."""
    tensors = batch_tensors(example_inputs)
    longest = positions(tensors.values())
    found = {
        name: torch.empty([*t.shape[:1], *(length if size == longest else size for size in t.shape[1:])], dtype=t.dtype, device="meta")
        for name, t in tensors.items()
    }
    return found if isinstance(example_inputs, Mapping) else tuple(found.values())
