"""Dimension algebra: each dim of an op's tensors has a letter, and the letters determine how the op
can be sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import sympy
import torch
from torch.fx import Node

from autopar.ir.calls import argument
from autopar.ir.sharding import CONTIGUOUS, Pattern, sectioned

Letters = tuple[str, ...]
"""One entry per dim. An entry is a letter; `b*s` for dims b and s flattened into one; or `x|8:4:4`
for sections of these sizes that are sharded alike under the letter x.
"""


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call (a graph node) as an op rule sees it. Holds only `node`; arguments by schema
    name, tensor operands in call order, results, and dims as indices are read from it.
    """

    node: Node

    def arg(self, name: str, default: Any = None) -> Any:
        """The argument with this schema name. If it was not passed: the schema's default, or
        `default` if there is none.
        """
        return argument(self.node, name, default)

    @property
    def operands(self) -> list[Node]:
        """The nodes of the tensor arguments, in call order. A tensor passed twice appears twice."""
        return operands(self.node)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The fake tensors of the operands, in call order, with repetitions."""
        return [n.meta["val"] for n in self.operands]

    @property
    def results(self) -> list[torch.Tensor]:
        """The fake tensors that the call returns, in order."""
        return results(self.node)

    def dim(self, name: str = "dim", default: Any = None, rank: int | None = None) -> int:
        """The dim argument `name` as an index from 0. If it is not passed: the schema's default, or
        `default`. `rank` is the number of dims that negative ones count from; by default, those of
        the first operand.
        """
        rank = self.tensors[0].dim() if rank is None else rank
        return self.arg(name, default) % max(rank, 1)

    def dims(self, name: str = "dim") -> list[int]:
        """The argument `name`, a dim or list of dims, as indices from 0 into the first operand. All
        dims if it is None or empty.
        """
        rank, dims = self.tensors[0].dim(), self.arg(name)
        if dims is None or dims == []:
            return list(range(rank))
        return [d % max(rank, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def operands(node: Node) -> list[Node]:
    """The nodes of the tensor arguments of a call in order, with repetitions."""
    found: list[Node] = []
    torch.fx.map_arg(
        (node.args, node.kwargs),
        lambda n: found.append(n) if isinstance(n.meta.get("val"), torch.Tensor) else None,
    )
    return found


def results(node: Node) -> list[torch.Tensor]:
    """The fake tensors that a node returns, in order; entries that are no tensors are left out."""
    val = node.meta.get("val")
    return [
        v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, torch.Tensor)
    ]


def letters_of(entry: str) -> list[str]:
    """The letters of one dim's entry that can be sharded: one for a plain dim, several for a
    flattened one (`b*s`), none if it starts with '!'.
    """
    return [letter for letter in entry.partition("|")[0].split("*") if not letter.startswith("!")]


def locate(term: Letters, letter: str) -> tuple[int, Pattern] | None:
    """(dim, pattern) at which a tensor with the letters `term` holds a letter; None if it does not.
    The pattern says which elements of the dim a rank holds if the letter is sharded contiguously.

    A letter after the batch in a flattened dim is sharded per batch row; one with sections, per
    section.
    """
    for dim, entry in enumerate(term):
        if letter == entry:
            return dim, CONTIGUOUS
        body, _, sizes = entry.partition("|")
        names = body.split("*")
        if letter in names:
            pattern = (
                sectioned(tuple(map(int, sizes.split(":"))))
                if sizes
                else Pattern(rows=names.index(letter) > 0)
            )
            return dim, pattern
    return None


def located(term: Letters, letter: str) -> tuple[int, Pattern]:
    """(dim, pattern) as `locate` returns it. Raises ValueError if no dim of the tensor holds the
    letter.
    """
    if (place := locate(term, letter)) is None:
        raise ValueError(f"no dim of {term} holds the letter {letter!r}")
    return place


def compose(own: Pattern, wanted: Pattern) -> Pattern | None:
    """The pattern in which a dim is sharded if it holds a letter in pattern `own` (see `locate`),
    and the letter is sharded in pattern `wanted`. None if no pattern says both.
    """
    if own.is_contiguous:
        return wanted
    if own.rows and not wanted.rows:
        return Pattern(wanted.sections, True, wanted.zigzag)
    return own if wanted.is_contiguous else None


def wanted_of(own: Pattern, pattern: Pattern) -> Pattern | None:
    """The pattern in which a letter is sharded if its dim has pattern `pattern`: the inverse of
    `compose`. None if there is none.
    """
    if own.is_contiguous:
        return pattern
    if own.rows and pattern.rows:
        return Pattern(pattern.sections, False, pattern.zigzag)
    return CONTIGUOUS if own == pattern else None


@dataclass(frozen=True, slots=True)
class JointSharding:
    """A description of a strategy that shards different dims of different operands together, with
    its own lowering (another way to compute the op).

    `axis` is the kind of mesh axis that it is for ('cp', 'ep', 'tp'). `inputs` and `outputs` give
    the sharded dim of each tensor, or -1. `size` must be at least the size of the axis; if `even`,
    the axis must divide it.
    """

    axis: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    size: Any
    even: bool = False


@dataclass(frozen=True, slots=True)
class OpDims:
    """The dims of an op's operands and results, by letter: dims with one letter are sharded
    together. They determine all ways to shard the op. A letter that starts with '!' cannot be
    sharded.

    Attributes:
        inputs: the letters of each operand.
        outputs: the letters of each result.
        sizes: the size of each letter.
        summed: letters that occur only in operands, over which the op sums. Sharding one gives a
            Partial result.
        additive: indices of operands that are added to that sum, such as a bias. They must be
            Partial too.
        linear: groups of operands in which the op is jointly linear.
        even: letters that must be divided evenly.
        contiguous: letters that can only be sharded contiguously.
        special: letter -> the lowering that sharding it needs.
        replicated_result: special letters whose lowering leaves the result replicated.
        joint: strategies that shard several dims together, by name.
        contraction: whether the op multiplies matrices.
        flops: its FLOPs over whole tensors; by default 2 x the product of the letters' sizes.
        movement_free: whether it is a view, which moves no bytes.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    sizes: dict[str, Any]
    summed: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    even: frozenset[str] = frozenset()
    contiguous: frozenset[str] = frozenset()
    special: dict[str, str] = field(default_factory=dict)
    replicated_result: frozenset[str] = frozenset()
    joint: dict[str, JointSharding] = field(default_factory=dict)
    contraction: bool = False
    flops: Any = None
    movement_free: bool = False

    def total_flops(self) -> Any:
        """FLOPs of the op over whole tensors: a number, or an expression in the batch size. 0 if it
        multiplies no matrices.
        """
        if not self.contraction:
            return 0
        if self.flops is not None:
            return self.flops
        total: Any = 2
        for letter in {x for dims in self.inputs for x in dims}:
            total = total * self.sizes[letter]
        return total

    @property
    def letters(self) -> tuple[str, ...]:
        """The letters that can be sharded, in order of appearance."""
        seen = dict.fromkeys(
            letter
            for dims in (*self.inputs, *self.outputs)
            for entry in dims
            for letter in letters_of(entry)
        )
        return tuple(seen)


