"""One candidate whose recomputation or stages are not fixed: placement, schedule, stages and recompute modes together.

The placement is one of a few: the fastest that there is without regard to memory, and, where memory makes blocks recompute, faster ones
among those that need less of it (the relaxation with a price on bytes).  Each is staged best (`staging.py`), under each schedule that the
candidate leaves.  The bound is the larger of two, so that the distance of time and bound shows what other placements could still gain:

    of costs    the best staging of the fastest and leanest that any placement could be, of each class by itself
    of prices   for any price of a byte, sum over blocks of the least (seconds + price x bytes kept) - price x bytes that are there,
                which is below the seconds of whatever fits

What depends neither on dp nor on pp is the same for many candidates, a *cell*: it keeps their placements and the least costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import fsum, inf

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, Conversion, Strategy
from autopar.solve.formulation import formulate
from autopar.solve.mixing import Mixed, mixed
from autopar.solve.pipeline import blocks_of, pipelined
from autopar.solve.placement import Infeasible, Solution, prepare, solve_prepared
from autopar.solve.pricing import Choices, SegmentCost, input_bytes, price, saved_bytes
from autopar.solve.relax import least_saved, relax
from autopar.solve.row import Row
from autopar.solve.staging import Schedule, Staging, best_staging, quick_bound_s

ALONE = Schedule("gpipe", 1, 1)

_PRICES = (0.0, 0.02, 0.2)
"""Of all the bytes that the devices have: what they cost, in times of the step, where placements are looked for."""

_BYTE_PRICES = (0.15, 0.3, 0.45)
"""What all that blocks keep costs at the price of a byte in a bound, in times of what they compute.  Recomputing everything is a third."""


@dataclass(frozen=True, slots=True)
class Staged:
    """The best way to run a candidate.  `recompute`: the mode of all blocks, or 'mixed'."""

    solution: Solution
    mixed: Mixed
    schedule: Schedule
    recompute: str


@dataclass(slots=True)
class Cell:
    """What the candidates of one cell share."""

    placements: dict[int, Choices | None] = field(default_factory=dict)  # by price
    least_s: list[tuple[float, float]] = field(default_factory=list)  # of each class: forward, backward
    priced_s: list[tuple[float, float]] = field(default_factory=list)  # price of a byte, least sum of seconds and prices

    def placement(self, number: int, model: AnnotatedModel, capacity_bytes: int | None) -> Choices | None:
        """The fastest placement if all bytes of the devices together cost `_PRICES[number]` of a step; None if none is consistent."""
        if number not in self.placements:
            self.placements[number] = _fastest(model, capacity_bytes, _PRICES[number])
        return self.placements[number]

    def least(self, model: AnnotatedModel) -> list[tuple[float, float]]:
        """Seconds of forward and of backward of a segment of each class that no placement goes below, but for parameters."""
        if not self.least_s:
            self.least_s = [(_least_s(block, "forward_s"), _least_s(block, "backward_s")) for block in model.classes]
        return self.least_s

    def priced(self, models: dict[str, AnnotatedModel]) -> list[tuple[float, float]]:
        """For some prices of a byte (seconds): the least that seconds and bytes kept of all segments for a micro-batch can cost together,
        each segment in its best mode, without parameters."""
        if not self.priced_s:
            first = next(iter(models.values()))
            work_s = sum(block.count * sum(pair) for block, pair in zip(first.classes, self.least(first), strict=True))
            kept = sum(block.count * least_saved(block) for block in first.classes)
            for share in _BYTE_PRICES:
                price_s = share * work_s / max(kept, 1)
                of_class = (min(_least_priced_s(m.classes[c], price_s) for m in models.values()) for c in range(len(first.classes)))
                least_s = fsum(block.count * seconds for block, seconds in zip(first.classes, of_class, strict=True))
                self.priced_s.append((price_s, least_s))
        return self.priced_s


def _fastest(model: AnnotatedModel, capacity_bytes: int | None, share: float) -> Choices | None:
    ranks = model.pipeline.ranks if model.pipeline else 1
    if not share:
        prepared = prepare(model, None)
        if isinstance(prepared, Infeasible):
            return None
        if prepared.relaxed.chosen is not None:
            return prepared.program.choices(prepared.relaxed.chosen)
        found = solve_prepared(prepared)
        return None if isinstance(found, Infeasible) else found.choices
    program = formulate(model, -1)
    if isinstance(program, tuple) or capacity_bytes is None:
        return None
    price_s = share * sum(program.cost_s) / len(program.exactly_one) / (capacity_bytes * ranks)
    program.cost_s = [cost + price_s * size for cost, size in zip(program.cost_s, program.size_bytes, strict=True)]
    program.has_memory = False
    chosen = relax(program, None).chosen
    return None if chosen is None else program.choices(chosen)


@dataclass
class Joint:
    """`model_of(mode)` is the candidate annotated for a recompute mode; `modes` are those allowed, the first keeping most."""

    model_of: Callable[[str], AnnotatedModel]
    modes: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    capacity_bytes: int | None
    cell: Cell
    rows: dict[tuple[int, int], Row] = field(default_factory=dict)  # by placement and number of modes

    def solve(self, upper_bound_s: float, time_limit_s: float) -> tuple[Staged | None, float]:
        """(the best way that takes less than `upper_bound_s`, if one was found; a bound of all ways, which `bound_s` may raise)."""
        start, best, bound_s = time.perf_counter(), None, inf
        first = self.model_of(self.modes[0])
        decided = all(len(op.strategies) == 1 for block in first.classes for op in block.ops)
        for schedule in self.schedules:
            if time.perf_counter() - start > time_limit_s:
                return best, 0.0
            for number in range(1 if decided else len(_PRICES)):
                if (choices := self.cell.placement(number, first, self.capacity_bytes)) is None:
                    continue
                found = self._staged(number, choices, schedule, upper_bound_s)
                bound_s = min(bound_s, found if isinstance(found, float) else found[0].solution.bound_s)
                if isinstance(found, float):
                    continue
                if found[0].solution.time_s < upper_bound_s:
                    best, upper_bound_s = found[0], found[0].solution.time_s
                if found[1]:  # memory left nothing out, so that leaner placements gain nothing
                    break
        return best, bound_s if decided else 0.0

    def bound_s(self, upper_bound_s: float, time_limit_s: float) -> float:
        """A bound of every placement, up to `upper_bound_s`: the best staging of costs that none goes below."""
        start, bound_s = time.perf_counter(), inf
        if (priced_s := self._priced_bound_s()) >= upper_bound_s:
            return priced_s
        row = Row.of_costs(self._models(self.modes), self._least_costs(self.modes))
        for schedule in self.schedules:
            if time.perf_counter() - start > time_limit_s:
                return priced_s
            found = best_staging(row, schedule, self.capacity_bytes, upper_bound_s)
            bound_s = min(bound_s, found if isinstance(found, float) else found.bound_s)
        return max(bound_s, priced_s)

    def _priced_bound_s(self) -> float:
        """The bound of prices.  All ranks together have `ranks` times what one has, of which each holds what is fixed, its share of what is
        static, and at least one micro-batch."""
        if self.capacity_bytes is None:
            return 0.0
        models = self._models(self.modes)
        first, ranks = models[self.modes[0]], self.schedules[0].ranks
        static, _, _ = self._memory
        room = ranks * (self.capacity_bytes - static - min(block.workspace_bytes for block in first.classes))
        micro, best_s = first.num_microbatches, 0.0
        parameters_s = fsum(
            block.count * min(s.forward_s + s.backward_s for s in op.strategies)
            for block in first.classes for op in block.ops if op.kind == "parameter"
        )  # fmt: skip
        for price_s, least_s in self.cell.priced(models):
            best_s = max(best_s, micro * (least_s + parameters_s - price_s * room) / ranks)
        return best_s * (1 - 1e-9) + first.fixed_s

    def quick_bound_s(self, relaxed: bool) -> float:
        """A bound of every placement by a formula, memory left out: from each op's cheapest strategy, or by linear programming."""
        models = self._models(self.modes[:1])
        first = models[self.modes[0]]
        row = Row.of_costs(models, least_costs(models, self.cell.least(first) if relaxed else cheapest_s(first)))
        return min(quick_bound_s(row, schedule) for schedule in self.schedules)

    def least_bytes(self) -> int:
        """Bytes that the fullest rank needs at least: its share of what is static, and what backward of one of its blocks reads."""
        static, _, moment = self._memory
        return static + moment

    def likely_share(self) -> float:
        """By what share waiting and recomputation are likely to lengthen a step: a guess, to look at promising candidates first."""
        static, kept, _ = self._memory
        first = self.model_of(self.modes[0])
        ranks = self.schedules[0].ranks
        waits = [(ranks - 1) / (first.num_microbatches * s.stages_per_rank * (3 if s.name == "zero_bubble" else 1)) for s in self.schedules]
        if self.capacity_bytes is None or len(self.modes) == 1:
            return min(waits)
        over = min(max((static + kept - self.capacity_bytes) / max(kept, 1), 0.0), 1.0)  # 1F1B's first rank holds a whole micro-batch
        return min(waits) + over / 3

    @cached_property
    def _memory(self) -> tuple[int, int, int]:
        """Bytes at least: static of the fullest rank, kept of all blocks for one micro-batch in the first mode, what one block keeps and
        needs for its backward in whichever mode."""
        first = self.model_of(self.modes[0])
        unpaid = {member for group in first.ties for member in group[1:]}
        static = kept = 0
        for index, block in enumerate(first.classes):
            kept += block.count * least_saved(block)
            owned = [op for op in block.ops if (index, op.name) not in unpaid]
            static += block.count * sum(min(s.static_bytes for s in op.strategies) for op in owned)
        blocks = {first.segments[number] for number in blocks_of(first)}
        moment = min(_least_moment(self.model_of(mode).classes[index]) for mode in self.modes for index in blocks)
        return first.fixed_bytes + static // self.schedules[0].ranks, kept, moment

    def _models(self, modes: Sequence[str]) -> dict[str, AnnotatedModel]:
        return {mode: self.model_of(mode) for mode in modes}

    def _least_costs(self, modes: Sequence[str]) -> list[list[SegmentCost]]:
        return least_costs(self._models(modes), self.cell.least(self.model_of(self.modes[0])))

    def _staged(self, number: int, choices: Choices, schedule: Schedule, upper_bound_s: float) -> tuple[Staged, bool] | float:
        """(a placement in its best stages, whether memory left nothing out), or a bound if that takes at least `upper_bound_s`."""
        for count in dict.fromkeys((1, len(self.modes))):
            models = self._models(self.modes[:count])
            if (number, count) not in self.rows:
                self.rows[number, count] = Row(models, choices)
            if (least_s := quick_bound_s(self.rows[number, count], schedule)) >= upper_bound_s:
                return least_s
            capacity, bound_s = self.capacity_bytes, None
            for _ in range(3):  # memory of ties between other classes than the first and the last is seen once stages are cut
                staging = best_staging(self.rows[number, count], schedule, capacity, upper_bound_s)
                bound_s = bound_s or (staging if isinstance(staging, float) else staging.bound_s)  # of the whole capacity
                if isinstance(staging, float):
                    break
                found = _priced(models, choices, replace(staging, bound_s=bound_s), schedule)
                over = 0 if self.capacity_bytes is None else found.solution.memory_bytes - self.capacity_bytes
                if over <= 0:
                    break
                capacity -= over
            if not isinstance(staging, float) and over <= 0 and (staging.is_free or count == len(self.modes)):
                return found, staging.is_free
        return bound_s


