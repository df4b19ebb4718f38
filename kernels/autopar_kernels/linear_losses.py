"""A head's product and cross-entropy in chunks of tokens, also of a sharded vocabulary: `autopar::linear_cross_entropy`.

The logits hidden weight^T of `chunk` tokens exist at a time, never those of all.  As in `losses`, ranks exchange the statistics once:

    statistics = linear_cross_entropy_local(hidden, weight, ...)
    merged     = cross_entropy_merge(all ranks' statistics)
    loss       = linear_cross_entropy_merged(hidden, weight, target, merged, ...)

Backward computes each chunk's logits again (four products in all, where whole logits take three), and accumulates the weight's gradient
in fp32.  The gradient of hidden is a partial sum over the shards.  Asked for one of the two gradients at a time, as zero bubble asks, it
computes the logits a third time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar_kernels.launching import rows_of
from autopar_kernels.losses import check_constant, reduced
from autopar_kernels.registration import (
    absent,
    accumulation_dtype,
    once_differentiable,
    present,
    register_composite,
    register_pass,
)

_OPS = torch.ops.autopar
CHUNK = 2048
"""How many tokens' logits exist at a time, unless a call says otherwise."""


def _local(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    smooth: bool,
    soft_cap: float | None,
    chunk: int,
) -> Tensor:
    """The statistics (3, R) of a shard's logits hidden weight^T, (4, R) if `smooth`, as
    `autopar::cross_entropy_local` gives them. `chunk` rows' logits exist at a time. The other
    arguments are those of `linear_cross_entropy_merged`.
    """
    out = _local_fake(hidden, weight, target, class_weight, first, smooth, soft_cap, chunk)
    rows, flat = rows_of(hidden), target.reshape(-1)
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        out[:, part] = _OPS.cross_entropy_local(
            rows[part] @ weight.t(), flat[part], class_weight, first, smooth, soft_cap
        )
    return out


def _local_fake(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    first: int,
    smooth: bool,
    soft_cap: float | None,
    chunk: int,
) -> Tensor:
    if target.shape != hidden.shape[:-1] or hidden.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(hidden.shape)}, {tuple(weight.shape)}, {tuple(target.shape)}"
        raise ValueError(f"hidden, weight and target of shapes {shapes}")
    wide = accumulation_dtype(hidden, class_weight)
    return hidden.new_empty((4 if smooth else 3, target.numel()), dtype=wide)


def _outer(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    """left^T right, computed and returned in the dtype `wide`."""
    if left.is_cuda and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.t(), right, out_dtype=wide)
    return left.to(wide).t() @ right.to(wide)


def _gradient(
    grad: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None,
    statistics: Tensor,
    first: int,
    classes: int,
    ignore_index: int,
    smoothing: float,
    z_loss: float,
    soft_cap: float | None,
    chunk: int,
    needs: list[bool],
) -> tuple[Tensor, Tensor]:
    """(gradient of hidden, gradient of weight), each an empty tensor unless its entry of `needs` is
    True. `grad` (R,) is the gradient of each row's loss. The other arguments are those of
    `linear_cross_entropy_merged`.
    """
    dhidden = hidden.new_empty(hidden.shape) if needs[0] else absent(hidden)
    wide = statistics.dtype
    total: Tensor | None = None
    rows, flat = rows_of(hidden), target.reshape(-1)
    for start in range(0, rows.shape[0], chunk):
        part = slice(start, start + chunk)
        dlogits = _OPS.cross_entropy_gradient(
            *(grad[part], rows[part] @ weight.t(), flat[part], class_weight),
            *(statistics[:, part].contiguous(), first, classes),
            *(ignore_index, smoothing, z_loss, soft_cap),
        )
        if needs[0]:
            torch.mm(dlogits, weight, out=dhidden.view(rows.shape)[part])
        if needs[1] and total is None:
            total = _outer(dlogits, rows[part], wide)
        elif total is not None:
            total += _outer(dlogits, rows[part], wide)
        del dlogits  # before the next chunk's logits
    if not needs[1]:
        return dhidden, absent(weight)
    return dhidden, torch.zeros_like(weight) if total is None else total.to(weight.dtype)


def _gradient_fake(
    grad: Tensor, hidden: Tensor, weight: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    needs = rest[-1]
    return (
        hidden.new_empty(hidden.shape) if needs[0] else absent(hidden),
        weight.new_empty(weight.shape) if needs[1] else absent(weight),
    )


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss from merged statistics, as an autograd function: (the loss of each row, the weight
    of its class).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        class_weight: Tensor | None,
        statistics: Tensor,
        attributes: tuple[int, int, int, float, float, float | None],
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        loss, scales = _OPS.cross_entropy_rows(statistics, target, class_weight, *attributes[1:5])
        ctx.save_for_backward(hidden, weight, target, class_weight, statistics)
        ctx.attributes, ctx.chunk = attributes, chunk
        ctx.mark_non_differentiable(scales)
        return loss, scales

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[:2])
        dhidden, dweight = _OPS.linear_cross_entropy_gradient(
            grad, *ctx.saved_tensors, *ctx.attributes, ctx.chunk, needs
        )
        return present(dhidden, needs[0]), present(dweight, needs[1]), *[None] * 5


