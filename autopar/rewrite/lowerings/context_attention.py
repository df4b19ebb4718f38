"""Attention whose sequence is sharded over a mesh axis (context parallelism), by one of three
methods.

    method    keys and values are      communication here                         source
    gather    whole                    none (earlier nodes gather)                Llama 3 (Dubey et al. 2024, arXiv:2407.21783, 3.3.2)
    ring      sharded like the query   p - 1 hops forward, 2 p - 1 backward       Liu et al. 2023, arXiv:2310.01889
    ulysses   sharded like the query   4 all-to-alls each way                     Jacobs et al. 2023, arXiv:2309.14509

A rank holds the positions `shard_extent` of the sequence or, with zigzag, chunks i and 2p-1-i of
2p. Under a causal mask zigzag gives every rank equal work (Llama 3, as above).

Shape letters: b batch, hq query heads, hkv key heads (hkv divides hq), s queries, t keys, d head
dim, dv value dim, p ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.nn.functional import scaled_dot_product_attention

from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.collectives.transitions import all_to_all
from autopar.rewrite.lowerings.attention_blocks import (
    OnlineSoftmax,
    Operands,
    block_backward,
    block_forward,
    sums_dtype,
)

METHODS = ("gather", "ring", "ulysses")


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: str,
    method: str,
    seq: int,
    kv_seq: int,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    zigzag: bool = False,
) -> Tensor:
    """Attention of this rank's queries over the whole sequence of `kv_seq` keys: (b, hq, s, dv),
    sharded like the query.

    Query head i reads key head i // (hq / hkv). Gradients have the placements of the inputs; those
    of whole keys and values are partial over the axis. The gradient of an additive mask is the
    contribution of this rank's queries (gather) or heads (ulysses); ring has none.

    Args:
        query: (b, hq, s, d), this rank's shard of `seq` positions over `axis`.
        key: (b, hkv, t, d), whole (gather) or sharded like the query.
        value: (b, hkv, t, dv), like the key.
        axis: the mesh axis that shards the sequence.
        method: 'gather', 'ring' or 'ulysses'.
        seq: number of query positions on all ranks.
        kv_seq: number of keys on all ranks.
        mask: boolean (True: attend) or additive, up to 4 dims that broadcast to (b, hq, rows,
            kv_seq). Columns are whole and in natural order. Rows are this rank's (gather, ring),
            whole (ulysses), or 1.
        is_causal: whether a causal mask applies, in addition to `mask`.
        scale: factor on the scores; None divides by the square root of d.
        zigzag: whether the sequence is sharded in zigzag order.

    Raises:
        ValueError: a shape or option does not fit.
    """
    group = axis_group(axis)
    operands = Operands(query, key, value, mask, is_causal, scale)
    _check(operands, group, method, seq, kv_seq, zigzag)
    rows = _spans(seq, group, group.index, zigzag)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if is_causal:
            mask = _and_causal(mask, ((0, seq),) if method == "ulysses" else rows)
        operands = operands._replace(mask=mask)
    if query.shape[1] == 0:
        return _no_heads(operands)
    if group.size == 1 or (method == "gather" and not (is_causal and mask is None)):
        return _whole_attention(operands)
    if method == "ulysses":
        return _ulysses(operands, axis, group, seq, kv_seq, zigzag)
    if method == "gather":
        step = _Step(kv_seq, ((0, kv_seq),), _causal_blocks(rows))
        return _BlockAttention.apply(query, key, value, None, _Schedule(None, (step,)), scale)
    steps = []
    for hop in range(group.size):
        source = (group.index - hop) % group.size
        columns = _spans(kv_seq, group, source, zigzag)
        keys = sum(length for _, length in columns)
        blocks = _ring_blocks(query.shape[2], keys, group.index, source, is_causal, zigzag)
        steps.append(_Step(keys, columns, blocks))
    return _BlockAttention.apply(query, key, value, mask, _Schedule(group, tuple(steps)), scale)


# --------------------------------------------------------------------------------------------------------------------- positions

Spans = tuple[tuple[int, int], ...]
"""(start, length) of runs of positions in natural order."""


def _spans(size: int, group: AxisGroup, index: int, zigzag: bool) -> Spans:
    """(start, length) of the runs of positions that rank `index` of the group holds, of `size` in
    total, ascending: one run, or two with zigzag.
    """
    if not zigzag:
        return (shard_extent(size, group.size, index),)
    chunk = size // (2 * group.size)
    return ((index * chunk, chunk), ((2 * group.size - 1 - index) * chunk, chunk))


def _check(
    operands: Operands, group: AxisGroup, method: str, seq: int, kv_seq: int, zigzag: bool
) -> None:
    query, key, value, mask, is_causal, _ = operands
    where = f"context_attention by {method!r} over axis {group.name!r} (rank {group.index} of {group.size}, zigzag={zigzag})"
    if method not in METHODS:
        raise ValueError(f"{where}: the methods are {', '.join(METHODS)}")
    if is_causal and seq != kv_seq:
        raise ValueError(
            f"{where}: causal attention needs as many keys as queries; there are {seq} queries and {kv_seq} keys"
        )
    if zigzag and (seq % (2 * group.size) or kv_seq % (2 * group.size)):
        raise ValueError(
            f"{where}: zigzag cuts into {2 * group.size} equal chunks; there are {seq} queries and {kv_seq} keys"
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads if kv_heads else heads:
        raise ValueError(f"{where}: {kv_heads} key heads do not divide {heads} query heads")
    if method == "ulysses" and heads % group.size:
        raise ValueError(
            f"{where}: {group.size} ranks do not divide {heads} query heads; ring and gather need not divide heads"
        )
    rows, columns = (
        sum(n for _, n in _spans(size, group, group.index, zigzag)) for size in (seq, kv_seq)
    )
    keys = kv_seq if method == "gather" else columns
    expected = (
        (heads, rows, query.shape[3]),
        (kv_heads, keys, query.shape[3]),
        (kv_heads, keys, value.shape[3]),
    )
    if tuple(tuple(x.shape[1:]) for x in (query, key, value)) != expected:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
        raise ValueError(
            f"{where}: query, key, value of shapes {shapes} do not have {rows} of {seq} queries and {keys} of {kv_seq} keys"
        )
    if mask is None:
        return
    rows = seq if method == "ulysses" else rows
    fits = 2 <= mask.dim() <= 4 and mask.shape[-1] == kv_seq and mask.shape[-2] in (rows, 1)
    if not fits or (mask.dim() > 2 and mask.shape[-3] not in (heads, 1)):
        raise ValueError(
            f"{where}: a mask of shape {tuple(mask.shape)} does not broadcast to (.., {heads}, {rows}, {kv_seq})"
        )
    if method == "ring" and group.size > 1 and mask.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{where}: the ring gives no gradient to a mask; use gather or ulysses")


def _and_causal(mask: Tensor, rows: Spans) -> Tensor:
    """The mask (.., s or 1, kv_seq) combined with the causal mask for queries at the positions
    `rows`: (.., s, kv_seq), boolean or additive as it was.
    """
    positions = torch.cat(
        [torch.arange(start, start + length, device=mask.device) for start, length in rows]
    )
    past = positions.unsqueeze(1) >= torch.arange(mask.shape[3], device=mask.device)
    return mask & past if mask.dtype == torch.bool else torch.where(past, mask, -torch.inf)


def _whole_attention(operands: Operands) -> Tensor:
    query, key, value, mask, is_causal, scale = operands
    out = scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal and mask is None,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if mask is not None and mask.requires_grad and 0 in out.shape:
        # with no queries torch leaves the mask out of the graph; its gradient is zero, not absent
        out = out + mask.sum()
    return out


def _no_heads(operands: Operands) -> Tensor:
    """An empty result (b, 0, s, dv), for a rank to which tensor parallelism leaves no query head.
    No rank of the context group has one then, so nothing is sent. Gradients are zero instead of
    missing.
    """
    query, value = operands.query, operands.value
    leaves = [x.sum() for x in operands[:4] if x is not None and x.requires_grad]
    out = query.new_zeros((*query.shape[:3], value.shape[3]))
    return out + sum(leaves) if leaves else out


# ----------------------------------------------------------------------------------------------------------------------- ulysses


def _ulysses(
    operands: Operands, axis: str, group: AxisGroup, seq: int, kv_seq: int, zigzag: bool
) -> Tensor:
    """This rank's part of attention by the ulysses method: all-to-all from sequence shards to head
    shards, attention over the whole sequence, and back to sequence shards. Arguments are those of
    `context_attention`, and the group of `axis`.
    """
    query, key, value, mask, *_ = operands
    heads, kv_heads, ranks = query.shape[1], key.shape[1], group.size
    # the fewest that give every rank equally many; divides hq / hkv, since p divides hq
    copies = ranks // gcd(kv_heads, ranks)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    if mask is not None and mask.shape[1] > 1:
        mask = mask.narrow(1, *shard_extent(heads, ranks, group.index))
    # chunks as they arrive
    order = [chunk for rank in range(ranks) for chunk in (rank, 2 * ranks - 1 - rank)]
    natural = [order.index(chunk) for chunk in range(2 * ranks)]

    def moved(x: Tensor, src_dim: int, dst_dim: int, src_size: int, dst_size: int) -> Tensor:
        found = all_to_all(x, axis, src_dim, dst_dim, src_size, dst_size)
        assert isinstance(found, Tensor)  # not started to be waited for
        return found

    def to_heads(x: Tensor, size: int) -> Tensor:
        whole = moved(x, 2, 1, size, x.shape[1])
        return _reordered(whole, natural) if zigzag else whole

    query, key, value = to_heads(query, seq), to_heads(key, kv_seq), to_heads(value, kv_seq)
    out = _whole_attention(operands._replace(query=query, key=key, value=value, mask=mask))
    return moved(_reordered(out, order) if zigzag else out, 1, 2, heads, seq)


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """x cut into len(order) chunks along its sequence dim (2), which are joined in the order
    `order`.
    """
    chunks = x.chunk(len(order), 2)
    return torch.cat([chunks[chunk] for chunk in order], 2)


# --------------------------------------------------------------------------------------------------------------- gather and ring


class _Block(NamedTuple):
    """A description of the work of one kernel: which of the rank's queries (rows), over which of
    the present keys (columns), and whether causally.
    """

    rows: slice
    columns: slice
    is_causal: bool


class _Step(NamedTuple):
    """A description of one step: how many keys are present, their positions in the sequence
    (`columns`), and the blocks to compute over them.
    """

    keys: int
    columns: Spans
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _Schedule:
    """The steps of attention on this rank: one for each shard of the keys, in order of arrival.
    `ring` is the group round which keys move; None if all keys are present.
    """

    ring: AxisGroup | None
    steps: tuple[_Step, ...]


def _causal_blocks(rows: Spans) -> tuple[_Block, ...]:
    """The blocks (pieces of work) for queries at positions `rows` over whole keys under a causal
    mask. For each run of queries: all keys before it, and the triangle of the run itself.
    """
    blocks, done = [], 0
    for start, length in rows:
        here = slice(done, done + length)
        blocks.append(_Block(here, slice(0, start), False))
        blocks.append(_Block(here, slice(start, start + length), True))
        done += length
    return _not_empty(blocks)


def _ring_blocks(
    queries: int, keys: int, index: int, source: int, is_causal: bool, zigzag: bool
) -> tuple[_Block, ...]:
    """The blocks (pieces of work) for this rank's `queries`, at `index` of the ring, over the
    `keys` of rank `source`. What a causal mask hides completely is left out, so there is one block
    or none.

    In zigzag order rank i has chunks i and 2p-1-i. For an earlier rank, its first chunk of keys
    precedes both chunks of queries, and its second follows both. For a later rank, both chunks of
    keys lie between the two chunks of queries.
    """
    rows, columns = slice(0, queries), slice(0, keys)
    if is_causal and source != index:
        if source > index and not zigzag:
            return ()
        if zigzag and source < index:
            columns = slice(0, keys // 2)
        elif zigzag:
            rows = slice(queries // 2, queries)
    return _not_empty([_Block(rows, columns, is_causal and source == index)])


def _not_empty(blocks: list[_Block]) -> tuple[_Block, ...]:
    return tuple(b for b in blocks if all(part.stop > part.start for part in (b.rows, b.columns)))


class _BlockAttention(torch.autograd.Function):
    """An autograd function: attention block by block, over keys that are present or arrive in a
    ring. It keeps only its inputs, the result and the log-sum-exp.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        schedule: _Schedule,
        scale: float | None,
    ) -> Tensor:
        softmax = OnlineSoftmax(query, value.shape[3])
        for step, keys, values in _visiting(schedule, key, value):
            for block in step.blocks:
                whole = Operands(query, keys, values, mask, block.is_causal, scale)
                softmax.add(block.rows, *block_forward(_part(whole, block, step)))
        out, lse = softmax.result()
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.schedule, ctx.scale = schedule, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring, steps = ctx.schedule.ring, ctx.schedule.steps
        wide = sums_dtype(query.dtype)
        grad = grad.contiguous()
        dquery = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        arriving: Tensor | None = None
        works: list[dist.Work] = []
        for number, (step, keys, values) in enumerate(_visiting(ctx.schedule, key, value)):
            gradients = keys.new_zeros(_packed_size(key, value, step.keys), dtype=wide)
            dkeys, dvalues = _unpack(gradients, key, value, step.keys)
            for block in step.blocks:
                rows, columns = block.rows, block.columns
                whole = Operands(query, keys, values, mask, block.is_causal, ctx.scale)
                merged = (grad[:, :, rows], out[:, :, rows], lse[:, :, rows])
                found = block_backward(_part(whole, block, step), *merged)
                dquery[:, :, rows] += found[0]
                dkeys[:, :, columns] += found[1]
                dvalues[:, :, columns] += found[2]
            if ring is None:
                break
            # The gradients of a shard follow it round the ring, one step behind.  They are sent on when this rank has added its part,
            # and are under way while the next rank computes its own.  After the last step they are back where the shard came from.
            _wait(works)
            if arriving is not None:
                gradients += arriving
            upcoming = steps[(number + 1) % len(steps)].keys
            sent, arriving = gradients, gradients.new_empty(_packed_size(key, value, upcoming))
            works = _exchange(ring, sent, arriving, tag=1)
        _wait(works)
        if arriving is not None:
            dkeys, dvalues = _unpack(arriving, key, value, steps[0].keys)
        found = dquery.to(query.dtype), dkeys.to(key.dtype), dvalues.to(value.dtype)
        return *found, None, None, None


