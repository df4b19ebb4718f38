"""Adds layers to a captured model, and marks every k-th layer of a traced one.

Export takes 0.1 to 0.2 seconds per layer. A deep model with layers that are alike can be derived
from a shallow one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.errors import AutoparError
from autopar.ir.traced import ParameterSpec, TracedModel, per_model
from autopar.trace.capture import Captured

_ROOT = "model."
"""The attribute prefix under which capture holds the user's model."""


@dataclass(frozen=True, slots=True)
class Deeper:
    """A description of a deeper model: `times` more periods of `period` layers in the module list
    at `path`, such as 'layers', whose layers repeat after each period. Raises AutoparError for
    numbers below 1.
    """

    path: str
    period: int
    times: int

    def __post_init__(self) -> None:
        if self.period < 1 or self.times < 1:
            raise AutoparError(
                f"{self.path} cannot get {self.times} more periods of {self.period} layers: both are at least 1"
            )

    @property
    def more(self) -> int:
        """Number of layers to add: `period` * `times`."""
        return self.period * self.times

    def layer(self, name: str) -> int | None:
        """The index of the layer to which a module or parameter belongs, by its dotted name; None
        outside the list at `path`.
        """
        prefix = f"{self.path}."
        index = name.removeprefix(prefix).partition(".")[0]
        return int(index) if name.startswith(prefix) and index.isdigit() else None

    def moved(self, name: str, by: int) -> str:
        """The dotted name of the same module or parameter in the layer `by` places later. A name
        outside the list at `path` is unchanged.
        """
        layer = self.layer(name)
        return (
            name
            if layer is None
            else f"{self.path}.{layer + by}{name.removeprefix(f'{self.path}.{layer}')}"
        )


def deepened(captured: Captured, deeper: Deeper) -> Captured:
    """The capture of a deeper model, made from the normalized capture of a shallow one. It modifies
    the shallow graph in place.

    The period before the last layer is copied, including ops between its layers. The last layer
    becomes the last layer of the deeper model. A copy reads its own parameters. It reads from the
    previous copy what its period reads from the previous period; everything else it reads
    unchanged.

    Raises AutoparError unless the model has two equal periods and one more layer. It is also raised
    if layers share parameters or change buffers, or if ops after the layers read an earlier one:
    more layers might then compute something else.
    """
    ties = [
        spec.name
        for spec in captured.parameters.values()
        if len({deeper.layer(n) for n in (spec.name, *spec.aliases)}) > 1
    ]
    numbers = [name for name, spec in captured.parameters.items() if spec.read_as_number]
    changed = [name for name in (*captured.updates, *numbers) if deeper.layer(name) is not None]
    if ties or changed:
        raise AutoparError(
            f"layers of {deeper.path} {'share' if ties else 'change or read as a number'} {(ties + changed)[0]}: trace the model whole"
        )
    last, before, period, rest = _periods(captured, deeper)
    graph, names = captured.graph, captured.attributes
    read = {
        node: names[node.name] for node in graph.find_nodes(op="placeholder") if node.name in names
    }
    attributes = {
        node.name: deeper.moved(name, deeper.more if deeper.layer(name) == last else 0)
        for node, name in read.items()
    }
    latest = period
    for by in range(deeper.period, deeper.more + 1, deeper.period):
        copies = dict(zip(before, latest, strict=True))
        for node, name in read.items():
            if deeper.layer(name) in range(last - deeper.period, last):
                with graph.inserting_after(node):
                    copies[node] = graph.placeholder(f"{node.name}_later_{by}")
                copies[node].meta = dict(node.meta)
                attributes[copies[node].name] = deeper.moved(name, by)

        def copied(operand: Node, copies: dict[Node, Node] = copies) -> Node:
            return copies.get(operand, operand)

        with graph.inserting_before(rest[0]):
            for node in period:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), copied)
                copies[node] = graph.create_node(node.op, node.target, args, kwargs, name=node.name)
                copies[node].meta = _moved_meta(node, deeper, by)
        latest = [copies[node] for node in period]
    following = set(rest)
    for node, copy in zip(period, latest, strict=True):
        node.replace_all_uses_with(copy, delete_user_cb=following.__contains__)
    for node in rest:
        if _layer_of(node, deeper) is not None:
            node.meta = _moved_meta(node, deeper, deeper.more)
    return replace(
        captured,
        attributes=attributes,
        parameters=_more_parameters(captured.parameters, last, deeper),
    )


def _periods(captured: Captured, deeper: Deeper) -> tuple[int, list[Node], list[Node], list[Node]]:
    """(index of the last layer, calls of the period before the next, calls of the period before the
    last layer, other calls from the last layer on). Calls are in graph order.

    Ops between two layers belong to the first of them. Raises AutoparError if the two periods are
    not equal, there are too few layers, or the last part reads an earlier layer than the last
    period.
    """
    nodes, period = (
        [node for node in captured.graph.nodes if node.op == "call_function"],
        deeper.period,
    )
    layers = [_layer_of(node, deeper) for node in nodes]
    last = max((layer for layer in layers if layer is not None), default=-1)
    if last < 2 * period:
        raise AutoparError(
            f"{last + 1} layers of {deeper.path} do not show what repeats: a period of {period} takes {2 * period + 1}"
        )
    cuts = [layers.index(layer) for layer in (0, last - 2 * period, last - period, last)]
    before, repeated, rest = nodes[cuts[1] : cuts[2]], nodes[cuts[2] : cuts[3]], nodes[cuts[3] :]
    in_order = [layer for layer in layers if layer is not None]
    if in_order != sorted(in_order) or not _alike(repeated, before, captured, deeper):
        raise AutoparError(
            f"the layers of {deeper.path} before the last are not two equal periods of {period}; trace more layers"
        )
    early = set(nodes[cuts[0] : cuts[2]])
    for node in rest:
        if found := early.intersection(node.all_input_nodes):
            raise AutoparError(
                f"what follows {deeper.path} reads {found.pop().name} of an earlier layer: trace the model whole"
            )
    return last, before, repeated, rest


