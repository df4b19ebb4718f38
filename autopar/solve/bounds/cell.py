"""Lower bounds shared by all candidates with the same prices of ops (a cell)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, inf

import numpy as np

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.bounds.sketch import Sketch, prefix_sums
from autopar.solve.costs.pipeline_cost import blocks_of, units_of
from autopar.solve.costs.placement_cost import SegmentCost, input_bytes
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.costs.schedule import Schedule
from autopar.solve.elimination.bucket_elimination import Question, Tables
from autopar.solve.integer_program.lp_relaxation import least_issue_s, least_saved

_SHARES = (0.0, 0.02, 0.04, 0.08, 0.16, 0.32)
"""The cost of all kept bytes, relative to the compute time, at each price of a byte that a cell
evaluates. Recomputing everything costs a third.
"""


@dataclass
class Cell:
    """What candidates share whose ops cost the same; they differ only in dp, pp and ZeRO.
    `model_of(mode)` is the annotated model of one of them. `modes` are the allowed recompute modes,
    the one that keeps most first. The other fields are caches.
    """

    model_of: Callable[[str], AnnotatedModel]
    modes: tuple[str, ...]
    singles: dict[tuple[int, bool], Tables] = field(default_factory=dict)
    units: dict[tuple[int, ...], Tables] = field(default_factory=dict)
    glanced: dict[tuple[Schedule, int, bool], float] = field(default_factory=dict)

    @staticmethod
    def of(models: Models) -> Cell:
        """The cell of one candidate, whose models by recompute mode are `models`."""
        return Cell(models.__getitem__, tuple(models))

    @cached_property
    def first(self) -> AnnotatedModel:
        """The model in the recompute mode that keeps most."""
        return self.model_of(self.modes[0])

    @cached_property
    def models(self) -> Models:
        """The model for each recompute mode."""
        return {mode: self.model_of(mode) for mode in self.modes}

    @cached_property
    def alike(self) -> bool:
        """Whether the blocks of the model all have one class."""
        return len({self.first.segments[number] for number in blocks_of(self.first)}) == 1

    @cached_property
    def tables(self) -> Tables:
        """The cost tables of the whole model, in all recompute modes."""
        return Tables(self.models)

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """The prices of a kept byte, in seconds, at which bounds are evaluated: 0 first,
        ascending.
        """
        work_s = sum(
            block.count * sum(pair)
            for block, pair in zip(self.first.classes, cheapest_s(self.first), strict=True)
        )
        kept = sum(block.count * least_saved(block) for block in self.first.classes)
        return tuple(share * work_s / max(kept, 1) for share in _SHARES)

    @cached_property
    def likely_price(self) -> float:
        """A first guess of the best price of a byte for a candidate with limited memory.
        `raise_totals` replaces it by the best price of the last candidate.
        """
        return self.prices[1]

    def forget_likely_price(self) -> None:
        """Makes `likely_price` the first guess again, so that bounds do not depend on what was
        bounded before.
        """
        self.__dict__.pop("likely_price", None)

    @cached_property
    def moment_bytes(self) -> int:
        """A lower bound on the bytes that one block keeps and needs for its backward, without
        workspace, over all blocks and recompute modes.
        """
        blocks = {self.first.segments[number] for number in blocks_of(self.first)}
        return min(
            _least_moment(model.classes[index])
            for model in self.models.values()
            for index in blocks
        )

    def single(self, index: int, closed: bool) -> Tables:
        """The cost tables, in all recompute modes, of one segment of class `index` as a separate
        model (`alone`). Cached. `closed`: it reads another segment of its class.
        """
        if (index, closed) not in self.singles:
            self.singles[index, closed] = Tables(
                {mode: alone(model, index, closed) for mode, model in self.models.items()}, True
            )
        return self.singles[index, closed]

    def unit(self, numbers: tuple[int, ...]) -> Tables:
        """The cost tables, in all recompute modes, of the segments with these indices as a separate
        model (`joined_segments`). Cached.
        """
        if numbers not in self.units:
            self.units[numbers] = Tables(
                {mode: joined_segments(model, numbers) for mode, model in self.models.items()}, True
            )
        return self.units[numbers]

    @cached_property
    def keys(self) -> list[tuple[int, bool]]:
        """For each segment: (its class, whether it reads another segment of that class)."""
        return [
            (index, is_closed(self.first, number))
            for number, index in enumerate(self.first.segments)
        ]

    @cached_property
    def minima(self) -> list[tuple[float, float]]:
        """For each segment: lower bounds on its seconds of (forward, backward) in the first
        recompute mode, without parameters.
        """
        return [self._at_once[key][:2] for key in self.keys]

    @cached_property
    def glance(self) -> Sketch:
        """The cheapest sketch: each unit takes its lower bound in seconds in the first recompute
        mode. Memory is unlimited.
        """
        forward_s, _, work_s = zip(*(self._at_once[key] for key in self.keys), strict=True)
        return Sketch.of_units(self.by_unit(forward_s), self.by_unit(work_s), self.issue_s)

    @cached_property
    def issue_s(self) -> list[float]:
        """By unit, a lower bound on the seconds in which the host issues a micro-batch, without
        parameters.
        """
        kinds = ("input", "op", "output")
        of_class = [least_issue_s(block, kinds) for block in self.first.classes]
        return self.by_unit([of_class[index] for index in self.first.segments])

    @cached_property
    def hasty_glance(self) -> Sketch:
        """A sketch that is cheaper and lower than `glance`: every op takes its cheapest strategy, and
        nothing is converted.
        """
        of_class = cheapest_s(self.first)
        forward_s = [of_class[index][0] for index in self.first.segments]
        work_s = [sum(of_class[index]) for index in self.first.segments]
        return Sketch.of_units(self.by_unit(forward_s), self.by_unit(work_s), self.issue_s)

    def glance_s(self, schedule: Schedule, micro_batches: int, is_hasty: bool = False) -> float:
        """A lower bound on the step seconds with unlimited memory, for a step of `micro_batches`,
        by `glance`, or by `hasty_glance` if `is_hasty`. Cached; a schedule that does not alternate
        (GPipe) takes the result of 1F1B.
        """
        alternating = replace(schedule, name="1f1b") if not schedule.alternates else schedule
        key = alternating, micro_batches, is_hasty
        if key not in self.glanced:
            sketch = self.hasty_glance if is_hasty else self.glance
            self.glanced[key] = sketch.bound_s(alternating, micro_batches)
        return self.glanced[key]

    @cached_property
    def sketch(self) -> Sketch:
        """`glance` plus, for each price above 0, lower bounds of the units that charge for the
        bytes that blocks keep. Each block has its best recompute mode.
        """
        prices = self.prices[1:]
        lines_s = [
            [self._priced[key][number] for key in self.keys] for number in range(len(prices))
        ]
        return replace(
            self.glance,
            lines_s=np.array([prefix_sums(self.by_unit(line_s)) for line_s in lines_s]),
            prices=np.array(prices),
        )

    @cached_property
    def _at_once(self) -> dict[tuple[int, bool], tuple[float, float, float]]:
        """For each key (class, closed): lower bounds on the seconds of a segment in the first
        recompute mode, as (forward, backward, both together).
        """
        found: dict[tuple[int, bool], tuple[float, float, float]] = {}
        for index, closed in dict.fromkeys(self.keys):
            # one of many: what its ops take at least, without eliminating
            if not closed and (index, True) in self.keys:
                forward_s, backward_s = cheapest_s(self.first)[index]
                found[index, closed] = forward_s, backward_s, forward_s + backward_s
            else:
                asked = [Question(backward=0.0), Question(forward=0.0), Question()]
                forward_s, backward_s, work_s = self._least_of(
                    Tables({"": alone(self.first, index, closed)}, ways_alone=True), asked
                )
                found[index, closed] = forward_s, backward_s, work_s
        return found

    @cached_property
    def _priced(self) -> dict[tuple[int, bool], tuple[float, ...]]:
        """By key (class, closed): for each price above 0, a lower bound on a segment's seconds plus
        price times kept bytes.

        Segments outside blocks, of the last class, or that open a chain of one class are charged no
        bytes.
        """
        layers, prices, found = (
            {self.first.segments[number] for number in blocks_of(self.first)} - {self.first.last},
            self.prices[1:],
            {},
        )
        for index, closed in dict.fromkeys(self.keys):
            if index not in layers or (not closed and (index, True) in self.keys):
                found[index, closed] = (self._at_once[index, closed][2],) * len(prices)
            else:
                found[index, closed] = self._least_of(
                    self.single(index, closed), [Question(kept=price) for price in prices]
                )
        return found

    @staticmethod
    def _least_of(tables: Tables, asked: list[Question]) -> tuple[float, ...]:
        least = tables.least(asked)
        return (inf,) * len(asked) if least is None else tuple(least.cost_s.tolist())

    def by_unit(self, of_segments: Sequence[float]) -> list[float]:
        """The sum of the segments' values in each unit, one for each unit."""
        return [sum(of_segments[unit.start : unit.stop]) for unit in units_of(self.first)]


