"""Which values are rotary position embeddings: x cos + turned(x) sin, where `turned` swaps halves or neighbours and negates one of them.

    halves       cat([-x[R/2:], x[:R/2]])             of a split or of slices
    neighbours   stack([-x[1::2], x[::2]], -1), its last two dims joined

Where a part of the columns rotates, it is cut out before and joined after, and stays so.  Queries and keys are an op each: over tp, keys
may be replicated where queries are sharded.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import Algebra, Cast, Leaf, Product, Sum, Term, at, dtype_of
from autopar.trace.fusion.matches import Match, Miss, View, interior_of

aten = torch.ops.aten
_ROTARY = "autopar::rotary_single"


def match_rotary(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of the rotary position embedding, x cos + turned(x) sin, whose result is `node`.

    A `Miss` with the reason if it looks like one that the op cannot compute; None if it does not
    look like one.
    """
    term = algebra.terms[node]
    if not isinstance(term, Sum):
        return None
    turned = [each for summand, _ in term.summands if (each := _turned_factor(algebra, summand))]
    if not turned:
        return None
    turn = turned[0][1]
    found = _rotation(algebra, node, term, turned)
    return Miss(_ROTARY, turn, found) if isinstance(found, str) else found


def _turned_factor(algebra: Algebra, summand: Term) -> tuple[Term, Node, Node, bool] | None:
    """(the other factor, the turned node, the node that it turns, whether neighbours) for a product
    of two factors of which one is turned.

    Turned means that halves or neighbours are swapped, and one of them negated. None for any other
    term.
    """
    if not isinstance(summand, Product) or len(summand.factors) != 2:
        return None
    for number, (factor, exponent) in enumerate(summand.factors):
        inner = factor.of if isinstance(factor, Cast) else factor
        if exponent != 1.0 or not isinstance(inner, Leaf):
            continue
        turn = _turned(inner.node)
        if turn is not None and summand.factors[1 - number][1] == 1.0:
            return summand.factors[1 - number][0], inner.node, *turn
    return None


def _rotation(
    algebra: Algebra, node: Node, term: Sum, turned: list[tuple[Term, Node, Node, bool]]
) -> Match | str:
    sine, turn, x, interleaved = turned[0]
    if len(turned) > 1 or len(term.summands) != 2 or term.constant:
        return "it is no sum of two products"
    (one, first), (other, second) = term.summands
    plain = other if _turned_factor(algebra, one) else one
    factor = second if plain is one else first
    if (first if plain is one else second) != 1.0 or factor != 1.0:
        return "it rotates the other way, or is scaled"
    wide = algebra.terms[x]
    wide = wide if dtype_of(x) == dtype_of(node) else algebra.cast(wide, dtype_of(node))
    quotient = algebra.quotient(plain, wide)
    cosine = algebra.product(quotient.factors, quotient.coefficient)
    tables = [algebra.value(each, widened=True) for each in (cosine, sine)]
    if any(table is None for table in tables):
        return "its tables are no values of the graph, or what it turns is another value"
    return _match(algebra, node, x, turn, [t for t in tables if t is not None], interleaved)


def _match(
    algebra: Algebra, node: Node, x: Node, turn: Node, tables: list[Node], interleaved: bool
) -> Match | str:
    shape = x.meta["val"].shape
    if len(shape) != 4 or str(list(shape)) != str(list(node.meta["val"].shape)):
        return f"it rotates {len(shape)} dims, the op 4"
    if any(table.meta.get("grad") for table in tables):
        return "its tables need a gradient"
    placed = [_table(table, shape) for table in tables]
    if placed[0] is None or placed[0] != placed[1]:
        return f"tables of shape {tuple(tables[0].meta['val'].shape)} for {tuple(shape)}"
    heads_last, view = placed[0]
    attributes: dict[str, Attribute] = {
        "interleaved": interleaved,
        "heads_last": heads_last,
        "promote": True,
    }
    operands = {"x": x, "cos": tables[0], "sin": tables[1]}
    interior, copies = interior_of(algebra, node, operands.values())
    op = torch.ops.autopar.rotary_single.default
    views = {"cos": view, "sin": view}
    return Match(
        op,
        operands,
        attributes,
        results=(node,),
        interior=interior,
        at=turn,
        views=views,
        copies=copies,
    )


