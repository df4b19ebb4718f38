"""Minimal costs over a family's placements, for one segment and for the segments of a unit
together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autopar.ir.annotated import AnnotatedBlock
from autopar.solve.bounds.candidate_facts import NO_BYTE_PRICE, CandidateFacts
from autopar.solve.bounds.family import Family, PlacementRange, narrowed
from autopar.solve.costs.placement_cost import SegmentCost
from autopar.solve.elimination.bucket_elimination import Question
from autopar.solve.integer_program.lp_relaxation import least_saved
from autopar.solve.staging.unit_row import BytePrice

_SLACK_S = 1e-12
"""Absolute slack in seconds for rounding of sums."""


@dataclass(frozen=True, slots=True)
class SegmentMinimum:
    """Minimal costs of a segment, by recompute mode; each minimum may come from another placement.
    `work_s` is forward and backward together. `lines` has, by price of a byte and mode, seconds of
    a micro-batch with its share of seconds once a step, plus bytes at that price. `differs_s`: by
    mode, the smallest and largest difference in seconds once a step from the first mode.
    """

    costs: tuple[SegmentCost, ...]
    work_s: tuple[float, ...]
    lines: dict[BytePrice, tuple[float, ...]]
    differs_s: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class UnitMinimum:
    """Minimal joint costs of the segments of a unit (a block and its neighbours).

    They are forward seconds, and backward seconds by recompute mode. `together_s[0]` is the seconds
    of both by mode; the other entries are the same plus bytes, at one price each.
    """

    forward_s: float
    backward_s: list[float]
    together_s: list[list[float]]


@dataclass(frozen=True)
class SegmentMinima:
    """Computes minimal costs for one candidate by elimination, and caches them in `known` and
    `known_units`.
    """

    facts: CandidateFacts
    known: dict[tuple, SegmentMinimum | None] = field(default_factory=dict)
    known_units: dict[tuple, UnitMinimum | None] = field(default_factory=dict)

    def least(self, family: Family, c: int, closed: bool) -> SegmentMinimum | None:
        """The `SegmentMinimum`, over the family, of one segment of class `c`; None if the family
        has no placement for it. `closed`: it reads another segment of its class. Cached.
        """
        key = c, closed, family.key([c])
        if key not in self.known:
            self.known[key] = self._eliminated(c, closed, family)
        return self.known[key]

    def together(
        self, family: Family, numbers: tuple[int, ...], several: bool
    ) -> UnitMinimum | None:
        """The `UnitMinimum` (joint costs), over the family, of the unit with the segments
        `numbers`; None if no placement is consistent. `several`: for ranks with several stages,
        where segments outside blocks are not charged for kept bytes. Cached.
        """
        facts = self.facts
        own = [facts.first.segments[number] for number in numbers]
        key = numbers, several, family.key(own)
        if key not in self.known_units:
            unit, modes = facts.unit(numbers), facts.models
            asked = [Question(backward=0.0), *(Question(forward=0.0, mode=mode) for mode in modes)]
            priced = self._priced([price for price in facts.prices if not (several and price.late)])
            if several:
                priced = [replace(of, kept_by_ends=0.0, late_by_ends=0.0) for of in priced]
            found = unit.tables.least(
                [*asked, *self._by_mode([Question(), *priced])], unit.parameters, family.by_op(own)
            )
            self.known_units[key] = None
            if found is not None:
                (forward_s, *backward_s), together_s = (
                    of.tolist() for of in np.split(found.cost_s, [len(asked)])
                )
                by_mode = np.reshape(together_s, (-1, len(modes))).tolist()
                self.known_units[key] = UnitMinimum(forward_s, backward_s, by_mode)
        return self.known_units[key]

    @cached_property
    def questions(self) -> list[Question]:
        """The weightings of costs (questions) whose minima `_costs` needs. Each minimum is computed
        separately.
        """
        modes = tuple(self.facts.models)
        asked = [
            Question(backward=0.0),
            Question(forward=0.0, backward=0.0, static=1.0),
            Question(forward=0.0, weight=-1.0, mode=modes[0]),
        ]
        asked += [Question(forward=0.0, mode=mode) for mode in modes]
        asked += [Question(forward=0.0, backward=0.0, step=1.0, mode=mode) for mode in modes]
        asked += [
            Question(forward=0.0, backward=0.0, kept=1.0, kept_by_ends=1.0, mode=mode)
            for mode in modes
        ]
        return asked + [
            Question(forward=0.0, backward=0.0, late=1.0, mode=mode)
            for mode in modes
            if self.facts.parts_backward
        ]

    def _eliminated(self, c: int, closed: bool, family: Family) -> SegmentMinimum | None:
        facts, prices = self.facts, self.facts.prices
        asked, modes, single = self.questions, len(facts.models), facts.single(c, closed)
        if c in facts.layers:
            priced = self._by_mode([Question(), *self._priced(prices)])
        else:  # which do not recompute
            free_to_keep = [replace(price, kept_s=0.0) for price in prices]
            prices = list(dict.fromkeys([*prices, *free_to_keep]))
            priced = [
                Question(),
                *(
                    replace(of, kept=of.kept_by_ends, late=of.late_by_ends)
                    for of in self._priced(prices)
                ),
            ]
        found = single.tables.least([*asked, *priced], single.parameters, family.by_op([c]))
        if found is None:
            return None
        shape = 1 + len(prices), modes
        each = np.broadcast_to(found.cost_s[len(asked) :].reshape(shape[0], -1), shape)
        work_s, *lines = map(tuple, each.tolist())
        own = [narrowed(model.classes[0], family.allowed[c]) for model in single.models.values()]
        return SegmentMinimum(
            self._costs(found.cost_s.tolist()[: len(asked)], own),
            work_s,
            dict(zip(prices, lines, strict=True)),
            tuple(_differs_s(own[0], block) for block in own),
        )

    def _costs(
        self, answers: Sequence[float], blocks: Sequence[AnnotatedBlock]
    ) -> tuple[SegmentCost, ...]:
        """The minimal costs of a segment, one entry for each recompute mode, from the answers to
        `questions`. `blocks` has its class in each mode.
        """
        forward_s, static, input_s, *rest = answers
        rest += [0.0] * (0 if self.facts.parts_backward else len(blocks))  # nothing waits
        weight_s = max(rest[0] - input_s, 0.0)  # others wait for no less than the rest of backward
        by_mode = np.reshape(rest, (4, len(blocks))).T.tolist()
        return tuple(
            SegmentCost(
                forward_s=forward_s,
                backward_s=backward_s,
                weight_s=weight_s,
                step_s=step_s,
                static_bytes=round(static),
                kept_bytes=round(kept),
                transient_bytes=block.workspace_bytes + _again(block),
                late_bytes=round(late - kept),
                again_bytes=_again(block),
            )
            for block, (backward_s, step_s, kept, late) in zip(blocks, by_mode, strict=True)
        )

    def _by_mode(self, questions: Iterable[Question]) -> list[Question]:
        """Each question once for every recompute mode, modes fastest."""
        return [
            replace(question, mode=mode) for question in questions for mode in self.facts.models
        ]

    def _priced(self, prices: Sequence[BytePrice]) -> list[Question]:
        """For each price, a question that sums a segment's micro-batch seconds, its share of
        seconds once a step, and its kept and static bytes at that price.
        """
        return [
            Question(
                step=1 / self.facts.first.num_microbatches,
                static=price.static_s,
                kept=price.kept_s * (1 - price.late),
                late=price.kept_s * price.late,
                kept_by_ends=price.kept_s * (1 - price.late_by_ends),
                late_by_ends=price.kept_s * price.late_by_ends,
            )
            for price in prices
        ]


def least_in_range(
    least: SegmentMinimum, part: PlacementRange, micro_batches: int
) -> tuple[tuple[SegmentCost, ...], tuple[float, ...]]:
    """(minimal costs by recompute mode, forward and backward seconds together by mode) of the
    placements of `least` that are in `part`. Any extra backward may be gradients of parameters, for
    which no other rank waits.
    """
    found, works_s, (once_least_s, once_most_s) = [], [], part.once_s
    once_least_s = max(once_least_s, least.costs[0].step_s)
    for cost, work_s, line_s, (fewest_s, most_s) in zip(
        least.costs, least.work_s, least.lines[NO_BYTE_PRICE], least.differs_s, strict=True
    ):
        forward_s = max(cost.forward_s, part.forward_s[0])
        whole_s = max(work_s, line_s - (once_most_s + most_s) / micro_batches)
        more_s = max(whole_s - part.forward_s[1] - cost.backward_s, 0.0)
        found.append(
            replace(
                cost,
                forward_s=forward_s,
                backward_s=cost.backward_s + more_s,
                weight_s=cost.weight_s + more_s,
                step_s=max(cost.step_s, once_least_s + fewest_s),
            )
        )
        works_s.append(whole_s)
    return tuple(found), tuple(works_s)


def _differs_s(first: AnnotatedBlock, block: AnnotatedBlock) -> tuple[float, float]:
    """The (smallest, largest) difference in seconds once a step of `block` above `first`, over all
    placements, with a slack for rounding. Both are one class, in two recompute modes.
    """
    pairs = [
        (op.strategies, other.strategies) for op, other in zip(block.ops, first.ops, strict=True)
    ]
    each = [
        [s.step_s - other.step_s for s, other in zip(own, others, strict=True)]
        for own, others in pairs
        if own is not others
    ]
    return sum(map(min, each)) - _SLACK_S, sum(map(max, each)) + _SLACK_S


def _again(block: AnnotatedBlock) -> int:
    """A lower bound on the bytes that backward of a segment of the class recomputes; 0 if it does
    not recompute.
    """
    return least_saved(block, block.inputs) if block.recompute else 0
