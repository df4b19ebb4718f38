"""Assembles this rank's program: one GraphModule per segment, and a root GraphModule per stage that
calls them like the model's forward.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import autopar_kernels.rotary  # noqa: F401 (registers the ops)
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from autopar.errors import AutoparError
from autopar.ir.calls import argument
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.sharding import RP, AxisLayout, P
from autopar.ir.traced import ParameterSpec, Source, StepValues, TracedModel
from autopar.ops.values import output_nodes, value_grads, value_name
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.lowerings.dropout import attention_with_dropout, dropout
from autopar.rewrite.lowerings.sizes import Layouts
from autopar.rewrite.lowerings.vocabulary_parallel import in_training
from autopar.rewrite.overlap import overlap
from autopar.rewrite.printing import program_text
from autopar.rewrite.root import (
    RootGraph,
    SegmentValue,
    fake_loss,
    input_layouts,
    module_name,
    segments_of,
)
from autopar.rewrite.shard import ClassSharder
from autopar.rewrite.stages import Stage, cut_stages, holders_of, steady_values
from autopar.trace.fusion.fused import fused

_SINGLE = torch.ops.autopar.rotary_single.default
_SHARED = [each.name for each in _SINGLE._schema.arguments if each.name != "x"]


@dataclass(frozen=True, slots=True)
class ProgramParameter:
    """A record of a parameter or buffer of the program: its place (`module`.`attribute`), its spec,
    and its layout on each axis with more than one rank. It holds no values.
    """

    module: str
    attribute: str
    spec: ParameterSpec
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One pipeline stage of a rank's program. `module` takes the values `received`, the graph
    inputs `stage.inputs`, and NOISE if `draws` (the stage draws random numbers). It returns the
    values `sent` (a tuple), or the loss in the last stage, and the new values of the buffers
    `updates`.
    """

    stage: Stage
    module: GraphModule
    received: tuple[SegmentValue, ...]
    sent: tuple[SegmentValue, ...]
    draws: bool
    updates: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The program of one rank: its modules, and what they take and return.

    Attributes:
        module: without a pipeline, the module of the only stage. `module(**inputs)` returns the
            loss of a micro-batch, as this rank's part over `loss_axes`. If buffers change, it
            returns the loss and the new values of the buffers `updates`, each in its buffer's
            layout. In a pipeline, a module with the segments of all the rank's stages.
        mesh: the mesh.
        rank: the rank.
        stages: the rank's stages, in order.
        parameters: its parameters and buffers; on the meta device until materialized.
        inputs: the layouts of each graph input, by name.
        whole_inputs: the whole fake tensors of the user's inputs, by name.
        step_values: what a step computes of its whole batch, or None.
        loss: the fake tensor of the loss.
        holders: by name of a parameter or buffer, the pp coordinates that hold it.
        loss_axes: axes over which the loss is a partial sum. `whole_loss` adds these parts once per
            step.
    """

    module: nn.Module
    mesh: MeshShape
    rank: int
    stages: tuple[StageProgram, ...]
    parameters: tuple[ProgramParameter, ...]
    inputs: dict[str, Layouts]
    whole_inputs: dict[str, torch.Tensor]
    step_values: StepValues | None
    loss: torch.Tensor
    holders: dict[str, tuple[int, ...]]
    loss_axes: tuple[str, ...]

    @property
    def graph_inputs(self) -> dict[str, torch.Tensor]:
        """The whole fake tensor of each graph input, by name: the user's inputs, then the step
        values.
        """
        values = self.step_values
        own = {} if values is None else dict(zip(values.names, values.vals, strict=True))
        return self.whole_inputs | own

    @property
    def draws(self) -> bool:
        """Whether any of the rank's stages draws random numbers, as dropout does, so that it takes
        NOISE.
        """
        return any(stage.draws for stage in self.stages)

    @property
    def updates(self) -> tuple[str, ...]:
        """Names of the buffers that forward changes in the rank's stages, stage by stage."""
        return tuple(name for stage in self.stages for name in stage.updates)

    def whole_loss(self, loss: torch.Tensor, axes: Mapping[str, AxisGroup]) -> torch.Tensor:
        """The loss of the whole batch, on every rank: this rank's part, all-reduced over
        `loss_axes`. All ranks of these axes must call it.
        """
        for axis in self.loss_axes:
            loss = apply_primitive("all_reduce", loss, axes[axis])
        return loss

    @property
    def code(self) -> str:
        """Readable Python source of the root program of each stage and of each distinct block
        (`rewrite/printing.py`).
        """
        if len(self.stages) == 1:
            return program_text(self.stages[0].module)
        return "\n\n".join(
            f"# stage {stage.stage.index}\n\n{program_text(stage.module)}" for stage in self.stages
        )