def einsum(
    equation: str,
    linear: tuple[tuple[int, ...], ...] = (),
    special: dict[str, str] | None = None,
    replicated: str = "",
    contraction: bool = False,
    fixed: str = "",
    ordered: bool = False,
) -> Callable[[Call], OpDims]:
    """A function from a call to its `OpDims`, from an equation such as `b.. i, o i, +o -> b.. o`.

    `b..` stands for any number of leading dims. `+` marks an additive operand. Trailing operands
    may be absent in a call. Letters that are missing in the result are summed. `fixed` letters
    cannot be sharded.

    Shards of `special` letters must be contiguous. With `ordered`, those of all letters must be,
    for ops that depend on the position of an element. `linear`, `special`, `replicated` (letters,
    separated by spaces) and `contraction` are those of `OpDims`.
    """
    left, right = equation.split("->")
    terms = [term.split() for term in left.split(",")]
    additive = frozenset(i for i, term in enumerate(terms) if term and term[0].startswith("+"))
    terms = [[letter.lstrip("+") for letter in term] for term in terms]
    outs = [term.split() for term in right.split(",")]
    fixed_letters = set(fixed.split())

    def rule(call: Call) -> OpDims:
        tensors = call.tensors
        inputs = [_expand(term, t.dim()) for term, t in zip(terms, tensors, strict=False)]
        outputs = [_expand(term, t.dim()) for term, t in zip(outs, call.results, strict=True)]
        rename = {letter: f"!{letter}" for letter in fixed_letters}
        inputs = [tuple(rename.get(x, x) for x in term) for term in inputs]
        outputs = [tuple(rename.get(x, x) for x in term) for term in outputs]
        sizes = {
            x: s
            for term, t in zip(inputs, tensors, strict=False)
            for x, s in zip(term, t.shape, strict=True)
        }
        reached = {x for term in outputs for x in term}
        summed = frozenset(x for x in sizes if x not in reached and not x.startswith("!"))
        # with a bias the op is affine: linear in operand and bias together
        added = frozenset(i for i in additive if i < len(inputs))
        groups = tuple(frozenset(i for i in group if i < len(inputs)) | added for group in linear)
        return OpDims(
            tuple(inputs),
            tuple(outputs),
            sizes,
            summed,
            added,
            groups,
            contiguous=frozenset(x for x in sizes) if ordered else frozenset(special or {}),
            special=special or {},
            replicated_result=frozenset(replicated.split()),
            contraction=contraction,
        )

    return rule


