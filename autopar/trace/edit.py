"""Helpers for editing captured graphs, shared by the normalizing passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument


def is_op(node: Node, *names: str) -> bool:
    """Whether the node calls any overload of an op with one of these names, ATen's without
    `aten::`.
    """
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.name.removeprefix("aten::") in names
    )


def replace(
    graph: Graph,
    node: Node,
    target: Callable,
    args: tuple[Argument, ...],
    kwargs: dict[str, Argument] | None = None,
    val: torch.Tensor | None = None,
) -> Node:
    """Replace `node` in the graph by a call of `target`, and erase it. Returns the new node, which
    has the meta of the old one, and the fake value `val` if given.
    """
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs or {})
    new.meta = dict(node.meta)
    if val is not None:
        new.meta["val"] = val
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return new


def call(graph: Graph, like: Node, target: Callable, *args: Argument, **kwargs: Argument) -> Node:
    """Insert a call at the graph's insertion point and return it. It has the meta of `like`; its
    fake value is computed from its operands'.
    """
    new = graph.call_function(target, args, kwargs)
    new.meta = dict(like.meta)
    new.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return new


def full(
    graph: Graph, like: Node, value: float | torch.SymInt | torch.SymFloat, val: torch.Tensor
) -> Node:
    """Insert a 0-d constant at the graph's insertion point and return it. It has the meta of `like`
    and the fake value `val`, whose dtype it takes.
    """
    new = graph.call_function(torch.ops.aten.full.default, ([], value), {"dtype": val.dtype})
    new.meta = dict(like.meta) | {"val": val}
    return new


def replace_argument(user: Node, old: Node, new: Argument) -> None:
    """Make the call `user`, in place, take `new` wherever it takes the node `old`."""
    user.args, user.kwargs = torch.fx.map_arg(
        (user.args, user.kwargs), lambda node: new if node is old else node
    )


def product(sizes: Iterable[int | torch.SymInt]) -> int | torch.SymInt:
    """The product of sizes; symbolic if one of them is, and 1 for none."""
    result: int | torch.SymInt = 1
    for size in sizes:
        result = result * size
    return result
