"""Determines how every value of a graph depends on the rows of its batch.

A micro-batch is some rows of a batch. The value for a whole batch is of one of these kinds:

- same: equal to its value for any micro-batch. Examples are parameters and constants.
- rows: split along one dim into parts, each of which depends only on its own row.
- sum: the sum of its values for the micro-batches.
- mixed: none of these; it depends on several rows at once.

The op rules in `ops/` decide, since data parallelism asks the same question. A letter that can be
sharded is computed row by row, a summed letter gives a sum, and a linear op preserves a sum.

`power` is p if whole = (values of micro-batches, joined) x n ** -p, for n micro-batches. A mean has
power 1: it is a sum divided by a number of rows, of which each micro-batch has fewer. A value is
`known` if it depends only on inputs, buffers and constants, so it can be computed before the first
forward.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isclose, prod
from typing import Any

import sympy
import torch
from torch.fx import Graph, Node

from autopar.ir.calls import argument, op_name
from autopar.ops.dims import OpDims, at_batch, is_symbolic, letters_of, locate, operands, results
from autopar.ops.rules import op_dims
from autopar.ops.values import input_node, result_index
from autopar.ops.views import concrete
from autopar.trace.batch_norm import STATISTICS
from autopar.trace.edit import is_op

SAME, ROWS, SUM, MIXED_ROWS = "same", "rows", "sum", "mixed"
_VIEWS = ("view", "reshape", "_unsafe_view", "unsqueeze", "squeeze", "flatten", "unflatten")
_EQUAL_ROWS = ("full", "zeros", "ones", "empty", "new_full", "new_zeros", "new_ones", "new_empty",
               "expand", "repeat", "tile")  # fmt: skip
"""Ops that make equal rows from a value without rows."""
_CASTS = ("to", "_to_copy", "type_as")


@dataclass(frozen=True, slots=True)
class Fact:
    """A record of how one tensor depends on the rows of the batch, of which a micro-batch is some.

    `kind` is one of:

    - 'same': the value is equal for every micro-batch.
    - 'rows': one dim has a part for each row, which depends on that row alone.
    - 'sum': the whole value is the sum of the values of the micro-batches.
    - 'mixed': none of these.

    With n micro-batches, the whole is their values (joined or added) times n ** -`power`. `known`:
    it is computed from inputs, buffers and constants alone, so before forward. `outer`: the dim of
    rows holds the batch `outer` times. `cause`: the node at which it became mixed, or None.
    """

    kind: str
    power: int = 0
    outer: int = 1
    known: bool = False
    cause: Node | None = None

    @property
    def is_joined(self) -> bool:
        """Whether the value combines several rows: its kind is 'sum' or 'mixed'."""
        return self.kind in (SUM, MIXED_ROWS)


@dataclass(slots=True)
class RowFacts:
    """How each node of a graph depends on the rows of the batch, and the edits by which
    micro-batches can compute it. `facts` has a `Fact` for each node, or a tuple for several
    results.

    `cuts` are known values to be taken from the whole batch, each with the number of times that its
    dim of rows, if it has one, holds the batch. `again` are known values that each
    micro-batch still computes, from cuts. `settled` maps (node, operand) to a power k: the operand
    is multiplied by (1 / n) ** k. `lifted` maps (node, argument place) to batch-dependent numbers
    that become known tensors.
    """

    facts: dict[Node, Any] = field(default_factory=dict)
    again: dict[Node, Fact] = field(default_factory=dict)
    cuts: dict[Node, int] = field(default_factory=dict)
    settled: dict[tuple[Node, Node], int] = field(default_factory=dict)
    lifted: dict[tuple[Node, int], torch.SymInt | torch.SymFloat] = field(default_factory=dict)

    def of(self, node: Node) -> Fact:
        """The fact of a node. For several results, the first mixed one, else that of the first
        result. Raises KeyError for an unknown node.
        """
        fact = self.facts[node]
        if isinstance(fact, tuple):  # of an op with several results, all alike where it matters
            return next((each for each in fact if each.kind == MIXED_ROWS), fact[0])
        return fact


def row_facts(
    graph: Graph,
    fixed: Mapping[str, bool],
    overruled: Mapping[Node, Fact],
    widest: int,
) -> RowFacts:
    """`RowFacts`: how every node of the graph depends on the rows of the batch, by the op rules.
    Does not change the graph.

    `fixed` maps placeholders of parameters to False, and of buffers and constants with known values
    to True; other placeholders are inputs. `overruled` has facts that hold by convention. `widest`
    is the largest number of elements per row that every rank may hold of the whole batch; integer
    inputs may have more.
    """
    found = RowFacts()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node in overruled:
            found.facts[node] = overruled[node]
        elif node.op == "placeholder":
            known = fixed.get(node.name, True)
            rows = _row_dim(node.meta["val"]) is not None and node.name not in fixed
            found.facts[node] = Fact(ROWS if rows else SAME, known=known)
        elif STATISTICS in node.meta:
            found.facts[node] = Fact(SAME)
        else:
            found.facts[node] = _Transfer(node, found, widest).run()
    return found


def gathered_inputs(node: Node, found: RowFacts) -> list[Node]:
    """The placeholders from whose rows the value of `node`, known before forward, is computed in
    ways other than a sum over rows. Every rank needs all rows of these. `found` has the facts of
    nodes.
    """

    def is_whole(each: Node) -> bool:
        return found.of(each).kind in (SAME, SUM)

    read = ancestors([node], lambda each: () if is_whole(each) else reads(each))
    return [each for each in read if each.op == "placeholder" and not is_whole(each)]


def ancestors(
    nodes: Iterable[Node],
    inputs: Callable[[Node], Iterable[Node]] = lambda node: node.all_input_nodes,
) -> set[Node]:
    """The nodes and everything that they are computed from, as a set. `inputs(node)` returns the
    nodes to follow from a node; by default all its operands.
    """
    found, stack = set(), list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(inputs(node))
    return found


def row_dim_of(node: Node) -> int | None:
    """The one dim of a node's tensor whose size is symbolic, if that is proportional to the batch
    size. None otherwise, and for what is no tensor.
    """
    return _row_dim(node.meta.get("val"))


def elements_a_row(node: Node) -> int:
    """Number of elements of a node's tensor in a batch of one row."""
    return prod(at_batch(size, 1) for size in node.meta["val"].shape)


