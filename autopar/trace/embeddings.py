"""Rewrites embedding bags as lookups of rows that are added up."""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from autopar.ir.calls import argument
from autopar.ops.aten import aten
from autopar.trace.edit import call, is_op

_SUM, _MEAN = 0, 1


def expand_bags(graph: Graph) -> None:
    """Rewrite, in place, embedding bags of one fixed size, such as those of 2-D ids, as rows of the
    table that are summed or averaged per bag.

    Other bags stay as they are: of variable size, with the maximum, averaged with padding, or with
    gradients divided by counts.
    """
    for node in list(graph.nodes):
        if is_op(node, "embedding_bag") and (size := _bag_size(node)):
            bags = _rows_of_bags(graph, node, size)
            for user in list(node.users):
                if user.target is operator.getitem and user.args[1] == 0:
                    user.replace_all_uses_with(bags)


def _bag_size(node: Node) -> int:
    """The number of ids in each bag of an embedding_bag call. 0 if it varies, or if the op does
    more than sum or average.
    """
    offsets, options = node.args[2], ("scale_grad_by_freq", "include_last_offset")
    if not (
        isinstance(offsets, Node) and is_op(offsets, "arange") and argument(offsets, "start") == 0
    ):
        return 0
    step, padding = argument(offsets, "step"), argument(node, "padding_idx")
    plain = not any(argument(node, name, False) for name in options)
    modes = (_SUM, _MEAN) if padding in (None, -1) else (_SUM,)
    return step if plain and isinstance(step, int) and argument(node, "mode", _SUM) in modes else 0


def _rows_of_bags(graph: Graph, node: Node, size: int) -> Node:
    weight, ids, factors = node.args[0], node.args[1], argument(node, "per_sample_weights")
    padding = argument(node, "padding_idx")
    padding = -1 if padding is None else padding
    with graph.inserting_before(node):
        like = next(
            user for user in node.users if user.target is operator.getitem and user.args[1] == 0
        )
        bags = call(graph, like, aten.reshape.default, ids, [-1, size])
        rows = call(
            graph,
            like,
            aten.embedding.default,
            weight,
            bags,
            padding,
            False,
            argument(node, "sparse", False),
        )
        if padding != -1:
            kept = call(
                graph,
                like,
                aten.ne.Scalar,
                call(graph, like, aten.reshape.default, ids, [-1, size, 1]),
                padding,
            )
            rows = call(graph, like, aten.mul.Tensor, rows, kept)
        if factors is not None:
            rows = call(
                graph,
                like,
                aten.mul.Tensor,
                rows,
                call(graph, like, aten.reshape.default, factors, [-1, size, 1]),
            )
        return call(
            graph,
            like,
            aten.sum.dim_IntList if argument(node, "mode", _SUM) == _SUM else aten.mean.dim,
            rows,
            [1],
        )
