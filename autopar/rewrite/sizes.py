"""Sizes on one rank: static sizes as numbers, sizes that depend on the batch as nodes of the graph."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Layout, shard_extent
from autopar.ops.dims import is_symbolic

Layouts = dict[str, Layout]
"""The layout of one value on each axis larger than 1."""


def multiple_of_batch(size: Any) -> int:
    """k if the size is k times the batch, else 0."""
    if not is_symbolic(size):
        return 0
    expr = size.node.expr
    factor = expr / next(iter(expr.free_symbols))
    return int(factor) if factor.is_Integer else 0


class LocalSizes:
    """Turns whole sizes into this rank's sizes inside one segment's graph.

    The local batch size is read from the first segment input with a dim that is a multiple of it.  The batch of the whole
    micro-batch is that times dp, because every data-parallel rank holds the same number of rows.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, coordinates: dict[str, int]) -> None:
        self.graph, self.mesh, self.coordinates = graph, mesh, coordinates
        self._source: tuple[Node, int, int, bool] | None = None
        self._nodes: dict[str, Node] = {}

    def offer(self, placeholder: Node, tensor: torch.Tensor, layouts: Layouts) -> None:
        """Remember a segment input from which the batch size can be read."""
        if self._source is not None:
            return
        for dim, size in enumerate(tensor.shape):
            rows_each = multiple_of_batch(size)
            if rows_each:
                sharded = "dp" in layouts and layouts["dp"].dim == dim
                self._source = (placeholder, dim, rows_each, sharded or self.mesh.dp == 1)
                return

    def whole(self, size: Any) -> int | Node:
        """The size over all ranks, for operands that are not sharded over dp."""
        return self._emit(size, sharded=False)

    def local(self, size: Any, dim: int, layouts: Layouts) -> int | Node:
        """The size of `dim` on this rank of a value laid out `layouts`."""
        axes = [axis for axis, layout in layouts.items() if layout.dim == dim]
        if is_symbolic(size):
            if axes not in ([], ["dp"]):
                raise AutoparError(f"dim {dim} of size {size} depends on the batch and is sharded over {axes}; only dp can shard it")
            return self._emit(size, sharded=bool(axes))
        for axis in axes:
            size = shard_extent(int(size), self.mesh.size(axis), self.coordinates[axis])[1]
        return int(size)

    def shape(self, tensor: torch.Tensor, layouts: Layouts) -> list[int | Node]:
        """This rank's shape of a value."""
        return [self.local(size, dim, layouts) for dim, size in enumerate(tensor.shape)]

    def _batch(self) -> Node:
        if self._source is None:
            raise AutoparError("a segment needs the batch size, but none of its inputs has a dim that is a multiple of it")
        if "batch" not in self._nodes:
            placeholder, dim, rows_each, _ = self._source
            with self.graph.inserting_after(self._anchor()):
                node = self.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
            if rows_each > 1:
                node = self._call(operator.floordiv, node, rows_each)
            node._rename("batch")
            self._nodes["batch"] = node
        return self._nodes["batch"]

    def _anchor(self) -> Node:
        return [n for n in self.graph.nodes if n.op == "placeholder"][-1]

    def _emit(self, size: Any, sharded: bool) -> int | Node:
        """A node that computes `size` from the batch.  `sharded`: this rank's part of it."""
        expr = size.node.expr
        symbols = sorted(expr.free_symbols, key=str)
        local_is_read = self._source is None or self._source[3]
        batch = sympy.Symbol("batch", positive=True, integer=True)
        rows = batch * self.mesh.dp if local_is_read else batch  # rows of the whole micro-batch
        expr = expr.subs({s: rows for s in symbols})
        expr = sympy.simplify(expr / self.mesh.dp) if sharded else expr
        return self._build(expr)

    def _build(self, expr: Any) -> int | Node:
        if expr.is_number:
            return int(expr) if expr.is_integer else float(expr)
        if expr.is_Symbol:
            return self._batch()
        key = str(expr)
        if key not in self._nodes:
            parts = [self._build(a) for a in expr.args]
            name = type(expr).__name__
            if name in ("Add", "Mul"):
                value, function = parts[0], operator.add if name == "Add" else operator.mul
                for part in parts[1:]:
                    value = self._call(function, value, part)
            elif name in ("ToFloat", "Identity"):
                value = parts[0]
            elif name in ("FloatTrueDiv", "IntTrueDiv"):
                value = self._call(operator.truediv, *parts)
            elif name == "Pow":
                value = self._call(operator.pow, *parts)
            elif name in ("FloorDiv", "CleanDiv"):
                value = self._call(operator.floordiv, *parts)
            elif name in ("Mod", "PythonMod"):
                value = self._call(operator.mod, *parts)
            else:
                raise AutoparError(
                    f"a size of the model is {expr}; autopar can compute sums, products, quotients and remainders of the batch"
                )
            self._nodes[key] = value
        return self._nodes[key]

    def _call(self, function, a, b) -> Node:
        anchor = max((x for x in (a, b) if isinstance(x, Node)), key=list(self.graph.nodes).index)
        with self.graph.inserting_after(anchor):
            return self.graph.call_function(function, (a, b))
