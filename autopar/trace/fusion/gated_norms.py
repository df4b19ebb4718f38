"""Norms with a gate: norm(x) silu(z), as in Qwen3-Next, and norm(x silu(z)), as in Mamba 2.

Both are a match of a norm (`norms.py`) made larger: by the product after it, or by the product before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Node

from autopar.ir.calls import op_name
from autopar.trace.fusion.algebra import Algebra, Cast, FunctionTerm, at
from autopar.trace.fusion.matches import Match, Miss, ending_at
from autopar.trace.fusion.norms import RMS, match_norm


def match_gated_norm(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of an RMS norm multiplied by its gate, norm(x) * silu(gate), whose result is
    `node`. None if it is no such product.
    """
    product = at(node) if op_name(node) == "aten::to" else node
    for normed, gate in _gated(algebra, product):
        for inner in (normed, _widened(normed)):
            found = match_norm(algebra, inner) if inner in algebra.terms else None
            if isinstance(found, Match) and found.name == RMS and _alike(found.operands["x"], gate):
                return _with_gate(algebra, found, node, found.operands["x"], gate, first=False)
    return None


def with_gate_first(algebra: Algebra, match: Match) -> Match | None:
    """The match of an RMS norm joined with the product before it, norm(x * silu(gate)). None if
    there is no such product, or the norm has a gate already.
    """
    if match.name != RMS or "gate" in match.operands:
        return None
    for x, gate in _gated(algebra, match.operands["x"]):
        if _alike(x, gate):
            larger = _with_gate(algebra, match, match.results[0], _widened(x), gate, first=True)
            # the norm rounds to what x was before it was widened
            rounds = larger.attributes["cast"] == "weight"
            cast = "before" if rounds else larger.attributes["cast"]
            return replace(larger, attributes=larger.attributes | {"cast": cast})
    return None


def _with_gate(
    algebra: Algebra, match: Match, result: Node, x: Node, gate: Node, first: bool
) -> Match:
    return ending_at(algebra, match, result, {"x": x, "gate": gate}, {"gate_first": first})


def _gated(algebra: Algebra, node: Node) -> Iterator[tuple[Node, Node]]:
    """Yields (the other factor, gate) for each factor silu(gate) if `node` is a product of two."""
    if not isinstance(node, Node) or op_name(node) != "aten::mul":
        return
    factors = [factor for factor in (at(node), at(node, 1)) if factor in algebra.terms]
    for factor, other in (factors, factors[::-1]) if len(factors) == 2 else ():
        term = algebra.terms[factor]
        while isinstance(term, Cast):
            term = term.of
        if isinstance(term, FunctionTerm) and term.name == "silu":
            gate = algebra.value(term.of[0], widened=True)
            if gate is not None:
                yield other, gate


def _widened(node: Node) -> Node:
    """The operand of a node that is a cast; any other node itself."""
    source = at(node) if op_name(node) == "aten::to" else node
    return source if isinstance(source, Node) else node


def _alike(x: Node, gate: Node) -> bool:
    """Whether two nodes have values of one shape."""
    return str(list(x.meta["val"].shape)) == str(list(gate.meta["val"].shape))