def _alike(period: list[Node], before: list[Node], captured: Captured, deeper: Deeper) -> bool:
    """Whether the calls of two periods of layers compute the same: equal calls, in order, on
    corresponding values and parameters. Where the later period reads the earlier one (`before`),
    the earlier one must read what comes before it.
    """
    twins, early = dict(zip(period, before, strict=False)), set(before)

    def alike(one: Node, other: Node) -> bool:
        name = captured.attributes.get(one.name, "")
        if deeper.layer(name) is not None:
            return captured.attributes.get(other.name) == deeper.moved(name, -deeper.period)
        return (
            twins[one] is other
            if one in twins
            else other not in early
            if one in early
            else one is other
        )

    return len(period) == len(before) and all(
        _described(one) == _described(other) and all(map(alike, _operands(one), _operands(other)))
        for one, other in twins.items()
    )


def _described(node: Node) -> str:
    """A call as text without its operands: target, other arguments, and shapes and dtypes of the
    results. Equal texts are equal calls.
    """
    val = node.meta.get("val")
    vals = [
        v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, torch.Tensor)
    ]
    return f"{node.target}{torch.fx.map_arg((node.args, node.kwargs), lambda _: '%')}{[(list(map(str, v.shape)), v.dtype) for v in vals]}"


def _operands(node: Node) -> list[Node]:
    """The nodes among a call's arguments, in order, with repetitions."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _layer_of(node: Node, deeper: Deeper) -> int | None:
    """The index of the layer in which a node runs, by its module stack. None if it runs outside the
    list at `deeper.path`.
    """
    stack = node.meta.get("nn_module_stack", {}).values()
    return next(
        (
            layer
            for path, _ in stack
            if (layer := deeper.layer(path.removeprefix(_ROOT))) is not None
        ),
        None,
    )


def _moved_meta(node: Node, deeper: Deeper, by: int) -> dict:
    """A copy of the meta of a node whose module stack names the layer `by` places later."""
    moved = {
        key: (
            _ROOT + deeper.moved(path.removeprefix(_ROOT), by) if path.startswith(_ROOT) else path,
            kind,
        )
        for key, (path, kind) in node.meta.get("nn_module_stack", {}).items()
    }
    return node.meta | {"nn_module_stack": moved}


def _more_parameters(
    parameters: dict[str, ParameterSpec], last: int, deeper: Deeper
) -> dict[str, ParameterSpec]:
    """The specs of the deeper model by name: parameters, then buffers, each in the order of its
    modules. `last` is the index of the last layer of the shallow model.
    """

    def moved(spec: ParameterSpec, by: int) -> ParameterSpec:
        return replace(
            spec,
            name=deeper.moved(spec.name, by),
            aliases=tuple(deeper.moved(alias, by) for alias in spec.aliases),
        )

    found: list[ParameterSpec] = []
    for buffer in (False, True):
        specs = [
            (deeper.layer(spec.name), spec) for spec in parameters.values() if spec.buffer == buffer
        ]
        end = next((place for place, (layer, _) in enumerate(specs) if layer == last), len(specs))
        period = [
            spec
            for layer, spec in specs[:end]
            if layer is not None and layer >= last - deeper.period
        ]
        found += [spec for _, spec in specs[:end]]
        found += [
            moved(spec, by)
            for by in range(deeper.period, deeper.more + 1, deeper.period)
            for spec in period
        ]
        found += [moved(spec, deeper.more if layer == last else 0) for layer, spec in specs[end:]]
    return {spec.name: spec for spec in found}


@per_model(4)
def counted(traced: TracedModel, every: int) -> TracedModel:
    """A copy of `traced` with every `every`-th of its layers in a block class with `picked=True`.
    Classes of other layers have `picked=False`, and classes without layers None. If no structure
    repeats, all segments count as layers.

    A class with both kinds of layers is split in two with the same graph. Segments keep their
    places and names.
    """
    layers = traced.layers
    picked = set(layers[every - 1 :: every])
    kinds: dict[tuple[int, bool | None], None] = dict.fromkeys(
        (traced.segments[n].class_index, n in picked) for n in layers
    )
    kinds |= {
        (index, None): None
        for index in range(len(traced.classes))
        if not any(index == k for k, _ in kinds)
    }
    order = {
        kind: place
        for place, kind in enumerate(sorted(kinds, key=lambda kind: (kind[0], bool(kind[1]))))
    }
    twice = {index for index, which in kinds if which and (index, False) in kinds}
    classes = []
    for index, which in order:
        block = traced.classes[index]
        name = f"{block.name} of every {every}" if which and index in twice else block.name
        classes.append(replace(block, name=name, picked=which, is_layer=which is not None))
    layered = set(layers)
    segments = list(traced.segments)
    for number, segment in enumerate(traced.segments):
        kind = segment.class_index, number in picked if number in layered else None
        segments[number] = replace(segment, class_index=order[kind])
    return replace(traced, classes=tuple(classes), segments=tuple(segments))
