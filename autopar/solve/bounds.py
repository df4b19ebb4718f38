"""What no placement of a candidate goes below: formulas for all ways to cut, recompute and place at once.

    total   a step takes at least `Shape.each` times what all segments take for a micro-batch, however they are cut.  Rank r holds what its
            segments keep `held[r]` times, so that for any price u of a byte

                seconds >= least (seconds + u x kept + u / held[0] x static) - u x sum over ranks (bytes of a rank / held[r])

            since what fits has no more bytes than there are (a Lagrangian bound; `Dual` looks for the price that makes it largest)
    row     the best staging of a row of which every segment costs, in each part by itself, what it costs at least (`least_costs`)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import fsum, inf

from autopar_cost_models import held_moments

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.eliminate import Question, Tables
from autopar.solve.mixing import Models
from autopar.solve.pipeline import blocks_of
from autopar.solve.pricing import Choices, SegmentCost, class_costs, input_bytes
from autopar.solve.relax import least_saved
from autopar.solve.staging import Schedule, dealt_sizes

_SHARES = (0.0, 0.08, 0.16, 0.24, 0.3, 0.4)
"""What all that is kept costs at the prices of a byte that a cell looks at, in times of the work.  Recomputing everything is a third."""

_ROUNDS = 5
"""How often a dual looks for a better price."""

_CLOSE = 1e-5
"""By what share the best price could still raise a bound when the search for it ends."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A schedule as bounds see it.  `each`: steps that take at least so many times the work of a micro-batch over all segments.  `held`:
    of each rank, how many micro-batches of what its stages keep it holds, at least."""

    each: float
    held: tuple[float, ...]

    @property
    def room(self) -> float:
        """Bytes kept over all ranks, for each byte that a rank has."""
        return sum(1 / held for held in self.held)


@lru_cache(maxsize=4096)
def shape_of(schedule: Schedule, micro_batches: int, units: int) -> Shape:
    """With one stage a rank and whole backwards a rank begins when the first micro-batch has come through all ranks before, and ends as
    long before the last: m t + (t of the ranks before) is least where all are equal."""
    ranks, chunks = schedule.ranks, schedule.stages_per_rank
    each = micro_batches / ranks
    if chunks == 1 and schedule.name in ("gpipe", "1f1b"):
        each = 1 / (1 - (1 - 1 / micro_batches) ** ranks)
    if ranks == 1:
        return Shape(float(micro_batches), (1.0,))
    moments = held_moments(schedule.name, ranks, chunks, micro_batches)
    deals = dealt_sizes(units, ranks * chunks) if chunks > 1 else [(1,) * ranks]
    held = tuple(max(_least_held(moment, deals, rank, ranks) for moment in of) for rank, of in enumerate(moments))
    return Shape(each * (1 - 1e-12), held)


def _least_held(moment: Sequence[int], deals: Sequence[Sequence[int]], rank: int, ranks: int) -> float:
    """How many micro-batches of what its blocks keep a rank holds at least.  The block at one place of its stage runs in one mode in all
    stages of a rank, so that no mixture of places is held less than the least of them."""
    found = inf
    for sizes in deals:
        mine = sizes[rank::ranks]
        for place in range(1, max(mine) + 1):
            there = [held for held, size in zip(moment, mine, strict=True) if size >= place]
            found = min(found, sum(there) / len(there))
    return found


@dataclass(slots=True)
class Dual:
    """max over prices u >= 0 of a concave function, of which each value comes with a slope: cutting planes."""

    known: list[tuple[float, float, float]] = field(default_factory=list)  # price, value, slope

    @property
    def best_s(self) -> float:
        return max((value for _, value, _ in self.known), default=0.0)

    def next_price(self, first: float) -> float | None:
        """Where the function may be largest; None if it cannot be much larger than what is known."""
        rising = [point for point in self.known if point[2] > 0]
        falling = [point for point in self.known if point[2] <= 0]
        if not self.known:
            return 0.0
        if not rising:
            return None
        price, value, slope = max(rising)
        if not falling:
            return max(first, 2 * price)
        other, other_value, other_slope = min(falling)
        if other_slope - slope == 0:
            return None
        found = (other_value - other_slope * other - value + slope * price) / (slope - other_slope)
        most = value + slope * (found - price)
        return found if most - self.best_s > _CLOSE * abs(most) and price < found < other else None


@dataclass
class Cell:
    """What candidates share whose ops cost the same: they differ in dp, pp and ZeRO alone.  `models` are those of one of them."""

    models: Models

    @property
    def first(self) -> AnnotatedModel:
        return next(iter(self.models.values()))

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.models)

    @cached_property
    def prices(self) -> tuple[float, ...]:
        """Prices of a byte, in seconds, that a bound looks at."""
        work_s = sum(block.count * sum(pair) for block, pair in zip(self.first.classes, cheapest_s(self.first), strict=True))
        kept = sum(block.count * least_saved(block) for block in self.first.classes)
        return tuple(share * work_s / max(kept, 1) for share in _SHARES)

    @cached_property
    def least_s(self) -> tuple[float, ...] | None:
        """For each price: the least that seconds and bytes kept of all segments for a micro-batch cost together, without parameters.
        None if no placement is consistent."""
        # without what the ends keep: where a rank has several stages, that may be held less often than what blocks keep
        found = self.tables.least([Question(kept=price) for price in self.prices])
        return None if found is None else tuple(found.cost_s.tolist())

    @cached_property
    def moment_bytes(self) -> int:
        """What one block keeps and needs for its backward at least, in whichever mode."""
        blocks = {self.first.segments[number] for number in blocks_of(self.first)}
        return min(_least_moment(model.classes[index]) for model in self.models.values() for index in blocks)

    @cached_property
    def minima(self) -> list[tuple[tuple[float, float], tuple[float, float]]]:
        """For each class seconds of forward and of backward of a segment, without parameters, that no placement goes below: of one that
        reads another of its class, and of one that does not."""
        return [(_minima(self.first, index, True), _minima(self.first, index, False)) for index in range(len(self.first.classes))]

    def total_s(self, shape: Shape, capacity_bytes: int | None, static: int) -> float:
        """A bound of a step, without parameters.  `capacity_bytes`: what a rank has besides what is fixed; `static`: of all ranks."""
        if self.least_s is None:
            return inf
        if capacity_bytes is None:
            return shape.each * self.least_s[0]
        room = shape.room * capacity_bytes - static / max(shape.held)
        return shape.each * max(least_s - price * room for price, least_s in zip(self.prices, self.least_s, strict=True))


def _minima(model: AnnotatedModel, index: int, closed: bool) -> tuple[float, float]:
    own = tuple(
        replace(edge, source=0, target=0, count=1) for edge in model.edges if closed and edge.source == edge.target == index
    )  # fmt: skip
    alone = AnnotatedModel((replace(model.classes[index], count=1),), own, (), 1)
    found = Tables({"": alone}).least([Question(backward=0.0), Question(forward=0.0)])
    return (inf, inf) if found is None else tuple(found.cost_s.tolist())


@dataclass(slots=True)
class Total:
    """The bound of totals of one schedule of a candidate, and the placements that were met on the way to the best price."""

    shape: Shape
    several: bool  # stages a rank, so that not all stages are held alike
    dual: Dual = field(default_factory=Dual)
    placements: list[Choices] = field(default_factory=list)


def raise_totals(
    tables: Tables, models: Models, totals: Sequence[Total], capacity_bytes: int | None, first_price: float, upper_bound_s: float
) -> None:
    """Look for the best price of a byte for each schedule, until its bound reaches `upper_bound_s` or rises no more.

    `tables`: of the candidate's cell; of `models` only the parameters count.
    """
    room = 0 if capacity_bytes is None else capacity_bytes - next(iter(models.values())).fixed_bytes
    for _ in range(_ROUNDS if capacity_bytes is not None else 1):
        asked = [
            (total, price) for total in totals
            if total.dual.best_s < upper_bound_s and (price := total.dual.next_price(first_price)) is not None
        ]  # fmt: skip
        if not asked:
            return
        questions = [
            Question(
                step=1 / len(t.shape.held) / t.shape.each,
                kept=price,
                kept_by_ends=price * (not t.several),
                static=price / max(t.shape.held),
            )
            for t, price in asked
        ]
        found = tables.least(questions, models)
        if found is None:
            for total, _ in asked:
                total.dual.known.append((0.0, inf, 0.0))
            return
        bytes_of: dict[int, tuple[int, int, int]] = {}
        for number, (total, price) in enumerate(asked):
            choices, modes = found.decode(number)
            same = questions.index(questions[number])
            if same not in bytes_of:
                bytes_of[same] = _bytes(models, choices, modes)
            kept, of_ends, static = bytes_of[same]
            kept += of_ends * (not total.several)
            value = total.shape.each * (float(found.cost_s[number]) - price * room * total.shape.room)
            slope = total.shape.each * (kept + static / max(total.shape.held) - room * total.shape.room)
            total.dual.known.append((price, value, slope if capacity_bytes is not None else 0.0))
            if choices not in total.placements:
                total.placements.append(choices)


def _bytes(models: Models, choices: Choices, modes: Sequence[str]) -> tuple[int, int, int]:
    """(kept by blocks for a micro-batch, by the other segments, static) of all segments."""
    kept = ends = static = 0
    first = next(iter(models.values()))
    blocks = {first.segments[number] for number in blocks_of(first)}
    for mode, model in models.items():
        if mode in modes:
            for index, cost in enumerate(class_costs(model, choices)):
                if modes[index] == mode:
                    size = model.classes[index].count * cost.kept_bytes
                    kept, ends = (kept + size, ends) if index in blocks else (kept, ends + size)
                    static += model.classes[index].count * cost.static_bytes
    return kept, ends, static


# ----------------------------------------------------------------------------------------------- costs that no placement goes below


def least_costs(models: Models, cell: Cell) -> list[list[SegmentCost]]:
    """For each mode and segment, seconds and bytes that no placement goes below (and a weight part that none exceeds)."""
    found = []
    for model in models.values():
        parts = [_least_parts(model, index) for index in range(len(model.classes))]
        costs = []
        for number, index in enumerate(model.segments):
            closed = any(source >= 0 and model.segments[source] == index for source, _ in model.reads[number])
            forward_s, backward_s = cell.minima[index][0 if closed else 1]
            own = parts[index]
            backward_s += own.backward_s
            costs.append(replace(
                own, forward_s=forward_s + own.forward_s, backward_s=backward_s, weight_s=min(own.weight_s, backward_s)
            ))  # fmt: skip
        found.append(costs)
    return found


def _least_parts(model: AnnotatedModel, index: int) -> SegmentCost:
    """What a segment costs at least besides its calls: seconds of parameters and of what runs again, and bytes."""
    block = model.classes[index]
    owned = [op for op in block.ops if not any((index, op.name) in group[1:] for group in model.ties)]
    entries = [op for op in block.ops if op.name in block.inputs]
    inputs = sum(min(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies) for op in entries) if block.recompute else 0
    saved = least_saved(block, block.inputs if block.recompute else ())
    parameters = [op for op in block.ops if op.kind == "parameter"]
    return SegmentCost(
        fsum(min(s.forward_s for s in op.strategies) for op in parameters),
        fsum(min(s.backward_s for s in op.strategies) for op in parameters)
        + fsum(min(s.rerun_s for s in op.strategies) for op in block.ops),
        fsum(max(s.backward_weight_s for s in op.strategies) for op in block.ops),
        fsum(min(s.step_s for s in op.strategies) for op in owned),
        sum(min(s.static_bytes for s in op.strategies) for op in owned),
        inputs if block.recompute else saved,
        block.workspace_bytes + (saved if block.recompute else 0),
    )


def cheapest_s(model: AnnotatedModel) -> list[tuple[float, float]]:
    """Seconds of forward and of backward of a segment of each class without parameters, every op at its cheapest strategy."""
    found = []
    for block in model.classes:
        calls = [op.strategies for op in block.ops if op.kind != "parameter"]
        found.append((fsum(min(s.forward_s for s in of) for of in calls), fsum(min(s.backward_s - s.rerun_s for s in of) for of in calls)))
    return found


def least_static(model: AnnotatedModel) -> int:
    """Static bytes of all segments at least."""
    unpaid = {member for group in model.ties for member in group[1:]}
    return sum(
        block.count * sum(min(s.static_bytes for s in op.strategies) for op in block.ops if (index, op.name) not in unpaid)
        for index, block in enumerate(model.classes)
    )


def _least_moment(block: AnnotatedBlock) -> int:
    """Bytes that one segment keeps and needs for its backward at least."""
    inputs = sum(min(block.input_bytes[name].values()) for name in block.inputs) if block.recompute else 0
    return inputs + block.workspace_bytes + least_saved(block, block.inputs if block.recompute else ())