def _priced(models: dict[str, AnnotatedModel], choices: Choices, staging: Staging, schedule: Schedule) -> Staged:
    """A staging priced as any placement is, by the definition."""
    found = mixed(models, staging.modes)
    own, model = found.choices(choices), found.model
    if model.pipeline is not None:
        model = replace(model, pipeline=replace(model.pipeline, schedule=schedule.name, stages_per_rank=schedule.stages_per_rank))
    cut = pipelined(model, own, staging.stages) if model.pipeline else None
    solution = Solution("feasible", own, price(model, own), staging.bound_s, 0.0, "staging", cut)
    modes = {staging.modes[block] for block in blocks_of(next(iter(models.values())))}
    return Staged(solution, replace(found, model=model), schedule, modes.pop() if len(modes) == 1 else "mixed")


# --------------------------------------------------------------------------------------------- costs that no placement goes below


def least_costs(models: dict[str, AnnotatedModel], least_s: Sequence[tuple[float, float]]) -> list[list[SegmentCost]]:
    """For each mode and segment, seconds and bytes that no placement goes below (and a weight part that none exceeds); `least_s` are those
    of forward and backward of each class without parameters."""
    found = []
    for model in models.values():
        of_class = []
        for index, block in enumerate(model.classes):
            again_s = fsum(min(s.rerun_s for s in op.strategies) for op in block.ops)
            owned = [op for op in block.ops if not any((index, op.name) in group[1:] for group in model.ties)]
            entries = [op for op in block.ops if op.name in block.inputs]
            inputs = sum(min(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies) for op in entries) if block.recompute else 0
            saved = least_saved(block, block.inputs if block.recompute else ())
            parameters = [op for op in block.ops if op.kind == "parameter"]
            forward_s = least_s[index][0] + fsum(min(s.forward_s for s in op.strategies) for op in parameters)
            backward_s = least_s[index][1] + fsum(min(s.backward_s for s in op.strategies) for op in parameters) + again_s
            weight_s = fsum(max(s.backward_weight_s for s in op.strategies) for op in block.ops)
            of_class.append(SegmentCost(
                forward_s, backward_s, min(weight_s, backward_s), fsum(min(s.step_s for s in op.strategies) for op in owned),
                sum(min(s.static_bytes for s in op.strategies) for op in owned), inputs if block.recompute else saved,
                block.workspace_bytes + (saved if block.recompute else 0),
            ))  # fmt: skip
        found.append([of_class[index] for index in model.segments])
    return found


