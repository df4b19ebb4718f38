"""Rewrites `x[torch.arange(batch), index]`, which indexes each row by its own entry, as a gather
along dim 1; a write becomes a scatter.

An index into dim 0 may refer to any row, so data parallelism would have to gather all rows.
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, called_function
from autopar.ops.aten import aten
from autopar.ops.values import fake_tensor, input_node
from autopar.trace.edit import call, is_op

_PLACES = ("reshape", "view", "unsqueeze", "expand", "to", "_to_copy")


def index_own_rows(graph: Graph) -> None:
    """Rewrite, in place, all reads and writes of `x[torch.arange(batch), index]` as gathers and
    scatters along dim 1, for any number of entries per row. The same entries in all rows become
    `x[:, index]`.
    """
    for node in list(graph.nodes):
        if is_op(node, "index", "index_put") and (entries := _own_entries(node)) is not None:
            with graph.inserting_before(node):
                found = _indexed(graph, node, entries)
            node.replace_all_uses_with(found)


def _own_entries(node: Node) -> Node | None:
    """The node of the index into dim 1, if a read or write indexes dims 0 and 1 and the index into
    dim 0 is each row's own number. Otherwise None.
    """
    source, indices = fake_tensor(input_node(node, 0)), argument(node, "indices")
    if (
        len(indices) != 2
        or not all(isinstance(index, Node) for index in indices)
        or source.dim() < 2
    ):
        return None
    rows, entries = indices
    batch, whole = str(source.shape[0]), entries.meta["val"].dtype in (torch.int64, torch.int32)
    shape, own = entries.meta["val"].shape, [str(size) for size in rows.meta["val"].shape]
    if not (
        isinstance(source.shape[0], torch.SymInt)
        and whole
        and own
        and own == [batch, *["1"] * (len(own) - 1)]
    ):
        return None
    inner = shape[1:] if len(shape) == len(own) else shape
    if len(shape) > len(own) or any(isinstance(size, torch.SymInt) for size in inner):
        return None
    fits = len(shape) < len(own) or str(shape[0]) in ("1", batch)
    return entries if fits and _counts_rows(rows, batch) else None


def _counts_rows(node: Node, batch: str) -> bool:
    """Whether a node holds 0, 1, ..., batch - 1, perhaps reshaped or cast. `batch` is the symbol as
    text.
    """
    while is_op(node, *_PLACES) and isinstance(node.args[0], Node):
        node = node.args[0]
    if not is_op(node, "arange"):
        return False
    start, step = argument(node, "start", 0), argument(node, "step", 1)
    return start in (0, None) and step in (1, None) and str(argument(node, "end")) == batch


def _indexed(graph: Graph, node: Node, entries: Node) -> Node:
    """The new node that has the result of the read or write `node`, without an index into rows.
    `entries` is the index into dim 1.
    """
    emit, source, written = partial(call, graph, node), input_node(node, 0), node.args[2:]
    rows, _ = argument(node, "indices")
    whole, shape = source.meta["val"].shape, entries.meta["val"].shape
    rank = rows.meta["val"].dim()
    if len(shape) < rank or str(shape[0]) == "1":  # the same entries in all rows
        inner = (
            [1] * (rank - 1 - len(shape)) + list(shape) if len(shape) < rank else list(shape[1:])
        )
        return emit(
            called_function(node),
            source,
            [None, emit(aten.reshape.default, entries, inner)],
            *written,
        )
    index = emit(aten.to.dtype, entries, torch.int64)
    index = emit(
        aten.where.self,
        emit(aten.lt.Scalar, index, 0),
        emit(aten.add.Tensor, index, whole[1]),
        index,
    )  # from the end
    flat = [-1, prod(shape[1:])]
    index = emit(aten.reshape.default, index, [*flat, *[1] * (len(whole) - 2)])
    if len(whole) > 2:
        index = emit(aten.expand.default, index, [-1, -1, *whole[2:]])
    if not written:
        found = emit(aten.gather.default, source, 1, index)
        return emit(aten.reshape.default, found, [-1, *shape[1:], *whole[2:]])
    values = emit(aten.expand.default, written[0], [whole[0], *shape[1:], *whole[2:]])
    values = emit(aten.reshape.default, values, [*flat, *whole[2:]])
    adds = argument(node, "accumulate", False)
    return emit(aten.scatter_add.default if adds else aten.scatter.src, source, 1, index, values)
