"""Tensor and sequence parallelism as Megatron-LM has it, written by hand over torch.distributed.

Between products a layer has its part of the positions. Products gather the whole; forward keeps the
part, and backward gathers it again while it computes the gradient of the input (Korthikanti et al.,
MLSys 2023, section 4.2.2). While that gradient is reduced and scattered, the gradients of the
weights are computed. Embedding and head are those of `handwritten.tensor_parallel`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from autopar.models.common import rotate
from autopar.models.llama import LlamaBlock


def _stacked(x: Tensor) -> Tensor:
    """Parts of the positions (dim 1) of x, one for each rank, along dim 0."""
    return torch.cat(x.chunk(dist.get_world_size(), 1), 0).contiguous()


def _gather(part: Tensor) -> tuple[Tensor, dist.Work]:
    ranks, (rows, *rest) = dist.get_world_size(), part.shape
    received = part.new_empty(ranks * rows, *rest)
    return received, dist.all_gather_into_tensor(received, part.contiguous(), async_op=True)


def _gathered(received: Tensor, work: dist.Work) -> Tensor:
    work.wait()
    return torch.cat(received.chunk(dist.get_world_size(), 0), 1)


def _scatter(x: Tensor) -> tuple[Tensor, dist.Work]:
    ranks, (rows, positions, *rest) = dist.get_world_size(), x.shape
    part = x.new_empty(rows, positions // ranks, *rest)
    return part, dist.reduce_scatter_tensor(part, _stacked(x), async_op=True)


class _Columns(torch.autograd.Function):
    """Products of a gathered value by several weights, each (out, in) with rows of this rank."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(part, *weights)
        whole = _gathered(*_gather(part))
        return tuple(whole @ weight.t() for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        part, *weights = ctx.saved_tensors
        arriving = _gather(part)
        first, *others = (grad @ weight for grad, weight in zip(grads, weights, strict=True))
        gradient, sent = _scatter(sum(others, first))
        whole = _gathered(*arriving).flatten(0, 1)
        of_weights = [grad.flatten(0, 1).t() @ whole for grad in grads]
        sent.wait()
        return gradient, *of_weights


class _Rows(torch.autograd.Function):
    """A product by a weight (out, in) with columns of this rank, summed and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        part, sent = _scatter(x @ weight.t())
        sent.wait()
        return part

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        whole = _gathered(*_gather(grad))
        return whole @ weight, whole.flatten(0, 1).t() @ x.flatten(0, 1)


class MegatronBlock(nn.Module):
    """A `LlamaBlock` of which this rank has its heads and its part of the feed-forward width. It
    takes and returns this rank's part of the positions.
    """

    def __init__(self, block: LlamaBlock) -> None:
        super().__init__()
        rank, ranks, attention = dist.get_rank(), dist.get_world_size(), block.attention

        def of_rank(weight: Tensor, dim: int) -> nn.Parameter:
            return nn.Parameter(weight.detach().chunk(ranks, dim)[rank].clone())

        self.attention_norm, self.mlp_norm = block.attention_norm, block.mlp_norm
        self.head_dim = attention.head_dim
        self.q, self.k, self.v = (
            of_rank(one.weight, 0) for one in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        self.o = of_rank(attention.o_proj.weight, 1)
        self.gate, self.up = (
            of_rank(block.mlp.get_parameter(f"{n}_proj.weight"), 0) for n in ("gate", "up")
        )
        self.down = of_rank(block.mlp.get_parameter("down_proj.weight"), 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """x (b, s / ranks, h) -> the same shape. cos and sin are rotary tables (s, d)."""
        found = _Columns.apply(self.attention_norm(x), self.q, self.k, self.v)
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in found)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=True
        )
        x = x + _Rows.apply(mixed.transpose(1, 2).flatten(2), self.o)
        gate, up = _Columns.apply(self.mlp_norm(x), self.gate, self.up)
        return x + _Rows.apply(F.silu(gate) * up, self.down)


def sum_norms(model: nn.Module) -> None:
    """Sum the gradients of the norms in `MegatronBlock`s over ranks, in place: each rank has those
    of its positions.
    """
    norms = [
        norm.weight
        for block in model.modules()
        if isinstance(block, MegatronBlock)
        for norm in (block.attention_norm, block.mlp_norm)
    ]
    flat = torch.cat([weight.grad for weight in norms])
    dist.all_reduce(flat)
    for weight, total in zip(norms, flat.split([w.numel() for w in norms]), strict=True):
        weight.grad.copy_(total)
