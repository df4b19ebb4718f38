"""Families of placements of one candidate: what no placement of a family goes below, and the proof that none is faster than the best found.

A *family* leaves each op some of its strategies.  Of a segment of each class the least of everything (seconds forward, and for each
recompute mode seconds backward and bytes kept; static bytes, seconds once a step) is found by elimination, each by itself.  A row of such
segments, staged best (`staging.py`), bounds the family: no staging takes longer where its segments take and hold less.  The bound is
loose by as much as the fastest placement of the family is not its leanest, and so a family is split in two, at the op whose strategies
differ most between placements that may be best, until its bound reaches the time of the best plan (branch and bound).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, Strategy
from autopar.solve.bounds import Cell, alone, is_closed
from autopar.solve.eliminate import Question, Table, Tables
from autopar.solve.mixing import Models
from autopar.solve.pipeline import crossing_bytes, tied_payers
from autopar.solve.pricing import SegmentCost, input_bytes
from autopar.solve.relax import least_saved
from autopar.solve.row import Row, end_classes
from autopar.solve.staging import Schedule

_LITTLE = 1e-3
"""How much everything else counts where placements are as good."""

Allowed = dict[int, tuple[int, ...]]
"""Number of an op of a class -> numbers of the strategies that are left of it, where not all are."""


@dataclass(frozen=True, slots=True)
class Family:
    """`allowed` by class.  `bounds_s`: no placement of it is faster under a schedule."""

    allowed: tuple[Allowed, ...]
    bounds_s: Mapping[Schedule, float] = field(default_factory=dict)

    def by_op(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """(class, op) -> strategies."""
        return {(c, op): left for c, of in enumerate(self.allowed) for op, left in of.items()}


@dataclass(frozen=True, slots=True)
class _Least:
    """Of a segment: what no placement goes below, by mode, and the strategies of its ops in placements that are best at something."""

    costs: tuple[SegmentCost, ...]
    best: tuple[tuple[int, ...], ...]


@dataclass
class Families:
    """Of one candidate; `models` by recompute mode, `cell` what it shares with others."""

    models: Models
    cell: Cell
    known: dict[tuple, _Least | None] = field(default_factory=dict)
    singles: dict[tuple[int, bool], tuple[Tables, list[Table], Models]] = field(default_factory=dict)

    @property
    def first(self) -> AnnotatedModel:
        return next(iter(self.models.values()))

    def root(self) -> Family:
        return Family(tuple({} for _ in self.first.classes))

    def row(self, family: Family, several: bool) -> Row | None:
        """Segments of which each costs what no placement of the family goes below; None if there is none.

        What the last segment gives back is what it keeps; but with `several` stages a rank it may not be held when most else is, so that
        a rank may need less where that is larger.
        """
        base, closed = self.first, self._closed
        found = {key: self._least(family, *key) for key in set(zip(base.segments, closed, strict=True))}
        if None in found.values():
            return None
        costs = [[found[key].costs[mode] for key in zip(base.segments, closed, strict=True)] for mode in range(len(self.models))]
        blocks = [_narrowed(block, of) for block, of in zip(base.classes, family.allowed, strict=True)]
        left = [{op.name: op.strategies for op in block.ops} for block in blocks]
        sizes = [[min(input_bytes(block, name, s.outputs[0]) for s in of[name]) for name in block.inputs]
                 for block, of in zip(blocks, left, strict=True)]  # fmt: skip
        tied = [sum(min(s.static_bytes for s in left[c][name]) for c, name in tied_payers(base, ends)) for ends in end_classes(base)]
        freed = _most_kept(blocks[base.last]) if several and base.last is not None else None
        return Row.of_costs(self.models, costs, crossing_bytes(base, sizes), tied, freed)

    @cached_property
    def _closed(self) -> list[bool]:
        return [is_closed(self.first, number) for number in range(len(self.first.segments))]

    def _least(self, family: Family, c: int, closed: bool) -> _Least | None:
        key = c, closed, tuple(sorted(family.allowed[c].items()))
        if key not in self.known:
            self.known[key] = self._eliminated(c, closed, family.allowed[c])
        return self.known[key]

    def _eliminated(self, c: int, closed: bool, allowed: Allowed) -> _Least | None:
        modes = tuple(self.models)
        asked = [Question(backward=0.0), Question(0.0, 0.0, step=1.0), Question(0.0, 0.0, static=1.0)]
        asked += [Question(forward=0.0, weight=-1.0, mode=modes[0])]
        asked += [Question(forward=0.0, mode=mode) for mode in modes]
        asked += [Question(0.0, 0.0, kept=1.0, kept_by_ends=1.0, mode=mode) for mode in modes]
        found_by = [*asked, *(self._sensible(question) for question in asked)]
        tables, parameters, single = self._single(c, closed)
        found = tables.least(found_by, parameters, {(0, op): left for op, left in allowed.items()})
        if found is None:
            return None
        forward_s, step_s, static, input_s, *rest = found.cost_s.tolist()[: len(asked)]
        blocks = [_narrowed(model.classes[0], allowed) for model in single.values()]
        weight_s = max(rest[0] - input_s, 0.0)  # others wait for no less than the rest of backward
        costs = tuple(
            SegmentCost(forward_s, backward_s, weight_s, step_s, round(static), round(kept), _transient(block))
            for block, backward_s, kept in zip(blocks, rest[: len(modes)], rest[len(modes) :], strict=True)
        )
        places = [{s.name: n for n, s in enumerate(op.strategies)} for op in self.first.classes[c].ops]
        names = [op.name for op in self.first.classes[c].ops]
        decoded = [found.decode(number)[0][0] for number in range(len(asked), len(found_by))]
        return _Least(costs, tuple(tuple(place[choice[name]] for name, place in zip(names, places, strict=True)) for choice in decoded))

    def _sensible(self, question: Question) -> Question:
        """The same, and a little of everything else: of placements that are as good the one that is best besides."""
        price, little = self.cell.prices[-1], _LITTLE
        return Question(
            question.forward + little, question.backward + little, question.weight, question.step + little / self.first.num_microbatches,
            price * (question.kept + little), price * (question.kept_by_ends + little), price * (question.static + little), question.mode,
        )  # fmt: skip

    def _single(self, c: int, closed: bool) -> tuple[Tables, list[Table], Models]:
        """What one segment costs, what its parameters do, and the segment as a model of its own."""
        if (c, closed) not in self.singles:
            tables = self.cell.single(c, closed)
            models = {mode: alone(model, c, closed) for mode, model in self.models.items()}
            self.singles[c, closed] = tables, tables.parameters(models), models
        return self.singles[c, closed]

    # ------------------------------------------------------------------------------------------------------------ splitting

    def split(self, family: Family) -> list[Family]:
        """Two families that have the same placements together; none of a single placement."""
        found = max(self._differing(family), default=None) or next(self._left_to_choose(family), None)
        if found is None:
            return []
        _, c, op = found
        strategies = self.first.classes[c].ops[op].strategies
        left = family.allowed[c].get(op, tuple(range(len(strategies))))
        parts = _halves(left, [self._worth_s(strategies[n]) for n in left])
        return [
            replace(family, allowed=(*family.allowed[:c], {**family.allowed[c], op: part}, *family.allowed[c + 1 :])) for part in parts
        ]

    def _differing(self, family: Family) -> Iterator[tuple[float, int, int]]:
        """(seconds that strategies differ by, class, op) of ops that do not run alike in all placements that are best at something."""
        for c, block in enumerate(self.first.classes):
            for op, used in enumerate(zip(*self._best(family, c), strict=True)):
                if len(set(used)) > 1:
                    worth = [self._worth_s(block.ops[op].strategies[n]) for n in set(used)]
                    spread = max(abs(a - b) for one in worth for other in worth for a, b in zip(one, other, strict=True))
                    yield block.count * spread, c, op

    def _left_to_choose(self, family: Family) -> Iterator[tuple[float, int, int]]:
        """The same of other ops, those first that other classes see: what is best for each class need not be so together."""
        for seen in (True, False):
            for c, block in enumerate(self.first.classes):
                for op, own in enumerate(block.ops):
                    left = family.allowed[c].get(op, tuple(range(len(own.strategies))))
                    if len(left) > 1 and seen == (own.kind != "op"):
                        yield 0.0, c, op

    def _best(self, family: Family, c: int) -> list[tuple[int, ...]]:
        """Strategies of the ops of a class in each placement that is best at something."""
        closed = {self._closed[number] for number, own in enumerate(self.first.segments) if own == c}
        return [found for each in sorted(closed) for found in self._least(family, c, each).best]

    def _worth_s(self, strategy: Strategy) -> tuple[float, float]:
        """Seconds of a strategy, and what its bytes are worth."""
        price = self.cell.prices[-1]
        saved = sum(s.size_bytes for s in strategy.saved)
        seconds = strategy.forward_s + strategy.backward_s + strategy.step_s / self.first.num_microbatches
        return seconds, price * (saved + strategy.static_bytes)


def _halves(left: tuple[int, ...], worth: list[tuple[float, float]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strategies that are left in two parts: below and above the middle of what they differ in most."""
    spreads = [max(values) - min(values) for values in zip(*worth, strict=True)]
    values = [of[spreads.index(max(spreads))] for of in worth]
    middle = (max(values) + min(values)) / 2
    lower = tuple(n for n, value in zip(left, values, strict=True) if value < middle) or left[:1]
    return lower, tuple(n for n in left if n not in lower)


