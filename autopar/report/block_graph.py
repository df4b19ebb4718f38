"""A block of the model as a graph: its ops with their layouts, and the collectives on the edges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.annotated import AnnotatedOp
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import BlockPlan
from autopar.ir.sharding import COLLECTIVE_PRIMITIVES, transition
from autopar.ir.traced import TracedModel
from autopar.planning.model_facts import as_planned
from autopar.recheck.plan_costs import LayoutChange, PricedSegment, priced_segments, stage_segments
from autopar.report.action_parts import SegmentParts
from autopar.report.svg import Svg
from autopar.request.plan_request import PlanRequest
from autopar.text.layout_words import describe, interesting

_BOX_WIDE, _BOX_TALL, _STEP, _SPACE = 208.0, 44.0, 78.0, 22.0


@dataclass(frozen=True, slots=True)
class GraphNode:
    """An op of a block: its name, how it runs over each axis, the layout of its result, and the
    collectives inside. `layer` is the length of the longest path to it.
    """

    name: str
    how: tuple[str, ...]
    layout: str
    inside: str
    layer: int


@dataclass(frozen=True, slots=True)
class GraphEdge:
    """A value that leads from one op to another, perhaps through ops that are not shown.
    `collectives` change its layout on the way, in forward.
    """

    source: str
    target: str
    collectives: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BlockGraph:
    """The graph of a block class, of which the model has `count`, and how it recomputes. `around` are
    the collectives of all its parameters in each micro-batch, as under ZeRO-3.
    """

    name: str
    count: int
    recompute: str
    nodes: tuple[GraphNode, ...]
    edges: tuple[GraphEdge, ...]
    around: tuple[str, ...] = ()


def block_graph(plan: Plan, traced: TracedModel, request: PlanRequest) -> BlockGraph | None:
    """The graph of the block that the model has most of. None if no op of that is worth showing, as
    on one device. Raises AutoparError like `plan_costs`.
    """
    traced = as_planned(traced, plan)
    stage_segments(plan, traced)
    block = max(plan.blocks, key=lambda block: len(block.segments))
    names = interesting(block)
    if not names:
        return None
    _, segments = priced_segments(plan, traced, request, plan.mesh.groups[0])
    number = next(n for n, s in enumerate(traced.segments) if s.name == block.segments[-1])
    return _graph(plan, block, segments[number], names)


def _graph(
    plan: Plan, block: BlockPlan, segment: PricedSegment, names: Sequence[str]
) -> BlockGraph:
    shown = set(names)
    ops = [op for op in segment.block.ops if op.kind != "parameter"]
    edges = _edges(segment, ops, shown)
    layers: dict[str, int] = {}
    for op in ops:
        if op.name in shown or op.kind != "op":
            before = [layers[e.source] for e in edges if e.target == op.name and e.source in layers]
            layers[op.name] = max(before, default=-1) + 1
    linked = {end for edge in edges for end in (edge.source, edge.target)}
    parts = SegmentParts(plan, block.segments[-1], block, segment)
    nodes = tuple(
        GraphNode(
            name=op.name,
            how=_how(plan, block, op),
            layout=_layout(block, op),
            inside=_inside(parts, op),
            layer=layers[op.name],
        )
        for op in ops
        if op.name in layers and op.name in linked
    )
    return BlockGraph(
        block.name, len(block.segments), block.recompute, nodes, edges, parts.around()
    )


def _edges(
    segment: PricedSegment, ops: Sequence[AnnotatedOp], shown: set[str]
) -> tuple[GraphEdge, ...]:
    """Edges between shown ops, inputs and outputs."""
    changes = {(change.value, change.need): change for change in segment.changes}
    reached: dict[str, dict[str, tuple[str, ...]]] = {}  # value -> shown source -> collectives
    found: dict[tuple[str, str], tuple[str, ...]] = {}
    used: list[LayoutChange] = []  # a value is converted once for all that read it so
    for op in ops:
        sources: dict[str, tuple[str, ...]] = {}
        for value, need in zip(op.inputs, segment.chosen[op.name].inputs, strict=True):
            change = changes.get((value, need))
            sent: tuple[str, ...] = ()
            if change is not None:
                name, _ = transition(change.have, change.need)
                words = f"{name.replace('_', '-')} over tp" + ", shared" * (change in used)
                sent = (words,) if name in COLLECTIVE_PRIMITIVES else ()
                used.append(change)
            for source, before in reached.get(value, {}).items():
                sources.setdefault(source, (*before, *sent))
        is_shown = op.name in shown or op.kind != "op"
        if is_shown:
            for source, all_sent in sources.items():
                found.setdefault((source, op.name), all_sent)
        for value in op.outputs:
            reached[value] = {op.name: ()} if is_shown else sources
    return tuple(GraphEdge(*ends, tuple(dict.fromkeys(sent))) for ends, sent in found.items())


def _how(plan: Plan, block: BlockPlan, op: AnnotatedOp) -> tuple[str, ...]:
    if op.kind != "op":
        return ()
    axes = [axis for axis in plan.mesh.active if axis != "dp"]
    choices = block.ops.get(op.name, {})
    return tuple(f"{axis}: {describe(op.name, choices[axis])}" for axis in axes if axis in choices)


def _layout(block: BlockPlan, op: AnnotatedOp) -> str:
    choices = block.ops.get(op.name, {})
    kept = (
        (axis, (choice.outputs or choice.inputs)[0])
        for axis, choice in choices.items()
        if choice.outputs or choice.inputs
    )
    return ", ".join(f"{axis} {layout}" for axis, layout in kept)


def _inside(parts: SegmentParts, op: AnnotatedOp) -> str:
    """The collectives that an op runs itself in forward, in words."""
    strategy = parts.segment.chosen[op.name]
    if op.kind != "op" or not strategy.forward_comm_s:
        return ""
    names: Mapping[str, int] = Counter(parts.forward_names.get(op.name, ()))
    return ", ".join(f"{count} {name.replace('_', '-')}" for name, count in names.items())


def block_figure(graph: BlockGraph) -> Svg:
    """The drawing of a block, from its inputs at the top to its outputs."""
    layers: dict[int, list[GraphNode]] = {}
    for node in graph.nodes:
        layers.setdefault(node.layer, []).append(node)
    most = max(map(len, layers.values()))
    wide = max(most * (_BOX_WIDE + _SPACE) + 220, 620.0)
    order = sorted(layers)
    reach = {node.name: node.layer for node in graph.nodes}
    for edge in graph.edges:  # what leads far is at the right, where its edge goes round
        reach[edge.source] = max(reach[edge.source], _layer_of(graph, edge.target))
    for nodes in layers.values():
        nodes.sort(key=lambda node: reach[node.name])
    top = 18.0 * len(graph.around) + 4
    figure = Svg("block", f"Block {graph.name}", wide, len(order) * _STEP + top + 2)
    for line, words in enumerate(graph.around):
        figure.text(4, 13 + 18 * line, f"parameters of the block: {words}", "coll")
    at: dict[str, tuple[float, float, int]] = {}
    for row, layer in enumerate(order):
        nodes = layers[layer]
        left = (wide - len(nodes) * (_BOX_WIDE + _SPACE) + _SPACE) / 2
        for place, node in enumerate(nodes):
            at[node.name] = (left + place * (_BOX_WIDE + _SPACE), top + row * _STEP, row)
    ends = {row: max(x for x, _, other in at.values() if other == row) for _, _, row in at.values()}
    sides = 0
    for edge in graph.edges:
        sides += _edge(figure, edge, at, ends, sides)
    _labels(figure, graph, at)
    for node in graph.nodes:
        _node(figure, node, *at[node.name][:2])
    return figure


def _layer_of(graph: BlockGraph, name: str) -> int:
    return next(node.layer for node in graph.nodes if node.name == name)


def _node(figure: Svg, node: GraphNode, x: float, y: float) -> None:
    words = "; ".join((*node.how, node.layout, node.inside))
    figure.rect(x, y, _BOX_WIDE, _BOX_TALL, "box", f"{node.name}: {words}")
    middle = x + _BOX_WIDE / 2
    figure.text(middle, y + 13, _short(node.name, 28), "strong", "middle")
    how = "; ".join(node.how) or node.layout
    figure.text(middle, y + 26, _short(how, 36), "small", "middle")
    last = node.inside or (node.layout if node.how else "")
    figure.text(middle, y + 38, _short(last, 36), "small", "middle")


def _edge(
    figure: Svg,
    edge: GraphEdge,
    at: Mapping[str, tuple[float, float, int]],
    ends: Mapping[int, float],
    sides: int,
) -> int:
    """Draw an edge. Returns 1 if it goes round at the side, past other layers, otherwise 0. `ends`
    has the x of the last box of each row, past which such an edge must not run at its height.
    """
    (x1, y1, row1), (x2, y2, row2) = at[edge.source], at[edge.target]
    start, end = (x1 + _BOX_WIDE / 2, y1 + _BOX_TALL), (x2 + _BOX_WIDE / 2, y2)
    words = ", ".join(edge.collectives)
    if row2 == row1 + 1:
        half = (start[1] + end[1]) / 2
        figure.path(
            f"M{start[0]:.1f} {start[1]:.1f}C{start[0]:.1f} {half:.1f} {end[0]:.1f} {half:.1f} {end[0]:.1f} {end[1]:.1f}",
            "flow",
            words or "no collective",
        )
        return 0
    lane = sides % 4
    out, gap = figure.width - 96 + 14 * lane, 6 + 4 * lane
    inset = _BOX_WIDE - 10 - 6 * lane
    leave = (
        f"M{x1 + _BOX_WIDE:.1f} {y1 + 3 + 3 * lane:.1f}"
        if x1 == ends[row1]
        else f"M{x1 + inset:.1f} {y1 + _BOX_TALL:.1f}v{gap}"
    )
    arrive = (
        f"V{y2 + 25 + 5 * lane:.1f}H{x2 + _BOX_WIDE:.1f}"
        if x2 == ends[row2]
        else f"V{y2 - gap:.1f}H{x2 + inset:.1f}V{y2:.1f}"
    )
    figure.path(f"{leave}H{out:.1f}{arrive}", "flow", words or "no collective")
    return 1


def _labels(figure: Svg, graph: BlockGraph, at: Mapping[str, tuple[float, float, int]]) -> None:
    """Write the collectives of the edges above the op that reads their results, those of edges that
    go round at its side.
    """
    above: dict[str, Counter[str]] = {}
    beside: dict[str, Counter[str]] = {}
    for edge in graph.edges:
        near = at[edge.target][2] == at[edge.source][2] + 1
        (above if near else beside).setdefault(edge.target, Counter()).update(edge.collectives)
    for labels, x_off, y_off in ((above, _BOX_WIDE / 2 + 4, -6.0), (beside, _BOX_WIDE + 4, 17.0)):
        for target, counts in labels.items():
            words = ", ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
            if words:
                x, y, _ = at[target]
                figure.text(x + x_off, y + y_off, _short(words, 40), "coll")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
