"""The merge of two partial attentions, as a ring of context-parallel ranks makes them: `autopar::merge_attention`.

    l = log(exp(l1) + exp(l2))                         out = exp(l1 - l) first + exp(l2 - l) second

A row whose two logarithms are -inf saw no key: it gives zeros and -inf.  Arithmetic is fp32 (fp64 for fp64).  It has no gradient: the
backward of a ring computes each part again from the logarithm over all keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar_kernels.launching import (
    divide_up,
    launch,
    power_of_2,
    rows_of,
    runs_kernel,
    strides_of,
)
from autopar_kernels.registration import accumulation_dtype, register_pass


def _shares(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(weight of the first, weight of the second, logarithm of the sum); weights are 0 where both are -inf."""
    level = torch.logaddexp(first, second)
    base = level.masked_fill(level == float("-inf"), 0)
    return (first - base).exp(), (second - base).exp(), level


def _block(columns: int) -> tuple[int, int, int]:
    """(rows, columns, warps) of a block that holds whole rows."""
    width = power_of_2(columns)
    rows = max(1, 1024 // width)
    return rows, width, min(16, max(4, rows * width // 512))


def merge_attention(
    first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
) -> tuple[Tensor, Tensor]:
    """(attention over the keys of both parts, logarithm of its denominator), without a gradient.

    Args:
        first: (..., D), attention over some keys; any strides.
        first_level: (...), the logarithm of its denominator, -inf for a row that saw no key.
        second: (..., D), attention over other keys.
        second_level: (...), the logarithm of its denominator.

    Raises:
        ValueError: shapes differ.
    """
    out, level = _fake(first, first_level, second, second_level)
    if not runs_kernel(first, first_level, second, second_level):
        wide = level.dtype
        p, q, merged = _shares(first_level.to(wide), second_level.to(wide))
        p, q = p.unsqueeze(-1), q.unsqueeze(-1)
        value = (p * first).where(p != 0, 0) + (q * second).where(q != 0, 0)
        return out.copy_(value), level.copy_(merged)
    from autopar_kernels.softmax_kernels import merge_kernel

    a, b = rows_of(first), rows_of(second)
    rows, columns, warps = _block(a.shape[1])
    launch(
        merge_kernel,
        (divide_up(a.shape[0], rows),),
        (
            *(a, first_level.contiguous(), b, second_level.contiguous()),
            *(out, level, *a.shape, strides_of(a, b)),
        ),
        warps,
        R=rows,
        BLOCK=columns,
    )
    return out, level


def _fake(
    first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
) -> tuple[Tensor, Tensor]:
    if first.shape != second.shape or first.shape[:-1] != first_level.shape:
        raise ValueError(
            f"parts {tuple(first.shape)}, {tuple(second.shape)}, levels {tuple(first_level.shape)}"
        )
    wide = accumulation_dtype(first, second, first_level, second_level)
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.new_empty(first.shape, dtype=dtype), first.new_empty(first_level.shape, dtype=wide)


register_pass(
    "merge_attention(Tensor first, Tensor first_level, Tensor second, Tensor second_level) "
    "-> (Tensor, Tensor)",
    merge_attention,
    _fake,
)