def _table(table: Node, shape: torch.Size) -> tuple[bool, View] | None:
    """(whether heads are dim 2 of x, the view that gives the table three dims) for a table of
    cosines or sines and x of `shape` (4 dims).

    None if the table is not aligned with x.
    """
    own = list(map(str, table.meta["val"].shape))
    batch, first, second, columns = map(str, shape)
    if own == [first, columns] or own == [second, columns]:
        # a table of two dims is aligned with the last two of x
        return (False, ((aten.unsqueeze.default, (0,)),)) if own[0] == second else None
    if len(own) == 3 and own[0] == "1" and own[1:] == [second, columns]:
        return False, ()
    if len(own) != 4 or own[0] not in ("1", batch) or own[3] != columns:
        return None
    if own[1] == "1" and own[2] == second:
        return False, ((aten.squeeze.dim, (1,)),)
    if own[2] == "1" and own[1] == first:
        return True, ((aten.squeeze.dim, (2,)),)
    return None


def _turned(node: Node) -> tuple[Node, bool] | None:
    """(x, whether neighbours) if a node is x with the halves of its last dim, or neighbours,
    swapped and one of them negated. None otherwise.
    """
    if op_name(node) == "aten::cat":
        parts = at(node)
        rank = node.meta["val"].dim()
        if len(parts) != 2 or argument(node, "dim", 0) % rank != rank - 1:
            return None
        low, high = _half(parts[1]), _half(_negated(parts[0]))
        if low is None or high is None or low[0] is not high[0]:
            return None
        return (low[0], False) if (low[1], high[1]) == ("low", "high") else None
    if op_name(node) == "aten::reshape" and op_name(at(node)) == "aten::stack":
        stack = at(node)
        parts, rank = at(stack), stack.meta["val"].dim()
        joined = str(list(node.meta["val"].shape[:-1])) == str(list(stack.meta["val"].shape[:-2]))
        if len(parts) != 2 or argument(stack, "dim", 0) % rank != rank - 1 or not joined:
            return None
        even, odd = _half(parts[1]), _half(_negated(parts[0]))
        if even is None or odd is None or even[0] is not odd[0]:
            return None
        return (even[0], True) if (even[1], odd[1]) == ("even", "odd") else None
    return None


def _negated(node: Node) -> Node | None:
    """The node that a node negates, or None."""
    negates = op_name(node) == "aten::neg" or (op_name(node) == "aten::mul" and at(node, 1) == -1)
    return at(node) if negates else None


def _half(node: Node | None) -> tuple[Node, str] | None:
    """(x, 'low', 'high', 'even' or 'odd') if a node is that half of the last dim of x; None
    otherwise.
    """
    if node is None:
        return None
    if node.target is operator.getitem:
        split, index = at(node), at(node, 1)
        if not isinstance(split, Node) or op_name(split) != "aten::split_with_sizes":
            return None
        x, sizes = at(split), at(split, 1)
        rank = x.meta["val"].dim()
        halves = len(sizes) == 2 and sizes[0] == sizes[1]
        if not halves or argument(split, "dim", 0) % rank != rank - 1:
            return None
        return x, ("low", "high")[index]
    if op_name(node) != "aten::slice":
        return None
    x = at(node)
    rank, size = x.meta["val"].dim(), x.meta["val"].shape[-1]
    start, end = argument(node, "start") or 0, argument(node, "end")
    if argument(node, "dim", 0) % rank != rank - 1 or not isinstance(size, int):
        return None
    found = slice(start, end, argument(node, "step", 1)).indices(size)
    names = {
        (0, size // 2, 1): "low",
        (size // 2, size, 1): "high",
        (0, size, 2): "even",
        (1, size, 2): "odd",
    }
    name = names.get(found) if size % 2 == 0 else None
    return None if name is None else (x, name)
