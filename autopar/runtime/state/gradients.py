"""Gradients of sharded parameters: where they add up, the sums that ranks owe each other, and their norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from weakref import WeakMethod

import torch
from autopar_cost_models.constants import BUCKET_BYTES
from torch import Tensor

from autopar.ir.sharding import RP, AxisLayout
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.primitives import apply_primitive, sum_in_place
from autopar.runtime.state.gathering import Gathering
from autopar.runtime.state.holding import Holding, Trained
from autopar.runtime.state.zero import Moving, buckets, scatter

_Layouts = Mapping[str, Mapping[str, AxisLayout]]
"""The layouts of each parameter on each axis with more than one rank."""


def partial_axes(layouts: Mapping[str, AxisLayout]) -> tuple[str, ...]:
    """The axes over which the gradient of a parameter with these layouts is a partial sum after
    backward.
    """
    return tuple(axis for axis, layout in layouts.items() if layout == RP)


def add_up(
    grads: dict[str, Tensor],
    layouts: _Layouts,
    axes: Mapping[str, AxisGroup],
    put: Callable[[str, Tensor], None],
) -> None:
    """Sum partial gradients (`grads`, by name) over their axes, in place, in buckets of those that
    are partial over the same axis.

    Each sum replaces its summand in `grads`, and is passed to `put(name, sum)`, which should also
    drop its reference to the summand. Memory is thus freed bucket by bucket.
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
    grads: Mapping[str, Tensor],
    layouts: _Layouts,
    axes: Mapping[str, AxisGroup],
    device: torch.device,
) -> Tensor:
    """The 2-norm of all gradients together, equal on all ranks. Squares of shards are summed over
    the axes that shard them (`layouts`), so every rank must call it.
    """
    squares: dict[tuple[str, ...], Tensor] = {(): torch.zeros((), device=device)}
    for name, grad in grads.items():
        sharded = tuple(axis for axis, layout in layouts.get(name, {}).items() if layout.is_shard)
        squares[sharded] = squares.get(sharded, 0.0) + grad.pow(2).sum()
    for sharded in squares:
        for axis in sharded:
            squares[sharded] = apply_primitive(
                "all_reduce", squares[sharded], axes[axis], None, None
            )
    first, *others = squares.values()
    return sum(others, first).sqrt()