def _expand(term: list[str], rank: int) -> Letters:
    """The letters of one term of an equation for a tensor with `rank` dims: `b..` becomes `b0 b1
    ...` for the leading dims. Raises ValueError if the term does not fit.
    """
    extra = rank - sum(not t.endswith("..") for t in term)
    out: list[str] = []
    for letter in term:
        out += [f"{letter[:-2]}{k}" for k in range(extra)] if letter.endswith("..") else [letter]
    if len(out) != rank:
        raise ValueError(f"rule term {' '.join(term)} does not fit a tensor of {rank} dims")
    return tuple(out)


def is_symbolic(size: Any) -> bool:
    """Whether a size depends on the batch: a SymInt that is no plain number."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def at_batch(size: Any, rows: int) -> int:
    """`size` as a number, where the batch has `rows` rows. A size that does not depend on the batch
    is returned as an int.
    """
    if not is_symbolic(size):
        return int(size)
    expr = size.node.expr
    terms = _polynomial(expr)
    return (
        int(expr.subs({s: rows for s in expr.free_symbols}))
        if terms is None
        else sum(factor * rows**power for power, factor in terms)
    )


@lru_cache(maxsize=4096)
def _polynomial(expr: sympy.Expr) -> tuple[tuple[int, int], ...] | None:
    """(power, factor) of each term of a polynomial in the batch size. None if the expression is not
    one, which is rare.
    """
    batch = next(iter(expr.free_symbols))
    found = expr.as_poly(batch)
    if (
        found is None
        or len(expr.free_symbols) > 1
        or not all(factor.is_Integer for factor in found.coeffs())
    ):
        return None
    return tuple((power, int(factor)) for (power,), factor in found.terms())


def has_batch(val: Any) -> bool:
    """Whether a model input has a dim 0 whose size depends on the batch. False for None and
    scalars.
    """
    return val is not None and val.dim() > 0 and is_symbolic(val.shape[0])
