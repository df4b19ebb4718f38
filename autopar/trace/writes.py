"""Rewrites writes into a part of a tensor as ops whose rules let the other dims be sharded.

Assigning to `x[:, 2]` writes a slice of all rows, which functionalization keeps. Without that
slice, each row is written separately.
"""

from __future__ import annotations

from functools import partial

import autopar_kernels.row_places  # noqa: F401 (registers the op)
import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, arguments
from autopar.ops.aten import aten
from autopar.ops.dims import is_symbolic
from autopar.ops.kinds import same
from autopar.trace.edit import call, full, is_op, product


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


def spell_masked_scatter(graph: Graph) -> None:
    """Rewrite `x.masked_scatter(mask, source)` as a gather within each row of the batch, in place,
    wherever the source follows the batch.

    Models of images and text write the features of images over the places that a mask of tokens
    marks. masked_scatter numbers the marked places through the whole batch, so that no part of the
    batch could compute it alone. If each row marks as many places as `source` has features for it,
    the places of a row take the features of the same row. `autopar::row_places` checks that in
    every step.
    """
    for node in list(graph.nodes):
        if is_op(node, "masked_scatter") and (count := _features_a_row(node)) is not None:
            with graph.inserting_before(node):
                found = _gathered(graph, node, count)
            node.replace_all_uses_with(found)


def _features_a_row(node: Node) -> int | None:
    """How many features `source` has for a row of the batch; None if they do not follow the rows.

    A feature is what one entry of the mask marks. A source of the shape of the result is left alone:
    its first features go to the marked places, and the others to none.
    """
    target, _, source = (each.meta["val"].shape for each in arguments(node)[:3])
    if not target or [str(n) for n in node.meta["val"].shape] != [str(n) for n in target]:
        return None
    if not is_symbolic(target[0]) or sum(map(is_symbolic, (*target, *source))) != 2:
        return None
    total = product(source)
    each = total // target[0]
    elements = each.node.maybe_as_int() if isinstance(each, torch.SymInt) else each
    if elements is None or not same(elements * target[0], total):
        return None
    width = product(target[_outer_dims(_unexpanded(arguments(node)[1]), len(target)) :])
    count, rest = divmod(elements, width)
    alike = list(map(str, source)) == list(map(str, target))
    return None if rest or alike else count


def _unexpanded(mask: Node) -> Node:
    while is_op(mask, "expand"):
        mask = arguments(mask)[0]
    return mask


def _outer_dims(mask: Node, rank: int) -> int:
    """The number of dims, at least one, behind which all entries of a mask are equal."""
    sizes = list(mask.meta["val"].shape)
    while sizes and same(sizes[-1], 1):
        sizes.pop()
    return max(len(sizes) + rank - mask.meta["val"].dim(), 1)


def _gathered(graph: Graph, node: Node, count: int) -> Node:
    """What masked_scatter computes, from the features of each row."""
    emit, (target, whole, source) = partial(call, graph, node), arguments(node)
    shape, mask = target.meta["val"].shape, _unexpanded(whole)
    outer = _outer_dims(mask, len(shape))
    width, places = product(shape[outer:]), product(shape[1:outer])
    marked = emit(aten.expand.default, mask, [*shape[:outer], *[1] * (len(shape) - outer)])
    marked = emit(aten.reshape.default, marked, [-1, places])
    index = emit(torch.ops.autopar.row_places.default, marked, count)
    index = emit(aten.expand.default, emit(aten.unsqueeze.default, index, -1), [-1, -1, width])
    features = emit(aten.reshape.default, source, [-1, count, width])
    features = emit(aten.gather.default, features, 1, index)
    features = emit(aten.reshape.default, features, [-1, *shape[1:]])
    return emit(aten.where.self, whole, features, target)
