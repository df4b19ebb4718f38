"""Replaces in-place ops of an exported program by ops that return new tensors."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, MutableMapping
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.fx import Graph, Node

from autopar.ops.aten import aten
from autopar.trace.edit import call, is_op
from autopar.trace.normalize import expand_feature_dropout, inline_no_grad_regions

_COMPOSITE = "CompositeImplicitAutograd"  # may return its operand, which no schema says

_OTHER_ARGUMENTS = (
    aten.nll_loss.default,
    aten.margin_ranking_loss.default,
    aten.hinge_embedding_loss.default,
)
"""Losses that torch 2.13 decomposes by functions whose `reduction` is a text, where the op has a
number: `nll_loss` without reduction comes out as one number, the others fail.
"""


def functional(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without in-place ops; the program itself if it has none. The graphs of the given
    program may change.
    """
    graphs = [
        m.graph for m in exported.graph_module.modules() if isinstance(m, torch.fx.GraphModule)
    ]  # no-grad regions are graphs too
    for graph in graphs:
        for node in list(graph.nodes):
            # torch.tensor(...) in forward, which has no gradient
            if is_op(node, "detach_") and is_op(node.args[0], "lift_fresh_copy"):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
        rewrite_in_place(graph)
    if not any(_mutates(node) for graph in graphs for node in graph.nodes):
        return exported
    exported.graph.owning_module = exported.graph_module
    inline_no_grad_regions(exported.graph)  # functionalization would forget them
    expand_feature_dropout(exported.graph)  # and make this a Bernoulli draw
    exported.graph_module.recompile()
    with _losses_as_they_are():
        return exported.run_decompositions({})


def _mutates(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


@contextlib.contextmanager
def _losses_as_they_are() -> Iterator[None]:
    """A context in which fake tensors find the shapes of `_OTHER_ARGUMENTS` by the ops themselves."""
    table: MutableMapping[Any, Any] = decomposition_table
    taken = {op: table.pop(op) for op in _OTHER_ARGUMENTS if op in table}
    try:
        yield
    finally:
        table.update(taken)


def rewrite_in_place(graph: Graph) -> None:
    """Replace pointwise in-place ops by those that return a new tensor, in place. Left as they are:
    ops on inputs, on tensors that another one may share memory with, and random ones.
    """
    place = {node: number for number, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        target = _out_of_place(node)
        if target is None or not _is_alone(node.args[0], node, place):
            continue
        with graph.inserting_before(node):
            new = call(graph, node, target, *node.args, **node.kwargs)
        written, old = new.meta["val"], node.meta["val"]
        if written.dtype != old.dtype or str(written.shape) != str(old.shape):
            graph.erase_node(new)  # the op would cast its result to the tensor's dtype
            continue
        place[new] = place[node]
        for user in [*node.args[0].users, *node.users]:
            if place[user] > place[node]:
                user.replace_input_with(node.args[0], new)
                user.replace_input_with(node, new)
        graph.erase_node(node)


def _out_of_place(node: Node) -> torch._ops.OpOverload | None:
    """The op that returns what the in-place op `node` writes; None if `node` is none, is random, or
    is not pointwise.
    """
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return None
    if torch.Tag.pointwise not in op.tags or torch.Tag.nondeterministic_seeded in op.tags:
        return None
    name, overload = op._schema.name.removeprefix("aten::"), op._overloadname
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    if op.namespace != "aten" or packet is None or overload not in packet.overloads():
        return None
    return getattr(packet, overload)


def _is_alone(tensor: object, write: Node, place: dict[Node, int]) -> bool:
    """Whether no other node before `write` may have the memory of `tensor`."""
    if not isinstance(tensor, Node) or tensor.op != "call_function":
        return False
    maker = tensor
    if tensor.target is operator.getitem and isinstance(tensor.args[0], Node):
        maker = tensor.args[0]
        if sum(user.args[1] == tensor.args[1] for user in maker.users) > 1:
            return False
    before = [user for user in tensor.users if place[user] < place[write]]
    return all(map(_returns_new, (maker, *before)))


def _returns_new(node: Node) -> bool:
    """Whether an op surely returns new tensors, and writes to none."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _COMPOSITE):
        return False
    return all(result.alias_info is None for result in op._schema.returns)
