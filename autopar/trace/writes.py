"""Rewrites writes into a part of a tensor as ops whose rules let the other dims be sharded.

Assigning to `x[:, 2]` writes a slice of all rows, which functionalization keeps. Without that
slice, each row is written separately.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument
from autopar.ops.aten import aten
from autopar.trace.edit import call, full, is_op


def spell_writes(graph: Graph) -> None:
    """Rewrite writes into parts of tensors, in place. A slice that is written whole becomes its new
    values, and `zero` becomes zeros_like. Masked writes of one value become `where`, and fills
    along an index index_put.
    """
    for node in list(graph.nodes):
        with graph.inserting_before(node):
            written = _written(graph, node)
        if written is not None:
            node.replace_all_uses_with(written)


def _written(graph: Graph, node: Node) -> Node | None:
    """A node with the rewritten value of a write. None if the node stays as it is."""
    if is_op(node, "slice_scatter"):
        source = argument(node, "src")
        return source if _replaces_all(source, node) else None
    if is_op(node, "zero"):
        return call(graph, node, aten.zeros_like.default, node.args[0])
    if is_op(node, "index_fill"):
        target, dim, index = (argument(node, name) for name in ("self", "dim", "index"))
        value = _value(graph, node, argument(node, "value"))
        at = dim % max(target.meta["val"].dim(), 1)
        return call(graph, node, aten.index_put.default, target, [None] * at + [index], value)
    if is_op(node, "index_put") and not argument(node, "accumulate", False):
        return _where(graph, node)
    return None


def _replaces_all(source: Node, node: Node) -> bool:
    """Whether a slice_scatter (`node`) overwrites its whole tensor with `source`: step 1, and the
    same shape and dtype.
    """
    new, val = source.meta["val"], node.meta["val"]
    one_by_one = argument(node, "step", 1) in (None, 1)
    return one_by_one and new.dtype == val.dtype and str(new.shape) == str(val.shape)


def _value(graph: Graph, node: Node, value: Node | float) -> Node:
    """`value` as a node in the dtype of `node`, the tensor that it is written to. Numbers become
    0-d constants.
    """
    val = node.meta["val"]
    if not isinstance(value, Node):
        return full(graph, node, value, val.new_empty([]))
    same = value.meta["val"].dtype == val.dtype
    return value if same else call(graph, node, aten.to.dtype, value, val.dtype)


def _where(graph: Graph, node: Node) -> Node | None:
    """A node for the non-accumulating index_put `x[mask] = value` as `where`. None if the index is
    no single bool mask, or if the value differs between selected places.
    """
    target, indices, value = (argument(node, name) for name in ("self", "indices", "values"))
    masks = [index for index in indices if index is not None]
    if len(masks) != 1 or masks[0].meta["val"].dtype != torch.bool:
        return None
    rank, mask, sizes = target.meta["val"].dim(), masks[0], list(value.meta["val"].shape)
    inside = rank - indices.index(mask) - mask.meta["val"].dim()
    if len(sizes) > inside:
        chosen = len(sizes) - inside - 1
        if str(sizes[chosen]) != "1":
            return None
        sizes[chosen : chosen + 1] = [1] * mask.meta["val"].dim()
        value = _reshaped(graph, node, value, sizes)
    mask = _reshaped(graph, node, mask, [*mask.meta["val"].shape, *[1] * inside])
    value = _value(graph, node, value)
    return call(graph, node, aten.where.self, mask, value, target)


def _reshaped(graph: Graph, node: Node, source: Node, sizes: list) -> Node:
    sizes = [-1 if isinstance(size, torch.SymInt) else size for size in sizes]
    return call(graph, node, aten.reshape.default, source, sizes)
