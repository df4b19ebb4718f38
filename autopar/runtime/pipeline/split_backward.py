"""A backward in two parts, for zero bubble: gradients of inputs first, gradients of weights later.

Some nodes of the graph behind a stage's results lead to received values; the first part runs these.
The other nodes lead only to weights, and form groups without connections. If one node of the first
part leads to a group, the group waits. The second part runs that node again, for the gradients of
weights only. If several nodes lead to a group, as for a weight of two layers, the first part runs
the group. One of these nodes may follow another, so running them again would mean running all nodes
in between. The first part also runs the group of a node of `_ONCE`.

Autograd frees a saved tensor with the node that reads it. If the graph must survive for a second
part, it frees saved tensors only with the graph. A micro-batch would then hold everything until its
second part. Here saved tensors lie in slots of this module. The first part empties each slot as it
reads it, like a normal backward, except for slots that the second part reads: the operands that
products multiply by their weights.

A segment or attention core that is recomputed leaves its slots empty. It runs again when the first
slot is read: once, for both parts. (torch.utils.checkpoint would run it again for every few
weights.)
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import networkx as nx
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge, saved_tensors_hooks

from autopar.rewrite.lowerings.kept_shards import Reading, read_as, reading_as

_ONCE = ("NativeGroupNormBackward0",)
"""Names of nodes that run once, for all gradients. torch 2.13's group norm on CPU crashes if it is
asked for those of weights alone and its input is channels last.
"""


class _Slot:
    """Holds the `number`-th tensor that a micro-batch's graph saves. It may be empty until the
    recomputation `again` fills it.
    """

    __slots__ = ("__weakref__", "again", "number", "tensor")

    def __init__(self, number: int, tensor: Tensor | None, again: _Again | None = None) -> None:
        self.number, self.tensor, self.again = number, tensor, again


class _Made(Exception):
    """Raised when a recomputed segment has filled all its slots, to stop it."""


class _Again:
    """A recomputed segment. `make` runs its forward again and puts the tensors that it saves into
    its slots.
    """

    def __init__(self, run: Callable, inputs: tuple[Any, ...]) -> None:
        self.run = run
        self.inputs: tuple[Any, ...] | None = inputs
        self.slots: list[weakref.ref[_Slot]] = []
        self.filled = 0

    def make(self) -> None:
        """Run the forward again and fill the slots, unless that was already done. Raises
        RuntimeError if it saves another number of tensors than at first.
        """
        if self.inputs is None:
            return
        inputs = [
            x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
            for x in self.inputs
        ]
        self.inputs = None
        with (
            contextlib.suppress(_Made),
            torch.enable_grad(),
            saved_tensors_hooks(self._fill, lambda x: x),
        ):
            self.run(*inputs)
        if self.filled != len(self.slots):
            raise RuntimeError(
                f"a segment kept {len(self.slots)} tensors, and {self.filled} when it ran again: a bug in autopar"
            )

    def _fill(self, tensor: Tensor) -> None:
        """Put a saved tensor into its slot, and nothing into the new graph, which is discarded.
        Raises _Made after the last slot.
        """
        if (slot := self.slots[self.filled]()) is not None:
            slot.tensor = tensor.detach()
        self.filled += 1
        if self.filled == len(self.slots):
            raise _Made


class PartedBackward:
    """Runs the backward of a stage in two parts. In forward, saved tensors go into slots; the first
    part empties the slots that the second does not read. All micro-batches must save the same
    tensors in the same order.
    """

    def __init__(self) -> None:
        self._number = 0
        self._counts: dict[int, int] = {}  # micro-batch -> how many tensors its forward has kept
        self._stay: dict[
            int, frozenset[int]
        ] = {}  # how many are kept -> which of them the second part reads
        self._read: set[int] | None = None  # numbers of what is being read, where that is asked
        self._gives_back: frozenset[int] | None = None  # in the first part: what stays

    @contextmanager
    def forward(self, micro_batch: int) -> Iterator[None]:
        """A context for the forward of a micro-batch, in which saved tensors go into slots."""
        self._number = 0
        with saved_tensors_hooks(self._pack, self._unpack):
            yield
        self._counts[micro_batch] = self._number

    def first(
        self,
        micro_batch: int,
        results: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        received: Sequence[Any],
    ) -> tuple[tuple[Tensor | None, ...], Left]:
        """Run the first part of a micro-batch's backward. Returns the gradients of the values that
        the stage `received` (None for those without), and what the second part needs.

        `gradients` are those of the `results`; None for a loss.
        """
        given = map(torch.ones_like, results) if gradients is None else gradients
        ways = _Ways(
            [(x, grad) for x, grad in zip(results, given, strict=True) if x.requires_grad], received
        )
        count = self._counts.pop(micro_batch)
        if count not in self._stay:
            self._stay[count] = self._read_by(ways.waiting)
        self._gives_back = self._stay[count]
        try:
            return ways.run()
        finally:
            self._gives_back = None

    def again(self, run: Callable, *inputs: Any) -> Any:
        """The result of `run` on the inputs. Only the inputs are kept, and `run` runs again for its
        backward.
        """
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
            raise RuntimeError(
                f"a backward in two parts reads kept tensor {slot.number} after it was given back: a bug in autopar"
            )
        if self._gives_back is not None and slot.number not in self._gives_back:
            slot.tensor = None
        return tensor

    def _read_by(self, nodes: Iterable[Node]) -> frozenset[int]:
        """The numbers of the slots that these nodes read, found by reading the nodes' saved
        tensors.
        """
        self._read = found = set[int]()
        try:
            with reading_as(Reading.SHAPE):
                for node in nodes:
                    for name in dir(node):
                        # of an op of torch, or of a Function
                        if name.startswith("_saved_") or name == "saved_tensors":
                            getattr(node, name)
        finally:
            self._read = None
        return frozenset(found)


Given = list[tuple[GradientEdge, Tensor | None]]
"""Edges with their gradients."""


def _apart(given: Given) -> tuple[list[GradientEdge], list[Tensor | None]]:
    return [edge for edge, _ in given], [grad for _, grad in given]


@dataclass(slots=True)
class Left:
    """What the first part of a micro-batch's backward leaves for the second. Each entry has edges
    with their gradients, the edges to weights that they lead to, and a function that restricts a
    Python node to these weights.
    """

    work: list[tuple[Given, list[GradientEdge], Callable[[], None]]] = field(default_factory=list)

    def second(self) -> None:
        """Run the second part: add to the gradients of the weights."""
        while self.work:
            given, weights, narrow = self.work.pop(0)
            narrow()
            torch.autograd.backward(*_apart(given), inputs=weights)


@dataclass(frozen=True, slots=True)
class _Parts:
    """The division of a backward: which part runs which nodes of a graph, by node number."""

    first: frozenset[int]
    """Nodes that lead to received values."""
    waiting: frozenset[int]
    """Nodes that the second part runs."""
    later: tuple[tuple[int | None, tuple[int, ...]], ...]
    """Pairs of a node of the first part (None: the results) and the weights for which the second
    part runs it again.
    """
    shared: tuple[int, ...]
    """Weights whose gradients the first part computes."""


@lru_cache(maxsize=256)
def _parts(
    following: tuple[tuple[int, ...], ...],
    ends: tuple[int, ...],
    roots: frozenset[int],
    weights: frozenset[int],
    once: frozenset[int],
) -> _Parts:
    """The division of a graph in which node n leads to the nodes `following[n]`. All micro-batches
    of a stage have the same division, with other nodes.

    `ends` are the nodes where gradients of received values arrive; `roots` are the nodes of the
    results; `weights` are the nodes that accumulate gradients of parameters. `once` are the nodes
    of `_ONCE`.
    """
    graph = nx.DiGraph(
        (node, after) for node, all_after in enumerate(following) for after in all_after
    )
    graph.add_nodes_from(range(len(following)))
    first = set(ends).union(*(nx.ancestors(graph, node) for node in ends))
    alone = nx.Graph((a, b) for a in graph if a not in first for b in graph.successors(a))
    alone.add_nodes_from(node for node in graph if node not in first)
    waiting: set[int] = set()
    later: dict[int | None, list[int]] = {}
    shared: list[int] = []
    for group in nx.connected_components(alone):
        led: set[int | None] = {
            before for node in group for before in graph.predecessors(node) if before in first
        }
        led |= {None} if group & roots else set()
        if len(led) > 1 or led & once:
            shared += sorted(group & weights)
        else:
            waiting |= group | led - {None}
            later.setdefault(led.pop(), []).extend(sorted(group & weights))
    return _Parts(
        frozenset(first),
        frozenset(waiting),
        tuple((node, tuple(of)) for node, of in later.items()),
        tuple(shared),
    )


class _Ways:
    """The graph behind the results of a stage, with their gradients, and its division into two
    parts.
    """

    def __init__(
        self, results: Sequence[tuple[Tensor, Tensor | None]], received: Sequence[Any]
    ) -> None:
        self.received = received
        self.results = [(get_gradient_edge(x), grad) for x, grad in results]
        self.numbers = {
            node: number
            for number, node in enumerate(dict.fromkeys(edge.node for edge, _ in self.results))
        }
        roots = frozenset(self.numbers.values())
        self.nodes = list(self.numbers)
        self.following: list[tuple[int, ...]] = []
        for node in self.nodes:  # which grows
            after = [following for following, _ in node.next_functions if following is not None]
            for other in after:
                if other not in self.numbers:
                    self.numbers[other] = len(self.nodes)
                    self.nodes.append(other)
            self.following.append(tuple(self.numbers[other] for other in after))
        ends = [
            self.numbers[node]
            for node in (get_gradient_edge(x).node for x in received if _trains(x))
            if node in self.numbers
        ]
        weights = frozenset(
            n
            for n, after in enumerate(self.following)
            if not after and hasattr(self.nodes[n], "variable")
        )
        once = frozenset(n for n, node in enumerate(self.nodes) if node.name() in _ONCE)
        self.parts = _parts(tuple(self.following), tuple(ends), roots, weights, once)

    @property
    def waiting(self) -> list[Node]:
        """The nodes that the second part runs."""
        return [self.nodes[number] for number in self.parts.waiting]

    def run(self) -> tuple[tuple[Tensor | None, ...], Left]:
        """Run the first part. Returns the gradients of received values, and what remains for the
        second part.
        """
        left = Left()
        now: Given = []
        then: Given = []
        for edge, grad in self.results:
            (then if self._waits(self.numbers[edge.node]) else now).append((edge, grad))
        if then:
            of_results = self._edges(dict(self.parts.later).get(None, ()))
            left.work.append((then, of_results, lambda: None))

        def keep(number: int, weights: list[GradientEdge]) -> Callable:
            node = self.nodes[number]
            narrow = self._narrowed(number)
            reading = self._reading(number)

            def hook(given: tuple[Tensor | None, ...]) -> None:
                read_as(reading)  # until the node has run
                of: Given = [
                    (GradientEdge(node, number), grad)
                    for number, grad in enumerate(given)
                    if grad is not None
                ]
                left.work.append((of, weights, narrow))

            return hook

        inputs = [x for x in self.received if _trains(x)]
        shared = self._edges(self.parts.shared)
        found: tuple[Tensor | None, ...] = (None,) * len(inputs)
        if now:
            twice = [(number, of) for number, of in self.parts.later if number is not None]
            handles = [
                self.nodes[number].register_prehook(keep(number, self._edges(weights)))
                for number, weights in twice
            ]
            handles += [self.nodes[number].register_hook(_read_on) for number, _ in twice]
            edges, grads = _apart(now)
            try:
                found = torch.autograd.grad(
                    edges, [*inputs, *shared], grads, retain_graph=True, allow_unused=True
                )
            finally:
                read_as(Reading.LAST)
                for handle in handles:
                    handle.remove()
            found, of_weights = found[: len(inputs)], list(found[len(inputs) :])
            # one after the other, since each is copied where it adds up
            for edge in reversed(shared):
                if (grad := of_weights.pop()) is not None:
                    torch.autograd.backward([edge], [grad])
        of_inputs = iter(found)
        return tuple(next(of_inputs) if _trains(x) else None for x in self.received), left

    def _edges(self, weights: Sequence[int]) -> list[GradientEdge]:
        return [GradientEdge(self.nodes[number], 0) for number in weights]

    def _waits(self, number: int) -> bool:
        """Whether the second part alone runs a node."""
        return number in self.parts.waiting and number not in self.parts.first

    def _reading(self, number: int) -> Reading:
        """What a node that runs in both parts gets in the first, of values that are gathered again.
        Linear layers read them for gradients of weights alone.
        """
        now = set(self.parts.shared) & self._ends_of(number)
        return Reading.EARLIER if now else Reading.SHAPE

    def _ends_of(self, number: int) -> set[int]:
        """The nodes without followers to which a node leads outside the first part."""
        todo, found = [n for n in self.following[number] if n not in self.parts.first], set()
        while todo:
            after = self.following[node := todo.pop()]
            todo += after
            found |= set() if after else {node}
        return found

    def _narrowed(self, number: int) -> Callable[[], None]:
        """Make a node that both parts run compute only what the first part needs now. Calling the
        result switches it to what the second part needs.

        Autograd restricts torch's own nodes to the requested gradients. A Python node must be told
        through `ctx.needs_input_grad`. Its inputs that need a gradient correspond, in order, to its
        following nodes.
        """
        node = self.nodes[number]
        following = self.following[number]
        if not isinstance(node, BackwardCFunction) or sum(node.needs_input_grad) != len(following):
            return lambda: None
        needs, waits = tuple(node.needs_input_grad), map(self._waits, following)
        second = tuple(needed and next(waits) for needed in needs)
        node.needs_input_grad = tuple(
            needed and not waits for needed, waits in zip(needs, second, strict=True)
        )

        def narrow() -> None:
            node.needs_input_grad = second

        return narrow


def _read_on(*_: Any) -> None:
    """Runs after a node that runs in both parts."""
    read_as(Reading.LAST)


def _trains(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad
