"""Checks that a batch has the tensors that a model was planned for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from autopar.errors import AutoparError
from autopar.ops.dims import has_batch, is_symbolic


def check_shapes(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise AutoparError if a batch does not fit the fake inputs `expected` of a model: other
    names, or a tensor of another shape or dtype, or on the meta device. The number of rows is free,
    but must be equal in all tensors with rows. Any floating-point dtype fits another.
    """
    if set(tensors) != set(expected):
        raise AutoparError(
            f"the batch has {', '.join(tensors)}; the model was planned for {', '.join(expected)}"
        )
    for name, tensor in tensors.items():
        want = expected[name]
        if tensor.is_meta:
            raise AutoparError(f"batch entry {name!r} is on the meta device and has no values")
        sizes = ["batch" if is_symbolic(s) else int(s) for s in want.shape]
        if tensor.dim() != want.dim() or any(
            w != "batch" and w != s for w, s in zip(sizes, tensor.shape, strict=True)
        ):
            raise AutoparError(
                f"batch entry {name!r} has shape {tuple(tensor.shape)}; the model was planned for ({', '.join(map(str, sizes))})"
            )
        if tensor.dtype != want.dtype and not (
            tensor.is_floating_point() and want.is_floating_point()
        ):
            raise AutoparError(
                f"batch entry {name!r} has dtype {tensor.dtype}; the model was planned for {want.dtype}"
            )
    rows = {name: t.shape[0] for name, t in tensors.items() if has_batch(expected[name])}
    if len(set(rows.values())) > 1:
        held = ", ".join(f"{name} {number}" for name, number in rows.items())
        raise AutoparError(
            f"the batch's tensors have different numbers of rows: {held}; if one has no rows, plan with batch_dims={{its name: None}}"
        )
