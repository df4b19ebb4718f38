"""Helpers for editing captured graphs, shared by the normalizing passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument


def is_op(node: Node, *names: str) -> bool:
    """Whether the node calls any overload of an ATen op with one of these names."""
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
    """Replace `node` by another call with the same meta, and with the fake value `val` if given.
    Returns the new node.
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
    """A new call at the insertion point, from the same module as `like`. Its fake value is computed
    from its operands'.
    """
    new = graph.call_function(target, args, kwargs)
    new.meta = dict(like.meta)
    new.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return new


def full(
    graph: Graph, like: Node, value: float | torch.SymInt | torch.SymFloat, val: torch.Tensor
) -> Node:
    """A new 0-d constant at the insertion point, from the same module as `like`. `val` is its fake
    value, with its dtype.
    """
    new = graph.call_function(torch.ops.aten.full.default, ([], value), {"dtype": val.dtype})
    new.meta = dict(like.meta) | {"val": val}
    return new


def replace_argument(user: Node, old: Node, new: Argument) -> None:
    """Give a call another argument wherever it takes `old`."""
    user.args, user.kwargs = torch.fx.map_arg(
        (user.args, user.kwargs), lambda node: new if node is old else node
    )


def product(sizes: Iterable[int | torch.SymInt]) -> int | torch.SymInt:
    """The product of sizes; symbolic if one of them is."""
    result: int | torch.SymInt = 1
    for size in sizes:
        result = result * size
    return result
