"""ZeRO: which part of a parameter each rank owns, and the collectives between wholes and parts.

Ranks that hold copies of one tensor share it: over dp, over cp, and over ep unless the tensor
belongs to an expert (Rajbhandari et al., SC 2020). If ZeRO shards within groups, the axis dp means
the ranks inside a group here, and `copies` goes from group to group. A "whole" below is what a
rank's graph reads, a tp or ep shard of the parameter. A "part" is what this rank owns, a chunk of
one dim, as in DTensor's Shard. Over several axes chunks nest, outermost axis first. If sizes are
uneven, the last ranks own less or nothing.

Many tensors share one message: each is arranged by receiving rank, padded, and the rows are
concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from autopar.ir.sharding import RP, AxisLayout, shard_extent
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import start_primitive

SHARING_AXES = ("dp", "ep", "cp")
"""Axes whose ranks may hold copies of a parameter that ZeRO shards, outermost first."""


@dataclass(frozen=True, slots=True)
class Share:
    """How a whole is cut into parts: the axes that cut it, outermost first, each with its split
    (dim, and size before). Without cuts every rank owns the whole.
    """

    cuts: tuple[tuple[str, Split], ...] = ()

    @property
    def dim(self) -> int:
        """The dim that is cut; -1 if none is."""
        return self.cuts[0][1].dim if self.cuts else -1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that cut the whole, outermost first."""
        return tuple(axis for axis, _ in self.cuts)

    def split(self, axis: str) -> Split:
        """The split (dim, and size before) of an axis that cuts the whole."""
        return dict(self.cuts)[axis]

    def part(self, whole: Tensor, axes: Mapping[str, AxisGroup]) -> Tensor:
        """The part of `whole` that this rank owns, as a view."""
        for axis, split in self.cuts:
            whole = pick(whole, split, axes[axis].size, axes[axis].index)
        return whole


def share_of(
    shape: Sequence[int], layouts: Mapping[str, AxisLayout], axes: Mapping[str, AxisGroup]
) -> Share:
    """How ZeRO cuts a parameter whose whole (what graphs read) has this shape: along the dim whose
    largest part is smallest; the first of several.

    Dims that tp or ep shard are not cut, so that a part is a torch DTensor Shard on each axis. Dims
    with fewer elements than ranks are not cut either, since DTensor cannot update them in place. A
    tensor without another dim (a scalar, a bias that tp shards) stays whole.
    """
    copies = tuple(
        axis
        for axis in SHARING_AXES
        if axes[axis].size > 1 and axis in layouts and not layouts[axis].is_shard
    )
    taken = {layout.dim for layout in layouts.values()}
    parts = prod(axes[axis].size for axis in copies)
    free = [dim for dim, size in enumerate(shape) if dim not in taken and size >= parts]
    if not copies or not free:
        return Share()
    dim = min(free, key=lambda d: (ceil(shape[d] / parts) / shape[d], d))
    cuts, size = [], shape[dim]
    for axis in copies:
        cuts.append((axis, Split(dim, size)))
        size = shard_extent(size, axes[axis].size, axes[axis].index)[1]
    return Share(tuple(cuts))


Steps = Generator[None, None, list[Tensor]]
"""A generator that yields while a collective is in transit, and returns tensors."""


