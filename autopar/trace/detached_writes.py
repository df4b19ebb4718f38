"""Writes to tensors that forward has detached from others, with which they share memory.

After `d = x.detach()` or `d = x.data`, a write to `d` changes the values of x, and x keeps the
gradient that it had. torch.export sees one memory, so that x would get the gradient of what is
written. Here such a write has no gradient. Then `d` has none either, unlike in eager PyTorch, and
what reads it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.trace.registered_tensors import storage_of
from autopar.trace.user_lines import line_now

DATA = ".data"
_READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]  # the stub says Tensor, not descriptor
_DETACHES = {_READ_DATA: DATA, Tensor.detach: ".detach()", torch.detach: "torch.detach()"}


@dataclass(slots=True, eq=False)
class Detached:
    """What one call of `how` has detached from `base`. `line` is the user's line that first wrote a
    value with a gradient into it; '' if none did.
    """

    how: str
    base: Tensor
    line: str = ""


class DetachedTensors:
    """The tensors that a call of forward has detached, and views of them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, Detached]] = {}  # kept, so that no id is given again
        self._in_place: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, tensor: object) -> Detached | None:
        """What `tensor` belongs to; None if it was not detached."""
        return self._known.get(id(tensor), (None, None))[1]

    def detach_(self, tensor: Tensor) -> None:
        """Detach a tensor in place: `as_detached` gives what is read from now on."""
        found = tensor.detach()
        self._known[id(found)] = found, Detached(".detach_()", tensor)
        self._in_place[id(tensor)] = tensor, found

    def as_detached(self, values: Any) -> Any:
        """`values`, with detached tensors in the place of those that were detached in place."""
        if not self._in_place:
            return values
        return pytree.tree_map(lambda x: self._in_place.get(id(x), (x, x))[1], values)

    def is_detached(self, tensor: Tensor) -> bool:
        """Whether a tensor was detached in place."""
        return id(tensor) in self._in_place

    def follow(self, func: Callable, args: tuple, kwargs: dict, found: Any) -> None:
        """Remember the result of a torch function, if it is detached or a view of such a tensor."""
        if not self._known and func not in _DETACHES:
            return
        first = next(tensors_in(args, kwargs), None)
        if first is None:
            return
        known = self.of(first)
        if func in _DETACHES:
            base = first if known is None else known.base
            self._known[id(found)] = found, Detached(_DETACHES[func], base)
        elif known is not None:
            for view in tensors_in(found):
                if storage_of(view) == storage_of(first):
                    self._known.setdefault(id(view), (view, known))

    def without_gradient(self, written: list[Any], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """The arguments of a function that writes to `written`: without gradients, if that is
        detached. Raises AutoparError for a function that writes to other tensors too.
        """
        into = [self.of(tensor) for tensor in written]
        if not any(into) or not torch.is_grad_enabled():
            return args, kwargs
        if not any(map(self._has_gradient, tensors_in(args, kwargs))):
            return args, kwargs
        line = line_now()
        for detached in into:
            if detached is None:
                raise AutoparError(
                    f"forward writes values with a gradient{line} into a detached tensor and another one at once: write them one by one"
                )
            detached.line = detached.line or line
        return pytree.tree_map(_detached, (args, kwargs))

    def check_read(self, func: Callable, args: tuple, kwargs: dict, found: Any) -> None:
        """Raise AutoparError if a result has a gradient in eager PyTorch alone."""
        if not self._known or not torch.is_grad_enabled() or func in _DETACHES:
            return
        new = (x for x in tensors_in(found) if self.of(x) is None)
        if not any(x.is_floating_point() or x.is_complex() for x in new):
            return
        for detached in filter(None, map(self.of, tensors_in(args, kwargs))):
            if detached.line:
                raise AutoparError(
                    f"forward reads a detached tensor{line_now()}, into which it has written values with a gradient{detached.line}. It "
                    f"has that gradient, and the tensor before {detached.how} has not: write values without one (.detach()), or compute "
                    "with the values themselves"
                )

    def _has_gradient(self, tensor: Tensor) -> bool:
        """Whether a tensor has a gradient in eager PyTorch."""
        detached = self.of(tensor)
        return tensor.requires_grad or (detached is not None and bool(detached.line))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """The tensors among values, and in their containers."""
    return (x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
