"""Sums over partial results, as ranks exchange them: `autopar::sum_partials`.

Accumulated in fp32 (fp64 for fp64 tensors) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import divide_up, launch, power_of_2, runs_kernel
from autopar_kernels.registration import (
    accumulation_dtype,
    once_differentiable,
    register_composite,
    register_pass,
)

FEW = 16
"""The most parts that one thread adds up; more are shared among the threads of a program."""


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
    from autopar_kernels.row_kernels import sum_few_kernel, sum_many_kernel

    flat = parts.reshape(parts.shape[0], -1)
    count, columns = flat.shape
    out = parts.new_empty(parts.shape[1:], dtype=dtype)
    if count <= FEW:
        launch(
            sum_few_kernel,
            (divide_up(columns, 1024),),
            (flat, out, columns, *flat.stride()),
            COUNT=count,
            BLOCK=1024,
        )
    else:
        launch(
            sum_many_kernel,
            (divide_up(columns, 16),),
            (flat, out, count, columns, *flat.stride()),
            warps=8,
            LANES=min(power_of_2(count), 128),
            BLOCK=16,
        )
    return out


def _fake(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return parts.new_empty(parts.shape[1:], dtype=dtype)


register_pass("sum_parts(Tensor parts, ScalarType? dtype=None) -> Tensor", sum_parts, _fake)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, dtype: torch.dtype | None) -> Tensor:
        ctx.shape, ctx.dtype = parts.shape, parts.dtype
        out: Tensor = torch.ops.autopar.sum_parts(parts, dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype).expand(ctx.shape), None


def sum_partials(parts: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`sum_parts`, differentiable: (P, ...) -> (...); the gradient of each part is that of the sum."""
    out: Tensor = _Sum.apply(parts, dtype)
    return out


register_composite("sum_partials(Tensor parts, ScalarType? dtype=None) -> Tensor", sum_partials)
