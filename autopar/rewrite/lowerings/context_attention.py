"""Attention whose sequence is sharded over a mesh axis (context parallelism), by one of three methods.

    method    keys and values come     communication here                         source
    gather    whole                    none (nodes before it gather)              Llama 3 (Dubey et al. 2024, arXiv:2407.21783, 3.3.2)
    ring      sharded like the query   p - 1 hops forward, 2 p - 1 backward       Liu et al. 2023, arXiv:2310.01889
    ulysses   sharded like the query   4 all-to-alls each way                     Jacobs et al. 2023, arXiv:2309.14509

A rank holds the positions `shard_extent` of the sequence or, in zigzag, chunks i and 2p-1-i of 2p: under a causal mask, every rank then
has equal work (Llama 3, as above).

Shape letters: b batch, hq query heads, hkv key heads (hkv divides hq), s queries, t keys, d head dim, dv value dim, p ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn.functional import scaled_dot_product_attention

from autopar.ir.sharding import shard_extent
from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.ranges import named
from autopar.rewrite.collectives.transitions import all_to_all
from autopar.rewrite.lowerings.attention_blocks import (
    OnlineSoftmax,
    accumulation_dtype,
    block_backward,
    block_forward,
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
    """Attention of this rank's queries over the whole sequence of `kv_seq` keys: (b, hq, s, dv), laid out like the query.

    query: (b, hq, s, d), this rank's shard of `seq` positions over `axis`; key: (b, hkv, t, d), value: (b, hkv, t, dv), whole (gather) or
    sharded by the same pattern.  Query head i reads key head i // (hq / hkv).  Gradients are placed like the inputs; those of whole keys
    and values are partial over the axis.

    mask: boolean (True: attend) or additive, up to 4 dims that broadcast to (b, hq, rows, kv_seq).  Its columns are whole and in natural
    order; its rows are this rank's for gather and ring, whole for ulysses, or 1.  The gradient of an additive mask is what this rank's
    queries (gather) or heads (ulysses) contribute; ring has none.  Together with `is_causal` both apply.

    Raises ValueError if a shape or option does not fit.
    """
    group = axis_group(axis)
    _check(query, key, value, group, method, seq, kv_seq, mask, is_causal, zigzag)
    rows, columns = (_spans(size, group, group.index, zigzag) for size in (seq, kv_seq))
    if mask is not None:
        mask = mask[(None,) * (4 - mask.dim())]
        if is_causal:
            mask = _and_causal(mask, [(0, seq)] if method == "ulysses" else rows)
    if query.shape[1] == 0:
        return _no_heads(query, key, value, mask)
    if group.size == 1 or (method == "gather" and not (is_causal and mask is None)):
        return _whole_attention(query, key, value, mask, is_causal, scale)
    if method == "ulysses":
        return _ulysses(query, key, value, axis, group, seq, kv_seq, mask, is_causal, scale, zigzag)
    if method == "gather":
        step = _Step(kv_seq, ((0, kv_seq),), _causal_blocks(rows))
        return _BlockAttention.apply(query, key, value, None, _Schedule(None, (step,)), scale)
    steps = []
    for hop in range(group.size):
        source = (group.index - hop) % group.size
        columns = _spans(kv_seq, group, source, zigzag)
        keys = sum(length for _, length in columns)
        steps.append(
            _Step(
                keys,
                columns,
                _ring_blocks(query.shape[2], keys, group.index, source, is_causal, zigzag),
            )
        )
    return _BlockAttention.apply(query, key, value, mask, _Schedule(group, tuple(steps)), scale)


# --------------------------------------------------------------------------------------------------------------------- positions

Spans = tuple[tuple[int, int], ...]
"""(start, length) of runs of positions in natural order."""


def _spans(size: int, group: AxisGroup, index: int, zigzag: bool) -> Spans:
    """The positions that rank `index` holds, ascending."""
    if not zigzag:
        return (shard_extent(size, group.size, index),)
    chunk = size // (2 * group.size)
    return ((index * chunk, chunk), ((2 * group.size - 1 - index) * chunk, chunk))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    method: str,
    seq: int,
    kv_seq: int,
    mask: Tensor | None,
    is_causal: bool,
    zigzag: bool,
) -> None:
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
    """The mask (.., s or 1, kv_seq), without the keys after each query; query positions are `rows`."""
    positions = torch.cat(
        [torch.arange(start, start + length, device=mask.device) for start, length in rows]
    )
    past = positions.unsqueeze(1) >= torch.arange(mask.shape[3], device=mask.device)
    return mask & past if mask.dtype == torch.bool else torch.where(past, mask, -torch.inf)


def _whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(
        query, key, value, mask, 0.0, is_causal and mask is None, scale=scale, enable_gqa=grouped
    )
    if mask is not None and mask.requires_grad and 0 in out.shape:
        # with no queries torch leaves the mask out of the graph; its gradient is zero, not absent
        out = out + mask.sum()
    return out


def _no_heads(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """The result where tensor parallelism leaves this rank no query head.  Nor has any rank of the context group one, so that nobody sends
    anything.  Gradients are zero, not absent."""
    leaves = [x.sum() for x in (query, key, value, mask) if x is not None and x.requires_grad]
    out = query.new_zeros((*query.shape[:3], value.shape[3]))
    return out + sum(leaves) if leaves else out


# ----------------------------------------------------------------------------------------------------------------------- ulysses


def _ulysses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    axis: str,
    group: AxisGroup,
    seq: int,
    kv_seq: int,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    zigzag: bool,
) -> Tensor:
    """From shards of the sequence to shards of the heads, attention over the whole sequence, and back."""
    heads, kv_heads, ranks = query.shape[1], key.shape[1], group.size
    # the fewest that give every rank equally many; divides hq / hkv, since p divides hq
    copies = ranks // gcd(kv_heads, ranks)
    if copies > 1:
        key, value = (x.repeat_interleave(copies, 1) for x in (key, value))
    if mask is not None and mask.shape[1] > 1:
        mask = mask.narrow(1, *shard_extent(heads, ranks, group.index))
    order = [
        rank if half == 0 else 2 * ranks - 1 - rank for rank in range(ranks) for half in range(2)
    ]  # chunks as they arrive
    natural = [order.index(chunk) for chunk in range(2 * ranks)]

    def to_heads(x: Tensor, size: int) -> Tensor:
        whole = all_to_all(x, axis, 2, 1, size, x.shape[1])
        return _reordered(whole, natural) if zigzag else whole

    out = _whole_attention(
        to_heads(query, seq), to_heads(key, kv_seq), to_heads(value, kv_seq), mask, is_causal, scale
    )
    return all_to_all(_reordered(out, order) if zigzag else out, axis, 1, 2, heads, seq)


def _reordered(x: Tensor, order: list[int]) -> Tensor:
    """The chunks of the sequence dim, chunk order[0] first."""
    chunks = x.chunk(len(order), 2)
    return torch.cat([chunks[chunk] for chunk in order], 2)


# --------------------------------------------------------------------------------------------------------------- gather and ring


class _Block(NamedTuple):
    """Work of one kernel: which of the rank's queries, over which of the keys at hand."""

    rows: slice
    columns: slice
    is_causal: bool


