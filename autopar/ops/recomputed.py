"""Selective recomputation: which ops of a layer run again, and which results are kept.

Mode `gather` gathers the inputs of linear layers again. Mode `selective` runs the attention core
again, which keeps much memory and costs little time. Mode `op` runs all ops again except expensive
ones.

The core lies between queries, keys, values and the resulting context: scores, softmax, dropout,
context (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", MLSys
2023, section 5). In a graph that is every fused attention op. It is also every op on a path from
one product of two activations to another without a parameter.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from autopar.ir.calls import argument, is_attention, op_name
from autopar.ops.values import ops, value_name

_PRODUCTS = {f"aten::{name}" for name in ("matmul", "bmm", "baddbmm", "einsum")}
_LINEAR_FACTORS = {
    "aten::linear": ("input", "weight"),
    "aten::addmm": ("mat1", "mat2"),
    "aten::mm": ("self", "mat2"),
    "aten::matmul": ("self", "other"),
}
"""Ops that are linear layers if one factor is a parameter, with the schema names of the factors."""


def attention_core(graph: Graph) -> frozenset[str]:
    """Names of the ops of a class graph that mode `selective` runs again in backward. They are
    attention ops, and all ops from one product of activations to another (scores, softmax, context)
    without a parameter.
    """
    parameters = parameters_of(graph)
    calls = [
        node
        for node in graph.nodes
        if node.op == "call_function" and not parameters & set(node.all_input_nodes)
    ]
    products = {node for node in calls if op_name(node) in _PRODUCTS}
    after: dict[Node, bool] = {}  # reached from a product, itself left out
    for node in calls:
        after[node] = any(
            source in products or after.get(source, False) for source in node.all_input_nodes
        )
    before: dict[Node, bool] = {}
    for node in reversed(calls):
        before[node] = any(user in products or before.get(user, False) for user in node.users)
    between = {
        node.name
        for node in calls
        if (after[node] and before[node]) or (node in products and (after[node] or before[node]))
    }
    return frozenset(between | {node.name for node in ops(graph) if is_attention(node)})


def dear_ops(graph: Graph) -> frozenset[str]:
    """Names of the expensive ops whose results mode `op` keeps for backward: attention, and the
    first, third, fifth, ... product by a parameter.
    """
    made = parameters_of(graph)
    products = [
        node
        for node in ops(graph)
        if op_name(node) in _LINEAR_FACTORS and made & set(node.all_input_nodes)
    ]
    return frozenset(
        node.name for node in (*products[::2], *(n for n in ops(graph) if is_attention(n)))
    )


def linear_inputs(graph: Graph) -> dict[str, str]:
    """The activation that each linear layer reads: op name -> value name."""
    made = parameters_of(graph)
    read = {node.name: activation_of(node, made) for node in ops(graph)}
    return {op: value_name(value) for op, value in read.items() if value is not None}


def activation_of(node: Node, parameters: Collection[Node]) -> Node | None:
    """The activation that a linear layer reads. None for another call, or if not exactly one factor
    is an activation. `parameters` are the nodes of `parameters_of`.
    """
    factors = [argument(node, name) for name in _LINEAR_FACTORS.get(op_name(node), ())]
    read = [factor for factor in factors if factor not in parameters]
    return read[0] if len(read) == 1 else None


def parameters_of(graph: Graph) -> set[Node]:
    """Nodes of parameters and buffers, and of values computed from these alone."""
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr" or (
            node.op == "call_function"
            and node.all_input_nodes
            and set(node.all_input_nodes) <= found
        ):
            found.add(node)
    return found
