"""Counts the collectives of each block in the rewritten program."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, GraphModule, Node

from autopar.ir.plan import Plan
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES
from autopar.ir.traced import BlockClass, PreparedModel, TracedModel
from autopar.ops.values import value_grads
from autopar.rewrite.collectives.transitions import NODE_FUNCTIONS, wait
from autopar.rewrite.lowerings.context_attention import context_attention
from autopar.rewrite.lowerings.expert_parallel import expert_parallel
from autopar.rewrite.lowerings.vocabulary_parallel import (
    vocab_parallel_cross_entropy,
    vocab_parallel_linear_loss,
    vocab_parallel_statistics,
)
from autopar.rewrite.program import Program, assemble, class_graphs
from autopar.rewrite.root import module_name

Counts = dict[str, dict[str, int]]
"""Counts by direction and collective: {'forward' | 'backward': {'all_reduce over tp': count}}."""

_PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}


def _of_loss(node: Node) -> tuple[dict[str, int], dict[str, int]]:
    """(forward, backward) counts, by name and axis, of the collectives inside vocabulary-parallel
    cross-entropy (`node`). Forward: all-reduces of the largest logit, the sum of exponentials and
    the target's logit. Backward: none.
    """
    return {f"all_reduce over {node.args[2]}": 3}, {}


def _of_statistics(node: Node) -> tuple[dict[str, int], dict[str, int]]:
    """(forward, backward) counts, by name and axis, of the collectives for the statistics of each
    rank's logits: one all-gather in forward.
    """
    axis = node.args[3 if node.target is vocab_parallel_linear_loss else 2]
    return {f"all_gather over {axis}": 1}, {}


def _of_attention(node: Node) -> tuple[dict[str, int], dict[str, int]]:
    """(forward, backward) counts, by name and axis, of the collectives inside context-parallel
    attention: one ring pass of keys and values, or four all-to-alls (queries, keys, values,
    result). Empty for other methods.
    """
    axis, method = node.args[3:5]
    known = {"ring": {f"ring over {axis}": 1}, "ulysses": {f"all_to_all over {axis}": 4}}
    inside = known.get(str(method), {})
    return inside, inside


def _of_experts(node: Node) -> tuple[dict[str, int], dict[str, int]]:
    """(forward, backward) counts, by name and axis, of the collectives inside expert parallelism.
    Forward: all-to-alls of row counts, rows and results. Backward: two, for the gradients of rows
    and results.
    """
    axis = node.args[-2]
    return {f"all_to_all over {axis}": 3}, {f"all_to_all over {axis}": 2}


_INSIDE = {
    vocab_parallel_cross_entropy: _of_loss,
    vocab_parallel_statistics: _of_statistics,
    vocab_parallel_linear_loss: _of_statistics,
    context_attention: _of_attention,
    expert_parallel: _of_experts,
}
"""Functions of a program that communicate internally, with a function that counts their collectives
(forward, backward).
"""


def block_collectives(traced: PreparedModel, plan: Plan) -> dict[str, Counts]:
    """For each block class by name: the counts of collectives that one of its segments runs for a
    micro-batch on rank 0, by direction. If the block is recomputed, the forward ones run twice;
    they are counted once.
    """
    graphs, found = class_graphs(traced, plan, 0, torch.device("meta")), {}
    for segment in traced.segments:
        block = traced.classes[segment.class_index]
        if block.name not in found:
            found[block.name] = _count(graphs[block.name], value_grads(block.graph))
    return found


def program_collectives(traced: TracedModel, plan: Plan) -> dict[str, int]:
    """Counts of the collectives of the whole program for a micro-batch, forward and backward
    together. Keys are such as `all_reduce over tp`. Gradient reduction is not included.
    """
    program = assemble(traced, plan, 0, torch.device("meta"), whole=True)
    total: Counter[str] = Counter()
    for segment in traced.segments:
        for counts in _of_segment(
            program, segment.name, traced.classes[segment.class_index]
        ).values():
            total.update(counts)
    if not isinstance(program.module, GraphModule):
        raise TypeError(f"the program is a {type(program.module).__name__}, not a GraphModule")
    for counts in _count(program.module.graph, dict.fromkeys(traced.graph_inputs, False)).values():
        total.update(counts)
    return dict(total)


def _of_segment(program: Program, segment: str, block: BlockClass) -> Counts:
    return _count(getattr(program.module, module_name(segment)).graph, value_grads(block.graph))


def _count(graph: Graph, grads: dict[str, bool]) -> Counts:
    """Counts the layout changes in a graph that communicate, and the collectives inside its ops.
    `grads` says by name which values have a gradient (default: yes); without one, a change runs in
    forward only.
    """
    forward: Counter[str] = Counter()
    backward: Counter[str] = Counter()
    flowing: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in _INSIDE:
            for counter, inside in zip(
                (forward, backward), _INSIDE[node.target](node), strict=True
            ):
                counter.update(inside)
        if node.target is wait:
            flowing[node] = flowing[node.args[0]]
        name = _PRIMITIVE.get(node.target)
        if name is None:
            continue
        source, axis, whole = node.args[0], node.args[1], node.meta.get("whole")
        known = flowing.get(source, grads.get(source.name, True))
        flowing[node] = known and (whole is None or whole.is_floating_point())
        if name in COLLECTIVE_PRIMITIVES:
            forward[f"{name} over {axis}"] += 1
        if node.kwargs.get("backward") in COLLECTIVE_PRIMITIVES and flowing[node]:
            backward[f"{node.kwargs['backward']} over {axis}"] += 1
    return {"forward": dict(forward), "backward": dict(backward)}
