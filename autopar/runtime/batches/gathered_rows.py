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
    """All-gather a tensor along dim 0 over the axes `names`, one after the other; ranks of the last
    axis are outermost in the result. Every rank must hold equally many rows.
    """
    for name in names:
        split = Split(0, axes[name].size * tensor.shape[0])
        tensor = apply_primitive("all_gather", tensor, axes[name], split, None)
    return tensor


def gather_rows(tensor: torch.Tensor, axes: Mapping[str, AxisGroup]) -> torch.Tensor:
    """All-gather a tensor along dim 0 over the data-parallel ranks, in the order of the global
    batch. Every rank must hold equally many rows.
    """
    sent = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    # ep is a part of dp, and its inner one
    return gather_over(sent, axes, ("ep", "dp")).to(tensor.dtype)


def gather_uneven_rows(
    tensor: torch.Tensor, held: list[int], axes: Mapping[str, AxisGroup]
) -> torch.Tensor:
    """All-gather a tensor along dim 0 over the data-parallel ranks, of which rank r holds `held[r]`
    rows, in the order of the global batch.
    """
    most = max(held)
    filled = tensor.new_zeros(most, *tensor.shape[1:])
    filled[: tensor.shape[0]] = tensor
    found = gather_rows(filled, axes).split(most)
    return torch.cat([rows[:number] for rows, number in zip(found, held, strict=True)])
