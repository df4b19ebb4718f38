"""Assemble this rank's program: one GraphModule per segment, joined by a root GraphModule per stage that reads like the model's forward."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.sharding import RP, P
from autopar.ir.traced import BlockClass, ParameterSpec, Segment, Source, StepValues, TracedModel
from autopar.ops.values import value_grads, value_name
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.rewrite.lowerings.dropout import attention_with_dropout, dropout
from autopar.rewrite.lowerings.sizes import Layouts
from autopar.rewrite.lowerings.vocabulary_parallel import in_training
from autopar.rewrite.overlap import overlap
from autopar.rewrite.printing import program_text
from autopar.rewrite.root import RootGraph, Value, input_layouts, loss_of, module_name
from autopar.rewrite.shard import ClassSharder
from autopar.rewrite.stages import Stage, cut, holders_of, steady_values


@dataclass(frozen=True, slots=True)
class ProgramParameter:
    """A parameter or buffer of the program: where it hangs (`module`.`attribute`), what it is, and its layout on each axis > 1."""

    module: str
    attribute: str
    spec: ParameterSpec
    layouts: Layouts


@dataclass(frozen=True, slots=True)
class StageProgram:
    """One stage.  `module` takes the values `received`, the graph inputs `stage.inputs` and NOISE if `draws`; it returns the values
    `sent` (a tuple), or the loss in the last stage, and the new values of `updates`."""

    stage: Stage
    module: GraphModule
    received: tuple[Value, ...]
    sent: tuple[Value, ...]
    draws: bool
    updates: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """What one rank runs: its `stages`, in order.  Without a pipeline there is one, and `module` is its module: `module(**inputs)` returns
    the loss of the whole batch, or the loss and the new values of the buffers `updates`, each in the layout of its buffer.  In a pipeline
    `module` holds the segments of all the rank's stages.  Parameters are on the meta device until materialized.

    Over `loss_axes` the loss is this rank's summand of it: `whole_loss` adds up what a step's micro-batches gave, once.

    `inputs` maps each graph input to its layouts, `graph_inputs` to the fake tensor of the whole; those of the user are `whole_inputs`, the
    others `step_values`.  `loss` is the fake tensor of the loss; `holders` are the pp coordinates that hold each parameter and buffer.
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
        values = self.step_values
        own = {} if values is None else dict(zip(values.names, values.vals, strict=True))
        return self.whole_inputs | own

    @property
    def draws(self) -> bool:
        return any(stage.draws for stage in self.stages)

    @property
    def updates(self) -> tuple[str, ...]:
        return tuple(name for stage in self.stages for name in stage.updates)

    def whole_loss(self, loss: torch.Tensor, axes: Mapping[str, AxisGroup]) -> torch.Tensor:
        """The loss of the whole batch from this rank's summand."""
        for axis in self.loss_axes:
            loss = apply_primitive("all_reduce", loss, axes[axis])
        return loss

    @property
    def code(self) -> str:
        """The root program of each stage and each distinct block as Python source, to be read (`rewrite/printing.py`)."""
        if len(self.stages) == 1:
            return program_text(self.stages[0].module)
        return "\n\n".join(
            f"# stage {stage.stage.index}\n\n{program_text(stage.module)}" for stage in self.stages
        )


def assemble(
    traced: TracedModel, plan: Plan, rank: int, device: torch.device, whole: bool = False
) -> Program:
    """Rewrite the model into the program of `rank`; with `whole`, as if the rank ran every stage, as one."""
    mesh = plan.mesh
    stages = cut(traced, replace(plan, mesh=replace(mesh, pp=1, deal="")) if whole else plan)
    own = [
        stage for stage in stages if stage.index % mesh.pp == mesh.coordinate(rank, "pp") or whole
    ]
    choices = _choices(traced, plan)
    stored = stored_layouts(traced, plan, choices)
    numbers = [number for stage in own for number in range(stage.start, stage.end)]
    sharders: dict[tuple[int, int], ClassSharder] = {}
    graphs: dict[tuple[int, int], Graph] = {}
    # a collective under way cannot be waited for in both parts of a backward
    later = (lambda graph: graph) if plan.splits_backward else overlap
    for key in dict.fromkeys(choices[number] for number in numbers):
        sharders[key] = ClassSharder(
            traced.classes[key[0]], plan.blocks[key[1]], mesh, rank, device, stored[key]
        )
        graphs[key] = later(sharders[key].run())
    segments, parameters = _segments(traced, numbers, choices, sharders, graphs, stored, mesh, rank)
    steady = steady_values(traced) if len(stages) > 1 else frozenset()
    crossed = {source for stage in own for source in (*stage.received, *stage.sent)}
    crossing = {
        source: _crossing(traced, plan, choices, source, source in steady) for source in crossed
    }
    layouts = {parameter.spec.name: parameter.layouts for parameter in parameters}
    programs = []
    for stage in own:
        root = RootGraph(
            traced,
            stage,
            {n: sharders[choices[n]] for n in range(stage.start, stage.end)},
            crossing,
            mesh,
            rank,
        )
        module = GraphModule(segments, later(root.run(layouts)), class_name="Program")
        received, sent = (
            [crossing[source] for source in sources] for sources in (stage.received, stage.sent)
        )
        programs.append(
            StageProgram(
                stage, module, tuple(received), tuple(sent), root.noise is not None, stage.updates
            )
        )
    return Program(
        programs[0].module if len(stages) == 1 else segments,
        mesh,
        rank,
        tuple(programs),
        tuple(parameters),
        {name: input_layouts(val, mesh) for name, val in traced.graph_inputs.items()},
        dict(zip(traced.inputs, traced.input_vals, strict=True)),
        traced.step_values,
        loss_of(traced),
        holders_of(traced, stages, mesh),
        tuple(
            axis
            for axis in mesh.active
            if plan.blocks[choices[-1][1]].ops["output0"][axis].inputs[0] == P
        ),
    )


