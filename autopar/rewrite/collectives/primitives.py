"""Ten primitives on local tensors, without gradients, from which layout changes (`ir/sharding.py`)
are built.

Sizes are those of the tensor before the axis shards it. Uneven shards follow `shard_extent`: every
shard is full until no elements are left, so padding shards to equal length puts all padding at the
end of the whole. A shard with a pattern is even; collectives over it reorder the dim before or
after (`patterns.py`).

A collective can be started and waited for later: `start_primitive` returns a `Started`. On CPU the
wait is immediate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor

from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, shard_extent
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split, natural_order, pick, rank_major
from autopar.rewrite.collectives.ranges import named

_Primitive = Callable[[Tensor, AxisGroup, Any, Any], "Started"]
# Each takes the local tensor, the group, how the tensor is split (src) and how the result is (dst); None stands for R or P.


def _identity(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Tensor:
    return x


def _mask(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Tensor:
    """Replicated to partial (R -> P): x on the first rank of the axis, zeros on the others."""
    return x if group.index == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group: AxisGroup, src: Split | None, dst: Split) -> Tensor:
    """Replicated to sharded (R -> S): a copy of this rank's shard (`dst`), so that the whole tensor
    can be freed.
    """
    return pick(x, dst, group.size, group.index).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, group: AxisGroup, src: Split, dst: Split | None) -> Tensor:
    """Sharded to partial (S -> P): this rank's shard (`src`) at its place in the whole size, zeros
    elsewhere.
    """
    length = x.shape[src.dim]
    start = length * group.index
    if src.pattern.is_contiguous:
        start, _ = shard_extent(src.size, group.size, group.index)
    before, after = list(x.shape), list(x.shape)
    before[src.dim], after[src.dim] = start, src.size - start - length
    return natural_order(
        torch.cat([x.new_zeros(before), x, x.new_zeros(after)], src.dim), src, group.size
    )


@dataclass(slots=True)
class Started:
    """A collective that has been started on this rank. `finish` computes the result from the
    received tensor; if it is None, `received` is already the result.
    """

    received: Tensor | None
    finish: Callable[[Tensor], Tensor] | None = None

    def wait(self) -> Tensor:
        """Wait for the collective and return its result. Raises RuntimeError if it is called twice."""
        received, self.received = self.received, None
        if received is None:
            raise RuntimeError("a collective is waited for once; this one has been")
        return received if self.finish is None else self.finish(_c10d.wait_tensor(received))

    def __del__(self) -> None:
        # Recomputation stops at the last value that backward needs, maybe short of the wait; every work must be waited for.
        received = getattr(self, "received", None)  # none where the constructor failed
        if received is not None and self.finish is not None:
            _c10d.wait_tensor(received)


def _start_all_reduce(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Started:
    """Partial to replicated (P -> R): start an all-reduce, whose result is the sum over the group."""
    sent = _c10d.all_reduce(x.contiguous(), "sum", group.group_name)
    return Started(sent, lambda received: received)


def _start_all_gather(x: Tensor, group: AxisGroup, src: Split, dst: Split | None) -> Started:
    """Sharded to replicated (S -> R): start an all-gather, whose result is the whole tensor in its
    original order. `src` says how x is sharded.
    """
    shard = _resize(x, src.dim, ceil(src.size / group.size)).contiguous()

    def finish(gathered: Tensor) -> Tensor:
        whole = gathered if src.dim == 0 else torch.cat(gathered.chunk(group.size), src.dim)
        return natural_order(_resize(whole, src.dim, src.size), src, group.size).contiguous()

    return Started(_c10d.all_gather_into_tensor(shard, group.size, group.group_name), finish)


def _start_reduce_scatter(x: Tensor, group: AxisGroup, src: Split | None, dst: Split) -> Started:
    """Partial to sharded (P -> S): start a reduce-scatter, whose result is this rank's shard of the
    sum. `dst` says how the sum is sharded.
    """
    step = ceil(dst.size / group.size)
    whole = _resize(rank_major(x, dst, group.size), dst.dim, step * group.size)
    stacked = whole if dst.dim == 0 else torch.cat(whole.split(step, dst.dim), 0)

    def finish(shard: Tensor) -> Tensor:
        return _resize(shard, dst.dim, dst.extent(group.size, group.index)).contiguous()

    sent = stacked.contiguous()
    received = _c10d.reduce_scatter_tensor(sent, "sum", group.size, group.group_name)
    return Started(received, finish)


def _start_all_to_all(x: Tensor, group: AxisGroup, src: Split, dst: Split) -> Started:
    """Sharded along one dim to sharded along another (S(d) -> S(e)): start an all-to-all, which
    cuts along e (`dst`) and joins along d (`src`). The result is this rank's shard along e.
    """
    x = rank_major(x, dst, group.size)
    pieces = list(x.split([dst.extent(group.size, rank) for rank in range(group.size)], dst.dim))
    shapes = [list(pieces[group.index].shape) for _ in pieces]
    for rank, shape in enumerate(shapes):
        shape[src.dim] = src.extent(group.size, rank)
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    lengths_in, lengths_out = [prod(shape) for shape in shapes], [piece.numel() for piece in pieces]

    def finish(received: Tensor) -> Tensor:
        parts = zip(received.split(lengths_in), shapes, strict=True)
        joined = torch.cat([part.view(shape) for part, shape in parts], src.dim)
        return natural_order(joined, src, group.size)

    return Started(_c10d.all_to_all_single(flat, lengths_in, lengths_out, group.group_name), finish)


def _start_reshuffle(x: Tensor, group: AxisGroup, src: Split, dst: Split) -> Started:
    """Sharded along a dim (`src`) to sharded along it in another pattern (`dst`): start an
    all-gather, of which each rank keeps its new shard.
    """
    gathering = _start_all_gather(x, group, src, None)
    return _then(gathering, lambda whole: _slice(whole, group, None, dst))


def _at_once(primitive: Callable[[Tensor, AxisGroup, Any, Any], Tensor]) -> _Primitive:
    return lambda x, group, src, dst: Started(primitive(x, group, src, dst))


def _then(started: Started, last: Callable[[Tensor], Tensor]) -> Started:
    """The started collective, whose result is further changed by the local step `last`. `started`
    itself must not be waited for any more.
    """
    finish = started.finish
    if finish is None:
        return Started(last(started.wait()))
    received, started.received = started.received, None
    return Started(received, lambda x: last(finish(x)))


_c10d = torch.ops._c10d_functional

_PRIMITIVES: dict[str, _Primitive] = {
    "identity": _at_once(_identity),
    "mask": _at_once(_mask),
    "slice": _at_once(_slice),
    "pad": _at_once(_pad),
    "all_reduce": _start_all_reduce,
    "all_gather": _start_all_gather,
    "reduce_scatter": _start_reduce_scatter,
    "all_to_all": _start_all_to_all,
    "reshuffle": _start_reshuffle,
}


def apply_primitive(
    name: str, x: Tensor, group: AxisGroup, src: Split | None = None, dst: Split | None = None
) -> Tensor:
    """Run the primitive called `name` on this rank's `x`, without gradient, and wait for the
    result. In a group of one rank that is x itself.

    `src` describes how x is sharded by the group, `dst` how the result is (None: not sharded).
    Raises ValueError if the shape of x does not match.
    """
    return start_primitive(name, x, group, src, dst).wait()


def sum_in_place(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum of a contiguous tensor over the group, all-reduced in its own memory. The same tensor
    is returned; a simulated group fills it with zeros.
    """
    if group.size == 1 or not x.numel():
        return x
    if group.simulate:
        return x.zero_()
    with named("all_reduce over", group.name):
        return _c10d.wait_tensor(_c10d.all_reduce_(x, "sum", group.group_name))