def _part(whole: Operands, block: _Block, step: _Step) -> Operands:
    """The operands of one block of a step, cut out of those of the step. Of the mask (.., s or 1,
    kv_seq), which includes the causal mask, it takes the block's rows and the positions of its
    keys.
    """
    query, keys, values, mask, is_causal, _ = whole
    if mask is not None:
        mask = mask[:, :, block.rows] if mask.shape[2] > 1 else mask
        pieces = [mask.narrow(3, *span) for span in step.columns]
        mask = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 3))[..., block.columns]
    return whole._replace(
        query=query[:, :, block.rows],
        key=keys[:, :, block.columns],
        value=values[:, :, block.columns],
        mask=mask,
        is_causal=is_causal and mask is None,
    )


def _visiting(
    schedule: _Schedule, key: Tensor, value: Tensor
) -> Iterator[tuple[_Step, Tensor, Tensor]]:
    """Yields (step, keys, values) for each step of the schedule. While the caller computes, the
    keys and values move to the next rank of the ring, and those of the next step arrive.
    """
    steps, ring, keys, values, packed = schedule.steps, schedule.ring, key, value, None
    for number, step in enumerate(steps):
        if ring is None or number + 1 == len(steps):
            yield step, keys, values
            return
        if packed is None:
            packed = torch.cat([key.reshape(-1), value.reshape(-1)])
        incoming = packed.new_empty(_packed_size(key, value, steps[number + 1].keys))
        works = _exchange(ring, packed, incoming, tag=0)
        yield step, keys, values
        _wait(works)
        packed = incoming
        keys, values = _unpack(packed, key, value, steps[number + 1].keys)


