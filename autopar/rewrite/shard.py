"""Shard one block class: the pass that turns a graph over whole tensors into a graph over this rank's shards.

Requires: a choice for every op and axis.  Ensures: every edge whose ends disagree carries explicit transitions, one per axis and
direction; parameters are read through `local_shard`; sizes in arguments are local; the graph returns what the plan's output ops say.
Each tensor node carries `meta['whole']` (the fake tensor of the whole value) and `meta['layouts']`, for the verifier.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan_fields import AxisChoice, BlockPlan
from autopar.ir.sharding import RP, Layout, conversion_path
from autopar.ir.traced import BlockClass
from autopar.ops.dims import is_symbolic, operands
from autopar.ops.legal import check_legal
from autopar.ops.random import drops
from autopar.ops.values import is_getitem, result_names, value_grads, value_name
from autopar.rewrite.collectives.transitions import make_transition
from autopar.rewrite.lowerings.dropout import NOISE
from autopar.rewrite.lowerings.lowering import Lowering, lower_call
from autopar.rewrite.lowerings.sizes import Layouts, LocalSizes


def local_shard(parameter: torch.Tensor, gradients: dict[str, str]) -> torch.Tensor:
    """This rank's shard of a parameter.  `gradients` names, by axis, how its gradient is placed when it is not placed like the parameter:
    'P' for a partial sum, which the engine reduces once per step."""
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(parameter, DTensor):
        return parameter
    names = parameter.device_mesh.mesh_dim_names
    placements = [
        Partial() if gradients.get(axis) == "P" else placement
        for axis, placement in zip(names, parameter.placements, strict=True)
    ]
    return parameter.to_local(grad_placements=placements)


class ClassSharder:
    """One run of the pass over one class graph for one rank."""

    def __init__(
        self,
        block: BlockClass,
        plan: BlockPlan,
        mesh: MeshShape,
        rank: int,
        device: torch.device,
        stored: dict[str, Layouts],
    ) -> None:
        self.block, self.plan, self.mesh, self.device, self.stored = (
            block,
            plan,
            mesh,
            device,
            stored,
        )
        self.axes = mesh.active
        self.graph = Graph()
        self.sizes = LocalSizes(
            self.graph, mesh, {axis: mesh.coordinate(rank, axis) for axis in self.axes}
        )
        self.nodes: dict[
            str, Node
        ] = {}  # value name -> node that holds it in its producer's layout
        self.layouts: dict[str, Layouts] = {}
        self.whole: dict[str, torch.Tensor] = {}
        self.converted: dict[tuple[str, tuple], Node] = {}
        self.grads = value_grads(block.graph)
        # calls that drop, by a number of their own
        self.draws = {node: i for i, node in enumerate(block.graph.nodes) if drops(node)}
        self.noise: Node | None = None

    def run(self) -> Graph:
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
            elif node.op == "output":
                outputs = [
                    self._convert(value_name(n), self._choices(f"output{k}"), 0)
                    for k, n in enumerate(node.args[0])
                ]
                self.graph.output(tuple(outputs))
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
        self.nodes[name], self.layouts[name], self.whole[name] = node, layouts, tensor
        node.meta |= {"whole": tensor, "layouts": layouts}

    def _input(self, node: Node) -> None:
        new = self.graph.placeholder(node.name)
        layouts = {axis: choice.outputs[0] for axis, choice in self._choices(node.name).items()}
        self._record(node.name, new, node.meta["val"], layouts)
        self.sizes.offer(new, node.meta["val"], layouts)

    def _parameter(self, node: Node) -> None:
        attribute = self.graph.create_node("get_attr", node.target, name=node.name)
        attribute.meta["parameter"] = node.target
        self._choices(node.name)
        layouts = dict(self.stored[node.target])
        partial = {axis: "P" for axis, layout in layouts.items() if layout == RP}
        local = self.graph.call_function(local_shard, (attribute, partial))
        local._rename(node.name.removesuffix("_weight").rpartition("_")[2] + "_shard")
        self._record(node.name, local, node.meta["val"], layouts)

    def _call(self, node: Node) -> None:
        choices = self._choices(node.name)
        check_legal(node, choices, self.grads, self.block.name)
        position = iter(range(len(operands(node))))
        args, kwargs = torch.fx.map_arg(
            (node.args, node.kwargs), lambda n: self._operand(n, choices, position)
        )
        names = result_names(node)
        result = {axis: choice.outputs[0] for axis, choice in choices.items()}
        noise = (self.noise, self.draws[node]) if node in self.draws else None
        lowering = Lowering(node, choices, self.graph, self.sizes, self.mesh, self.device, noise)
        target, args, kwargs = lower_call(lowering, tuple(args), dict(kwargs))
        new = self.graph.call_function(target, args, kwargs)
        new._rename(node.name)
        new.meta["op"] = node.name
        if isinstance(node.meta["val"], (list, tuple)):
            for i, name in enumerate(names):
                item = self.graph.call_function(operator.getitem, (new, i))
                self._record(
                    name,
                    item,
                    node.meta["val"][i],
                    {axis: choice.outputs[i] for axis, choice in choices.items()},
                )
        else:
            self._record(node.name, new, node.meta["val"], result)

    def _operand(self, node: Node, choices: dict[str, AxisChoice], position) -> Node:
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise AutoparError(f"op reads {node.name}, which is not a tensor")
        return self._convert(value_name(node), choices, next(position))

    def _convert(self, name: str, choices: dict[str, AxisChoice], operand: int) -> Node:
        """The value in the layouts that an op asks for, converted once per layout however many ops ask."""
        node, have = self.nodes[name], self.layouts[name]
        wanted = {axis: choices[axis].inputs[operand] for axis in self.axes}
        for axis, to in conversion_path(have, wanted, self.axes):
            layouts = have | {axis: to}
            key = (name, tuple((a, layouts[a]) for a in self.axes))
            if key not in self.converted:
                self.converted[key] = insert_transition(
                    self.graph, node, self.whole[name], have, axis, to, self.sizes
                )
            node, have = self.converted[key], layouts
        return node


def insert_transition(
    graph: Graph,
    node: Node,
    tensor: torch.Tensor,
    have: Layouts,
    axis: str,
    to: Layout,
    sizes: LocalSizes,
) -> Node:
    """Append the node that changes the layout of `node` on one axis."""
    others = {a: layout for a, layout in have.items() if a != axis}
    shape = [
        sizes.local(s, d, others) if d in (have[axis].dim, to.dim) or not is_symbolic(s) else s
        for d, s in enumerate(tensor.shape)
    ]
    patterned = to if to.pattern.rows else have[axis]
    function, arguments = make_transition(
        have[axis],
        to,
        shape,
        sizes.rows(others | {axis: patterned}) if patterned.pattern.rows else 1,
    )
    new = graph.call_function(function, (node, axis), arguments)
    if new.kwargs.get("backward") == "identity" and function.__name__ == "identity":
        graph.erase_node(new)
        return node
    new._rename(f"{function.__name__}_{node.name}")
    new.meta |= {
        "whole": tensor,
        "layouts": have | {axis: to},
        "transition": (str(have[axis]), str(to)),
    }
    return new
