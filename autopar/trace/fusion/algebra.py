"""The values of a graph as terms of a small algebra, in which one term has one spelling.

    leaf      a value that the algebra knows nothing about: a parameter, an input, the result of a matrix product
    cast      a term rounded to another floating dtype, or widened to it
    product   coefficient * term ^ exponent * ...
    sum       constant + coefficient * term + ...
    mean      the mean over the last dim, which stays with size 1
    function  silu(term), tanh(term) and their like, which have arguments in order

x * x, x.square() and x ** 2 are one product; x.rsqrt(), x ** -0.5 and 1 / x.sqrt() are another.  Factors and summands have no order.
An operand that an op widens on its own is widened by a cast here.  Nothing moves across a cast,
since rounding is part of what is computed.  A node whose term would forget an operand, such as
x + 0 y or x y / y, is a leaf.
Shapes are left out: code that matches a term compares the shapes of its nodes.

Equal terms are one object, so that `is` compares them and a term is hashed in constant time.  Parts are in the order in which the algebra
met them: what iterates over them does the same in every process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, op_name

_MOST_PARTS = 24
"""A sum or product of more parts is a leaf, so that long residual chains stay short terms."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A term for a value of which the algebra knows nothing but its node."""

    node: Node


@dataclass(frozen=True, slots=True, eq=False)
class Cast:
    """A term: the term `of`, rounded or widened to another floating dtype."""

    of: Term
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class ProductTerm:
    """A term: coefficient * the product of all terms in `factors`, each to the exponent beside it."""

    factors: tuple[tuple[Term, float], ...]
    coefficient: float


