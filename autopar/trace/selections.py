"""Boolean indexing as arithmetic over all rows, with a mask.

`x[mask]`, `nonzero(mask)` and `where(mask)` make tensors whose size is the number of True entries.
Here such a tensor has a row for every entry of the mask, or for every index along some of its dims.
What is written back, or added up, leaves out the rows whose entry is False. So loops over experts,
and losses over chosen tokens, have shapes that depend on the batch alone.

Ops between may only compute row by row, as their rules say. Rows that are not selected hold 0.5
where they are read, so that their gradients, which are multiplied by 0, are finite.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.ir.calls import argument
from autopar.ops.aten import aten
from autopar.ops.dims import is_symbolic, located, operands
from autopar.ops.rules import op_dims
from autopar.trace.edit import is_op, product
from autopar.trace.masked_rows import Index, MaskedRows, RowEdits, Selection, refusal
from autopar.trace.row_facts import is_random


def _notes(graph: Graph) -> tuple[str, ...]:
    """What a user must know of the boolean indexing in a captured graph."""
    count = sum(_makes_unknown(node) for node in graph.nodes)
    if not count:
        return ()
    return (
        f"boolean indexing x{count} is computed for all rows and masked: exact, but experts in such a loop multiply every token; "
        "batched experts multiply the routed ones alone",
    )


def spell_selections(graph: Graph) -> tuple[str, ...]:
    """Rewrite what depends on boolean indexing. Returns notes on it. Raises AutoparError for a shape that depends on data otherwise."""
    notes, found = _notes(graph), dict[Node, Any]()
    for node in list(graph.nodes):
        if _makes_unknown(node) or any(each in found for each in node.all_input_nodes):
            with graph.inserting_before(node):
                _Rewrite(graph, node, found).run()
    for node in reversed(found):
        if not node.users:
            graph.erase_node(node)
    graph.eliminate_dead_code()
    for node in graph.nodes:
        if node.op == "call_function" and _is_unknown(node.meta.get("val")):
            raise refusal(node)
    return notes


def _is_unknown(val: Any) -> bool:
    """Whether a number, or a size of a tensor, depends on data. Of a list, whether one of its
    entries does.
    """
    if isinstance(val, (list, tuple)):
        return any(map(_is_unknown, val))
    sizes = val.shape if isinstance(val, Tensor) else (val,)
    return any(isinstance(n, torch.SymInt) and free_unbacked_symbols(n) for n in sizes)


def _makes_unknown(node: Node) -> bool:
    return (
        node.op == "call_function"
        and _is_unknown(node.meta.get("val"))
        and not any(_is_unknown(each.meta.get("val")) for each in node.all_input_nodes)
    )


def _same(a: Any, b: Any) -> bool:
    """Whether two nodes compute the same, call by call, as `y > 0` that is written twice does.
    Random calls and calls with keyword arguments equal only themselves. Other values compare by
    `==`.
    """
    if a is b or not (isinstance(a, Node) and isinstance(b, Node)):
        return a is b or (not isinstance(a, Node) and type(a) is type(b) and a == b)
    if a.op != "call_function" or a.target is not b.target or is_random(a) or a.kwargs or b.kwargs:
        return False
    return len(a.args) == len(b.args) and all(map(_same, a.args, b.args))


class _Rewrite(RowEdits):
    """Rewrites one node, by `run`, that makes or reads rows of a data-dependent number. `found`
    maps earlier nodes to what they are (`Index`, `MaskedRows` or several), and gets this one.
    """

    def __init__(self, graph: Graph, node: Node, found: dict[Node, Any]) -> None:
        super().__init__(graph, node)
        self.found = found

    def run(self) -> None:
        node = self.node
        if not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
            return  # a size; if it is read, the end refuses it
        result = self._indices()
        if result is None:
            if is_op(node, "index", "index_select"):
                result = self._gathered()
            elif is_op(node, "index_put", "index_add", "index_copy"):
                result = self._written()
            elif is_op(node, "sum", "mean", "cross_entropy_loss", "nll_loss", "nll_loss_nd"):
                result = self._reduced()
            else:
                result = self._row_by_row()
        if isinstance(result, Node):
            node.replace_all_uses_with(result)
            self.graph.erase_node(node)
        else:
            self.found[node] = result

    # ------------------------------------------------------------------------------- indices

    def _indices(self) -> Any:
        """The `Index` that the node is, if it is `where(mask)`, `nonzero(mask)`, or takes or
        reorders their results. None for anything else.
        """
        node = self.node
        source = self.args[0]
        if is_op(node, "where", "nonzero", "nonzero_numpy", "argwhere") and len(self.args) == 1:
            return Index(self._selection(source), None)
        known = self.found.get(source) if isinstance(source, Node) else None
        if not isinstance(known, Index):
            return None
        if known.dim is not None:
            plain = is_op(node, "to", "clone", "alias", "detach") or (
                is_op(node, "reshape", "squeeze") and node.meta["val"].dim() == 1
            )
            return known if plain else None
        rank = len(known.of.order)
        if isinstance(node.meta["val"], (list, tuple)):  # unbind, before its items
            return known
        if is_op(node, "select") and argument(node, "dim") in (1, -1):
            return Index(known.of, argument(node, "index") % rank)
        if not isinstance(node.target, torch._ops.OpOverload):  # an item of where or unbind
            return Index(known.of, self.args[1])
        if is_op(node, "reshape", "squeeze") and rank == 1 and node.meta["val"].dim() == 1:
            return Index(known.of, 0)
        raise refusal(node)

    def _selection(self, mask: Node) -> Selection:
        for each in self.found.values():
            if _same(each.of.mask, mask):
                return each.of
        shape = mask.meta["val"].shape
        if not isinstance(shape, torch.Size) or not len(shape):
            raise refusal(self.node)
        batch = [dim for dim, size in enumerate(shape) if is_symbolic(size)]
        return Selection(mask, (*batch, *(d for d in range(len(shape)) if d not in batch)))

    # ---------------------------------------------------------------------------------- rows

    def _gathered(self) -> Any:
        """The `MaskedRows` for x[indices] or x[mask]: all rows of x, with a filler where they are not
        selected.
        """
        node = self.node
        source = self.args[0]
        indices = (
            [None] * argument(node, "dim") + [argument(node, "index")]
            if is_op(node, "index_select")
            else self.args[1]
        )
        of, start, dims = self._places(indices)
        if source in self.found:
            raise refusal(node)
        return self.filled(self.flattened(source, of, start, dims))

    def _places(self, indices: list) -> tuple[Selection, int, tuple[int, ...]]:
        """(the selection by which `indices` index, the first dim that they index, which dim of the
        mask indexes each dim from there on).

        `indices` has a node or None for each dim. Raises a refusal for other indexing.
        """
        given = [(k, each) for k, each in enumerate(indices) if each is not None]
        start = given[0][0]
        known: list[Any] = [self.found.get(each) for _, each in given]
        (_, first), rest = given[0], given[1:]
        if not rest and known[0] is None and first.meta["val"].dtype == torch.bool:
            of = self._selection(first)
            return of, start, tuple(range(len(of.order)))
        together = [k for k, _ in given] == list(range(start, start + len(given)))
        if not together or not all(
            isinstance(each, Index) and each.dim is not None for each in known
        ):
            raise refusal(self.node)
        dims = tuple(each.dim for each in known)
        if len({id(each.of) for each in known}) > 1 or len(set(dims)) < len(dims):
            raise refusal(self.node)
        return known[0].of, start, dims

    # ------------------------------------------------------------------------------ between

    def _operands(self) -> tuple[dict[Node, MaskedRows], Selection, tuple[int, ...]]:
        """(by operand that has rows, these rows, spread over the same dims; their selection; these
        dims of the mask). Raises a refusal if there is none, or if they belong to several
        selections.
        """
        rows = {each: self.found[each] for each in self.node.all_input_nodes if each in self.found}
        if not rows or not all(isinstance(each, MaskedRows) for each in rows.values()):
            raise refusal(self.node)
        of = next(iter(rows.values())).of
        if any(each.of is not of for each in rows.values()):
            raise refusal(self.node)
        dims = tuple(dim for dim in of.order if any(dim in each.dims for each in rows.values()))
        return {node: self.spread(each, dims) for node, each in rows.items()}, of, dims

    def _row_by_row(self) -> Any:
        """The `MaskedRows` of an op whose rule says that each row is computed from its own; several for
        several results. Raises a refusal for any other op.
        """
        node = self.node
        if not isinstance(node.target, torch._ops.OpOverload):  # an item of several results
            known = self.found[self.args[0]]
            return known[self.args[1]]
        rows, of, dims = self._operands()
        if is_op(node, "reshape", "expand"):
            return self._shaped(next(iter(rows.values())))
        args = torch.fx.map_arg(self.args, lambda n: rows[n].node if n in rows else n)
        kwargs = torch.fx.map_arg(node.kwargs, lambda n: rows[n].node if n in rows else n)
        new = self.emit(node.target, *args, **kwargs)
        letter, known = None, op_dims(new)
        places = {rows[n].node: rows[n].at for n in rows}
        for operand, term in zip(operands(new), known.inputs if known else (), strict=False):
            if operand in places:
                own = term[places[operand]]
                letter = own if letter in (None, own) else "!"
        if known is None or letter is None or letter.startswith("!") or "*" in letter:
            raise refusal(node)
        if not all(letter in term for term in known.outputs):
            raise refusal(node)
        places_out = [located(term, letter)[0] for term in known.outputs]
        if isinstance(new.meta["val"], Tensor):
            return MaskedRows(new, of, dims, places_out[0])
        items = []
        for index, (val, at) in enumerate(zip(new.meta["val"], places_out, strict=True)):
            item = self.graph.call_function(operator.getitem, (new, index))
            item.meta = dict(new.meta) | {"val": val}
            items.append(MaskedRows(item, of, dims, at))
        return _Several(items, of)

    def _shaped(self, rows: MaskedRows) -> MaskedRows:
        """The `MaskedRows` of a reshape or expand that keeps the dim of rows whole. Raises a refusal for
        any other.
        """
        shape = list(self.node.meta["val"].shape)
        ats = [k for k, size in enumerate(shape) if _is_unknown(size)]
        before, _ = self.around(rows)
        if len(ats) != 1 or any(is_symbolic(s) for s in (*before, *shape[: ats[0]])):
            raise refusal(self.node)
        if is_op(self.node, "reshape") and product(before) != product(shape[: ats[0]]):
            raise refusal(self.node)
        shape[ats[0]] = product(rows.of.sizes(rows.dims))
        if is_op(self.node, "expand"):
            return MaskedRows(
                self.emit(aten.expand.default, rows.node, shape), rows.of, rows.dims, ats[0]
            )
        return MaskedRows(self.reshaped(rows.node, shape), rows.of, rows.dims, ats[0])

    # ------------------------------------------------------------------------------ the end

    def _written(self) -> Node:
        """The node of a tensor after selected rows were written or added: `index_put`, `index_add`
        or `index_copy`. Rows that are not selected keep their values.
        """
        node = self.node
        base = self.args[0]
        if is_op(node, "index_put"):
            indices, value = self.args[1], self.args[2]
            adds = bool(argument(node, "accumulate", False))
        else:
            indices = [None] * self.args[1] + [self.args[2]]
            value, adds = self.args[3], is_op(node, "index_add")
            if argument(node, "alpha", 1) != 1:
                raise refusal(node)
        of, start, dims = self._places(indices)
        if base in self.found:
            raise refusal(node)
        like = self.flattened(base, of, start, dims)
        known = self.found.get(value)
        if known is None:  # the same value for all rows
            wide = self.emit(aten.expand.default, value, list(like.node.meta["val"].shape))
            known = MaskedRows(wide, of, like.dims, start)
        if not isinstance(known, MaskedRows) or known.of is not of or known.at != start:
            raise refusal(node)
        kept = self.masked(known)
        before, after = self.around(kept)
        split = self.reshaped(kept.node, [*before, *of.sizes(of.order), *after])
        gone = [start + k for k, dim in enumerate(of.order) if dim not in dims]
        total = self.emit(aten.sum.dim_IntList, split, gone) if gone else split
        left = [dim for dim in of.order if dim in dims]
        total = self.arranged(total, left, dims, start)
        if adds:
            return self.emit(aten.add.Tensor, base, total)
        chosen = self.valid(like, like.dims)
        chosen = self.reshaped(chosen, [*of.sizes(left), *chosen.meta["val"].shape[1:]])
        return self.emit(aten.where.self, self.arranged(chosen, left, dims, 0), total, base)

    def _reduced(self) -> Any:
        """The node of a sum or mean over selected rows, or of a loss; `MaskedRows` if the reduction keeps
        the dim of rows.
        """
        node = self.node
        if not is_op(node, "sum", "mean"):
            return self._loss()
        if _is_unknown(node.meta["val"]):
            return self._row_by_row()
        (rows,) = self._operands()[0].values()
        kept = self.masked(rows)
        args = [kept.node, *self.args[1:]]
        total = self.emit(aten.sum.dim_IntList if len(args) > 1 else aten.sum.default, *args)
        if is_op(node, "sum"):
            return total
        shape = kept.node.meta["val"].shape
        listed = argument(node, "dim") if len(args) > 1 else None
        dims = {d % len(shape) for d in listed or range(len(shape))} - {kept.at}
        count = self.emit(aten.sum.default, self.valid(kept, kept.dims))
        count = self.emit(aten.mul.Tensor, count, product([shape[d] for d in dims]))
        return self.emit(aten.div.Tensor, total, count)

    def _loss(self) -> Any:
        """A cross-entropy over selected rows, as a node; `MaskedRows` if it is not reduced. Labels of
        rows that are not selected become the ignored index.
        """
        node = self.node
        rows, of, _ = self._operands()
        logits, target = (rows.get(each) for each in self.args[:2])
        if logits is None or target is None or target.node.meta["val"].is_floating_point():
            raise refusal(node)
        logits, target = (self.spread(each, of.order) for each in (logits, target))
        ignored = argument(node, "ignore_index", -100)
        marked = self.emit(
            aten.where.self,
            self.valid(target, of.order),
            target.node,
            self.emit(aten.full_like.default, target.node, ignored),
        )
        new = self.emit(node.target, logits.node, marked, *self.args[2:], **node.kwargs)
        return MaskedRows(new, of, of.order, 0) if _is_unknown(node.meta["val"]) else new


@dataclass(frozen=True, slots=True)
class _Several:
    """A record of the rows of an op with several results: one `MaskedRows` for each, in order, by `[]`."""

    items: list[MaskedRows]
    of: Selection

    def __getitem__(self, index: int) -> MaskedRows:
        return self.items[index]
