"""How a loss grows with the batch: a sum over samples doubles with twice the rows, a mean does not."""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.traced import MEAN_COUNT, Source, TracedModel
from autopar.ops.dims import Call, is_symbolic, operands
from autopar.ops.rules import op_dims
from autopar.ops.values import is_getitem, ops, output_nodes


def loss_adds_up(traced: TracedModel) -> bool:
    """Whether micro-batch losses add up to the loss of their union (a sum over samples) instead of averaging to it (a mean).

    Counts powers of the batch size through the graph: a sum over a batch dim adds one, a product adds its factors', a quotient
    subtracts its divisor's.  Degree 1 at the loss is a sum.  A mean over valid tokens counts as degree 0, since its divisor is a count.
    """
    degrees: dict[Source, int] = {}
    for index, segment in enumerate(traced.segments):
        graph = traced.classes[segment.class_index].graph
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        known: dict[Node, int] = {}
        for node, source in zip(placeholders, segment.inputs, strict=True):
            known[node] = 1 if source.name == MEAN_COUNT else degrees.get(source, 0)
        for node in ops(graph):
            known[node] = _degree(node, known)
        for k, node in enumerate(output_nodes(graph)):
            degrees[Source(index, k)] = _of(node, known)
    return degrees.get(Source(len(traced.segments) - 1, 0), 0) >= 1


def _of(node: Node, known: dict[Node, int]) -> int:
    return known.get(node.args[0] if is_getitem(node) else node, 0)


def _degree(node: Node, known: dict[Node, int]) -> int:
    found = [_of(n, known) for n in operands(node)]
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    sizes = sum(_size_degree(a) for a in node.args)
    dims = op_dims(node)
    if name == "aten::div":
        total = found[0] - sum(found[1:]) - sizes if found else 0
    elif name == "aten::mul" or (dims is not None and dims.contraction):
        total = sum(found) + (sizes if name == "aten::mul" else 0)
    else:
        total = max(found, default=0)
    if dims is None:  # a loss op without a rule says itself whether it sums
        return total + int(bool(name) and Call(node).arg("reduction") == 2)
    return total + sum(is_symbolic(dims.sizes[letter]) for letter in dims.summed)


def _size_degree(argument) -> int:
    """1 for a number that is proportional to the batch size."""
    return int(isinstance(argument, (torch.SymInt, torch.SymFloat)) and bool(argument.node.expr.free_symbols))
