"""The merge of two partial attentions, as a ring of context-parallel ranks makes them: `autopar::merge_attention`.

    l = log(exp(l1) + exp(l2))                         out = exp(l1 - l) first + exp(l2 - l) second

A row whose two logarithms are -inf saw no key: it gives zeros, -inf, and gradients of zero.  Arithmetic is fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar_kernels.launching import (
    divide_up,
    launch,
    power_of_2,
    rows_of,
    runs_kernel,
    strides_of,
)
from autopar_kernels.registration import accumulation_dtype, register_composite, register_pass

_OPS = torch.ops.autopar


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


def _forward(
    first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
) -> tuple[Tensor, Tensor]:
    out, level = _forward_fake(first, first_level, second, second_level)
    if not runs_kernel(first, first_level, second, second_level):
        wide = level.dtype
        p, q, merged = _shares(first_level.to(wide), second_level.to(wide))
        p, q = p.unsqueeze(-1), q.unsqueeze(-1)
        value = (p * first).where(p != 0, 0) + (q * second).where(q != 0, 0)
        return out.copy_(value), level.copy_(merged)
    from autopar_kernels.softmax_kernels import merge_forward_kernel

    a, b = rows_of(first), rows_of(second)
    rows, columns, warps = _block(a.shape[1])
    launch(
        merge_forward_kernel,
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


def _forward_fake(
    first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
) -> tuple[Tensor, Tensor]:
    if first.shape != second.shape or first.shape[:-1] != first_level.shape:
        raise ValueError(
            f"parts {tuple(first.shape)}, {tuple(second.shape)}, levels {tuple(first_level.shape)}"
        )
    wide = accumulation_dtype(first, second, first_level, second_level)
    dtype = torch.promote_types(first.dtype, second.dtype)
    return first.new_empty(first.shape, dtype=dtype), first.new_empty(first_level.shape, dtype=wide)


def _backward(
    grad: Tensor,
    grad_level: Tensor,
    first: Tensor,
    first_level: Tensor,
    second: Tensor,
    second_level: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of first, first_level, second and second_level."""
    inputs = (first, first_level, second, second_level)
    outputs = _backward_fake(grad, grad_level, *inputs)
    if not runs_kernel(grad, grad_level, *inputs):
        wide = accumulation_dtype(*inputs)
        p, q, _ = _shares(first_level.to(wide), second_level.to(wide))
        both = (p * q).unsqueeze(-1)
        along = (both * grad * (first.to(wide) - second.to(wide))).where(both != 0, 0).sum(-1)
        upstream = grad_level.to(wide)
        gradients = (
            p.unsqueeze(-1) * grad,
            along + (p * upstream).where(p != 0, 0),
            q.unsqueeze(-1) * grad,
            (q * upstream).where(q != 0, 0) - along,
        )
        for out, gradient in zip(outputs, gradients, strict=True):
            out.copy_(gradient)
        return outputs
    from autopar_kernels.softmax_kernels import merge_backward_kernel

    g, a, b = rows_of(grad), rows_of(first), rows_of(second)
    rows, columns, warps = _block(a.shape[1])
    launch(
        merge_backward_kernel,
        (divide_up(a.shape[0], rows),),
        (
            *(g, grad_level.contiguous(), a, first_level.contiguous()),
            *(b, second_level.contiguous(), *outputs, *a.shape, strides_of(g, a, b)),
        ),
        warps,
        R=rows,
        BLOCK=columns,
    )
    return outputs


def _backward_fake(
    grad: Tensor, grad_level: Tensor, *inputs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    first, first_level, second, second_level = (t.new_empty(t.shape) for t in inputs)
    return first, first_level, second, second_level


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(first, first_level, second, second_level)
        out, level = _OPS.merge_attention_forward(first, first_level, second, second_level)
        return out, level

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, grad_level: Tensor) -> Any:
        gradients = _OPS.merge_attention_backward(grad, grad_level, *ctx.saved_tensors)
        return tuple(
            gradient if needed else None
            for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=True)
        )


def merge_attention(
    first: Tensor, first_level: Tensor, second: Tensor, second_level: Tensor
) -> tuple[Tensor, Tensor]:
    """(attention over the keys of both parts, logarithm of its denominator); differentiable in all four.

    Args:
        first: (..., D), attention over some keys; any strides.
        first_level: (...), the logarithm of its denominator, -inf for a row that saw no key.
        second: (..., D), attention over other keys.
        second_level: (...), the logarithm of its denominator.

    Raises:
        ValueError: shapes differ.
    """
    out, level = _Merge.apply(first, first_level, second, second_level)
    return out, level


_PARTS = "Tensor first, Tensor first_level, Tensor second, Tensor second_level"
register_pass(f"merge_attention_forward({_PARTS}) -> (Tensor, Tensor)", _forward, _forward_fake)
register_pass(
    f"merge_attention_backward(Tensor grad, Tensor grad_level, {_PARTS}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_composite(f"merge_attention({_PARTS}) -> (Tensor, Tensor)", merge_attention)
