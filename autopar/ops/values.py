"""Values of a graph: the nodes that ops read, and the values of a class graph by name, with tuples taken apart."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import op_name
from autopar.ops.dims import operands, results


def input_node(node: Node, index: int) -> Node:
    """The node that a call takes as positional argument `index`; TypeError if that argument is no node."""
    value = node.args[index] if index < len(node.args) else None
    if not isinstance(value, Node):
        name = op_name(node) or node.target
        raise TypeError(f"argument {index} of {name} ({node.name}) is {value!r}, not a node")
    return value


def fake_tensor(node: Node) -> torch.Tensor:
    """The fake tensor in a node's `meta['val']`. Raises TypeError if the node stands for none, or
    for several.
    """
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        name = op_name(node) or node.target
        raise TypeError(f"{name} ({node.name}) results in {type(val).__name__}, not in a tensor")
    return val


def is_getitem(node: Node) -> bool:
    """Whether the node selects one result of a tuple. Such a node only names a value; it is not an
    op.
    """
    return node.op == "call_function" and node.target is operator.getitem


def result_index(node: Node) -> int:
    """Which result a getitem node takes out of a tuple, 0 first; TypeError for any other node."""
    index = node.args[1] if is_getitem(node) else None
    if not isinstance(index, int):
        raise TypeError(f"{node.name} ({node.target}) takes no result out of a tuple by its number")
    return index


def value_name(node: Node) -> str:
    """The name of the value of a tensor node: `name`, or `name.i` for result i of an op with
    several results.
    """
    if is_getitem(node):
        return f"{node.all_input_nodes[0].name}.{node.args[1]}"
    return node.name


def result_names(node: Node) -> tuple[str, ...]:
    """Names of the tensors that an op writes, in order: the node's name, or `name.i` for each of
    several.
    """
    if isinstance(node.meta.get("val"), (list, tuple)):
        return tuple(
            f"{node.name}.{i}"
            for i, v in enumerate(node.meta["val"])
            if isinstance(v, torch.Tensor)
        )
    return (node.name,)


def operand_names(node: Node) -> tuple[str, ...]:
    """Names of the tensors that an op reads, in order, with repetitions: `name`, or `name.i` for a
    result of an op with several.
    """
    return tuple(value_name(n) for n in operands(node))


def value_tensors(graph: Graph) -> dict[str, torch.Tensor]:
    """The fake tensor of every value of a graph, by name: `name`, or `name.i` for result i of
    several.
    """
    found: dict[str, Any] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        found.update(zip(result_names(node), results(node), strict=False))
    return found


def value_grads(graph: Graph) -> dict[str, bool]:
    """By name of a value, whether it is floating and a gradient flows through it (`meta['grad']`)."""
    found: dict[str, bool] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        for name, tensor in zip(result_names(node), results(node), strict=False):
            found[name] = bool(node.meta.get("grad")) and tensor.is_floating_point()
    return found


def ops(graph: Graph) -> list[Node]:
    """The nodes of a graph that compute, in order: calls other than getitem."""
    return [n for n in graph.nodes if n.op == "call_function" and not is_getitem(n)]


def output_nodes(graph: Graph) -> tuple[Node, ...]:
    """The nodes that the graph returns, in order."""
    returned: Any = graph.output_node().args[0]  # a tuple of nodes, in every class graph
    return tuple(returned)
