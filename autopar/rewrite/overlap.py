"""A pass that overlaps communication with compute: it starts collectives early and waits for them
late.

Requires: a graph of local ops in which transitions are nodes. Ensures: the same values and
gradients. A transition that communicates in forward or backward becomes a start and a `wait`. This
needs work between the point where its operand is ready and the first use of its value. That work
hides the collective in forward and, mirrored, in backward. Linear layers that read such a
transition compute the gradient of their weight while their input's gradient is communicated
(`late_gradients.py`).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES
from autopar.ops.aten import aten
from autopar.rewrite.collectives.transitions import NODE_FUNCTIONS, wait
from autopar.rewrite.lowerings.late_gradients import late_gradient, late_linear
from autopar.rewrite.shard import local_shard

_PRIMITIVE: dict[object, str] = {function: name for name, function in NODE_FUNCTIONS.items()}
_LINEARS: dict[object, tuple[str, str, str]] = {
    aten.linear.default: ("input", "weight", "bias"),
    aten.addmm.default: ("mat1", "mat2", "self"),
}
"""Ops that are linear layers, with the schema names of input, weight and bias."""
_FREE = ("aten::reshape", "aten::contiguous")  # no view by their schema, and seldom a copy


def overlap(graph: Graph) -> Graph:
    """Start collectives of layout changes early and wait for them late, in place, where there is
    work in between. Returns the graph. Values and gradients stay the same.

    Later transitions are handled first: if one feeds another, the second starts as soon as the
    first has arrived.
    """
    for node in reversed([n for n in graph.nodes if _communicates(n)]):
        _sink_free_users(node)
        start = _earliest(graph, node)
        linears = _linears_of(node)
        if linears or _has_work_between(node, start):
            _split(graph, node, start, linears)
    graph.lint()
    return graph


def _communicates(node: Node) -> bool:
    return "transition" in node.meta and (
        _PRIMITIVE[node.target] in COLLECTIVE_PRIMITIVES
        or node.kwargs["backward"] in COLLECTIVE_PRIMITIVES
    )


def _linears_of(node: Node) -> list[tuple[Node, Node, Node, Node | None]]:
    """(linear, value that it reads, weight, bias or None) for the linear layers that read a
    transition's value, perhaps through views, and an unchanged parameter. [] unless the transition
    communicates in backward.
    """
    if (
        node.kwargs["backward"] not in COLLECTIVE_PRIMITIVES
        or not node.meta["whole"].is_floating_point()
    ):
        return []
    readers = [(user, node) for user in node.users] + [
        (user, view) for view in node.users if is_view(view) for user in view.users
    ]
    found = []
    for user, value in readers:
        if user.target not in _LINEARS or user.kwargs:
            continue
        x, weight, bias = (argument(user, name) for name in _LINEARS[user.target])
        one_dimensional = bias is None or bias.meta["whole"].dim() == 1
        if x is value and weight.target is local_shard and one_dimensional:
            found.append((user, value, weight, bias))
    return found


def _has_work_between(node: Node, start: Node) -> bool:
    """Whether any node between `start` (excluded) and the first use of the transition `node`
    computes something on the device.
    """
    current = start.next
    while current is not min(node.users):
        if current is not node and _is_work(current):
            return True
        current = current.next
    return False


def _sink_free_users(node: Node) -> None:
    """Move the views of a node's value, and views of these, to just before their first use. In
    place.
    """
    for user in sorted(node.users, reverse=True):
        if user.users and is_view(user):
            _sink_free_users(user)
            if (first := min(user.users)) is not user.next:
                first.prepend(user)


def is_view(node: Node) -> bool:
    """Whether a node counts as a view of its operand: a getitem, a view op, or reshape and
    contiguous, which seldom copy.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    schema = node.target._schema
    return schema.name in _FREE or any(result.alias_info is not None for result in schema.returns)


def _is_work(node: Node) -> bool:
    """Whether a node computes something on the device: a call that is no transition, read of a
    parameter, view or number. A call of a segment is work too.
    """
    if node.op != "call_function":
        return node.op == "call_module"
    passes = "transition" in node.meta or node.target in (wait, local_shard)
    return not passes and "whole" in node.meta and not is_view(node)


def _earliest(graph: Graph, node: Node) -> Node:
    """The node after which a transition can start: the last of its operands and the inputs of the
    graph. Reads of parameters do not count, since these are always ready.
    """
    operands = (n for n in node.all_input_nodes if n.target is not local_shard)
    return max([graph._root, *graph.find_nodes(op="placeholder"), *operands])


def _split(
    graph: Graph, node: Node, start: Node, linears: list[tuple[Node, Node, Node, Node | None]]
) -> None:
    """Split a transition, in place, into a start directly after `start` and a wait before its first
    user. The weight gradients of `linears` are computed between the two in backward.
    """
    for operand in node.all_input_nodes:
        start = _read_before(operand, start)
    if start is not node.prev:
        start.append(node)
    first = min(node.users)
    for linear, value, weight, bias in linears:
        _read_before(weight, first.prev)
        with graph.inserting_before(first):
            late = graph.call_function(late_gradient, (weight,))
        parameter = str(weight.all_input_nodes[0].target)
        late._rename(f"{parameter.removesuffix('_weight')}_gradient")
        transposed = linear.target is aten.addmm.default
        options = (bias, True) if transposed else (bias,) if bias is not None else ()
        linear.target, linear.args = late_linear, (value, weight, late, *options)
    with graph.inserting_before(first):
        value = graph.call_function(wait, (node,))
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)
    node.kwargs = {**node.kwargs, "async_op": True}
    value.meta = {key: node.meta[key] for key in ("whole", "layouts")}
    value._rename(f"{node.name}_done")


def _read_before(operand: Node, place: Node) -> Node:
    """Move the read of a parameter to directly after `place`, unless it is earlier or `operand`
    reads no parameter. Returns the last of the nodes moved, or `place`.
    """
    if operand.target is not local_shard:
        return place
    for read in (*operand.all_input_nodes, operand):
        if place < read:
            place.append(read)
            place = read
    return place
