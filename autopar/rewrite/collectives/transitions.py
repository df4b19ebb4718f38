"""Transitions: layout changes with gradients (`ir/sharding.py`), as the collective nodes of a
rewritten program.

Each node function is named after the primitive that it runs in forward. Its argument `backward`
names the primitive that its gradient runs:

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

`make_transition(src, dst, sizes)` chooses the function and its arguments. The same ten primitives
(`primitives.py`) serve both directions. Sizes passed to the functions are those of the tensor
before this axis shards it.

With `async_op=True` a function starts its primitive and returns a `Pending`, which `wait` turns
into the value. Backward mirrors this: the gradient's primitive starts at the `wait` and is waited
for at the start. Work between the two therefore overlaps with both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.sharding import AxisLayout, transition
from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.patterns import Split, split_of
from autopar.rewrite.collectives.primitives import Started, apply_primitive, start_primitive


class _Transition(torch.autograd.Function):
    """An autograd function that changes a layout. It runs the primitive (data movement)
    `forward_name` in forward, and `backward_name`, with source and destination exchanged, in
    backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: AxisGroup,
        forward_name: str,
        backward_name: str,
        src: Split | None,
        dst: Split | None,
    ) -> Tensor:
        ctx.group, ctx.backward_name, ctx.src, ctx.dst = group, backward_name, src, dst
        out = apply_primitive(forward_name, x, group, src, dst)
        return x.view_as(x) if out is x else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        moved = apply_primitive(ctx.backward_name, grad, ctx.group, ctx.dst, ctx.src)
        return moved, None, None, None, None, None


@dataclass(slots=True)
class _Handle:
    """Holds the running collective between the start and the wait of an asynchronous transition (a
    layout change), in forward or backward. None before the start and after the wait.
    """

    started: Started | None = None

    def start(self, x: Tensor, move: _Move) -> None:
        name, group, src, dst = move
        self.started = start_primitive(name, x, group, src, dst)

    def wait(self) -> Tensor:
        started, self.started = self.started, None
        if started is None:
            raise RuntimeError(
                "an asynchronous transition is waited for once, and its gradient flows back once"
            )
        return started.wait()


_Move = tuple[str, AxisGroup, Split | None, Split | None]
"""A primitive, its group, and how its operand and its result are sharded."""


@dataclass(frozen=True, slots=True)
class Pending:
    """The result of a started asynchronous transition, which `wait` turns into the value. `token`,
    an empty tensor, carries the gradient back. `arrival` has the handle and the primitive of the
    gradient.

    Without an arrival, the token is the value itself.
    """

    token: Tensor
    arrival: tuple[_Handle, _Move] | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether a gradient flows back through this pending value."""
        return self.token.requires_grad


class _Start(torch.autograd.Function):
    """An autograd function: starts the collective of an asynchronous transition in forward, and
    waits for that of the gradient in backward. Forward returns an empty token.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: _Handle, move: _Move) -> Tensor:
        ctx.handle = handle
        handle.start(x, move)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None]:
        return ctx.handle.wait(), None, None


