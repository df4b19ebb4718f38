"""How a loss grows with the batch: a sum over samples doubles with twice the rows, a mean does not."""

from __future__ import annotations

from math import log2

import torch
from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.ir.traced import MEAN_COUNT, Source, TracedModel
from autopar.ops.dims import Call, is_symbolic, operands, results
from autopar.ops.rules import op_dims
from autopar.ops.values import is_getitem, ops, output_nodes


def loss_adds_up(traced: TracedModel) -> bool | None:
    """Whether micro-batch losses add up to the loss of their union (a sum over samples) instead of averaging to it (a mean).

    Counts powers of the batch size through the graph: a sum over a batch dim adds one, a product adds its factors', a quotient
    subtracts its divisor's.  Degree 1 at the loss is a sum.  A mean over valid tokens counts as degree 0, since its divisor is a count.
    None if an op mixes samples, or has no rule and makes the batch disappear, so that nobody can tell.
    """
    degrees: dict[Source, float] = {}
    for index, segment in enumerate(traced.segments):
        graph = traced.classes[segment.class_index].graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        known: dict[Node, float] = {}
        for node, source in zip(placeholders, segment.inputs, strict=True):
            known[node] = 1 if source.name == MEAN_COUNT else degrees.get(source, 0)
        for node in ops(graph):
            known[node] = _degree(node, known)
        for k, node in enumerate(output_nodes(graph)):
            degrees[Source(index, k)] = _of(node, known)
    degree = degrees.get(Source(len(traced.segments) - 1, 0), 0)
    return None if degree != degree else degree >= 1


_UNKNOWN = float("nan")
_COMPARISONS = ("aten::gt", "aten::ge", "aten::lt", "aten::le", "aten::eq", "aten::ne", "aten::isnan", "aten::logical_not")
"""Tell no size."""


def _of(node: Node, known: dict[Node, float]) -> float:
    return known.get(node.args[0] if is_getitem(node) else node, 0)


def _degree(node: Node, known: dict[Node, float]) -> float:
    found = [_of(n, known) for n in operands(node)]
    name = op_name(node)
    sizes = sum(_size_degree(a) for a in node.args)
    dims = op_dims(node)
    if name in _COMPARISONS:
        return 0
    if name == "aten::where":
        found = found[1:]
    if name == "aten::reciprocal":
        total = -found[0]
    elif name == "aten::div":
        total = found[0] - sum(found[1:]) - sizes if found else 0
    elif name == "aten::mul" or (dims is not None and dims.contraction):
        total = sum(found) + (sizes if name == "aten::mul" else 0)
    elif name in ("aten::add", "aten::sub") and len(set(found)) > 1:
        total = _UNKNOWN  # a sum over samples and a mean, or a term without samples: micro-batches can neither add up nor average it
    else:
        total = _UNKNOWN if any(d != d for d in found) else max(found, default=0)
    if name in ("aten::full", "aten::new_full", "aten::full_like", "aten::scalar_tensor"):
        total += sizes  # filled with a number that depends on the batch
    if dims is not None and any(x.startswith("!") and is_symbolic(size) for x, size in dims.sizes.items()):
        return _UNKNOWN  # samples are mixed, as a softmax over the batch does
    if dims is not None:
        return total + sum(is_symbolic(dims.sizes[letter]) for letter in dims.summed)
    reduction = Call(node).arg("reduction") if name else None
    if reduction is not None:  # a loss op without a rule says itself whether it sums
        return total + int(reduction == 2)
    return _UNKNOWN if node.meta.get("grad") and _has_batch(operands(node)) and not _has_batch([node]) else total


def _has_batch(nodes: list[Node]) -> bool:
    return any(is_symbolic(size) for node in nodes for tensor in results(node) for size in tensor.shape)


def _size_degree(argument) -> int:
    """The power of the batch size to which a number is proportional."""
    if not isinstance(argument, (torch.SymInt, torch.SymFloat)):
        return 0
    expr = argument.node.expr
    few, many = (float(expr.subs({symbol: rows for symbol in expr.free_symbols})) for rows in (2**20, 2**21))
    return round(log2(many / few)) if few > 0 and many > 0 else 0