_LIKE = {"zeros_like": 0, "ones_like": 1, "full_like": None, "empty_like": 0}


def reads(node: Node) -> list[Node]:
    """The operands whose values a node depends on. The operand of ops such as `ones_like` is left
    out, since only its shape counts.
    """
    like = node.args[0] if is_op(node, *_LIKE) else None
    return [each for each in node.all_input_nodes if each is not like]


def fill_value(node: Node) -> Any:
    """The number with which a `zeros_like`, `ones_like`, `full_like` or `empty_like` (0) fills its
    tensor; None for any other op.
    """
    if not is_op(node, *_LIKE):
        return None
    name = op_name(node).removeprefix("aten::")
    return argument(node, "fill_value") if name == "full_like" else _LIKE[name]


def follows_batch(val: Any) -> bool:
    """Whether `val` is a tensor with a size that depends on the batch."""
    return isinstance(val, torch.Tensor) and any(map(is_symbolic, val.shape))


def is_random(node: Node) -> bool:
    """Whether a node draws random numbers, by torch's tag of its op."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.nondeterministic_seeded in tags


def _row_dim(val: Any) -> int | None:
    if not isinstance(val, torch.Tensor):
        return None
    dims = [dim for dim, size in enumerate(val.shape) if is_symbolic(size)]
    return dims[0] if len(dims) == 1 and degree(val.shape[dims[0]]) == 1 else None


_ROWS_TRIED = (1, 2, 3, 5, 7, 64, 2**20)


def degree(size: Any) -> int | None:
    """k if a symbolic size or number is proportional to the k-th power of the batch size, for k
    from -2 to 2. None otherwise. Tried on a few batch sizes.
    """
    return _degree(size.node.expr)


@lru_cache(maxsize=4096)
def _degree(expr: sympy.Expr) -> int | None:
    if len(expr.free_symbols) != 1:
        return None
    (batch,) = expr.free_symbols
    first, *more = (float(expr.subs(batch, rows)) for rows in _ROWS_TRIED)
    for power in (1, -1, 2, -2, 0):
        alike = (
            isclose(value, first * float(rows) ** power, rel_tol=1e-12)
            for value, rows in zip(more, _ROWS_TRIED[1:], strict=True)
        )
        if first and all(alike):
            return power
    return None


class _Transfer:
    """Computes how one call depends on rows from how its operands do. `run` returns a `Fact`, or a
    tuple for several results. Marks in `found` the edits that this takes.
    """

    def __init__(self, node: Node, found: RowFacts, widest: int, again: bool = False) -> None:
        """`found` has the facts of earlier nodes; `widest` is that of `row_facts`. `again`: the
        node is computed per micro-batch although it is known.
        """
        self.node, self.found, self.widest = node, found, widest
        self.operands = operands(node)
        facts = [found.of(each) for each in self.operands]
        fixed = is_random(node) or node.target is torch.ops.autopar.in_training.default
        self.known = not again and not fixed and all(found.of(each).known for each in reads(node))
        self.facts = (
            facts
            if self.known
            else [self._cut(*pair, facts) for pair in zip(self.operands, facts, strict=True)]
        )

    def _cut(self, operand: Node, fact: Fact, facts: Sequence[Fact]) -> Fact:
        """How an operand depends on rows, as a call reads it that is not known before forward.
        `facts` are those of all operands.

        A known value that combines rows is marked in `found.cuts`, to be taken from the whole
        batch, if it and the inputs behind it are small enough. Its rows then lie like those of the
        other operands. Otherwise each micro-batch computes it again.
        """
        if not (fact.known and fact.is_joined):
            return fact
        if not follows_batch(operand.meta["val"]):
            fits, cut = True, Fact(SAME, known=True)
        elif _repeats(operand):  # each micro-batch can: what it repeats is smaller
            return self._again(operand, fact)
        else:
            rows = row_dim_of(operand)
            outer = next((each.outer for each in facts if each.kind == ROWS), 1)
            fits = (
                rows is not None
                and at_batch(operand.meta["val"].shape[rows], 1) % outer == 0
                and self.found.cuts.get(operand, outer) == outer
                and elements_a_row(operand) <= self.widest
            )
            cut = Fact(ROWS, outer=outer, known=True)
        if fits and all(map(self._may_gather, gathered_inputs(operand, self.found))):
            self.found.cuts[operand] = cut.outer
            return cut
        return self._again(operand, fact)

    def _may_gather(self, source: Node) -> bool:
        return not source.meta["val"].is_floating_point() or elements_a_row(source) <= self.widest

    def _again(self, operand: Node, fact: Fact) -> Fact:
        """How a known value depends on rows if each micro-batch computes it again, from values of
        the whole batch. The result is stored in `found.again`.
        """
        if operand.op != "call_function" or operand in self.found.again:
            return self.found.again.get(operand, fact)
        found = _Transfer(operand, self.found, self.widest, again=True).run()
        self.found.again[operand] = next(iter(found)) if isinstance(found, tuple) else found
        return self.found.again[operand]

    def run(self) -> Any:
        node = self.node
        if node.target is operator.getitem:
            fact = self.found.facts[input_node(node, 0)]
            return fact[result_index(node)] if isinstance(fact, tuple) else fact
        if node.op != "call_function" or not results(node):
            return self._mixed()
        if node.target is torch.ops.autopar.in_training.default:  # training reads the batch's
            return replace(self.facts[0], known=False)
        if fill_value(node) is not None and self.known:
            return self._of_shape()
        if self._is_last_of_running_sum():
            return Fact(SUM, known=self.known)
        if (
            bad := next((fact for fact in self.facts if fact.kind == MIXED_ROWS), None)
        ) is not None:
            return replace(bad, known=self.known)
        numbers = _numbers(node)
        if numbers and (self.known or not self._lift(numbers)):
            power = None if self.known else _factor(node, numbers)
            if power is None:
                return self._mixed()
            return self._by_kind(power)
        return self._by_kind(0)

    def _of_shape(self) -> Fact:
        """How a tensor filled like another one (`ones_like`) depends on rows: equal rows if that
        has rows, 'same' if its shape is fixed, otherwise mixed.
        """
        val, fact = results(self.node)[0], self.facts[0]
        if not follows_batch(val):
            return Fact(SAME, known=True)
        return (
            replace(fact, power=0, known=True)
            if fact.kind == ROWS
            else Fact(MIXED_ROWS, known=True, cause=self.node)
        )

    def _is_last_of_running_sum(self) -> bool:
        """Whether the node selects the last entry of a cumsum along the dim of rows, which is the
        sum over rows.
        """
        source = self.operands[0] if self.operands else None
        if not is_op(self.node, "select") or source is None or not is_op(source, "cumsum"):
            return False
        dim = argument(source, "dim") % source.meta["val"].dim()
        of = input_node(source, 0)
        last = (
            argument(self.node, "index") == -1
            and argument(self.node, "dim") % source.meta["val"].dim() == dim
        )
        fact = self.found.of(of)
        return last and fact.kind == ROWS and not fact.power and row_dim_of(of) == dim

    def _mixed(self) -> Fact:
        return Fact(MIXED_ROWS, known=self.known, cause=self.node)

    def _lift(self, numbers: list[tuple[int, torch.SymInt | torch.SymFloat]]) -> bool:
        """Whether the batch-dependent numbers among the call's arguments, (place, value) each, can
        become tensors that are known before forward. If so, records them in `found.lifted`.

        False if they are factors of a value that is not 'same', or the op has no overload with
        tensors.
        """
        if _factor(self.node, numbers) is not None and any(f.kind != SAME for f in self.facts):
            return False
        if tensor_overload(self.node) is None or not all(
            place < min(2, len(self.node.args)) for place, _ in numbers
        ):
            return False
        for place, value in numbers:
            self.found.lifted[self.node, place] = value
        return True

    def _by_kind(self, power: int) -> Any:
        kinds = {fact.kind for fact in self.facts}
        if {ROWS, SUM} <= kinds:
            return self._mixed()
        if ROWS in kinds:
            return self._of_rows(power)
        return self._of_sums(power) if SUM in kinds else self._of_same()

    # ------------------------------------------------------------------ values without rows

    def _of_same(self) -> Any:
        node = self.node
        vals = results(node)
        sizes = [arg for arg in _flat((node.args, node.kwargs)) if is_symbolic(arg)]
        if not any(map(follows_batch, vals)):
            return (
                Fact(SAME, known=self.known) if not sizes or self._has_lifted() else self._mixed()
            )
        alike = (*_EQUAL_ROWS, "full_like", "zeros_like", "ones_like", "empty_like")
        if is_op(node, *alike) and len(vals) == 1 and _row_dim(vals[0]) is not None:
            return Fact(ROWS, known=self.known)
        return self._mixed()

    def _has_lifted(self) -> bool:
        return any(node is self.node for node, _ in self.found.lifted)

    # ---------------------------------------------------------------------- values with rows

    def _of_rows(self, power: int) -> Any:
        node, vals = self.node, results(self.node)
        moved: Fact | tuple[Fact, ...] | None = None
        if is_op(node, *_VIEWS):
            moved = _reshaped(node, self.operands[0], self.facts[0]) or self._mixed()
        elif is_op(node, "cat"):
            moved = _batches_in_a_row(node, self.operands, self.facts)
        elif is_op(node, "split_with_sizes", "split", "chunk"):
            moved = _single_batches(node, self.operands[0], self.facts[0])
        if moved is not None:
            return self._told(moved)
        dims = op_dims(node)
        places = [
            (k, row_dim_of(each))
            for k, each in enumerate(self.operands)
            if self.facts[k].kind == ROWS
        ]
        outers = {self.facts[k].outer for k, _ in places}
        if any(dim is None for _, dim in places) or len(outers) > 1:
            return self._mixed()
        if dims is None:
            return self._pointwise(power) if _is_pointwise(node) else self._mixed()
        letters = {_row_letter(dims, dims.inputs[k][dim]) for k, dim in places if dim is not None}
        letter, *others = letters
        if letter is None or others:
            return self._mixed()
        if any(
            locate(term, letter) for k, term in enumerate(dims.inputs) if self.facts[k].kind != ROWS
        ):
            return self._mixed()
        own = self._power_of_rows(dims, power)
        found = []
        for term, val in zip(dims.outputs, vals, strict=True):
            if locate(term, letter) is not None:
                fits = _row_dim(val) is not None
                found.append(Fact(ROWS, own, min(outers), self.known) if fits else self._mixed())
            elif (letter in dims.summed and not dims.additive) or (
                letter in dims.summed and self._adds_nothing(dims)
            ):
                found.append(Fact(SUM, own, known=self.known))
            else:
                found.append(self._mixed())
        return (
            found[0]
            if len(found) == 1 and not isinstance(node.meta["val"], list | tuple)
            else tuple(found)
        )

    def _adds_nothing(self, dims: OpDims) -> bool:
        """Whether all operands that the op adds to its sum, such as a bias, are zeros."""
        return all(
            is_op(self.operands[k], "zeros", "zeros_like", "new_zeros") for k in dims.additive
        )

    def _power_of_rows(self, dims: OpDims, power: int) -> int:
        """The power of a result with rows; `power` is what number arguments add. Powers of operands
        add if the op is linear in each; operands in which it is not are marked in `found.settled`.
        """
        powers = [fact.power if fact.kind == ROWS else 0 for fact in self.facts]
        if not any(powers):
            return power
        total, alone = (
            power,
            {
                k
                for group in dims.linear
                if len(group) == 1
                for k in group
                if not _cuts_off(self.node)
            },
        )
        for group in dims.linear:
            if len(group) > 1 and len({powers[k] for k in group}) == 1:
                rest = [k for k in range(len(powers)) if k not in group]
                if not any(powers[k] for k in rest):
                    return power + powers[min(group)]
        settled = {
            operand for k, operand in enumerate(self.operands) if powers[k] and k not in alone
        }
        for k, operand in enumerate(self.operands):
            if operand in settled:  # wherever the op reads it
                self.found.settled[self.node, operand] = powers[k]
            else:
                total += powers[k]
        return total

    def _pointwise(self, power: int) -> Fact:
        for fact, operand in zip(self.facts, self.operands, strict=True):
            if fact.kind == ROWS and fact.power:
                self.found.settled[self.node, operand] = fact.power
        rank = results(self.node)[0].dim()
        places = {
            rank - each.meta["val"].dim() + row_dim_of(each)
            for each, fact in zip(self.operands, self.facts, strict=True)
            if fact.kind == ROWS
        }
        if len(places) != 1 or {row_dim_of(self.node)} != places or power:
            return self._mixed()
        outer = next(fact.outer for fact in self.facts if fact.kind == ROWS)
        return Fact(ROWS, 0, outer, self.known)

    # ---------------------------------------------------------------------- sums over rows

    def _of_sums(self, power: int) -> Any:
        node = self.node
        sums = [k for k, fact in enumerate(self.facts) if fact.kind == SUM]
        if _cuts_off(node) or any(map(follows_batch, results(node))):
            return self._mixed()  # a sum has no rows: where it is repeated, each row has the whole
        if is_op(node, "mean") and not is_symbolic(sum(self.operands[0].meta["val"].shape)):
            return replace(self.facts[0], known=self.known)
        if is_op(node, "add", "sub", "rsub") and len(self.operands) == 1:
            return self._with_number()
        dims = op_dims(node)
        groups = () if dims is None else dims.linear
        if len(sums) == 1 and frozenset(sums) in groups:
            return self._each(Fact(SUM, self.facts[sums[0]].power + power, known=self.known))
        for group in groups:
            if set(sums) <= group and not power:
                return self._each(self._summands(group))
        if is_op(node, "rsub") and len(self.operands) == 2:
            return self._summands(frozenset({0, 1}))
        return self._mixed()

    def _told(self, facts: Fact | tuple[Fact, ...]) -> Any:
        """The same facts with `known` set to whether this call is known before forward."""
        if isinstance(facts, Fact):
            return replace(facts, known=self.known)
        return tuple(replace(fact, known=self.known) for fact in facts)

    def _each(self, fact: Fact) -> Any:
        many = isinstance(self.node.meta["val"], list | tuple)
        return tuple(fact for _ in results(self.node)) if many else fact

    def _summands(self, group: frozenset[int]) -> Fact:
        """How the sum of the operands in `group` (their indices) depends on rows. Their powers must
        be equal; a term that is the same for every micro-batch has power 1.

        If powers differ, operands are marked in `found.settled` to make all 0; a known sum is then
        mixed.
        """
        powers = {k: self.facts[k].power if self.facts[k].kind == SUM else 1 for k in group}
        wanted = set(powers.values())
        if len(wanted) == 1:
            return Fact(SUM, wanted.pop(), known=self.known)
        if self.known:
            return self._mixed()
        for k, own in powers.items():
            if own:
                self.found.settled[self.node, self.operands[k]] = own
        return Fact(SUM, 0)

    def _with_number(self) -> Fact:
        """How a sum over rows, plus or minus a number, depends on rows. The number is the same for
        every micro-batch, like a mean, so the sum must have power 1.

        Otherwise the operand is marked in `found.settled` to get it; a known result is then mixed.
        """
        fact = self.facts[0]
        if fact.power == 1:
            return replace(fact, known=self.known)
        if self.known:
            return self._mixed()
        self.found.settled[self.node, self.operands[0]] = fact.power - 1
        return Fact(SUM, 1)


def _reshaped(node: Node, source: Node, fact: Fact) -> Fact | None:
    """The `Fact` of `node`, which reshapes `source`: how it depends on rows. Elements keep their
    order, and so do rows; only the repetition of the batch may change. None if rows are not kept.
    """
    before, after = source.meta["val"].shape, node.meta["val"].shape
    here, there = row_dim_of(source), row_dim_of(node)
    if here is None or there is None:
        return None
    ahead = fact.outer * prod(map(concrete, before[:here]))
    outer, rest = divmod(ahead, prod(map(concrete, after[:there])))
    inside = after[there].node.expr.subs(dict.fromkeys(after[there].node.expr.free_symbols, 1))
    return None if rest or not outer or int(inside) % outer else replace(fact, outer=outer)


def _batches_in_a_row(node: Node, sources: Sequence[Node], facts: Sequence[Fact]) -> Fact | None:
    """The `Fact` of a cat of several whole batches along their dim of rows: the batch repeats once
    for each. None if the operands are no such batches of equal size.
    """
    dim = argument(node, "dim", 0) % max(sources[0].meta["val"].dim(), 1)
    sizes = {str(each.meta["val"].shape[dim]) for each in sources}
    plain = all(fact.kind == ROWS and fact.outer == 1 and not fact.power for fact in facts)
    alike = all(row_dim_of(each) == dim for each in sources)
    return Fact(ROWS, 0, len(sources)) if plain and alike and len(sizes) == 1 else None


def _single_batches(node: Node, source: Node, fact: Fact) -> tuple[Fact, ...] | None:
    """The `Fact` of each part of a split, if `source` is several batches along the dim of rows and
    each part is one of them. None otherwise.
    """
    vals, dim = results(node), argument(node, "dim", 0) % max(source.meta["val"].dim(), 1)
    alike = len({str(val.shape[dim]) for val in vals}) == 1
    if not alike or row_dim_of(source) != dim or fact.outer == 1 or fact.outer != len(vals):
        return None
    return (replace(fact, outer=1),) * len(vals)


def _repeats(node: Node) -> bool:
    """Whether a node makes equal rows from a tensor without rows, not from a number of rows."""
    sources = [each for each in node.all_input_nodes if results(each)]
    return (
        bool(sources)
        and is_op(node, *_EQUAL_ROWS)
        and not any(follows_batch(each.meta["val"]) for each in sources)
    )


def _cuts_off(node: Node) -> bool:
    """Whether a node is a cast that is not linear: to bool, or from a floating dtype to integers."""
    if not is_op(node, *_CASTS):
        return False
    before, after = operands(node)[0].meta["val"], results(node)[0]
    return after.dtype != before.dtype and (
        after.dtype == torch.bool or (before.is_floating_point() and not after.is_floating_point())
    )


def tensor_overload(node: Node) -> torch._ops.OpOverload | None:
    """The overload of an arithmetic op or comparison that takes tensors in the place of numbers.
    None for any other op.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    name = node.target._schema.name.removeprefix("aten::")
    if name == "pow":
        return torch.ops.aten.pow.Tensor_Tensor
    if name == "div" and argument(node, "rounding_mode"):
        return torch.ops.aten.div.Tensor_mode
    arithmetic = (
        "add",
        "sub",
        "mul",
        "div",
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "remainder",
        "fmod",
    )
    return getattr(torch.ops.aten, name).Tensor if name in arithmetic else None