def alone(model: AnnotatedModel, index: int, closed: bool) -> AnnotatedModel:
    """One segment of class `index` as a separate model. If `closed`, its own outputs feed its
    inputs, so that a layout change between them is paid. This is done for each (output, input) pair
    over which segments of the class read each other, in every segment that reads another one.
    """
    own = tuple(
        replace(edge, source=0, target=0, count=1)
        for edge in model.edges
        if closed
        and edge.source == edge.target == index
        and (edge.source_output, edge.target_input) in _always_read(model, index)
    )
    return AnnotatedModel((replace(model.classes[index], count=1),), own, (), 1, segments=(0,))


def joined_segments(model: AnnotatedModel, numbers: Sequence[int]) -> AnnotatedModel:
    """The segments with the indices `numbers`, of different classes, as one separate model,
    including the conversions between them. The block among them is listed twice, so that it counts
    as a block here too.
    """
    own = [model.segments[number] for number in numbers]
    parts, edges = (
        [
            alone(model, index, is_closed(model, number))
            for index, number in zip(own, numbers, strict=True)
        ],
        [],
    )
    for target, (number, part) in enumerate(zip(numbers, parts, strict=True)):
        edges += [replace(edge, source=target, target=target) for edge in part.edges]
        read = {
            (model.segments[s], output, place)
            for place, (s, output) in enumerate(model.reads[number])
            if s >= 0
        }
        edges += [
            replace(edge, source=own.index(edge.source), target=target, count=1)
            for edge in model.edges
            if edge.target == own[target] != edge.source
            and edge.source in own
            and (edge.source, edge.source_output, edge.target_input) in read
        ]
    # there twice, so that they are blocks here too
    blocks = [place for place, number in enumerate(numbers) if number in blocks_of(model)]
    return AnnotatedModel(
        tuple(part.classes[0] for part in parts),
        tuple(edges),
        (),
        1,
        segments=(*range(len(own)), *blocks),
    )