def assemble(
    traced: TracedModel, plan: Plan, rank: int, device: torch.device, whole: bool = False
) -> Program:
    """The program of `rank` under a plan, with parameters on the meta device. With `whole`, the
    rank runs every segment of the model, as one stage. Calls such as arange make their tensors on
    `device`.

    Raises AutoparError if the plan does not fit the model.
    """
    traced, mesh = fused(traced, plan.fusion.mode), plan.mesh
    stages = cut_stages(traced, replace(plan, mesh=replace(mesh, pp=1, deal="")) if whole else plan)
    own = [
        stage for stage in stages if stage.index % mesh.pp == mesh.coordinate(rank, "pp") or whole
    ]
    choices = _choices(traced, plan)
    stored = stored_layouts(traced, plan, choices)
    numbers = [number for stage in own for number in range(stage.start, stage.end)]
    keys = {number: choices[number] for number in numbers}
    sharders, graphs = _sharded(traced, plan, keys.values(), stored, rank, device)
    segments, parameters = _segments(traced, keys, graphs, stored, mesh, rank)
    steady = steady_values(traced) if len(stages) > 1 else frozenset()
    crossed = {source for stage in own for source in (*stage.received, *stage.sent)}
    crossing = {x: _crossing(traced, plan, choices, x, x in steady) for x in crossed}
    layouts = {parameter.spec.name: parameter.layouts for parameter in parameters}
    programs = []
    for stage in own:
        of_segments = {n: sharders[choices[n]] for n in range(stage.start, stage.end)}
        root = RootGraph(traced, stage, of_segments, crossing, mesh, rank)
        graph = _overlapped(plan, root.run(layouts))
        module = GraphModule(segments, graph, class_name="Program")
        received, sent = (tuple(crossing[x] for x in xs) for xs in (stage.received, stage.sent))
        draws = root.noise is not None
        programs.append(StageProgram(stage, module, received, sent, draws, stage.updates))
    loss = plan.blocks[choices[-1][1]].ops["output0"]
    return Program(
        module=programs[0].module if len(stages) == 1 else segments,
        mesh=mesh,
        rank=rank,
        stages=tuple(programs),
        parameters=tuple(parameters),
        inputs={name: input_layouts(val, mesh) for name, val in traced.graph_inputs.items()},
        whole_inputs=dict(zip(traced.inputs, traced.input_vals, strict=True)),
        step_values=traced.step_values,
        loss=fake_loss(traced),
        holders=holders_of(traced, stages, mesh),
        loss_axes=tuple(axis for axis in mesh.active if loss[axis].inputs[0] == P),
    )


def class_graphs(
    traced: TracedModel, plan: Plan, rank: int, device: torch.device
) -> dict[str, Graph]:
    """For each block class by name: the graph of its first segment in the program of `rank`.
    Arguments and errors are those of `assemble`, which takes longer.
    """
    traced = fused(traced, plan.fusion.mode)
    choices = _choices(traced, plan)
    first = {traced.classes[key[0]].name: key for key in reversed(choices)}
    stored = stored_layouts(traced, plan, choices)
    _, graphs = _sharded(traced, plan, first.values(), stored, rank, device)
    return {name: graphs[key] for name, key in reversed(first.items())}


