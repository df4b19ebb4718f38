"""Which values are gated activations, act(gate) (up + shift) of two tensors or of the halves of one,
and which are activations after a bias.

silu is found by its op and as x sigmoid(x).  Where a product or its activation is rounded after it was computed wider, the op reads
what was widened.  A product of more factors is none: where experts or scales multiply besides, the product without them is tried by
itself.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator

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
)
from autopar.trace.fusion.matches import Match, Miss, interior_of

_GLU = "autopar::glu"
ACTIVATION_NAMES = {
    ("silu", ()): "silu",
    ("gelu", ("none",)): "gelu",
    ("gelu", ("tanh",)): "gelu_tanh",
    ("relu", ()): "relu",
}
"""(function, attributes) -> the op's name for it."""


def match_gated(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of the gated activation, act(gate) * (up + shift), whose result is `node`.

    A `Miss` with the reason if it looks like one that the op cannot compute; None if it does not
    look like one.
    """
    term = algebra.terms[node]
    rounded = isinstance(term, Cast)
    if isinstance(term, Cast):
        term = term.of
    if not isinstance(term, ProductTerm):
        return None
    miss: Miss | None = None
    for act, activated, gate in _activated(algebra, term):
        quotient = algebra.quotient(term, *activated)
        rest = algebra.product(quotient.factors, quotient.coefficient)
        if isinstance(rest, ProductTerm) and not rest.factors:
            continue  # the activation alone
        shift = 0.0
        if isinstance(rest, Sum) and len(rest.summands) == 1 and rest.summands[0][1] == 1.0:
            shift, rest = rest.constant, rest.summands[0][0]
        widened = rounded or any(isinstance(factor, Cast) for factor in activated)
        values = (algebra.value(each, widened=widened) for each in (gate, rest))
        found = _glu(algebra, node, act, shift, *values)
        if isinstance(found, Match):
            return found
        miss = Miss(_GLU, _at(algebra, activated, node), found)
    return miss


def _at(algebra: Algebra, activated: tuple[Term, ...], node: Node) -> Node:
    """The first node that computes the last factor of the activation (the activation itself, or its
    sigmoid); `node` if there is none.
    """
    return algebra.nodes.get(activated[-1], node)


def _activated(algebra: Algebra, term: ProductTerm) -> Iterator[tuple[str, tuple[Term, ...], Term]]:
    """Yields (activation, the factors that are it, what it is of) for each activation among the
    factors of a product. 'silu' may be two factors, x and sigmoid(x).
    """
    factors = dict(term.factors)
    for factor, exponent in term.factors:
        inner = factor
        while isinstance(inner, Cast):  # rounded after it was computed wider
            inner = inner.of
        if exponent != 1.0 or not isinstance(inner, FunctionTerm):
            continue
        act = ACTIVATION_NAMES.get((inner.name, inner.attributes))
        if act is not None:
            yield act, (factor,), inner.of[0]
        elif inner.name == "sigmoid" and factors.get(inner.of[0], 0.0) >= 1.0:
            yield "silu", (inner.of[0], factor), inner.of[0]


def _glu(
    algebra: Algebra, node: Node, act: str, shift: float, gate: Node | None, up: Node | None
) -> Match | str:
    """The match of `autopar::glu` for act(gate) * (up + shift), or the reason why there is none, as
    text.

    Where gate and up are halves of one projection that nothing else reads, the op reads the whole
    projection.
    """
    if gate is None or up is None:
        return "what it multiplies is no single value"
    shapes = {str(list(each.meta["val"].shape)) for each in (gate, up, node)}
    if len(shapes) > 1:
        return f"shapes differ: {', '.join(sorted(shapes))}"
    attributes: dict[str, Attribute] = {"act": act, "shift": shift}
    operands = {"gate": gate, "up": up}
    interior, copies = interior_of(algebra, node, operands.values())
    op, at = torch.ops.autopar.glu.default, interior[0]
    if (halves := _halves(gate, up)) is not None:
        both, layout = halves
        parts = {gate, up, gate.all_input_nodes[0]}
        if all(user in parts or user in interior for part in parts for user in part.users):
            inside = tuple(sorted({*interior, *parts}))
            fused = {"gate": both}
            return Match(op, fused, attributes | {"layout": layout}, (node,), inside, at)
    return Match(op, operands, attributes, (node,), interior, at, copies=copies)


def _halves(gate: Node, up: Node) -> tuple[Node, str] | None:
    """(the node of which gate and up are the two halves along the last dim, 'gate_up' or 'up_gate'
    for their order). None if they are not.
    """
    if gate.target is not operator.getitem or up.target is not operator.getitem:
        return None
    split, index = at(gate), at(gate, 1)
    if at(up) is not split or not isinstance(split, Node):
        return None
    if op_name(split) != "aten::split_with_sizes" or len(split.meta["val"]) != 2:
        return None
    both, sizes = at(split), at(split, 1)
    rank = both.meta["val"].dim()
    if argument(split, "dim", 0) % rank != rank - 1 or sizes[0] != sizes[1]:
        return None
    return both, "gate_up" if index == 0 else "up_gate"


def match_bias_activation(algebra: Algebra, node: Node) -> Match | None:
    """The `Match` of an activation after a bias, act(x + bias), whose result is `node`. None for any
    other node.

    The matrix product before may add the bias; it is then computed without it. GPT-2's gelu, which
    is written with tanh, is an activation too. An activation that is one op after such a product
    stays: the product adds the bias at no cost, and the two kernels take as long as one of ours.
    """
    found = _activation(algebra, algebra.terms[node])
    if found is None:
        return None
    act, inner = found
    x, bias, product = _biased(algebra, inner)
    if x is None or bias is None or bias.meta["val"].shape != x.meta["val"].shape[-1:]:
        return None
    operands, attributes = {"x": x, "bias": bias}, dict[str, Attribute](act=act)
    interior, copies = interior_of(algebra, node, operands.values())
    # one op after a product: nothing is saved
    if len(interior) == 1 or (product is not None and not set(interior).issuperset(x.users)):
        return None
    op = torch.ops.autopar.bias_activation.default
    return Match(
        op, operands, attributes, (node,), interior, interior[0], copies=copies, apart=product
    )


def _activation(algebra: Algebra, term: Term) -> tuple[str, Term] | None:
    """(the op's name for the activation, what it is of) for a term that is one. None otherwise."""
    if isinstance(term, FunctionTerm) and (term.name, term.attributes) in ACTIVATION_NAMES:
        return ACTIVATION_NAMES[term.name, term.attributes], term.of[0]
    for x, _ in term.factors if isinstance(term, ProductTerm) else ():
        if _gelu_by_tanh(algebra, x) is term:
            return "gelu_tanh", x
    return None


def _gelu_by_tanh(algebra: Algebra, x: Term) -> Term:
    """The term 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))."""
    cubic = algebra.sum(((x, 1.0), (algebra.power(x, 3.0), 0.044715)))
    bent = algebra.function("tanh", algebra.product(((cubic, 1.0),), math.sqrt(2 / math.pi)))
    return algebra.product(((x, 1.0), (algebra.sum(((bent, 1.0),), 1.0), 1.0)), 0.5)


def _biased(algebra: Algebra, term: Term) -> tuple[Node | None, Node | None, Node | None]:
    """(x, bias, None) of a term x + bias in which the bias is a vector. (Product, bias, call that adds
    it) of a product with a bias, perhaps reshaped after. None three times otherwise.
    """
    if isinstance(term, Sum) and [factor for _, factor in term.summands] == [1.0, 1.0]:
        nodes = [algebra.nodes.get(summand) for summand, _ in term.summands]
        for bias, x in (nodes, nodes[::-1]):
            vector = bias is not None and bias.meta["val"].dim() == 1
            if vector and not term.constant:
                return x, bias, None
    if isinstance(term, Leaf):
        call = term.node
        if op_name(call) == "aten::reshape" and len(at(call).users) == 1:
            call = at(call)
        plain = len(call.args) == 3 and not call.kwargs and isinstance(call.args[2], Node)
        if plain and op_name(call) in ("aten::linear", "aten::addmm"):
            return term.node, at(call, 2 if op_name(call) == "aten::linear" else 0), call
    return None, None, None