def cheapest_s(model: AnnotatedModel) -> list[tuple[float, float]]:
    """Seconds of forward and of backward of a segment of each class without parameters, every op at its cheapest strategy."""
    found = []
    for block in model.classes:
        calls = [op.strategies for op in block.ops if op.kind != "parameter"]
        found.append((fsum(min(s.forward_s for s in of) for of in calls), fsum(min(s.backward_s - s.rerun_s for s in of) for of in calls)))
    return found


def _least_moment(block: AnnotatedBlock) -> int:
    """Bytes that one segment keeps and needs for its backward at least."""
    inputs = sum(min(block.input_bytes[name].values()) for name in block.inputs) if block.recompute else 0
    return inputs + block.workspace_bytes + least_saved(block, block.inputs if block.recompute else ())


def _least_s(block: AnnotatedBlock, way: str) -> float:
    """Seconds of forward or of backward of a segment, without parameters and what runs again, that no placement goes below."""
    return _least_of(block, lambda cost: cost.forward_s if way == "forward_s" else max(cost.backward_s - cost.rerun_s, 0.0), 0.0)


def _least_priced_s(block: AnnotatedBlock, price_s: float) -> float:
    """Seconds of a segment and `price_s` for each byte that it keeps, without parameters: no placement goes below."""
    inputs = [min(block.input_bytes[name].values()) for name in block.inputs] if block.recompute else []
    kept_price_s = 0.0 if block.recompute else price_s
    return _least_of(block, lambda cost: cost.forward_s + cost.backward_s, kept_price_s) + price_s * sum(inputs)


