"""Assemble this rank's program: one GraphModule per segment, joined by a root GraphModule that reads like the model's forward."""

from __future__ import annotations

import operator
import re
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparError
from autopar.ir.mesh import BATCH_AXES, MeshShape
from autopar.ir.plan import BlockPlan, Plan
from autopar.ir.sharding import RP, R, S, conversion_path
from autopar.ir.traced import MEAN_COUNT, BlockClass, ParameterSpec, Segment, Source, TracedModel
from autopar.ops.dims import has_batch
from autopar.rewrite.lowering import whole_sizes
from autopar.rewrite.noise import NOISE, attention_with_dropout, dropout, segment_noise
from autopar.rewrite.overlap import overlap
from autopar.rewrite.patterns import Split, pick
from autopar.rewrite.printing import program_text
from autopar.rewrite.shard import ClassSharder, insert_transition
from autopar.rewrite.sharded_ops import in_training
from autopar.rewrite.sizes import Layouts, LocalSizes


@dataclass(frozen=True, slots=True)
class ProgramParameter:
    """A parameter or buffer of the program: where it hangs (`module`.`attribute`), what it is, and its layout on each axis > 1."""

    module: str
    attribute: str
    spec: ParameterSpec
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank runs.  `module(**inputs)` returns the loss of the whole batch, or the loss and the new values of the buffers `updates`,
    each in the layout of its buffer; parameters are on the meta device until materialized.

    `inputs` maps each model input to its layouts; after them the module takes MEAN_COUNT, if `count` is not None, and NOISE, if `draws`.
    `count` is the GraphModule that counts this rank's valid targets, from `count_inputs`.
    """

    module: GraphModule
    mesh: MeshShape
    rank: int
    parameters: tuple[ProgramParameter, ...]
    inputs: dict[str, Layouts]
    whole_inputs: dict[str, torch.Tensor]
    count: GraphModule | None
    count_inputs: tuple[str, ...]
    draws: bool
    updates: tuple[str, ...] = ()

    @property
    def code(self) -> str:
        """The root program and each distinct block as Python source, to be read (`rewrite/printing.py`)."""
        return program_text(self.module)


def assemble(traced: TracedModel, plan: Plan, rank: int, device: torch.device) -> Program:
    """Rewrite the model into the program of `rank`."""
    plans = {block.name: block for block in plan.blocks}
    missing = [block.name for block in traced.classes if block.name not in plans]
    if missing:
        raise AutoparError(f"the plan has no choices for block {missing[0]!r} (it has {', '.join(plans)}): it was made for another model")
    stored = stored_layouts(traced, plans)
    sharders = [
        ClassSharder(block, plans[block.name], plan.mesh, rank, device, stored[index]) for index, block in enumerate(traced.classes)
    ]
    graphs = [overlap(sharder.run()) for sharder in sharders]
    root = _Root(traced, sharders, plan.mesh, rank)
    modules = nn.Module()
    parameters: list[ProgramParameter] = []
    shared: dict[str, nn.Parameter] = {}
    for segment in traced.segments:
        block, sharder = traced.classes[segment.class_index], sharders[segment.class_index]
        name = module_name(segment.name)
        constants = {
            slot: shard_of(traced.constants[attribute], stored[segment.class_index][slot], plan.mesh, rank)
            for slot, attribute in zip(block.slots, segment.parameters, strict=True)
            if attribute not in traced.parameters
        }
        module = _segment_module(name, segment, block, graphs[segment.class_index], traced, shared, constants)
        modules.add_module(name, module)
        for slot, attribute in zip(block.slots, segment.parameters, strict=True):
            if attribute in traced.parameters:
                parameters.append(ProgramParameter(name, slot, traced.parameters[attribute], sharder.layouts[_slot_node(block, slot)]))
    graph = overlap(root.run({parameter.spec.name: parameter.layouts for parameter in parameters}))
    module = GraphModule(modules, graph, class_name="Program")
    count = _count_module(traced.count_graph) if traced.count_graph is not None else None
    count_inputs = tuple(n.target for n in traced.count_graph.nodes if n.op == "placeholder") if count is not None else ()
    return Program(
        module,
        plan.mesh,
        rank,
        tuple(parameters),
        root.input_layouts,
        dict(zip(traced.inputs, traced.input_vals, strict=True)),
        count,
        count_inputs,
        root.noise is not None,
        tuple(traced.updates),
    )


def stored_layouts(traced: TracedModel, plans: dict[str, BlockPlan]) -> list[dict[str, Layouts]]:
    """The layouts of each class' parameters, by slot, that every holder of a parameter agrees on.

    Holders of one tensor may want its gradient replicated here and partial there; the tensor has one gradient, which is then partial,
    and a holder that wants it replicated converts.  Raises AutoparError if holders place the tensor itself differently.
    """
    layouts = []
    for block in traced.classes:
        choices = plans[block.name].ops
        slots = {n.target: choices.get(n.name, {}) for n in block.graph.nodes if n.op == "get_attr"}
        layouts.append({slot: {axis: choice.outputs[0] for axis, choice in found.items()} for slot, found in slots.items()})
    changed = True
    while changed:
        changed, agreed = False, {}
        for segment in traced.segments:
            for slot, name in zip(traced.classes[segment.class_index].slots, segment.parameters, strict=True):
                mine = layouts[segment.class_index][slot]
                for axis, layout in mine.items():
                    if layout.value.kind == "P":  # every rank would hold the whole and take it for a summand
                        raise AutoparError(f"the plan holds {name} as a partial sum over {axis}: it was damaged; plan again")
                    other = agreed.setdefault((name, axis), layout)
                    if other.value != layout.value:
                        raise AutoparError(f"the plan places {name} both {other} and {layout} on {axis}: it is not consistent; plan again")
                    agreed[name, axis] = RP if RP in (other, layout) else layout
        for segment in traced.segments:
            for slot, name in zip(traced.classes[segment.class_index].slots, segment.parameters, strict=True):
                mine = layouts[segment.class_index][slot]
                for axis in mine:
                    if mine[axis] != agreed[name, axis]:
                        mine[axis], changed = agreed[name, axis], True
    return layouts


def _count_module(counted: Graph) -> GraphModule:
    """The count of valid targets as a program of one rank over its own rows: sizes that depend on the batch are read from its inputs."""
    graph, nodes = Graph(), {}
    sizes = LocalSizes(graph, MeshShape(), {})
    for node in counted.nodes:
        if node.op == "placeholder":
            nodes[node] = graph.node_copy(node)
            sizes.offer(nodes[node], node.meta["val"], {})
    for node in counted.nodes:
        if node.op == "placeholder":
            continue
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), nodes.__getitem__)
        args, kwargs = whole_sizes(args, sizes), whole_sizes(kwargs, sizes)
        nodes[node] = graph.output(args[0]) if node.op == "output" else graph.create_node(node.op, node.target, args, kwargs, node.name)
    return GraphModule(nn.Module(), graph, class_name="CountValidTargets")


def module_name(segment: str) -> str:
    """A segment's name as an attribute: 'layers.3' becomes 'layers_3'."""
    return re.sub(r"\W", "_", segment)


