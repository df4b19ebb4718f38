"""The transitions of `ir/sharding.py` as functions: the collective nodes of a rewritten program.

Each node function is named after the primitive that it runs forward and is told, as `backward`, the primitive that its gradient runs:

    function        value          backward (gradient, read from right to left)
    identity        R -> R         identity | all_reduce (R -> R/P) | mask (R/P -> R)
    shard           R -> S(d)      all_gather               | pad    (from R/P)
    mask            R -> P         identity                 | mask   (from R/P)
    all_gather      S(d) -> R      slice                    | reduce_scatter (to R/P)
    all_to_all      S(d) -> S(e)   all_to_all
    pad             S(d) -> P      slice
    all_reduce      P -> R         identity                 | all_reduce     (to R/P)
    reduce_scatter  P -> S(d)      all_gather
    reshuffle       S(d) -> S(d)   reshuffle      (from one pattern of the dim to another)

`make_transition(src, dst, sizes)` chooses the function and its arguments.  The same ten primitives serve both directions: one table,
`_PRIMITIVES`, and one autograd function, `_Transition`.

Nodes name a mesh axis ("dp", "tp"); `active_axes` says which group of ranks that is.  With simulated groups a rank's program runs with
no process group, to verify its shapes on meta, fake or real tensors.

Sizes given to the functions are those of the tensor before this axis shards it.  Uneven sizes follow `shard_extent`: since every
shard is full until the elements run out, padding shards to equal length puts all padding at the very end of the whole.  A patterned
shard is even; collectives over it reorder the dim before or after (`patterns.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from autopar.errors import AutoparError
from autopar.ir.sharding import COLLECTIVES, Layout, parse_pattern, shard_extent, transition
from autopar.rewrite.patterns import Split, natural_order, pick, rank_major


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """This rank's group along one mesh axis.

    `index` is this rank's coordinate, `group_name` the c10d name of the process group (None for one rank).  A group that simulates
    has no process group: its collectives return zeros of the right shape (zeros, since they are valid indices).
    """

    name: str
    size: int
    index: int = 0
    group_name: str | None = None
    simulate: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.size:
            raise ValueError(f"axis {self.name!r}: coordinate {self.index} is not in a group of {self.size}")
        if (self.group_name is None) != (self.size == 1 or self.simulate):
            raise ValueError(
                f"axis {self.name!r}: size={self.size}, simulate={self.simulate} does not go with process group {self.group_name!r}"
            )


# The axes that each thread has activated.  Not a ContextVar: autograd runs CUDA backward, and with it the forward code that a
# checkpoint recomputes, on a thread of its own, which inherits no context.
_axes_by_thread: dict[int, Mapping[str, AxisGroup]] = {}


@contextlib.contextmanager
def active_axes(axes: Mapping[str, AxisGroup]) -> Iterator[None]:
    """Within the block, collective nodes find their mesh axes in `axes`.

    The innermost block of a thread counts.  A thread that entered none (autograd's) uses the block of the one thread that did.
    Backward through finished transitions needs no block, recomputation does.
    """
    thread = threading.get_ident()
    outer = _axes_by_thread.get(thread)
    _axes_by_thread[thread] = axes
    try:
        yield
    finally:
        if outer is None:
            del _axes_by_thread[thread]
        else:
            _axes_by_thread[thread] = outer


@torch.compiler.assume_constant_result
def axis_group(axis: str) -> AxisGroup:
    """The active group of the mesh axis called `axis`; a compiled program takes it as a constant."""
    axes = _axes_by_thread.get(threading.get_ident())
    if axes is None:
        others = list(_axes_by_thread.values())
        if not others:
            raise AutoparError(
                f"a collective over mesh axis {axis!r} ran with no active mesh; run the program inside `with active_axes(...)`"
            )
        if any(other is not others[0] for other in others):
            raise AutoparError(
                f"a collective over mesh axis {axis!r} ran on a thread with no active mesh, while other threads have several"
            )
        axes = others[0]
    if axis not in axes:
        raise AutoparError(f"a collective names mesh axis {axis!r}; the active mesh has {', '.join(axes) or 'no axes'}")
    return axes[axis]


# ----------------------------------------------------------------------------------------------------------------- primitives
# Each takes the local tensor, the group, how the tensor is split (src) and how the result is (dst); None stands for R or P.


def _identity(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Tensor:
    return x


def _mask(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Tensor:
    """R -> P: x on the first rank of the axis, zeros elsewhere."""
    return x if group.index == 0 else torch.zeros_like(x)


def _slice(x: Tensor, group: AxisGroup, src: Split | None, dst: Split) -> Tensor:
    """R -> S: a copy of this rank's shard, so that the whole can be freed."""
    return pick(x, dst, group.size, group.index).clone(memory_format=torch.contiguous_format)


def _pad(x: Tensor, group: AxisGroup, src: Split, dst: Split | None) -> Tensor:
    """S -> P: this rank's shard among zeros."""
    length = x.shape[src.dim]
    start = shard_extent(src.size, group.size, group.index)[0] if src.pattern.is_contiguous else length * group.index
    before, after = list(x.shape), list(x.shape)
    before[src.dim], after[src.dim] = start, src.size - start - length
    return natural_order(torch.cat([x.new_zeros(before), x, x.new_zeros(after)], src.dim), src, group.size)


def _all_reduce(x: Tensor, group: AxisGroup, src: Split | None, dst: Split | None) -> Tensor:
    """P -> R."""
    return _wait(_c10d.all_reduce(x.contiguous(), "sum", group.group_name))


def _all_gather(x: Tensor, group: AxisGroup, src: Split, dst: Split | None) -> Tensor:
    """S -> R."""
    shard = _resize(x, src.dim, ceil(src.size / group.size)).contiguous()
    gathered = _wait(_c10d.all_gather_into_tensor(shard, group.size, group.group_name))
    whole = gathered if src.dim == 0 else torch.cat(gathered.view(group.size, *shard.shape).unbind(0), src.dim)
    return natural_order(_resize(whole, src.dim, src.size), src, group.size).contiguous()


def _reduce_scatter(x: Tensor, group: AxisGroup, src: Split | None, dst: Split) -> Tensor:
    """P -> S."""
    step = ceil(dst.size / group.size)
    whole = _resize(rank_major(x, dst, group.size), dst.dim, step * group.size)
    stacked = whole if dst.dim == 0 else torch.cat(whole.split(step, dst.dim), 0)
    shard = _wait(_c10d.reduce_scatter_tensor(stacked.contiguous(), "sum", group.size, group.group_name))
    return _resize(shard, dst.dim, dst.extent(group.size, group.index)).contiguous()


def _all_to_all(x: Tensor, group: AxisGroup, src: Split, dst: Split) -> Tensor:
    """S(d) -> S(e): cut along e, send, join along d."""
    x = rank_major(x, dst, group.size)
    pieces = list(x.split([dst.extent(group.size, rank) for rank in range(group.size)], dst.dim))
    shapes = [list(pieces[group.index].shape) for _ in pieces]
    for rank, shape in enumerate(shapes):
        shape[src.dim] = src.extent(group.size, rank)
    flat = torch.cat([piece.reshape(-1) for piece in pieces])
    lengths_in, lengths_out = [prod(shape) for shape in shapes], [piece.numel() for piece in pieces]
    received = _wait(_c10d.all_to_all_single(flat, lengths_in, lengths_out, group.group_name))
    joined = torch.cat([part.view(shape) for part, shape in zip(received.split(lengths_in), shapes, strict=True)], src.dim)
    return natural_order(joined, src, group.size)


def _reshuffle(x: Tensor, group: AxisGroup, src: Split, dst: Split) -> Tensor:
    """S(d) -> S(d) in another pattern: gather, then keep what is this rank's."""
    return _slice(_all_gather(x, group, src, None), group, None, dst)


_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor

_PRIMITIVES: dict[str, Callable[[Tensor, AxisGroup, Any, Any], Tensor]] = {
    "identity": _identity,
    "mask": _mask,
    "slice": _slice,
    "pad": _pad,
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "reshuffle": _reshuffle,
}


def apply_primitive(name: str, x: Tensor, group: AxisGroup, src: Split | None = None, dst: Split | None = None) -> Tensor:
    """Run one primitive on this rank's `x`, with no gradient.

    `src` says which dim of x the group shards and `dst` which dim of the result.  Raises ValueError if x is not shaped like that.
    """
    whole, result = list(x.shape), list(x.shape)
    if src is not None:
        _check_extent(name, x, src, group, src.extent(group.size, group.index))
        whole[src.dim] = result[src.dim] = src.size
    if dst is not None:
        _check_extent(name, x, dst, group, src.extent(group.size, group.index) if src is not None and src.dim == dst.dim else dst.size)
        result[dst.dim] = dst.extent(group.size, group.index)
    if group.size == 1:
        return x
    if name not in COLLECTIVES:
        return _PRIMITIVES[name](x, group, src, dst)
    if group.simulate or 0 in whole:  # nothing to send, and every rank of the group knows
        return x.new_zeros(result)
    if x.dtype == torch.bool:  # no backend sums bool, and gloo does not move it; a sum of booleans is their disjunction
        wire = x.int() if name in ("all_reduce", "reduce_scatter") else x.view(torch.uint8)
        return _PRIMITIVES[name](wire, group, src, dst).bool()
    return _PRIMITIVES[name](x, group, src, dst)


def _check_extent(name: str, x: Tensor, split: Split, group: AxisGroup, expected: int) -> None:
    if not 0 <= split.dim < x.dim() or x.shape[split.dim] != expected:
        raise ValueError(
            f"{name} over axis {group.name!r} (rank {group.index} of {group.size}) expects {expected} elements in dim {split.dim} "
            f"(of {split.size} before sharding) and got a tensor of shape {tuple(x.shape)}"
        )


def _resize(x: Tensor, dim: int, length: int) -> Tensor:
    """x cut, or filled up with zeros, to `length` elements in `dim`."""
    missing = length - x.shape[dim]
    if missing <= 0:
        return x.narrow(dim, 0, length) if missing < 0 else x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


class _Transition(torch.autograd.Function):
    """Primitive `forward_name` forward and `backward_name`, with source and destination exchanged, backward."""

    @staticmethod
    def forward(ctx, x, group, forward_name, backward_name, src, dst):
        ctx.group, ctx.backward_name, ctx.src, ctx.dst = group, backward_name, src, dst
        out = apply_primitive(forward_name, x, group, src, dst)
        return x.view_as(x) if out is x else out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return apply_primitive(ctx.backward_name, grad, ctx.group, ctx.dst, ctx.src), None, None, None, None, None


# --------------------------------------------------------------------------------------------------------------- node functions

_LEGAL_BACKWARD = {
    "identity": ("identity", "all_reduce", "mask"),
    "slice": ("all_gather", "pad"),
    "mask": ("identity", "mask"),
    "all_gather": ("slice", "reduce_scatter"),
    "all_to_all": ("all_to_all",),
    "pad": ("slice",),
    "all_reduce": ("identity", "all_reduce"),
    "reduce_scatter": ("all_gather",),
    "reshuffle": ("reshuffle",),
}


def _move(x: Tensor, axis: str, forward: str, backward: str, src: Split | None = None, dst: Split | None = None) -> Tensor:
    if backward not in _LEGAL_BACKWARD[forward]:
        raise ValueError(f"{backward!r} is not the backward of {forward}; {' or '.join(_LEGAL_BACKWARD[forward])} can be")
    return _Transition.apply(x, axis_group(axis), forward, backward, src, dst)


def _split(dim: int, size: int, pattern: str, rows: int) -> Split:
    parsed = parse_pattern(pattern)
    return Split(dim, size, parsed, rows if parsed.rows else 1)


def identity(x: Tensor, axis: str, backward: str = "all_reduce") -> Tensor:
    """The value as it is; only its gradient changes placement."""
    return _move(x, axis, "identity", backward)


def shard(x: Tensor, axis: str, dim: int, backward: str = "all_gather", pattern: str = "", rows: int = 1) -> Tensor:
    """This rank's shard, along `dim`, of a replicated value.  Here as below, `pattern` is a `Pattern` as text ('' is contiguous) and
    `rows` the number of batch rows that are flattened into the dim."""
    return _move(x, axis, "slice", backward, dst=_split(dim, x.shape[dim], pattern, rows))


def mask(x: Tensor, axis: str, backward: str = "identity") -> Tensor:
    """A replicated value as a partial sum: kept on coordinate 0 of the axis, zero elsewhere."""
    return _move(x, axis, "mask", backward)


def all_gather(x: Tensor, axis: str, dim: int, size: int, backward: str = "slice", pattern: str = "", rows: int = 1) -> Tensor:
    """The whole of a value sharded along `dim`, which has `size` elements in all."""
    return _move(x, axis, "all_gather", backward, src=_split(dim, size, pattern, rows))


def all_to_all(
    x: Tensor,
    axis: str,
    src_dim: int,
    dst_dim: int,
    src_size: int,
    dst_size: int,
    backward: str = "all_to_all",
    src_pattern: str = "",
    dst_pattern: str = "",
    rows: int = 1,
) -> Tensor:
    """A value sharded along `src_dim` (of `src_size` elements in all) sharded along `dst_dim` instead."""
    src, dst = (_split(src_dim, src_size, src_pattern, rows), _split(dst_dim, dst_size, dst_pattern, rows))
    return _move(x, axis, "all_to_all", backward, src, dst)


def pad(x: Tensor, axis: str, dim: int, size: int, backward: str = "slice", pattern: str = "", rows: int = 1) -> Tensor:
    """A value sharded along `dim` as a partial sum: each rank's shard, surrounded by zeros up to `size` elements."""
    return _move(x, axis, "pad", backward, src=_split(dim, size, pattern, rows))


def all_reduce(x: Tensor, axis: str, backward: str = "identity") -> Tensor:
    """The sum of a partial value over the axis."""
    return _move(x, axis, "all_reduce", backward)


def reduce_scatter(x: Tensor, axis: str, dim: int, size: int, backward: str = "all_gather", pattern: str = "", rows: int = 1) -> Tensor:
    """This rank's shard, along `dim` of `size` elements, of the sum of a partial value."""
    return _move(x, axis, "reduce_scatter", backward, dst=_split(dim, size, pattern, rows))


def reshuffle(
    x: Tensor, axis: str, dim: int, size: int, src_pattern: str, dst_pattern: str, backward: str = "reshuffle", rows: int = 1
) -> Tensor:
    """A value sharded along `dim` of `size` elements in one pattern, sharded in another."""
    src, dst = (_split(dim, size, pattern, rows) for pattern in (src_pattern, dst_pattern))
    return _move(x, axis, "reshuffle", backward, src, dst)


NODE_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "identity": identity,
    "slice": shard,
    "mask": mask,
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "pad": pad,
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "reshuffle": reshuffle,
}
"""Forward primitive -> the function whose calls are nodes of a rewritten program."""