def _least_of(block: AnnotatedBlock, seconds_of: Callable[[Strategy | Conversion], float], price_s: float) -> float:
    """The least sum over a segment's ops and conversions of `seconds_of`, parameters left out, plus `price_s` for each byte saved: by
    linear programming where there is something to choose."""

    def stripped(s: Strategy, is_parameter: bool) -> Strategy:
        return Strategy(s.name, s.inputs, s.outputs, 0.0 if is_parameter else seconds_of(s), saved=s.saved)

    ops = tuple(replace(op, strategies=tuple(stripped(s, op.kind == "parameter") for s in op.strategies)) for op in block.ops)
    values = {
        name: replace(value, conversions={pair: Conversion(seconds_of(c), 0.0) for pair, c in value.conversions.items()})
        for name, value in block.values.items()
    }
    alone = AnnotatedModel((replace(block, count=1, ops=ops, values=values, recompute=False, workspace_bytes=0),), (), (), 1)
    if all(len(op.strategies) == 1 for op in ops):
        return fsum(op.strategies[0].forward_s for op in ops) + price_s * saved_bytes([op.strategies[0] for op in ops])
    program = formulate(alone, -1 if price_s else None)
    if isinstance(program, tuple):
        return inf
    program.cost_s = [cost + price_s * size for cost, size in zip(program.cost_s, program.size_bytes, strict=True)]
    program.has_memory = False
    return relax(program, None).bound_s
