"""Which values are rotary position embeddings, in two spellings.

    turned    x cos + turned(x) sin, where `turned` swaps halves or neighbours and negates one of them
    pairs     low cos - high sin and high cos + low sin, joined

The columns of a pair are halves or neighbours of x.  Pairs that are read as neighbours may be written as halves, as MLA models do.
Where a part of the columns rotates, which is cut out before and joined after, the op reads all columns and copies the others.
A result that is rounded to the dtype that x had before it was widened is rounded by the op.

Queries and keys are an op each: over tp, keys may be replicated where queries are sharded.  `rewrite/program.py` joins their launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.ir.fusion import Attribute
from autopar.ops.aten import aten
from autopar.trace.fusion.algebra import Algebra, Cast, Leaf, ProductTerm, Sum, Term, at, dtype_of
from autopar.trace.fusion.columns import Half, half_of, joined_nodes, negated, part_of
from autopar.trace.fusion.matches import Match, Miss, View, ending_at, interior_of

_ROTARY = "autopar::rotary_single"
_OTHER_WAY = "it is scaled, or the signs of its products are those of no rotation"


@dataclass(frozen=True, slots=True)
class _Rotation:
    """A description of a rotation of whole pairs of columns.

    Attributes:
        x: the node that is rotated.
        tables: the terms of cos and sin.
        backwards: whether sin is negated.
        interleaved: whether the columns of a pair are neighbours in x.
        parted: whether they are halves of the result, though neighbours in x.
        turn: the node by which the rotation is recognised.
    """

    x: Node
    tables: tuple[Term, Term]
    backwards: bool
    interleaved: bool
    parted: bool
    turn: Node


@dataclass(frozen=True, slots=True)
class _Unlike:
    """A record of a value that looks like a rotation, recognised at `turn`, and is none for
    `reason`.
    """

    turn: Node
    reason: str


def match_rotary(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of the rotary position embedding, x cos + turned(x) sin, whose result is `node`.

    A `Miss` with the reason if it looks like one that the op cannot compute; None if it does not
    look like one.
    """
    found = _partial(algebra, node) or _whole(algebra, node)
    return Miss(_ROTARY, found.turn, found.reason) if isinstance(found, _Unlike) else found


def _whole(algebra: Algebra, node: Node) -> Match | _Unlike | None:
    """The match of a rotation of all columns of a value, perhaps rounded, with the result `node`.
    `_Unlike` with the reason if it looks like one; None if it does not.
    """
    rounded = op_name(node) == "aten::to" and isinstance(at(node), Node)
    result = at(node) if rounded else node
    if result not in algebra.terms:
        return None
    found = _turned(algebra, result) or _pairs(algebra, result)
    return _match(algebra, node, found, rounded) if isinstance(found, _Rotation) else found


def _partial(algebra: Algebra, node: Node) -> Match | None:
    """The match of a rotation of the first or the last columns of a value, joined with its other
    columns, with the result `node`. None if it is none.
    """
    parts = joined_nodes(node) or []
    for number, rotated in enumerate(parts if len(parts) == 2 else ()):
        match, rest = _whole(algebra, rotated), part_of(parts[1 - number])
        if not isinstance(match, Match) or rest is None:
            continue
        part = part_of(match.operands["x"])
        if part is None or part.of is not rest.of or dtype_of(rotated) != dtype_of(node):
            continue
        columns = part.of.meta["val"].shape[-1]
        places = (
            [(0, part.stop), (part.stop, columns)]
            if number == 0
            else [(part.start, columns), (0, part.start)]
        )
        if places != [(part.start, part.stop), (rest.start, rest.stop)]:
            continue
        attributes: dict[str, Attribute] = {
            "rotated": part.stop - part.start,
            "last": number == 1,
        }
        return ending_at(algebra, match, node, {"x": part.of}, attributes)
    return None


# ---------------------------------------------------------------------------------------------------------- x cos + turned(x) sin


