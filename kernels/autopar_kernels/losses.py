"""Cross-entropy, also of a sharded vocabulary: `autopar::cross_entropy` and the ops that it is made of.

Each rank holds columns first, first + 1, ... of the logits (..., V), and ranks exchange three numbers a row (four with smoothing):

    statistics = cross_entropy_local(logits, ...)                  max, sum of exp(x - max), target's logit, weighted sum of x
    merged     = cross_entropy_merge(all ranks' statistics)
    loss       = cross_entropy_merged(logits, target, merged, ...)

The loss of a row is, with l = log sum exp x, class weights w (1 without) of sum W, and smoothing e,

    (1 - e) w[y] (l - x[y]) + e / V (W l - sum_c w[c] x[c]) + z l^2          as F.cross_entropy, plus the z-loss
    x = cap tanh(logits / cap)                                               with a soft cap

and 0 for ignored rows.  Arithmetic and losses are fp32 (fp64 for fp64 logits).  Backward computes the gradient from the logits and the
merged statistics: nothing of the logits' size is kept besides them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import divide_up, launch, rows_of, runs_kernel, tile_of
from autopar_kernels.registration import (
    accumulation_dtype,
    once_differentiable,
    register_composite,
    register_pass,
)

_OPS = torch.ops.autopar
_REDUCTIONS = ("none", "sum", "mean")


def _layout(logits: Tensor) -> tuple[Tensor, int, tuple[int, ...]]:
    """(logits, size of the inner dim, three strides), as the kernels read them. 3 dims are not
    copied; otherwise logits become a matrix, whose inner dim has all rows.
    """
    if logits.dim() == 3:
        return logits, max(logits.shape[1], 1), logits.stride()
    flat = rows_of(logits)
    return flat, max(flat.shape[0], 1), (0, *flat.stride())


def _capped(logits: Tensor, wide: torch.dtype, cap: float | None) -> Tensor:
    x = rows_of(logits).to(wide)
    return x if cap is None else cap * torch.tanh(x / cap)


def _local(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    smooth: bool,
    soft_cap: float | None,
) -> Tensor:
    """The statistics (3, R) of a shard, (4, R) if `smooth`: max, sum of exp(x - max), the target's
    logit (0 on other shards), weighted sum of x. `weight` (V,) of all classes is read only for the
    fourth. The other arguments are those of `cross_entropy_merged`.
    """
    out = _local_fake(logits, target, weight, first, smooth, soft_cap)
    flat = target.reshape(-1).contiguous()
    if not runs_kernel(logits, weight):
        x = _capped(logits, out.dtype, soft_cap)
        largest = x.amax(1) if x.shape[1] else x.new_full(x.shape[:1], float("-inf"))
        base = largest.masked_fill(largest == float("-inf"), 0).unsqueeze(1)
        place = flat - first
        mine = (place >= 0) & (place < x.shape[1])
        hit = x.gather(1, place.where(mine, 0).unsqueeze(1)).squeeze(1)
        rows = [largest, (x - base).exp().sum(1), hit.where(mine, 0)]
        if smooth:
            scale = 1 if weight is None else weight[first : first + x.shape[1]].to(x.dtype)
            rows.append((x * scale).sum(1))
        return torch.stack(rows, out=out)
    from autopar_kernels.loss_kernels import cross_entropy_local_kernel

    source, inner, strides = _layout(logits)
    tile = tile_of(logits.shape[-1], "walk", logits.device)
    launch(
        cross_entropy_local_kernel,
        (flat.shape[0],),
        (
            *(source, flat, None if weight is None else weight.contiguous(), out),
            *(flat.shape[0], inner, strides, first, logits.shape[-1]),
        ),
        tile.warps,
        SMOOTH=smooth,
        CAP=soft_cap,
        BLOCK=tile.columns,
    )
    return out


def _local_fake(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    first: int,
    smooth: bool,
    soft_cap: float | None,
) -> Tensor:
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(target.shape)} for logits of {tuple(logits.shape)}"
        )
    return logits.new_empty(
        (4 if smooth else 3, target.numel()), dtype=accumulation_dtype(logits, weight)
    )


def cross_entropy_merge(parts: Tensor) -> Tensor:
    """The statistics of whole rows from those of all shards: (S, 3 or 4, R) -> (3 or 4, R)."""
    largest = parts[:, 0].amax(0)
    base = largest.masked_fill(largest == float("-inf"), 0)
    total = (parts[:, 1] * (parts[:, 0] - base).exp()).sum(0)
    return torch.cat([torch.stack([largest, total]), parts[:, 2:].sum(0)])


def _weight_sum(weight: Tensor | None, smoothing: float, wide: torch.dtype) -> Tensor | None:
    return weight.sum(dtype=wide) if weight is not None and smoothing > 0 else None


def _row_weights(
    flat: Tensor, weight: Tensor | None, classes: int, ignore_index: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(which of the targets `flat` (R,) count, the weight of each one's class). The weight is 0 for
    ignored rows, and NaN for targets that are no class, so that their loss is too.
    """
    valid = flat != ignore_index
    known = (flat >= 0) & (flat < classes)
    scale = valid.to(dtype)
    if weight is not None:
        scale = weight.to(dtype)[flat.where(known, 0)].masked_fill(~valid, 0)
    return valid, scale.masked_fill(valid & ~known, float("nan"))


