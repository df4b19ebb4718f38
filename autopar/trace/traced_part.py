"""A part of the graph that torch.export has made so far, which can run again on other tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autopar.ops.aten import aten
from autopar.trace.row_facts import ancestors
from autopar.trace.run_inputs import NotPlain


@dataclass(slots=True)
class TracedNodes:
    """The nodes of the graph of each tensor of forward. A tensor has several if an op changed it, or
    returned it as it was, as `contiguous` may.
    """

    of: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)

    def recording(self, plain: Callable) -> Callable:
        """What torch calls in the place of `set_proxy_slot`."""

        def set_slot(obj: Any, tracer: Any, proxy: Any) -> None:
            plain(obj, tracer, proxy)
            if isinstance(obj, Tensor):
                node = proxy.proxy.node
                # of the placeholders of a tied parameter, torch.export reads the last
                replaces = _is_mutable(node) or node.op == "placeholder"
                before = [] if replaces else self.of.get(obj, [])
                self.of[obj] = [*before, node]

        return set_slot

    def known(self) -> dict[Node, Tensor]:
        """Tensors by the nodes that have their present values."""
        return {node: tensor for tensor, nodes in self.of.items() for node in nodes}

    def ends(self, tensors: Sequence[Any], place: int) -> list[Node]:
        """The first (`place` 0) or last (-1) node of each tensor. Raises NotPlain for another one."""
        found = [self.of.get(each) if isinstance(each, Tensor) else None for each in tensors]
        if not all(found):
            raise NotPlain("it reads a tensor that forward did not make")
        return [nodes[place] for nodes in found if nodes]


@dataclass(frozen=True, slots=True)
class TracedPart:
    """The calls from `inputs` to `outputs`, nodes of a graph, in its order. `others` are tensors of
    forward that these calls read besides, the values of `other_nodes`.
    """

    inputs: list[Node]
    outputs: list[Node]
    calls: list[Node]
    others: list[Tensor]
    other_nodes: list[Node]

    @staticmethod
    def between(nodes: TracedNodes, inputs: Sequence[Any], outputs: Sequence[Any]) -> TracedPart:
        """The part from `inputs` to `outputs`, tensors of forward. Raises NotPlain if a call in
        between cannot run twice, or a tensor is none of forward.
        """
        mode = get_proxy_mode()
        if mode is None:
            raise NotPlain("it is computed outside of forward")
        known, first, last = nodes.known(), nodes.ends(inputs, 0), nodes.ends(outputs, -1)
        behind = ancestors(first, lambda node: list(node.users))

        def is_end(node: Node) -> bool:
            return node in first or node.op != "call_function" or not (node in behind or node not in known)  # fmt: skip

        needed = _with_writes(mode.tracer.graph, set(last), is_end)
        calls, others = [], []
        for node in mode.tracer.graph.nodes:
            is_mode = node.target is torch._C._set_grad_enabled
            if is_mode or (node in needed and not is_end(node)):
                calls.append(node)
            elif node in needed and node not in first:
                others.append(node)
        values = [known[n] if n in known else _constant(mode.tracer, n) for n in others]
        return TracedPart(first, last, calls, values, others)

    def run(self, inputs: Sequence[Tensor], others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for other `inputs` and `others`."""
        env: dict[Node, Any] = dict(zip(self.other_nodes, others, strict=True))
        env |= dict(zip(self.inputs, inputs, strict=True))
        enabled = torch.is_grad_enabled()
        try:
            for node in self.calls:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                if _is_mutable(node) and not torch.is_grad_enabled():
                    raise NotPlain(
                        f"{_name(node)} changes a tensor in place under no_grad, within what is differentiated",
                        "Use the op that returns a new tensor there",
                    )
                result = _target(node)(*args, **kwargs)
                # func.vjp within forward ends the effect of no_grad on gradients of the loss
                env[node] = result if torch.is_grad_enabled() else _detached(result)
        finally:
            torch.set_grad_enabled(enabled)
        return tuple(env[node] for node in self.outputs)


def _with_writes(
    graph: torch.fx.Graph, last: set[Node], is_end: Callable[[Node], bool]
) -> set[Node]:
    """The nodes from which `last` are computed, back to ends, with the writes into any of them.
    Raises NotPlain for a write into an end, or a part of one.
    """
    reads = lambda node: [] if is_end(node) else node.all_input_nodes  # noqa: E731
    needed = ancestors(last, reads)
    while True:
        more = set()
        for node in graph.nodes:
            if node not in needed and _is_mutable(node):
                written = ancestors([node.args[0]], reads)
                if any(not is_end(each) for each in written & needed):
                    more |= ancestors([node], reads)
        for node in needed | more:
            if _is_mutable(node) and not is_end(node) and is_end(_root(node.args[0], is_end)):
                raise NotPlain(
                    f"{_name(node)} changes a tensor in place that is made before what is differentiated",
                    "Use the op that returns a new tensor there",
                )
        if not more:
            return needed
        needed |= more


def _root(node: Any, is_end: Callable[[Node], bool]) -> Node:
    """The node that made the memory of a node's result."""
    while not is_end(node) and node.args and isinstance(node.args[0], Node):
        before, after = node.args[0].meta.get("val"), node.meta.get("val")
        if not isinstance(before, Tensor) or not isinstance(after, Tensor):
            break
        if before.untyped_storage()._cdata != after.untyped_storage()._cdata:
            break
        node = node.args[0]
    return node


def _constant(tracer: Any, node: Node) -> Any:
    if node.op != "get_attr":
        raise NotPlain("it reads a tensor that forward did not make")
    value = tracer.root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _is_mutable(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def _name(node: Node) -> str:
    return str(node.target._schema.name).rpartition("::")[2]  # type: ignore[union-attr]


def _detached(result: Any) -> Any:
    return pytree.tree_map_only(Tensor, lambda each: each.detach(), result)


def _target(node: Node) -> Callable:
    """What a call of the graph does. Batch norm leaves its running statistics as they are."""
    target: Any = node.target
    if target is not aten.batch_norm.default:
        return target
    return lambda x, weight, bias, mean, var, training, *more: target(
        x, weight, bias, *((None, None) if training else (mean, var)), training, *more
    )
