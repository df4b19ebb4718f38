"""Families of placements of one candidate: what no placement of a family goes below, and the proof that none is faster than the best found.

A *family* leaves each op some of its strategies.  Of a segment of each class the least of everything (seconds forward, and for each
recompute mode seconds backward and bytes kept; static bytes, seconds once a step) is found by elimination, each by itself, and so is what
is least of several of them together, by mode.  A row of such segments, staged best (`best_staging`), bounds the family: no staging takes
longer where its segments take and hold less.  The bound is loose by as much as the fastest placement of the family is not its leanest, and
so a family is split in two, at the op whose strategies differ most between placements that may be best, until its bound reaches the time of
the best plan (branch and bound).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from statistics import median_high

import numpy as np

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.bounds.cell import Cell, alone, together
from autopar.solve.bounds.family import EVERY, Allowed, Family, Part
from autopar.solve.costs.pipeline_cost import blocks_of, crossing_bytes, units_of
from autopar.solve.costs.placement_cost import Choices, SegmentCost, input_bytes
from autopar.solve.costs.recompute_mix import Models, hides
from autopar.solve.elimination.bucket_elimination import Question, Tables
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.integer_program.lp_relaxation import least_saved
from autopar.solve.staging.unit_row import Row, in_first

_TIMES = (1.0, 2.0, 4.0)
"""Prices of a byte that bounds look at, in times of the one that is best for all ranks together."""

_LATE, _TIMES_LATE = (0.5, 0.9), (1.0, 2.0)
"""Parts of the micro-batches that a rank holds which wait for gradients of parameters, and prices of a byte for those."""

_SLACK_S = 1e-12
"""Rounding of sums of seconds."""


@dataclass(frozen=True, slots=True)
class _Price:
    """Seconds for a byte that a micro-batch keeps and for a static one.  `late`: so much of what a micro-batch keeps is counted as what it
    holds while it waits for gradients of parameters; `late_by_ends`: of what segments beside blocks keep."""

    kept_s: float
    static_s: float
    late: float = 0.0
    late_by_ends: float = 0.0


_FREE = _Price(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Least:
    """Of a segment: what no placement goes below, by mode, forward and backward together (`work_s`), and by prices of bytes and mode
    (`lines`): seconds of a micro-batch and its share of those once a step, and what the bytes are worth.  `differs_s`: by how many seconds
    once a step a placement takes more in a mode than in the first, at least and at most."""

    costs: tuple[SegmentCost, ...]
    work_s: tuple[float, ...]
    lines: dict[_Price, tuple[float, ...]]
    differs_s: tuple[tuple[float, float], ...]


@dataclass
class Families:
    """Of one candidate; `models` by recompute mode, `cell` what it shares with others.  `held`: how often ranks hold what forward keeps;
    `price`: seconds that a byte kept is likely to be worth.  `parts_backward`: whether some schedule does (`is_parted`)."""

    models: Models
    cell: Cell
    held: tuple[float, ...]
    price: float
    parts_backward: bool = False
    known: dict[tuple, _Least | None] = field(default_factory=dict)
    more_s: dict[tuple, dict[int, np.ndarray]] = field(default_factory=dict)
    joined: dict[tuple, list[float] | None] = field(default_factory=dict)
    unit_tables: dict[tuple[int, ...], tuple[Tables, list[Stack]]] = field(default_factory=dict)
    singles: dict[tuple[int, bool], tuple[Tables, list[Stack], Models]] = field(
        default_factory=dict
    )
    last_beside: tuple = (None, ())  # a family and what its rows have beside costs

    @property
    def first(self) -> AnnotatedModel:
        return next(iter(self.models.values()))

    def root(self) -> Family:
        return Family(tuple({} for _ in self.first.classes))

    def least_and_slack_s(self, family: Family) -> tuple[tuple[float, float], tuple[float, float]]:
        """(least, slack) in seconds of forward of a block, and of what it takes once a step: how much more than the least either may be
        before that says nothing of its backward, in the mode where that is most; 0 if there are blocks of several classes."""
        least = self.least(family, *self.repeated) if self.repeated else None
        if least is None:
            return (0.0, 0.0), (0.0, 0.0)
        forward_s, once_s = least.costs[0].forward_s, least.costs[0].step_s
        more_s = more_once_s = 0.0
        _, works_s = above(
            least, Part((forward_s, forward_s), (once_s, once_s)), self.first.num_microbatches
        )
        for own, whole_s, work_s in zip(least.costs, works_s, least.work_s, strict=True):
            more_s = max(more_s, whole_s - own.forward_s - own.backward_s)
            more_once_s = max(
                more_once_s,
                self.first.num_microbatches
                * (whole_s - max(work_s, own.forward_s + own.backward_s)),
            )
        return (forward_s, once_s), (more_s, more_once_s)

    @cached_property
    def repeated(self) -> tuple[int, bool] | None:
        """What `least` is asked of a block that reads another of its class, if blocks are all of one."""
        if len(self._layers) > 1:
            return None
        return next((key for key in self.cell.keys if key[0] in self._layers and key[1]), None)

    @cached_property
    def hides(self) -> bool:
        """Whether recomputation may pay in a pipeline where memory does not ask for it."""
        return hides(self.models)

    def row(
        self, family: Family, several: bool, modes: int, closely: bool = True, part: Part = EVERY
    ) -> Row | None:
        """Segments of which each costs what no placement of the family goes below, in the first of the modes; None if there is none.
        `closely`: together with what stands beside it, too.  `part`: of those placements alone, so that backward of the repeated block
        takes no less than what it takes in all leaves.

        What the last segment gives back is what it keeps; but with `several` stages a rank it may not be held when most else is, so that
        a rank may need less where that is larger.
        """
        base, keys = self.first, self.cell.keys
        found = {key: self.least(family, *key) for key in set(keys)}
        if None in found.values():
            return None
        costs_of, works_of = (
            {key: least.costs for key, least in found.items()},
            {key: least.work_s for key, least in found.items()},
        )
        if self.repeated:
            own = found[self.repeated]
            if part.forward_s[1] < own.costs[0].forward_s or part.once_s[1] < own.costs[0].step_s:
                return None
            costs_of[self.repeated], works_of[self.repeated] = above(
                own, part, base.num_microbatches
            )
        if several:  # a stage may be held less often than it waits, so that a segment that keeps more may need less
            costs_of = {
                key: [replace(cost, late_bytes=0, again_bytes=0) for cost in of]
                for key, of in costs_of.items()
            }
        costs, work_s = ([[of[key][mode] for key in keys] for mode in range(len(self.models))]
                         for of in (costs_of, works_of))  # fmt: skip
        lines, repeats = [], base.last in self._layers
        for price in self._prices:
            ends = replace(price, kept_s=0.0) if several else price
            of_keys = {
                key: least.lines[price if key[0] in self._layers else ends]
                for key, least in found.items()
            }
            if not (several and price.late):
                by_mode = [[of_keys[key][mode] for key in keys] for mode in range(len(self.models))]
                lines.append(
                    (
                        price.kept_s,
                        price.static_s,
                        price.late,
                        price.late if repeats else price.late_by_ends,
                        by_mode,
                    )
                )
        joined = {
            numbers: self._joined_s(family, numbers, several)
            for numbers in (self.units if closely else ())
        }
        if None in joined.values():
            return None
        for numbers, joined_s in joined.items():
            self._join(numbers, joined_s, costs, [work_s, *(by_mode for *_, by_mode in lines)])
        crossing, ties, most_freed = self._beside(family)
        freed = most_freed if several and base.last is not None else None
        models = dict(islice(self.models.items(), modes))
        if modes < len(self.models):  # in whichever mode a placement runs: it may have to recompute
            work_s, *of_lines = (
                [np.min(by_mode, axis=0).tolist()] * modes
                for by_mode in (work_s, *(by_mode for *_, by_mode in lines))
            )
            lines = [
                (*price, by_mode) for (*price, _), by_mode in zip(lines, of_lines, strict=True)
            ]
        return Row.of_costs(
            models, in_first(costs, modes), crossing, ties, freed, work_s, lines, most_freed
        )

    def _beside(self, family: Family) -> tuple[list[int], list[tuple[int, float]], int]:
        """What a row has beside what its segments cost: bytes that cross into each segment, bytes and seconds once a step of each tie,
        and bytes that the last segment keeps at most.  The same family is mostly asked for several times, one after the other."""
        if self.last_beside[0] is not family:
            base = self.first
            blocks = [
                _narrowed(block, of) for block, of in zip(base.classes, family.allowed, strict=True)
            ]
            left = [{op.name: op.strategies for op in block.ops} for block in blocks]
            sizes = [[min(block.message_bytes(name, s.outputs[0]) for s in of[name]) for name in block.inputs]
                     for block, of in zip(blocks, left, strict=True)]  # fmt: skip
            ties = [
                self._least_of_payer(family, base.segments[number], name)
                for (number, name), *_ in (s.paying for s in base.shared)
            ]
            most_freed = 0 if base.last is None else _most_kept(blocks[base.last])
            self.last_beside = family, (crossing_bytes(base, sizes), ties, most_freed)
        return self.last_beside[1]

    def _least_of_payer(self, family: Family, c: int, name: str) -> tuple[int, float]:
        """Bytes, and seconds once a step in whichever mode, of a parameter of a class at least."""
        number = [op.name for op in self.first.classes[c].ops].index(name)
        by_mode = [
            [model.classes[c].ops[number].strategies[n] for n in self._left(family, c, number)]
            for model in self.models.values()
        ]
        return min(s.static_bytes for s in by_mode[0]), min(s.step_s for of in by_mode for s in of)

    def _join(
        self, numbers: tuple[int, ...], joined_s: tuple[list[float], list[list[float]]], costs: list[list[SegmentCost]],
        least_s: Sequence[list[list[float]]],
    ) -> None:  # fmt: skip
        """Have the block of a unit take what it takes at least together with the segments beside it (`_joined_s`), less what these do.
        What backward takes more may be gradients of parameters, for which no other rank waits.  `least_s`: work and lines by mode and
        segment."""
        (forward_s, *rest), together_s = joined_s
        (block,) = (number for number in numbers if self.first.segments[number] in self._layers)
        others = [number for number in numbers if number != block]
        for own, backward_s in zip(costs, rest, strict=True):
            more_s = [
                max(whole_s - sum(getattr(own[n], part) for n in numbers), 0.0)
                for part, whole_s in (("forward_s", forward_s), ("backward_s", backward_s))
            ]  # fmt: skip
            cost = own[block]
            own[block] = replace(cost, forward_s=cost.forward_s + more_s[0], backward_s=cost.backward_s + more_s[1],
                                 weight_s=cost.weight_s + more_s[1])  # fmt: skip
        for whole_s, by_mode in zip(together_s, least_s, strict=True):
            for own, in_mode_s in zip(by_mode, whole_s, strict=True):
                own[block] = max(own[block], in_mode_s - sum(own[n] for n in others))

    def _joined_s(
        self, family: Family, numbers: tuple[int, ...], several: bool
    ) -> tuple[list[float], list[list[float]]] | None:
        """What the segments of a unit take at least: seconds of forward and of backward in each mode; by mode, those of both together and
        what the lines' prices say.  None if no placement of theirs is consistent."""
        own = [self.first.segments[number] for number in numbers]
        key = numbers, several, family.key(own)
        if key not in self.joined:
            tables, parameters = self._unit(numbers)
            asked = [
                Question(backward=0.0),
                *(Question(forward=0.0, mode=mode) for mode in self.models),
            ]
            prices = [price for price in self._prices if not (several and price.late)]
            priced = [
                replace(question, kept_by_ends=question.kept_by_ends * (not several), late_by_ends=question.late_by_ends * (not several))
                for question in self._priced(prices)
            ]  # fmt: skip
            found = tables.least(
                [*asked, *self._by_mode([Question(), *priced])], parameters, family.by_op(own)
            )
            cost_s = found and np.split(found.cost_s, [len(asked)])
            self.joined[key] = cost_s and (
                cost_s[0].tolist(),
                cost_s[1].reshape(-1, len(self.models)).tolist(),
            )
        return self.joined[key]

    def _unit(self, numbers: tuple[int, ...]) -> tuple[Tables, list[Stack]]:
        """What the segments of a unit cost together, and what their parameters do."""
        if numbers not in self.unit_tables:
            models = {mode: together(model, numbers) for mode, model in self.models.items()}
            self.unit_tables[numbers] = (
                self.cell.unit(numbers),
                self.cell.unit(numbers).parameters(models),
            )
        return self.unit_tables[numbers]

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """The segments of each unit that has several, each of another class."""
        return [
            tuple(of)
            for of in units_of(self.first)
            if 1 < len(of) == len({self.first.segments[n] for n in of})
        ]

    @cached_property
    def _layers(self) -> set[int]:
        """Classes of blocks."""
        return {self.first.segments[number] for number in blocks_of(self.first)}

    @cached_property
    def _prices(self) -> list[_Price]:
        """For ranks that hold what is kept often, and for those that do so seldom; then for those that wait."""
        often, price = sorted({max(self.held), min(self.held)}), self.price
        found = [
            _Price(0.0, 0.0),
            *(
                _Price(times * price, times * price / held)
                for times in _TIMES
                if price
                for held in often
            ),
        ]
        waiting = (
            [(times * price, late) for times in _TIMES_LATE for late in _LATE]
            if self.parts_backward and price
            else []
        )
        return found + [
            _Price(kept_s, kept_s / often[-1], late, 1 - 1 / self.first.pipeline.ranks)
            for kept_s, late in waiting
        ]

    def least(self, family: Family, c: int, closed: bool) -> _Least | None:
        key = c, closed, family.key([c])
        if key not in self.known:
            self.known[key] = self._eliminated(c, closed, family)
        return self.known[key]

    @cached_property
    def _questions(self) -> list[Question]:
        """What is asked of a segment, each by itself."""
        modes = tuple(self.models)
        asked = [
            Question(backward=0.0),
            Question(0.0, 0.0, static=1.0),
            Question(forward=0.0, weight=-1.0, mode=modes[0]),
        ]
        asked += [Question(forward=0.0, mode=mode) for mode in modes]
        asked += [Question(0.0, 0.0, step=1.0, mode=mode) for mode in modes]
        asked += [Question(0.0, 0.0, kept=1.0, kept_by_ends=1.0, mode=mode) for mode in modes]
        return asked + [
            Question(0.0, 0.0, late=1.0, mode=mode) for mode in modes if self.parts_backward
        ]

    def _eliminated(self, c: int, closed: bool, family: Family) -> _Least | None:
        modes, asked, prices = tuple(self.models), self._questions, self._prices
        if c not in self._layers:
            prices = list(
                dict.fromkeys([*prices, *(replace(price, kept_s=0.0) for price in prices)])
            )
        tables, parameters, single = self._single(c, closed)
        priced, by_mode = self._priced(prices), self._by_mode
        if c not in self._layers:  # which do not recompute
            priced, by_mode = (
                [replace(of, kept=of.kept_by_ends, late=of.late_by_ends) for of in priced],
                list,
            )
        found = tables.least(
            [*asked, *by_mode([Question(), *priced])], parameters, family.by_op([c])
        )
        if found is None:
            return None
        forward_s, static, input_s, *rest = found.cost_s.tolist()[: len(asked)]
        each = np.broadcast_to(
            found.cost_s[len(asked) :].reshape(1 + len(prices), -1), (1 + len(prices), len(modes))
        )
        work_s, *lines = map(tuple, each.tolist())
        blocks = [_narrowed(model.classes[0], family.allowed[c]) for model in single.values()]
        rest += [0.0] * (0 if self.parts_backward else len(modes))  # nothing waits
        weight_s = max(rest[0] - input_s, 0.0)  # others wait for no less than the rest of backward
        costs = tuple(
            SegmentCost(forward_s, backward_s, weight_s, step_s, round(static), round(kept), _transient(block),
                        late_bytes=round(late - kept), again_bytes=_again(block))
            for block, backward_s, step_s, kept, late in zip(blocks, *np.reshape(rest, (4, len(modes))).tolist(), strict=True)
        )  # fmt: skip
        return _Least(
            costs,
            work_s,
            dict(zip(prices, lines, strict=True)),
            tuple(_differs_s(blocks[0], block) for block in blocks),
        )

    def _by_mode(self, questions: Iterable[Question]) -> list[Question]:
        """Each of them in each mode."""
        return [replace(question, mode=mode) for question in questions for mode in self.models]

    def _priced(self, prices: Sequence[_Price]) -> list[Question]:
        """What a segment takes for a micro-batch and, of what it takes once a step, its share, with bytes kept and static at prices."""
        return [
            Question(
                step=1 / self.first.num_microbatches, static=price.static_s,
                kept=price.kept_s * (1 - price.late), late=price.kept_s * price.late,
                kept_by_ends=price.kept_s * (1 - price.late_by_ends), late_by_ends=price.kept_s * price.late_by_ends,
            ) for price in prices
        ]  # fmt: skip

    def _single(self, c: int, closed: bool) -> tuple[Tables, list[Stack], Models]:
        """What one segment costs, what its parameters do, and the segment as a model of its own."""
        if (c, closed) not in self.singles:
            tables = self.cell.single(c, closed)
            models = {mode: alone(model, c, closed) for mode, model in self.models.items()}
            self.singles[c, closed] = tables, tables.parameters(models), models
        return self.singles[c, closed]

    # ------------------------------------------------------------------------------------------------------------ splitting

    def split(self, family: Family) -> list[Family]:
        """Two families that have the same placements together, but for strategies that no placement of it has; none of a single
        placement."""
        found = max(
            (one for c in range(len(self.first.classes)) for one in self._branches(family, c)),
            default=None,
        )
        if found is None:
            return []
        *_, c, op, more_s = found
        left = tuple(n for n in self._left(family, c, op) if np.isfinite(more_s[n]).all())
        return [
            replace(
                family,
                allowed=(
                    *family.allowed[:c],
                    {**family.allowed[c], op: part},
                    *family.allowed[c + 1 :],
                ),
            )
            for part in (_halves(left, more_s) if len(left) > 1 else [left])
        ]

    def only(self, family: Family) -> Choices:
        """The placement of a family of one."""
        return tuple(
            {op.name: op.strategies[allowed.get(o, (0,))[0]].name for o, op in enumerate(block.ops)}
            for block, allowed in zip(self.first.classes, family.allowed, strict=True)
        )  # fmt: skip

    def _left(self, family: Family, c: int, op: int) -> tuple[int, ...]:
        return family.allowed[c].get(
            op, tuple(range(len(self.first.classes[c].ops[op].strategies)))
        )

    def _branches(
        self, family: Family, c: int
    ) -> Iterator[tuple[float, float, bool, int, int, np.ndarray]]:
        """For each op of a class that has a choice: by how many seconds the least of all that is asked of a segment rises at least once a
        strategy is chosen, by how many it may rise, whether the op is a parameter, an input or an output, which others see, class, op, and
        seconds by strategy and question."""
        block = self.first.classes[c]
        open_ops = [o for o in range(len(block.ops)) if len(self._left(family, c, o)) > 1]
        more_s = self._more_s(family, c) if open_ops else {}
        for o in open_ops:
            own = more_s.get(o, np.zeros((len(block.ops[o].strategies), 1)))
            rises = own[list(self._left(family, c, o))].sum(axis=1)
            most = rises[np.isfinite(rises)].max(initial=0.0)
            yield (
                block.count * float(rises.min()),
                block.count * float(most),
                block.ops[o].kind != "op",
                c,
                o,
                own,
            )

    def _more_s(self, family: Family, c: int) -> dict[int, np.ndarray]:
        """Op -> by strategy and question, how many seconds more than at least a segment takes whose op runs the strategy: a block by
        itself, others with what is in their unit."""
        beside = next(
            (
                of
                for of in self.units
                if c not in self._layers and c in (self.first.segments[n] for n in of)
            ),
            None,
        )
        own = [self.first.segments[n] for n in beside or ()] or [c]
        key = c, beside, family.key(own)
        if key not in self.more_s:
            closed = (c, True) in self.cell.keys
            tables, parameters = self._unit(beside) if beside else self._single(c, closed)[:2]
            first = next(iter(self.models))  # a mode changes little of what strategies differ in
            questions = [
                self._in_seconds(replace(question, mode=first)) for question in (Question(), *self._questions)
                if question.weight == 0.0 and question.mode in (None, first)
            ]  # fmt: skip
            found = tables.least_with(questions, parameters, family.by_op(own))
            of_class = {
                op: [*cost_s, *self._sent_s(c, op)]
                for (place, op), cost_s in found.items()
                if own[place] == c
            }
            self.more_s[key] = {
                op: np.transpose([of - min(of) for of in cost_s]) for op, cost_s in of_class.items()
            }
        return self.more_s[key]

    def _sent_s(self, c: int, op: int) -> list[np.ndarray]:
        """By strategy of an input: seconds of the message that brings it, and of the one with its gradient, if a stage begins there."""
        block, setting = self.first.classes[c], self.first.pipeline
        if setting is None or (name := block.ops[op].name) not in block.inputs:
            return []
        return [
            2
            * setting.hop_s_per_byte
            * np.array([block.message_bytes(name, s.outputs[0]) for s in block.ops[op].strategies])
        ]

    def _in_seconds(self, question: Question) -> Question:
        """A question in seconds of a micro-batch."""
        each, often = 1 / self.first.num_microbatches, median_high(self.held)
        return replace(
            question, step=question.step * each, kept=question.kept * self.price, kept_by_ends=question.kept_by_ends * self.price,
            late=question.late * self.price, static=question.static * self.price / often,
        )  # fmt: skip


