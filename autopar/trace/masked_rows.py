"""Rows that a mask selects, as rows for all its entries, or for all indices along some of its dims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.errors import AutoparError
from autopar.ops.aten import aten
from autopar.ops.dims import is_symbolic
from autopar.trace.edit import call, product
from autopar.trace.user_lines import line_of_node

FILLER = 0.5
"""What rows that are not selected hold: at 0 and 1, functions such as log and acos have no finite slope."""


def refusal(node: Node) -> AutoparError:
    """An error to raise at a node that reads rows of a data-dependent number in another way than
    row by row. It names the user's line.
    """
    return AutoparError(
        f"forward makes or reads a tensor whose shape depends on data{line_of_node(node)}, by {node.name}, in a way that is not row by "
        "row, as boolean indexing, nonzero and unique do: use arithmetic with a mask instead, for example (loss * mask).sum() / mask.sum()"
    )


@dataclass(frozen=True, slots=True)
class Selection:
    """A record of boolean indexing: the True entries of the node `mask`. `order` lists the mask's
    dims, that of the batch first.
    """

    mask: Node
    order: tuple[int, ...]

    def size(self, dim: int) -> Any:
        """The size of dim `dim` of the mask."""
        return self.mask.meta["val"].shape[dim]

    def sizes(self, dims: Iterable[int]) -> list[Any]:
        """The sizes of these dims of the mask, in the order given."""
        return [self.size(dim) for dim in dims]


@dataclass(frozen=True, slots=True)
class Index:
    """A record of what `nonzero(mask)` gives: the indices of the True entries of a selection, along
    one dim of the mask, or along all (`dim` is None).
    """

    of: Selection
    dim: int | None


@dataclass(frozen=True, slots=True)
class MaskedRows:
    """A record of what stands for `x[mask]`: `node`, whose dim `at` has one row for each index
    along `dims` of the mask, flattened. All rows are there, selected or not.
    """

    node: Node
    of: Selection
    dims: tuple[int, ...]
    at: int


class RowEdits:
    """Inserts calls before one node of a graph that reorder, spread and mask rows. Every method but
    `around` inserts calls and returns their result, as a node or as `MaskedRows`.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        self.graph, self.node = graph, node
        self.args: tuple[Any, ...] = node.args

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Insert a call before the node and return it. It has the node's meta and its own fake
        value.
        """
        return call(self.graph, self.node, target, *args, **kwargs)

    def flattened(
        self, source: Node, of: Selection, start: int, dims: tuple[int, ...]
    ) -> MaskedRows:
        """`source` as rows. Its dims from `start` on correspond to `dims` of the mask; they are put
        in the order of the selection and flattened into one. Raises a refusal if sizes differ.
        """
        shape = source.meta["val"].shape
        if [str(s) for s in shape[start : start + len(dims)]] != [str(s) for s in of.sizes(dims)]:
            raise refusal(self.node)
        ordered = tuple(dim for dim in of.order if dim in dims)
        if len(dims) > 1:
            moved = [start + dims.index(dim) for dim in ordered]
            after = range(start + len(dims), len(shape))
            if moved != sorted(moved):
                source = self.emit(aten.permute.default, source, [*range(start), *moved, *after])
            whole = [*shape[:start], product(of.sizes(ordered)), *shape[start + len(dims) :]]
            source = self.reshaped(source, whole)
        return MaskedRows(source, of, ordered, start)

    def filled(self, rows: MaskedRows) -> MaskedRows:
        """The rows with `FILLER` in those that are not selected. Rows of integers stay as they are."""
        if not rows.node.meta["val"].is_floating_point():
            return rows
        valid = self.valid(rows, rows.dims)
        filler = self.emit(aten.full_like.default, rows.node, FILLER)
        return MaskedRows(
            self.emit(aten.where.self, valid, rows.node, filler), rows.of, rows.dims, rows.at
        )

    def valid(self, rows: MaskedRows, dims: tuple[int, ...]) -> Node:
        """A bool node: whether any entry of the mask is True at each index along `dims`. Its dim 0
        has the rows; further dims of size 1 broadcast it over what is behind the rows.
        """
        of, mask = rows.of, rows.of.mask
        if mask.meta["val"].dtype != torch.bool:
            mask = self.emit(aten.ne.Scalar, mask, 0)
        for dim in sorted(set(of.order) - set(dims), reverse=True):
            mask = self.emit(aten.any.dim, mask, dim)
        left = sorted(dims)
        order = [left.index(dim) for dim in dims]
        if order != sorted(order):
            mask = self.emit(aten.permute.default, mask, order)
        behind = rows.node.meta["val"].dim() - rows.at - 1
        return self.reshaped(mask, [product(of.sizes(dims)), *[1] * behind])

    def reshaped(self, source: Node, shape: list) -> Node:
        """`source` in another shape; itself if it has that shape. The one size that follows the
        batch is written -1.
        """
        if [str(s) for s in source.meta["val"].shape] == [str(s) for s in shape]:
            return source
        symbolic = [k for k, size in enumerate(shape) if is_symbolic(size)]
        written = [-1 if symbolic == [k] else size for k, size in enumerate(shape)]
        return self.emit(aten.reshape.default, source, written)

    def spread(self, rows: MaskedRows, dims: tuple[int, ...]) -> MaskedRows:
        """The rows repeated for each index along `dims`, which contain their own dims of the mask.
        The same object if these are equal.
        """
        if rows.dims == dims:
            return rows
        before, after = self.around(rows)
        ones = [rows.of.size(dim) if dim in rows.dims else 1 for dim in dims]
        wide = self.reshaped(rows.node, [*before, *ones, *after])
        sizes = rows.of.sizes(dims)
        wide = self.emit(aten.expand.default, wide, [*before, *sizes, *after])
        return MaskedRows(
            self.reshaped(wide, [*before, product(sizes), *after]), rows.of, dims, rows.at
        )

    def around(self, rows: MaskedRows) -> tuple[list, list]:
        """(sizes of the dims before the dim of rows, sizes of those behind it)."""
        shape = rows.node.meta["val"].shape
        return list(shape[: rows.at]), list(shape[rows.at + 1 :])

    def masked(self, rows: MaskedRows) -> MaskedRows:
        """The rows spread over all dims of the mask, with 0 in those that are not selected."""
        rows = self.spread(rows, rows.of.order)
        zero = self.emit(aten.zeros_like.default, rows.node)
        kept = self.emit(aten.where.self, self.valid(rows, rows.dims), rows.node, zero)
        return MaskedRows(kept, rows.of, rows.dims, rows.at)

    def arranged(self, value: Node, have: list[int], wanted: tuple[int, ...], start: int) -> Node:
        """`value` with dims permuted: from `start` on it has the mask's dims in the order `have`,
        and gets them in the order `wanted`.
        """
        order = [start + have.index(dim) for dim in wanted]
        if order == sorted(order):
            return value
        rank = value.meta["val"].dim()
        after = range(start + len(wanted), rank)
        return self.emit(aten.permute.default, value, [*range(start), *order, *after])
