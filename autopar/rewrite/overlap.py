"""Overlap: start collectives early and wait for them late.

Requires: a graph of local ops in which transitions are nodes.  Ensures: the same values and gradients.  A transition that communicates
forward or backward becomes a start and a `wait` where work lies between the place where its operand is there and the place where its
value is first read: that work hides the collective, forward and, mirrored, backward.  Linear layers that read a transition whose
gradient travels compute the gradient of their weight meanwhile (`late_gradients.py`).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from autopar.ir.sharding import COLLECTIVES
from autopar.rewrite.collectives.transitions import NODE_FUNCTIONS, wait
from autopar.rewrite.lowerings.late_gradients import late_gradient, late_linear
from autopar.rewrite.shard import local_shard

_PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}
_FREE = ("aten::reshape", "aten::contiguous")  # no view by their schema, and seldom a copy


def overlap(graph: Graph) -> Graph:
    """The pass, in place.  Later transitions go first: where one feeds another, the second starts as soon as the first has arrived."""
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
        _PRIMITIVE[node.target] in COLLECTIVES or node.kwargs["backward"] in COLLECTIVES
    )


def _linears_of(node: Node) -> list[tuple[Node, Node]]:
    """(linear, value): the linear layers that read the value of a transition whose gradient travels, maybe through views."""
    if node.kwargs["backward"] not in COLLECTIVES or not node.meta["whole"].is_floating_point():
        return []
    readers = [(user, node) for user in node.users] + [
        (user, view) for view in node.users if is_view(view) for user in view.users
    ]
    return [(user, value) for user, value in readers if _late_arguments(user, value) is not None]


def _late_arguments(node: Node, value: Node) -> tuple[Node, Node | None, bool] | None:
    """(weight, bias, transposed) of a linear layer that reads `value` and a parameter as it is; None for anything else."""
    if node.target is torch.ops.aten.linear.default:
        x, weight, bias, transposed = (
            *node.args[:2],
            node.args[2] if len(node.args) > 2 else None,
            False,
        )
    elif node.target is torch.ops.aten.addmm.default and not node.kwargs:
        bias, x, weight, transposed = *node.args, True
    else:
        return None
    one_dimensional = bias is None or bias.meta["whole"].dim() == 1
    return (
        (weight, bias, transposed)
        if x is value and weight.target is local_shard and one_dimensional
        else None
    )


def _has_work_between(node: Node, start: Node) -> bool:
    """Whether the device has something to do between the earliest start of a transition and the first use of its value."""
    current = start.next
    while current is not min(node.users):
        if current is not node and _is_work(current):
            return True
        current = current.next
    return False


def _sink_free_users(node: Node) -> None:
    """Move the views of a transition's value to where they are read."""
    for user in sorted(node.users, reverse=True):
        if user.users and is_view(user):
            _sink_free_users(user)
            if (first := min(user.users)) is not user.next:
                first.prepend(user)


def is_view(node: Node) -> bool:
    """Whether a node is a view."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target is operator.getitem
    schema = node.target._schema
    return schema.name in _FREE or any(result.alias_info is not None for result in schema.returns)


def _is_work(node: Node) -> bool:
    """Whether a node computes: it is no transition, parameter, view or number."""
    if (
        node.op != "call_function"
        or "transition" in node.meta
        or node.target in (wait, local_shard)
    ):
        return node.op == "call_module"
    return "whole" in node.meta and not is_view(node)


def _earliest(graph: Graph, node: Node) -> Node:
    """The node after which a transition can start: its last operand, or the last input of the graph.  Parameters are there before."""
    after = [
        graph._root,
        *graph.find_nodes(op="placeholder"),
        *(n for n in node.all_input_nodes if n.target is not local_shard),
    ]
    return max(after)


def _split(graph: Graph, node: Node, start: Node, linears: list[tuple[Node, Node]]) -> None:
    """Move the transition to its earliest place and let its users wait; in between, the weights' gradients of `linears`."""
    for operand in node.all_input_nodes:
        start = _read_before(operand, start)
    if start is not node.prev:
        start.append(node)
    first = min(node.users)
    for linear, value in linears:
        weight, bias, transposed = _late_arguments(linear, value)
        _read_before(weight, first.prev)
        with graph.inserting_before(first):
            late = graph.call_function(late_gradient, (weight,))
        late._rename(f"{weight.args[0].target.removesuffix('_weight')}_gradient")
        linear.target = late_linear
        linear.args = (
            (value, weight, late, bias, True)
            if transposed
            else (value, weight, late) + ((bias,) if bias is not None else ())
        )
    with graph.inserting_before(first):
        value = graph.call_function(wait, (node,))
    node.replace_all_uses_with(value, delete_user_cb=lambda user: user is not value)
    node.kwargs = {**node.kwargs, "async_op": True}
    value.meta = {key: node.meta[key] for key in ("whole", "layouts")}
    value._rename(f"{node.name}_done")


def _read_before(operand: Node, place: Node) -> Node:
    """Read a parameter no later than right after `place`; returns what then comes last."""
    if operand.target is not local_shard:
        return place
    for read in (operand.args[0], operand):
        if place < read:
            place.append(read)
            place = read
    return place