def _rows(
    statistics: Tensor,
    target: Tensor,
    weight: Tensor | None,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
) -> tuple[Tensor, Tensor]:
    """(the loss of each row, the weight of its class), (R,) each; 0 for ignored rows, and NaN for
    targets that are no class. The arguments are those of `cross_entropy_merged`.
    """
    loss, scales = torch.empty_like(statistics[0]), torch.empty_like(statistics[0])
    flat = target.reshape(-1).contiguous()
    total = _weight_sum(weight, smoothing, statistics.dtype)
    if not runs_kernel(statistics, weight):
        valid, scale = _row_weights(flat, weight, classes, ignore_index, loss.dtype)
        level = statistics[0] + statistics[1].log()
        value = (1 - smoothing) * scale * (level - statistics[2])
        if smoothing > 0:
            norm = classes if total is None else total
            value = value + smoothing / classes * (norm * level - statistics[3])
        value = value + z_loss * level.square()
        return loss.copy_(value.where(valid, 0)), scales.copy_(scale)
    from autopar_kernels.loss_kernels import cross_entropy_rows_kernel

    launch(
        cross_entropy_rows_kernel,
        (divide_up(flat.shape[0], 256),),
        (
            *(statistics, flat, None if weight is None else weight.contiguous(), total),
            *(loss, scales, flat.shape[0], classes),
        ),
        IGNORE=ignore_index,
        SMOOTHING=smoothing,
        Z=z_loss,
        BLOCK=256,
    )
    return loss, scales


def _rows_fake(statistics: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
    rows = statistics.shape[1]
    return statistics.new_empty(rows), statistics.new_empty(rows)


def _gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    soft_cap: float | None,
) -> Tensor:
    """The gradient of a shard's logits, in their shape, from the gradient `grad` of each row's loss
    (R,) and the merged statistics. 0 for ignored rows. The other arguments are those of
    `cross_entropy_merged`.
    """
    out = logits.new_empty(logits.shape)
    flat = target.reshape(-1).contiguous()
    total = _weight_sum(weight, smoothing, statistics.dtype)
    if not runs_kernel(grad, logits, weight):
        wide = statistics.dtype
        x = _capped(logits, wide, soft_cap)
        valid, scale = _row_weights(flat, weight, classes, ignore_index, wide)
        share = (1 - smoothing) * scale
        columns = torch.arange(first, first + x.shape[1], device=x.device)
        vector = None if weight is None else weight.to(wide)
        level = statistics[0] + statistics[1].log()
        p = (x - level.unsqueeze(1)).exp()
        value = share.unsqueeze(1) * (p - (columns == flat.unsqueeze(1)).to(wide))
        if smoothing > 0:
            norm = classes if total is None else total
            of_class = 1 if vector is None else vector[columns]
            value = value + smoothing / classes * (norm * p - of_class)
        value = value + 2 * z_loss * level.unsqueeze(1) * p
        if soft_cap is not None:
            value = value * (1 - (x / soft_cap).square())
        value = (value * grad.to(wide).unsqueeze(1)).where(valid.unsqueeze(1), 0)
        return out.copy_(value.view(out.shape))
    from autopar_kernels.loss_kernels import cross_entropy_gradient_kernel

    source, inner, strides = _layout(logits)
    tile = tile_of(logits.shape[-1], "walk_pair", logits.device)
    launch(
        cross_entropy_gradient_kernel,
        (flat.shape[0], divide_up(logits.shape[-1], tile.columns)),
        (
            *(grad, grad.stride(0), source, flat),
            *(None if weight is None else weight.contiguous(), total, statistics, out),
            *(flat.shape[0], inner, strides, first, logits.shape[-1], classes),
        ),
        tile.warps,
        IGNORE=ignore_index,
        SMOOTHING=smoothing,
        Z=z_loss,
        CAP=soft_cap,
        BLOCK=tile.columns,
    )
    return out


def _gradient_fake(grad: Tensor, logits: Tensor, *rest: object) -> Tensor:
    return logits.new_empty(logits.shape)