def linear_cross_entropy_merged(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    statistics: Tensor,
    class_weight: Tensor | None = None,
    first: int = 0,
    classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """(the loss of each row, the weight of its class), each of target's shape and 0 for ignored
    rows.

    The loss is differentiable in hidden and weight. The gradient of hidden is that of this shard
    alone: a partial sum.

    Args:
        hidden: (..., H), any strides.
        weight: (V', H), this shard's rows of the head.
        target: (...) int64, classes of all shards.
        statistics: (3 or 4, R), merged over all shards; constant.
        class_weight: (V,) of all classes, or None.
        first: the class of the shard's first row.
        classes: V, the number of classes over all shards; V' by default.
        ignore_index: the target of rows that do not count.
        label_smoothing: as F.cross_entropy's.
        z_loss: the factor of l^2, where l is the logarithm of the sum of exponentials of a row.
        soft_cap: logits become cap tanh(logits / cap); None caps nothing.
        chunk: how many tokens' logits exist at a time.

    Raises:
        ValueError: the class weights require a gradient.
    """
    check_constant(class_weight)
    attributes = (
        *(first, weight.shape[0] if classes is None else classes),
        *(ignore_index, label_smoothing, z_loss, soft_cap),
    )
    loss, scales = _LinearCrossEntropy.apply(
        hidden, weight, target, class_weight, statistics, attributes, chunk
    )
    return loss.view(target.shape), scales.view(target.shape)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk: int = CHUNK,
    reduction: str = "mean",
) -> Tensor:
    """The cross-entropy of the logits hidden weight^T in fp32 (fp64 for fp64 hidden states),
    differentiable in hidden and weight.

    It is a scalar, or of target's shape for the reduction "none".

    Args:
        hidden: (..., H), any strides.
        weight: (V, H), the head of all classes.
        target: (...) int64.
        class_weight: (V,), or None.
        ignore_index: the target of rows that do not count.
        label_smoothing: as F.cross_entropy's.
        z_loss: as `linear_cross_entropy_merged`'s.
        soft_cap: logits become cap tanh(logits / cap); None caps nothing.
        chunk: how many tokens' logits exist at a time.
        reduction: as `autopar::cross_entropy`'s.

    Raises:
        ValueError: the reduction is unknown, chunk is less than 1, a shape does not fit, or
            class_weight requires a gradient.
    """
    if chunk < 1:
        raise ValueError(f"chunk={chunk} tokens; use 1 or more")
    statistics = _OPS.linear_cross_entropy_local(
        *(hidden.detach(), weight.detach(), target, class_weight),
        *(0, label_smoothing > 0, soft_cap, chunk),
    )
    loss, scales = linear_cross_entropy_merged(
        *(hidden, weight, target, statistics, class_weight, 0, None),
        *(ignore_index, label_smoothing, z_loss, soft_cap, chunk),
    )
    return reduced(loss, scales, reduction)


_HEAD = "Tensor hidden, Tensor weight, Tensor target"
register_pass(
    f"linear_cross_entropy_local({_HEAD}, Tensor? class_weight, int first, bool smooth, "
    "float? soft_cap, int chunk) -> Tensor",
    _local,
    _local_fake,
)
register_pass(
    f"linear_cross_entropy_gradient(Tensor grad, {_HEAD}, Tensor? class_weight, Tensor statistics, "
    "int first, int classes, int ignore_index, float smoothing, float z_loss, float? soft_cap, "
    "int chunk, bool[] needs) -> (Tensor, Tensor)",
    _gradient,
    _gradient_fake,
)
register_composite(
    f"linear_cross_entropy_merged({_HEAD}, Tensor statistics, Tensor? class_weight=None, "
    "int first=0, int? classes=None, int ignore_index=-100, float label_smoothing=0.0, "
    f"float z_loss=0.0, float? soft_cap=None, int chunk={CHUNK}) -> (Tensor, Tensor)",
    linear_cross_entropy_merged,
)
register_composite(
    f"linear_cross_entropy({_HEAD}, Tensor? class_weight=None, int ignore_index=-100, "
    "float label_smoothing=0.0, float z_loss=0.0, float? soft_cap=None, "
    f'int chunk={CHUNK}, str reduction="mean") -> Tensor',
    linear_cross_entropy,
)
