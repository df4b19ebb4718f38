"""A pass that rotates queries and keys in one launch: two calls of `autopar::rotary_single` that share their tables become one call of
`autopar::rotary`.

Requires: a graph of local ops.  Ensures: the same values and gradients, to the bit.  It runs on the program of a rank, where both
calls have their layouts: keys may be replicated over an axis that shards queries.
"""

from __future__ import annotations

import operator

import autopar_kernels.rotary  # noqa: F401 (registers the ops)
import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument

_SINGLE = torch.ops.autopar.rotary_single.default
_SHARED = [each.name for each in _SINGLE._schema.arguments if each.name != "x"]


def join_rotations(graph: Graph) -> Graph:
    """Join each two calls of `autopar::rotary_single` that share their tables into one of
    `autopar::rotary`, in place, and return the graph.
    """
    waiting: dict[tuple, Node] = {}
    for node in graph.find_nodes(op="call_function", target=_SINGLE):
        first = waiting.pop(_shared(node), None)
        if first is None or not all(node < user for user in first.users):
            waiting[_shared(node)] = node
        else:
            _join(graph, first, node)
    graph.lint()
    return graph


def _shared(node: Node) -> tuple:
    """What two calls must have in common, as a key: tables, attributes, sizes of all dims but
    heads, and the layouts that shard these dims.
    """
    heads = 2 if argument(node, "heads_last") else 1
    shape = [str(size) for dim, size in enumerate(node.meta["whole"].shape) if dim != heads]
    layouts = [
        (axis, str(layout))
        for axis, layout in node.meta["layouts"].items()
        if layout.dim not in (None, heads)
    ]
    return (*(argument(node, name) for name in _SHARED), *shape, *layouts)


def _join(graph: Graph, first: Node, second: Node) -> None:
    """Replace two calls of `autopar::rotary_single` by one of `autopar::rotary` at the place of
    `second`, in place.
    """
    operands = (argument(first, "x"), argument(second, "x"))
    shared = {name: argument(first, name) for name in _SHARED}
    with graph.inserting_before(second):
        joint = graph.call_function(torch.ops.autopar.rotary.default, operands, shared)
        items = [graph.call_function(operator.getitem, (joint, number)) for number in range(2)]
    joint.meta["op"] = second.meta["op"]
    for old, new in zip((first, second), items, strict=True):
        new.meta = {key: value for key, value in old.meta.items() if key != "op"}
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        new._rename(old.name)
