"""Recognizes the two or three products of an expert in a graph, and stacks those of all experts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.ir.calls import argument, arguments, op_name
from autopar.ops.kinds import same
from autopar.trace.edit import is_op

aten = torch.ops.aten
Rows = Callable[[Node], Node | None]
"""x, if a node has its rows of the expert's tokens, or None."""
_ACTIVATIONS = ("silu", "relu", "sigmoid", "tanh", "hardswish", "mish", "relu6")
"""Those that have the same name in ATen and in `autopar_kernels.routed_experts`."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """An expert: down(activation(up x)), or with a gate down(activation(gate x) * (up x)). `ups` has gate and up, or both as one
    matrix, and biases in the same order, or none.
    """

    x: Node
    ups: tuple[Node, ...]
    up_biases: tuple[Node, ...]
    down: Node
    down_bias: Node | None
    activation: str

    @property
    def form(self) -> tuple:
        """What is equal for experts that one op can compute."""
        shapes = [str(each.meta["val"].shape) for each in (*self.ups, self.down)]
        return self.activation, len(self.up_biases), self.down_bias is None, *shapes


def mlp_of(value: Node, rows: Rows) -> Mlp | None:
    """The expert whose result a value is, or None."""
    if not is_op(value, "linear"):
        return None
    inner, down, down_bias = _linear(value)
    if is_op(inner, "mul") and len(inner.all_input_nodes) == 2:
        for gate, up in (arguments(inner), arguments(inner)[::-1]):
            found = _gated(gate, up, rows)
            if found is not None:
                return Mlp(*found[:3], down, down_bias, f"gated:{found[3]}")
        return None
    activated = _activated(inner)
    if activated is None or not is_op(activated[1], "linear"):
        return None
    name, product = activated
    source, up, bias = _linear(product)
    x = rows(source)
    biases = () if bias is None else (bias,)
    return None if x is None else Mlp(x, (up,), biases, down, down_bias, f"plain:{name}")


def _gated(gate: Node, up: Node, rows: Rows) -> tuple[Node, tuple, tuple, str] | None:
    """(x, matrices, biases, activation) of `activation(gate) * up`, or None."""
    activated = _activated(gate)
    if activated is None:
        return None
    name, gate = activated
    if is_op(gate, "linear") and is_op(up, "linear"):
        parts = [_linear(gate), _linear(up)]
        xs = [rows(source) for source, _, _ in parts]
        biases = tuple(bias for _, _, bias in parts if bias is not None)
        if xs[0] is None or xs[0] is not xs[1] or len(biases) == 1:
            return None
        return xs[0], tuple(matrix for _, matrix, _ in parts), biases, name
    both = _halves(gate, up)
    if both is None or not is_op(both, "linear"):
        return None
    source, matrix, bias = _linear(both)
    x = rows(source)
    return None if x is None else (x, (matrix,), () if bias is None else (bias,), name)


def _halves(first: Node, second: Node) -> Node | None:
    """The tensor of whose last dim two nodes are the halves, or None."""
    items = [arguments(each) for each in (first, second) if each.target is operator.getitem]
    if len(items) == 2 and [place for _, place in items] == [0, 1] and items[0][0] is items[1][0]:
        split = items[0][0]
        if isinstance(split, Node) and is_op(split, "split_with_sizes", "split", "chunk"):
            val, parts = arguments(split)[0].meta["val"], split.meta["val"]
            last = argument(split, "dim", 0) in (-1, val.dim() - 1)
            return arguments(split)[0] if last and len(parts) == 2 and _equal(*parts) else None
    if (
        is_op(first, "slice")
        and is_op(second, "slice")
        and arguments(first)[0] is arguments(second)[0]
    ):
        whole = arguments(first)[0]
        width, dim = whole.meta["val"].shape[-1], whole.meta["val"].dim() - 1
        places = [
            (argument(each, "dim", 0) % (dim + 1), argument(each, "start", 0) or 0)
            for each in (first, second)
        ]
        halves = _equal(first.meta["val"], second.meta["val"])
        return whole if halves and places == [(dim, 0), (dim, width // 2)] else None
    return None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return same(a.shape[-1], b.shape[-1])


def _linear(node: Node) -> tuple[Node, Node, Node | None]:
    return arguments(node)[0], arguments(node)[1], argument(node, "bias", None)


def _activated(node: Node) -> tuple[str, Node] | None:
    """(name, argument) of an activation, or None."""
    if not isinstance(node, Node) or not arguments(node):
        return None
    name = op_name(node).removeprefix("aten::")
    if name == "gelu":
        tanh = argument(node, "approximate", "none") == "tanh"
        return "gelu_new" if tanh else "gelu", arguments(node)[0]
    return (name, arguments(node)[0]) if name in _ACTIVATIONS else None


def stacked(
    mlps: Sequence[Mlp], emit: Callable[..., Node]
) -> tuple[Node, Node | None, Node, Node | None]:
    """up, up_bias, down and down_bias of `routed_experts`, from those of the experts in order."""
    up = _joined([mlp.ups for mlp in mlps], emit)
    up_bias = _joined([mlp.up_biases for mlp in mlps], emit) if mlps[0].up_biases else None
    down = _stack([mlp.down for mlp in mlps], emit)
    biases = [mlp.down_bias for mlp in mlps if mlp.down_bias is not None]
    return up, up_bias, down, _stack(biases, emit) if biases else None


def _joined(parts: Sequence[tuple[Node, ...]], emit: Callable[..., Node]) -> Node:
    """(E, F') from gates and ups (F,), or from (F',) of each expert; likewise with further dims."""
    whole = [_stack(list(each), emit) for each in zip(*parts, strict=True)]
    return whole[0] if len(whole) == 1 else emit(aten.cat.default, whole, 1)


def _stack(parts: list[Node], emit: Callable[..., Node]) -> Node:
    """The tensor of which the parts are entry after entry, or a new one."""
    sources = {arguments(part)[0] for part in parts if is_op(part, "select")}
    if len(sources) == 1:
        (source,) = sources
        entries = [arguments(part)[1:] for part in parts if is_op(part, "select")]
        if entries == [(0, k) for k in range(source.meta["val"].shape[0])]:
            return source
    return emit(aten.stack.default, parts)
