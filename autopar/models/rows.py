"""Where the rows of a batch are in a model's inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from autopar.errors import AutoparError, shown

BatchDims = Mapping[str, int | None]
"""Which dim of an input is the batch, by its name; None: the input has no rows."""


def row_dims(
    tensors: Mapping[str, torch.Tensor], batch_dims: BatchDims | None
) -> dict[str, int | None]:
    """By name of an input, the dim that is the batch; None for an input without rows.

    Inputs that `batch_dims` does not name have their rows in dim 0 if that is as long as the batch.
    The batch is as long as the first dim that `batch_dims` names, or else dim 0 of the first other
    input that is no scalar. Raises AutoparError for names, dims or lengths in `batch_dims` that do
    not fit, or if no input has rows.
    """
    named = {} if batch_dims is None else dict(batch_dims)
    for name, dim in named.items():
        if name not in tensors:
            raise AutoparError(
                f"batch_dims names {shown(name)}, and the batch has {', '.join(tensors)}"
            )
        whole = isinstance(dim, int) and not isinstance(dim, bool)
        if dim is not None and not (whole and 0 <= dim < tensors[name].dim()):
            raise AutoparError(
                f"batch_dims={{{name!r}: {shown(dim)}}} is no dim of {name!r}, which has {tensors[name].dim()}; give its number from 0, "
                "or None for an input that is the same for all rows"
            )
    sizes = [(name, tensors[name].shape[dim]) for name, dim in named.items() if dim is not None]
    sizes += [(name, t.shape[0]) for name, t in tensors.items() if t.dim() and name not in named]
    if not sizes:
        what = "is a scalar" if not named else "is a scalar, or has no rows as batch_dims says"
        raise AutoparError(
            f"no input has a batch dim: every tensor in example_inputs ({', '.join(tensors)}) {what}"
        )
    first, rows = sizes[0]
    for name, size in sizes[: len(named)]:
        if name in named and size != rows:
            raise AutoparError(
                f"batch_dims says that dim {named[name]} of {name!r} is the batch, and it has {size} rows where {first!r} has {rows}"
            )
    return {
        name: named[name] if name in named else 0 if t.dim() and t.shape[0] == rows else None
        for name, t in tensors.items()
    }


def in_groups(
    tensors: Mapping[str, torch.Tensor], together: int, without: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """The tensors by name, their dim 0 cut into groups of `together` rows: (groups, rows of one,
    ...). Those named in `without`, which have no rows, stay as they are. Raises AutoparError if the
    rows of a tensor are no whole groups.
    """
    if together == 1:
        return dict(tensors)
    for name, tensor in tensors.items():
        if name not in without and (not tensor.dim() or tensor.shape[0] % together):
            shape = tuple(tensor.shape)
            raise AutoparError(
                f"batch entry {name!r} has shape {shape}, and forward reads {together} consecutive rows together: give a multiple of "
                f"{together} rows"
            )
    return {
        name: tensor if name in without else tensor.unflatten(0, (-1, together))
        for name, tensor in tensors.items()
    }


def rows_first(
    tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int | None]
) -> dict[str, torch.Tensor]:
    """The tensors by name, each with the dim of its rows (`dims`) moved to dim 0. Tensors without
    rows stay as they are.
    """
    return {
        name: tensor.movedim(dim, 0) if (dim := dims.get(name)) and dim < tensor.dim() else tensor
        for name, tensor in tensors.items()
    }