class _Step(NamedTuple):
    """The keys at hand: how many, their positions, and what to compute with them."""

    keys: int
    columns: Spans
    blocks: tuple[_Block, ...]


@dataclass(frozen=True, slots=True)
class _Schedule:
    """One step for each shard of the keys, in order of arrival; `ring` is None if all keys are at hand."""

    ring: AxisGroup | None
    steps: tuple[_Step, ...]


def _causal_blocks(rows: Spans) -> tuple[_Block, ...]:
    """Queries at positions `rows` over whole keys: all keys before each run of queries, and the triangle of the run itself."""
    blocks, done = [], 0
    for start, length in rows:
        here = slice(done, done + length)
        blocks += [
            _Block(here, slice(0, start), False),
            _Block(here, slice(start, start + length), True),
        ]
        done += length
    return _not_empty(blocks)


def _ring_blocks(
    queries: int, keys: int, index: int, source: int, is_causal: bool, zigzag: bool
) -> tuple[_Block, ...]:
    """This rank's `queries` over the `keys` of rank `source`, without those that a causal mask hides altogether.

    In zigzag rank i has chunks i and 2p-1-i.  The keys of a rank before this one: its first chunk precedes both chunks of queries, its
    second follows both.  The keys of a rank after this one: both chunks lie between the two chunks of queries.
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
    return tuple(
        block
        for block in blocks
        if all(part.stop > part.start for part in (block.rows, block.columns))
    )


class _BlockAttention(torch.autograd.Function):
    """Attention block by block, over keys at hand or coming round a ring.  Keeps only its inputs, the result and its log-sum-exp."""

    @staticmethod
    def forward(
        ctx,
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
                out, lse = block_forward(
                    *_operands(block, step, query, keys, values, mask),
                    _is_causal(block, mask),
                    scale,
                )
                softmax.add(block.rows, out, lse)
        out, lse = softmax.result()
        ctx.save_for_backward(query, key, value, mask, out, lse)
        ctx.schedule, ctx.scale = schedule, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        query, key, value, mask, out, lse = ctx.saved_tensors
        ring, steps = ctx.schedule.ring, ctx.schedule.steps
        wide = accumulation_dtype(query.dtype)
        grad = grad.contiguous()
        dquery = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
        arriving, works = None, []
        for number, (step, keys, values) in enumerate(_visiting(ctx.schedule, key, value)):
            gradients = keys.new_zeros(_packed_size(key, value, step.keys), dtype=wide)
            dkeys, dvalues = _unpack(gradients, key, value, step.keys)
            for block in step.blocks:
                rows, columns = block.rows, block.columns
                operands = _operands(block, step, query, keys, values, mask)
                merged = (out[:, :, rows], lse[:, :, rows])
                found = block_backward(
                    grad[:, :, rows], *operands, *merged, _is_causal(block, mask), ctx.scale
                )
                for whole, part, piece in zip(
                    (dquery, dkeys, dvalues), (rows, columns, columns), found, strict=True
                ):
                    whole[:, :, part] += piece
            if ring is None:
                break
            # The gradients of a shard follow it round the ring, one step behind: they are sent on when this rank has added its part, and
            # are under way while the next rank computes its own.  After the last step they are back where the shard came from.
            _wait(works)
            if arriving is not None:
                gradients += arriving
            upcoming = steps[(number + 1) % len(steps)].keys
            sent, arriving = gradients, gradients.new_empty(_packed_size(key, value, upcoming))
            works = _exchange(ring, sent, arriving, tag=1)
        _wait(works)
        if ring is not None:
            dkeys, dvalues = _unpack(arriving, key, value, steps[0].keys)
        return (
            dquery.to(query.dtype),
            dkeys.to(key.dtype),
            dvalues.to(value.dtype),
            None,
            None,
            None,
        )


def _is_causal(block: _Block, mask: Tensor | None) -> bool:
    return block.is_causal and mask is None  # a mask has the causal one in it


def _operands(
    block: _Block, step: _Step, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple:
    """(query, key, value, mask) of one block; the mask (.., s or 1, kv_seq) is cut down to its rows and the positions of its keys."""
    if mask is not None:
        mask = mask[:, :, block.rows] if mask.shape[2] > 1 else mask
        pieces = [mask.narrow(3, *span) for span in step.columns]
        mask = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 3))[..., block.columns]
    return query[:, :, block.rows], keys[:, :, block.columns], values[:, :, block.columns], mask


def _visiting(
    schedule: _Schedule, key: Tensor, value: Tensor
) -> Iterator[tuple[_Step, Tensor, Tensor]]:
    """(step, keys, values) for each step; while the caller computes with them, they travel on and the next ones arrive."""
    steps, keys, values, packed = schedule.steps, key, value, None
    for number, step in enumerate(steps):
        if number + 1 == len(steps):
            yield step, keys, values
            return
        if packed is None:
            packed = torch.cat([key.reshape(-1), value.reshape(-1)])
        incoming = packed.new_empty(_packed_size(key, value, steps[number + 1].keys))
        works = _exchange(schedule.ring, packed, incoming, tag=0)
        yield step, keys, values
        _wait(works)
        packed = incoming
        keys, values = _unpack(packed, key, value, steps[number + 1].keys)


def _packed_size(key: Tensor, value: Tensor, keys: int) -> int:
    """Elements of one message: `keys` keys and values of all heads."""
    return key.shape[0] * key.shape[1] * keys * (key.shape[3] + value.shape[3])


def _unpack(packed: Tensor, key: Tensor, value: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    split = key.shape[0] * key.shape[1] * keys * key.shape[3]
    shapes = [(*x.shape[:2], keys, x.shape[3]) for x in (key, value)]
    return packed[:split].view(shapes[0]), packed[split:].view(shapes[1])


def _exchange(ring: AxisGroup, outgoing: Tensor, incoming: Tensor, tag: int) -> list[dist.Work]:
    """Start sending `outgoing` to the next rank and receiving `incoming` from the previous one.

    Keys and gradients have tags of their own, since both are under way at once.  An empty shard is not sent; its receiver knows.
    """
    if ring.simulate or outgoing.is_meta or isinstance(outgoing, FakeTensor):
        incoming.zero_()
        return []
    process_group = _resolve_process_group(ring.group_name)
    hops = (
        (dist.isend, outgoing, (ring.index + 1) % ring.size),
        (dist.irecv, incoming, (ring.index - 1) % ring.size),
    )
    operations = [
        dist.P2POp(op, x, group=process_group, tag=tag, group_peer=peer)
        for op, x, peer in hops
        if x.numel()
    ]
    return dist.batch_isend_irecv(operations) if operations else []


def _wait(works: list[dist.Work]) -> None:
    with named("ring over cp"):
        for work in works:
            work.wait()
