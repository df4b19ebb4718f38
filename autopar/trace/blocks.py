"""Cuts the flat graph into segments, and finds segments with the same structure."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument
from torch.utils._pytree import tree_leaves

from autopar.ir.batch import multiple_of_batch
from autopar.ir.calls import op_name
from autopar.ir.traced import BlockClass, LossSplit, Segment, Source, StepValues, TracedModel
from autopar.ops.random import NO_GRADIENT
from autopar.ops.values import output_nodes
from autopar.trace.capture import Captured
from autopar.trace.segment_nodes import nodes_of_segments

_MOST_CLASSES = 4
"""The largest number of classes for segments of one structure, which differ in what they borrow.
Layers that share all their parameters need two. If there would be more, each segment pays for
the parameters that it reads in the slots of the smallest tensors.
"""
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_NAMED_OPS = (
    "linear",
    "addmm",
    "embedding",
    "layer_norm",
    "rms_norm",
    "convolution",
    "conv1d",
    "conv2d",
)


def find_segments(captured: Captured, split: LossSplit, values: StepValues | None) -> TracedModel:
    """The traced model: `captured.graph`, after normalization, cut into segments (prologue, layers,
    glue, epilogue), with one block class for each structure.

    Sets `meta['grad']` on the nodes of that graph. `split` and `values` are stored as they are.
    """
    graph = captured.graph
    mark_differentiable(captured)
    carved = [(name, *_carve(name, nodes, captured)) for name, nodes in nodes_of_segments(captured)]
    borrowed = _borrowed([(block, parameters) for _, block, parameters, *_ in carved], captured)
    times = Counter(block.structure_hash for _, block, *_ in carved)
    classes: list[BlockClass] = []
    class_of: dict[tuple, int] = {}
    segments: list[Segment] = []
    produced: dict[Node, Source] = {}
    by_name = dict(zip(captured.input_nodes, captured.inputs, strict=True))
    for (name, block, parameters, inputs, outputs), slots in zip(carved, borrowed, strict=True):
        kind = block.structure_hash, tuple(slot in slots for slot in block.slots)
        if kind not in class_of:
            class_of[kind] = len(classes)
            classes.append(replace(block, borrowed=slots, is_layer=times[block.structure_hash] > 1))
        sources = tuple(
            Source(name=by_name.get(n.name, n.name)) if n.op == "placeholder" else produced[n]
            for n in inputs
        )
        for k, node in enumerate(outputs):
            produced[node] = Source(len(segments), k)
        segments.append(Segment(name, class_of[kind], parameters, sources))
    changed = (produced[node] for node in output_nodes(graph)[1:])
    updates = dict(zip(captured.updates, changed, strict=True))
    by_node = {node.name: node.meta["val"] for node in graph.nodes if node.op == "placeholder"}
    vals = tuple(by_node[name] for name in captured.input_nodes)
    dims = [d for val in vals for d in val.shape if isinstance(d, torch.SymInt)]
    symbols = sorted({str(symbol) for d in dims for symbol in d.node.expr.free_symbols})
    digest = hashlib.sha256(
        json.dumps(
            [[s.class_index, s.parameters, [str(i) for i in s.inputs]] for s in segments]
            + [c.structure_hash for c in classes]
            + [[name, str(source)] for name, source in updates.items()]
        ).encode()
    ).hexdigest()
    return TracedModel(
        inputs=captured.inputs,
        input_vals=vals,
        batch_symbol=",".join(symbols),
        batch_hint=int(dims[0].node.hint) if dims else 1,
        classes=tuple(classes),
        segments=tuple(segments),
        parameters=captured.parameters,
        constants=captured.constants,
        split=split,
        step_values=values,
        model_hash=digest,
        notes=captured.notes,
        row_dims=captured.row_dims,
        together=captured.together,
        plain=captured.plain,
        updates=updates,
    )


def _borrowed(
    blocks: list[tuple[BlockClass, tuple[str, ...]]], captured: Captured
) -> list[frozenset[str]]:
    """For each segment, the names of the slots (parameters of its graph) whose tensor another
    segment or slot pays for (`BlockClass.borrowed`). `blocks` has each segment's class and its
    parameters' names.

    A shared tensor is paid for in the slot with the most distinct tensors over the segments of one
    structure; among equal slots, in the first. A loss that reads weights of layers therefore
    borrows them, whichever comes first. Among the segments of one structure, the first that has the
    tensor pays. If a structure would need over `_MOST_CLASSES` classes, all segments pay for their
    smallest tensors.
    """
    # of each tensor: segment, place of the slot
    places: dict[str, list[tuple[int, int]]] = defaultdict(list)
    tensors: dict[tuple[str, int], set[str]] = defaultdict(set)  # of each slot
    for number, (block, parameters) in enumerate(blocks):
        for place, name in enumerate(parameters):
            places[name].append((number, place))
            tensors[block.structure_hash, place].add(name)
    owner = {
        name: min(found, key=lambda at: (-len(tensors[blocks[at[0]][0].structure_hash, at[1]]), at))
        for name, found in places.items()
    }
    found = [
        {place for place, name in enumerate(parameters) if owner[name] != (n, place)}
        for n, (_, parameters) in enumerate(blocks)
    ]
    alike: dict[str, list[int]] = defaultdict(list)
    for number, (block, _) in enumerate(blocks):
        alike[block.structure_hash].append(number)
    for numbers in alike.values():
        specs = [captured.parameters.get(name) for name in blocks[numbers[0]][1]]
        # not tables of all layers
        slots = {k: spec for k, spec in enumerate(specs) if spec is not None and not spec.buffer}
        shares: set[int] = set()
        for place in sorted(slots, key=lambda place: -prod(slots[place].shape)):
            if len({frozenset(found[n] & {*shares, place}) for n in numbers}) <= _MOST_CLASSES:
                shares.add(place)
        always = set.intersection(*(found[n] for n in numbers))
        for n in numbers:
            found[n] = found[n] & shares | always
    return [
        frozenset(block.slots[place] for place in of)
        for (block, _), of in zip(blocks, found, strict=True)
    ]


def mark_differentiable(captured: Captured) -> None:
    """Set `meta['grad']` on every node of the captured graph: whether a gradient flows back through
    it to a trainable parameter.
    """
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            spec = captured.parameters.get(captured.attributes.get(node.name, ""))
            node.meta["grad"] = spec is not None and spec.trainable
            continue
        vals = node.meta.get("val")
        first = vals[0] if isinstance(vals, (list, tuple)) and vals else vals
        floating = isinstance(first, torch.Tensor) and first.is_floating_point()
        node.meta["grad"] = (
            floating
            and op_name(node) not in NO_GRADIENT
            and any(i.meta.get("grad") for i in node.all_input_nodes)
        )


def _carve(
    name: str, nodes: list[Node], captured: Captured
) -> tuple[BlockClass, tuple[str, ...], list[Node], list[Node]]:
    """Copies the nodes of one segment into a graph of its own.

    Returns (its `BlockClass`, the names of the parameters of its slots, the nodes of the whole
    graph that it reads, its nodes that others read). The loss is the first of the last.
    """
    inside = set(nodes)
    graph, mapping = Graph(), {}
    slots: dict[str, int] = {}
    parameters: list[str] = []
    inputs = _inputs(nodes, captured)
    names: dict[str, int] = {}
    for source in inputs:
        # its number counts all earlier layers
        kind = re.sub(r"_\d+$", "", source.name) if source.op == "call_function" else source.name
        mapping[source] = graph.placeholder(_unique(_identifier(kind), names))
        mapping[source].meta = dict(source.meta)
    prefix = name + "."
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in mapping and source.name in captured.attributes:
                attribute = captured.attributes[source.name]
                slot = _unique(_identifier(attribute.removeprefix(prefix)), slots)
                parameters.append(attribute)
                mapping[source] = graph.create_node("get_attr", slot, name=slot)
                mapping[source].meta = dict(source.meta) | {
                    "spec": captured.parameters.get(attribute)
                }
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), mapping.__getitem__)
        mapping[node] = graph.create_node(node.op, node.target, args, kwargs, name=_readable(node))
        mapping[node].meta = dict(node.meta)
    loss = output_nodes(captured.graph)[0]
    outputs = sorted(
        (n for n in nodes if any(u not in inside for u in n.users)), key=lambda n: n is not loss
    )  # the loss comes first
    graph.output(tuple(mapping[n] for n in outputs))
    return (
        BlockClass(name, graph, tuple(slots), _structure_hash(graph, captured)),
        tuple(parameters),
        inputs,
        outputs,
    )


def _inputs(nodes: list[Node], captured: Captured) -> list[Node]:
    """The nodes outside a segment that its nodes read, parameters and constants excepted.

    A segment with batch-dependent sizes gets the batch size from an input. A segment that computes
    them from parameters alone, such as learned queries expanded over the batch, also takes a model
    input, of which it reads only the size.
    """
    inside, found = set(nodes), dict[Node, None]()
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source.name not in captured.attributes:
                found[source] = None
    if any(map(_follows_batch, nodes)) and not any(map(_tells_batch, found)):
        given = [
            node
            for node in captured.graph.find_nodes(op="placeholder")
            if node.name in captured.input_nodes
        ]
        found |= dict.fromkeys(list(filter(_tells_batch, given))[:1])
    return list(found)


def _tells_batch(node: Node) -> bool:
    """Whether the value of a node is a tensor with a dim that is a whole multiple of the number of
    rows.
    """
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and any(map(multiple_of_batch, val.shape))


def _follows_batch(node: Node) -> bool:
    """Whether a symbolic size is among a call's arguments, or in a shape of its operands or
    results.
    """
    reads = [source.meta.get("val") for source in node.all_input_nodes]
    leaves = tree_leaves((node.args, node.kwargs, node.meta.get("val"), reads))
    return any(
        isinstance(size, _SYMBOLIC)
        for x in leaves
        for size in (x.shape if isinstance(x, torch.Tensor) else (x,))
    )


def _identifier(name: str) -> str:
    return re.sub(r"\W", "_", name)


def _unique(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name_1`, `name_2`, ... if it is taken. Records it in `taken`, which holds the
    last number tried for each name.
    """
    candidate, number = name, taken.get(name, 0)
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    taken[candidate] = 0
    taken[name] = number
    return candidate


