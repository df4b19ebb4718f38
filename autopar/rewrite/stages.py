"""Cuts a model into the stages of a pipeline: segments, the values that cross from one stage to the
next, and the holders of parameters.

Stage s runs on the ranks with pp coordinate s % pp. A value crosses every boundary between the
segment that makes it and the last segment that reads it, in its producer's layout. Each rank sends
its local part to the rank with the same other coordinates in the next stage. The reader converts
it. Model inputs do not cross, since all ranks of a data-parallel coordinate receive the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import Source, TracedModel
from autopar.ops.values import output_nodes


@dataclass(frozen=True, slots=True)
class Stage:
    """A description of a stage: the segments from number `start` to before `end`. `received` and
    `sent` are the values that cross its boundaries, in the order of transfer. `inputs` are the
    graph inputs that it reads; `updates` are the buffers that it changes.
    """

    index: int
    start: int
    end: int
    inputs: tuple[str, ...]
    updates: tuple[str, ...]
    received: tuple[Source, ...] = ()
    sent: tuple[Source, ...] = ()


def cut_stages(traced: TracedModel, plan: Plan) -> tuple[Stage, ...]:
    """The stages of a plan, in order. Without a pipeline there is one, which takes every graph
    input.

    In a pipeline, raises AutoparError if the plan's stages are not the model's segments in order,
    or if they separate a buffer from its changes.
    """
    if plan.mesh.pp == 1:
        everything = tuple(traced.graph_inputs), tuple(traced.updates)
        return (Stage(0, 0, len(traced.segments), *everything),)
    ends = _ends(traced, plan)
    found: list[Stage] = []
    for index, (start, end) in enumerate(zip((0, *ends), ends, strict=False)):
        read = {source.name for segment in traced.segments[start:end] for source in segment.inputs}
        inputs = tuple(name for name in traced.graph_inputs if name in read)
        updates = tuple(n for n, source in traced.updates.items() if start <= source.segment < end)
        received = found[-1].sent if found else ()
        crossing = {"received": received, "sent": _crossing(traced, end)}
        found.append(Stage(index, start, end, inputs, updates, **crossing))
    _check_updates(traced, found)
    return tuple(found)


def _ends(traced: TracedModel, plan: Plan) -> tuple[int, ...]:
    """For each stage, the number of its last segment plus one. Raises AutoparError if the plan's
    stages are not the model's segments in order, as many stages on each rank.
    """
    named = [name for stage in plan.stages for name in stage]
    if (
        named != [segment.name for segment in traced.segments]
        or not all(plan.stages)
        or len(plan.stages) % plan.mesh.pp
    ):
        raise AutoparError(
            f"the plan's {len(plan.stages)} stages over pp={plan.mesh.pp} do not deal out the model's {len(traced.segments)} segments in "
            "order, at least one to each stage and as many stages to each rank. It was damaged; plan again"
        )
    ends, end = [], 0
    for stage in plan.stages:
        ends.append(end := end + len(stage))
    return tuple(ends)


def _crossing(traced: TracedModel, end: int) -> tuple[Source, ...]:
    """The values that segments before `end` make and segments from `end` on read, as `Source`s in
    the order in which they are made. Model inputs are left out.
    """
    later = {
        source
        for segment in traced.segments[end:]
        for source in segment.inputs
        if not source.name and source.segment < end
    }
    return tuple(sorted(later, key=lambda source: (source.segment, source.index)))


def _check_updates(traced: TracedModel, stages: list[Stage]) -> None:
    """Raise AutoparError if a buffer that forward changes is read in a stage that does not change
    it. Its ranks would keep the old values.
    """
    for name, source in traced.updates.items():
        holders, changing = set(), set()
        for stage in stages:
            if any(name in s.parameters for s in traced.segments[stage.start : stage.end]):
                holders.add(stage.index)
            if stage.start <= source.segment < stage.end:
                changing.add(stage.index)
        if holders != changing:
            raise AutoparError(
                f"forward changes buffer {name}, which stages {sorted(holders)} read and stages {sorted(changing)} change: a pipeline can "
                "run this only with all of them in one stage; drop pp"
            )


def steady_values(traced: TracedModel) -> frozenset[Source]:
    """The values between segments, as `Source`s, that are the same for all micro-batches of a step.
    They are computed from constants, parameters, unmodified buffers and sizes; examples are rotary
    tables and causal masks.
    """
    found: set[Source] = set()
    for number, segment in enumerate(traced.segments):
        block = traced.classes[segment.class_index]
        fills = dict(zip(block.slots, segment.parameters, strict=True))
        sources = iter(segment.inputs)
        varying: set[Node] = set()
        for node in block.graph.nodes:
            if node.op == "placeholder":
                varies = next(sources) not in found
            elif node.op == "get_attr":
                varies = fills.get(str(node.target)) in traced.updates
            elif node.op == "call_function" and node.target is not torch.ops.aten.sym_size.int:
                draws = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
                varies = draws or not varying.isdisjoint(node.all_input_nodes)
            else:
                continue
            if varies:
                varying.add(node)
        results = enumerate(output_nodes(block.graph))
        found |= {Source(number, k) for k, node in results if node not in varying}
    return frozenset(found)


def holders_of(
    traced: TracedModel, stages: tuple[Stage, ...], mesh: MeshShape
) -> dict[str, tuple[int, ...]]:
    """By name of a parameter or buffer, the pp coordinates that hold it, ascending: those whose
    stages read it, or 0 if none does. Tied parameters may have several.
    """
    found: dict[str, set[int]] = {name: set() for name in traced.parameters}
    for stage in stages:
        for segment in traced.segments[stage.start : stage.end]:
            for name in segment.parameters:
                if name in found:
                    found[name].add(stage.index % mesh.pp)
    return {name: tuple(sorted(held or {0})) for name, held in found.items()}
