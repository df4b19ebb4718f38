"""The values of a class graph by name. Each result of an op with several results is a value."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ops.dims import operands, results


def is_getitem(node: Node) -> bool:
    """Whether the node selects one result of a tuple. Such a node only names a value; it is not an
    op.
    """
    return node.op == "call_function" and node.target is operator.getitem


def value_name(node: Node) -> str:
    """The name of the value of a tensor node: `name`, or `name.i` for result i of an op with
    several results.
    """
    if is_getitem(node):
        return f"{node.all_input_nodes[0].name}.{node.args[1]}"
    return node.name


def result_names(node: Node) -> tuple[str, ...]:
    """Names of the values that an op writes, in order."""
    if isinstance(node.meta.get("val"), (list, tuple)):
        return tuple(
            f"{node.name}.{i}"
            for i, v in enumerate(node.meta["val"])
            if isinstance(v, torch.Tensor)
        )
    return (node.name,)


def operand_names(node: Node) -> tuple[str, ...]:
    """Names of the values that an op reads, in order, with repetitions."""
    return tuple(value_name(n) for n in operands(node))


def value_tensors(graph: Graph) -> dict[str, torch.Tensor]:
    """The fake tensor of every value, by name."""
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        found.update(zip(result_names(node), results(node), strict=False))
    return found


def value_grads(graph: Graph) -> dict[str, bool]:
    """Whether a gradient flows through each value, by name."""
    found: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        for name, tensor in zip(result_names(node), results(node), strict=False):
            found[name] = bool(node.meta.get("grad")) and tensor.is_floating_point()
    return found


def ops(graph: Graph) -> list[Node]:
    """The nodes of a graph that compute: calls other than getitem."""
    return [n for n in graph.nodes if n.op == "call_function" and not is_getitem(n)]


def output_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that the graph returns."""
    returned: Any = graph.output_node().args[0]  # a tuple of nodes, in every class graph
    return tuple(returned)
