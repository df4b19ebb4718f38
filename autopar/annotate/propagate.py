"""Chooses data, context and expert parallelism by propagation, before the solver decides tensor
parallelism.

dp and ep shard the batch dim of every value that has one. cp shards positions of sequences. ep also
shards experts. On these axes a replicated value, such as a parameter, has a partial gradient (R/P):
every rank computes the same value and a part of its gradient. The engine sums the parts of
parameters once per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from autopar.ir.plan_fields import AxisChoice
from autopar.ir.sharding import RP, AxisLayout, P, Pattern, R, S, transition
from autopar.ir.traced import BlockClass, TracedModel
from autopar.ops.dims import OpDims, has_batch, locate, wanted_of
from autopar.ops.reach import Marks, Reach
from autopar.ops.strategies import (
    OpStrategy,
    fits,
    replicated,
    replicated_partial,
    shard_jointly,
    shard_letter,
    strategies,
)
from autopar.ops.values import (
    is_getitem,
    operand_names,
    ops,
    output_nodes,
    result_names,
    value_grads,
    value_name,
    value_tensors,
)
from autopar.ops.views import concrete

_Choices = dict[str, AxisChoice]

_WEIGHT = {"identity": 0, "mask": 0, "slice": 0.01, "pad": 0.01, "reduce_scatter": 1, "all_gather": 1, "all_to_all": 1, "all_reduce": 2,
           "reshuffle": 2}  # fmt: skip
_ELEMENTS_PER_MOVE = 60
"""Elements that a device reads or writes in the time in which one crosses the network: HBM3's 3.35
TB/s over InfiniBand NDR's 50 GB/s.
"""
_FLOPS_PER_MOVE = 16_000
"""FLOPs that a device computes, at 400 TFLOP/s, in the time in which one bf16 element crosses that
network.
"""


class Propagation:
    """Chooses how one axis of `parts` ranks (not tp) shards a model, op by op in the order of
    forward. Subclasses define `input_layout` and `candidates`.
    """

    def __init__(self, traced: TracedModel, reach: Reach, parts: int) -> None:
        self.traced, self.reach, self.parts = traced, reach, parts

    def run(self) -> list[_Choices]:
        """For each class, the choice on this axis of every input, parameter, op and output, by
        name.
        """
        choices: list[_Choices] = [{} for _ in self.traced.classes]
        produced: dict[tuple[int, int], AxisLayout] = {}
        vals = self.traced.graph_inputs
        for number, segment in enumerate(self.traced.segments):
            index = segment.class_index
            if not choices[index]:
                given = [
                    produced[source.segment, source.index]
                    if source.segment >= 0
                    else self.input_layout(vals.get(source.name))
                    for source in segment.inputs
                ]
                choices[index] = self._class(index, self.traced.classes[index], given)
            for k in range(len(output_nodes(self.traced.classes[index].graph))):
                produced[number, k] = choices[index][f"output{k}"].inputs[0]
        return choices

    def input_layout(self, val: torch.Tensor | None) -> AxisLayout:
        """The layout in which ranks receive a model input. `val` is None if the input is not a
        user's tensor.
        """
        raise NotImplementedError

    def candidates(
        self,
        index: int,
        node: Node,
        dims: OpDims,
        input_grads: list[bool],
        output_grads: list[bool],
    ) -> list[OpStrategy]:
        """The strategies that shard the op `node` of the class with number `index` on this axis.
        `input_grads` and `output_grads`: whether operands and results have gradients.
        """
        raise NotImplementedError

    def work(self, dims: OpDims, elements: float) -> float:
        """The cost of running the whole op on one rank, in equivalents of elements moved."""
        return 0.0

    def _class(self, index: int, block: BlockClass, given: list[AxisLayout]) -> _Choices:
        graph = block.graph
        tensors, grads = value_tensors(graph), value_grads(graph)
        layout: dict[str, AxisLayout] = dict(
            zip((n.name for n in graph.nodes if n.op == "placeholder"), given, strict=True)
        )
        parameters = {n.name for n in graph.nodes if n.op == "get_attr"}
        layout |= {name: RP if grads[name] else R for name in parameters}
        chosen: dict[str, OpStrategy] = {}
        for node in ops(graph):
            names, outs = operand_names(node), result_names(node)
            # parameters are stored as they are asked for
            sizes = [_numel(tensors[n]) if n not in parameters else 0 for n in names]
            flows = [grads[n] for n in names]
            found = self.options(index, node, flows, [grads[n] for n in outs])
            elements = sum(_numel(tensors[n]) for n in (*names, *outs))
            dims = self.reach.dims[index][node.name]
            work = self.work(dims, elements) if dims is not None else 0.0
            have = [layout[n] for n in names]
            # a sum stays pending, nothing is made one
            found = [s for s in found if s.letter or P not in s.inputs or P in have]
            best = min(
                found,
                key=lambda s: (
                    moved(have, s.inputs, sizes, flows) + work / (self.parts if s.letter else 1),
                    not s.letter,
                ),
            )
            layout.update(zip(outs, best.outputs, strict=True))
            chosen[node.name] = best
        layout |= _parameter_shards(graph, chosen, parameters)
        return _written(graph, layout, chosen)

    def options(
        self, index: int, node: Node, input_grads: list[bool], output_grads: list[bool]
    ) -> list[OpStrategy]:
        """All strategies of an op on this axis: the unsharded one first, then `candidates`."""
        whole = (
            replicated_partial(input_grads, output_grads)
            if any(output_grads)
            else replicated(len(input_grads), len(output_grads))
        )
        dims = self.reach.dims[index][node.name]
        return [
            whole,
            *(
                self.candidates(index, node, dims, input_grads, output_grads)
                if dims is not None
                else ()
            ),
        ]


class BatchPropagation(Propagation):
    """Propagation of dp, or with `experts` of ep, on which ops that can shard experts do so."""

    def __init__(
        self, traced: TracedModel, reach: Reach, parts: int, experts: bool = False
    ) -> None:
        super().__init__(traced, reach, parts)
        self.experts = experts

    def input_layout(self, val: torch.Tensor | None) -> AxisLayout:
        """Sharded by rows if the input has a batch dim, otherwise replicated."""
        return S(0) if has_batch(val) else R

    def candidates(
        self,
        index: int,
        node: Node,
        dims: OpDims,
        input_grads: list[bool],
        output_grads: list[bool],
    ) -> list[OpStrategy]:
        """The strategies that shard experts, if this is ep and the op has experts; otherwise those
        that shard the batch.
        """
        joints = [
            name
            for name, joint in dims.joint.items()
            if joint.axis == "ep" and self.experts and joint.size >= self.parts
        ]
        if joints:
            return [shard_jointly(dims, name, Pattern(), input_grads) for name in joints]
        found = strategies(dims, self.parts, input_grads, output_grads, "batch")
        return [s for s in found if s.name not in ("R", "R/P")]


@dataclass(frozen=True, slots=True)
class ContextSetting:
    """What the propagation of cp depends on: number of ranks, zigzag load balancing, and the method
    of each attention op as (class, op, method).
    """

    cp: int
    zigzag: bool
    methods: tuple[tuple[int, str, str], ...]


class ContextPropagation(Propagation):
    """Propagation of cp. `marks` are the dims that are positions of sequences."""

    def __init__(
        self, traced: TracedModel, reach: Reach, context: ContextSetting, marks: Marks
    ) -> None:
        super().__init__(traced, reach, context.cp)
        self.zigzag, self.marks = context.zigzag, marks
        self.methods = {(index, name): method for index, name, method in context.methods}

    def input_layout(self, val: torch.Tensor | None) -> AxisLayout:
        """Replicated: the first op that needs a part slices it."""
        return R

    def work(self, dims: OpDims, elements: float) -> float:
        """The cost of running the whole op on one rank, from its memory traffic and FLOPs, in
        equivalents of elements moved.
        """
        flops = dims.total_flops()
        return elements / _ELEMENTS_PER_MOVE + concrete(flops) / _FLOPS_PER_MOVE

    def candidates(
        self,
        index: int,
        node: Node,
        dims: OpDims,
        input_grads: list[bool],
        output_grads: list[bool],
    ) -> list[OpStrategy]:
        """For attention, the strategy of the chosen method; otherwise the strategies that shard
        positions.
        """
        method = self.methods.get((index, node.name))
        if method in dims.joint:
            return [shard_jointly(dims, method, Pattern(zigzag=self.zigzag), input_grads)]
        found = [
            s
            for s in strategies(dims, 1, input_grads, output_grads, "none")
            if not s.letter and s.name not in ("R", "R/P")
        ]
        for letter, wanted in self._marked(index, node, dims):
            pattern = Pattern(wanted.sections, wanted.rows, self.zigzag)
            if fits(dims, letter, pattern, self.parts, self.parts):
                sharded = shard_letter(dims, letter, pattern, input_grads)
                found += [] if sharded is None else [sharded]
        return found

    def _marked(self, index: int, node: Node, dims: OpDims) -> list[tuple[str, Pattern]]:
        """Letters of the op that are positions of sequences, with the pattern that their dims
        require.
        """
        found: dict[tuple[str, Pattern], None] = {}
        places = list(
            zip(
                (*operand_names(node), *result_names(node)),
                (*dims.inputs, *dims.outputs),
                strict=True,
            )
        )
        for letter in dims.letters:
            for value, term in places:
                place = locate(term, letter)
                if place is None:
                    continue
                for dim, pattern in self.marks[index].get(value, ()):
                    wanted = wanted_of(place[1], pattern) if dim == place[0] else None
                    if wanted is not None:
                        found[letter, wanted] = None
        return list(found)


def propagate(
    traced: TracedModel,
    reach: Reach,
    dp: int,
    ep: int,
    context: ContextSetting | None,
    marks: Marks,
) -> list[dict[str, dict[str, AxisChoice]]]:
    """The choices on each of dp, ep and cp with more than one rank: for each class, op -> axis ->
    choice. `marks` are the dims that are positions of sequences.
    """
    axes: dict[str, list[_Choices]] = {}
    if dp > 1:
        axes["dp"] = BatchPropagation(traced, reach, dp).run()
    if ep > 1:
        axes["ep"] = BatchPropagation(traced, reach, ep, experts=True).run()
    if context is not None:
        axes["cp"] = ContextPropagation(traced, reach, context, marks).run()
    joined: list[dict[str, dict[str, AxisChoice]]] = [{} for _ in traced.classes]
    for axis, classes in axes.items():
        for index, choices in enumerate(classes):
            for op, choice in choices.items():
                joined[index].setdefault(op, {})[axis] = choice
    return joined


def moved(
    have: list[AxisLayout], want: tuple[AxisLayout, ...], sizes: Sequence[float], grads: list[bool]
) -> float:
    """The cost of converting operands from `have` to `want`: elements communicated, weighted by
    primitive (all-reduce counts twice). Backward counts where a gradient flows (`grads`).
    """
    total = 0.0
    for src, dst, size, grad in zip(have, want, sizes, grads, strict=True):
        forward, backward = transition(src, dst)
        total += (_WEIGHT[forward] + (_WEIGHT[backward] if grad else 0)) * size
    return total


def _parameter_shards(
    graph: Graph, chosen: dict[str, OpStrategy], parameters: set[str]
) -> dict[str, AxisLayout]:
    """Name -> layout of the parameters that may be stored sharded, because all readers want the
    same shard.
    """
    wanted: dict[str, set[AxisLayout]] = {}
    for node in ops(graph):
        for name, want in zip(operand_names(node), chosen[node.name].inputs, strict=True):
            if name in parameters:
                wanted.setdefault(name, set()).add(want)
    returned = {value_name(n) for n in output_nodes(graph)}
    return {
        name: next(iter(found))
        for name, found in wanted.items()
        if len(found) == 1 and next(iter(found)).is_shard and name not in returned
    }


def _written(
    graph: Graph, layout: dict[str, AxisLayout], chosen: dict[str, OpStrategy]
) -> _Choices:
    choices: _Choices = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            choices[node.name] = AxisChoice(str(layout[node.name]), (), (layout[node.name],))
        elif node.op == "call_function" and not is_getitem(node):
            best = chosen[node.name]
            choices[node.name] = AxisChoice(best.name, best.inputs, best.outputs)
    for k, node in enumerate(output_nodes(graph)):
        final = layout[value_name(node)]
        choices[f"output{k}"] = AxisChoice(str(final), (final,), ())
    return choices


def _numel(tensor: torch.Tensor) -> int:
    total = 1
    for size in tensor.shape:
        total *= concrete(size)
    return total
