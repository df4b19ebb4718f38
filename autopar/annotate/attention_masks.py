"""Which attention masks bound the distance of two positions: causal masks and sliding windows, recognized by how they are computed.

A boolean mask is read as conditions on query position i and key position j. Each compares sums of arange, their difference and
numbers: `i - j >= 0` is causal, `i - j < w` as well a sliding window of w.  A condition of another kind, such as the padding of a batch,
joined by "and" leaves the bounds as they are: what it hides besides depends on the batch.  Attention under a mask without bounds is priced
as if every pair counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch.fx import Node

from autopar.ir.calls import argument, is_attention, op_name
from autopar.ir.traced import TracedModel
from autopar.ops.values import is_getitem, ops, output_nodes

Bounds = tuple[float, float]
"""The least and the greatest value of i - j at which query i sees key j."""

_COMPARISONS = {
    "aten::ge": (0, inf),
    "aten::gt": (1, inf),
    "aten::le": (-inf, 0),
    "aten::lt": (-inf, -1),
}
_JOINED = ("aten::__and__", "aten::bitwise_and", "aten::logical_and", "aten::mul")
_SAME = (
    "aten::unsqueeze",
    "aten::reshape",
    "aten::expand",
    "aten::to",
    "aten::alias",
    "aten::clone",
    "aten::contiguous",
)


@dataclass(frozen=True, slots=True)
class _Linear:
    """The linear expression rows * i + columns * j + constant, for query position i and key
    position j.
    """

    rows: int
    columns: int
    constant: int

    def minus(self, other: _Linear) -> _Linear:
        return _Linear(
            self.rows - other.rows, self.columns - other.columns, self.constant - other.constant
        )


def windows(traced: TracedModel) -> dict[tuple[int, str], int | None]:
    """Attention ops whose mask is causal, or causal with a sliding window: (class index, op name)
    -> size of the window, None for causal alone.

    Attention without an entry has another mask, or none. A mask may hide more besides, such as
    padding.
    """
    found: dict[tuple[int, str], int | None] = {}
    known: dict[tuple[int, Node], Bounds | None] = {}
    for index, block in enumerate(traced.classes):
        for node in ops(block.graph):
            mask = argument(node, "attn_mask") if is_attention(node) else None
            if not isinstance(mask, Node):
                continue
            low, high = _bounds(traced, index, mask, known) or (-inf, inf)
            if low == 0 and high >= 0:
                found[index, node.name] = None if high == inf else int(high) + 1
    return found


def _bounds(
    traced: TracedModel, index: int, node: Node, known: dict[tuple[int, Node], Bounds | None]
) -> Bounds | None:
    """The bounds of a mask on i - j (query position less key position), traced back across segments
    to where it is computed. None if it is not recognized. `known` caches results.
    """
    if (index, node) not in known:
        known[index, node] = _new_bounds(
            traced, index, node, lambda i, source: _bounds(traced, i, source, known)
        )
    return known[index, node]


def _new_bounds(
    traced: TracedModel, index: int, node: Node, bounds_of: Callable[[int, Node], Bounds | None]
) -> Bounds | None:
    """The bounds of a mask on i - j, computed from those of its operands, which `bounds_of(class
    index, node)` gives. None if it is not recognized.
    """
    if node.op == "placeholder":
        position = [n for n in traced.classes[index].graph.nodes if n.op == "placeholder"].index(
            node
        )
        sources = {s.inputs[position] for s in traced.segments if s.class_index == index}
        if any(source.segment < 0 for source in sources):
            return None
        above = {(traced.segments[source.segment].class_index, source.index) for source in sources}
        bounds = {
            bounds_of(i, output_nodes(traced.classes[i].graph)[k]) for i, k in above if i != index
        }
        return bounds.pop() if len(bounds) == 1 else None
    if node.op != "call_function" or is_getitem(node):
        return None
    name = op_name(node)
    if name in _SAME:
        return bounds_of(index, node.all_input_nodes[0])
    if name in _JOINED and node.meta["val"].dtype == torch.bool:
        parts = [bounds_of(index, x) for x in node.args[:2] if isinstance(x, Node)]
        known = [part for part in parts if part is not None]
        if not known:
            return None
        return max(low for low, _ in known), min(high for _, high in known)
    if name in _COMPARISONS:
        left, right = (_linear(x) for x in node.args[:2])
        if left is not None and right is not None:
            return _distance(left.minus(right), *_COMPARISONS[name])
    return None


def _distance(found: _Linear, low: float, high: float) -> Bounds | None:
    """The condition `low <= found <= high` as bounds on i - j. None if `found` is no difference of
    query and key position.
    """
    if (found.rows, found.columns) == (1, -1):
        return low - found.constant, high - found.constant
    return (
        (found.constant - high, found.constant - low)
        if (found.rows, found.columns) == (-1, 1)
        else None
    )


def _linear(value: object) -> _Linear | None:
    """An operand of a comparison as a sum of positions and a number; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return _Linear(0, 0, value)
    if not isinstance(value, Node) or value.op != "call_function" or is_getitem(value):
        return None
    name, shape = op_name(value), value.meta["val"].shape
    source = value
    while (
        op_name(source) in _SAME
        and isinstance(source.args[0], Node)
        and source.args[0].op == "call_function"
    ):
        source = source.args[0]
    if op_name(source) == "aten::arange":
        counts_up = (argument(source, "start", 0) or 0) == 0 and argument(source, "step", 1) == 1
        length = source.meta["val"].shape[0]
        if (
            counts_up
            and len(shape)
            and shape[-1] == length
            and all(size == 1 for size in shape[:-1])
        ):
            return _Linear(0, 1, 0)
        return (
            _Linear(1, 0, 0) if counts_up and len(shape) > 1 and shape[-2:] == (length, 1) else None
        )
    if name in ("aten::sub", "aten::add") and argument(value, "alpha", 1) == 1:
        left, right = (_linear(x) for x in value.args[:2])
        if left is None or right is None:
            return None
        return left.minus(right if name == "aten::sub" else _Linear(0, 0, 0).minus(right))
    return None
