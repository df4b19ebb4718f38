"""Sums over partial results: `autopar::sum_parts`."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar_kernels.launching import divide_up, launch, power_of_2, runs_kernel
from autopar_kernels.registration import accumulation_dtype, register_pass


def sum_parts(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over the first dim, accumulated in fp32 (fp64 for fp64) and rounded once: (P, ...) -> (...).

    Args:
        parts: the partial results, one for each index of the first dim.
        dtype: the dtype of the result; that of `parts` by default.
    """
    dtype = parts.dtype if dtype is None else dtype
    if not runs_kernel(parts) or parts.numel() == 0 or dtype == torch.float64:
        wide = accumulation_dtype(parts)
        return parts.sum(0, dtype=wide).to(dtype)
    from autopar_kernels.sum_kernels import sum_parts_kernel

    flat = parts.reshape(parts.shape[0], -1)
    count, columns = flat.shape
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    lanes = min(power_of_2(count), 32)
    block = 128 if count > 8 else 1024
    launch(
        sum_parts_kernel,
        (divide_up(columns, block),),
        (flat, out, count, columns, *flat.stride()),
        PARTS=lanes,
        BLOCK=block,
    )
    return out


def _fake(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


register_pass("sum_parts(Tensor parts, ScalarType? dtype=None) -> Tensor", sum_parts, _fake)