@dataclass(frozen=True, slots=True, eq=False)
class Sum:
    """A term: constant + the sum of all terms in `summands`, each times the coefficient beside it."""

    summands: tuple[tuple[Term, float], ...]
    constant: float


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A term: the mean of the term `of` over the last dim, kept with size 1."""

    of: Term


@dataclass(frozen=True, slots=True, eq=False)
class FunctionTerm:
    """A term: a function, by name, of the terms `of`; `attributes` are its other arguments. Only
    `Algebra` makes terms, since they are compared by identity.
    """

    name: str
    of: tuple[Term, ...]
    attributes: tuple[Any, ...] = ()


Term = Leaf | Cast | ProductTerm | Sum | Mean | FunctionTerm


class Algebra:
    """The real floating values of a graph as terms: expressions in which equal ones are one object,
    however the graph spells them.

    `terms` has the term of each node, `nodes` the first node that computes a term.
    """

    def __init__(self, graph: Graph) -> None:
        self.terms: dict[Node, Term] = {}
        self.nodes: dict[Term, Node] = {}
        self._known: dict[tuple, Term] = {}
        self._numbers: dict[Term, int] = {}
        self._forgot = False
        for node in graph.nodes:
            if is_floating(node):
                term = self._of(node)
                self.terms[node] = term
                self.nodes.setdefault(term, node)

    # ------------------------------------------------------------------------------------------------------- the constructors

    def leaf(self, node: Node) -> Term:
        """The term for a node's value of which nothing else is known."""
        return self._one(Leaf, node)

    def cast(self, term: Term, dtype: torch.dtype) -> Term:
        """The term for `term` rounded or widened to `dtype`: always a `Cast`, even if `term` has this
        dtype already or is a cast itself.
        """
        return self._one(Cast, term, dtype)

    def function(self, name: str, *of: Term, attributes: tuple[Any, ...] = ()) -> Term:
        """The term for the function `name` of the terms `of`; `attributes` are its other arguments."""
        return self._one(FunctionTerm, name, of, attributes)

    def mean(self, term: Term) -> Term:
        """The term for the mean over the last dim, kept with size 1."""
        return self._one(Mean, term)

    def product(self, factors: Iterable[tuple[Term, float]], coefficient: float = 1.0) -> Term:
        """The term for coefficient * the product of (factor, exponent). Products among the factors
        are opened where that is exact, and equal factors are joined. A single factor alone is
        returned as it is.
        """
        exponents: dict[Term, float] = {}
        for factor, exponent in factors:
            inner: Iterable[tuple[Term, float]] = ((factor, 1.0),)
            if isinstance(factor, ProductTerm) and _opens(factor, exponent):
                inner = factor.factors
                coefficient *= factor.coefficient**exponent
            for term, power in inner:
                exponents[term] = exponents.get(term, 0.0) + power * exponent
        parts = self._ordered(exponents)
        if coefficient == 1.0 and len(parts) == 1:
            ((term, power),) = parts
            if power == 1.0:
                return term
        return self._one(ProductTerm, parts, coefficient)

    def sum(self, summands: Iterable[tuple[Term, float]], constant: float = 0.0) -> Term:
        """The term for constant + the sum of (summand, coefficient), with sums among the summands
        opened and equal summands joined. A single summand without a constant becomes a product.
        """
        coefficients: dict[Term, float] = {}
        for summand, coefficient in summands:
            inner: Iterable[tuple[Term, float]] = ((summand, 1.0),)
            if isinstance(summand, Sum):
                inner, constant = summand.summands, constant + summand.constant * coefficient
            for term, factor in inner:
                if isinstance(term, ProductTerm) and term.coefficient != 1.0:
                    factor *= term.coefficient
                    term = self.product(term.factors)
                coefficients[term] = coefficients.get(term, 0.0) + factor * coefficient
        parts = self._ordered(coefficients)
        if not constant and len(parts) == 1:
            ((term, factor),) = parts
            return self.product(((term, 1.0),), factor)
        return self._one(Sum, parts, constant)

    def power(self, term: Term, exponent: float) -> Term:
        """The term for `term` ^ `exponent`."""
        return self.product(((term, exponent),))

    def quotient(self, whole: Term, *divisors: Term) -> ProductTerm:
        """whole / divisors as a `ProductTerm`, which may have a single factor or none."""
        found = self.product(((whole, 1.0), *((divisor, -1.0) for divisor in divisors)))
        if isinstance(found, ProductTerm):
            return found
        product = self._one(ProductTerm, ((found, 1.0),), 1.0)
        assert isinstance(product, ProductTerm)
        return product

    def factors(self, term: Term) -> set[Term]:
        """The terms that a product multiplies, without exponents; {term} for any other term."""
        return {factor for factor, _ in term.factors} if isinstance(term, ProductTerm) else {term}

    def value(self, term: Term, widened: bool) -> Node | None:
        """The first node that computes a term, or None. With `widened`, casts to a wider dtype are
        taken off the term first, as far as nodes compute what is inside.
        """
        while widened and isinstance(term, Cast) and term.of in self.nodes:
            inner = dtype_of(self.nodes[term.of])
            if torch.promote_types(inner, term.dtype) != term.dtype:
                break
            term = term.of
        return self.nodes.get(term)

    def _one(self, kind: Callable[..., Term], *fields: Any) -> Term:
        """The one object for the term of class `kind` with these fields; made if it is new."""
        term = self._known.setdefault((kind, fields), kind(*fields))
        self._numbers.setdefault(term, len(self._numbers))
        return term

    def _ordered(self, parts: Mapping[Term, float]) -> tuple[tuple[Term, float], ...]:
        """(term, number) of the parts whose number is not 0, in the order in which their terms were
        met. Notes if there are others.
        """
        present = [(term, number) for term, number in parts.items() if number]
        self._forgot |= len(present) < len(parts)
        return tuple(sorted(present, key=lambda part: self._numbers[part[0]]))

    # ------------------------------------------------------------------------------------------------------- from nodes to terms

    def _of(self, node: Node) -> Term:
        rule = _RULES.get(op_name(node).removeprefix("aten::"))
        self._forgot = False
        found = rule(self, node) if rule is not None else None
        if self._forgot:  # 0 v passes NaN on, and gives a parameter v its gradient, which is 0
            return self.leaf(node)
        parts: tuple = getattr(found, "factors", ()) or getattr(found, "summands", ())
        return self.leaf(node) if found is None or len(parts) > _MOST_PARTS else found

    def operand(self, node: Node, of: Node) -> Term:
        """The term of the operand `node` of the call `of`, cast to the dtype of that call's result."""
        term, own, wanted = self.terms[node], dtype_of(node), dtype_of(of)
        return term if own == wanted else self.cast(term, wanted)


def at(node: Node, place: int = 0) -> Any:
    """The positional argument number `place` of a call: a node, a number or a list. Raises
    IndexError if there is none.
    """
    return node.args[place]


def is_floating(node: Node) -> bool:
    """Whether a node's value is one tensor of a real floating dtype; false for the output node."""
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and val.is_floating_point() and node.op != "output"