def start_primitive(
    name: str, x: Tensor, group: AxisGroup, src: Split | None = None, dst: Split | None = None
) -> Started:
    """Start the primitive that `apply_primitive` runs, with the same arguments. Its `wait` gives
    the result. A primitive without communication, and every one on CPU, is complete at once.
    """
    whole, result = list(x.shape), list(x.shape)
    if src is not None:
        _check_extent(name, x, src, group, src.extent(group.size, group.index))
        whole[src.dim] = result[src.dim] = src.size
    if dst is not None:
        same_dim = src is not None and src.dim == dst.dim
        expected = src.extent(group.size, group.index) if src is not None and same_dim else dst.size
        _check_extent(name, x, dst, group, expected)
        result[dst.dim] = dst.extent(group.size, group.index)
    if group.size == 1:
        return Started(x)
    if name not in COLLECTIVE_PRIMITIVES:
        return _PRIMITIVES[name](x, group, src, dst)
    if group.simulate or 0 in whole:  # nothing to send, and every rank of the group knows
        return Started(x.new_zeros(result))
    with named(name, "over", group.name):
        started = _start_collective(name, x, group, src, dst)
        # gloo of torch 2.13 has corrupted the heap with several collectives under way
        return Started(started.wait()) if x.device.type == "cpu" else started


def _start_collective(
    name: str, x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None
) -> Started:
    if x.dtype != torch.bool:
        return _PRIMITIVES[name](x, group, src, dst)
    # no backend sums bool, and gloo does not move it; a sum of booleans is their disjunction
    wire = x.int() if name in ("all_reduce", "reduce_scatter") else x.view(torch.uint8)
    return _then(_PRIMITIVES[name](wire, group, src, dst), Tensor.bool)


def _check_extent(name: str, x: Tensor, split: Split, group: AxisGroup, expected: int) -> None:
    if not 0 <= split.dim < x.dim() or x.shape[split.dim] != expected:
        raise ValueError(
            f"{name} over axis {group.name!r} (rank {group.index} of {group.size}) expects {expected} elements in dim {split.dim} "
            f"(of {split.size} before sharding) and got a tensor of shape {tuple(x.shape)}"
        )


def _resize(x: Tensor, dim: int, length: int) -> Tensor:
    """x cut, or padded with zeros, to `length` elements in `dim`."""
    missing = length - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, 0, length) if missing < 0 else x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)
