"""Batches as users pass them: example inputs, and arguments of `Engine.step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autopar.errors import AutoparError, shown
from autopar.models.rows import BatchDims, row_dims, rows_first
from autopar.ops.work import positions
from autopar.trace.nested import is_plain, leaves, rebuilt

ExampleInputs = Mapping[str, Any] | Sequence[Any]
"""Tensors by the names of forward's arguments, or in their order. Entries may nest, and may be
Python values.
"""


def check_example(example_inputs: ExampleInputs) -> None:
    """Raise AutoparError unless `example_inputs` is a batch (`batch_tensors`) of tensors with one
    element or more.
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
    """The tensors of a batch by flat name (`leaves`), without its Python values. One tensor is a
    batch of one.

    Raises AutoparError for anything but a mapping from texts, or a sequence, of dense tensors,
    Python values, and mappings and sequences of these; or if there is no tensor. `what` names the
    argument in the message.
    """
    return batch_entries(batch, what)[0]


def batch_entries(
    batch: ExampleInputs | torch.Tensor, what: str = "batch"
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(the tensors of a batch, its Python values), each by flat name. Arguments and errors are those
    of `batch_tensors`.
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
    tensors, plain = {}, {}
    for name, value in leaves(batch, "the batch" if what == "batch" else what).items():
        if isinstance(value, torch.Tensor):
            _check_dense(name, value, what)
            tensors[name] = value
        elif is_plain(value):
            plain[name] = value
        else:
            remedy = (
                "pass torch.as_tensor of it"
                if type(value).__module__ == "numpy"
                else "pass its tensors, in a dict"
            )
            raise AutoparError(
                f"{what} entry {shown(name)} is a {type(value).__name__}; autopar takes tensors, Python numbers, texts and None, in "
                f"mappings, sequences and dataclasses: {remedy}"
            )
    if not tensors:
        raise AutoparError(f"{what} holds no tensor")
    return tensors, plain


def form_of(batch: ExampleInputs | torch.Tensor) -> ExampleInputs:
    """A batch nested like `batch`, with None in the place of each tensor."""
    given = (batch,) if isinstance(batch, torch.Tensor) else batch
    return rebuilt(given, dict.fromkeys(batch_tensors(given)))


def _check_dense(name: str, value: torch.Tensor, what: str) -> None:
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


def sequence_length(example_inputs: ExampleInputs, batch_dims: BatchDims | None = None) -> int:
    """The number of positions of the example's sequences; `batch_dims` as in `row_dims`."""
    tensors = batch_tensors(example_inputs)
    return positions(rows_first(tensors, row_dims(tensors, batch_dims)).values())


def shorter_lengths(
    example_inputs: ExampleInputs, buckets: Sequence[int], batch_dims: BatchDims | None = None
) -> list[int]:
    """The sequence lengths in `buckets` that are shorter than the example's sequences, ascending,
    each once. Raises AutoparError if one is not a whole number from 1 to the example's length.

    `batch_dims` says where the rows of an input are, as in `row_dims`.
    """
    longest = sequence_length(example_inputs, batch_dims)
    for length in buckets:
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= longest:
            raise AutoparError(
                f"buckets={shown(tuple(buckets))}: {shown(length)} is no length of 1 to {longest}, that of "
                "example_inputs, for which the plan is made; give an example of the longest length"
            )
    return sorted({*buckets} - {longest})


def shortened_inputs(
    example_inputs: ExampleInputs, length: int, batch_dims: BatchDims | None = None
) -> ExampleInputs:
    """The example with sequences of `length`, as meta tensors that share no storage, nested
    as the example is.

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
    return rebuilt(example_inputs, found)