class Gradients:
    """The gradients of the trained parameters: backward adds to them, `reduce` sums them over
    ranks, and the optimizer then reads them.
    """

    def __init__(
        self, holding: Holding, trained: Mapping[str, Trained], gathering: Gathering
    ) -> None:
        self.holding, self.trained, self.gathering = holding, trained, gathering
        self._ready: dict[str, Tensor] = {}
        self._travelling: tuple[list[str], Moving] | None = None

    def so_far(self) -> dict[str, Tensor]:
        """The gradients so far, by name, of parameters that have one. After `reduce` these are sums
        over ranks, and under ZeRO this rank's parts.
        """
        found = {name: one.grad for name, one in self.trained.items()}
        return {name: grad for name, grad in found.items() if grad is not None}

    def watch(self, name: str) -> None:
        """Register a hook on a parameter's leaf that passes its gradient to `_take` when backward
        has completed it. No hook is needed if the gradient simply stays in `leaf.grad`.
        """
        holding = self.holding
        if holding.half or holding.sends_each_pass or holding.by_segment:
            # autograd holds its hooks where no collector of garbage looks
            take = WeakMethod(self._take)
            self.trained[name].leaf.register_post_accumulate_grad_hook(
                lambda leaf: (own := take()) and own(name, leaf)
            )

    def _take(self, name: str, leaf: Tensor) -> None:
        """Called when backward has completed a leaf's gradient: move it from `leaf.grad` to where
        gradients add up, or queue it for the next reduction. In fp32 and fp64 it stays if it is
        reduced once a step. The leaf is emptied if it has memory only while a segment runs.
        """
        holding, segments = self.holding, self.gathering.segment_of
        if holding.by_segment:
            self.gathering.free([name])
        if leaf.grad is None or not (holding.half or holding.sends_each_pass):
            return
        grad, leaf.grad = leaf.grad, None
        if not holding.sends_each_pass:
            self._add(name, grad)
            return
        if holding.plan.zero == 3 and any(
            segments.get(other) != segments.get(name) for other in self._ready
        ):
            self._flush()  # of the segment before
        self._ready[name] = grad
        if sum(map(self._size_bytes, self._ready.values())) >= BUCKET_BYTES:
            self._flush()

    def _size_bytes(self, grad: Tensor) -> int:
        return grad.numel() * self.holding.master_dtype.itemsize

    def _flush(self) -> None:
        """Wait for the bucket in transit, if any, and add its parts to the gradients. Then start to
        reduce the ready gradients, which are the next bucket.
        """
        self._arrive()
        self._travelling, self._ready = (list(self._ready), self._scatter(self._ready)), {}

    def _arrive(self) -> None:
        """Wait for the bucket in transit, if any, and add its parts to the gradients."""
        if self._travelling is not None:
            (names, moving), self._travelling = self._travelling, None
            for name, part in zip(names, moving.wait(), strict=True):
                self._add(name, part)

    def _scatter(self, grads: Mapping[str, Tensor]) -> Moving:
        holding = self.holding
        wide = [grad.to(holding.master_dtype) for grad in grads.values()]
        shares = [self.trained[name].share for name in grads]
        layouts = [holding.layouts.get(name, {}) for name in grads]
        return Moving(scatter(wide, shares, layouts, holding.axes))

    def _add(self, name: str, grad: Tensor) -> None:
        one = self.trained[name]
        if one.total is None:
            one.total = grad.to(self.holding.master_dtype)
        else:
            one.total.add_(grad)

    def after_backward(self) -> None:
        """Finish what one micro-batch's backward has started: reduce the gradients that are ready,
        wait for them, and empty the leaves that have memory only for segments.
        """
        if self._ready:
            self._flush()
        self._arrive()
        if self.holding.by_segment:
            self.gathering.free()

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace a parameter's gradient so far by `change(gradient)`. Without a gradient, zeros
        are passed.
        """
        grad, leaf = self.trained[name].grad, self.trained[name].leaf
        if grad is None:
            grad = torch.zeros_like(leaf, dtype=self.holding.master_dtype)
        self.put(name, change(grad))

    def put(self, name: str, grad: Tensor) -> None:
        """Replace a parameter's gradient so far by `grad`."""
        one = self.trained[name]
        if self.holding.half or one.total is not None:
            one.total = grad
        else:
            one.leaf.grad = grad

    def reduce(self) -> None:
        """Sum partial gradients over ranks, in place. Under ZeRO, keep only the part that this rank
        owns. Must be called once a step.
        """
        holding, grads = self.holding, self.so_far()
        if holding.plan.zero and not holding.sends_each_pass:
            cut = [name for name in grads if self.trained[name].share.cuts]
            for names in buckets(cut, lambda name: self._size_bytes(grads[name]), BUCKET_BYTES):
                moving = self._scatter({name: grads[name] for name in names})
                for name, part in zip(names, moving.wait(), strict=True):
                    self.trained[name].total, self.trained[name].leaf.grad = part, None
            grads = self.so_far()
        add_up(grads, holding.layouts_of_masters(grads), holding.axes, self.put)

    def clear(self) -> None:
        """Drop all gradients: set them to None."""
        self.drop(self.trained)

    def drop(self, names: Iterable[str]) -> None:
        """Drop the gradients of these parameters, of which this rank may hold a part only or none."""
        for name in names:
            if (one := self.trained.get(name)) is not None:
                one.leaf.grad = one.master.grad = one.total = None