def _packed_size(key: Tensor, value: Tensor, keys: int) -> int:
    """Number of elements in one message: `keys` keys and values of all heads and batch rows of
    `key` and `value`.
    """
    return key.shape[0] * key.shape[1] * keys * (key.shape[3] + value.shape[3])


def _unpack(packed: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    split = key.shape[0] * key.shape[1] * keys * key.shape[3]
    shapes = [(*x.shape[:2], keys, x.shape[3]) for x in (key, value)]
    return packed[:split].view(shapes[0]), packed[split:].view(shapes[1])


def _exchange(ring: AxisGroup, outgoing: Tensor, incoming: Tensor, tag: int) -> list[dist.Work]:
    """Start sending `outgoing` to the next rank and receiving into `incoming` from the previous
    one. Returns what to wait for: [] if nothing is sent or received.

    Keys and gradients use different tags, since both may be in transit at once. An empty shard is
    not sent, and its receiver does not wait. In a simulated group `incoming` becomes 0.
    """
    if ring.group_name is None or outgoing.is_meta or isinstance(outgoing, FakeTensor):
        incoming.zero_()
        return []
    process_group = _resolve_process_group(GroupName(ring.group_name))
    hops = ((dist.isend, outgoing, 1), (dist.irecv, incoming, -1))
    operations = [
        dist.P2POp(op, x, group=process_group, tag=tag, group_peer=(ring.index + hop) % ring.size)
        for op, x, hop in hops
        if x.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[dist.Work]) -> None:
    if works:
        with named("ring over cp"):
            for work in works:
                work.wait()