class Moving:
    """Tensors in transit through a sequence of collectives. The first one starts at once, the
    others during `wait`. `steps` is the result of `scatter` or `gather`.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._found = steps, None
        self._advance()

    def _advance(self) -> bool:
        try:
            next(self._steps)
        except StopIteration as stop:
            self._found = stop.value
        return self._found is None

    def wait(self) -> list[Tensor]:
        """Wait for all collectives, and return the tensors."""
        while self._found is None:
            self._advance()
        return self._found


def scatter(
    wholes: Sequence[Tensor],
    shares: Sequence[Share],
    layouts: Sequence[Mapping[str, AxisLayout]],
    axes: Mapping[str, AxisGroup],
) -> Steps:
    """Steps for `Moving` that return this rank's parts of the gradients `wholes`, in order.
    Gradient k is cut as `shares[k]` says. It is summed over each axis that cuts it if `layouts[k]`
    says that it is a partial sum there.
    """
    found = list(wholes)
    for axis in SHARING_AXES:
        group, partial = axes[axis], []
        for k, share in enumerate(shares):
            if axis in share.axes and layouts[k][axis] == RP:
                partial.append(k)
            elif axis in share.axes:
                found[k] = pick(found[k], share.split(axis), group.size, group.index).contiguous()
        parts = yield from _reduce_scatter(
            [(found[k], shares[k].split(axis)) for k in partial], group
        )
        for k, part in zip(partial, parts, strict=True):
            found[k] = part
    return found


def gather(
    parts: Sequence[Tensor], shares: Sequence[Share], axes: Mapping[str, AxisGroup]
) -> Steps:
    """Steps for `Moving` that return whole tensors from every rank's `parts`, in order. They are to
    be read by `copied`: the cut dim may appear as two dims, (ranks, elements of each).
    """
    found = list(parts)
    for axis in reversed(SHARING_AXES):
        places = [k for k, share in enumerate(shares) if axis in share.axes]
        wholes = yield from _all_gather(
            [(found[k], shares[k].split(axis)) for k in places], axes[axis]
        )
        for k, whole in zip(places, wholes, strict=True):
            in_two = whole.dim() > parts[k].dim() and axis != shares[k].axes[0]  # more axes follow
            found[k] = whole.flatten(shares[k].dim, shares[k].dim + 1) if in_two else whole
    return found


def gathered(part: Tensor, share: Share, axes: Mapping[str, AxisGroup]) -> Tensor:
    """The whole of one tensor, as `gather` gives it: the cut dim may appear as two dims."""
    return Moving(gather([part], [share], axes)).wait()[0]


def copied(target: Tensor, whole: Tensor) -> None:
    """Copy a result of `gather` into `target`, which has its true shape, without an intermediate
    copy.
    """
    target.view(whole.shape).copy_(whole)


def _reduce_scatter(members: list[tuple[Tensor, Split]], group: AxisGroup) -> Steps:
    """Steps that sum each tensor over the group, and return this rank's chunk of each, in order,
    cut as its split says. All share one collective.
    """
    if not members:
        return []
    rows = [_by_rank(x, split, group.size) for x, split in members]
    lengths, shapes = (
        [row.shape[1] for row in rows],
        [_padded(x.shape, split, group.size) for x, split in members],
    )
    started, splits = (
        start_primitive("reduce_scatter", torch.cat(rows, 1), group, None, Split(0, group.size)),
        [s for _, s in members],
    )
    yield
    found = []
    for split, shape, flat in zip(splits, shapes, started.wait()[0].split(lengths), strict=True):
        chunk = flat.view(shape)
        extent = split.extent(group.size, group.index)
        padded = extent < shape[split.dim]
        found.append(
            chunk.narrow(split.dim, 0, extent).clone(memory_format=torch.contiguous_format)
            if padded
            else chunk
        )
    return found


def _all_gather(members: list[tuple[Tensor, Split]], group: AxisGroup) -> Steps:
    """Steps that return whole tensors from every rank's chunks, in order, in the form of `gather`.
    All share one collective.
    """
    if not members:
        return []
    padded = [_lengthened(x, split.dim, ceil(split.size / group.size)) for x, split in members]
    rows = torch.cat([x.reshape(1, -1) for x in padded], 1)
    started = start_primitive("all_gather", rows, group, Split(0, group.size), None)
    yield
    found = []
    for (_, split), x, flat in zip(
        members, padded, started.wait().split([x.numel() for x in padded], 1), strict=True
    ):
        whole = flat.reshape(group.size, *x.shape).movedim(0, split.dim)
        if group.size * x.shape[split.dim] != split.size:  # padding at the end
            whole = whole.flatten(split.dim, split.dim + 1).narrow(split.dim, 0, split.size)
        found.append(whole)
    return found


def _by_rank(x: Tensor, split: Split, ranks: int) -> Tensor:
    """`x` as a matrix (ranks, n): row r has the chunk of rank r, padded with zeros to the length of
    the longest.
    """
    step = ceil(split.size / ranks)
    whole = _lengthened(x, split.dim, step * ranks)
    return whole.unflatten(split.dim, (ranks, step)).movedim(split.dim, 0).reshape(ranks, -1)


def _padded(shape: Sequence[int], split: Split, ranks: int) -> list[int]:
    return [
        ceil(split.size / ranks) if dim == split.dim else size for dim, size in enumerate(shape)
    ]


def _lengthened(x: Tensor, dim: int, length: int) -> Tensor:
    """x padded with zeros to `length` elements in `dim`."""
    if x.shape[dim] == length:
        return x
    shape = list(x.shape)
    shape[dim] = length - x.shape[dim]
    return torch.cat([x, x.new_zeros(shape)], dim)


def buckets(
    names: Iterable[str], size_bytes: Callable[[str], int], limit_bytes: int
) -> Iterable[list[str]]:
    """The names in groups whose sizes reach at least `limit_bytes`, except for the last group."""
    bucket, total = [], 0
    for name in names:
        bucket.append(name)
        total += size_bytes(name)
        if total >= limit_bytes:
            yield bucket
            bucket, total = [], 0
    if bucket:
        yield bucket
