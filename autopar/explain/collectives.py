"""What a program communicates: the collectives of each block, counted in the rewritten graphs themselves."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from autopar.ir.plan import Plan
from autopar.ir.sharding import COLLECTIVES
from autopar.ir.traced import TracedModel
from autopar.ops.values import value_grads
from autopar.rewrite.collectives import NODE_FUNCTIONS
from autopar.rewrite.program import assemble
from autopar.rewrite.shard import ClassSharder
from autopar.rewrite.sharded_ops import vocab_parallel_cross_entropy

Counts = dict[str, dict[str, int]]
"""{'forward' | 'backward': {'all_reduce over tp': how many}}."""

_PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}
_LOSS_ALL_REDUCES = 3
"""Inside the vocab-parallel cross-entropy: the largest logit, the sum of exponentials, the target's logit (rewrite/sharded_ops.py)."""


def block_collectives(traced: TracedModel, plan: Plan) -> dict[str, Counts]:
    """Collectives that one segment of each block class runs per micro-batch, by block name.  Recompute runs the forward ones twice."""
    plans = {block.name: block for block in plan.blocks}
    found = {}
    for block in traced.classes:
        sharder = ClassSharder(block, plans[block.name], plan.mesh, 0, torch.device("meta"))
        graph, grads = sharder.run(), value_grads(block.graph)
        flowing = {node: grads.get(name, False) for name, node in sharder.nodes.items()}
        found[block.name] = _count(graph, flowing)
    return found


def program_collectives(traced: TracedModel, plan: Plan) -> dict[str, int]:
    """Collectives of the whole program per micro-batch, forward and backward, by kind; gradient reduction is not among them."""
    per_block, total = block_collectives(traced, plan), Counter()
    for segment in traced.segments:
        for counts in per_block[traced.classes[segment.class_index].name].values():
            total.update(counts)
    root = assemble(traced, plan, 0, torch.device("meta")).module.graph
    flowing = {n: n.op == "call_module" or n.name.startswith("getitem") for n in root.nodes}
    for counts in _count(root, flowing).values():
        total.update(counts)
    return dict(total)


def _count(graph: Graph, flowing: dict[Node, bool]) -> Counts:
    """Count the transitions of a graph.  Those on values without gradient run forward only."""
    forward, backward = Counter(), Counter()
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is vocab_parallel_cross_entropy:
            forward[f"all_reduce over {_axis(node)}"] += _LOSS_ALL_REDUCES
        name = _PRIMITIVE.get(node.target)
        if name is None:
            continue
        source, axis = node.args[0], node.args[1]
        whole = node.meta.get("whole")
        flowing[node] = flowing.get(source, True) and (whole is None or whole.is_floating_point())
        if name in COLLECTIVES:
            forward[f"{name} over {axis}"] += 1
        if node.kwargs.get("backward") in COLLECTIVES and flowing[node]:
            backward[f"{node.kwargs['backward']} over {axis}"] += 1
    return {"forward": dict(forward), "backward": dict(backward)}


def _axis(node: Node) -> str:
    values = [*node.args, *node.kwargs.values()]
    return next((v for v in values if v in ("dp", "tp")), "tp")