class _CrossEntropy(torch.autograd.Function):
    """The loss from merged statistics, as an autograd function: (the loss of each row, the weight
    of its class).
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        statistics: Tensor,
        attributes: tuple[int, int, int, float, float, float | None],
    ) -> tuple[Tensor, Tensor]:
        loss, scales = _OPS.cross_entropy_rows(statistics, target, weight, *attributes[1:5])
        ctx.save_for_backward(logits, target, weight, statistics)
        ctx.attributes = attributes
        ctx.mark_non_differentiable(scales)
        return loss, scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        gradient = _OPS.cross_entropy_gradient(grad, *ctx.saved_tensors, *ctx.attributes)
        return gradient, None, None, None, None


def check_constant(weight: Tensor | None) -> None:
    """Raise ValueError if class weights need a gradient, which torch's cross-entropy does not have
    either.
    """
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("class weights of a cross-entropy are constant: detach them")


def cross_entropy_merged(
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    weight: Tensor | None = None,
    first: int = 0,
    classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(the loss of each row, the weight of its class), each of target's shape and 0 for ignored
    rows.

    The loss is differentiable in logits.

    The mean of F.cross_entropy is the sum of the first over the sum of the second.

    Args:
        logits: (..., V'), this shard's columns; any strides.
        target: (...) int64, classes of all shards. Another value than a class or `ignore_index`
            makes the row's loss and gradient NaN.
        statistics: (3 or 4, R), merged over all shards; constant.
        weight: (V,) of all classes, or None.
        first: the class of the shard's first column.
        classes: V, the number of classes over all shards; V' by default.
        ignore_index: the target of rows that do not count.
        label_smoothing: as F.cross_entropy's.
        z_loss: the factor of l^2, where l is the logarithm of the sum of exponentials of a row.
        soft_cap: logits become cap tanh(logits / cap); None caps nothing.

    Raises:
        ValueError: the class weights require a gradient.
    """
    check_constant(weight)
    attributes = (
        *(first, logits.shape[-1] if classes is None else classes),
        *(ignore_index, label_smoothing, z_loss, soft_cap),
    )
    loss, scales = _CrossEntropy.apply(logits, target, weight, statistics, attributes)
    return loss.view(target.shape), scales.view(target.shape)


def reduced(loss: Tensor, scales: Tensor, reduction: str) -> Tensor:
    """`reduction` of the rows' losses: themselves, their sum, or that over the sum of `scales`.

    Raises:
        ValueError: the reduction is unknown.
    """
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction {reduction!r} is not one of {', '.join(_REDUCTIONS)}")
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / scales.sum()


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of whole rows in fp32 (fp64 for fp64 logits), differentiable in logits.

    It is a scalar, or of target's shape for the reduction "none".

    Args:
        logits: (..., V), any strides.
        target: (...) int64, classes; as for `cross_entropy_merged`.
        weight: (V,), or None.
        ignore_index: the target of rows that do not count.
        label_smoothing: as F.cross_entropy's.
        z_loss: the factor of l^2, where l is the logarithm of the sum of exponentials of a row. The
            reduction treats it as part of a row's loss.
        soft_cap: logits become cap tanh(logits / cap); None caps nothing.
        reduction: "none", "sum", or "mean", which divides by the sum of the rows' class weights
            (NaN if all rows are ignored).

    Raises:
        ValueError: the reduction is unknown, a shape does not fit, or the weight requires a
            gradient.
    """
    statistics = _OPS.cross_entropy_local(
        logits.detach(), target, weight, 0, label_smoothing > 0, soft_cap
    )
    loss, scales = cross_entropy_merged(
        logits, target, statistics, weight, 0, None, ignore_index, label_smoothing, z_loss, soft_cap
    )
    return reduced(loss, scales, reduction)


register_pass(
    "cross_entropy_local(Tensor logits, Tensor target, Tensor? weight, int first, bool smooth, "
    "float? soft_cap) -> Tensor",
    _local,
    _local_fake,
)
register_pass(
    "cross_entropy_rows(Tensor statistics, Tensor target, Tensor? weight, int classes, int ignore_index, "
    "float smoothing, float z_loss) -> (Tensor, Tensor)",
    _rows,
    _rows_fake,
)
register_pass(
    "cross_entropy_gradient(Tensor grad, Tensor logits, Tensor target, Tensor? weight, Tensor statistics, "
    "int first, int classes, int ignore_index, float smoothing, float z_loss, float? soft_cap) -> Tensor",
    _gradient,
    _gradient_fake,
)
register_composite("cross_entropy_merge(Tensor parts) -> Tensor", cross_entropy_merge)
_TAIL = "int ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, float? soft_cap=None"
register_composite(
    "cross_entropy_merged(Tensor logits, Tensor target, Tensor statistics, Tensor? weight=None, "
    f"int first=0, int? classes=None, {_TAIL}) -> (Tensor, Tensor)",
    cross_entropy_merged,
)
register_composite(
    f"cross_entropy(Tensor logits, Tensor target, Tensor? weight=None, {_TAIL}, "
    'str reduction="mean") -> Tensor',
    cross_entropy,
)
