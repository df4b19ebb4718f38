"""LayerNorm, alone and after the addition of a residual: `autopar::layer_norm` and `autopar::add_layer_norm`.

    layer_norm = (h - mean(h)) / sqrt(mean((h - mean(h))^2) + eps) weight + bias      over the last dim of h

All arithmetic is fp32 (fp64 for fp64 tensors) and the result is rounded once, to h's dtype, as torch's LayerNorm does.  Saved for
backward: h, the weight, and the mean and 1 / sqrt(..) of each row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autopar_kernels.norm_passes  # noqa: F401 (registers the passes)
from autopar_kernels.norms import gradients_of_terms
from autopar_kernels.registration import once_differentiable, present, register_composite

_OPS = torch.ops.autopar


class _LayerNorm(torch.autograd.Function):
    """LayerNorm as an autograd function: (result, x + residual), or the result alone without a
    residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Any:
        out, total, mean, rstd = _OPS.norm_forward(
            x, residual, weight, bias, None, True, eps, 0.0, "after", 1, False
        )
        ctx.save_for_backward(x if residual is None else total, weight, mean, rstd)
        ctx.vector = next((t.dtype for t in (weight, bias) if t is not None), x.dtype)
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return out if residual is None else (out, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None = None) -> Any:
        needs_x, needs_residual, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if grad is None:
            terms = gradients_of_terms(grad_total, ctx.dtypes, needs_x, needs_residual)
            return *terms, None, None, None
        x, weight, mean, rstd = ctx.saved_tensors
        needs = [needs_x or needs_residual, needs_weight, needs_bias, False]
        dx, dweight, dbias, _ = _OPS.norm_backward(
            grad, grad_total, x, weight, None, mean, rstd, ctx.vector, 0.0, 1, False, needs
        )
        return (
            *gradients_of_terms(dx, ctx.dtypes, needs_x, needs_residual),
            present(dweight, needs_weight),
            present(dbias, needs_bias),
            None,
        )


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """LayerNorm over the last dim: (..., N) -> (..., N), differentiable in x, weight and bias.

    Args:
        x: (..., N), any strides.
        weight: (N,), or None.
        bias: (N,), of the weight's dtype, or None.
        eps: what is added to the variance.

    Raises:
        ValueError: a shape does not fit.
    """
    out: Tensor = _LayerNorm.apply(x, None, weight, bias, eps)
    return out


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(x + residual), x + residual), each (..., N); the sum is rounded as an addition of the two rounds.

    Args:
        x: (..., N), any strides.
        residual: (..., N), any strides.
        weight: (N,), or None.
        bias: (N,), of the weight's dtype, or None.
        eps: what is added to the variance.

    Raises:
        ValueError: a shape does not fit.
    """
    out, total = _LayerNorm.apply(x, residual, weight, bias, eps)
    return out, total


register_composite(
    "layer_norm(Tensor x, Tensor? weight=None, Tensor? bias=None, float eps=1e-5) -> Tensor",
    layer_norm,
)
register_composite(
    "add_layer_norm(Tensor x, Tensor residual, Tensor? weight=None, Tensor? bias=None, "
    "float eps=1e-5) -> (Tensor, Tensor)",
    add_layer_norm,
)