class _Wait(torch.autograd.Function):
    """An autograd function: waits for the collective of an asynchronous transition in forward, and
    starts that of the gradient in backward.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, handle: _Handle, move: _Move) -> Tensor:
        ctx.handle, ctx.move = handle, move
        return handle.wait().detach()  # of another tensor than the operand, where nothing is moved

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.handle.start(grad, ctx.move)
        return grad.new_empty(0), None, None


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


def _move(
    x: Tensor,
    axis: str,
    forward: str,
    backward: str,
    src: Split | None = None,
    dst: Split | None = None,
    async_op: bool = False,
) -> Tensor | Pending:
    if backward not in _LEGAL_BACKWARD[forward]:
        raise ValueError(
            f"{backward!r} is not the backward of {forward}; {' or '.join(_LEGAL_BACKWARD[forward])} can be"
        )
    group = axis_group(axis)
    # a compiler traces functional collectives and places their waits itself
    if not async_op or torch.compiler.is_compiling():
        value = _Transition.apply(x, group, forward, backward, src, dst)
        return Pending(value) if async_op else value
    handle = _Handle()
    token = _Start.apply(x, handle, (forward, group, src, dst))
    return Pending(token, (handle, (backward, group, dst, src)))


def wait(pending: Pending) -> Tensor:
    """The value of an asynchronous transition, after its collective has arrived. In backward it
    starts the collective of the gradient. Each `Pending` is waited for once.
    """
    return (
        pending.token if pending.arrival is None else _Wait.apply(pending.token, *pending.arrival)
    )


def identity(
    x: Tensor, axis: str, backward: str = "all_reduce", async_op: bool = False
) -> Tensor | Pending:
    """The value unchanged. Its gradient runs the primitive `backward` over `axis`: 'identity',
    'all_reduce' or 'mask'; ValueError for others.

    With `async_op` the result is a `Pending`, and the collective of the gradient is asynchronous.
    """
    return _move(x, axis, "identity", backward, async_op=async_op)


def shard(
    x: Tensor,
    axis: str,
    dim: int,
    backward: str = "all_gather",
    pattern: str = "",
    rows: int = 1,
    async_op: bool = False,
) -> Tensor | Pending:
    """This rank's shard, along `dim`, of a value that is replicated over `axis`. `pattern` is a
    `Pattern` as text ('' is contiguous), and `rows` the number of batch rows flattened into the
    dim.

    The gradient runs the primitive `backward`. With `async_op` the result is a `Pending`.
    """
    return _move(
        x,
        axis,
        "slice",
        backward,
        dst=split_of(dim, x.shape[dim], pattern, rows),
        async_op=async_op,
    )


def mask(x: Tensor, axis: str, backward: str = "identity") -> Tensor | Pending:
    """A value that is replicated over `axis` as a partial sum: unchanged on coordinate 0 of the
    axis, zero elsewhere. The gradient runs the primitive `backward`.
    """
    return _move(x, axis, "mask", backward)


def all_gather(
    x: Tensor,
    axis: str,
    dim: int,
    size: int,
    backward: str = "slice",
    pattern: str = "",
    rows: int = 1,
    async_op: bool = False,
) -> Tensor | Pending:
    """The whole, on every rank of `axis`, of a value that is sharded along `dim`, which has `size`
    elements in total. `pattern` is its `Pattern` as text, `rows` the number of batch rows flattened
    into the dim.

    The gradient runs the primitive `backward`. With `async_op` the result is a `Pending`.
    """
    return _move(
        x, axis, "all_gather", backward, src=split_of(dim, size, pattern, rows), async_op=async_op
    )


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
    async_op: bool = False,
) -> Tensor | Pending:
    """A value sharded along `src_dim` (`src_size` elements in total), sharded along `dst_dim`
    (`dst_size`) instead. Patterns are `Pattern`s as text; `rows` batch rows are flattened into a
    dim with rows.

    The gradient runs the primitive `backward`. With `async_op` the result is a `Pending`.
    """
    src = split_of(src_dim, src_size, src_pattern, rows)
    dst = split_of(dst_dim, dst_size, dst_pattern, rows)
    return _move(x, axis, "all_to_all", backward, src, dst, async_op=async_op)


def pad(
    x: Tensor,
    axis: str,
    dim: int,
    size: int,
    backward: str = "slice",
    pattern: str = "",
    rows: int = 1,
) -> Tensor | Pending:
    """A value sharded along `dim` as a partial sum: each rank's shard, padded with zeros to `size`
    elements at its place in the whole. The gradient runs the primitive `backward`.

    `pattern` is its `Pattern` as text, `rows` the number of batch rows flattened into the dim.
    """
    return _move(x, axis, "pad", backward, src=split_of(dim, size, pattern, rows))


def all_reduce(
    x: Tensor, axis: str, backward: str = "identity", async_op: bool = False
) -> Tensor | Pending:
    """The sum over the axis of a value of which each rank holds a part. The gradient runs the
    primitive `backward`. A `Pending` if `async_op`.
    """
    return _move(x, axis, "all_reduce", backward, async_op=async_op)


def reduce_scatter(
    x: Tensor,
    axis: str,
    dim: int,
    size: int,
    backward: str = "all_gather",
    pattern: str = "",
    rows: int = 1,
    async_op: bool = False,
) -> Tensor | Pending:
    """This rank's shard, along `dim` of `size` elements, of the sum over the axis of a value of
    which each rank holds a part. `pattern` is the shard's `Pattern` as text, `rows` the number of
    batch rows flattened into the dim.

    The gradient runs the primitive `backward`. With `async_op` the result is a `Pending`.
    """
    return _move(
        x,
        axis,
        "reduce_scatter",
        backward,
        dst=split_of(dim, size, pattern, rows),
        async_op=async_op,
    )


def reshuffle(
    x: Tensor,
    axis: str,
    dim: int,
    size: int,
    src_pattern: str,
    dst_pattern: str,
    backward: str = "reshuffle",
    rows: int = 1,
    async_op: bool = False,
) -> Tensor | Pending:
    """A value sharded along `dim` of `size` elements by `src_pattern`, sharded by `dst_pattern`
    instead (both as text). `rows` is the number of batch rows flattened into the dim.

    The gradient runs the primitive `backward`. With `async_op` the result is a `Pending`.
    """
    src, dst = (split_of(dim, size, pattern, rows) for pattern in (src_pattern, dst_pattern))
    return _move(x, axis, "reshuffle", backward, src, dst, async_op=async_op)


NODE_FUNCTIONS: dict[str, Callable[..., Tensor | Pending]] = {
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
"""The node function for each forward primitive."""


def make_transition(
    src: AxisLayout, dst: AxisLayout, sizes: Sequence[int | Node], rows: int | Node = 1
) -> tuple[Callable[..., Tensor | Pending], dict[str, Any]]:
    """(function, keyword arguments) such that `function(x, axis, **arguments)` changes the layout
    of x on an axis from `src` to `dst`.

    `sizes` is the shape of the tensor before the axis shards it. `rows` is the number of batch rows
    in a dim with a pattern of rows. Sizes of dims that the axis does not shard are ignored. A size
    that depends on the batch is a graph node. For `src == dst` the function is an identity in both
    directions. Raises AutoparError if the tensor lacks a sharded dim.

    >>> make_transition(parse_layout("S(1)"), parse_layout("R/P"), (4, 10))
    (<function all_gather>, {'dim': 1, 'size': 10, 'backward': 'reduce_scatter'})
    """
    for layout in (src, dst):
        if layout.is_shard and layout.dim >= len(sizes):
            raise AutoparError(
                f"{src} -> {dst} needs a dim {layout.dim}; the tensor's shape is {tuple(sizes)}"
            )
    forward, backward = transition(src, dst)
    if forward == "identity":
        return identity, {"backward": backward}
    arguments: dict[str, Any] = {}
    if forward == "all_to_all":
        arguments = {
            "src_dim": src.dim,
            "dst_dim": dst.dim,
            "src_size": sizes[src.dim],
            "dst_size": sizes[dst.dim],
        }
    elif src.is_shard or dst.is_shard:
        dim = (src if src.is_shard else dst).dim
        arguments = {"dim": dim} if forward == "slice" else {"dim": dim, "size": sizes[dim]}
    arguments["backward"] = backward
    patterns = {"pattern": (src if src.is_shard else dst).pattern}
    if forward in ("all_to_all", "reshuffle"):
        patterns = {"src_pattern": src.pattern, "dst_pattern": dst.pattern}
    arguments |= {
        key: str(pattern)
        for key, pattern in patterns.items()
        if forward == "reshuffle" or not pattern.is_contiguous
    }
    if src.pattern.rows or dst.pattern.rows:
        arguments["rows"] = rows
    return NODE_FUNCTIONS[forward], arguments
