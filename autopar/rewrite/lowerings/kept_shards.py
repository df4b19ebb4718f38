"""Inputs of linear layers that are kept as shards and gathered again in backward.

    pending = all_gather(x, "tp", ..., async_op=True)          backward runs from here upwards:
    whole = wait(pending)                                        5. start the collective of the gradient of x
    again = gathered_again(whole, x, "tp", ...)                  3. (no node in backward)
    y = late_linear(whole, weight, late, bias, again=again)      2. the gradient of the input, a matrix product
                                                                 1. start to gather x again

Autograd would keep `whole` for the gradient of the weight, which takes tp times the memory of `x`.
Megatron-LM gathers again too (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", MLSys 2023, section 4.2.2). Several layers that read one value share its shard,
and the value is gathered once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.rewrite.collectives.axes import AxisGroup, axis_group
from autopar.rewrite.collectives.patterns import Split, split_of
from autopar.rewrite.collectives.primitives import Started, apply_primitive, start_primitive

Kept = tuple["GatheredAgain", tuple[int, ...], tuple[int, ...], int]
"""A tensor in the memory of a gathered value: the value, and the tensor's size, strides, and offset in
the value."""


class Reading(Enum):
    """What a node of autograd gets that reads a tensor of a gathered value."""

    LAST = "the tensor; the last node that reads the value frees it"
    EARLIER = "the tensor; the node will run again and read it then"
    SHAPE = "a tensor of the same shape without contents, of which nothing is computed"


_reading = Reading.LAST


def read_as(reading: Reading) -> None:
    """What nodes get from now on. A backward in two parts runs some nodes twice."""
    global _reading
    _reading = reading


@contextmanager
def reading_as(reading: Reading) -> Iterator[None]:
    """A context in which nodes get what `reading` says."""
    read_as(reading)
    try:
        yield
    finally:
        read_as(Reading.LAST)


class GatheredAgain:
    """A value of which forward keeps this rank's shard, and which backward gathers when it first
    needs it. It is freed after the last use of a tensor that autograd kept.
    """

    def __init__(self, whole: Tensor, shard: Tensor, group: AxisGroup, split: Split) -> None:
        """`whole` is the contiguous value; `shard`, its part on this rank, has dims of its own if
        `split` cuts the flattened value.
        """
        self._memory = whole.untyped_storage().data_ptr()
        self._dtype, self._device = whole.dtype, whole.device
        self._first, self._count = int(whole.storage_offset()), whole.numel()
        self._shard: Tensor | None = shard.detach()
        self._group, self._split = group, split
        self._started: Started | None = None
        self._whole: Tensor | None = None
        self._uses = 0

    def pack(self, tensor: Tensor) -> Tensor | Kept:
        """What autograd keeps in the place of `tensor`: a description if it lies in the memory of
        the value, else the tensor itself. Call it before the value is freed.
        """
        offset = int(tensor.storage_offset()) - self._first
        reach = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        inside = tensor.numel() and offset >= 0 and offset + reach < self._count
        if not inside or tensor.untyped_storage().data_ptr() != self._memory:
            return tensor
        self._uses += 1
        return self, tuple(tensor.shape), tensor.stride(), offset

    def start(self) -> None:
        """Start to gather the value, unless it is here or on its way. Raises RuntimeError after the
        last use.
        """
        if self._whole is not None or self._started is not None:
            return
        if self._shard is None:
            raise RuntimeError("backward ran a second time through a value that is gathered again")
        self._started = start_primitive("all_gather", self._shard, self._group, self._split)

    def take(self, shape: tuple[int, ...], stride: tuple[int, ...], offset: int) -> Tensor:
        """The tensor of this shape, stride and offset, which `pack` described. The last use frees
        the value and the shard, since a graph may outlive its backward. What it returns otherwise
        is said by `Reading`.
        """
        if _reading is Reading.SHAPE:
            return torch.empty((), dtype=self._dtype, device=self._device).expand(shape)
        self.start()
        started, self._started = self._started, None
        whole = self._whole if started is None else started.wait()
        if whole is None:
            raise RuntimeError("a value that is gathered again has not arrived")
        self._uses -= _reading is Reading.LAST
        self._whole = whole if self._uses else None
        self._shard = self._shard if self._uses else None
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)


def unpack(kept: Tensor | Kept) -> Tensor:
    """The tensor that `GatheredAgain.pack` was given."""
    if isinstance(kept, Tensor):
        return kept
    value, shape, stride, offset = kept
    return value.take(shape, stride, offset)


def gathered_again(
    whole: Tensor,
    shard: Tensor | None,
    axis: str,
    dim: int = 0,
    size: int = 0,
    pattern: str = "",
    rows: int = 1,
) -> GatheredAgain | None:
    """Keep this rank's part of `whole`, a value that all ranks of the axis have.

    Args:
        whole: the value.
        shard: the tensor from which it was gathered, or None to cut the flattened value.
        axis: the mesh axis.
        dim: the dim that `shard` is a part of.
        size: elements of `whole` along `dim`.
        pattern: how `shard` is cut, as in `all_gather`.
        rows: batch rows flattened into `dim`.

    Returns:
        A `GatheredAgain`. None without gradients, or if `whole` is empty or not contiguous.
    """
    if not torch.is_grad_enabled() or not whole.is_contiguous() or not whole.numel():
        return None
    group = axis_group(axis)
    if shard is not None:
        return GatheredAgain(whole, shard, group, split_of(dim, size, pattern, rows))
    flat = whole.detach().reshape(-1)
    split = Split(0, flat.numel())
    return GatheredAgain(whole, apply_primitive("slice", flat, group, None, split), group, split)


def keeping_shards(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of (again, *arguments) that calls `function` on the arguments. Of what autograd
    keeps, tensors in the memory of `again`'s value are gathered again in backward. If `again` is
    None, autograd keeps them as usual.
    """

    def kept(again: GatheredAgain | None, *args: Any, **kwargs: Any) -> Any:
        if again is None:
            return function(*args, **kwargs)
        with saved_tensors_hooks(again.pack, unpack):
            return function(*args, **kwargs)

    kept.__name__ = kept.__qualname__ = f"{function.__name__.replace('.', '_')}_keeping_shards"
    return kept