def above(
    least: _Least, part: Part, micro_batches: int
) -> tuple[tuple[SegmentCost, ...], tuple[float, ...]]:
    """Costs of the placements of a part, and seconds of forward and of backward together.  What backward takes more may be gradients of
    parameters, for which no other rank waits."""
    found, works_s, (once_least_s, once_most_s) = [], [], part.once_s
    once_least_s = max(once_least_s, least.costs[0].step_s)
    for cost, work_s, line_s, (fewest_s, most_s) in zip(
        least.costs, least.work_s, least.lines[_FREE], least.differs_s, strict=True
    ):
        forward_s = max(cost.forward_s, part.forward_s[0])
        whole_s = max(work_s, line_s - (once_most_s + most_s) / micro_batches)
        more_s = max(whole_s - part.forward_s[1] - cost.backward_s, 0.0)
        found.append(replace(
            cost, forward_s=forward_s, backward_s=cost.backward_s + more_s, weight_s=cost.weight_s + more_s,
            step_s=max(cost.step_s, once_least_s + fewest_s),
        ))  # fmt: skip
        works_s.append(whole_s)
    return tuple(found), tuple(works_s)


def _differs_s(first: AnnotatedBlock, block: AnnotatedBlock) -> tuple[float, float]:
    """By how many seconds once a step any placement takes more in a block than in the `first`, at least and at most."""
    pairs = [
        (op.strategies, other.strategies) for op, other in zip(block.ops, first.ops, strict=True)
    ]
    each = [
        [s.step_s - other.step_s for s, other in zip(own, others, strict=True)]
        for own, others in pairs
        if own is not others
    ]
    return sum(map(min, each)) - _SLACK_S, sum(map(max, each)) + _SLACK_S