def _readable(node: Node) -> str:
    """A readable name for a node: for linear layers, norms, embeddings and convolutions the name of
    their module, otherwise that of the op.
    """
    op = op_name(node).rpartition("::")[2] or getattr(node.target, "__name__", node.name)
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if (
        op in _NAMED_OPS
        and stack
        and not re.fullmatch(r"\d+|model", leaf := stack[-1][0].split(".")[-1])
    ):
        return leaf
    return _identifier(op)


def _structure_hash(graph: Graph, captured: Captured) -> str:
    """A sha256 over the graph's calls, arguments, shapes, dtypes, gradients and constants, without
    names. Segments with equal hashes have the same structure.
    """
    index = {node: i for i, node in enumerate(graph.nodes)}

    def plain(arg: Argument) -> Any:
        if isinstance(arg, Node):
            return f"%{index[arg]}"
        if isinstance(arg, (list, tuple)):
            return [plain(a) for a in arg]
        if isinstance(arg, dict):
            return {k: plain(v) for k, v in arg.items()}
        return repr(arg) if isinstance(arg, (int, float, bool, type(None), str)) else str(arg)

    rows = []
    for node in graph.nodes:
        val = node.meta.get("val")
        vals = [
            v
            for v in (val if isinstance(val, (list, tuple)) else [val])
            if isinstance(v, torch.Tensor)
        ]
        target = "" if node.op in ("placeholder", "get_attr") else str(node.target)
        spec = node.meta.get("spec")
        constant = captured.constants.get(node.target) if node.op == "get_attr" else None
        rows.append(
            [
                node.op,
                target,
                plain(node.args),
                plain(node.kwargs),
                [f"{list(map(str, v.shape))}{v.dtype}" for v in vals],
                node.meta.get("grad", False),
                bool(spec and spec.buffer),
                str(constant.tolist()) if constant is not None else "",
            ]
        )
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
