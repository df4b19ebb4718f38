"""Softmax of attention scores, `autopar::softmax`.

    x = cap tanh(scale scores / cap) + mask             probabilities = exp(x) / (sum exp(x) + exp(sink))

Arithmetic is fp32 (fp64 for fp64 tensors) with one rounding.  A row without any score, fully masked and without a sink, gives zeros and
gradients of zero.  Saved for backward: scores, mask, sinks, and the logarithm of each row's denominator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import (
    divide_up,
    launch,
    runs_kernel,
    tile_of,
)
from autopar_kernels.registration import (
    absent,
    accumulation_dtype,
    once_differentiable,
    present,
    register_composite,
    register_pass,
)

_OPS = torch.ops.autopar


def _four_dims(tensor: Tensor) -> Tensor:
    """The tensor with leading dims of size 1, up to four dims."""
    return tensor.view((1,) * (4 - tensor.dim()) + tensor.shape) if tensor.dim() < 4 else tensor


def _scores(
    scores: Tensor, mask: Tensor | None, scale: float, cap: float | None, wide: torch.dtype
) -> tuple[Tensor, Tensor | float]:
    """(scaled, capped and masked scores, the derivative of the cap), in the dtype `wide`. Without a
    cap the derivative is 1.0.
    """
    x = scores.to(wide) * scale
    slope: Tensor | float = 1.0
    if cap is not None:
        t = torch.tanh(x / cap)
        x, slope = cap * t, 1 - t.square()
    if mask is not None:
        hidden = mask.dtype == torch.bool
        x = x.masked_fill(~mask, float("-inf")) if hidden else x + mask.to(wide)
    return x, slope


def _sinks(sinks: Tensor, wide: torch.dtype) -> Tensor:
    return sinks.to(wide).view(-1, 1, 1)


def _forward(
    scores: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """(probabilities, logarithm of each row's denominator)."""
    out, level = _forward_fake(scores, mask, sinks, scale, soft_cap)
    if not runs_kernel(scores, mask, sinks):
        x, _ = _scores(scores, mask, scale, soft_cap, level.dtype)
        if x.shape[-1] == 0:
            level.fill_(float("-inf"))
        else:
            torch.logsumexp(x, -1, out=level)
            level.masked_fill_(level == float("inf"), float("nan"))  # as torch's softmax
        if sinks is not None:
            torch.logaddexp(
                level, _sinks(sinks, level.dtype).squeeze(-1).expand_as(level), out=level
            )
        norm = level.masked_fill(level == float("-inf"), 0).unsqueeze(-1)
        return out.copy_((x - norm).exp()), level
    from autopar_kernels.softmax_kernels import softmax_forward_kernel

    source = _four_dims(scores)
    seen = None if mask is None else mask.expand(scores.shape)
    rows, columns = level.numel(), scores.shape[-1]
    tile = tile_of(columns, "walk", scores.device)
    launch(
        softmax_forward_kernel,
        (divide_up(rows, tile.rows),),
        (
            *(source, seen, None if sinks is None else sinks.contiguous(), out, level),
            *(rows, *source.shape[1:], _strides(source, seen)),
        ),
        tile.warps,
        SCALE=scale,
        CAP=soft_cap,
        R=tile.rows,
        BLOCK=tile.columns,
    )
    return out, level


def _strides(source: Tensor, seen: Tensor | None) -> tuple[int, ...]:
    mask = (0, 0, 0, 0) if seen is None else _four_dims(seen).stride()
    return (*source.stride(), *mask)


def _forward_fake(
    scores: Tensor, mask: Tensor | None, sinks: Tensor | None, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    wide = accumulation_dtype(scores, mask, sinks)
    return scores.new_empty(scores.shape), scores.new_empty(scores.shape[:-1], dtype=wide)


def _backward(
    grad: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    level: Tensor,
    scale: float,
    soft_cap: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """(gradient of scores, gradient of sinks). Without `needs[0]` the first is an empty tensor.
    Without `needs[1]` the second is empty or has no values.
    """
    dscores, dsinks = _backward_fake(grad, scores, mask, sinks, level, scale, soft_cap, needs)
    rows_of_sinks = level.new_empty(level.shape) if needs[1] else None
    if not runs_kernel(grad, scores, mask, sinks):
        x, slope = _scores(scores, mask, scale, soft_cap, level.dtype)
        norm = level.masked_fill(level == float("-inf"), 0).unsqueeze(-1)
        weighted = (x - norm).exp()
        along = (weighted * grad).sum(-1, keepdim=True)
        if needs[0]:
            dscores.copy_(weighted * (grad - along) * slope * scale)
        if rows_of_sinks is not None and sinks is not None:
            rows_of_sinks.copy_((-(_sinks(sinks, level.dtype) - norm).exp() * along).squeeze(-1))
    else:
        from autopar_kernels.softmax_kernels import softmax_backward_kernel

        source, upstream = _four_dims(scores), _four_dims(grad)
        seen = None if mask is None else mask.expand(scores.shape)
        rows, columns = level.numel(), scores.shape[-1]
        tile = tile_of(columns, "walk_pair", scores.device)
        launch(
            softmax_backward_kernel,
            (divide_up(rows, tile.rows),),
            (
                *(upstream, source, seen, None if sinks is None else sinks.contiguous(), level),
                *(dscores if needs[0] else None, rows_of_sinks),
                *(rows, *source.shape[1:], _strides(source, seen), *upstream.stride()),
            ),
            tile.warps,
            SCALE=scale,
            CAP=soft_cap,
            R=tile.rows,
            BLOCK=tile.columns,
        )
    if rows_of_sinks is not None:
        dsinks.copy_(_four_dims(rows_of_sinks.unsqueeze(-1)).sum((0, 2, 3)))
    return dscores, dsinks


def _backward_fake(
    grad: Tensor,
    scores: Tensor,
    mask: Tensor | None,
    sinks: Tensor | None,
    level: Tensor,
    scale: float,
    soft_cap: float | None,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    dscores = scores.new_empty(scores.shape) if needs[0] else absent(scores)
    return dscores, absent(scores) if sinks is None else sinks.new_empty(sinks.shape)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        scale: float,
        soft_cap: float | None,
    ) -> Tensor:
        out, level = _OPS.softmax_forward(scores, mask, sinks, scale, soft_cap)
        ctx.save_for_backward(scores, mask, sinks, level)
        ctx.attributes = (scale, soft_cap)
        result: Tensor = out
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        dscores, dsinks = _OPS.softmax_backward(grad, *ctx.saved_tensors, *ctx.attributes, needs)
        return present(dscores, needs[0]), None, present(dsinks, needs[1]), None, None


def softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    sinks: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
) -> Tensor:
    """Attention probabilities of the shape and dtype of scores; differentiable in scores and sinks.

    The softmax over the last dim of x = soft_cap tanh(scale scores / soft_cap) + mask, with
    exp(sink) added to the denominator. A fully masked row without a sink gives zeros.

    Args:
        scores: (..., Q, K) of 1 to 4 dims, any strides.
        mask: bool (True is seen), or numbers that are added; it broadcasts to scores and is
            constant.
        sinks: (H,), a score of each head without a column, for scores (..., H, Q, K); or None.
        scale: the factor of scores. Mask and sinks are not scaled.
        soft_cap: the cap, or None for none.

    Raises:
        ValueError: scores do not have 1 to 4 dims, sinks do not fit, or the mask needs a gradient.
        RuntimeError: the mask does not broadcast to scores.
    """
    if mask is not None and mask.requires_grad:
        raise ValueError("the mask of a softmax is constant and must not require a gradient")
    if not 1 <= scores.dim() <= 4:
        raise ValueError(f"scores of {scores.dim()} dims; 1 to 4 are known")
    if sinks is not None and (scores.dim() < 3 or sinks.shape != scores.shape[-3:-2]):
        raise ValueError(f"sinks {tuple(sinks.shape)} for scores {tuple(scores.shape)}")
    out: Tensor = _Softmax.apply(scores, mask, sinks, scale, soft_cap)
    return out


_SCORES = "Tensor scores, Tensor? mask"
register_pass(
    f"softmax_forward({_SCORES}, Tensor? sinks, float scale, float? soft_cap) -> (Tensor, Tensor)",
    _forward,
    _forward_fake,
)
register_pass(
    f"softmax_backward(Tensor grad, {_SCORES}, Tensor? sinks, Tensor level, float scale, "
    "float? soft_cap, bool[] needs) -> (Tensor, Tensor)",
    _backward,
    _backward_fake,
)
register_composite(
    f"softmax({_SCORES}=None, Tensor? sinks=None, float scale=1.0, float? soft_cap=None) -> Tensor",
    softmax,
)
