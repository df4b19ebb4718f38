"""Sizes on one rank: static sizes as numbers, sizes that depend on the batch as nodes of the graph."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.batch import multiple_of_batch
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import Layout, local_extent
from autopar.ops.dims import is_symbolic

Layouts = dict[str, Layout]
"""The layout of one value on each axis larger than 1."""


_OF_MANY = {"Add": operator.add, "Mul": operator.mul, "Max": torch.sym_max, "Min": torch.sym_min}


class LocalSizes:
    """Turns whole sizes into this rank's sizes inside one segment's graph.

    The local batch size is read from the first segment input with a dim that is a multiple of it.  The batch of the whole
    micro-batch is that times the ranks over which that input is sharded, because every data-parallel rank holds the same number of rows.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, coordinates: dict[str, int]) -> None:
        self.graph, self.mesh, self.coordinates = graph, mesh, coordinates
        self._source: tuple[Node, int, Any, int] | None = (
            None  # input, dim, its size in batches on this rank, data-parallel parts
        )
        self._nodes: dict[str, Node] = {}

    def offer(self, placeholder: Node, tensor: torch.Tensor, layouts: Layouts) -> None:
        """Remember a segment input from which the batch size can be read."""
        if self._source is not None:
            return
        for dim, size in enumerate(tensor.shape):
            rows_each = multiple_of_batch(size)
            if rows_each:
                self._source = (
                    placeholder,
                    dim,
                    rows_each // self._row_parts(dim, layouts),
                    self._batch_parts(dim, layouts),
                )
                return

    def _batch_parts(self, dim: int, layouts: Layouts) -> int:
        """Over how many ranks the batch in a dim is split."""
        return prod(
            self.mesh.size(axis)
            for axis, x in layouts.items()
            if x.dim == dim and not x.pattern.rows
        )

    def _row_parts(self, dim: int, layouts: Layouts) -> int:
        """Over how many ranks what is flattened with the batch is split."""
        return prod(
            self.mesh.size(axis) for axis, x in layouts.items() if x.dim == dim and x.pattern.rows
        )

    def rows(self, layouts: Layouts) -> int | Node:
        """The batch rows on this rank of a value whose batch, flattened with something else, is laid out `layouts`."""
        dims = {x.dim for x in layouts.values() if x.pattern.rows}
        if not dims:
            return 1
        return self._emit_rows(self._batch_parts(dims.pop(), layouts))

    def whole(self, size: Any) -> int | Node:
        """The size over all ranks, for operands that are not sharded over dp."""
        return self._emit(size, 1)

    def local(self, size: Any, dim: int, layouts: Layouts) -> int | Node:
        """The size of `dim` on this rank of a value laid out `layouts`."""
        if is_symbolic(size):
            return self._emit(size, self._batch_parts(dim, layouts) * self._row_parts(dim, layouts))
        for axis, layout in layouts.items():  # outermost first: axes that split one dim nest
            if layout.dim == dim:
                size = local_extent(
                    int(size), self.mesh.size(axis), self.coordinates[axis], layout.pattern
                )
        return int(size)

    def shape(self, tensor: torch.Tensor, layouts: Layouts) -> list[int | Node]:
        """This rank's shape of a value."""
        return [self.local(size, dim, layouts) for dim, size in enumerate(tensor.shape)]

    def _batch(self) -> Node:
        if self._source is None:
            raise AutoparError(
                "a segment needs the batch size, but none of its inputs has a dim that is a multiple of it"
            )
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
        return self.graph.find_nodes(op="placeholder")[-1]

    def _emit(self, size: Any, parts: int) -> int | Node:
        """A node that computes `size` / `parts` from the batch."""
        expr = size.node.expr.subs({s: self._whole_rows() for s in size.node.expr.free_symbols})
        return self._build(sympy.simplify(expr / parts) if isinstance(size, torch.SymInt) else expr)

    def _emit_rows(self, parts: int) -> int | Node:
        return self._build(sympy.simplify(self._whole_rows() / parts))

    def _whole_rows(self) -> Any:
        """The rows of the whole micro-batch, in terms of the local ones."""
        batch = sympy.Symbol("batch", positive=True, integer=True)
        return batch * (self._source[3] if self._source is not None else 1)

    def _build(self, expr: Any) -> int | Node:
        if expr.is_number:
            return int(expr) if expr.is_integer else float(expr)
        if expr.is_Symbol:
            return self._batch()
        share = expr.as_coeff_Mul()[0]
        if share.is_Rational and not share.is_Integer:  # a part of the rows: sizes divide evenly
            return self._call(operator.floordiv, self._build(expr * share.q), share.q)
        key = str(expr)
        if key not in self._nodes:
            parts = [self._build(a) for a in expr.args]
            name = type(expr).__name__
            if name in _OF_MANY:
                value = parts[0]
                for part in parts[1:]:
                    value = self._call(_OF_MANY[name], value, part)
            elif name in ("ToFloat", "Identity"):
                value = parts[0]
            elif name in ("FloatTrueDiv", "IntTrueDiv"):
                value = self._call(operator.truediv, *parts)
            elif name in ("Pow", "FloatPow", "PowByNatural"):
                value = self._call(operator.pow, *parts)
            elif name in ("FloorDiv", "CleanDiv"):
                value = self._call(operator.floordiv, *parts)
            elif name in ("Mod", "PythonMod"):
                value = self._call(operator.mod, *parts)
            else:
                raise AutoparError(
                    f"a size of the model is {expr}; autopar can compute sums, products, powers, quotients, remainders, maxima and minima "
                    "of the batch"
                )
            self._nodes[key] = value
        return self._nodes[key]

    def _call(self, function, a, b) -> Node:
        anchor = max(x for x in (a, b) if isinstance(x, Node))
        with self.graph.inserting_after(anchor):
            return self.graph.call_function(function, (a, b))