def _sharded(
    traced: TracedModel,
    plan: Plan,
    keys: Iterable[Key],
    stored: Mapping[Key, dict[str, Layouts]],
    rank: int,
    device: torch.device,
) -> tuple[dict[Key, ClassSharder], dict[Key, Graph]]:
    """(the sharder, the graph of a segment on `rank`) of each key; `stored` as `stored_layouts`."""
    sharders, graphs = {}, {}
    for key in dict.fromkeys(keys):
        block, chosen = traced.classes[key[0]], plan.blocks[key[1]]
        sharders[key] = ClassSharder(block, chosen, plan.mesh, rank, device, stored[key])
        graphs[key] = _overlapped(plan, join_rotations(sharders[key].run()))
    return sharders, graphs


def _overlapped(plan: Plan, graph: Graph) -> Graph:
    """`overlap`, but the graph itself where backward has two parts: a collective under way cannot
    be waited for in both.
    """
    return graph if plan.splits_backward else overlap(graph)


Key = tuple[int, int]
"""The class index and the index of the plan's block. Segments of one class may have different
blocks, for example in different stages.
"""


def _choices(traced: TracedModel, plan: Plan) -> list[Key]:
    """For each segment, in order: (class index, index of the plan's block that lists it). A plan
    that recomputes every k-th layer has two blocks for one class here.

    Raises AutoparError if no block lists a segment.
    """
    numbers = {name: number for number, block in enumerate(plan.blocks) for name in block.segments}
    found = []
    for segment in traced.segments:
        if segment.name not in numbers:
            name = traced.classes[segment.class_index].name
            known = ", ".join(dict.fromkeys(block.name for block in plan.blocks))
            raise AutoparError(
                f"the plan has no choices for segment {segment.name!r} of block {name!r} (it has {known}): it was made for another model"
            )
        found.append((segment.class_index, numbers[segment.name]))
    return found


def _crossing(
    traced: TracedModel, plan: Plan, choices: list[Key], source: Source, steady: bool
) -> SegmentValue:
    """The `SegmentValue` that describes output `source.index` of segment `source.segment`, which another
    stage reads. `steady`: it is the same for all micro-batches, unless it has a gradient. `choices`
    has (class, plan's block) of each segment.
    """
    segment, (index, number) = traced.segments[source.segment], choices[source.segment]
    graph = traced.classes[index].graph
    node = output_nodes(graph)[source.index]
    chosen = plan.blocks[number].ops[f"output{source.index}"]
    layouts = {axis: chosen[axis].inputs[0] for axis in plan.mesh.active}
    name = f"{module_name(segment.name)}_{node.name}"
    has_gradient = value_grads(graph)[value_name(node)]
    return SegmentValue(name, node.meta["val"], layouts, has_gradient, steady and not has_gradient)


def stored_layouts(
    traced: TracedModel, plan: Plan, choices: list[Key]
) -> dict[Key, dict[str, Layouts]]:
    """By (class, plan's block) and slot, the layouts in which that parameter is stored. `choices`
    has such a pair for each segment.

    Segments that share a tensor may want its gradient replicated in one place and partial in
    another. The tensor has one gradient, which is then partial; a segment that wants it replicated
    converts it. Raises AutoparError if segments want different layouts of the tensor itself, or a
    partial sum.
    """
    layouts: dict[Key, dict[str, Layouts]] = {}
    for key in dict.fromkeys(choices):
        layouts[key] = {}
        for node in traced.classes[key[0]].graph.find_nodes(op="get_attr"):
            chosen = plan.blocks[key[1]].ops.get(node.name, {})
            layouts[key][node.target] = {axis: x.outputs[0] for axis, x in chosen.items()}
    held = [
        (name, layouts[key][slot])
        for segment, key in zip(traced.segments, choices, strict=True)
        for slot, name in zip(traced.classes[key[0]].slots, segment.parameters, strict=True)
    ]
    changed = True
    while changed:
        agreed, changed = _agreed(held), False
        for name, mine in held:
            for axis in mine:
                # one slot may have tensors that others hold in several ways
                if mine[axis] != RP == agreed[name, axis]:
                    mine[axis], changed = RP, True
    return layouts


