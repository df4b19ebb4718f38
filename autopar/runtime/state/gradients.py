"""Gradients of sharded parameters: sums over ranks, and the global norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from autopar_cost_models.constants import BUCKET_BYTES

from autopar.ir.sharding import RP, Layout
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.primitives import apply_primitive, sum_in_place
from autopar.runtime.state.zero import buckets

Layouts = Mapping[str, Mapping[str, Layout]]
"""The layouts of each parameter on each axis with more than one rank."""


def partial_axes(layouts: Mapping[str, Layout]) -> tuple[str, ...]:
    """The axes over which the gradient of a parameter with these layouts is a partial sum after
    backward.
    """
    return tuple(axis for axis, layout in layouts.items() if layout == RP)


def add_up(
    grads: dict[str, torch.Tensor],
    layouts: Layouts,
    axes: Mapping[str, AxisGroup],
    put: Callable[[str, torch.Tensor], None],
) -> None:
    """Sum partial gradients over their axes, in buckets of those that are partial over the same
    axis.

    Each sum replaces its summand in `grads`, and is passed to `put`, which should also drop its
    reference to the summand. Memory is thus freed bucket by bucket.
    """
    members: dict[tuple, list[str]] = {}
    for name, grad in grads.items():
        for axis in partial_axes(layouts.get(name, {})):
            members.setdefault((axis, grad.dtype), []).append(name)
    for (axis, _), names in members.items():
        for bucket in buckets(names, lambda name: grads[name].nbytes, BUCKET_BYTES):
            flat = sum_in_place(torch.cat([grads[name].reshape(-1) for name in bucket]), axes[axis])
            for name, total in zip(
                bucket, flat.split([grads[name].numel() for name in bucket]), strict=True
            ):
                grads[name] = total.view(grads[name].shape)
                put(name, grads[name])


def global_norm(
    grads: Mapping[str, torch.Tensor],
    layouts: Layouts,
    axes: Mapping[str, AxisGroup],
    device: torch.device,
) -> torch.Tensor:
    """The 2-norm of all gradients together. Squares of shards are summed over the axes that shard
    them.
    """
    squares: dict[tuple[str, ...], torch.Tensor] = {(): torch.zeros((), device=device)}
    for name, grad in grads.items():
        sharded = tuple(axis for axis, layout in layouts.get(name, {}).items() if layout.is_shard)
        squares[sharded] = squares.get(sharded, 0.0) + grad.pow(2).sum()
    for sharded in squares:
        for axis in sharded:
            squares[sharded] = apply_primitive(
                "all_reduce", squares[sharded], axes[axis], None, None
            )
    return sum(squares.values()).sqrt()
