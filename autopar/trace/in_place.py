"""Rewrites in-place ops whose tensor has no other name, so that a model with only these need not be
traced a second time.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from autopar.ops.aten import aten
from autopar.trace.edit import call

_COMPOSITE = "CompositeImplicitAutograd"  # may return its operand, which no schema says


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