def make_transition(src: Layout, dst: Layout, sizes: Sequence[int], rows: int = 1) -> tuple[Callable[..., Tensor], dict[str, Any]]:
    """(function, keyword arguments) such that `function(x, axis, **arguments)` turns x laid out `src` over an axis into `dst`.

    `sizes` is the shape of the tensor before the axis shards it, `rows` the number of batch rows in a dim that a pattern of rows shards.
    Sizes of dims that the axis does not shard are not used; a size that depends on the batch is a graph node.  For `src == dst` the
    function is an identity in both directions, which a rewrite leaves out.

    >>> make_transition(parse_layout("S(1)"), parse_layout("R/P"), (4, 10))
    (<function all_gather>, {'dim': 1, 'size': 10, 'backward': 'reduce_scatter'})
    """
    for layout in (src, dst):
        if layout.is_shard and layout.dim >= len(sizes):
            raise AutoparError(f"{src} -> {dst} needs a dim {layout.dim}; the tensor's shape is {tuple(sizes)}")
    forward, backward = transition(src, dst)
    arguments: dict[str, Any] = {}
    if forward == "all_to_all":
        arguments = {"src_dim": src.dim, "dst_dim": dst.dim, "src_size": sizes[src.dim], "dst_size": sizes[dst.dim]}
    elif forward == "slice":
        arguments = {"dim": dst.dim}
    elif forward == "reduce_scatter":
        arguments = {"dim": dst.dim, "size": sizes[dst.dim]}
    elif forward in ("all_gather", "pad", "reshuffle"):
        arguments = {"dim": src.dim, "size": sizes[src.dim]}
    arguments["backward"] = backward
    if forward in ("all_to_all", "reshuffle"):
        named = {"src_pattern": src.pattern, "dst_pattern": dst.pattern}
        arguments |= {key: str(pattern) for key, pattern in named.items() if forward == "reshuffle" or not pattern.is_contiguous}
    elif forward != "identity" and not (pattern := (src if src.is_shard else dst).pattern).is_contiguous:
        arguments["pattern"] = str(pattern)
    if forward != "identity" and (src.pattern.rows or dst.pattern.rows):
        arguments["rows"] = rows
    return NODE_FUNCTIONS[forward], arguments