def _turned(algebra: Algebra, node: Node) -> _Rotation | _Unlike | None:
    """The rotation x cos + turned(x) sin whose result is `node`. `_Unlike` with the reason if it
    has a turned factor and is none; None without one.
    """
    term = algebra.terms[node]
    if not isinstance(term, Sum):
        return None
    turned = [each for summand, _ in term.summands if (each := _turned_factor(summand))]
    if not turned:
        return None
    sine, turn, (x, interleaved, backwards) = turned[0]
    if len(turned) > 1 or len(term.summands) != 2 or term.constant:
        return _Unlike(turn, "it is no sum of two products")
    (one, first), (other, second) = term.summands
    plain = other if _turned_factor(one) else one
    kept, factor = (second, first) if plain is other else (first, second)
    wide = algebra.terms[x]
    wide = wide if dtype_of(x) == dtype_of(node) else algebra.cast(wide, dtype_of(node))
    quotient = algebra.quotient(plain, wide)
    cosine = algebra.product(quotient.factors, quotient.coefficient)
    tables = _scaled(algebra, (cosine, kept), (sine, abs(factor)))
    if tables is None:
        return _Unlike(turn, _OTHER_WAY)
    return _Rotation(x, tables, backwards != (factor < 0), interleaved, False, turn)


def _scaled(
    algebra: Algebra, cosine: tuple[Term, float], sine: tuple[Term, float]
) -> tuple[Term, Term] | None:
    """The terms of both tables, each (term, factor). None if a factor other than 1 is of no table:
    tables may be scaled, as YaRN does, but products may not.
    """
    found = []
    for term, factor in (cosine, sine):
        found.append(algebra.product(((term, 1.0),), factor))
        if factor != 1.0 and algebra.value(found[-1], widened=True) is None:
            return None
    return found[0], found[1]


def _turned_factor(summand: Term) -> tuple[Term, Node, tuple[Node, bool, bool]] | None:
    """(the other factor, the turned node, the result of `_turn_of`) for a product of two factors of
    which one is turned. None for any other term.
    """
    for leaf, other in _leaves(summand):
        if (turn := _turn_of(leaf)) is not None:
            return other, leaf, turn
    return None


def _leaves(summand: Term) -> Iterator[tuple[Node, Term]]:
    """Yields (the node of a factor that is a leaf or a cast of one, the other factor) for a product
    of two factors. Nothing for any other term.
    """
    if isinstance(summand, ProductTerm) and [power for _, power in summand.factors] == [1.0, 1.0]:
        terms = [term for term, _ in summand.factors]
        for factor, other in (terms, terms[::-1]):
            inner = factor.of if isinstance(factor, Cast) else factor
            if isinstance(inner, Leaf):
                yield inner.node, other


def _turn_of(node: Node) -> tuple[Node, bool, bool] | None:
    """(x, whether neighbours, whether the lower is negated) if a node is x with the columns of each
    pair swapped and one of them negated. None otherwise.
    """
    parts = joined_nodes(node)
    neighbours = parts is None
    parts = parts or joined_nodes(node, neighbours=True)
    if parts is None or len(parts) != 2:
        return None
    for backwards, (high, low) in enumerate(
        ((negated(parts[0]), parts[1]), (parts[0], negated(parts[1])))
    ):
        upper, lower = half_of(high), half_of(low)
        if upper and lower and upper.completes(lower) and lower.neighbours == neighbours:
            return lower.of, neighbours, bool(backwards)
    return None


# ----------------------------------------------------------------------------------- low cos - high sin with high cos + low sin


def _pairs(algebra: Algebra, node: Node) -> _Rotation | _Unlike | None:
    """The rotation whose result `node` joins low cos - high sin and high cos + low sin. `_Unlike`
    with the reason if it joins other products of both halves; None if it does not.
    """
    parts = joined_nodes(node)
    apart = parts is not None
    parts = parts or joined_nodes(node, neighbours=True)
    if parts is None or len(parts) != 2 or not all(part in algebra.terms for part in parts):
        return None
    lower, upper = (_of_halves(algebra.terms[part]) for part in parts)
    # a table may be a half too
    for x, neighbours in dict.fromkeys((half.of, half.neighbours) for half, _, _ in lower):
        low, high = (_factors(products, x, neighbours) for products in (lower, upper))
        if low is not None and high is not None:
            backwards = high[False][1] < 0
            tables = _scaled(algebra, low[False], (low[True][0], abs(low[True][1])))
            reason = _no_rotation(low, high) or ("" if tables else _OTHER_WAY)
            reason = reason or ("" if apart or neighbours else "it reads halves, writes neighbours")
            if reason or tables is None:
                return _Unlike(node, reason)
            return _Rotation(x, tables, backwards, neighbours, apart and neighbours, node)
    return None


_Factors = dict[bool, tuple[Term, float]]
"""Of the lower half (False) and the upper one: (what it is multiplied by, the sign or scale of the product)."""


