"""Recognizes the two or three products of an expert in a graph, and stacks those of all experts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.ir.calls import argument, arguments, op_name
from autopar.ops.aten import aten
from autopar.ops.kinds import same
from autopar.trace.edit import is_op

_Rows = Callable[[Node], Node | None]
"""x, if a node has its rows of the expert's tokens, or None."""
_ACTIVATIONS = ("silu", "relu", "sigmoid", "tanh", "hardswish", "mish", "relu6")
"""Those that have the same name in ATen and in `autopar_kernels.routed_experts`."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix (outputs, inputs) of a product, or (inputs, outputs) where it is `transposed`."""

    node: Node
    transposed: bool = False

    @property
    def form(self) -> tuple[str, bool]:
        """What is equal for matrices of the same shape and order."""
        return str(self.node.meta["val"].shape), self.transposed


@dataclass(frozen=True, slots=True)
class Mlp:
    """An expert: down(activation(up x)), or with a gate down(activation(gate x) * (up x)). `ups` has gate and up, or both as one
    matrix, and biases in the same order, or none.
    """

    x: Node
    ups: tuple[Matrix, ...]
    up_biases: tuple[Node, ...]
    down: Matrix
    down_bias: Node | None
    activation: str

    @property
    def form(self) -> tuple:
        """What is equal for experts that one op can compute."""
        forms = [matrix.form for matrix in (*self.ups, self.down)]
        return self.activation, len(self.up_biases), self.down_bias is None, *forms


def mlp_of(value: Node, rows: _Rows) -> Mlp | None:
    """The expert whose result a value is, or None."""
    if (last := _product(value)) is None:
        return None
    inner, down, down_bias = last
    if is_op(inner, "mul") and len(inner.all_input_nodes) == 2:
        for gate, up in (arguments(inner), arguments(inner)[::-1]):
            found = _gated(gate, up, rows)
            if found is not None:
                return Mlp(*found[:3], down, down_bias, f"gated:{found[3]}")
        return None
    activated = _activated(inner)
    first = None if activated is None else _product(activated[1])
    if activated is None or first is None:
        return None
    name, (source, up, bias) = activated[0], first
    x = rows(source)
    biases = () if bias is None else (bias,)
    return None if x is None else Mlp(x, (up,), biases, down, down_bias, f"plain:{name}")


def _gated(gate: Node, up: Node, rows: _Rows) -> tuple[Node, tuple, tuple, str] | None:
    """(x, matrices, biases, activation) of `activation(gate) * up`, or None."""
    activated = _activated(gate)
    if activated is None:
        return None
    name, gate = activated
    parts = [part for each in (gate, up) if (part := _product(each)) is not None]
    if len(parts) == 2:
        xs = [rows(source) for source, _, _ in parts]
        biases = tuple(bias for _, _, bias in parts if bias is not None)
        if xs[0] is None or xs[0] is not xs[1] or len(biases) == 1:
            return None
        return xs[0], tuple(matrix for _, matrix, _ in parts), biases, name
    both = _halves(gate, up)
    product = None if both is None else _product(both)
    if product is None:
        return None
    source, matrix, bias = product
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


def _product(node: Node) -> tuple[Node, Matrix, Node | None] | None:
    """(rows, matrix, bias) of a product of rows and a matrix, or None."""
    if is_op(node, "linear"):
        return arguments(node)[0], Matrix(arguments(node)[1]), argument(node, "bias", None)
    if not is_op(node, "matmul", "mm") or arguments(node)[1].meta["val"].dim() != 2:
        return None
    source, matrix = arguments(node)
    if is_op(matrix, "permute") and list(argument(matrix, "dims")) in ([1, 0], [-1, -2]):
        return source, Matrix(arguments(matrix)[0]), None
    return source, Matrix(matrix, transposed=True), None


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

    def matrices(parts: Sequence[Matrix]) -> Node:
        found = _stack([part.node for part in parts], emit)
        return emit(aten.permute.default, found, [0, 2, 1]) if parts[0].transposed else found

    def vectors(parts: Sequence[Node]) -> Node:
        return _stack(parts, emit)

    up = _joined([mlp.ups for mlp in mlps], matrices, emit)
    biases = [mlp.up_biases for mlp in mlps]
    up_bias = _joined(biases, vectors, emit) if biases[0] else None
    downs = [mlp.down_bias for mlp in mlps if mlp.down_bias is not None]
    return up, up_bias, matrices([mlp.down for mlp in mlps]), vectors(downs) if downs else None


def _joined(parts: Sequence[tuple], stack: Callable[..., Node], emit: Callable[..., Node]) -> Node:
    """(E, F') from gates and ups (F,), or from (F',) of each expert; likewise with further dims."""
    whole = [stack(each) for each in zip(*parts, strict=True)]
    return whole[0] if len(whole) == 1 else emit(aten.cat.default, whole, 1)


def _stack(parts: Sequence[Node], emit: Callable[..., Node]) -> Node:
    """The tensor of which the parts are entry after entry, or a new one."""
    picked = [part for part in parts if is_op(part, "select")]
    if len({_view(arguments(part)[0]) for part in picked}) == 1:
        source = arguments(picked[0])[0]
        entries = [arguments(part)[1:] for part in picked]
        if entries == [(0, k) for k in range(source.meta["val"].shape[0])]:
            # a view from inside the loop is made anew before it
            return emit(source.target, *arguments(source)) if is_op(source, "reshape") else source
    return emit(aten.stack.default, list(parts))


def _view(node: Node) -> tuple:
    """What is equal for tensors that are the same view of the same tensor."""
    if is_op(node, "reshape"):
        return arguments(node)[0], str(node.meta["val"].shape)
    return (node,)
