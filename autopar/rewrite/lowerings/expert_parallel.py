"""Expert parallelism: routed experts with tokens and experts sharded over one mesh axis.

Every rank holds some tokens and some experts. It sends each choice of its tokens, as a row, to the
rank of the expert, multiplies the rows that it receives, and sends them back (GShard, Lepikhin et
al. 2020, arXiv:2006.16668, section 3.2). Rows are not padded to a capacity, as in Gale et al. 2022,
arXiv:2211.15841. The number of rows depends on the routing: ranks exchange the counts first, and
the host reads them once.

    x --permute_rows--> rows by expert --exchange--> rows by sender --index_select--> rows by expert --expert_mlp--> ... and back

The gradient of an exchange is the reverse exchange. Every token reaches its experts, so the
gradients of experts are sums over the tokens of all ranks of the axis, and complete on their rank.
"""

from __future__ import annotations

from typing import Any

import torch
from autopar_kernels.expert_rows import combine_rows, permute_rows
from autopar_kernels.routed_experts import (
    expert_mlp,
    inverse_order,
    routed_experts,
    sort_by_expert,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.ranges import named

_c10d = torch.ops._c10d_functional


def expert_parallel(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    up: Tensor,
    up_bias: Tensor | None,
    down: Tensor,
    down_bias: Tensor | None,
    activation: str,
    transposed: bool,
    axis: str,
    experts: int,
    capacity_factor: float = 0.0,
) -> Tensor:
    """`routed_experts` for this rank's tokens, by the experts of all ranks of `axis`: (T, H) -> (T,
    H).

    x (T, H), index (T, K) and weights (T, K) are this rank's tokens, any number of them; `index`
    counts all `experts`. up, down and their biases hold this rank's experts, `shard_extent(experts,
    group size, coordinate)`, perhaps none. Shapes and `activation` are those of `routed_experts`.

    The result and the gradients of x and weights are this rank's rows of the unsharded ones.
    Gradients of the experts' tensors are complete. A capacity applies to the tokens of each rank
    separately: ceil(capacity_factor T K / experts) choices of an expert by one rank. Every rank of
    the axis must call this function, and all run backward if one does.
    """
    group = axis_group(axis)
    mlp = (up, up_bias, down, down_bias, activation, transposed)
    if group.size == 1:
        return routed_experts(x, index, weights, *mlp, capacity_factor=capacity_factor)
    if up.shape[0] != (local := shard_extent(experts, group.size, group.index)[1]):
        raise ValueError(
            f"expert_parallel over axis {axis!r} (rank {group.index} of {group.size}) expects {local} of {experts} experts and got "
            f"{up.shape[0]}"
        )
    order, _, ends = sort_by_expert(index, experts, capacity_factor)
    inverse = inverse_order(order)
    rows = permute_rows(x, order, inverse)
    if group.simulate:
        # as many rows arrive as leave: the mean
        send = receive = [rows.shape[0]] + [0] * (group.size - 1)
        counts = ends.new_zeros(group.size, local)
    else:
        leaving = torch.diff(ends, prepend=ends.new_zeros(1))
        counts, send, receive = _exchange_counts(leaving, local, group)
    arrived = _exchange(rows[: sum(send)], send, receive, group)
    back, ids, ends = sort_by_expert(_expert_of_rows(counts, arrived.shape[0]), local)
    mixed = expert_mlp(arrived.index_select(0, back), ids, ends, *mlp)
    returned = _exchange(mixed.index_select(0, inverse_order(back)), receive, send, group)
    missing = rows.shape[0] - returned.shape[0]  # choices of no expert, sorted last
    if missing:
        returned = torch.cat([returned, returned.new_zeros(missing, returned.shape[1])])
    return combine_rows(returned, order, inverse, weights)


def _exchange_counts(
    counts: Tensor, local: int, group: AxisGroup
) -> tuple[Tensor, list[int], list[int]]:
    """Exchange the numbers of rows among the p ranks of ep, given those of this rank for each
    expert (experts,).

    Returns the numbers of rows to receive by sender and local expert (p, local), those to send to
    each rank, and those to receive from each rank.
    """
    owned = [shard_extent(counts.shape[0], group.size, rank)[1] for rank in range(group.size)]
    coming = _all_to_all(counts, owned, [local] * group.size, group).view(group.size, local)
    send = torch.stack([part.sum() for part in counts.split(owned)])
    # the one synchronization with the host
    to_send, to_receive = torch.stack([send, coming.sum(1)]).tolist()
    return coming, to_send, to_receive


def _expert_of_rows(counts: Tensor, rows: int) -> Tensor:
    """(rows, 1): the local expert of each received row. Rows are sorted by sender and then by
    expert, with the numbers in `counts` (p, local). Rows beyond these, as in a simulated group,
    get no expert.
    """
    senders, local = counts.shape
    ends = counts.reshape(-1).cumsum(0)
    cell = torch.searchsorted(ends, torch.arange(rows, device=counts.device), right=True)
    return torch.where(cell < senders * local, cell % max(local, 1), local).unsqueeze(1)


def _exchange(rows: Tensor, send: list[int], receive: list[int], group: AxisGroup) -> Tensor:
    """The rows that all ranks send to this one (sum of receive, H), sorted by sender. `rows` (sum
    of send, H) are sorted by the rank that each goes to. Differentiable.
    """
    return _Exchange.apply(rows, send, receive, group)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: AxisGroup
    ) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return _all_to_all(rows, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grad, ctx.receive, ctx.send, ctx.group), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: AxisGroup) -> Tensor:
    """The slices of dim 0 that this rank receives, joined in the order of senders. It sends
    `send[r]` rows to rank r and receives `receive[r]`. In a simulated group: zeros of the right
    shape.
    """
    if group.simulate:
        return x.new_zeros(sum(receive), *x.shape[1:])
    with named("all_to_all over", group.name):
        sent = _c10d.all_to_all_single(x.contiguous(), receive, send, group.group_name)
        return _c10d.wait_tensor(sent)
