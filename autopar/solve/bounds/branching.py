"""Splits a family of placements at the op whose strategies differ most between placements that may
be optimal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from statistics import median_high

import numpy as np

from autopar.solve.bounds.candidate_facts import CandidateFacts
from autopar.solve.bounds.family import Family, left_of
from autopar.solve.bounds.segment_minima import SegmentMinima
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.elimination.bucket_elimination import Question


@dataclass(frozen=True)
class Branching:
    """Splits families of one candidate. A family is a set of placements, given by the strategies
    that each op may use. `more_s` is a cache.
    """

    facts: CandidateFacts
    minima: SegmentMinima
    more_s: dict[tuple, dict[int, np.ndarray]] = field(default_factory=dict)

    def split(self, family: Family) -> list[Family]:
        """Two families that together contain the family's placements, split by the strategies of
        one op. [] if every op has one strategy left.

        Strategies that no placement uses are dropped; if at most one is left, the result is that
        family alone.
        """
        found = max(
            (
                one
                for c in range(len(self.facts.first.classes))
                for one in self._branches(family, c)
            ),
            default=None,
        )
        if found is None:
            return []
        *_, c, op, more_s = found
        left = tuple(
            n for n in left_of(self.facts.first, family, c, op) if np.isfinite(more_s[n]).all()
        )
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
        """The placement of a family that leaves each op one strategy: for each class, op name ->
        strategy name.
        """
        return tuple(
            {op.name: op.strategies[allowed.get(o, (0,))[0]].name for o, op in enumerate(block.ops)}
            for block, allowed in zip(self.facts.first.classes, family.allowed, strict=True)
        )

    def _branches(
        self, family: Family, c: int
    ) -> Iterator[tuple[float, float, bool, int, int, np.ndarray]]:
        """A tuple for each op of class `c` that has a choice, by which ops are compared, in this
        order.

        - The seconds by which the bounds of a segment rise at least once a strategy is chosen.
        - The seconds by which they may rise.
        - Whether other segments see the op (a parameter, input or output).
        - Class and op.
        - The rise in seconds by strategy and question.
        """
        block = self.facts.first.classes[c]
        open_ops = [
            o for o in range(len(block.ops)) if len(left_of(self.facts.first, family, c, o)) > 1
        ]
        more_s = self._more_s(family, c) if open_ops else {}
        for o in open_ops:
            own = more_s.get(o, np.zeros((len(block.ops[o].strategies), 1)))
            rises = own[list(left_of(self.facts.first, family, c, o))].sum(axis=1)
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
        """For each op of class `c` with a choice: an array [strategy, question] of the seconds by
        which a minimum rises if the op uses that strategy. Blocks are considered alone, other
        segments together with their unit (their block and its neighbours). Cached.
        """
        beside = next(
            (
                of
                for of in self.facts.units
                if c not in self.facts.layers and c in (self.facts.first.segments[n] for n in of)
            ),
            None,
        )
        own = [self.facts.first.segments[n] for n in beside or ()] or [c]
        key = c, beside, family.key(own)
        if key not in self.more_s:
            closed = (c, True) in self.facts.cell.keys
            of_tables = self.facts.unit(beside) if beside else self.facts.single(c, closed)
            # a mode changes little of what strategies differ in
            first = next(iter(self.facts.models))
            questions = [
                self._in_seconds(replace(question, mode=first))
                for question in (Question(), *self.minima.questions)
                if question.weight == 0.0 and question.mode in (None, first)
            ]
            found = of_tables.tables.least_with(questions, of_tables.parameters, family.by_op(own))
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
        """A list with one array, by strategy of an op: seconds of the two messages with its value
        and with its gradient together, if a stage begins there. [] if the op is no input of its
        class, or without a pipeline.
        """
        block, setting = self.facts.first.classes[c], self.facts.first.pipeline
        if setting is None or (name := block.ops[op].name) not in block.inputs:
            return []
        return [
            2
            * setting.hop_s_per_byte
            * np.array([block.message_bytes(name, s.outputs[0]) for s in block.ops[op].strategies])
        ]

    def _in_seconds(self, question: Question) -> Question:
        """The question with weights such that the sum is in seconds per micro-batch: bytes at the
        candidate's price, and a share of the seconds once a step.
        """
        price, often = self.facts.price, median_high(self.facts.held)
        return replace(
            question,
            step=question.step * (1 / self.facts.first.num_microbatches),
            kept=question.kept * price,
            kept_by_ends=question.kept_by_ends * price,
            late=question.late * price,
            static=question.static * price / often,
        )


def _halves(left: tuple[int, ...], more_s: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The strategies `left` in two groups: below and above the middle of the column of `more_s` in
    which they differ most. Neither group is empty if there are two strategies.
    """
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
