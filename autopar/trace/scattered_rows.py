"""Rewrites `x.masked_scatter(mask, source)` as a gather within each row of the batch.

Models of images and text write the features of images over the places that a mask of tokens marks.
masked_scatter numbers the marked places through the whole batch, so that no part of the batch could
compute it alone. If each row marks as many places as `source` has features for it, the places of a
row take the features of the same row. `autopar::row_places` checks that in every step.
"""

from __future__ import annotations

from functools import partial

import autopar_kernels.row_places  # noqa: F401 (registers the op)
import torch
from torch.fx import Graph, Node

from autopar.ir.calls import arguments
from autopar.ops.aten import aten
from autopar.ops.dims import is_symbolic
from autopar.ops.kinds import same
from autopar.trace.edit import call, is_op, product


def spell_masked_scatter(graph: Graph) -> None:
    """Rewrite every masked_scatter whose source follows the batch in a graph."""
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