def _of_halves(term: Term) -> list[tuple[Half, Term, float]]:
    """(half, the term that it is multiplied by, factor) for each product with a half among the two
    summands of a sum. [] for any other term.
    """
    if not isinstance(term, Sum) or len(term.summands) != 2 or term.constant:
        return []
    return [
        (half, other, factor)
        for summand, factor in term.summands
        for leaf, other in _leaves(summand)
        if (half := half_of(leaf))
    ]


def _factors(
    products: list[tuple[Half, Term, float]], x: Node, neighbours: bool
) -> _Factors | None:
    """The factors of both halves of x among `products`, by whether it is the upper half. None
    unless each half is in exactly one product.
    """
    ours = [each for each in products if (each[0].of, each[0].neighbours) == (x, neighbours)]
    found = {half.upper: (table, factor) for half, table, factor in ours}
    return found if len(ours) == len(found) == 2 else None


def _no_rotation(low: _Factors, high: _Factors) -> str:
    """The reason why the factors of the lower and upper columns are no rotation, as text; '' if
    they are one.
    """
    (cos, one), (sin, minus) = low[False], low[True]
    (cos_too, other), (sin_too, plus) = high[True], high[False]
    if cos is not cos_too or sin is not sin_too:
        return "the columns of a pair have tables of their own"
    return "" if (one, minus) == (other, -plus) else _OTHER_WAY


# ------------------------------------------------------------------------------------------------------------------------ the op


def _match(algebra: Algebra, node: Node, rotation: _Rotation, rounded: bool) -> Match | _Unlike:
    """The match of `autopar::rotary_single` for a rotation, with the result `node`. `_Unlike` with
    the reason if the op cannot compute it. `rounded`: the node is a cast of the rotation.
    """
    x = rotation.x
    if rounded and op_name(x) == "aten::to" and dtype_of(at(x)) == dtype_of(node):
        x = at(x)
    shape = x.meta["val"].shape
    if len(shape) != 4 or str(list(shape)) != str(list(node.meta["val"].shape)):
        return _Unlike(rotation.turn, f"it rotates {len(shape)} dims, the op 4")
    tables = [algebra.value(each, widened=True) for each in rotation.tables]
    cos, sin = tables
    if cos is None or sin is None:
        reason = "its tables are no values of the graph, or what it turns is another value"
        return _Unlike(rotation.turn, reason)
    if cos.meta.get("grad") or sin.meta.get("grad"):
        return _Unlike(rotation.turn, "its tables need a gradient")
    placed = _table(cos, shape)
    if placed is None or placed != _table(sin, shape):
        return _Unlike(
            rotation.turn, f"tables of shape {tuple(cos.meta['val'].shape)} for {tuple(shape)}"
        )
    heads_last, view = placed
    attributes: dict[str, Attribute] = {
        "interleaved": rotation.interleaved,
        "heads_last": heads_last,
        "promote": not rounded,
        "parted": rotation.parted,
    }
    operands = {"x": x, "cos": cos, "sin": sin}
    interior, copies = interior_of(algebra, node, operands.values())
    negative: View = ((aten.neg.default, ()),) if rotation.backwards else ()
    return Match(
        torch.ops.autopar.rotary_single.default,
        operands,
        attributes,
        results=(node,),
        interior=interior,
        at=rotation.turn,
        views={"cos": view, "sin": view + negative},
        copies=copies,
    )


def _table(table: Node, shape: torch.Size) -> tuple[bool, View] | None:
    """(whether heads are dim 2 of x, the view that gives the table three dims) for a table of
    cosines or sines and x of `shape` (4 dims).

    None if the table is not aligned with x.
    """
    own = list(map(str, table.meta["val"].shape))
    batch, first, second, columns = map(str, shape)
    if not own or own[-1] not in (columns, str(shape[-1] // 2)):
        return None
    if len(own) == 2 and own[0] in (first, second):
        # a table of two dims is aligned with the last two of x
        return (False, ((aten.unsqueeze.default, (0,)),)) if own[0] == second else None
    if len(own) == 3 and own[:2] == ["1", second]:
        return False, ()
    if len(own) == 3 and own[:2] == [first, "1"]:
        return True, ((aten.transpose.int, (0, 1)),)
    if len(own) != 4 or own[0] not in ("1", batch):
        return None
    if own[1] == "1" and own[2] == second:
        return False, ((aten.squeeze.dim, (1,)),)
    if own[2] == "1" and own[1] == first:
        return True, ((aten.squeeze.dim, (2,)),)
    return None