Key = tuple[int, int]
"""A class and a BlockPlan of the plan, by number: segments of one class may run differently, as those of other stages do."""


def _choices(traced: TracedModel, plan: Plan) -> list[Key]:
    """The class and the BlockPlan of every segment.  A plan that recomputes every k-th layer has two blocks for what is one class here."""
    numbers = {name: number for number, block in enumerate(plan.blocks) for name in block.segments}
    found = []
    for segment in traced.segments:
        if segment.name not in numbers:
            name, known = (
                traced.classes[segment.class_index].name,
                ", ".join(dict.fromkeys(block.name for block in plan.blocks)),
            )
            raise AutoparError(
                f"the plan has no choices for segment {segment.name!r} of block {name!r} (it has {known}): it was made for another model"
            )
        found.append((segment.class_index, numbers[segment.name]))
    return found


def _crossing(
    traced: TracedModel, plan: Plan, choices: list[Key], source: Source, steady: bool
) -> Value:
    """What there is to know of a value that crosses a boundary of stages."""
    segment, (index, number) = traced.segments[source.segment], choices[source.segment]
    graph = traced.classes[index].graph
    node = graph.output_node().args[0][source.index]
    chosen = plan.blocks[number].ops[f"output{source.index}"]
    layouts = {axis: chosen[axis].inputs[0] for axis in plan.mesh.active}
    name = f"{module_name(segment.name)}_{node.name}"
    has_gradient = value_grads(graph)[value_name(node)]
    return Value(name, node.meta["val"], layouts, has_gradient, steady and not has_gradient)


def stored_layouts(
    traced: TracedModel, plan: Plan, choices: list[Key]
) -> dict[Key, dict[str, Layouts]]:
    """The layouts of each class' parameters, by slot, that every holder of a parameter agrees on.

    Holders of one tensor may want its gradient replicated here and partial there; the tensor has one gradient, which is then partial,
    and a holder that wants it replicated converts.  Raises AutoparError if holders place the tensor itself differently.
    """
    layouts = {}
    for key in dict.fromkeys(choices):
        chosen = plan.blocks[key[1]].ops
        slots = {
            n.target: chosen.get(n.name, {})
            for n in traced.classes[key[0]].graph.nodes
            if n.op == "get_attr"
        }
        layouts[key] = {
            slot: {axis: choice.outputs[0] for axis, choice in found.items()}
            for slot, found in slots.items()
        }
    changed = True
    while changed:
        changed, agreed = False, {}
        for segment, key in zip(traced.segments, choices, strict=True):
            for slot, name in zip(traced.classes[key[0]].slots, segment.parameters, strict=True):
                mine = layouts[key][slot]
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
        for segment, key in zip(traced.segments, choices, strict=True):
            for slot, name in zip(traced.classes[key[0]].slots, segment.parameters, strict=True):
                mine = layouts[key][slot]
                for axis in mine:
                    # one slot may have tensors that others hold in several ways
                    if mine[axis] != RP == agreed[name, axis]:
                        mine[axis], changed = RP, True
    return layouts


