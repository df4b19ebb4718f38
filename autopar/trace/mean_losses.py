"""Rewrites the mean of a loss op as its sum divided by the count or weight over which it averages.

The mean of a whole batch is not the mean of its parts' means if these have different numbers of
valid tokens. From the quotient, `loss_split` can tell what the divisor depends on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from autopar.ir.calls import argument, argument_names, called_function
from autopar.ops.aten import aten
from autopar.ops.values import fake_tensor
from autopar.trace.edit import call, is_op, product, replace

LABEL_COUNT = "label count"
"""`meta` key of the node that counts the labels of a cross-entropy."""

_CLASS_LOSSES = ("cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d")
_ELEMENTWISE_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "binary_cross_entropy",
    "binary_cross_entropy_with_logits", "kl_div", "poisson_nll_loss", "margin_ranking_loss",
    "hinge_embedding_loss",
)  # fmt: skip
_ROW_LOSSES = (
    "multi_margin_loss",
    "multilabel_margin_loss",
    "triplet_margin_loss",
    "cosine_embedding_loss",
)
"""Ops that give one loss per row."""
_NONE, _MEAN, _SUM = 0, 1, 2


def class_means(graph: Graph) -> None:
    """Rewrite means of cross-entropies and NLL losses, in place, as the sum divided by the number,
    or total weight, of valid labels. With probabilities as targets, by the number of samples.
    """
    for node in list(graph.nodes):
        if not is_op(node, *_CLASS_LOSSES) or argument(node, "reduction", _MEAN) != _MEAN:
            continue
        logits, target = node.args[:2]
        total = _with(graph, node, _SUM)
        if target.meta["val"].is_floating_point():  # probabilities: torch averages over samples
            shape = target.meta["val"].shape
            divisor: Argument = product(
                size for dim, size in enumerate(shape) if dim != min(1, len(shape) - 1)
            )
        else:
            with graph.inserting_before(node):
                divisor = _label_count(graph, node, logits, target)
        replace(graph, node, aten.div.Tensor, (total, divisor))


def _label_count(graph: Graph, node: Node, logits: Node, target: Node) -> Node:
    """A node, before `node`, with the number of valid labels. With class weights, the sum of their
    weights.
    """
    emit = partial(call, graph, node)
    ignored, weight = argument(node, "ignore_index", -100), argument(node, "weight")
    counts = emit(aten.ne.Scalar, target, ignored)
    if weight is None:
        number = emit(aten.sum.default, counts)
        number.meta[LABEL_COUNT] = True
        return number
    known = emit(aten.masked_fill.Scalar, target, emit(aten.eq.Scalar, target, ignored), 0)
    weights = emit(aten.index.Tensor, weight, [known])
    return emit(aten.sum.default, emit(aten.mul.Tensor, weights, counts))


def batch_means(graph: Graph) -> None:
    """Rewrite means over the batch dim, and means of element-wise losses, in place, as sums divided
    by the number of elements, which each rank knows.
    """
    for node in list(graph.nodes):
        source = (
            node.args[0].meta.get("val") if node.args and isinstance(node.args[0], Node) else None
        )
        if is_op(node, "mean") and isinstance(source, torch.Tensor):
            dims = argument(node, "dim")
            dims = list(range(source.dim())) if not dims else [d % source.dim() for d in dims]
            if not any(isinstance(source.shape[d], torch.SymInt) for d in dims):
                continue
            args = (node.args[0], dims, bool(argument(node, "keepdim", False)))
            with graph.inserting_before(node):
                total = graph.call_function(aten.sum.dim_IntList, args)
                total.meta = dict(node.meta)
            number = product([source.shape[d] for d in dims])
        elif is_op(node, *_ELEMENTWISE_LOSSES) and argument(node, "reduction", _MEAN) == _MEAN:
            total, number = _with(graph, node, _SUM), product(_broadcast(node))
        else:
            continue
        replace(graph, node, aten.div.Tensor, (total, number))


def row_means(graph: Graph) -> None:
    """Rewrite reduced losses of ops that give one loss per row, in place, as the mean, or sum, of
    the unreduced losses.
    """
    for node in list(graph.nodes):
        if is_op(node, *_ROW_LOSSES) and (reduction := argument(node, "reduction", _MEAN)) != _NONE:
            rows = _with(graph, node, _NONE)
            with graph.inserting_before(node):
                args, kwargs = torch.fx.map_arg((rows.args, rows.kwargs), fake_tensor)
                rows.meta["val"] = called_function(rows)(*args, **kwargs)
            replace(
                graph, node, aten.mean.default if reduction == _MEAN else aten.sum.default, (rows,)
            )


def _with(graph: Graph, node: Node, reduction: int) -> Node:
    """A copy of a loss call with another reduction (0 none, 1 mean, 2 sum), inserted before `node`.
    Its fake value is still that of `node`.
    """
    args, kwargs = list(node.args), dict(node.kwargs)
    for place, name in enumerate(argument_names(node)):
        if name == "reduction" and place < len(args):
            args[place] = reduction
        elif name == "reduction":
            kwargs["reduction"] = reduction
    with graph.inserting_before(node):
        found = graph.call_function(called_function(node), tuple(args), kwargs)
    found.meta = dict(node.meta)
    return found


def _broadcast(node: Node) -> list:
    """The shape, as a list, to which the tensor operands of an element-wise loss broadcast."""
    shapes = [
        n.meta["val"].shape
        for n in node.all_input_nodes
        if isinstance(n.meta.get("val"), torch.Tensor)
    ]
    rank = max(map(len, shapes))
    columns = zip(*([1] * (rank - len(shape)) + list(shape) for shape in shapes), strict=True)
    return [next((size for size in column if str(size) != "1"), 1) for column in columns]
