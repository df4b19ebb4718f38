"""Checks that a plan, perhaps edited by hand, covers the model: all segments in stages, and layouts
for all ops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

from autopar.errors import AutoparError, shown
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.plan_checks import check_consistent
from autopar.ir.plan_fields import BlockPlan
from autopar.ir.sharding import AxisLayout
from autopar.ir.traced import BlockClass, TracedModel
from autopar.ops.legal import check_legal
from autopar.ops.values import is_getitem, ops, value_grads
from autopar.ops.work import tokens_per_row
from autopar.planning.pin_checks import check_fetched
from autopar.text.plan_words import other_cluster
from autopar.trace.fusion.fused import fused

DAMAGED = "it was damaged; plan again"


def check_parts(plan: Plan) -> None:
    """Raises AutoparError, naming the field, if a field of a plan is wrong or contradicts
    another.
    """
    try:
        check_consistent(plan)
    except (AutoparError, ValueError) as error:
        raise AutoparError(f"the plan is not complete: {error}: {DAMAGED}") from None


def check_segments(plan: Plan, traced: TracedModel) -> None:
    """Raises AutoparError unless the plan covers the model. The stages must hold its segments in
    order. Each block must have segments of one structure, and a legal choice for each op.
    """
    dealt, own = (
        [name for stage in plan.stages for name in stage],
        [segment.name for segment in traced.segments],
    )
    for number, (found, name) in enumerate(zip_longest(dealt, own)):
        if found != name:
            raise AutoparError(
                f"the plan's stages have {shown(found)} as segment {number}, where the model has {shown(name)}: stages hold its "
                f"{len(own)} segments in order, {shown(own)}: {DAMAGED}"
            )
    classes = {segment.name: segment.class_index for segment in traced.segments}
    for block in plan.blocks:
        numbers = {classes[name] for name in block.segments}
        if len({traced.classes[number].structure_hash for number in numbers}) > 1:
            raise AutoparError(
                f"the plan's block {shown(block.name)} has segments of several structures, {shown(list(block.segments))}: {DAMAGED}"
            )
        for number in numbers:
            _check_ops(block, traced.classes[number], plan.mesh.active)


def _check_ops(block: BlockPlan, structure: BlockClass, axes: tuple[str, ...]) -> None:
    named = set(_named(structure))
    for names, words in (
        (named - set(block.ops), "lacks op"),
        (set(block.ops) - named, "has the unknown op"),
    ):
        if names:
            raise AutoparError(
                f"the plan's block {shown(block.name)} {words} {shown(min(names))}: {DAMAGED}"
            )
    if axes:
        grads = value_grads(structure.graph)
        for node in ops(structure.graph):
            check_legal(node, block.ops[node.name], grads, block.name)
        for name, dims, is_result in _ends(structure):
            for axis, choice in block.ops[name].items():
                layouts = choice.inputs if is_result else choice.outputs
                if (
                    len(layouts) != 1
                    or len(choice.inputs) + len(choice.outputs) != 1
                    or not _names(choice.strategy, layouts[0], dims)
                ):
                    raise AutoparError(
                        f"the plan places {shown(name)} of block {shown(block.name)} over {axis} as {shown(choice.strategy)} ("
                        f"{', '.join(map(str, choice.inputs))} -> {', '.join(map(str, choice.outputs))}), which is not one layout of its "
                        f"{dims} dims, by its name: {DAMAGED}"
                    )


def _names(strategy: str, layout: AxisLayout, dims: int) -> bool:
    """Whether `strategy` is the text of `layout`, and this is possible for a tensor with `dims`
    dims.
    """
    return strategy == str(layout) and layout.dim < max(dims, 1)


def _ends(structure: BlockClass) -> Iterator[tuple[str, int, bool]]:
    """(name, number of dims, whether it is a result) of each input, parameter and result of a
    block, in graph order. Results are called output0, output1, and so on.
    """
    for node in structure.graph.nodes:
        if node.op == "output":
            yield from (
                (f"output{number}", source.meta["val"].dim(), True)
                for number, source in enumerate(node.args[0])
            )
        elif node.op in ("placeholder", "get_attr"):
            yield node.name, node.meta["val"].dim(), False


def _named(structure: BlockClass) -> Iterator[str]:
    """The names for which a plan's block must have choices: all nodes of the graph but getitems,
    and output0, output1, and so on for results.
    """
    for node in structure.graph.nodes:
        if node.op == "output":
            yield from (f"output{number}" for number in range(len(node.args[0])))
        elif not is_getitem(node):
            yield node.name


def check_plan(plan: Plan, traced: TracedModel, cluster: Cluster) -> None:
    """Raises AutoparError if `plan` was made for another model or cluster, does not cover the
    model, or contradicts itself.
    """
    check_parts(plan)
    if plan.offload == "parameters":
        check_fetched(plan.mesh.pp, plan.zero)
    if plan.model_hash != traced.model_hash:
        raise AutoparError(_other_model(plan, traced))
    if plan.cluster_hash != cluster.spec_hash():
        raise AutoparError(other_cluster(plan, cluster))
    each, dealt = plan.mesh.num_devices // plan.mesh.pp, Counter(plan.mesh.groups)
    sizes = [group.num_devices for group in cluster.groups]
    if len(sizes) > 1 and [dealt[number] * each for number in range(len(sizes))] != sizes:
        raise AutoparError(
            f"the plan's deal={plan.mesh.deal!r} of {each} devices a rank does not deal the groups of {cluster.name}: it was damaged; plan "
            "again"
        )
    if plan.mesh.num_devices != cluster.num_devices:
        raise AutoparError(
            f"the plan's mesh has {plan.mesh.num_devices} devices and {cluster.name} {cluster.num_devices}: it was damaged; plan again"
        )
    check_segments(plan, fused(traced, plan.fusion.mode))


def _other_model(plan: Plan, traced: TracedModel) -> str:
    """What differs between the model of a plan and another one, as text."""
    seq, own = plan.made_for.seq, tokens_per_row(traced)
    if seq and own != seq:
        return (
            f"the plan was made for {plan.model_name} on sequences of {seq} tokens, and this model reads {own}: ask with --seq {seq}, "
            "give example inputs of that length, or plan again"
        )
    return (
        f"the plan was made for {plan.model_name} with structure {plan.model_hash[:12]}; this model has structure "
        f"{traced.model_hash[:12]}: plan again"
    )
