"""RMSNorm, alone and after the addition of a residual: `autopar::rms_norm` and `autopar::add_rms_norm`.

    scale = 1 / sqrt(mean(h^2) + eps)      over the last dim of h, or over each of `groups` equal parts of it
    rms_norm = cast(h scale) (offset + weight)

All arithmetic is fp32 (fp64 for fp64 tensors); `cast` says where the modelled code rounds, which also decides the result's dtype:

    before   h scale is rounded to x's dtype, then multiplied; the result has the promoted dtype of x and weight (Llama)
    weight   h scale is rounded to the weight's dtype, which is the result's (T5)
    after    the product is rounded to x's dtype (Gemma)
    none     the product is rounded to the promoted dtype of x and weight (code without casts)

With a gate z the result is rms_norm(x) silu(z), in x's dtype (Qwen3-Next), or rms_norm(x silu(z)) if `gate_first` (Mamba 2).
Saved for backward: h, the weight, the gate, and 1 / sqrt(..) of each row and group.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import autopar_kernels.norm_passes  # noqa: F401 (registers the passes)
from autopar_kernels.registration import once_differentiable, present, register_composite

_OPS = torch.ops.autopar


class _RMSNorm(torch.autograd.Function):
    """RMSNorm as an autograd function: (result, x + residual), or the result alone without a
    residual.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        gate: Tensor | None,
        attributes: tuple[float, float, str, int, bool],
    ) -> Any:
        eps, offset, cast, groups, gate_first = attributes
        out, total, _, rstd = _OPS.norm_forward(
            x, residual, weight, None, gate, False, eps, offset, cast, groups, gate_first
        )
        ctx.save_for_backward(x if residual is None else total, weight, gate, rstd)
        ctx.attributes = (x.dtype if weight is None else weight.dtype, offset, groups, gate_first)
        ctx.dtypes = (x.dtype, None if residual is None else residual.dtype)
        ctx.set_materialize_grads(False)
        return out if residual is None else (out, total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None = None) -> Any:
        needs_x, needs_residual, needs_weight, needs_gate, _ = ctx.needs_input_grad
        x, weight, gate, rstd = ctx.saved_tensors
        if grad is None:
            return (
                *gradients_of_terms(grad_total, ctx.dtypes, needs_x, needs_residual),
                None,
                None,
                None,
            )
        dx, dweight, _, dgate = _OPS.norm_backward(
            grad,
            grad_total,
            x,
            weight,
            gate,
            None,
            rstd,
            *ctx.attributes,
            [needs_x or needs_residual, needs_weight, False, needs_gate],
        )
        return (
            *gradients_of_terms(dx, ctx.dtypes, needs_x, needs_residual),
            present(dweight, needs_weight),
            present(dgate, needs_gate),
            None,
        )


def gradients_of_terms(
    dx: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype | None], *wanted: bool
) -> tuple[Tensor | None, ...]:
    """The gradients of the terms of a sum, from the sum's gradient `dx`: the same values in each
    term's dtype. None for a term that is absent (no dtype) or not wanted, and if `dx` is None.
    """
    return tuple(
        dx.to(dtype) if dx is not None and dtype is not None and want else None
        for dtype, want in zip(dtypes, wanted, strict=True)
    )


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "before",
    groups: int = 1,
    gate_first: bool = False,
) -> Tensor:
    """RMSNorm over the last dim: (..., N) -> (..., N), differentiable in x, weight and gate.

    Args:
        x: (..., N), any strides.
        weight: (N,), or None for a norm without one.
        gate: (..., N), or None.
        eps: what is added to the mean of squares.
        offset: what is added to the weight: 0, or 1 for weights that start at 0.
        cast: "before", "weight", "after" or "none", as the module's text says.
        groups: N / groups elements are normalised together; divides N.
        gate_first: whether the gate multiplies x before the norm.

    Raises:
        ValueError: a shape or attribute does not fit.
    """
    out: Tensor = _RMSNorm.apply(x, None, weight, gate, (eps, offset, cast, groups, gate_first))
    return out


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    cast: str = "before",
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual), each (..., N); the sum is rounded as an addition of the two rounds.

    Args:
        x: (..., N), any strides.
        residual: (..., N), any strides.
        weight: (N,), or None.
        eps: what is added to the mean of squares.
        offset: what is added to the weight.
        cast: as for `rms_norm`, with the dtype of the sum in the place of x's.

    Raises:
        ValueError: a shape or attribute does not fit.
    """
    out, total = _RMSNorm.apply(x, residual, weight, None, (eps, offset, cast, 1, False))
    return out, total


register_composite(
    "rms_norm(Tensor x, Tensor? weight=None, Tensor? gate=None, float eps=1e-6, float offset=0.0, "
    'str cast="before", int groups=1, bool gate_first=False) -> Tensor',
    rms_norm,
)
register_composite(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight=None, float eps=1e-6, "
    'float offset=0.0, str cast="before") -> (Tensor, Tensor)',
    add_rms_norm,
)