def _narrowed(block: AnnotatedBlock, allowed: Allowed) -> AnnotatedBlock:
    """A class whose ops have only the strategies that are left."""
    return replace(block, ops=tuple(
        replace(op, strategies=tuple(op.strategies[n] for n in allowed[o])) if o in allowed else op for o, op in enumerate(block.ops)
    ))  # fmt: skip


def _most_kept(block: AnnotatedBlock) -> int:
    """Bytes that a segment keeps at most."""
    if block.recompute:
        return sum(max(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies) for op in block.ops if op.name in block.inputs)
    largest: dict[str, int] = {}
    for strategy in (s for op in block.ops for s in op.strategies):
        for saved in strategy.saved:
            largest[saved.key] = max(largest.get(saved.key, 0), saved.size_bytes)
    return sum(largest.values())


def _transient(block: AnnotatedBlock) -> int:
    return block.workspace_bytes + (least_saved(block, block.inputs) if block.recompute else 0)


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A family whose bound is below what is known: by its bound."""

    bound_s: float
    number: int
    family: Family = field(compare=False)


class Frontier:
    """Families that together have every placement that may still be the best, the one of the least bound first."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.settled_s = inf  # the least bound of families that were not split further
        self.pushed = 0

    def push(self, family: Family, bound_s: float) -> None:
        heapq.heappush(self.waiting, Waiting(bound_s, self.pushed, family))
        self.pushed += 1

    def pop(self) -> Family:
        return heapq.heappop(self.waiting).family

    @property
    def bound_s(self) -> float:
        """No placement that is still looked for is faster."""
        return min(self.settled_s, self.waiting[0].bound_s if self.waiting else inf)
