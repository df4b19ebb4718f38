"""Which values are attention probabilities: the softmax of scores that were scaled, capped, or to which a mask was added.

    softmax(cap tanh(scale scores / cap) + mask)

A mask is added, or boolean where hidden scores are -inf.  Where they are a number, a row that is hidden whole has probabilities, and
stays torch's.  So does a softmax of scores as they are.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import (
    Algebra,
    Cast,
    FunctionTerm,
    Leaf,
    ProductTerm,
    Sum,
    Term,
    at,
    dtype_of,
)
from autopar.trace.fusion.matches import Match, Miss, View, interior_of

_SOFTMAX = "autopar::softmax"


def match_softmax(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of a softmax over the last dim of scores that are scaled, capped or masked, whose
    result is `node`.

    A `Miss` with the reason if the op cannot compute it; None for any other node.
    """
    rounded = op_name(node) == "aten::to" and isinstance(at(node), Node)
    root = at(node) if rounded else node
    if op_name(root) != "aten::softmax":
        return None
    rank = root.meta["val"].dim()
    if argument(root, "dim") % rank != rank - 1:
        return None
    term, mask, view = _without_mask(algebra, _uncast(algebra.terms[at(root)]))
    scores, attributes = _without_scale(_uncast(term))
    if mask is None and not attributes:
        return None
    source = algebra.value(scores, widened=True)
    if source is None:
        return Miss(_SOFTMAX, root, "what is scaled is no value of the graph")
    val = source.meta["val"]
    if str(list(val.shape)) != str(list(node.meta["val"].shape)) or not 1 <= rank <= 4:
        return Miss(
            _SOFTMAX, root, f"scores of {tuple(val.shape)}, masked or scaled to another shape"
        )
    if dtype_of(source) != dtype_of(node):
        return Miss(_SOFTMAX, root, f"{dtype_of(source)} becomes {dtype_of(node)}")
    operands = {"scores": source} | ({} if mask is None else {"mask": mask})
    interior, copies = interior_of(algebra, node, operands.values())
    op = torch.ops.autopar.softmax.default
    views = {"mask": view}
    return Match(op, operands, attributes, (node,), interior, root, views, copies=copies)


def _uncast(term: Term) -> Term:
    """The term inside all casts around a term. They may go, since the op computes in fp32 and
    rounds once.
    """
    while isinstance(term, Cast):
        term = term.of
    return term


def _without_mask(algebra: Algebra, term: Term) -> tuple[Term, Node | None, View]:
    """(scores, mask, view of the mask) of the sum of both, or of scores that are -inf where they
    are hidden. The mask is None if there is none, or if it needs a gradient.
    """
    if isinstance(term, Leaf) and op_name(term.node) == "aten::masked_fill":
        filled, hidden, value = (at(term.node, number) for number in range(3))
        if filled in algebra.terms and value == float("-inf"):
            seen = op_name(hidden) in ("aten::bitwise_not", "aten::logical_not")
            view: View = () if seen else ((torch.ops.aten.logical_not.default, ()),)
            return _uncast(algebra.terms[filled]), at(hidden) if seen else hidden, view
    if not isinstance(term, Sum) or len(term.summands) != 2 or term.constant:
        return term, None, ()
    for (scores, factor), (other, one) in (term.summands, term.summands[::-1]):
        mask = algebra.value(algebra.product(((other, 1.0),), one), widened=True)
        if mask is not None and not mask.meta.get("grad"):
            return algebra.product(((_uncast(scores), 1.0),), factor), mask, ()
    return term, None, ()


def _without_scale(term: Term) -> tuple[Term, dict[str, Attribute]]:
    """(scores, attributes) of scores that are scaled or capped: 'scale' is their factor, 'soft_cap'
    the cap or None. The term itself and {} if they are neither.
    """
    cap: float | None = None
    inner, factor = _scaled(term)
    if isinstance(inner, FunctionTerm) and inner.name == "tanh" and factor > 0:
        cap = factor
        inner, factor = _scaled(_uncast(inner.of[0]))
        factor *= cap
    if factor == 1.0 and cap is None:
        return term, {}
    return _uncast(inner), {"scale": factor, "soft_cap": cap}


def _scaled(term: Term) -> tuple[Term, float]:
    """(term, factor) of a product of one term and a number; (the term itself, 1.0) otherwise."""
    if isinstance(term, ProductTerm) and [power for _, power in term.factors] == [1.0]:
        return term.factors[0][0], term.coefficient
    return term, 1.0
