"""Ops that communicate internally when one of their dims is sharded.

Vocabulary parallelism follows Megatron-LM (Shoeybi et al. 2019, section 3): neither the embedding
table nor the logits are ever gathered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import autopar_kernels.losses  # noqa: F401 (registers ops)
import torch
from autopar_kernels.linear_losses import CHUNK
from torch import Tensor

from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.ranges import named

_c10d = torch.ops._c10d_functional
_kernels = torch.ops.autopar


def in_training(batch: Tensor, running: Tensor) -> Tensor:
    """The first operand, the batch's statistic, which training uses. `evaluation_copy` replaces
    this call by the second, the running statistic.
    """
    return batch


def own_key_heads(x: Tensor, axis: str, heads: int, key_heads: int) -> Tensor:
    """The key (or value) heads that this rank's query heads read: one for each query head, or one
    for each group of them.

    x is (b, key_heads, t, d), whole over `axis`, which shards `heads` query heads. The result is
    (b, n, t, d), where n divides the number of local query heads. Query head i reads head i //
    (local heads / n).
    """
    group = axis_group(axis)
    start, length = shard_extent(heads, group.size, group.index)
    each = heads // key_heads
    whole_groups = start % each == 0 and length % each == 0
    if length and (
        whole_groups or (each % length == 0 and start // each == (start + length - 1) // each)
    ):
        return x.narrow(1, start // each, max(length // each, 1))
    return x.index_select(1, torch.arange(start, start + length, device=x.device) // each)


def vocab_parallel_embedding(
    weight: Tensor, indices: Tensor, axis: str, vocab: int, padding_idx: int = -1
) -> Tensor:
    """An embedding look-up in a table whose rows are sharded over `axis`. The result is a partial
    sum: zero where another rank has the row.

    weight is (local vocab, hidden); indices have any shape and values in [0, vocab). The result is
    (*indices.shape, hidden), Partial over `axis`. Row `padding_idx` gets no gradient (-1: every row
    gets one).
    """
    group = axis_group(axis)
    start, length = shard_extent(vocab, group.size, group.index)
    owned = (indices >= start) & (indices < start + length)
    if length == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    looked_up = torch.nn.functional.embedding(torch.where(owned, indices - start, 0), weight)
    if padding_idx >= 0:  # the padding row gets no gradient, as in torch.nn.functional.embedding
        padding = (indices == padding_idx).unsqueeze(-1)
        looked_up = torch.where(padding, looked_up.detach(), looked_up)
    return torch.where(owned.unsqueeze(-1), looked_up, 0)


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    axis: str,
    vocab: int,
    reduction: str = "sum",
    ignore_index: int = -100,
) -> Tensor:
    """Cross-entropy of logits whose classes are sharded over `axis`. It needs three all-reduces of
    one number per token, and no gathered logits.

    logits are (tokens, local vocab); target is (tokens,) with whole class indices. Targets of
    `ignore_index` have loss 0. The result is () for 'sum' or (tokens,) for 'none', replicated.
    """
    return _VocabParallelCrossEntropy.apply(
        logits, target, axis_group(axis), vocab, reduction, ignore_index
    )


def vocab_parallel_statistics(
    logits: Tensor,
    target: Tensor,
    axis: str,
    vocab: int,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: str = "sum",
) -> Tensor:
    """`autopar::cross_entropy` of logits whose classes are sharded over `axis`, with the options of
    that op. It needs one all-gather of three numbers per token (four with smoothing). Nothing of
    the logits' size is kept besides them.

    logits are (..., local vocab); target is (...) with whole class indices; weight is (vocab,). The
    result is () for 'sum' or (...) for 'none', replicated.
    """
    smooth = label_smoothing > 0

    def own_of(first: int) -> Tensor:
        rows = logits.detach()
        return _kernels.cross_entropy_local(rows, target, weight, first, smooth, soft_cap)

    start, merged = _merged_statistics(logits, target, axis, vocab, smooth, own_of)
    loss, _ = _kernels.cross_entropy_merged(
        logits,
        target,
        merged,
        weight,
        first=start,
        classes=vocab,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
    )
    return loss.sum() if reduction == "sum" else loss


def vocab_parallel_linear_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    axis: str,
    vocab: int,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    chunk: int = CHUNK,
    reduction: str = "sum",
) -> Tensor:
    """`autopar::linear_cross_entropy` with a head whose classes are sharded over `axis`, with the
    options of that op. It needs one all-gather of three numbers per token (four with smoothing).
    The logits of `chunk` tokens exist at a time.

    hidden is (..., hidden); weight is (local vocab, hidden); target is (...) with whole class
    indices; class_weight is (vocab,). The result is () for 'sum' or (...) for 'none', replicated.
    The gradient of hidden is Partial over `axis`.
    """
    smooth = label_smoothing > 0

    def own_of(first: int) -> Tensor:
        return _kernels.linear_cross_entropy_local(
            hidden.detach(), weight.detach(), target, class_weight, first, smooth, soft_cap, chunk
        )

    start, merged = _merged_statistics(hidden, target, axis, vocab, smooth, own_of)
    loss, _ = _kernels.linear_cross_entropy_merged(
        hidden,
        weight,
        target,
        merged,
        class_weight,
        first=start,
        classes=vocab,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        soft_cap=soft_cap,
        chunk=chunk,
    )
    return loss.sum() if reduction == "sum" else loss


def _merged_statistics(
    like: Tensor,
    target: Tensor,
    axis: str,
    vocab: int,
    smooth: bool,
    own_of: Callable[[int], Tensor],
) -> tuple[int, Tensor]:
    """(the first class of this rank, the statistics of each token merged over all ranks of `axis`).
    `own_of` makes those of this rank's classes from the first of them. `like` has the device.
    """
    group = axis_group(axis)
    start, length = shard_extent(vocab, group.size, group.index)
    own = own_of(start) if length else _statistics_of_none(like, target, start, smooth)
    return start, _kernels.cross_entropy_merge(_gathered(own, group))


def _statistics_of_none(like: Tensor, target: Tensor, start: int, smooth: bool) -> Tensor:
    """The statistics of a shard without a class, as of one whose logit is -inf, with the device of
    `like`: (3, tokens), (4, tokens) if `smooth`. `start` is beyond all classes.
    """
    source = like.new_full((*target.shape, 1), -torch.inf)
    own: Tensor = _kernels.cross_entropy_local(source, target, None, start, False, None)
    return torch.cat([own, own.new_zeros((1, own.shape[1]))]) if smooth else own


def _gathered(x: Tensor, group: AxisGroup) -> Tensor:
    """The tensors `x` of all ranks of the group, stacked in rank order: (ranks, *x.shape). In a
    simulated group, copies of this rank's.
    """
    if group.size == 1 or group.simulate:
        return x.unsqueeze(0).expand(group.size, *x.shape)
    with named("all_gather over", group.name):
        joined = _c10d.all_gather_into_tensor(x.contiguous(), group.size, group.group_name)
        return _c10d.wait_tensor(joined).view(group.size, *x.shape)


def _reduced(x: Tensor, group: AxisGroup, op: str) -> Tensor:
    if group.size == 1 or group.simulate:
        return x
    with named("all_reduce over", group.name):
        return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), op, group.group_name))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: AxisGroup,
        vocab: int,
        reduction: str,
        ignore_index: int,
    ) -> Tensor:
        start, length = shard_extent(vocab, group.size, group.index)
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        largest = wide.amax(-1) if length else wide.new_full(target.shape, -torch.inf)
        largest = _reduced(largest, group, "max")
        probabilities = (wide - largest.unsqueeze(-1)).exp()
        total = _reduced(probabilities.sum(-1), group, "sum")
        owned = (target >= start) & (target < start + length)
        rows = torch.where(owned, target - start, 0)
        picked = wide.new_zeros(target.shape)
        if length:
            picked = wide.gather(-1, rows.unsqueeze(-1)).squeeze(-1)
        picked = _reduced(torch.where(owned, picked, 0), group, "sum")
        valid = target != ignore_index
        loss = torch.where(valid, total.log() + largest - picked, 0)
        probabilities = probabilities / total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, rows, owned, valid)
        ctx.reduction, ctx.dtype, ctx.length = reduction, logits.dtype, length
        return (loss.sum() if reduction == "sum" else loss).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probabilities, rows, owned, valid = ctx.saved_tensors
        scale = torch.where(valid, grad.to(probabilities.dtype), 0)
        dlogits = probabilities * scale.unsqueeze(-1)
        if ctx.length:
            at_target = torch.where(owned, -scale, 0).unsqueeze(-1)
            dlogits.scatter_add_(-1, rows.unsqueeze(-1), at_target)
        return dlogits.to(ctx.dtype), None, None, None, None, None
