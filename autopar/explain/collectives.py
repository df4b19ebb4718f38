"""What a program communicates: the collectives of each block, counted in the rewritten program itself."""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from autopar.ir.plan import Plan
from autopar.ir.sharding import COLLECTIVES
from autopar.ir.traced import TracedModel
from autopar.ops.values import value_grads
from autopar.rewrite.collectives import NODE_FUNCTIONS
from autopar.rewrite.program import Program, assemble, module_name
from autopar.rewrite.sharded_ops import vocab_parallel_cross_entropy

Counts = dict[str, dict[str, int]]
"""{'forward' | 'backward': {'all_reduce over tp': how many}}."""

_PRIMITIVE = {function: name for name, function in NODE_FUNCTIONS.items()}
_LOSS_ALL_REDUCES = 3
"""Inside the vocab-parallel cross-entropy: the largest logit, the sum of exponentials, the target's logit (rewrite/sharded_ops.py)."""


def block_collectives(traced: TracedModel, plan: Plan) -> dict[str, Counts]:
    """Collectives that one segment of each block class runs per micro-batch, by block name.  Recompute runs the forward ones twice."""
    return _by_block(traced, assemble(traced, plan, 0, torch.device("meta")))


def program_collectives(traced: TracedModel, plan: Plan) -> dict[str, int]:
    """Collectives of the whole program per micro-batch, forward and backward, by kind; gradient reduction is not among them."""
    program = assemble(traced, plan, 0, torch.device("meta"))
    per_block, total = _by_block(traced, program), Counter()
    for segment in traced.segments:
        for counts in per_block[traced.classes[segment.class_index].name].values():
            total.update(counts)
    for counts in _count(program.module.graph, dict.fromkeys(traced.inputs, False)).values():
        total.update(counts)
    return dict(total)


def _by_block(traced: TracedModel, program: Program) -> dict[str, Counts]:
    found: dict[str, Counts] = {}
    for segment in traced.segments:
        block = traced.classes[segment.class_index]
        if block.name not in found:
            found[block.name] = _count(getattr(program.module, module_name(segment.name)).graph, value_grads(block.graph))
    return found


def _count(graph: Graph, grads: dict[str, bool]) -> Counts:
    """Count the transitions of a graph.  Those on values without gradient (`grads` by name; unknown ones have one) run forward only."""
    forward, backward = Counter(), Counter()
    flowing: dict[Node, bool] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is vocab_parallel_cross_entropy:
            forward[f"all_reduce over {_axis(node)}"] += _LOSS_ALL_REDUCES
        name = _PRIMITIVE.get(node.target)
        if name is None:
            continue
        source, axis, whole = node.args[0], node.args[1], node.meta.get("whole")
        known = flowing.get(source, grads.get(source.name, True))
        flowing[node] = known and (whole is None or whole.is_floating_point())
        if name in COLLECTIVES:
            forward[f"{name} over {axis}"] += 1
        if node.kwargs.get("backward") in COLLECTIVES and flowing[node]:
            backward[f"{node.kwargs['backward']} over {axis}"] += 1
    return {"forward": dict(forward), "backward": dict(backward)}


def _axis(node: Node) -> str:
    values = [*node.args, *node.kwargs.values()]
    return next((v for v in values if isinstance(v, str) and v in ("dp", "tp")), "tp")
