"""What a backward in two parts keeps between them: zero bubble computes gradients of inputs first, those of weights later.

Autograd gives back what forward kept with the node that read it, or, if the graph must stay for a second part, not before the graph goes:
a micro-batch would hold all that it kept until its second part, and the gradients that this begins with besides.  Here what forward keeps
is in slots of ours.  The first part empties each slot as it reads it, as a backward in one would, but for those that the second reads: what
products multiplied by their weights, and no more of attention or of what is between products.

A segment that recomputes leaves its slots empty, and runs again when the first of them is read: once, for both parts
(torch.utils.checkpoint would run it again for each few weights).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks


class _Slot:
    """Holds a tensor that some node of a graph has kept, the `number`-th of its micro-batch, or waits for it to be made `again`."""

    __slots__ = ("__weakref__", "again", "number", "tensor")

    def __init__(self, number: int, tensor: Tensor | None, again: _Again | None = None) -> None:
        self.number, self.tensor, self.again = number, tensor, again


class _Made(Exception):
    """All that a segment keeps has been made again."""


class _Again:
    """A segment that fills its slots by running again."""

    def __init__(self, run: Callable, inputs: tuple[Any, ...]) -> None:
        self.run, self.inputs = run, inputs
        self.slots: list[weakref.ref[_Slot]] = []
        self.filled = 0

    def make(self) -> None:
        """Run again, unless that has been."""
        if self.inputs is None:
            return
        inputs = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x for x in self.inputs]
        self.inputs = None
        with contextlib.suppress(_Made), torch.enable_grad(), saved_tensors_hooks(self._fill, lambda x: x):
            self.run(*inputs)
        if self.filled != len(self.slots):
            raise RuntimeError(f"a segment kept {len(self.slots)} tensors, and {self.filled} when it ran again: a bug in autopar")

    def _fill(self, tensor: Tensor) -> None:
        """Put a tensor into its slot, and nothing into the graph, which goes as soon as it is made."""
        if (slot := self.slots[self.filled]()) is not None:
            slot.tensor = tensor.detach()
        self.filled += 1
        if self.filled == len(self.slots):
            raise _Made


class PartedBackward:
    """The slots of a stage, whose micro-batches keep the same tensors in the same order."""

    def __init__(self) -> None:
        self._number = 0
        self._counts: dict[int, int] = {}  # micro-batch -> how many tensors its forward has kept
        self._stay: dict[int, frozenset[int]] = {}  # how many are kept -> which of them the second part reads
        self._read: set[int] | None = None  # numbers of what is being read, where that is asked
        self._gives_back: frozenset[int] | None = None  # in the first part: what stays

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """The forward of a micro-batch, which keeps what it keeps in slots."""
        self._number = 0
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._counts[micro_batch] = self._number

    @contextmanager
    def first(self, micro_batch: int, results: Iterable[Tensor], received: Iterable[Tensor], weights: Iterable[Tensor]) -> Iterator[None]:
        """The first part of its backward: from `results` to what the stage `received`."""
        count = self._counts.pop(micro_batch)
        if count not in self._stay:
            self._stay[count] = self._read_by(_second_part(results, received, weights))
        self._gives_back = self._stay[count]
        try:
            yield
        finally:
            self._gives_back = None

    def again(self, run: Callable, *inputs: Any) -> Any:
        """What `run` makes of the inputs, which alone are kept: it runs again for its backward."""
        segment = _Again(run, inputs)

        def pack(_tensor: Tensor) -> _Slot:
            self._number += 1
            slot = _Slot(self._number, None, segment)
            segment.slots.append(weakref.ref(slot))
            return slot

        with saved_tensors_hooks(pack, self._unpack):
            return run(*inputs)

    def _pack(self, tensor: Tensor) -> _Slot:
        self._number += 1
        return _Slot(self._number, tensor)

    def _unpack(self, slot: _Slot) -> Tensor:
        if self._read is not None:
            self._read.add(slot.number)
            return torch.empty(0)  # nobody computes with it
        if slot.again is not None:
            slot.again.make()
        tensor = slot.tensor
        if tensor is None:
            raise RuntimeError(f"a backward in two parts reads kept tensor {slot.number} after it was given back: a bug in autopar")
        if self._gives_back is not None and slot.number not in self._gives_back:
            slot.tensor = None
        return tensor

    def _read_by(self, nodes: Iterable[Node]) -> frozenset[int]:
        """Numbers of the slots that these nodes read: asked of the nodes themselves, by reading."""
        self._read = set()
        for node in nodes:
            for name in dir(node):
                if name.startswith("_saved_") or name == "saved_tensors":  # of an op of torch, or of a Function
                    getattr(node, name)
        found, self._read = frozenset(self._read), None
        return found


def _second_part(results: Iterable[Tensor], received: Iterable[Tensor], weights: Iterable[Tensor]) -> set[Node]:
    """The nodes that run from where gradients of results of the first part are left to the weights: those that lead to weights alone, and
    those of the first part that these follow directly."""
    after: dict[Node, list[Node]] = {}  # the nodes that lead to a node
    todo = [get_gradient_edge(x).node for x in results if isinstance(x, Tensor) and x.requires_grad]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is not None:
                after.setdefault(following, []).append(node)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)

    def leading_to(tensors: Iterable[Tensor]) -> set[Node]:
        todo = [get_gradient_edge(x).node for x in tensors if isinstance(x, Tensor) and x.requires_grad]
        found = set(todo)
        while todo:
            new = [node for node in after.get(todo.pop(), ()) if node not in found]
            found.update(new)
            todo += new
        return found

    first = leading_to(received)
    alone = leading_to(weights) - first
    return alone | {node for of in alone for node in after.get(of, ()) if node in first}
