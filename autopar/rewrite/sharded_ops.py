"""Ops that need communication inside when one of their dims is sharded.

Vocabulary parallelism after Megatron-LM (Shoeybi et al. 2019, section 3): neither the embedding table nor the logits are ever whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives import AxisGroup, axis_group


def randomly(op, axes: tuple[str, ...], *args, **kwargs):
    """Run a random op whose result is sharded over `axes`: its shards draw different numbers, ranks that hold the same shard equal ones.

    One number is taken from the global generator whatever the size of the shard, so that generators stay in step on all ranks, and with
    them what random ops on replicated values draw.
    """
    seed = int(torch.randint(2**48, ()))
    for axis in axes:
        group = axis_group(axis)
        seed = seed * group.size + group.index
    device = next(a.device for a in args if isinstance(a, Tensor))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return op(*args, **kwargs)


def with_local_groups(op, position: int, axis: str, *args):
    """An op over groups of channels whose groups are sharded over `axis`: argument `position`, the number of groups, becomes local."""
    return op(*args[:position], args[position] // axis_group(axis).size, *args[position + 1 :])


def vocab_parallel_embedding(weight: Tensor, indices: Tensor, axis: str, vocab: int, padding_idx: int = -1) -> Tensor:
    """Rows of a table whose rows are sharded over `axis`: a partial sum, zero where another rank owns the row.

    weight: (local vocab, hidden); indices: any shape, values in [0, vocab); result: (*indices.shape, hidden), Partial over `axis`.
    """
    group = axis_group(axis)
    start, length = shard_extent(vocab, group.size, group.index)
    owned = (indices >= start) & (indices < start + length)
    if length == 0:
        return weight.new_zeros((*indices.shape, weight.shape[1])) + weight.sum()
    if padding_idx >= 0:  # the padding row gets no gradient, as in torch.nn.functional.embedding
        rows = torch.where(owned, indices - start, 0)
        looked_up = torch.nn.functional.embedding(rows, weight)
        looked_up = torch.where((indices == padding_idx).unsqueeze(-1), looked_up.detach(), looked_up)
    else:
        looked_up = torch.nn.functional.embedding(torch.where(owned, indices - start, 0), weight)
    return torch.where(owned.unsqueeze(-1), looked_up, 0)


def vocab_parallel_cross_entropy(
    logits: Tensor, target: Tensor, axis: str, vocab: int, reduction: str = "sum", ignore_index: int = -100
) -> Tensor:
    """Cross-entropy of logits whose classes are sharded over `axis`; three all-reduces of one number a token, no gathered logits.

    logits: (tokens, local vocab); target: (tokens,) whole class indices; result: () for 'sum', (tokens,) for 'none', replicated.
    """
    return _VocabParallelCrossEntropy.apply(logits, target, axis_group(axis), vocab, reduction, ignore_index)


def _reduced(x: Tensor, group: AxisGroup, op: str) -> Tensor:
    if group.size == 1 or group.simulate:
        return x
    return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x.contiguous(), op, group.group_name))


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, target: Tensor, group: AxisGroup, vocab: int, reduction: str, ignore_index: int) -> Tensor:
        start, length = shard_extent(vocab, group.size, group.index)
        wide = logits.double() if logits.dtype == torch.float64 else logits.float()
        largest = wide.amax(-1) if length else wide.new_full(target.shape, -torch.inf)
        largest = _reduced(largest, group, "max")
        probabilities = (wide - largest.unsqueeze(-1)).exp()
        total = _reduced(probabilities.sum(-1), group, "sum")
        owned = (target >= start) & (target < start + length)
        rows = torch.where(owned, target - start, 0)
        picked = wide.gather(-1, rows.unsqueeze(-1)).squeeze(-1) if length else wide.new_zeros(target.shape)
        picked = _reduced(torch.where(owned, picked, 0), group, "sum")
        valid = target != ignore_index
        loss = torch.where(valid, total.log() + largest - picked, 0)
        probabilities = probabilities / total.unsqueeze(-1)
        ctx.save_for_backward(probabilities, rows, owned, valid)
        ctx.reduction, ctx.dtype, ctx.length = reduction, logits.dtype, length
        return (loss.sum() if reduction == "sum" else loss).to(logits.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        probabilities, rows, owned, valid = ctx.saved_tensors
        scale = torch.where(valid, grad.to(probabilities.dtype), 0)
        dlogits = probabilities * scale.unsqueeze(-1)
        if ctx.length:
            dlogits.scatter_add_(-1, rows.unsqueeze(-1), torch.where(owned, -scale, 0).unsqueeze(-1))
        return dlogits.to(ctx.dtype), None, None, None, None, None
