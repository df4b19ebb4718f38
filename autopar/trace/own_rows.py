"""`x[torch.arange(batch), index]`: each row indexed by its own entry, as a gather along dim 1.

An index into dim 0 may be any row, so that data parallelism would gather them all.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument
from autopar.trace.edit import call, is_op

aten = torch.ops.aten
_PLACES = ("reshape", "view", "unsqueeze", "expand", "to", "_to_copy")


def gather_own_rows(graph: Graph) -> None:
    """Rewrite such an index, of one entry a row (batch,) or several (batch, k)."""
    for node in list(graph.nodes):
        if is_op(node, "index") and (entries := _own_entries(node)) is not None:
            with graph.inserting_before(node):
                found = _gathered(graph, node, node.args[0], entries)
            node.replace_all_uses_with(found)


def _own_entries(node: Node) -> Node | None:
    """The index into dim 1, if that into dim 0 is each row's own number."""
    source, indices = node.args[0].meta["val"], node.args[1]
    if len(indices) != 2 or not all(isinstance(index, Node) for index in indices) or source.dim() < 2:
        return None
    rows, entries = indices
    shape = [str(size) for size in entries.meta["val"].shape]
    own = [str(source.shape[0]), *["1"] * (len(shape) - 1)]
    whole = entries.meta["val"].dtype in (torch.int64, torch.int32) and isinstance(source.shape[0], torch.SymInt)
    if not whole or len(shape) not in (1, 2) or shape[0] != own[0]:
        return None
    return entries if [str(size) for size in rows.meta["val"].shape] == own and _counts_rows(rows, own[0]) else None


def _counts_rows(node: Node, batch: str) -> bool:
    """Whether a node holds 0, 1, ... up to the batch."""
    while is_op(node, *_PLACES) and isinstance(node.args[0], Node):
        node = node.args[0]
    if not is_op(node, "arange"):
        return False
    start, step = argument(node, "start", 0), argument(node, "step", 1)
    return start in (0, None) and step in (1, None) and str(argument(node, "end")) == batch


def _gathered(graph: Graph, node: Node, source: Node, entries: Node) -> Node:
    def emit(op, *args):
        return call(graph, node, op, *args)

    size, rank = source.meta["val"].shape[1], source.meta["val"].dim()
    index = emit(aten.to.dtype, entries, torch.int64)
    index = emit(aten.where.self, emit(aten.lt.Scalar, index, 0), emit(aten.add.Tensor, index, size), index)  # from the end
    single = entries.meta["val"].dim() == 1
    if single:
        index = emit(aten.unsqueeze.default, index, 1)
    for dim in range(2, rank):
        index = emit(aten.unsqueeze.default, index, dim)
    if rank > 2:
        index = emit(aten.expand.default, index, [-1, -1, *source.meta["val"].shape[2:]])
    found = emit(aten.gather.default, source, 1, index)
    return emit(aten.select.int, found, 1, 0) if single else found