def _always_read(model: AnnotatedModel, index: int) -> set[tuple[int, int]]:
    """The (output, input) pairs that connect segments of class `index` everywhere: each segment
    that reads another one of its class reads it over all of them.
    """
    found: set[tuple[int, int]] | None = None
    for number, own in enumerate(model.segments):
        if own == index and is_closed(model, number):
            here = {
                (o, place)
                for place, (s, o) in enumerate(model.reads[number])
                if s >= 0 and model.segments[s] == index
            }
            found = here if found is None else found & here
    return found or set()


def is_closed(model: AnnotatedModel, number: int) -> bool:
    """Whether segment number `number` reads another segment of its class."""
    return any(
        source >= 0 and model.segments[source] == model.segments[number]
        for source, _ in model.reads[number]
    )


def least_costs(models: Models, cell: Cell) -> list[list[SegmentCost]]:
    """Lower bounds on the costs (`SegmentCost`) of each segment over all placements, indexed
    [recompute mode][segment]. For `weight_s` it is an upper bound.
    """
    found = []
    for model in models.values():
        parts = [_least_parts(model, index, cell.first) for index in range(len(model.classes))]
        costs = []
        for number, index in enumerate(model.segments):
            forward_s, backward_s = cell.minima[number]
            own = parts[index]
            backward_s += own.backward_s
            costs.append(
                replace(
                    own,
                    forward_s=forward_s + own.forward_s,
                    backward_s=backward_s,
                    weight_s=min(own.weight_s, backward_s),
                )
            )
        found.append(costs)
    return found


def _least_parts(model: AnnotatedModel, index: int, first: AnnotatedModel) -> SegmentCost:
    """Lower bounds on the costs (`SegmentCost`) of a segment of class `index`, without the seconds
    of calls that do not depend on dp.

    They are seconds of parameters and of calls that depend on dp, seconds of recomputation beyond
    the `first` mode, and bytes. `weight_s` is an upper bound.
    """
    block = model.classes[index]
    pairs = [
        zip(op.strategies, other.strategies, strict=True)
        for op, other in zip(block.ops, first.classes[index].ops, strict=True)
        if not op.follows_dp
    ]
    entries = [op for op in block.ops if op.name in block.inputs]
    inputs = (
        sum(min(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies) for op in entries)
        if block.recompute
        else 0
    )
    saved = least_saved(block, block.inputs if block.recompute else ())
    following = [op for op in block.ops if op.follows_dp]
    kept = inputs if block.recompute else saved
    return SegmentCost(
        forward_s=fsum(min(s.forward_s for s in op.strategies) for op in following),
        backward_s=fsum(min(s.backward_s for s in op.strategies) for op in following)
        + fsum(max(min(s.rerun_s - other.rerun_s for s, other in pair), 0.0) for pair in pairs),
        weight_s=fsum(max(s.backward_weight_s for s in op.strategies) for op in block.ops),
        step_s=fsum(min(s.step_s for s in op.strategies) for op in block.ops),
        static_bytes=sum(min(s.static_bytes for s in op.strategies) for op in block.ops),
        kept_bytes=kept,
        transient_bytes=block.workspace_bytes + (saved if block.recompute else 0),
        late_bytes=-kept,
    )


def cheapest_s(model: AnnotatedModel) -> list[tuple[float, float]]:
    """For each class, the seconds (forward, backward) of a segment with every op at its cheapest
    strategy. Left out are ops whose costs depend on dp, and recomputation.
    """
    found = []
    for block in model.classes:
        calls = [op.strategies for op in block.ops if not op.follows_dp]
        found.append(
            (
                fsum(min(s.forward_s for s in of) for of in calls),
                fsum(min(s.backward_s - s.rerun_s for s in of) for of in calls),
            )
        )
    return found


def _least_moment(block: AnnotatedBlock) -> int:
    """A lower bound on the bytes that one segment keeps and needs for its backward. Workspace,
    which depends on ZeRO and pipelines, is not included.
    """
    inputs = (
        sum(min(block.input_bytes[name].values()) for name in block.inputs)
        if block.recompute
        else 0
    )
    return inputs + least_saved(block, block.inputs if block.recompute else ())