def _halves(left: tuple[int, ...], more_s: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strategies that are left in two parts: below and above the middle of what they differ in most."""
    of_left = more_s[list(left)]
    values = of_left[:, int(np.ptp(of_left, axis=0).argmax())]
    lower = (
        tuple(
            n
            for n, value in zip(left, values, strict=True)
            if value < (values.max() + values.min()) / 2
        )
        or left[:1]
    )
    return lower, tuple(n for n in left if n not in lower)


def _narrowed(block: AnnotatedBlock, allowed: Allowed) -> AnnotatedBlock:
    """A class whose ops have only the strategies that are left."""
    return replace(block, ops=tuple(
        replace(op, strategies=tuple(op.strategies[n] for n in allowed[o])) if o in allowed else op for o, op in enumerate(block.ops)
    ))  # fmt: skip


def _most_kept(block: AnnotatedBlock) -> int:
    """Bytes that a segment keeps at most."""
    if block.recompute:
        return sum(
            max(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies)
            for op in block.ops
            if op.name in block.inputs
        )
    largest: dict[str, int] = {}
    for strategy in (s for op in block.ops for s in op.strategies):
        for saved in strategy.saved:
            largest[saved.key] = max(largest.get(saved.key, 0), saved.size_bytes)
    return sum(largest.values())


def _transient(block: AnnotatedBlock) -> int:
    return block.workspace_bytes + _again(block)


def _again(block: AnnotatedBlock) -> int:
    return least_saved(block, block.inputs) if block.recompute else 0
