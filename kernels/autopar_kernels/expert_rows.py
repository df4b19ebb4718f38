"""Rows on their way to experts and back, without atomics: `autopar::permute_rows` and `autopar::combine_rows`.

Choice k of token t is number t K + k.  `order` lists the choices in the order of their experts and `inverse` is its inverse, as
`routed_experts.sort_by_expert` and `inverse_order` give them.  Since a permutation is a bijection, every gradient is a gather too:

    permute_rows:  rows[i] = x[order[i] // K]                        dx[t] = sum_k drows[inverse[t K + k]]
    combine_rows:  out[t] = sum_k w[t, k] rows[inverse[t K + k]]     drows[i] = w[order[i]] dout[order[i] // K]
                                                                     dw[t, k] = rows[inverse[t K + k]] . dout[t]

Sums are fp32 (fp64 for fp64 tensors), in the order of k, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import divide_up, launch, runs_kernel, strides_of, tile_of
from autopar_kernels.registration import (
    accumulation_dtype,
    once_differentiable,
    register_composite,
    register_pass,
)

_OPS = torch.ops.autopar


def _gather_sum(rows: Tensor, index: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sum over k of weights[t, k] rows[index[t, k]], in `dtype`: (S, H), (T, K) -> (T, H). Without
    weights (None) each is 1.
    """
    out = _gather_sum_fake(rows, index, weights, dtype)
    if not runs_kernel(rows, weights):
        wide = accumulation_dtype(rows, weights)
        chosen = rows[index].to(wide)
        if weights is not None:
            chosen = chosen * weights.to(wide).unsqueeze(-1)
        return out.copy_(chosen.sum(1))
    from autopar_kernels.row_kernels import gather_sum_kernel

    (count, choices), columns = index.shape, rows.shape[1]
    tile = tile_of(columns, "element", rows.device)
    launch(
        gather_sum_kernel,
        (divide_up(count, tile.rows), divide_up(columns, tile.columns)),
        (
            *(rows, index.contiguous(), None if weights is None else weights.contiguous()),
            *(out, count, columns, *rows.stride()),
        ),
        tile.warps,
        CHOICES=choices,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out


def _gather_sum_fake(
    rows: Tensor, index: Tensor, weights: Tensor | None, dtype: torch.dtype
) -> Tensor:
    return rows.new_empty((index.shape[0], rows.shape[1]), dtype=dtype)


def _gather_dot(rows: Tensor, index: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    """The dot product rows[index[t, k]] . other[t], in `dtype`: (S, H), (T, K), (T, H)
    -> (T, K).
    """
    out = _gather_dot_fake(rows, index, other, dtype)
    if not runs_kernel(rows, other):
        wide = accumulation_dtype(rows, other)
        return out.copy_((rows[index].to(wide) * other.to(wide).unsqueeze(1)).sum(-1))
    from autopar_kernels.row_kernels import gather_dot_kernel

    columns = rows.shape[1]
    tile = tile_of(columns, "walk_pair", rows.device)
    launch(
        gather_dot_kernel,
        (divide_up(index.numel(), tile.rows),),
        (
            *(rows, index.contiguous(), other, out),
            *(index.numel(), columns, strides_of(rows, other)),
        ),
        tile.warps,
        CHOICES=index.shape[1],
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out


def _gather_dot_fake(rows: Tensor, index: Tensor, other: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(index.shape, dtype=dtype)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        choices = order.shape[0] // x.shape[0] if x.shape[0] else 1
        ctx.save_for_backward(inverse.view(-1, choices))
        ctx.dtype = x.dtype
        out: Tensor = _OPS.gather_sum(x, (order // choices).unsqueeze(1), None, x.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (inverse,) = ctx.saved_tensors
        return _OPS.gather_sum(grad, inverse, None, ctx.dtype), None, None


def permute_rows(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The row of every choice in the order of the experts: (T, H) -> (T K, H), differentiable in x.

    Args:
        x: (T, H), any strides.
        order: (T K,) int64, the choices by expert.
        inverse: (T K,) int64, where each choice is in `order`.

    Raises:
        ValueError: the number of choices is no multiple of the number of tokens, or order and
            inverse differ in shape.
    """
    if order.shape != inverse.shape or (x.shape[0] and order.shape[0] % x.shape[0]):
        raise ValueError(f"{order.shape[0]} choices, {inverse.shape[0]} places, {x.shape[0]} rows")
    out: Tensor = _Permute.apply(x, order, inverse)
    return out


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(
            rows if ctx.needs_input_grad[3] else None, order, inverse.view(weights.shape), weights
        )
        ctx.dtype = rows.dtype
        out: Tensor = _OPS.gather_sum(rows, inverse.view(weights.shape), weights, rows.dtype)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, order, inverse, weights = ctx.saved_tensors
        drows = dweights = None
        if ctx.needs_input_grad[0]:
            tokens = (order // weights.shape[1]).unsqueeze(1)
            scale = weights.reshape(-1)[order].unsqueeze(1)
            drows = _OPS.gather_sum(grad, tokens, scale, ctx.dtype)
        if ctx.needs_input_grad[3]:
            dweights = _OPS.gather_dot(rows, inverse, grad, weights.dtype)
        return drows, None, None, dweights


def combine_rows(rows: Tensor, order: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's choices: (T K, H) -> (T, H), differentiable in rows and weights.

    Args:
        rows: (T K, H), row i of choice order[i]; any strides.
        order: (T K,) int64.
        inverse: (T K,) int64, where each choice is in `order`.
        weights: (T, K), the factor of each choice, of any floating dtype.

    Raises:
        ValueError: shapes differ.
    """
    if not rows.shape[0] == order.shape[0] == inverse.shape[0] == weights.numel():
        raise ValueError(
            f"{rows.shape[0]} rows, {order.shape[0]} choices, weights {tuple(weights.shape)}"
        )
    out: Tensor = _Combine.apply(rows, order, inverse, weights)
    return out


register_pass(
    "gather_sum(Tensor rows, Tensor index, Tensor? weights, ScalarType dtype) -> Tensor",
    _gather_sum,
    _gather_sum_fake,
)
register_pass(
    "gather_dot(Tensor rows, Tensor index, Tensor other, ScalarType dtype) -> Tensor",
    _gather_dot,
    _gather_dot_fake,
)
register_composite("permute_rows(Tensor x, Tensor order, Tensor inverse) -> Tensor", permute_rows)
register_composite(
    "combine_rows(Tensor rows, Tensor order, Tensor inverse, Tensor weights) -> Tensor",
    combine_rows,
)
