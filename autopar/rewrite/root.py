"""Builds the root graph of a stage: its inputs, one call per segment with the transitions before
it, and its results.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.ir.mesh import BATCH_AXES, MeshShape
from autopar.ir.sharding import P, R, S, conversion_path
from autopar.ir.traced import Segment, Source, TracedModel
from autopar.ops.dims import has_batch
from autopar.ops.values import output_nodes
from autopar.rewrite.lowerings.dropout import NOISE, segment_noise
from autopar.rewrite.lowerings.sizes import Layouts, LocalSizes
from autopar.rewrite.shard import ClassSharder, insert_transition
from autopar.rewrite.stages import Stage


@dataclass(frozen=True, slots=True)
class SegmentValue:
    """A description of a value between segments: its name, the whole fake tensor, its layout on
    each axis with more than one rank, and whether a gradient flows back. `steady`: it is the same
    for all micro-batches of a step, and has no gradient.
    """

    name: str
    whole: torch.Tensor
    layouts: Layouts
    has_gradient: bool
    steady: bool


def module_name(segment: str) -> str:
    """A segment's name as an attribute: 'layers.3' becomes 'layers_3'."""
    return re.sub(r"\W", "_", segment)


def input_layouts(val: torch.Tensor, mesh: MeshShape) -> Layouts:
    """The layout, by axis, in which ranks receive the model input `val`. It is sharded by rows over
    the axes of the batch if it has rows; cp and tp ranks get the same rows.
    """
    return {axis: S(0) if axis in BATCH_AXES and has_batch(val) else R for axis in mesh.active}


def fake_loss(traced: TracedModel) -> torch.Tensor:
    """The fake tensor of the loss, output 0 of the last segment."""
    return output_nodes(traced.classes[traced.segments[-1].class_index].graph)[0].meta["val"]


def segments_of(stage: nn.Module) -> dict[str, GraphModule]:
    """By name, the graph module of each segment of a stage. A recomputed segment is wrapped; its
    `body` is returned.
    """
    children = {name: getattr(child, "body", child) for name, child in stage.named_children()}
    return cast(dict[str, GraphModule], children)


class RootGraph:
    """Builds the root graph of one stage, by `run`. The graph takes the values that the stage
    receives, the graph inputs that it reads, and NOISE if it draws random numbers. It returns the
    values that it sends, or the loss if it is the last stage, and the new values of buffers.
    """

    def __init__(
        self,
        traced: TracedModel,
        stage: Stage,
        sharders: Mapping[int, ClassSharder],
        values: Mapping[Source, SegmentValue],
        mesh: MeshShape,
        rank: int,
    ) -> None:
        """`sharders` has the sharder of each segment of the stage, by the segment's number.
        `values` describes the values that cross the stage's boundaries.
        """
        self.traced, self.stage, self.sharders = traced, stage, sharders
        self.crossing, self.mesh, self.axes = values, mesh, mesh.active
        self.graph = Graph()
        coordinates = {axis: mesh.coordinate(rank, axis) for axis in self.axes}
        self.sizes = LocalSizes(self.graph, mesh, coordinates)
        self.values: dict[Source, Node] = {}
        self.converted: dict[tuple, Node] = {}
        self.noise: Node | None = None

    def run(self, stored: Mapping[str, Layouts]) -> Graph:
        """Build the graph and return it. `stored` has the layouts of parameters and buffers by
        name, to which new values of buffers are converted. Use it once.
        """
        for source in self.stage.received:
            value = self.crossing[source]
            self._take(source, value.name, value.whole, value.layouts)
        vals = self.traced.graph_inputs
        for name in self.stage.inputs:
            self._take(Source(name=name), name, vals[name], input_layouts(vals[name], self.mesh))
        if any(sharder.noise is not None for sharder in self.sharders.values()):
            self.noise = self.graph.placeholder(NOISE)
        for index in range(self.stage.start, self.stage.end):
            self._call(index, self.traced.segments[index])
        results = [self.values[source] for source in self.stage.sent] or [self._loss()]
        for name in self.stage.updates:
            places = {axis: stored.get(name, {}).get(axis, R) for axis in self.axes}
            wanted = {axis: to if to.is_shard else R for axis, to in places.items()}
            results.append(self._convert(self.values[self.traced.updates[name]], wanted))
        self.graph.output(tuple(results) if len(results) > 1 or self.stage.sent else results[0])
        self.graph.lint()
        return self.graph

    def _loss(self) -> Node:
        """The node of the loss. Axes over which it is a sum of ranks' parts keep it as this rank's
        part, from which backward can start (`Program.loss_axes`).
        """
        node = self.values[Source(len(self.traced.segments) - 1, 0)]
        layouts = node.meta["layouts"].items()
        return self._convert(node, {axis: to if to == P else R for axis, to in layouts})

    def _take(self, source: Source, name: str, val: torch.Tensor, layouts: Layouts) -> None:
        node = self.graph.placeholder(name)
        if not name.isidentifier() or iskeyword(
            name
        ):  # an entry of a nested batch, such as 'inputs.ids'
            node.target = node.name
        self.sizes.offer(node, val, layouts)
        self._record(source, node, val, layouts)

    def _record(self, source: Source, node: Node, val: torch.Tensor, layouts: Layouts) -> None:
        self.values[source] = node
        node.meta |= {"whole": val, "layouts": layouts}

    def _call(self, index: int, segment: Segment) -> None:
        block, sharder = self.traced.classes[segment.class_index], self.sharders[index]
        name = module_name(segment.name)
        placeholders = block.graph.find_nodes(op="placeholder")
        args = [
            self._convert(self.values[source], sharder.layouts(placeholder.name))
            for source, placeholder in zip(segment.inputs, placeholders, strict=True)
        ]
        if sharder.noise is not None:
            args.append(self.graph.call_function(segment_noise, (self.noise, index)))
        call = self.graph.call_module(name, tuple(args))
        for k, node in enumerate(output_nodes(block.graph)):
            item = self.graph.call_function(operator.getitem, (call, k))
            layouts = {axis: sharder.plan.ops[f"output{k}"][axis].inputs[0] for axis in self.axes}
            item._rename(f"{name}_{node.name}")
            self._record(Source(index, k), item, node.meta["val"], layouts)

    def _convert(self, node: Node, wanted: Layouts) -> Node:
        have = node.meta["layouts"]
        for axis, to in conversion_path(have, wanted, self.axes):
            key = (node, axis, to)
            if key not in self.converted:
                self.converted[key] = insert_transition(node, have, axis, to, self.sizes)
            node, have = self.converted[key], have | {axis: to}
        return node
