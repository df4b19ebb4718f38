"""Sizes on one rank: fixed sizes as numbers, batch-dependent sizes as graph nodes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from math import prod
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ir.batch import multiple_of_batch
from autopar.ir.mesh import MeshShape
from autopar.ir.sharding import AxisLayout, local_extent
from autopar.ops.dims import is_symbolic

Layouts = dict[str, AxisLayout]
"""The layout of one value on each axis with more than one rank."""


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
    **dict.fromkeys(("FloatTrueDiv", "IntTrueDiv"), operator.truediv),
    **dict.fromkeys(("Pow", "FloatPow", "PowByNatural"), operator.pow),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
}
"""The function that computes each kind of sympy expression. Sums, products, maxima and minima may
have more than two operands.
"""


class LocalSizes:
    """Converts sizes of whole tensors to this rank's sizes: numbers, or nodes that it adds to one
    segment's graph, which compute them from the batch. `coordinates` has this rank's coordinate on
    each axis.

    The local batch size is read from the first segment input with a dim that is a multiple of the
    batch size. The batch of the whole micro-batch is that times the ranks that shard this input,
    because every data-parallel rank has the same number of rows.
    """

    def __init__(self, graph: Graph, mesh: MeshShape, coordinates: dict[str, int]) -> None:
        self.graph, self.mesh, self.coordinates = graph, mesh, coordinates
        # input, dim, its size in batches on this rank, data-parallel parts
        self._source: tuple[Node, int, int, int] | None = None
        self._nodes: dict[str, Node] = {}

    def offer(self, placeholder: Node, tensor: torch.Tensor, layouts: Layouts) -> None:
        """Read the batch size from the segment input `placeholder`, if none has been taken yet and
        one of its dims is a multiple of the batch. `tensor` is its whole fake tensor.
        """
        if self._source is not None:
            return
        for dim, size in enumerate(tensor.shape):
            rows_each = multiple_of_batch(size)
            if rows_each:
                of_batch, of_rows = (self._parts(dim, layouts, rows) for rows in (False, True))
                self._source = (placeholder, dim, rows_each // of_rows, of_batch)
                return

    def _parts(self, dim: int, layouts: Layouts, rows: bool) -> int:
        """The number of ranks over which the batch in dim `dim` is split. With `rows`, the number
        over which what is flattened with the batch is split.
        """
        splits = [axis for axis, x in layouts.items() if (x.dim, x.pattern.rows) == (dim, rows)]
        return prod(self.mesh.size(axis) for axis in splits)

    def rows(self, layouts: Layouts) -> int | Node:
        """The number of batch rows on this rank, for a value with these layouts whose batch is
        flattened with something else. 1 if no layout has a pattern of rows.
        """
        dims = {x.dim for x in layouts.values() if x.pattern.rows}
        if not dims:
            return 1
        parts = self._parts(dims.pop(), layouts, rows=False)
        return self._build(sympy.simplify(self._whole_rows() / parts))

    def whole(self, size: Any) -> int | float | Node:
        """The size over all ranks of the micro-batch, for operands that are not sharded over dp. A
        number, or a node that computes it from the local batch.
        """
        return self._emit(size, 1)

    def share(self, size: Any, parts: int) -> int | Node:
        """One of `parts` equal parts of a size over all ranks of the micro-batch."""
        return self._emit(size, parts) if isinstance(size, torch.SymInt) else int(size) // parts

    def local(self, size: Any, dim: int, layouts: Layouts) -> int | Node:
        """The size on this rank of dim `dim`, which has `size` elements in the whole value, under
        these layouts. A number, or a node that computes it from the local batch.
        """
        if is_symbolic(size):
            parts = prod(self._parts(dim, layouts, rows) for rows in (False, True))
            return self._emit(size, parts)
        for axis, layout in layouts.items():  # outermost first: axes that split one dim nest
            if layout.dim == dim:
                size = local_extent(
                    int(size), self.mesh.size(axis), self.coordinates[axis], layout.pattern
                )
        return int(size)

    def shape(self, tensor: torch.Tensor, layouts: Layouts) -> list[int | Node]:
        """The shape on this rank of a value with these layouts: numbers, and nodes for sizes that
        depend on the batch. `tensor` is its whole fake tensor.
        """
        return [self.local(size, dim, layouts) for dim, size in enumerate(tensor.shape)]

    def _batch(self) -> Node:
        if self._source is None:
            raise AutoparError(
                "a segment needs the batch size, but no dim of its inputs is a multiple of the batch size"
            )
        if "batch" not in self._nodes:
            placeholder, dim, rows_each, _ = self._source
            with self.graph.inserting_after(self.graph.find_nodes(op="placeholder")[-1]):
                node = self.graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
            if rows_each > 1:
                node = self._call(operator.floordiv, node, rows_each)
            node._rename("batch")
            self._nodes["batch"] = node
        return self._nodes["batch"]

    def _emit(self, size: Any, parts: int) -> Any:
        """`size` / `parts` as a number, or as a node that computes it from the local batch. A
        symbolic float is not divided.
        """
        expr = size.node.expr.subs({s: self._whole_rows() for s in size.node.expr.free_symbols})
        return self._build(sympy.simplify(expr / parts) if isinstance(size, torch.SymInt) else expr)

    def _whole_rows(self) -> Any:
        """The rows of the whole micro-batch as a sympy expression in the local rows, `batch`."""
        batch = sympy.Symbol("batch", positive=True, integer=True)
        return batch * (self._source[3] if self._source is not None else 1)

    def _build(self, expr: Any) -> Any:
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
            if name not in (*_FUNCTIONS, "ToFloat", "Identity"):
                raise AutoparError(
                    f"a size of the model is {expr}; autopar can compute sums, products, powers, quotients, remainders, maxima and minima "
                    "of the batch"
                )
            self._nodes[key] = reduce(lambda a, b: self._call(_FUNCTIONS[name], a, b), parts)
        return self._nodes[key]

    def _call(self, function: Callable, a: Any, b: Any) -> Node:
        anchor = max(x for x in (a, b) if isinstance(x, Node))
        with self.graph.inserting_after(anchor):
            return self.graph.call_function(function, (a, b))