def _segments(
    traced: TracedModel,
    numbers: list[int],
    choices: list[Key],
    sharders: Mapping[Key, ClassSharder],
    graphs: Mapping[Key, Graph],
    stored: Mapping[Key, dict[str, Layouts]],
    mesh: MeshShape,
    rank: int,
) -> tuple[nn.Module, list[ProgramParameter]]:
    """A module whose children are the segments with these numbers, and their parameters; tied slots share one meta tensor."""
    modules, parameters, shared = nn.Module(), [], {}
    for number in numbers:
        segment, key = traced.segments[number], choices[number]
        block, name = traced.classes[key[0]], module_name(segment.name)
        constants = {
            slot: shard_of(traced.constants[attribute], stored[key][slot], mesh, rank)
            for slot, attribute in zip(block.slots, segment.parameters, strict=True)
            if attribute not in traced.parameters
        }
        modules.add_module(
            name, _segment_module(name, segment, block, graphs[key], traced, shared, constants)
        )
        for slot, attribute in zip(block.slots, segment.parameters, strict=True):
            if attribute in traced.parameters:
                layouts = sharders[key].layouts[_slot_node(block, slot)]
                parameters.append(
                    ProgramParameter(name, slot, traced.parameters[attribute], layouts)
                )
    return modules, parameters


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
    name: str,
    segment: Segment,
    block: BlockClass,
    graph: Graph,
    traced: TracedModel,
    shared: dict,
    constants: dict[str, torch.Tensor],
) -> GraphModule:
    holder = nn.Module()
    read = {
        node.target: node.meta["val"].dtype for node in block.graph.nodes if node.op == "get_attr"
    }  # what the model was captured in
    for slot, attribute in zip(block.slots, segment.parameters, strict=True):
        spec = traced.parameters.get(attribute)
        if spec is None:
            holder.register_buffer(slot, constants[slot], persistent=False)
            continue
        if attribute not in shared:
            tensor = torch.empty(spec.shape, dtype=read[slot], device="meta")
            shared[attribute] = (
                tensor if spec.buffer else nn.Parameter(tensor, requires_grad=spec.trainable)
            )
        holder.register_buffer(
            slot, shared[attribute]
        ) if spec.buffer else holder.register_parameter(slot, shared[attribute])
    class_name = "".join(part.capitalize() for part in re.split(r"_(?:\d+_?)?", name)) or "Segment"
    return GraphModule(holder, copied_graph(graph), class_name=class_name)


def evaluation_copy(program: Program) -> Program:
    """The same program, sharing parameters, with dropout off, running statistics in the place of the batch's, and no buffer updates."""
    marked = any(
        n.target is in_training
        for m in program.module.modules()
        if isinstance(m, GraphModule)
        for n in m.graph.nodes
    )
    if not program.draws and not program.updates and not marked:
        return program
    stages = tuple(_evaluated(stage) for stage in program.stages)
    return replace(
        program,
        stages=stages,
        module=stages[0].module if isinstance(program.module, GraphModule) else program.module,
    )


def _evaluated(stage: StageProgram) -> StageProgram:
    root = copied_graph(stage.module.graph)
    if stage.updates:
        results = root.output_node().args[0]
        root.output_node().args = (results[: len(stage.sent)] if stage.sent else results[0],)
        root.eliminate_dead_code(lambda node: node.op in ("placeholder", "call_module", "output"))
    read = {
        n.target: {user.args[1] for user in n.users} for n in root.nodes if n.op == "call_module"
    }
    modules = nn.Module()
    for name, child in stage.module.named_children():
        child = getattr(child, "body", child)  # a recomputed segment wraps its graph
        graph = copied_graph(child.graph)
        for node in list(graph.nodes):
            if node.target in (dropout, in_training):
                node.replace_all_uses_with(node.args[int(node.target is in_training)])
                graph.erase_node(node)
            elif node.target is attention_with_dropout:
                q, k, v, mask, _, is_causal, scale = node.args[:7]
                node.target, node.args = (
                    torch.ops.aten.scaled_dot_product_attention.default,
                    (q, k, v),
                )
                node.kwargs = {
                    "attn_mask": mask,
                    "is_causal": is_causal,
                    "scale": scale,
                    "enable_gqa": True,
                }
        outputs = graph.output_node().args[0]
        graph.output_node().args = (
            tuple(n if k in read[name] else None for k, n in enumerate(outputs)),
        )
        graph.eliminate_dead_code()
        modules.add_module(name, GraphModule(child, graph, class_name=type(child).__name__))
    return replace(stage, module=GraphModule(modules, root, class_name="Program"), updates=())


def copied_graph(graph: Graph) -> Graph:
    """A copy whose nodes keep their meta."""
    new, mapping = Graph(), {}
    new.output(new.graph_copy(graph, mapping))
    for old, copied in mapping.items():
        copied.meta = dict(old.meta)
    return new
