"""Batches as users pass them: example inputs, and arguments of `Engine.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopar.errors import AutoparError, shown
from autopar.models.rows import BatchDims, row_dims, rows_first
from autopar.ops.work import positions

ExampleInputs = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]


def input_names(example_inputs: ExampleInputs) -> tuple[str, ...]:
    """Flat names of a batch's tensors: the keys of a mapping, or `arg0`, `arg1`, ..."""
    if isinstance(example_inputs, Mapping):
        return tuple(example_inputs)
    return tuple(f"arg{i}" for i in range(len(example_inputs)))


def check_example(example_inputs: ExampleInputs) -> None:
    """Raise AutoparError unless `example_inputs` is a dense tensor, or a mapping or sequence of
    such, each with one element or more.
    """
    for name, tensor in batch_tensors(example_inputs, "example_inputs").items():
        if tensor.numel() == 0:
            what = "no rows" if tensor.shape[0] == 0 else "no elements"
            raise AutoparError(
                f"example_inputs: {shown(name)} has {what}, shape {tuple(tensor.shape)}: give one row or more of what training will see"
            )


def batch_tensors(
    batch: ExampleInputs | torch.Tensor, what: str = "batch"
) -> dict[str, torch.Tensor]:
    """The tensors of a batch by flat name: their keys, or `arg0`, `arg1`, ... One tensor is a batch
    of one.

    Raises AutoparError for anything but a mapping from texts, or a sequence, of dense tensors, or
    if there is none. `what` names the argument in the message.
    """
    if isinstance(batch, torch.Tensor):
        batch = (batch,)
    if not isinstance(batch, (Mapping, Sequence)) or isinstance(batch, str):
        subject = (
            f"{what} is {shown(batch)}; it must be"
            if what != "batch"
            else f"the batch is a {type(batch).__name__}; a batch is"
        )
        raise AutoparError(
            f"{subject} a mapping from argument names to tensors, or a tuple of tensors"
        )
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = dict(zip(input_names(batch), values, strict=True))
    for name, value in tensors.items():
        if not isinstance(name, str):
            raise AutoparError(
                f"{what} has the key {shown(name)}; keys are the names of arguments of forward"
            )
        if not isinstance(value, torch.Tensor):
            raise AutoparError(
                f"{what} entry {shown(name)} is a {type(value).__name__}; autopar takes tensors only"
            )
        if value.layout != torch.strided or value.is_nested or value.is_quantized:
            kind = (
                "nested"
                if value.is_nested
                else "quantized"
                if value.is_quantized
                else str(value.layout)
            )
            raise AutoparError(
                f"{what} entry {shown(name)} is a {kind} tensor; autopar takes dense ones: pass its dense form"
            )
    if not tensors:
        raise AutoparError(f"{what} holds no tensor")
    return tensors


def shorter_lengths(
    example_inputs: ExampleInputs, buckets: Sequence[int], batch_dims: BatchDims | None = None
) -> list[int]:
    """The sequence lengths in `buckets` that are shorter than the example's sequences, ascending,
    each once. Raises AutoparError if one is not a whole number from 1 to the example's length.

    `batch_dims` says where the rows of an input are, as in `row_dims`.
    """
    tensors = batch_tensors(example_inputs)
    longest = positions(rows_first(tensors, row_dims(tensors, batch_dims)).values())
    for length in buckets:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= longest:
            raise AutoparError(
                f"buckets={shown(tuple(buckets))}: {shown(length)} is no length of 1 to {longest}, that of "
                "example_inputs, for which the plan is made; give an example of the longest length"
            )
    return sorted({*buckets} - {longest})


def shortened(
    example_inputs: ExampleInputs, length: int, batch_dims: BatchDims | None = None
) -> ExampleInputs:
    """The example with sequences of `length`, as meta tensors that share no storage: a mapping for
    a mapping, else a tuple.

    Every dim as long as the example's sequences gets the new length, but for the dim of rows (dim 0
    of an input without rows). `batch_dims` says where rows are, as in `row_dims`.
    """
    tensors = batch_tensors(example_inputs)
    dims = row_dims(tensors, batch_dims)
    longest = positions(rows_first(tensors, dims).values())
    found = {
        name: torch.empty(
            [
                length if size == longest and dim != (dims[name] or 0) else size
                for dim, size in enumerate(t.shape)
            ],
            dtype=t.dtype,
            device="meta",
        )
        for name, t in tensors.items()
    }
    return found if isinstance(example_inputs, Mapping) else tuple(found.values())
