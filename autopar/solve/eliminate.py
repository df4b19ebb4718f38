"""The least that any placement costs, for several prices of a byte at once, by eliminating one choice after the other.

What is minimised, for each price: the seconds of a micro-batch of all segments, and for each byte that forward keeps or that is static its
price in seconds.  The layers may recompute: each class of them does so in the mode that is cheapest with the placement.

Costs are tables over the few choices that they depend on: an op's own, what a value's maker and its readers agree on (a conversion is paid
once for each layout), a tensor that several ops save (kept once, at the largest size), edges between segments and ties.  A choice is
eliminated by adding up the tables that it is in and keeping the minimum over it (bucket elimination, Dechter 1999, Artificial Intelligence
113): exact, and for the graphs of models, which are narrow, quicker than the linear program by far.  Where a table would grow too large it
is split, each part with a minimum of its own (mini-buckets, Dechter and Rish 2003, J. ACM 50): the result is then a lower bound still.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from random import Random

import numpy as np

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, BoundaryEdge, Conversion, Saved
from autopar.ir.sharding import Layout
from autopar.solve.mixing import Models
from autopar.solve.pipeline import blocks_of
from autopar.solve.pricing import Choices, input_bytes

_LARGEST = 400_000
"""Entries of a table; what needs more is split."""

_ATTEMPTS = 8
"""Orders that are tried; the best is kept for all models of a structure."""

_ROUNDING = 1e-12
"""Relative slack that covers double rounding of sums (each addition rounds by 1.1e-16)."""

Scope = tuple[int, ...]
"""The choices that a table depends on, ascending."""

Allowed = Mapping[tuple[int, int], Sequence[int]]
"""Number of a class and of an op in it -> numbers of the strategies that it may run."""


@dataclass(frozen=True, slots=True)
class Question:
    """What to minimise: the sum of seconds of forward and of backward of a micro-batch, of those of `weight`, the part of backward that
    computes gradients of parameters (so that it may count against it), of seconds once a step, of bytes that forward keeps for a
    micro-batch (of blocks, and of what is before and after them) and of bytes that are static, each times what it counts.  `mode`: in which
    mode layers recompute, if that is given."""

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 0.0
    step: float = 0.0
    kept: float = 0.0
    kept_by_ends: float = 0.0
    static: float = 0.0
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Least:
    """`cost_s`, by question: no placement costs less.  `is_exact`: some placement costs that."""

    cost_s: np.ndarray
    is_exact: bool
    decode: Callable[[int], tuple[Choices, tuple[str, ...]]]
    """Question -> (the placement that costs least, or nearly where it is not exact; the recompute mode of each class)."""


@dataclass(frozen=True, slots=True)
class _View:
    """A choice, and for each of its values a strategy of an op that looks so (-1: no choice)."""

    variable: int
    strategies: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Step:
    """Tables `parts` (number, shape over `scope`) are added up, and the minimum over `variable` is the next table."""

    variable: int
    scope: Scope
    axis: int
    parts: tuple[tuple[int, tuple[int, ...]], ...]


@lru_cache(maxsize=64)
def _plan(scopes: tuple[Scope, ...], sizes: tuple[int, ...]) -> tuple[_Step, ...]:
    """In which order choices go; the same for all models of one structure."""
    of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}  # choice -> tables that it is in
    known = list(scopes)
    for number, scope in enumerate(scopes):
        for v in scope:
            of[v].add(number)
    steps: list[_Step] = []
    for variable in _order(scopes, sizes):
        for parts in _split(sorted(of[variable]), known, sizes):
            scope = tuple(sorted({v for number in parts for v in known[number]}))
            shaped = tuple((number, tuple(sizes[v] if v in known[number] else 1 for v in scope)) for number in parts)
            steps.append(_Step(variable, scope, scope.index(variable), shaped))
            known.append(tuple(v for v in scope if v != variable))
            for v in known[-1]:
                of[v] = (of[v] - set(parts)) | {len(known) - 1}
    return tuple(steps)


def _order(scopes: Sequence[Scope], sizes: Sequence[int]) -> list[int]:
    """Choices in an order that keeps tables small: next is the one that joins fewest pairs of values which no table joins yet (weighted
    min-fill), of several such orders with ties broken at random the one of the smallest tables."""
    found = [_one_order(scopes, sizes, Random(attempt), 0.5 if attempt else 0.0) for attempt in range(_ATTEMPTS)]
    return min(found, key=lambda pair: pair[1])[0]


def _one_order(scopes: Sequence[Scope], sizes: Sequence[int], random: Random, noise: float) -> tuple[list[int], int]:
    """(an order, entries of all its tables)."""
    beside: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    for scope in scopes:
        for v in scope:
            beside[v] |= set(scope) - {v}

    def score(v: int) -> float:
        own = list(beside[v])
        joined = sum(sizes[a] * sizes[b] for place, a in enumerate(own) for b in own[place + 1 :] if b not in beside[a])
        return (joined + 1e-9 * prod(sizes[u] for u in own)) * (1 + noise * random.random())

    scores, order, entries = {v: score(v) for v in beside}, [], 0
    while scores:
        v = min(scores, key=lambda v: (scores[v], v))
        own = beside.pop(v)
        del scores[v]
        order.append(v)
        entries += sizes[v] * prod(sizes[u] for u in own)
        for u in own:
            beside[u] = (beside[u] | own) - {u, v}
        for u in own.union(*(beside[u] for u in own)):
            scores[u] = score(u)
    return order, entries


def _split(numbers: list[int], known: list[Scope], sizes: Sequence[int]) -> list[list[int]]:
    """Tables in groups that are each added up to one which is not too large."""
    groups: list[tuple[list[int], set[int]]] = []
    for number in sorted(numbers, key=lambda n: -len(known[n])):
        for group, scope in groups:
            if prod(sizes[v] for v in scope | set(known[number])) <= _LARGEST:
                group.append(number)
                scope.update(known[number])
                break
        else:
            groups.append(([number], set(known[number])))
    return [group for group, _ in groups]


def _whole(steps: Sequence[_Step], asked: Sequence[np.ndarray], without: int = -1) -> np.ndarray:
    """What is left when all choices are gone, by question; `without` the table of that number."""
    gone = {without, *(number for step in steps for number, _ in step.parts)}
    return sum((found.reshape(-1) for number, found in enumerate(asked) if number not in gone), np.zeros(1))


# ------------------------------------------------------------------------------------------------------------------ the tables


@dataclass(frozen=True)
class Table:
    """`entries` have an axis of parts, then one for each choice of `scope`.  `counts`: the fields of a question that parts count by."""

    scope: Scope
    entries: np.ndarray
    counts: tuple[str, ...]

    def asked(self, questions: Sequence[Question]) -> np.ndarray:
        """What an entry costs under each question; along an axis of length 1 if that is the same for all."""
        weights = np.array([[getattr(question, name) for name in self.counts] for question in questions])
        if len(self.counts) == 1:
            return np.multiply.outer(weights[:, 0], self.entries[0])
        if self.counts == _WAYS and np.all(weights == 1.0):
            return self.whole
        same = len(questions) == 1 or bool(np.all(weights == weights[:1]))
        with np.errstate(invalid="ignore"):
            found = np.tensordot(weights[:1] if same else weights, self.entries, 1)
        return np.nan_to_num(found, copy=False, nan=np.inf, posinf=np.inf)

    @cached_property
    def whole(self) -> np.ndarray:
        """All parts together."""
        return self.entries.sum(axis=0)[None]


_WAYS = ("forward", "backward")
_BESIDES = ("weight", "step", "static")
_HELD = (*_WAYS, *_BESIDES)


class Tables:
    """What the choices of a placement cost; `models` by recompute mode, the first keeping most.

    Choices are numbered: an op's strategy, or the mode of a class of layers, wherever there is more than one.
    """

    def __init__(self, models: Models) -> None:
        self.modes, self.models = tuple(models), list(models.values())
        self.base: AnnotatedModel = self.models[0]
        self.sizes: list[int] = []
        self.tables: list[Table] = []
        self.is_exact = True
        self.layers = {self.base.segments[number] for number in blocks_of(self.base)} if self.base.segments else set()
        several = len(models) > 1
        self.mode_of = {c: self._choice(len(models)) for c in range(len(self.base.classes)) if several and c in self.layers}
        self.op_of = {
            (c, o): self._choice(len(op.strategies)) for c, block in enumerate(self.base.classes) for o, op in enumerate(block.ops)
        }  # fmt: skip
        for c in range(len(self.base.classes)):
            self._add_class(c)
        for edge in self.base.edges:
            self._add_edge(edge)
        for group in self.base.ties:
            self._add_tie(group)

    def least(self, questions: Sequence[Question], parameters: Sequence[Table] = (), allowed: Allowed | None = None) -> Least | None:
        """What a placement costs at least; None if none is consistent.

        `parameters`: what the parameters of a model with the same classes cost (`parameters`).  `allowed`: the strategies that some ops
        may run.
        """
        steps, asked, sums = self._eliminated(questions, parameters, allowed or {})
        cost_s = _whole(steps, asked) + np.zeros(len(questions))
        if not np.all(np.isfinite(cost_s)):
            return None

        def decode(question: int) -> tuple[Choices, tuple[str, ...]]:
            chosen: dict[int, int] = {}
            for variable, parts in reversed(by_variable.items()):
                found = 0.0
                for step, total in parts:
                    at = total[question if len(total) > 1 else 0]
                    found = found + at[tuple(slice(None) if v == variable else chosen[v] for v in step.scope)]
                chosen[variable] = int(np.argmin(found))
            return self._named(chosen)

        by_variable: dict[int, list[tuple[_Step, np.ndarray]]] = {}  # a table that was split has several parts
        for step, total in zip(steps, sums, strict=True):
            by_variable.setdefault(step.variable, []).append((step, total))
        exact = self.is_exact and len(by_variable) == len(steps)
        return Least(cost_s * (1 - _ROUNDING), exact, decode)

    def least_with(
        self, questions: Sequence[Question], parameters: Sequence[Table] = (), allowed: Allowed | None = None
    ) -> dict[tuple[int, int], np.ndarray]:
        """(class, op) -> what placements in which the op runs a strategy cost at least, by question and strategy; for ops with a choice.

        Nothing is told where tables were split.  What comes before a step is its table; what comes after is found from last to first.
        """
        steps, asked, sums = self._eliminated(questions, parameters, allowed or {})
        if len({step.variable for step in steps}) < len(steps):
            return {}
        op_of = {variable: op for op, variable in self.op_of.items() if variable >= 0}
        first, found = len(asked) - len(steps), {}
        reader = {number: place for place, step in enumerate(steps) for number, _ in step.parts}
        after: dict[int, np.ndarray] = {}  # of a step, by its choices but the one that goes: all that its table does not count
        for place in reversed(range(len(steps))):
            own, number = steps[place], first + place
            if number not in reader:
                after[place] = _whole(steps, asked, number)
            else:
                later = steps[reader[number]]
                total = np.expand_dims(after[reader[number]], later.axis + 1)
                for part, shape in later.parts:
                    total = total + asked[part].reshape(-1, *shape) if part != number else total
                total = total + np.zeros((1, *(1 for _ in later.scope)))
                gone = tuple(axis + 1 for axis, v in enumerate(later.scope) if v not in own.scope or v == own.variable)
                after[place] = total.min(axis=gone)
            if own.variable in op_of:
                total = sums[place] + np.expand_dims(after[place], own.axis + 1)
                rest = tuple(axis + 1 for axis in range(len(own.scope)) if axis != own.axis)
                found[op_of[own.variable]] = total.min(axis=rest) * (1 - _ROUNDING) + np.zeros((len(questions), 1))
        return found

    def _eliminated(
        self, questions: Sequence[Question], parameters: Sequence[Table], allowed: Allowed
    ) -> tuple[tuple[_Step, ...], list[np.ndarray], list[np.ndarray]]:
        """(steps, tables with the result of each step after them, what each step adds up)."""
        tables = [t for t in self.tables if t.counts == _WAYS or any(getattr(q, name) for q in questions for name in t.counts)]
        tables += parameters
        steps = _plan(tuple(table.scope for table in tables), tuple(self.sizes))
        asked, sums = [table.asked(questions) for table in tables], []
        for variable, barred in self._barred(questions, allowed):
            number = next((n for n, table in enumerate(tables) if variable in table.scope), None)
            if number is not None:
                shape = [barred.shape[1] if v == variable else 1 for v in tables[number].scope]
                asked[number] = asked[number] + barred.reshape(-1, *shape)
        for step in steps:
            total = asked[step.parts[0][0]].reshape(-1, *step.parts[0][1])
            for number, shape in step.parts[1:]:
                total = total + asked[number].reshape(-1, *shape)
            sums.append(total)
            asked.append(total.min(axis=step.axis + 1))
        return steps, asked, sums

    def _barred(self, questions: Sequence[Question], allowed: Allowed) -> Iterator[tuple[int, np.ndarray]]:
        """Choices of which some values are not allowed: infinite for those, by question."""
        for op, strategies in allowed.items():
            if (variable := self.op_of[op]) >= 0:
                barred = np.full((1, self.sizes[variable]), np.inf)
                barred[0, list(strategies)] = 0.0
                yield variable, barred
        if any(question.mode for question in questions):
            barred = np.array([[0.0 if q.mode in (None, mode) else np.inf for mode in self.modes] for q in questions])
            yield from ((variable, barred) for variable in self.mode_of.values() if variable >= 0)

    def _named(self, chosen: Mapping[int, int]) -> tuple[Choices, tuple[str, ...]]:
        """Names of strategies and modes."""
        choices = tuple(
            {op.name: op.strategies[chosen.get(self.op_of[c, o], 0)].name for o, op in enumerate(block.ops)}
            for c, block in enumerate(self.base.classes)
        )  # fmt: skip
        return choices, tuple(self.modes[chosen.get(self.mode_of.get(c, -1), 0)] for c in range(len(choices)))

    def parameters(self, models: Models) -> list[Table]:
        """What the parameters of models with the same classes take and hold."""
        found, base = [], next(iter(models.values()))
        unpaid = {member for group in base.ties for member in group[1:]}
        for c, block in enumerate(base.classes):
            own = [model.classes[c] for model in (models.values() if c in self.mode_of else [base])]
            for o, op in enumerate(block.ops):
                if op.kind == "parameter":
                    held = float((c, op.name) not in unpaid)
                    parts = ("forward_s", "backward_s", "backward_weight_s", "step_s", "static_bytes")
                    entries = np.array([[[getattr(s, part) for s in b.ops[o].strategies] for b in own] for part in parts], dtype=float)
                    entries[3:] *= held
                    found += self._by_mode(c, block.count * entries, [self.op_of[c, o]], _HELD)
        return found

    def _choice(self, size: int) -> int:
        """The number of a new choice; -1 where there is only one."""
        if size == 1:
            return -1
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _blocks(self, c: int) -> list[AnnotatedBlock]:
        """A class in each of its modes."""
        return [model.classes[c] for model in (self.models if c in self.mode_of else self.models[:1])]

    def _table(self, variables: Sequence[int], entries: np.ndarray, counts: tuple[str, ...]) -> Table:
        """A table over `variables` in any order (-1: no choice); `entries` have an axis of parts before them."""
        places = sorted(range(len(variables)), key=lambda place: variables[place])
        entries = entries.transpose(0, *(place + 1 for place in places))
        scope = tuple(variables[place] for place in places)
        while -1 in scope:
            place = scope.index(-1)
            entries, scope = entries.take(0, axis=place + 1), scope[:place] + scope[place + 1 :]
        for place in range(len(scope) - 1, 0, -1):  # a choice that is there twice
            if scope[place] == scope[place - 1]:
                entries = np.moveaxis(np.diagonal(entries, axis1=place, axis2=place + 1), -1, place)
                scope = scope[:place] + scope[place + 1 :]
        return Table(scope, entries, counts)

    def _by_mode(self, c: int, entries: np.ndarray, variables: list[int], counts: tuple[str, ...]) -> list[Table]:
        """The table of a class of which the first of `variables` is its mode, added before them; none if it is zero.  `entries`: part,
        mode, variables."""
        if not entries.any():
            return []
        if entries.shape[1] > 1 and bool(np.all(entries == entries[:, :1])):
            entries = entries[:, :1]
        return [self._table([self.mode_of[c] if entries.shape[1] > 1 else -1, *variables], entries, counts)]

    def _add_class(self, c: int) -> None:
        blocks = self._blocks(c)
        self._add_ops(c, blocks)
        base = blocks[0]
        readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for o, op in enumerate(base.ops):
            for slot, value in enumerate(op.inputs):
                readers[value].append((o, slot))
        kept = [_kept(block) for block in blocks]
        views = self._views(c, base, readers, kept)
        self._add_kept(c, base.count, kept, views)
        maker = {value: (o, slot) for o, op in enumerate(base.ops) for slot, value in enumerate(op.outputs)}
        for value, reading in readers.items():
            o, slot = maker[value]
            have = [s.outputs[slot] for s in base.ops[o].strategies]
            looks = [views.get((r, value), self._itself(c, r)) for r, _ in reading]
            needs = [
                [base.ops[r].strategies[n].inputs[place] for n in look.strategies] for (r, place), look in zip(reading, looks, strict=True)
            ]
            conversions = [block.values[value].conversions for block in blocks]
            self._add_link(c, base.count, have, needs, conversions, [self.op_of[c, o], *(look.variable for look in looks)])

    def _itself(self, c: int, o: int) -> _View:
        return _View(self.op_of[c, o], range(len(self.base.classes[c].ops[o].strategies)))

    def _views(
        self, c: int, base: AnnotatedBlock, readers: dict[str, list[tuple[int, int]]], kept: list[dict[str, dict[int, np.ndarray]]]
    ) -> dict[tuple[int, str], _View]:
        """What others see of an op's choice through a value that several ops read or save: fewer choices than the op has strategies."""
        seen: dict[tuple[int, str], list[list]] = defaultdict(list)
        for of_mode in kept:
            for key, sizes in of_mode.items():
                for o in sizes if len(sizes) > 1 else ():
                    seen[o, Saved(key, 0).value].append(sizes[o].tolist())
        for value, reading in readers.items():
            for o, slot in reading:
                if len(reading) > 1 or (o, value) in seen:
                    seen[o, value].append([s.inputs[slot] for s in base.ops[o].strategies])
        for of_mode in kept:  # what an op alone saves of such a value must be seen too
            for key, sizes in of_mode.items():
                for o in sizes if len(sizes) == 1 else ():
                    if (o, Saved(key, 0).value) in seen:
                        seen[o, Saved(key, 0).value].append(sizes[o].tolist())
        found = {}
        for (o, value), parts in seen.items():
            kinds: dict[tuple, int] = {}
            kind = np.array([kinds.setdefault(parts_of, len(kinds)) for parts_of in zip(*parts, strict=True)])
            if len(kinds) == len(kind):
                continue
            choice = self._choice(len(kinds))
            if choice >= 0:
                allowed = kind[:, None] == np.arange(len(kinds))
                self.tables.append(self._table([self.op_of[c, o], choice], _where(allowed), _WAYS))
            found[o, value] = _View(choice, [int(np.argmax(kind == k)) for k in range(len(kinds))])
        return found

    def _add_ops(self, c: int, blocks: list[AnnotatedBlock]) -> None:
        """What each op costs by itself."""
        for o, op in enumerate(blocks[0].ops):
            if op.kind != "parameter":
                own = [block.ops[o].strategies for block in blocks]
                seconds = np.array([[[s.forward_s for s in of] for of in own], [[s.backward_s for s in of] for of in own]])
                self.tables += self._by_mode(c, blocks[0].count * seconds, [self.op_of[c, o]], _WAYS)
                parts = ("backward_weight_s", "step_s", "static_bytes")
                besides = np.array([[[getattr(s, part) for s in of] for of in own] for part in parts], dtype=float)
                self.tables += self._by_mode(c, blocks[0].count * besides, [self.op_of[c, o]], _BESIDES)

    def _add_kept(
        self, c: int, count: int, kept: list[dict[str, dict[int, np.ndarray]]], views: dict[tuple[int, str], _View]
    ) -> None:
        """What forward keeps of a class: each tensor once."""
        counts = ("kept",) if c in self.layers else ("kept_by_ends",)
        by_scope: dict[tuple[int, ...], np.ndarray] = {}
        for mode, of_mode in enumerate(kept):
            for key, by_op in of_mode.items():
                looks = {o: views.get((o, Saved(key, 0).value), self._itself(c, o)) for o in sorted(by_op)}
                sizes = {look.variable if look.variable >= 0 else -1 - o: by_op[o][list(look.strategies)] for o, look in looks.items()}
                parts = [tuple(sizes)]
                if prod(map(len, sizes.values())) * len(kept) > _LARGEST:  # no tensor is smaller than the mean of what ops save of it
                    self.is_exact, parts = False, [(variable,) for variable in sizes]
                for scope in parts:
                    shape = tuple(len(sizes[variable]) for variable in scope)
                    largest = np.zeros(shape)
                    for axis, variable in enumerate(scope):
                        largest = np.maximum(largest, sizes[variable].reshape([-1 if a == axis else 1 for a in range(len(scope))]))
                    entries = by_scope.setdefault(scope, np.zeros((len(kept), *shape)))
                    entries[mode] += largest * count / len(parts)
        for scope, entries in by_scope.items():
            self.tables += self._by_mode(c, entries[None], [max(variable, -1) for variable in scope], counts)

    def _add_edge(self, edge: BoundaryEdge) -> None:
        """What changes between segments."""
        source, target = self.base.classes[edge.source], self.base.classes[edge.target]
        o = _place(source, source.outputs[edge.source_output])
        r = _place(target, target.inputs[edge.target_input])
        have = [s.inputs[0] for s in source.ops[o].strategies]
        needs = [[s.outputs[0] for s in target.ops[r].strategies]]
        self._add_link(-1, edge.count, have, needs, [edge.conversions], [self.op_of[edge.source, o], self.op_of[edge.target, r]])

    def _add_link(
        self, c: int, count: int, have: list[Layout], needs: list[list[Layout]],
        conversions: list[dict[tuple[Layout, Layout], Conversion]], variables: list[int],
    ) -> None:  # fmt: skip
        """What it takes to get a value from the layout that its maker delivers to those that its readers need."""
        wanted = {layout: place for place, layout in enumerate(dict.fromkeys(layout for need in needs for layout in need))}
        made = {layout: place for place, layout in enumerate(dict.fromkeys(have))}
        if len(wanted) == len(made) == 1 and wanted.keys() == made.keys():
            return
        prices = np.stack([_price_matrices(made, wanted, of) for of in conversions], 1)  # way, mode, have, need
        if prices.shape[1] > 1 and np.array_equal(prices[:, :1].repeat(prices.shape[1], 1), prices):
            prices = prices[:, :1]
        prices = prices[:, :, [made[layout] for layout in have]]
        prices = count * prices if count else np.where(np.isinf(prices), np.inf, 0.0)
        places = [np.array([wanted[layout] for layout in need]) for need in needs]
        mode = self.mode_of[c] if prices.shape[1] > 1 else -1
        if prod([prices.shape[1], len(have), *map(len, places)]) > _LARGEST:  # all readers together pay at least the mean of what each pays
            self.is_exact = False
            for place, variable in zip(places, variables[1:], strict=True):
                self.tables.append(self._table([mode, variables[0], variable], prices[:, :, :, place] / len(places), _WAYS))
            return
        shape = [1] * len(places)
        total = np.zeros((*prices.shape[:3], *shape))
        for number in range(len(wanted)):
            needed = np.zeros(shape, dtype=bool)
            for axis, place in enumerate(places):
                needed = needed | (place == number).reshape([-1 if a == axis else 1 for a in range(len(places))])
            total = total + np.where(needed, prices[:, :, :, number].reshape(*prices.shape[:3], *shape), 0.0)
        if total.any():
            self.tables.append(self._table([mode, *variables], total, _WAYS))

    def _add_tie(self, group: tuple[tuple[int, str], ...]) -> None:
        """One tensor is stored one way."""
        (c, name), *others = group
        first = _place(self.base.classes[c], name)
        placed = [s.outputs[0].value for s in self.base.classes[c].ops[first].strategies]
        for index, other in others:
            o = _place(self.base.classes[index], other)
            elsewhere = [s.outputs[0].value for s in self.base.classes[index].ops[o].strategies]
            same = np.array([[a == b for b in elsewhere] for a in placed])
            self.tables.append(self._table([self.op_of[c, first], self.op_of[index, o]], _where(same), _WAYS))


