"""Checks that a batch has the tensors that a model was planned for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ops.dims import has_batch, is_symbolic


def check_shapes(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Raise AutoparError if a batch does not fit the fake inputs `expected` of a model: other
    names, or a tensor of another shape or dtype, or on the meta device. The number of rows is free,
    but must be equal in all tensors with rows. Any floating-point dtype fits another.
    """
    check_names(tensors, expected)
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


def check_names(
    tensors: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    plain: Mapping[str, Any] | None = None,
    planned: Mapping[str, Any] | None = None,
) -> None:
    """Raise AutoparError if a batch lacks tensors that a model was planned for, `expected`, or has
    others. `plain` and `planned` are Python values, by name, of the batch and of the example batch.
    """
    missing = [name for name in expected if name not in tensors]
    more = [name for name in tensors if name not in expected]
    if not missing and not more:
        return
    words = f"the batch has {', '.join(tensors)}; the model was planned for {', '.join(expected)}"
    if missing:
        sizes = ", ".join(
            "batch" if is_symbolic(size) else str(size) for size in expected[missing[0]].shape
        )
        if plain is not None and missing[0] in plain:
            words = f"batch entry {missing[0]!r} is {plain[missing[0]]!r}; the model was planned for a tensor"
        words += (
            f": give each batch {missing[0]!r}, of shape ({sizes}) and {expected[missing[0]].dtype}, such as ones for a mask that "
            "masks nothing, or plan with an example without it"
        )
    elif planned is not None and more[0] in planned:
        words += (
            f", and {more[0]!r} was {planned[more[0]]!r}: give an example in which it is a tensor"
        )
    else:
        words += f": leave out {more[0]!r}, or give an example with it"
    raise AutoparError(words)