def _numbers(node: Node) -> list[tuple[int, torch.SymInt | torch.SymFloat]]:
    """(place, value) of the call's arguments that are numbers which depend on the batch, such as a
    divisor. Sizes are left out.
    """
    found: list[tuple[int, torch.SymInt | torch.SymFloat]] = []
    if not isinstance(node.target, torch._ops.OpOverload):
        return found
    for place, spec in enumerate(node.target._schema.arguments):
        value = argument(node, spec.name)
        follows = isinstance(value, torch.SymInt | torch.SymFloat) and value.node.expr.free_symbols
        if follows and ("number" in str(spec.type) or "Tensor" in str(spec.type)):  # not a size
            found.append((place, value))
    return found


def _factor(node: Node, numbers: list[tuple[int, torch.SymInt | torch.SymFloat]]) -> int | None:
    """The power that a batch-dependent number adds to the result: 1 for a division by the batch
    size, -1 for a product with it. None if it is neither factor nor divisor, or no power of the
    batch size.
    """
    if (
        not is_op(node, "mul", "div")
        or [place for place, _ in numbers] != [1]
        or argument(node, "rounding_mode")
    ):
        return None
    power = degree(numbers[0][1])
    return None if power is None else -power if is_op(node, "mul") else power


def _row_letter(dims: OpDims, entry: str) -> str | None:
    """The outermost letter of `entry`, one dim of an operand in letters, if its size depends on the
    batch; None otherwise. An entry with several letters is a flattened dim.
    """
    letters = letters_of(entry)
    first = letters[0] if letters else None
    return first if first is not None and is_symbolic(dims.sizes.get(first)) else None


def _is_pointwise(node: Node) -> bool:
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _flat(part: Any) -> list:
    if isinstance(part, list | tuple):
        return [each for entry in part for each in _flat(entry)]
    return _flat(list(part.values())) if isinstance(part, dict) else [part]
