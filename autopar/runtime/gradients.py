"""Gradients of sharded parameters: the sums that ranks owe each other, and their norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from autopar.ir.sharding import RP, Layout
from autopar.rewrite.axes import AxisGroup
from autopar.rewrite.primitives import apply_primitive

BUCKET_BYTES = 25 * 2**20
"""Gradients are reduced in buckets of about this size, PyTorch DDP's default (Li et al. 2020, section 4.2.2)."""

Layouts = Mapping[str, Mapping[str, Layout]]
"""The layout of each parameter on each axis with more than one rank."""


def partial_axes(layouts: Mapping[str, Layout]) -> tuple[str, ...]:
    """The axes over which the gradient of a parameter laid out like this is a partial sum after backward."""
    return tuple(axis for axis, layout in layouts.items() if layout == RP)


def add_up(grads: Mapping[str, torch.Tensor], layouts: Layouts, axes: Mapping[str, AxisGroup]) -> None:
    """Add up partial gradients in place, in buckets of gradients that are partial over the same axis."""
    buckets: dict[tuple, list[torch.Tensor]] = {}
    for name, grad in grads.items():
        for axis in partial_axes(layouts.get(name, {})):
            buckets.setdefault((axis, grad.dtype), []).append(grad)
    for (axis, _), members in buckets.items():
        for bucket in _chunks(members, BUCKET_BYTES):
            flat = apply_primitive("all_reduce", torch.cat([g.reshape(-1) for g in bucket]), axes[axis], None, None)
            for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                grad.copy_(part.view_as(grad))


def global_norm(grads: Mapping[str, torch.Tensor], layouts: Layouts, axes: Mapping[str, AxisGroup], device: torch.device) -> torch.Tensor:
    """The 2-norm of all gradients together: squares of shards are added up over the axes that shard them."""
    squares: dict[tuple[str, ...], torch.Tensor] = {(): torch.zeros((), device=device)}
    for name, grad in grads.items():
        sharded = tuple(axis for axis, layout in layouts.get(name, {}).items() if layout.is_shard)
        squares[sharded] = squares.get(sharded, 0.0) + grad.pow(2).sum()
    for sharded in squares:
        for axis in sharded:
            squares[sharded] = apply_primitive("all_reduce", squares[sharded], axes[axis], None, None)
    return sum(squares.values()).sqrt()


def _chunks(tensors: list[torch.Tensor], limit_bytes: int) -> Iterable[list[torch.Tensor]]:
    chunk, size = [], 0
    for tensor in tensors:
        chunk.append(tensor)
        size += tensor.numel() * tensor.element_size()
        if size >= limit_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk
