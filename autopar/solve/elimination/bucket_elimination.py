"""The minimal cost of any placement, for several weightings of costs at once, by bucket
elimination.

The objective of each question is a weighted sum: seconds of a micro-batch over all segments, and
bytes kept or static at a price in seconds. Layers may be recomputed; each class of them uses the
mode that is cheapest together with the placement.

Costs are tables over the few choices that they depend on. Such choices are the strategy of an op,
and what a value's producer and readers agree on (a conversion is paid once for each layout). Others
are a tensor that several ops save (kept once, at the largest size), edges between segments, and
ties. A choice is eliminated by summing the tables that contain it and minimizing over it (Dechter
1999, Artificial Intelligence 113). This is exact. For the narrow graphs of models it is much faster
than the linear program. If a table would become too large, it is split, and each part has its own
minimum (mini-buckets, Dechter and Rish 2003, J. ACM 50). The result is then still a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from itertools import chain, groupby
from math import inf, prod
from operator import attrgetter, ge
from random import Random

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.stop import check_time
from autopar.solve.costs.placement_cost import Choices, fits_together
from autopar.solve.elimination import cost_tables
from autopar.solve.elimination.cost_tables import WAYS, CostTables, Scope, Stack

_ATTEMPTS = 12
"""Number of elimination orders that are tried. The best is reused for all models with the same
structure.
"""

_AS_GOOD = 6, 5
"""The ratio 6/5: tables may be this much larger than in the model whose order is reused. It is
stored as two integers, because the number of entries may exceed every float.
"""

_ROUNDING = 1e-12
"""Relative slack for double rounding of sums (each addition rounds by 1.1e-16)."""

_Allowed = Mapping[tuple[int, int], Sequence[int]]
"""(class, op) -> indices of the strategies that the op may use."""


@dataclass(frozen=True, slots=True)
class Question:
    """The weights of a sum of costs that is to be minimized over all placements (and recompute
    modes).

    Attributes:
        forward: weight of forward seconds of a micro-batch.
        backward: weight of backward seconds of a micro-batch.
        weight: weight of the part of backward that computes gradients of parameters; may be
            negative.
        step: weight of seconds once a step.
        kept: weight of bytes that blocks keep for a micro-batch.
        kept_by_ends: the same for segments before and after the blocks.
        late: weight of bytes that blocks hold between two parts of a backward.
        late_by_ends: the same for segments before and after the blocks.
        static: weight of static bytes.
        mode: the recompute mode of layers; None lets each class choose.
    """

    forward: float = 1.0
    backward: float = 1.0
    weight: float = 0.0
    step: float = 0.0
    kept: float = 0.0
    kept_by_ends: float = 0.0
    late: float = 0.0
    late_by_ends: float = 0.0
    static: float = 0.0
    mode: str | None = None


_COUNTS = tuple(field.name for field in fields(Question) if field.name != "mode")
_counted = attrgetter(*_COUNTS)


@dataclass(frozen=True, slots=True)
class Least:
    """The minima of several questions. `cost_s` has a lower bound for each question. `is_exact`:
    for each, some placement reaches it. `decode` and `counted` describe these placements.
    """

    cost_s: np.ndarray
    is_exact: bool
    decode: Callable[[int], tuple[Choices, tuple[str, ...]]]
    """A function from the index of a question to its optimal placement (nearly optimal if not
    exact) and the recompute mode of each class.
    """
    counted: Callable[[str], np.ndarray]
    """A function from a field of `Question` to the amount of that cost in the optimal placements,
    by question.
    """

    def placement(self, question: int, model: AnnotatedModel) -> Choices | None:
        """The placement of a question for `model`. None if its layouts do not fit together, which
        happens only if tables were split (not `is_exact`).
        """
        choices, _ = self.decode(question)
        return choices if self.is_exact or fits_together(model, choices) else None


@dataclass(frozen=True, slots=True)
class _Step:
    """One elimination: the tables `parts` are summed over the choices of `scope`, and minimizing
    over the first of these gives the next table. A part is (table number, order of its axes, how
    they align with `scope`).
    """

    scope: Scope
    parts: tuple[tuple[int, tuple[int, ...], tuple[slice | None, ...]], ...]

    @property
    def variable(self) -> int:
        return self.scope[0]

    @property
    def left(self) -> Scope:
        """The choices that the resulting table depends on: `scope` without its first."""
        return self.scope[1:]

    def at(self, asked: Sequence[np.ndarray], places: Mapping[int, np.ndarray]) -> np.ndarray:
        """The cost of each value of the eliminated choice, as an array [value, question]. `asked`
        are all tables; `places` gives the values of the other choices, by question.
        """
        total = np.zeros((1, 1))
        for number, order, axes in self.parts:
            others = tuple(
                places[v] for v, axis in zip(self.left, axes[1:-1], strict=True) if axis is not None
            )
            table = asked[number].transpose(order)
            last = np.arange(table.shape[-1]) if others else slice(None)
            total = total + table[(slice(None), *others, last)]
        return total

    def added(
        self, asked: Sequence[np.ndarray], without: int = -1, besides: Sequence[np.ndarray] = ()
    ) -> np.ndarray:
        """The sum of the tables that this step reads, except table number `without` (-1: no
        exception), plus the arrays `besides`. `asked` has all tables, by number.

        The result has an axis for each choice of `scope`, then one for questions. An axis has
        length 1 if no summand depends on it.
        """
        parts = [
            asked[number].transpose(order)[axes]
            for number, order, axes in self.parts
            if number != without
        ]
        parts += besides
        total, *others = parts
        is_own = False
        for part in others:
            if is_own and all(map(ge, total.shape, part.shape)):
                total += part
            else:
                total, is_own = total + part, True
        return total


@lru_cache(maxsize=64)
def _plan(scopes: tuple[Scope, ...], sizes: tuple[int, ...]) -> tuple[_Step, ...]:
    """The eliminations in order, for tables over the choices `scopes`; choice v has `sizes[v]`
    values. A choice has several steps if its tables were too large together (`_split`). Cached.
    """
    # choice -> tables that it is in
    of: dict[int, set[int]] = {v: set() for v in range(len(sizes))}
    known = list(scopes)
    for number, scope in enumerate(scopes):
        for v in scope:
            of[v].add(number)
    steps: list[_Step] = []
    for variable in _order(scopes, sizes):
        for parts in _split(sorted(of[variable]), known, sizes):
            steps.append(_step(variable, parts, known))
            known.append(steps[-1].left)
            for v in known[-1]:
                of[v] = (of[v] - set(parts)) | {len(known) - 1}
    return tuple(steps)


def _step(variable: int, parts: Sequence[int], known: Sequence[Scope]) -> _Step:
    """The elimination of the choice `variable` from the tables with the numbers `parts`, largest
    first. `known` has the choices of each table.

    The eliminated choice is the first axis, so that the minimum runs over whole blocks of memory.
    The choices in most parts are last, so that sums run over many entries at once.
    """
    shared = Counter(v for number in parts for v in known[number])
    scope = (variable, *sorted(shared.keys() - {variable}, key=lambda v: (shared[v], v)))
    shaped = []
    for number in sorted(parts, key=lambda number: -len(known[number])):
        own = known[number]
        order = tuple(own.index(v) for v in scope if v in own)
        shaped.append(
            (
                number,
                (*order, len(own)),
                (*(slice(None) if v in own else None for v in scope), slice(None)),
            )
        )
    return _Step(scope, tuple(shaped))


_orders: dict[tuple[int, tuple[Scope, ...]], tuple[list[int], float]] = {}
"""A cache of elimination orders with their total table entries, by the number of choices and the
sets that occur together. An order that keeps tables small does so for nearly any sizes.
"""


def _order(scopes: Sequence[Scope], sizes: tuple[int, ...]) -> list[int]:
    """An order in which to eliminate all choices, which keeps tables small. Choice v has `sizes[v]`
    values.

    Models with the same structure differ in few tables, so a cached order is usually good for all
    of them. A new one is computed if the cached ones make tables over 6/5 times as large as before.
    """
    known: list[set[int]] = []
    for scope in sorted(set(scopes), key=lambda scope: (-len(scope), scope)):
        # otherwise it says nothing about the order
        if not any(other.issuperset(scope) for other in known):
            known.append(set(scope))
    key = len(sizes), tuple(tuple(sorted(scope)) for scope in known)
    if key not in _orders:
        others = [found for (count, _), found in _orders.items() if count == len(sizes)]
        priced = [(order, _entries_of(order, key[1], sizes), entries) for order, entries in others]
        good = [
            (order, entries)
            for order, entries, before in priced
            if entries * _AS_GOOD[1] <= before * _AS_GOOD[0]
        ]
        _orders[key] = (
            min(good, key=lambda found: found[1]) if good else _found_order(key[1], sizes)
        )
    return _orders[key][0]


def _found_order(scopes: Sequence[Scope], sizes: Sequence[int]) -> tuple[list[int], float]:
    """(an order of all choices, the total entries of its tables). Each step takes the choice that
    newly joins the fewest pairs of values (weighted min-fill). Of `_ATTEMPTS` orders with random
    tie-breaking, the one with the fewest entries is returned.
    """
    found: tuple[list[int], float] = [], inf
    for attempt in range(_ATTEMPTS):
        found = _one_order(scopes, sizes, Random(attempt), float(attempt > 0), found[1]) or found
    return found


def _beside(scopes: Sequence[Scope], count: int) -> dict[int, set[int]]:
    """For each choice, the other choices that occur in a table with it. `scopes` are the choices of
    each table, `count` is the number of choices.
    """
    found: dict[int, set[int]] = {v: set() for v in range(count)}
    for scope in scopes:
        for v in scope:
            found[v] |= set(scope) - {v}
    return found


def _join(beside: dict[int, set[int]], v: int) -> set[int]:
    """Eliminates choice `v` from `beside`, the graph of choices that occur together, in place.
    Returns its neighbours, which are now connected to each other.
    """
    own = beside.pop(v)
    for u in own:
        beside[u] = (beside[u] | own) - {u, v}
    return own


def _entries_of(order: Sequence[int], scopes: Sequence[Scope], sizes: Sequence[int]) -> int:
    """Total entries of all tables that arise if choices are eliminated in `order`. Choice v has
    `sizes[v]` values.
    """
    beside = _beside(scopes, len(sizes))
    return sum(sizes[v] * prod([sizes[u] for u in _join(beside, v)]) for v in order)


def _one_order(
    scopes: Sequence[Scope], sizes: Sequence[int], random: Random, noise: float, most: float
) -> tuple[list[int], float] | None:
    """(an order by weighted min-fill, total entries of its tables); None unless they are fewer than
    `most`. With `noise` 1, each score is multiplied by a random factor from 1 to 2; with 0 it
    stays. `scopes` are sets of choices that occur together, `sizes` the numbers of their values.
    """
    beside = _beside(scopes, len(sizes))

    def score(v: int) -> float:
        own, joined = beside[v], 0  # each pair from both sides
        for a in own:
            # itself, and those that it does not stand with yet
            if len(apart := own - beside[a]) > 1:
                joined += sizes[a] * (sum([sizes[b] for b in apart]) - sizes[a])
        return (joined + 2e-9 * prod([sizes[u] for u in own], start=1.0)) * (
            1 + noise * random.random()
        )  # inf where no float is as large

    scores, order, entries = {v: score(v) for v in beside}, [], 0
    while scores:
        _, v = min(zip(scores.values(), scores, strict=True))
        del scores[v]
        order.append(v)
        own = _join(beside, v)
        entries += sizes[v] * prod([sizes[u] for u in own])
        if entries >= most:
            return None
        for u, count in Counter(chain(own, own, *(beside[u] for u in own))).items():
            if count > 1:  # it stands with others than before, or two do that it stands with
                scores[u] = score(u)
    return order, entries


def _split(numbers: list[int], known: list[Scope], sizes: Sequence[int]) -> list[list[int]]:
    """The table `numbers` in groups, so that the sum of each group has at most `LARGEST` entries. A
    table that is larger alone is a group by itself. `known` has the choices of each table, `sizes`
    the numbers of their values.
    """
    groups: list[tuple[list[int], set[int]]] = []
    for number in sorted(numbers, key=lambda n: -len(known[n])):
        for group, scope in groups:
            if prod(sizes[v] for v in scope | set(known[number])) <= cost_tables.LARGEST:
                group.append(number)
                scope.update(known[number])
                break
        else:
            groups.append(([number], set(known[number])))
    return [group for group, _ in groups]


class Tables(CostTables):
    """The cost tables of a model, with functions that minimize weighted sums of them."""

    def least(
        self,
        questions: Sequence[Question],
        parameters: Sequence[Stack] = (),
        allowed: _Allowed | None = None,
    ) -> Least | None:
        """The minimal costs of placements for these questions, as a `Least` whose functions name
        the placements. None if no placement is consistent.

        `parameters` are cost tables of the parameters of a model with the same classes (see
        `CostTables.parameters`). `allowed` restricts the strategies of some ops.
        """
        found = self._eliminated(questions, parameters, allowed or {})
        if found.is_split and len({question.mode for question in questions}) > 1:
            return self._least_apart(questions, parameters, allowed)
        cost_s = np.broadcast_to(found.whole(), len(questions))
        if not np.all(np.isfinite(cost_s)):
            return None
        stacks = (*self.stacks, *parameters)
        places = cache(lambda: found.chosen(len(questions)))
        return Least(
            cost_s * (1 - _ROUNDING),
            self.is_exact and not found.is_split,
            lambda question: self._named({v: int(at[question]) for v, at in places().items()}),
            lambda name: sum(
                (stack.counted(name, places()) for stack in stacks if name in stack.counts),
                np.zeros(len(questions)),
            ),
        )

    def _least_apart(
        self, questions: Sequence[Question], parameters: Sequence[Stack], allowed: _Allowed | None
    ) -> Least | None:
        """`least` for each question separately, joined into one result; None if one of them has no
        consistent placement. It is used if a table is split: only one part then knows which modes a
        question excludes.
        """
        apart = [self.least([question], parameters, allowed) for question in questions]
        found = [least for least in apart if least is not None]
        if len(found) < len(apart):
            return None
        cost_s = np.concatenate([least.cost_s for least in found])
        is_exact = all(least.is_exact for least in found)
        return Least(
            cost_s,
            is_exact,
            lambda question: found[question].decode(0),
            lambda name: np.concatenate([least.counted(name) for least in found]),
        )

    def least_with(
        self,
        questions: Sequence[Question],
        parameters: Sequence[Stack] = (),
        allowed: _Allowed | None = None,
    ) -> dict[tuple[int, int], np.ndarray]:
        """For each (class, op) with a choice: an array [question, strategy] of the minimal cost
        over placements in which the op uses the strategy. Strategies that are not `allowed` cost
        infinity. {} if tables were split.
        """
        eliminated = self._eliminated(questions, parameters, allowed or {})
        if eliminated.is_split:
            return {}
        op_of, found = {variable: op for op, variable in self.op_of.items() if variable >= 0}, {}
        for variable, cost_s in eliminated.least_with(op_of).items():
            size = self.sizes[variable]
            found[op_of[variable]] = np.full((len(questions), size), np.inf)
            found[op_of[variable]][:, eliminated.left.get(variable, range(size))] = cost_s.T * (
                1 - _ROUNDING
            )
        return found

    def _eliminated(
        self, questions: Sequence[Question], parameters: Sequence[Stack], allowed: _Allowed
    ) -> _Eliminated:
        left = {
            self.op_of[op]: list(strategies)
            for op, strategies in allowed.items()
            if self.op_of[op] >= 0
        }
        for view, (variable, kinds) in self.seen.items():
            if variable in left:
                left[view] = np.unique(kinds[left[variable]]).tolist()
        scopes: list[Scope] = []
        asked: list[np.ndarray] = []
        counted = np.array(list(map(_counted, questions)))
        for stack in (*self.stacks, *parameters):
            weights = counted[:, [_COUNTS.index(name) for name in stack.counts]]
            if stack.counts == WAYS or weights.any():
                same = bool(np.all(weights == weights[:1]))  # then found once for all
                scopes += stack.scopes
                asked += stack.asked(weights[:1] if same else weights)
        variables = [variable for variable in self.mode_of.values() if variable >= 0]
        wanted = {question.mode for question in questions}
        if variables and wanted != {None}:
            if len(wanted) == 1:
                (mode,) = wanted
                left |= {variable: [self.modes.index(mode)] for variable in variables}
            else:
                other = np.array(
                    [
                        [question.mode not in (None, mode) for question in questions]
                        for mode in self.modes
                    ]
                )
                scopes += [(variable,) for variable in variables]
                asked += [np.where(other, np.inf, 0.0)] * len(variables)
        return _eliminated(scopes, asked, self.sizes, left)

    def _named(self, chosen: Mapping[int, int]) -> tuple[Choices, tuple[str, ...]]:
        """(for each class, op name -> strategy name; for each class, its recompute mode). `chosen`
        maps a choice to its value; others have their first value.
        """
        choices = tuple(
            {
                op.name: op.strategies[chosen.get(self.op_of[c, o], 0)].name
                for o, op in enumerate(block.ops)
            }
            for c, block in enumerate(self.base.classes)
        )
        return choices, tuple(
            self.modes[chosen.get(self.mode_of.get(c, -1), 0)] for c in range(len(choices))
        )


@dataclass(frozen=True, slots=True)
class _Eliminated:
    """The tables after eliminating all choices. `asked` has the tables over the choices of
    `scopes`, followed by the result of each step. Their last axis is questions (length 1 if equal
    for all). `left` has the allowed values of restricted choices; `sizes` has how many values each
    choice has.
    """

    steps: tuple[_Step, ...]
    scopes: Sequence[Scope]
    asked: list[np.ndarray]
    left: Mapping[int, list[int]]
    sizes: Sequence[int]

    @property
    def is_split(self) -> bool:
        """Whether some choice was eliminated in several parts, because its tables were too large
        together. The minimum is then only a lower bound.
        """
        return len({step.variable for step in self.steps}) < len(self.steps)

    def whole(self, without: int = -1) -> np.ndarray:
        """The final minimum by question, or one number for all: the sum of the tables that no step
        has read. Table number `without` is left out.
        """
        gone = {without, *(number for step in self.steps for number, *_ in step.parts)}
        return sum(
            (found.reshape(-1) for number, found in enumerate(self.asked) if number not in gone),
            np.zeros(1),
        )

    def chosen(self, questions: int) -> dict[int, np.ndarray]:
        """For each choice, an array of its value in the optimal placement of each question. A
        choice that is in no table is missing, or has its first allowed value if it is restricted.
        `questions` is their number.
        """
        places: dict[int, np.ndarray] = {}
        # of a table that was split, all parts
        for _, steps in groupby(reversed(self.steps), key=attrgetter("variable")):
            of = list(steps)
            costs = sum(
                (step.at(self.asked, places) for step in of[1:]), of[0].at(self.asked, places)
            )
            found = np.argmin(costs, axis=0)
            places[of[0].variable] = found if len(found) == questions else found.repeat(questions)
        # of what no table has
        first = {variable: np.full(questions, values[0]) for variable, values in self.left.items()}
        return first | {
            v: np.array(self.left[v])[at] if v in self.left else at for v, at in places.items()
        }

    def least_with(self, wanted: Iterable[int]) -> dict[int, np.ndarray]:
        """For each choice in `wanted`: the minimal total with each of its values, as an array
        [value, question]. The forward pass is in the steps' tables; a backward pass from last to
        first adds the rest.
        """
        first, found = len(self.asked) - len(self.steps), {}
        reader = {
            number: place for place, step in enumerate(self.steps) for number, *_ in step.parts
        }
        after: dict[
            int, np.ndarray
        ] = {}  # of a step, by its choices but the one that goes: all that its table does not count
        for place in reversed(range(len(self.steps))):
            own, number = self.steps[place], first + place
            if number not in reader:
                after[place] = self.whole(number)
            else:
                later = self.steps[reader[number]]
                total = later.added(self.asked, number, [after[reader[number]][None]])
                total = np.broadcast_to(
                    total, (*(self.sizes[v] for v in later.scope), total.shape[-1])
                )
                after[place] = _least_over(total, later.scope, own.left)
            if own.variable in wanted:
                total = own.added(self.asked, besides=[after[place][None]])
                found[own.variable] = _least_over(total, own.scope, own.scope[:1])
        return found


def _least_over(total: np.ndarray, scope: Scope, left: Scope) -> np.ndarray:
    """The minimum of `total` over all choices of `scope` except `left`, with axes in the order of
    `left` and questions last. `total` has an axis for each choice of `scope`, then one for
    questions.
    """
    axes = list(scope)
    while gone := [v for v in axes if v not in left]:
        total = np.minimum.reduce(total, axis=axes.index(gone[0]))
        axes.remove(gone[0])
    return total.transpose(*map(axes.index, left), -1)


def _eliminated(
    scopes: Sequence[Scope],
    asked: list[np.ndarray],
    all_sizes: Sequence[int],
    left: Mapping[int, list[int]],
) -> _Eliminated:
    """Eliminates all choices from the tables `asked`, which depend on the choices `scopes`, and
    appends each result to `asked`. `all_sizes` has the number of values of each choice. `left` has
    the allowed values of some. Returns both, with the steps, as an `_Eliminated`.
    """
    steps, sizes = _plan(tuple(scopes), tuple(all_sizes)), list(all_sizes)
    for variable, values in left.items():
        sizes[variable] = len(values)
    for number, scope in enumerate(scopes):
        for axis, v in enumerate(scope):
            if v in left:
                asked[number] = asked[number].take(left[v], axis=axis)
    for step in steps:
        check_time()
        asked.append(np.minimum.reduce(step.added(asked), axis=0))
    return _Eliminated(steps, [*scopes, *(step.left for step in steps)], asked, left, sizes)