def _agreed(held: list[tuple[str, Layouts]]) -> dict[tuple[str, str], AxisLayout]:
    """By (parameter, axis), the layout that all its holders agree on; R/P if one of them has that.
    `held` lists (parameter, a holder's layouts).

    Raises AutoparError if holders place the tensor differently, or as a partial sum.
    """
    agreed: dict[tuple[str, str], AxisLayout] = {}
    for name, mine in held:
        for axis, layout in mine.items():
            # every rank would hold the whole and take it for a summand
            if layout.value.kind == "P":
                raise AutoparError(
                    f"the plan holds {name} as a partial sum over {axis}: it was damaged; plan again"
                )
            other = agreed.setdefault((name, axis), layout)
            if other.value != layout.value:
                raise AutoparError(
                    f"the plan places {name} both {other} and {layout} on {axis}: it is not consistent; plan again"
                )
            agreed[name, axis] = RP if RP in (other, layout) else layout
    return agreed


def _segments(
    traced: TracedModel,
    keys: Mapping[int, Key],
    graphs: Mapping[Key, Graph],
    stored: Mapping[Key, dict[str, Layouts]],
    mesh: MeshShape,
    rank: int,
) -> tuple[nn.Module, list[ProgramParameter]]:
    """(a module whose children are the segments with the numbers in `keys`, their parameters and
    buffers in order). `graphs` and `stored` are by the keys' values. Tied slots share one meta
    tensor. Constants are not among the parameters.
    """
    modules, parameters = nn.Module(), []
    shared: dict[str, torch.Tensor] = {}
    for number, key in keys.items():
        segment, block = traced.segments[number], traced.classes[key[0]]
        name, holder = module_name(segment.name), nn.Module()
        # what the model was captured in
        dtypes = {n.target: n.meta["val"].dtype for n in block.graph.find_nodes(op="get_attr")}
        for slot, attribute in zip(block.slots, segment.parameters, strict=True):
            spec, layouts = traced.parameters.get(attribute), stored[key][slot]
            if spec is None:
                constant = shard_of(traced.constants[attribute], layouts, mesh, rank)
                holder.register_buffer(slot, constant, persistent=False)
                continue
            parameters.append(ProgramParameter(name, slot, spec, dict(layouts)))
            if attribute not in shared:
                empty = torch.empty(spec.shape, dtype=dtypes[slot], device="meta")
                made = empty if spec.buffer else nn.Parameter(empty, requires_grad=spec.trainable)
                shared[attribute] = made
            tensor = shared[attribute]
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(slot, tensor)
            else:
                holder.register_buffer(slot, tensor)
        words = re.split(r"_(?:\d+_?)?", name)
        class_name = "".join(word.capitalize() for word in words) or "Segment"
        modules.add_module(name, GraphModule(holder, copied_graph(graphs[key]), class_name))
    return modules, parameters


def shard_of(whole: torch.Tensor, layouts: Layouts, mesh: MeshShape, rank: int) -> torch.Tensor:
    """This rank's part of a whole tensor with these layouts. It is a view if its patterns are
    contiguous.
    """
    for axis, layout in layouts.items():
        if layout.is_shard:
            split = Split(layout.dim, whole.shape[layout.dim], layout.pattern)
            whole = pick(whole, split, mesh.size(axis), mesh.coordinate(rank, axis))
    return whole


def evaluation_copy(program: Program) -> Program:
    """A program for evaluation that shares the parameters: without dropout and buffer updates, and
    with running statistics instead of the batch's. The program itself if it has none of these.
    """
    graphs = (m.graph for m in program.module.modules() if isinstance(m, GraphModule))
    marked = any(graph.find_nodes(op="call_function", target=in_training) for graph in graphs)
    if not program.draws and not program.updates and not marked:
        return program
    stages = tuple(_evaluated(stage) for stage in program.stages)
    one = isinstance(program.module, GraphModule)
    return replace(program, stages=stages, module=stages[0].module if one else program.module)


