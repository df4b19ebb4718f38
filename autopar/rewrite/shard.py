"""Shards one block class: a pass from a graph over whole tensors to a graph over this rank's
shards.

Requires: a choice for every op and axis. Ensures: every edge between different layouts has explicit
transitions, one per axis and direction. Parameters are read through `local_shard`. Sizes in
arguments are local. The graph returns the layouts that the plan's output ops state. Each tensor
node has `meta['whole']` (the fake tensor of the whole value) and `meta['layouts']`, for the
verifier.
"""

from __future__ import annotations

import itertools
import operator

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan_fields import AxisChoice, BlockPlan
from autopar.ir.sharding import RP, AxisLayout, conversion_path
from autopar.ir.traced import BlockClass
from autopar.ops.dims import is_symbolic
from autopar.ops.legal import check_legal
from autopar.ops.random import draws
from autopar.ops.values import is_getitem, output_nodes, result_names, value_grads, value_name
from autopar.rewrite.collectives.transitions import identity, make_transition
from autopar.rewrite.lowerings.dropout import NOISE
from autopar.rewrite.lowerings.lowering import Lowering, lower_call
from autopar.rewrite.lowerings.sizes import Layouts, LocalSizes


def local_shard(parameter: torch.Tensor, gradients: dict[str, str]) -> torch.Tensor:
    """This rank's shard of a parameter that is a DTensor; any other tensor itself. `gradients`
    names, by axis, the placement of its gradient if that differs from the parameter's: 'P' is a
    partial sum, which the engine reduces once per step.
    """
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(parameter, DTensor):
        return parameter
    names = parameter.device_mesh.mesh_dim_names or ()
    placements = [
        Partial() if gradients.get(axis) == "P" else placement
        for axis, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.to_local(grad_placements=placements)


class ClassSharder:
    """Rewrites the graph of one block class over whole tensors, by `run`, into the graph over one
    rank's shards. `plan` has the choices. Calls such as arange make their tensors on `device`.
    `stored` has the layouts in which parameters are stored, by slot.
    """

    def __init__(
        self,
        block: BlockClass,
        plan: BlockPlan,
        mesh: MeshShape,
        rank: int,
        device: torch.device,
        stored: dict[str, Layouts],
    ) -> None:
        self.block, self.plan, self.device, self.stored = block, plan, device, stored
        self.axes = mesh.active
        self.graph = Graph()
        coordinates = {axis: mesh.coordinate(rank, axis) for axis in self.axes}
        self.sizes = LocalSizes(self.graph, mesh, coordinates)
        # value name -> node that holds it in its producer's layout
        self.nodes: dict[str, Node] = {}
        self.converted: dict[tuple[str, tuple], Node] = {}
        self.grads = value_grads(block.graph)
        # calls that drop, by a number of their own
        self.draws = {node: i for i, node in enumerate(block.graph.nodes) if draws(node)}
        self.noise: Node | None = None

    def layouts(self, name: str) -> Layouts:
        """The layout, by axis, in which the value called `name` is made by its op or arrives as
        input.
        """
        return self.nodes[name].meta["layouts"]

    def run(self) -> Graph:
        """Build this rank's graph and return it. Raises AutoparError if the plan lacks a choice, or
        has one that is no strategy of its op. Use it once.
        """
        for node in self.block.graph.nodes:
            if node.op == "placeholder":
                self._input(node)
        if self.draws:
            self.noise = self.graph.placeholder(NOISE)
        for node in self.block.graph.nodes:
            if node.op == "get_attr":
                self._parameter(node)
            elif node.op == "call_function" and not is_getitem(node):
                self._call(node)
        returned = enumerate(output_nodes(self.block.graph))
        self.graph.output(
            tuple(self._convert(n, self._choices(f"output{k}"), 0) for k, n in returned)
        )
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return self.graph

    def _choices(self, op: str) -> dict[str, AxisChoice]:
        choices = self.plan.ops.get(op, {})
        missing = [axis for axis in self.axes if axis not in choices]
        if missing:
            raise AutoparError(
                f"the plan has no choice for op {op!r} of block {self.block.name!r} on axis {missing[0]}: it was made for another"
                " model; plan again"
            )
        return {axis: choices[axis] for axis in self.axes}

    def _record(self, name: str, node: Node, tensor: torch.Tensor, layouts: Layouts) -> None:
        self.nodes[name] = node
        node.meta |= {"whole": tensor, "layouts": layouts}

    def _input(self, node: Node) -> None:
        new = self.graph.placeholder(node.name)
        layouts = {axis: choice.outputs[0] for axis, choice in self._choices(node.name).items()}
        self._record(node.name, new, node.meta["val"], layouts)
        self.sizes.offer(new, node.meta["val"], layouts)

    def _parameter(self, node: Node) -> None:
        slot = str(node.target)
        attribute = self.graph.create_node("get_attr", slot, name=node.name)
        attribute.meta["parameter"] = slot
        self._choices(node.name)
        layouts = dict(self.stored[slot])
        partial = {axis: "P" for axis, layout in layouts.items() if layout == RP}
        local = self.graph.call_function(local_shard, (attribute, partial))
        local._rename(node.name.removesuffix("_weight").rpartition("_")[2] + "_shard")
        self._record(node.name, local, node.meta["val"], layouts)

    def _call(self, node: Node) -> None:
        choices, val = self._choices(node.name), node.meta["val"]
        check_legal(node, choices, self.grads, self.block.name)
        position = itertools.count()
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: self._convert(n, choices, next(position))
        )
        noise = None
        if self.noise is not None and node in self.draws:
            noise = self.noise, self.draws[node]
        lowering = Lowering(node, choices, self.sizes, self.device, noise)
        new = self.graph.call_function(*lower_call(lowering, tuple(args), dict(kwargs)))
        new._rename(node.name)
        new.meta["op"] = node.name
        for i, name in enumerate(result_names(node)):
            layouts = {axis: choice.outputs[i] for axis, choice in choices.items()}
            if isinstance(val, (list, tuple)):
                item = self.graph.call_function(operator.getitem, (new, i))
                self._record(name, item, val[i], layouts)
            else:
                self._record(name, new, val, layouts)

    def _convert(self, read: Node, choices: dict[str, AxisChoice], operand: int) -> Node:
        """The node that an op reads as its tensor operand number `operand`, in the layouts that
        `choices` want. Conversions are added as needed; each is made once, even if several ops need
        it.
        """
        if not isinstance(read.meta.get("val"), torch.Tensor):
            raise AutoparError(f"op reads {read.name}, which is not a tensor")
        name = value_name(read)
        node, have = self.nodes[name], self.layouts(name)
        wanted = {axis: choices[axis].inputs[operand] for axis in self.axes}
        for axis, to in conversion_path(have, wanted, self.axes):
            layouts = have | {axis: to}
            key = (name, tuple((a, layouts[a]) for a in self.axes))
            if key not in self.converted:
                self.converted[key] = insert_transition(node, have, axis, to, self.sizes)
            node, have = self.converted[key], layouts
        return node


def insert_transition(
    node: Node, have: Layouts, axis: str, to: AxisLayout, sizes: LocalSizes
) -> Node:
    """Append the call that changes the layout of `node` on one axis to `to`, and return it. `have`
    are its current layouts; `sizes` gives this rank's sizes and has the graph. Returns `node`
    itself if neither value nor gradient changes.
    """
    tensor, source = node.meta["whole"], have[axis]
    others = {a: layout for a, layout in have.items() if a != axis}
    shape = [
        sizes.local(s, d, others) if d in (source.dim, to.dim) or not is_symbolic(s) else s
        for d, s in enumerate(tensor.shape)
    ]
    patterned = to if to.pattern.rows else source
    rows = sizes.rows(others | {axis: patterned}) if patterned.pattern.rows else 1
    function, arguments = make_transition(source, to, shape, rows)
    if function is identity and arguments["backward"] == "identity":
        return node
    new = sizes.graph.call_function(function, (node, axis), arguments)
    new._rename(f"{function.__name__}_{node.name}")
    transition = (str(source), str(to))
    new.meta |= {"whole": tensor, "layouts": have | {axis: to}, "transition": transition}
    return new
