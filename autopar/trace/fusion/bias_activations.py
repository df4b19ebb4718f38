"""Which values are activations after a bias: act(x + bias).

The bias may be added by the matrix product before, which is then computed without it.  GPT-2's gelu, which is written with tanh, is an
activation too.  An activation that is one op after such a product stays: the product adds the bias at no cost, and the two kernels
take as long as one of ours.
"""

from __future__ import annotations

import math

import torch
from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import Algebra, FunctionTerm, Leaf, ProductTerm, Sum, Term, at
from autopar.trace.fusion.gated import ACTIVATION_NAMES
from autopar.trace.fusion.matches import Match, interior_of


def match_bias_activation(algebra: Algebra, node: Node) -> Match | None:
    """The `Match` of an activation of a sum with a vector, or of a product that adds a vector, whose
    result is `node`. None for any other node.
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