def _slot_node(block: BlockClass, slot: str) -> str:
    return next(n.name for n in block.graph.nodes if n.op == "get_attr" and n.target == slot)


def shard_of(whole: torch.Tensor, layouts: Layouts, mesh: MeshShape, rank: int) -> torch.Tensor:
    """A rank's part of a whole tensor: a view where its patterns are contiguous."""
    for axis, layout in layouts.items():
        if layout.is_shard:
            split = Split(layout.dim, whole.shape[layout.dim], layout.pattern)
            whole = pick(whole, split, mesh.size(axis), mesh.coordinate(rank, axis))
    return whole


def _segment_module(
    name: str, segment: Segment, block: BlockClass, graph: Graph, traced: TracedModel, shared: dict, constants: dict[str, torch.Tensor]
) -> GraphModule:
    holder = nn.Module()
    for slot, attribute in zip(block.slots, segment.parameters, strict=True):
        spec = traced.parameters.get(attribute)
        if spec is None:
            holder.register_buffer(slot, constants[slot], persistent=False)
            continue
        if attribute not in shared:
            tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta")
            shared[attribute] = tensor if spec.buffer else nn.Parameter(tensor, requires_grad=spec.trainable)
        holder.register_buffer(slot, shared[attribute]) if spec.buffer else holder.register_parameter(slot, shared[attribute])
    class_name = "".join(part.capitalize() for part in re.split(r"_(?:\d+_?)?", name)) or "Segment"
    return GraphModule(holder, _copied(graph), class_name=class_name)


