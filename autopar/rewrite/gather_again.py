"""A pass that keeps the inputs of linear layers as shards, which backward gathers again.

Requires: a graph of local ops in which transitions are nodes, before or after `overlap`. Ensures:
the same values and gradients, and that autograd keeps 1/tp of each input that all ranks of an axis
have. Inputs that are sharded over the axis stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Graph, Node

from autopar.ir.calls import called_function
from autopar.ops.recomputed import activation_of, parameters_of
from autopar.ops.values import input_node
from autopar.rewrite.collectives.transitions import all_gather, wait
from autopar.rewrite.lowerings.kept_shards import gathered_again, keeping_shards
from autopar.rewrite.lowerings.late_gradients import late_linear
from autopar.rewrite.overlap import is_view


def gather_again(graph: Graph, linears: Collection[str], axis: str = "tp") -> Graph:
    """Run the pass in place for the linear layers that come from the ops `linears`, over one mesh
    axis, and return the graph.
    """
    made, kept = parameters_of(graph), {}
    for node in list(graph.nodes):
        if node.meta.get("op") not in linears:
            continue
        late = node.target is late_linear
        read = input_node(node, 0) if late else activation_of(node, made)
        layout = None if read is None else read.meta.get("layouts", {}).get(axis)
        if read is None or layout is None or layout.value.kind != "R":
            continue
        base = _base(read)
        if base not in kept:
            kept[base] = _keep(graph, base, axis)
        if late:
            node.kwargs = {**node.kwargs, "again": kept[base]}
        else:
            node.target = keeping_shards(called_function(node))
            node.args = (kept[base], *node.args)
    graph.lint()
    return graph


def _base(node: Node) -> Node:
    """The value of which a node is a view; the node itself if it is none."""
    while is_view(node) and len(node.all_input_nodes) == 1:
        node = node.all_input_nodes[0]
    return node


def _keep(graph: Graph, whole: Node, axis: str) -> Node:
    """Insert the call that keeps this rank's shard of the value `whole`, after the value, and
    return it. It keeps the tensor from which `whole` was gathered over `axis`, if it was.
    """
    made = input_node(whole, 0) if whole.target is wait else whole
    with graph.inserting_after(whole):
        if made.target is all_gather and made.args[1] == axis:
            how = {k: v for k, v in made.kwargs.items() if k not in ("backward", "async_op")}
            node = graph.call_function(gathered_again, (whole, input_node(made, 0), axis), how)
        else:
            node = graph.call_function(gathered_again, (whole, None, axis))
    node._rename(f"{whole.name}_again")
    return node
