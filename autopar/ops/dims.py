"""Dimension algebra: what one letter a dim says about how an op may be sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.calls import argument

Letters = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One ATen call, seen by a rule: arguments by schema name, tensor operands in order, results."""

    node: Node

    def arg(self, name: str, default: Any = None) -> Any:
        """Argument by its schema name; the schema's default if it was not passed."""
        return argument(self.node, name, default)

    @property
    def operands(self) -> list[Node]:
        """The tensor arguments, in the order of the call; a tensor passed twice appears twice."""
        return operands(self.node)

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [n.meta["val"] for n in self.operands]

    @property
    def results(self) -> list[torch.Tensor]:
        return results(self.node)

    def dim(self, name: str = "dim", default: Any = None, rank: int | None = None) -> int:
        """A dim argument as a non-negative number."""
        rank = self.tensors[0].dim() if rank is None else rank
        return self.arg(name, default) % max(rank, 1)

    def dims(self, name: str = "dim") -> list[int]:
        """A list of dims as non-negative numbers; all dims if the argument is absent or empty."""
        rank, dims = self.tensors[0].dim(), self.arg(name)
        if dims is None or dims == []:
            return list(range(rank))
        return [d % max(rank, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]


def operands(node: Node) -> list[Node]:
    """Tensor-valued argument nodes of a call in order, with repetition."""
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), lambda n: found.append(n) if isinstance(n.meta.get("val"), torch.Tensor) else None)
    return found


def results(node: Node) -> list[torch.Tensor]:
    """The tensors that a node returns."""
    val = node.meta.get("val")
    return [v for v in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(v, torch.Tensor)]


@dataclass(frozen=True, slots=True)
class OpDims:
    """The dims of an op's operands and results, by letter.

    A letter that starts with '!' cannot be sharded.  `summed` letters occur in operands only and are added up: sharding one gives a
    Partial result.  `additive` operands join that sum as they are (a bias), so they must be Partial too.  `linear` lists the groups of
    operands in which the op is jointly linear.  `even` letters must divide evenly.  `special` maps a letter to the lowering that
    sharding it needs; `replicated_result` are special letters whose lowering leaves the result replicated.
    `contraction` says that the op multiplies matrices; `flops` is its count over the whole tensors (2 x the product of the letters'
    sizes unless given), `movement_free` that it is a view, which moves no bytes.
    """

    inputs: tuple[Letters, ...]
    outputs: tuple[Letters, ...]
    sizes: dict[str, Any]
    summed: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    even: frozenset[str] = frozenset()
    special: dict[str, str] = field(default_factory=dict)
    replicated_result: frozenset[str] = frozenset()
    contraction: bool = False
    flops: Any = None
    movement_free: bool = False

    def total_flops(self) -> Any:
        """FLOPs of the whole op, symbolic in the batch; 0 if it multiplies no matrices."""
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
        """Letters that may be sharded, in order of appearance."""
        seen = dict.fromkeys(letter for dims in (*self.inputs, *self.outputs) for letter in dims if not letter.startswith("!"))
        return tuple(seen)


def einsum(
    equation: str,
    linear: tuple[tuple[int, ...], ...] = (),
    special: dict[str, str] | None = None,
    replicated: str = "",
    contraction: bool = False,
    fixed: str = "",
):
    """A rule from an equation such as `b.. i, o i, +o -> b.. o`.

    `b..` stands for any number of leading dims; `+` marks an additive operand; trailing operands that the call omits are dropped.
    Letters that do not reach the result are summed.  `fixed` letters cannot be sharded.
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
        sizes = {x: s for term, t in zip(inputs, tensors, strict=False) for x, s in zip(term, t.shape, strict=True)}
        reached = {x for term in outputs for x in term}
        summed = frozenset(x for x in sizes if x not in reached and not x.startswith("!"))
        added = frozenset(i for i in additive if i < len(inputs))  # with a bias the op is affine: linear in operand and bias together
        groups = tuple(frozenset(i for i in group if i < len(inputs)) | added for group in linear)
        return OpDims(
            tuple(inputs),
            tuple(outputs),
            sizes,
            summed,
            added,
            groups,
            special=special or {},
            replicated_result=frozenset(replicated.split()),
            contraction=contraction,
        )

    return rule


def _expand(term: list[str], rank: int) -> Letters:
    """Replace `b..` by as many letters `b0 b1 ...` as the rank leaves over."""
    extra = rank - sum(not t.endswith("..") for t in term)
    out: list[str] = []
    for letter in term:
        out += [f"{letter[:-2]}{k}" for k in range(extra)] if letter.endswith("..") else [letter]
    if len(out) != rank:
        raise ValueError(f"rule term {' '.join(term)} does not fit a tensor of {rank} dims")
    return tuple(out)


def is_symbolic(size: Any) -> bool:
    """Whether a size depends on the batch."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number
