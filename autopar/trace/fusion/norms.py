"""Which values are norms: RMSNorm in every spelling, and the norms of torch, also with the addition of a residual before them.

RMSNorm may have a gate: norm(x) silu(z), as in Qwen3-Next, and norm(x silu(z)), as in Mamba 2.

    x mean(x^2) + eps ^ -1/2            the core, in a dtype that x was widened to
    (core) (offset + weight)            rounded nowhere ('none'), after the product ('after'), or before it ('before', 'weight')

`autopar_kernels.norms` says what each attribute computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from autopar.ir.calls import argument, op_name
from autopar.ir.fusion import Attribute
from autopar.trace.fusion.algebra import (
    Algebra,
    Cast,
    FunctionTerm,
    Mean,
    ProductTerm,
    Sum,
    Term,
    at,
    dtype_of,
)
from autopar.trace.fusion.matches import Match, Miss, ending_at, interior_of

RMS, LAYER = "autopar::rms_norm", "autopar::layer_norm"


@dataclass(frozen=True, slots=True)
class _Core:
    """The parts of a product in which x is divided by its root mean square, as terms of the
    algebra.

    Attributes:
        x: the term that is normalised.
        eps: what is added to the mean of squares.
        root: the term 1 / sqrt(mean(x^2) + eps).
        inside: the factors that are multiplied before rounding.
        outside: the factors that are multiplied after rounding.
        rounded: the dtype of that rounding, or None.
    """

    x: Term
    eps: float
    root: Term
    inside: ProductTerm
    outside: ProductTerm
    rounded: torch.dtype | None


@dataclass(frozen=True, slots=True)
class _Unlike:
    """A record: `root`, a negative power of a mean, belongs to no RMS norm, and the reason."""

    root: Term
    reason: str


def match_norm(algebra: Algebra, node: Node) -> Match | Miss | None:
    """The `Match` of the RMS norm, in any spelling, or of torch's layer_norm, whose result is
    `node`.

    A `Miss` with the reason if it looks like a norm that no op computes; None if it does not look
    like one.
    """
    if op_name(node) == "aten::rms_norm":
        return _of_torch(node, RMS)
    if op_name(node) == "aten::layer_norm":
        return _of_torch(node, LAYER)
    core = _core(algebra, algebra.terms[node])
    if core is None:
        return None
    found = core.reason if isinstance(core, _Unlike) else _rms_norm(algebra, node, core)
    return Miss(RMS, algebra.nodes.get(core.root, node), found) if isinstance(found, str) else found


def _of_torch(node: Node, name: str) -> Match | Miss:
    """The match for a call of torch's rms_norm or layer_norm; `name` is our op for it. A `Miss` if
    the call normalises several dims together.
    """
    x, shape = at(node), argument(node, "normalized_shape")
    if len(shape) != 1:
        return Miss(name, node, f"it normalises {len(shape)} dims together, the op one")
    operands = {"x": x}
    for place in ("weight", "bias"):
        if isinstance(given := argument(node, place), Node):
            operands[place] = given
    eps = argument(node, "eps")
    if eps is None:  # torch's default is that of the dtype in which it computes
        computed = dtype_of(x) if dtype_of(x) == torch.float64 else torch.float32
        eps = torch.finfo(computed).eps
    op, attributes = torch.ops.autopar.layer_norm.default, dict[str, Attribute](eps=float(eps))
    if name == RMS:
        op, attributes["cast"] = torch.ops.autopar.rms_norm.default, "after"
    return Match(op, operands, attributes, (node,), (node,), node)


def _core(algebra: Algebra, term: Term) -> _Core | _Unlike | None:
    """The core (x / root mean square, and its scale) of a term that may be an RMS norm, with or
    without a rounding.

    `_Unlike` with the reason if it looks like one and is none; None if it does not look like one.
    """
    one = algebra.quotient(term, term)
    if isinstance(term, Cast):
        return _scaled(algebra, term.of, one, term.dtype)
    if not isinstance(term, ProductTerm):
        return None
    found = _scaled(algebra, term, one, None)
    if found is not None:
        return found
    for factor, exponent in term.factors:
        rounding = factor
        if isinstance(factor, Cast) and isinstance(factor.of, Cast):  # rounded, and widened again
            rounding = factor.of
        if exponent == 1.0 and isinstance(rounding, Cast):
            outside = algebra.quotient(term, factor)
            found = _scaled(algebra, rounding.of, outside, rounding.dtype)
            if found is not None:
                return found
    return _root_rounded(algebra, term)


def _root_rounded(algebra: Algebra, term: ProductTerm) -> _Core | None:
    """The core of a product of x and a root mean square that was rounded by itself. The op rounds
    their product instead, which is closer. None if there is none.
    """
    for root, exponent in term.factors:
        if exponent != 1.0 or not isinstance(root, Cast) or root.of not in algebra.nodes:
            continue
        for x, power in term.factors:
            wide = algebra.cast(x, dtype_of(algebra.nodes[root.of]))
            product = algebra.product(((wide, 1.0), (root.of, 1.0)))
            found = _scaled(algebra, product, algebra.quotient(term, x, root), root.dtype)
            if power == 1.0 and isinstance(found, _Core):
                return found
    return None


def _scaled(
    algebra: Algebra, term: Term, outside: ProductTerm, rounded: torch.dtype | None
) -> _Core | _Unlike | None:
    """The core of `term` if it is a product that divides something by its root mean square.

    `outside` and `rounded` are stored in it. `_Unlike` if it has a root of another mean; None if it
    has none.
    """
    if not isinstance(term, ProductTerm) or len(term.factors) < 2:
        return None
    unlike: _Unlike | None = None
    for factor, exponent in term.factors:
        mean, eps = _mean_and_constant(factor)
        if exponent == -0.5 and mean is None and _adds_to_a_mean(factor):
            reason = "what is added to the mean of squares is no number"
            unlike = _Unlike(algebra.power(factor, exponent), reason)
        if mean is None or exponent.is_integer() or exponent > 0:
            continue
        root = algebra.power(factor, exponent)
        if exponent != -0.5:
            return _Unlike(
                root, f"the mean of squares is raised to {exponent}, where a norm has -0.5"
            )
        x = _root_of(algebra, mean.of)
        if x is None:
            return _Unlike(root, "the mean is of no square")
        inside = algebra.quotient(term, x, root)
        divided = {factor for factor, power in inside.factors if power < 0}
        if not divided.isdisjoint(algebra.factors(x)):
            return _Unlike(root, "what is normalised is not what is squared")
        return _Core(x, eps, root, inside, outside, rounded)
    return unlike


def _adds_to_a_mean(term: Term) -> bool:
    """Whether a term is the sum of a mean and other terms."""
    return isinstance(term, Sum) and any(isinstance(each, Mean) for each, _ in term.summands)


def _mean_and_constant(term: Term) -> tuple[Mean | None, float]:
    """(m, c) of a term m or m + c, where m is a mean. (None, 0.0) for any other term."""
    if isinstance(term, Mean):
        return term, 0.0
    if isinstance(term, Sum) and len(term.summands) == 1:
        ((mean, coefficient),) = term.summands
        if isinstance(mean, Mean) and coefficient == 1.0:
            return mean, term.constant
    return None, 0.0


def _root_of(algebra: Algebra, square: Term) -> Term | None:
    """The term whose square is `square`. None unless that is a product of even powers with a
    positive coefficient.
    """
    if not isinstance(square, ProductTerm) or square.coefficient <= 0:
        return None
    if any(exponent % 2 for _, exponent in square.factors):
        return None
    halves = ((term, exponent / 2) for term, exponent in square.factors)
    return algebra.product(halves, square.coefficient**0.5)


def _rms_norm(algebra: Algebra, node: Node, core: _Core) -> Match | str:
    """The match of `autopar::rms_norm` for a core and its weight, with the result `node`. Text if
    there is none: the reason.
    """
    x = algebra.value(core.x, widened=core.rounded is not None)
    if x is None:
        return "what is normalised is no value of the graph"
    if core.eps < 0:
        return f"{core.eps} is added to the mean of squares, which may be negative then"
    if core.inside.factors and core.outside.factors:
        return "it is scaled before and after it is rounded"
    factors = core.outside if core.outside.factors else core.inside
    if core.inside.coefficient * core.outside.coefficient != 1.0:
        return f"it is scaled by {core.inside.coefficient * core.outside.coefficient} besides"
    operands, offset = {"x": x}, 0.0
    if factors.factors:
        weight = _weight(algebra, factors)
        if weight is None:
            return "it is scaled by what is no vector, nor a vector and a constant"
        operands["weight"], offset = weight
        width = x.meta["val"].shape[-1:]
        if weight[0].meta["val"].shape != width:
            return f"its weight has shape {tuple(weight[0].meta['val'].shape)}, not {tuple(width)}"
    cast = _cast(core, dtype_of(x), dtype_of(operands.get("weight", x)))
    if cast is None:
        return f"it is rounded to {core.rounded}, the dtype of neither input nor weight"
    attributes: dict[str, Attribute] = {"eps": core.eps, "offset": offset, "cast": cast}
    interior, copies = interior_of(algebra, node, operands.values())
    at, op = algebra.nodes.get(core.root, node), torch.ops.autopar.rms_norm.default
    return Match(op, operands, attributes, (node,), interior, at, copies=copies)


def _cast(core: _Core, of_x: torch.dtype, of_weight: torch.dtype) -> str | None:
    """Where the norm rounds: 'none', 'after', 'before' or 'weight', as `autopar_kernels.norms`
    names it.

    None if it rounds to a dtype for which there is no name. `of_x` and `of_weight` are the dtypes
    of the operands.
    """
    if core.rounded is None:
        return "none"
    if not core.outside.factors:
        return "after" if core.rounded == of_x else None
    if core.rounded == of_x:
        return "before"
    return "weight" if core.rounded == of_weight else None


def _weight(algebra: Algebra, factors: ProductTerm) -> tuple[Node, float] | None:
    """(the node of the weight, the constant that is added to it) if the scale is one vector, or a
    constant and one. None otherwise.
    """
    if len(factors.factors) != 1:
        return None
    ((term, exponent),) = factors.factors
    offset = 0.0
    if isinstance(term, Sum) and len(term.summands) == 1:
        ((inner, coefficient),) = term.summands
        if coefficient != 1.0:
            return None
        offset, term = term.constant, inner
    node = algebra.value(term, widened=True)
    return (node, offset) if exponent == 1.0 and node is not None else None


_WITH_RESIDUAL = {
    RMS: torch.ops.autopar.add_rms_norm.default,
    LAYER: torch.ops.autopar.add_layer_norm.default,
}


def with_residual(match: Match) -> Match | None:
    """The match of a norm joined with the addition that computes its input: the sum is then a
    second result of the op. None if there is no such addition.

    Also None unless both terms have the shape and dtype of the sum, the joint op has all attributes
    of the norm, and weights are computed before the sum.
    """
    total = match.operands["x"]
    known = {spec.name for spec in _WITH_RESIDUAL[match.name]._schema.arguments}
    if op_name(total) != "aten::add" or not known.issuperset(match.attributes):
        return None
    terms = [at(total), at(total, 1)]
    if argument(total, "alpha", 1) != 1 or not all(isinstance(term, Node) for term in terms):
        return None
    vals = [term.meta["val"] for term in (*terms, total)]
    if len({str(list(val.shape)) for val in vals}) > 1 or len({val.dtype for val in vals}) > 1:
        return None
    weights = [node for name, node in match.operands.items() if name != "x"]
    if any(node.op == "call_function" and not node < total for node in weights):
        return None
    operands = {"x": terms[0], "residual": terms[1]}
    operands |= {name: node for name, node in match.operands.items() if name != "x"}
    return replace(
        match,
        op=_WITH_RESIDUAL[match.name],
        operands=operands,
        results=(*match.results, total),
        interior=tuple(sorted((*match.interior, total))),
    )


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