class _Root:
    """Builds the root graph: inputs, one call per segment with the transitions on its way in, and the loss."""

    def __init__(self, traced: TracedModel, sharders: list[ClassSharder], mesh: MeshShape, rank: int) -> None:
        self.traced, self.sharders, self.mesh = traced, sharders, mesh
        self.axes = mesh.active
        self.graph = Graph()
        self.sizes = LocalSizes(self.graph, mesh, {axis: mesh.coordinate(rank, axis) for axis in self.axes})
        self.input_layouts: dict[str, Layouts] = {}
        self.values: dict[Source, tuple[Node, torch.Tensor, Layouts]] = {}
        self.converted: dict[tuple, Node] = {}
        self.noise: Node | None = None

    def run(self, stored: dict[str, Layouts]) -> Graph:
        for name, val in zip(self.traced.inputs, self.traced.input_vals, strict=True):
            layouts = self._model_input(val)
            node = self.graph.placeholder(name)
            self.sizes.offer(node, val, layouts)
            self._record(Source(name=name), node, val, layouts)
            self.input_layouts[name] = layouts
        if any(s.name == MEAN_COUNT for segment in self.traced.segments for s in segment.inputs):
            loss = self.traced.classes[self.traced.segments[-1].class_index].graph.output_node().args[0][0].meta["val"]
            self._record(Source(name=MEAN_COUNT), self.graph.placeholder(MEAN_COUNT), loss.detach(), {axis: R for axis in self.axes})
        if any(sharder.noise is not None for sharder in self.sharders):
            self.noise = self.graph.placeholder(NOISE)
        for index, segment in enumerate(self.traced.segments):
            self._call(index, segment)
        loss = self._convert(*self.values[self._loss_source()], {axis: R for axis in self.axes})
        updates = []
        for name, source in self.traced.updates.items():
            places = {axis: stored.get(name, {}).get(axis, R) for axis in self.axes}
            updates.append(self._convert(*self.values[source], {axis: to if to.is_shard else R for axis, to in places.items()}))
        self.graph.output((loss, *updates) if updates else loss)
        self.graph.lint()
        return self.graph

    def _loss_source(self) -> Source:
        return Source(len(self.traced.segments) - 1, 0)

    def _record(self, source: Source, node: Node, val: torch.Tensor, layouts: Layouts) -> None:
        self.values[source] = (node, val, layouts)
        node.meta |= {"whole": val, "layouts": layouts}

    def _model_input(self, val: torch.Tensor) -> Layouts:
        """Each data-parallel rank is given its own rows; cp and tp ranks are given the same rows."""
        return {axis: S(0) if axis in BATCH_AXES and has_batch(val) else R for axis in self.axes}

    def _call(self, index: int, segment: Segment) -> None:
        block, sharder = self.traced.classes[segment.class_index], self.sharders[segment.class_index]
        placeholders = [n for n in block.graph.nodes if n.op == "placeholder"]
        args = []
        for source, placeholder in zip(segment.inputs, placeholders, strict=True):
            node, val, layouts = self.values[source]
            args.append(self._convert(node, val, layouts, sharder.layouts[placeholder.name]))
        if sharder.noise is not None:
            args.append(self.graph.call_function(segment_noise, (self.noise, index)))
        call = self.graph.call_module(module_name(segment.name), tuple(args))
        for k, node in enumerate(block.graph.output_node().args[0]):
            item = self.graph.call_function(operator.getitem, (call, k))
            layouts = {axis: sharder.plan.ops[f"output{k}"][axis].inputs[0] for axis in self.axes}
            if not item.users:
                item._rename(f"{module_name(segment.name)}_{node.name}")
            self._record(Source(index, k), item, node.meta["val"], layouts)

    def _convert(self, node: Node, val: torch.Tensor, have: Layouts, wanted: Layouts) -> Node:
        for axis, to in conversion_path(have, wanted, self.axes):
            key = (node, axis, to)
            if key not in self.converted:
                self.converted[key] = insert_transition(self.graph, node, val, have, axis, to, self.sizes)
            node, have = self.converted[key], have | {axis: to}
        return node


def evaluation_copy(program: Program) -> Program:
    """The same program, sharing parameters, with dropout off, running statistics in the place of the batch's, and no buffer updates."""
    marked = any(n.target is in_training for m in program.module.modules() if isinstance(m, GraphModule) for n in m.graph.nodes)
    if not program.draws and not program.updates and not marked:
        return program
    root = _copied(program.module.graph)
    if program.updates:
        root.output_node().args = (root.output_node().args[0][0],)
        root.eliminate_dead_code(lambda node: node.op in ("placeholder", "call_module", "output"))
    read = {n.target: {user.args[1] for user in n.users} for n in root.nodes if n.op == "call_module"}
    modules = nn.Module()
    for name, child in program.module.named_children():
        child = getattr(child, "body", child)  # a recomputed segment wraps its graph
        graph = _copied(child.graph)
        for node in list(graph.nodes):
            if node.target in (dropout, in_training):
                node.replace_all_uses_with(node.args[int(node.target is in_training)])
                graph.erase_node(node)
            elif node.target is attention_with_dropout:
                q, k, v, mask, _, is_causal, scale = node.args[:7]
                node.target, node.args = torch.ops.aten.scaled_dot_product_attention.default, (q, k, v)
                node.kwargs = {"attn_mask": mask, "is_causal": is_causal, "scale": scale, "enable_gqa": True}
        outputs = graph.output_node().args[0]
        graph.output_node().args = (tuple(n if k in read[name] else None for k, n in enumerate(outputs)),)
        graph.eliminate_dead_code()
        modules.add_module(name, GraphModule(child, graph, class_name=type(child).__name__))
    return replace(program, module=GraphModule(modules, root, class_name="Program"), updates=())


def _copied(graph: Graph) -> Graph:
    """A copy whose nodes keep their meta."""
    new, mapping = Graph(), {}
    new.output(new.graph_copy(graph, mapping))
    for old, copied in mapping.items():
        copied.meta = dict(old.meta)
    return new
