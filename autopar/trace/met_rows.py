"""Rows that a mask selects, where they meet as many rows of another tensor.

    hidden[mask] = hidden[mask] + features        # DeepStack of Qwen3-VL

`features` has a row for each True entry of `mask`, in order. Captured as written, that would ask
whether a number of rows that depends on data equals a multiple of the batch. Here the features are
first written over the True entries, by `masked_scatter`, and then selected by the same mask.
`autopar/trace/scattered_rows.py` says when that is exact, and every step checks it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

_MASK = "_autopar_mask"
"""The attribute of selected rows that holds the mask."""
_MEETINGS: tuple[Callable, ...] = tuple(
    function
    for name in ("add", "sub", "mul", "div")
    for function in (
        getattr(torch, name),
        getattr(Tensor, name),
        getattr(Tensor, f"__{'truediv' if name == 'div' else name}__"),
    )
)


def met(func: Callable, args: tuple, kwargs: dict) -> Any:
    """The result of a call that selects rows by a mask, or in which selected rows meet rows of
    another tensor. None for any other call.
    """
    if func is Tensor.__getitem__ and len(args) == 2 and (mask := _mask_of(args[1])) is not None:
        rows = func(*args)
        setattr(rows, _MASK, mask)
        return rows
    if func not in _MEETINGS or len(args) != 2:
        return None
    masks = [getattr(each, _MASK, None) for each in args]
    mask = next((each for each in masks if each is not None), None)
    if mask is None or not any(map(_is_met, args, masks)):
        return None
    pairs = zip(args, masks, strict=True)
    operands = (_selected(each, mask) if _is_met(each, own) else each for each, own in pairs)
    return func(*operands, **kwargs)


def _mask_of(index: Any) -> Tensor | None:
    """The mask, if `index` is one of at least 2 dims, alone or followed by whole slices."""
    first, *rest = index if isinstance(index, tuple) and index else (index,)
    masks = isinstance(first, Tensor) and first.dtype == torch.bool and first.dim() > 1
    whole = all(isinstance(each, slice) and each == slice(None) for each in rest)
    return first if masks and whole else None


def _is_met(rows: Any, mask: Tensor | None) -> bool:
    """Whether an operand has rows whose number follows the batch, and not a mask."""
    if not isinstance(rows, Tensor) or mask is not None or rows.dim() < 2:
        return False
    count = rows.shape[0]
    return isinstance(count, torch.SymInt) and not free_unbacked_symbols(count)


def _selected(rows: Tensor, mask: Tensor) -> Tensor:
    wide = rows.new_zeros((*mask.shape, *rows.shape[1:]))
    marked = mask.reshape(*mask.shape, *[1] * (rows.dim() - 1))
    return wide.masked_scatter(marked, rows)[mask]