def _kept(block: AnnotatedBlock) -> dict[str, dict[int, np.ndarray]]:
    """For each tensor that a segment keeps until its backward: op -> bytes, by strategy.  Of a class that recomputes, its inputs."""
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    if block.recompute:
        for name in block.inputs:
            o = _place(block, name)
            found[f"{name}:input"][o] = np.array([input_bytes(block, name, s.outputs[0]) for s in block.ops[o].strategies])
        return found
    for o, op in enumerate(block.ops):
        for n, strategy in enumerate(op.strategies):
            for saved in strategy.saved:
                if o not in found[saved.key]:
                    found[saved.key][o] = np.zeros(len(op.strategies))
                found[saved.key][o][n] = max(found[saved.key][o][n], saved.size_bytes)
    return found


def _where(allowed: np.ndarray) -> np.ndarray:
    """Seconds of forward and of backward that let only what is `allowed` be chosen."""
    return np.repeat(np.where(allowed, 0.0, np.inf)[None], 2, axis=0)


def _price_matrices(made: dict[Layout, int], wanted: dict[Layout, int], conversions: dict[tuple[Layout, Layout], Conversion]) -> np.ndarray:
    """Seconds of forward and of backward to get from each layout to each other; infinite where that is impossible."""
    found = np.full((2, len(made), len(wanted)), np.inf)
    for (have, need), conversion in conversions.items():
        if have in made and need in wanted:
            found[:, made[have], wanted[need]] = conversion.forward_s, conversion.backward_s
    for layout, place in made.items():
        if layout in wanted:
            found[:, place, wanted[layout]] = 0.0
    return found


def _place(block: AnnotatedBlock, name: str) -> int:
    return next(o for o, op in enumerate(block.ops) if op.name == name)

