"""The rows of several ranks, on each of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split
from autopar.rewrite.collectives.primitives import apply_primitive


def gather_over(
    tensor: torch.Tensor, axes: Mapping[str, AxisGroup], names: Iterable[str]
) -> torch.Tensor:
    """The rows of all ranks of the axes `names`, innermost first. Each rank has as many."""
    for name in names:
        split = Split(0, axes[name].size * tensor.shape[0])
        tensor = apply_primitive("all_gather", tensor, axes[name], split, None)
    return tensor


def gather_rows(tensor: torch.Tensor, axes: Mapping[str, AxisGroup]) -> torch.Tensor:
    """The rows of all data-parallel ranks, in the order of the global batch. Each has as many."""
    sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    # ep is a part of dp, and its inner one
    return gather_over(sent, axes, ("ep", "dp")).to(tensor.dtype)


def gather_uneven_rows(
    tensor: torch.Tensor, held: list[int], axes: Mapping[str, AxisGroup]
) -> torch.Tensor:
    """The rows of all data-parallel ranks; `held` has the number of rows of each."""
    most = max(held)
    filled = tensor.new_zeros(most, *tensor.shape[1:])
    filled[: tensor.shape[0]] = tensor
    found = gather_rows(filled, axes).split(most)
    return torch.cat([rows[:number] for rows, number in zip(found, held, strict=True)])
