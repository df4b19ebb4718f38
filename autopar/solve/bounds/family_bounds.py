"""Lower bounds on families of placements of one candidate, for proving that none is faster than the
best known plan.

A *family* restricts the strategies of ops. For a segment of each class, elimination finds the
minimum of each cost separately. The costs are forward seconds, backward seconds and kept bytes in
each recompute mode, static bytes, and seconds once a step. It also finds minima of some sums of
these. A row of segments with these minimal costs, with the best staging (`best_staging`), gives a
lower bound for the family: cheaper segments cannot make the best staging slower.

The bound is loose because the fastest placement is not also the leanest. Therefore families are
split in two until their bounds reach the time of the best plan (branch and bound). The split is at
the op whose strategies differ most between placements that may be optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from autopar.ir.annotated import AnnotatedBlock
from autopar.solve.bounds.branching import Branching
from autopar.solve.bounds.candidate_facts import CandidateFacts
from autopar.solve.bounds.family import EVERY_PLACEMENT, Family, PlacementRange, left_of, narrowed
from autopar.solve.bounds.segment_minima import (
    SegmentMinima,
    SegmentMinimum,
    UnitMinimum,
    least_in_range,
)
from autopar.solve.costs.pipeline_cost import crossing_bytes
from autopar.solve.costs.placement_cost import SegmentCost, input_bytes
from autopar.solve.staging.row_of_costs import in_first, row_of_costs
from autopar.solve.staging.unit_row import BytePrice, UnitRow

ByMode = list[list[float]]
"""Seconds, indexed by mode and segment."""


@dataclass(slots=True)
class _Costs:
    """Minimal costs of segments, each indexed [recompute mode][segment]. `work_s` is forward and
    backward together. `lines` has, for each price of a byte, seconds plus bytes at that price.
    """

    costs: list[list[SegmentCost]]
    work_s: ByMode
    lines: list[tuple[BytePrice, ByMode]]

    def join(self, numbers: tuple[int, ...], block: int, least: UnitMinimum) -> None:
        """Raises the costs of `block`, a segment of the unit `numbers`, so that the unit reaches
        its joint minimum `least`. Any extra backward may be gradients of parameters, for which no
        other rank waits.
        """
        others = [number for number in numbers if number != block]
        for own, backward_s in zip(self.costs, least.backward_s, strict=True):
            cost = own[block]
            forward_more_s = max(least.forward_s - sum(own[n].forward_s for n in numbers), 0.0)
            backward_more_s = max(backward_s - sum(own[n].backward_s for n in numbers), 0.0)
            own[block] = replace(
                cost,
                forward_s=cost.forward_s + forward_more_s,
                backward_s=cost.backward_s + backward_more_s,
                weight_s=cost.weight_s + backward_more_s,
            )
        works_s = [self.work_s, *(by_mode for _, by_mode in self.lines)]
        for whole_s, by_mode in zip(least.together_s, works_s, strict=True):
            for of_mode, in_mode_s in zip(by_mode, whole_s, strict=True):
                of_mode[block] = max(of_mode[block], in_mode_s - sum(of_mode[n] for n in others))

    def limit(self, modes: int) -> None:
        """Keeps only the first `modes` recompute modes. Work, lines and seconds once a step become
        the minimum over all modes, since a placement may have to recompute.
        """
        self.costs = in_first(self.costs, modes)
        self.work_s = _least_of_modes(self.work_s, modes)
        self.lines = [(price, _least_of_modes(by_mode, modes)) for price, by_mode in self.lines]


@dataclass(frozen=True, slots=True)
class _Beside:
    """What a row of units needs besides segment costs: lower bounds over a family.

    They are the bytes of the message into each segment, and (bytes, seconds once a step) of each
    shared parameter. `most_freed` is an upper bound on the bytes that the last segment keeps.
    """

    crossing: list[int]
    ties: list[tuple[int, float]]
    most_freed: int


class Families:
    """Computes lower bounds of families of one candidate, and splits families (`branching`). A
    family is a set of placements.
    """

    def __init__(self, facts: CandidateFacts) -> None:
        self.facts = facts
        self.minima = SegmentMinima(facts)
        self.branching = Branching(facts, self.minima)
        self._last_beside: tuple[Family, _Beside] | None = None

    def root(self) -> Family:
        """The family of all placements of the candidate: nothing is restricted."""
        return Family(tuple({} for _ in self.facts.first.classes))

    def least_and_slack_s(self, family: Family) -> tuple[tuple[float, float], tuple[float, float]]:
        """(least, slack) for dividing a family into parts, each as (forward seconds of a block, its
        seconds once a step).

        No placement of the family takes less than `least`. Beyond least + slack, neither cost
        restricts how short a backward can be, in any recompute mode. All zeros if blocks have
        several classes, or the family is empty.
        """
        least = self.minima.least(family, *self.facts.repeated) if self.facts.repeated else None
        if least is None:
            return (0.0, 0.0), (0.0, 0.0)
        forward_s, once_s = least.costs[0].forward_s, least.costs[0].step_s
        more_s = more_once_s = 0.0
        _, works_s = least_in_range(
            least,
            PlacementRange((forward_s, forward_s), (once_s, once_s)),
            self.facts.first.num_microbatches,
        )
        for own, whole_s, work_s in zip(least.costs, works_s, least.work_s, strict=True):
            more_s = max(more_s, whole_s - own.forward_s - own.backward_s)
            more_once_s = max(
                more_once_s,
                self.facts.first.num_microbatches
                * (whole_s - max(work_s, own.forward_s + own.backward_s)),
            )
        return (forward_s, once_s), (more_s, more_once_s)

    def row(
        self,
        family: Family,
        several: bool,
        modes: int,
        closely: bool = True,
        part: PlacementRange = EVERY_PLACEMENT,
    ) -> UnitRow | None:
        """A `UnitRow` (blocks with their neighbours) whose costs are lower bounds over the family,
        in the first `modes` recompute modes. None if the family is empty.

        `closely`: raise the costs of blocks to the joint minimum of their unit. `part` restricts
        the bound to the placements in a part. There, the repeated block's backward takes at least
        the total minus the forward.

        The last segment normally frees what it keeps. With `several` stages per rank it may not
        hold these bytes when most other bytes are held. A rank then needs less if that is larger.
        """
        facts = self.facts
        costs = self._costs(family, several, part)
        if costs is None or (closely and not self._join_units(costs, family, several)):
            return None
        if modes < len(facts.models):
            costs.limit(modes)
        beside = self._beside(family)
        return row_of_costs(
            dict(islice(facts.models.items(), modes)),
            costs.costs,
            arriving=beside.crossing,
            ties=beside.ties,
            freed=beside.most_freed if several and facts.first.last is not None else None,
            work_s=costs.work_s,
            lines=costs.lines,
            most_freed=beside.most_freed,
        )

    def _costs(self, family: Family, several: bool, part: PlacementRange) -> _Costs | None:
        """Lower bounds on the costs of segments in the family, each cost minimized separately. None
        if some segment has no placement in the family, or none in `part`. `several` as in `row`.
        """
        facts, keys = self.facts, self.facts.cell.keys
        found: dict[tuple[int, bool], SegmentMinimum] = {}
        for key in set(keys):
            least = self.minima.least(family, *key)
            if least is None:
                return None
            found[key] = least
        costs_of = {key: least.costs for key, least in found.items()}
        works_of = {key: least.work_s for key, least in found.items()}
        if facts.repeated:
            own = found[facts.repeated]
            if part.forward_s[1] < own.costs[0].forward_s or part.once_s[1] < own.costs[0].step_s:
                return None
            costs_of[facts.repeated], works_of[facts.repeated] = least_in_range(
                own, part, facts.first.num_microbatches
            )
        if several:  # a stage may be held less often than it waits, so that a segment that keeps more may need less
            costs_of = {
                key: tuple(replace(cost, late_bytes=0, again_bytes=0) for cost in of)
                for key, of in costs_of.items()
            }
        modes = range(len(facts.models))
        return _Costs(
            costs=[[costs_of[key][mode] for key in keys] for mode in modes],
            work_s=[[works_of[key][mode] for key in keys] for mode in modes],
            lines=self._lines(found, several),
        )

    def _lines(
        self, found: dict[tuple[int, bool], SegmentMinimum], several: bool
    ) -> list[tuple[BytePrice, ByMode]]:
        """For each price of a byte: (price, lower bounds [recompute mode][segment] on seconds plus
        bytes at that price). With `several` stages per rank, segments outside of blocks are not
        charged for kept bytes, and prices for waiting micro-batches are left out.
        """
        facts, lines = self.facts, []
        for price in facts.prices:
            if several and price.late:
                continue
            ends = replace(price, kept_s=0.0) if several else price
            of_keys = {
                key: least.lines[price if key[0] in facts.layers else ends]
                for key, least in found.items()
            }
            by_mode = [
                [of_keys[key][mode] for key in facts.cell.keys] for mode in range(len(facts.models))
            ]
            repeats = facts.first.last in facts.layers
            lines.append((replace(price, late_by_ends=price.late) if repeats else price, by_mode))
        return lines

    def _join_units(self, costs: _Costs, family: Family, several: bool) -> bool:
        """Raises, in `costs`, the costs of each unit's block so that the unit reaches its joint
        minimum. Returns False if some unit has no placement, otherwise True. `several` as in `row`.
        """
        facts = self.facts
        for numbers in facts.units:
            least = self.minima.together(family, numbers, several)
            if least is None:
                return False
            (block,) = (
                number for number in numbers if facts.first.segments[number] in facts.layers
            )
            costs.join(numbers, block, least)
        return True

    def _beside(self, family: Family) -> _Beside:
        """Lower bounds on messages and shared parameters of a family, and what its last segment
        keeps at most. The result for the latest family is cached, since it is usually requested
        several times.
        """
        if self._last_beside is None or self._last_beside[0] is not family:
            base = self.facts.first
            blocks = [
                narrowed(block, of) for block, of in zip(base.classes, family.allowed, strict=True)
            ]
            left = [{op.name: op.strategies for op in block.ops} for block in blocks]
            sizes = [
                [
                    min(block.message_bytes(name, s.outputs[0]) for s in of[name])
                    for name in block.inputs
                ]
                for block, of in zip(blocks, left, strict=True)
            ]
            ties = [
                self._least_of_payer(family, base.segments[number], name)
                for (number, name), *_ in (s.paying for s in base.shared)
            ]
            most_freed = 0 if base.last is None else _most_kept(blocks[base.last])
            self._last_beside = family, _Beside(crossing_bytes(base, sizes), ties, most_freed)
        return self._last_beside[1]

    def _least_of_payer(self, family: Family, c: int, name: str) -> tuple[int, float]:
        """Lower bounds for the parameter `name` of class `c` in the family: (bytes in the first
        recompute mode, seconds once a step in any mode).
        """
        models = list(self.facts.models.values())
        number = [op.name for op in models[0].classes[c].ops].index(name)
        left = left_of(models[0], family, c, number)
        by_mode = [[model.classes[c].ops[number].strategies[n] for n in left] for model in models]
        return min(s.static_bytes for s in by_mode[0]), min(s.step_s for of in by_mode for s in of)


def _least_of_modes(by_mode: ByMode, modes: int) -> ByMode:
    return [np.min(by_mode, axis=0).tolist()] * modes


def _most_kept(block: AnnotatedBlock) -> int:
    """An upper bound on the bytes that a segment of a class keeps for its backward: its inputs if
    it recomputes, otherwise its saved tensors.
    """
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
