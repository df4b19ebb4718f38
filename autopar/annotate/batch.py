"""Data parallelism by propagation: shard the batch wherever it goes, before the solver decides the other axes.

On the dp axis a replicated value always has a partial gradient (R/P), parameters included: every rank computes the same value and
owns a part of its gradient, and the engine adds the parts of parameters once per step.
"""

from __future__ import annotations

from autopar.ir.plan import AxisChoice
from autopar.ir.sharding import RP, Layout, R, S, transition
from autopar.ir.traced import TracedModel
from autopar.ops.dims import is_symbolic, operands, results
from autopar.ops.rules import op_dims
from autopar.ops.strategies import OpStrategy, replicated, replicated_partial, strategies
from autopar.ops.values import operand_names, ops, output_nodes, result_names, value_grads, value_name, value_tensors
from autopar.ops.views import concrete

_WEIGHT = {"identity": 0, "mask": 0, "slice": 0.01, "pad": 0.01, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "all_reduce": 2}


def propagate_batch(traced: TracedModel, dp: int) -> list[dict[str, AxisChoice]]:
    """For each block class the choice of every op on the dp axis; empty if dp is 1."""
    if dp == 1:
        return [{} for _ in traced.classes]
    choices: list[dict[str, AxisChoice]] = [{} for _ in traced.classes]
    produced: dict[tuple[int, int], Layout] = {}
    vals = dict(zip(traced.inputs, traced.input_vals, strict=True))
    for index, segment in enumerate(traced.segments):
        if not choices[segment.class_index]:
            layouts = []
            for source in segment.inputs:
                val = vals.get(source.name)
                batch = val is not None and val.dim() > 0 and is_symbolic(val.shape[0])
                layouts.append(produced[source.segment, source.index] if source.segment >= 0 else S(0) if batch else R)
            choices[segment.class_index] = _propagate(traced.classes[segment.class_index].graph, layouts)
        for k in range(len(output_nodes(traced.classes[segment.class_index].graph))):
            produced[index, k] = choices[segment.class_index][f"output{k}"].inputs[0]
    return choices


def _propagate(graph, inputs: list[Layout]) -> dict[str, AxisChoice]:
    tensors, grads = value_tensors(graph), value_grads(graph)
    layout: dict[str, Layout] = {}
    choices: dict[str, AxisChoice] = {}
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for node, given in zip(placeholders, inputs, strict=True):
        layout[node.name] = given
        choices[node.name] = AxisChoice(str(given), (), (given,))
    for node in graph.nodes:
        if node.op == "get_attr":
            layout[node.name] = RP if grads[node.name] else R
            choices[node.name] = AxisChoice(str(layout[node.name]), (), (layout[node.name],))
    for node in ops(graph):
        names, outs = operand_names(node), result_names(node)
        have = [layout[n] for n in names]
        sizes = [_numel(tensors[n]) for n in names]
        candidates = _candidates(node, [grads[n] for n in names], [grads[n] for n in outs])
        best = min(candidates, key=lambda s: (_price(have, s.inputs, sizes), not s.letter))
        layout.update(zip(outs, best.outputs, strict=True))
        choices[node.name] = AxisChoice(best.name, best.inputs, best.outputs)
    for k, node in enumerate(output_nodes(graph)):
        final = layout[value_name(node)]
        choices[f"output{k}"] = AxisChoice(str(final), (final,), ())
    return choices


def _candidates(node, input_grads: list[bool], output_grads: list[bool]) -> list[OpStrategy]:
    dims = op_dims(node)
    count = len(results(node))
    if any(output_grads):
        whole = replicated_partial(input_grads, output_grads)
    else:
        whole = replicated(len(operands(node)), count)
    if dims is None:
        return [whole]
    found = strategies(dims, 2, input_grads, output_grads, batch=True)
    return [whole, *(s for s in found if s.name not in ("R", "R/P"))]


def _numel(tensor) -> int:
    total = 1
    for size in tensor.shape:
        total *= concrete(size)
    return total


def _price(have: list[Layout], want: tuple[Layout, ...], sizes: list[int]) -> float:
    """Elements moved to convert the operands, forward and backward."""
    return sum(sum(_WEIGHT[p] for p in transition(a, b)) * n for a, b, n in zip(have, want, sizes, strict=True) if a != b)