def _evaluated(stage: StageProgram) -> StageProgram:
    root = copied_graph(stage.module.graph)
    if stage.updates:
        results = output_nodes(root)
        root.output_node().args = (results[: len(stage.sent)] if stage.sent else results[0],)
        root.eliminate_dead_code(lambda node: node.op in ("placeholder", "call_module", "output"))
    read = {
        call.target: {user.args[1] for user in call.users}
        for call in root.find_nodes(op="call_module")
    }
    modules = nn.Module()
    for name, segment in segments_of(stage.module).items():
        graph = copied_graph(segment.graph)
        for node in list(graph.nodes):
            if node.target in (dropout, in_training):
                node.replace_all_uses_with(node.args[int(node.target is in_training)])
                graph.erase_node(node)
            elif node.target is attention_with_dropout:
                q, k, v, mask, _, is_causal, scale = node.args[:7]
                node.target = torch.ops.aten.scaled_dot_product_attention.default
                node.args = (q, k, v)
                node.kwargs = {
                    "attn_mask": mask,
                    "is_causal": is_causal,
                    "scale": scale,
                    "enable_gqa": True,
                }
        outputs = enumerate(output_nodes(graph))
        graph.output_node().args = (tuple(n if k in read[name] else None for k, n in outputs),)
        graph.eliminate_dead_code()
        modules.add_module(name, GraphModule(segment, graph, class_name=type(segment).__name__))
    return replace(stage, module=GraphModule(modules, root, class_name="Program"), updates=())


def copied_graph(graph: Graph) -> Graph:
    """A copy of a graph whose nodes have copies of the meta dicts."""
    new = Graph()
    mapping: dict[Node, Node] = {}
    new.output(new.graph_copy(graph, mapping))
    for old, copied in mapping.items():
        copied.meta = dict(old.meta)
    return new


def join_rotations(graph: Graph) -> Graph:
    """Join each two calls of `autopar::rotary_single` that share their tables into one of
    `autopar::rotary`, in place, and return the graph. Queries and keys then rotate in one launch.

    Requires: a graph of local ops. Ensures: the same values and gradients, to the bit. Both calls
    have their layouts: keys may be replicated over an axis that shards queries.
    """
    waiting: dict[tuple, Node] = {}
    for node in graph.find_nodes(op="call_function", target=_SINGLE):
        first = waiting.pop(_shared(node), None)
        if first is None or not all(node < user for user in first.users):
            waiting[_shared(node)] = node
        else:
            _join(graph, first, node)
    graph.lint()
    return graph


def _shared(node: Node) -> tuple:
    """What two calls must have in common, as a key: tables, attributes, sizes of all dims but
    heads, and the layouts that shard these dims.
    """
    heads = 2 if argument(node, "heads_last") else 1
    shape = [str(size) for dim, size in enumerate(node.meta["whole"].shape) if dim != heads]
    layouts = [
        (axis, str(layout))
        for axis, layout in node.meta["layouts"].items()
        if layout.dim not in (None, heads)
    ]
    return (*(argument(node, name) for name in _SHARED), *shape, *layouts)


def _join(graph: Graph, first: Node, second: Node) -> None:
    """Replace two calls of `autopar::rotary_single` by one of `autopar::rotary` at the place of
    `second`, in place.
    """
    operands = (argument(first, "x"), argument(second, "x"))
    shared = {name: argument(first, name) for name in _SHARED}
    with graph.inserting_before(second):
        joint = graph.call_function(torch.ops.autopar.rotary.default, operands, shared)
        items = [graph.call_function(operator.getitem, (joint, number)) for number in range(2)]
    joint.meta["op"] = second.meta["op"]
    for old, new in zip((first, second), items, strict=True):
        new.meta = {key: value for key, value in old.meta.items() if key != "op"}
        old.replace_all_uses_with(new)
        graph.erase_node(old)
        new._rename(old.name)