def dtype_of(node: Node) -> torch.dtype:
    """The dtype of the fake value of a node, which must be a tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _opens(product: ProductTerm, exponent: float) -> bool:
    """Whether product ^ exponent is the product of the powers of its parts: (a^2)^(1/2) is |a|, and
    stays as it is; (1 / a)^(1/2) is a^(-1/2). The coefficient's power must be a finite number.
    """
    if not (exponent.is_integer() or _is_inverse(product)):
        return False
    try:
        return math.isfinite(product.coefficient**exponent)
    except (ZeroDivisionError, OverflowError):
        return False


def _is_inverse(product: ProductTerm) -> bool:
    """Whether a product is term ^ -1 for one term, with coefficient 1."""
    return product.coefficient == 1.0 and [power for _, power in product.factors] == [-1.0]


_Rule = Callable[[Algebra, Node], Term | None]


def _split_operands(algebra: Algebra, node: Node) -> tuple[list[Term], list[float]] | None:
    """(terms, numbers) among the first two arguments of a call, each in order. None if one is
    neither a floating value of the graph nor a number.
    """
    terms, numbers = [], []
    for arg in node.args[:2]:
        if isinstance(arg, Node):
            if arg not in algebra.terms:
                return None
            terms.append(algebra.operand(arg, node))
        elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
            numbers.append(float(arg))
        else:
            return None
    return terms, numbers


def _added(sign: float, reflected: bool = False) -> _Rule:
    def rule(algebra: Algebra, node: Node) -> Term | None:
        alpha = argument(node, "alpha", 1)
        if not isinstance(alpha, (int, float)) or len(node.args) < 2:
            return None
        factors = (1.0, sign * float(alpha))
        if reflected:  # rsub: other - alpha * self
            factors = (-float(alpha), 1.0)
        summands, constant = [], 0.0
        for arg, factor in zip(node.args, factors, strict=False):
            if isinstance(arg, Node) and arg in algebra.terms:
                summands.append((algebra.operand(arg, node), factor))
            elif isinstance(arg, (int, float)) and not isinstance(arg, bool):
                constant += factor * float(arg)
            else:
                return None
        return algebra.sum(summands, constant)

    return rule


def _multiplied(algebra: Algebra, node: Node) -> Term | None:
    split = _split_operands(algebra, node)
    if split is None:
        return None
    terms, numbers = split
    return algebra.product(((term, 1.0) for term in terms), numbers[0] if numbers else 1.0)


def _divided(algebra: Algebra, node: Node) -> Term | None:
    split = _split_operands(algebra, node)
    if split is None or argument(node, "rounding_mode") is not None:
        return None
    (first, *second), numbers = split
    if second:
        return algebra.product(((first, 1.0), (second[0], -1.0)))
    if not numbers[0]:
        return None
    if isinstance(at(node), Node):
        return algebra.product(((first, 1.0),), 1.0 / numbers[0])
    return algebra.product(((first, -1.0),), numbers[0])


def _to_a_power(algebra: Algebra, node: Node) -> Term | None:
    base, exponent = at(node), at(node, 1)
    if not isinstance(base, Node) or base not in algebra.terms or isinstance(exponent, Node):
        return None
    return algebra.power(algebra.operand(base, node), float(exponent))


def _fixed_power(exponent: float, coefficient: float = 1.0) -> _Rule:
    def rule(algebra: Algebra, node: Node) -> Term | None:
        source = at(node)
        if source not in algebra.terms:
            return None
        return algebra.product(((algebra.operand(source, node), exponent),), coefficient)

    return rule


def _cast(algebra: Algebra, node: Node) -> Term | None:
    source = at(node)
    return algebra.operand(source, node) if source in algebra.terms else None


def _mean(algebra: Algebra, node: Node) -> Term | None:
    source, dims = at(node), argument(node, "dim")
    if source not in algebra.terms or not argument(node, "keepdim", False):
        return None
    rank = source.meta["val"].dim()
    if dims is None or [dim % rank for dim in dims] != [rank - 1]:
        return None
    return algebra.mean(algebra.operand(source, node))


def _function(name: str, *attributes: str) -> _Rule:
    def rule(algebra: Algebra, node: Node) -> Term | None:
        source = at(node)
        if source not in algebra.terms:
            return None
        found = tuple(argument(node, attribute) for attribute in attributes)
        return algebra.function(name, algebra.operand(source, node), attributes=found)

    return rule


_RULES: Mapping[str, _Rule] = {
    "add": _added(1.0),
    "sub": _added(-1.0),
    "rsub": _added(1.0, reflected=True),
    "mul": _multiplied,
    "div": _divided,
    "pow": _to_a_power,
    "square": _fixed_power(2.0),
    "sqrt": _fixed_power(0.5),
    "rsqrt": _fixed_power(-0.5),
    "reciprocal": _fixed_power(-1.0),
    "neg": _fixed_power(1.0, -1.0),
    "to": _cast,
    "mean": _mean,
    "silu": _function("silu"),
    "gelu": _function("gelu", "approximate"),
    "relu": _function("relu"),
    "sigmoid": _function("sigmoid"),
    "tanh": _function("tanh"),
    "erf": _function("erf"),
}
"""By the name of the op, after `trace/spelling.py`."""
