"""One candidate whose recomputation or stages are not fixed: placement, schedule, stages and recompute modes together.

The placement is one of a few: the fastest that there is without regard to memory, and, where memory makes blocks recompute, faster ones
among those that need less of it (the relaxation with a price on bytes).  Each is staged best (`staging.py`), under each schedule that the
candidate leaves.  The bound is that of the fastest and leanest that any placement could be, of each class by itself, staged best; so the
distance of time and bound shows what other placements could still gain.

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
from autopar.solve.pricing import Choices, SegmentCost, input_bytes, price
from autopar.solve.relax import least_saved, relax
from autopar.solve.row import Row
from autopar.solve.staging import Schedule, Staging, best_staging, quick_bound_s

ALONE = Schedule("gpipe", 1, 1)

_PRICES = (0.0, 0.02, 0.2)
"""Of all the bytes that the devices have: what they cost, in times of the step, where placements are looked for."""


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
            for number in range(1 if decided else len(_PRICES)):
                if (choices := self.cell.placement(number, first, self.capacity_bytes)) is None:
                    continue
                left_s = max(time_limit_s - (time.perf_counter() - start), 0.2)
                found = self._staged(number, choices, schedule, upper_bound_s, left_s)
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
        start, row, bound_s = time.perf_counter(), Row.of_costs(self._models(self.modes), self._least_costs(self.modes)), inf
        for schedule in self.schedules:
            left_s = max(time_limit_s - (time.perf_counter() - start), 0.2)
            found = best_staging(row, schedule, self.capacity_bytes, upper_bound_s, left_s)
            bound_s = min(bound_s, found if isinstance(found, float) else found.bound_s)
        return bound_s

    def quick_bound_s(self) -> float:
        """A bound of every placement by a formula, memory left out."""
        row = Row.of_costs(self._models(self.modes[:1]), self._least_costs(self.modes[:1]))
        return min(quick_bound_s(row, schedule) for schedule in self.schedules) * (1 - 1e-12)

    def least_bytes(self) -> int:
        """Bytes that the fullest rank needs at least: its share of what is static, and what backward of one of its blocks reads."""
        static, kept, moment = self._memory
        return static + min(kept, moment)

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
        """Bytes at least: static of the fullest rank, kept of all blocks for one micro-batch, what backward of one block reads."""
        first = self.model_of(self.modes[0])
        unpaid = {member for group in first.ties for member in group[1:]}
        static = kept = 0
        for index, block in enumerate(first.classes):
            kept += block.count * least_saved(block)
            owned = [op for op in block.ops if (index, op.name) not in unpaid]
            static += block.count * sum(min(s.static_bytes for s in op.strategies) for op in owned)
        blocks = {first.segments[number] for number in blocks_of(first)}
        moment = min(first.classes[index].workspace_bytes + least_saved(first.classes[index]) for index in blocks)
        return first.fixed_bytes + static // self.schedules[0].ranks, kept, moment

    def _models(self, modes: Sequence[str]) -> dict[str, AnnotatedModel]:
        return {mode: self.model_of(mode) for mode in modes}

    def _least_costs(self, modes: Sequence[str]) -> list[list[SegmentCost]]:
        return least_costs(self._models(modes), self.cell.least(self.model_of(self.modes[0])))

    def _staged(
        self, number: int, choices: Choices, schedule: Schedule, upper_bound_s: float, time_limit_s: float
    ) -> tuple[Staged, bool] | float:
        """(a placement in its best stages, whether memory left nothing out), or a bound if that takes at least `upper_bound_s`."""
        for count in dict.fromkeys((1, len(self.modes))):
            models = self._models(self.modes[:count])
            if (number, count) not in self.rows:
                self.rows[number, count] = Row(models, choices)
            if (least_s := quick_bound_s(self.rows[number, count], schedule)) >= upper_bound_s:
                return least_s
            capacity = self.capacity_bytes
            for _ in range(3):  # memory of ties between other classes than the first and the last is seen once stages are cut
                staging = best_staging(self.rows[number, count], schedule, capacity, upper_bound_s, time_limit_s)
                if isinstance(staging, float):
                    break
                found = _priced(models, choices, staging, schedule)
                over = 0 if self.capacity_bytes is None else found.solution.memory_bytes - self.capacity_bytes
                if over <= 0:
                    break
                capacity -= over
            if not isinstance(staging, float) and over <= 0 and (staging.is_free or count == len(self.modes)):
                return found, staging.is_free
        return staging if isinstance(staging, float) else staging.bound_s


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


def _least_s(block: AnnotatedBlock, way: str) -> float:
    """Seconds of forward or of backward of a segment, without parameters and what runs again, that no placement goes below: by linear
    programming where there is something to choose."""

    def alone(cost: Strategy | Conversion) -> Strategy | Conversion:
        seconds = cost.forward_s if way == "forward_s" else cost.backward_s - cost.rerun_s
        return replace(cost, forward_s=max(seconds, 0.0), backward_s=0.0, forward_comm_s=0.0, backward_comm_s=0.0, rerun_s=0.0)

    def free(strategy: Strategy) -> Strategy:
        return Strategy(strategy.name, strategy.inputs, strategy.outputs)

    def stripped(strategy: Strategy) -> Strategy:
        return replace(alone(replace(strategy, backward_weight_s=0.0)), saved=(), step_s=0.0, step_comm_s=0.0, static_bytes=0,
                       gradient_bytes=0, optimizer_bytes=0)  # fmt: skip

    ops = tuple(replace(op, strategies=tuple((free if op.kind == "parameter" else stripped)(s) for s in op.strategies)) for op in block.ops)
    if all(len(op.strategies) == 1 for op in ops):
        return fsum(op.strategies[0].forward_s for op in ops)
    values = {
        name: replace(value, conversions={pair: alone(c) for pair, c in value.conversions.items()}) for name, value in block.values.items()
    }
    program = formulate(AnnotatedModel((replace(block, count=1, ops=ops, values=values, recompute=False),), (), (), 1), None)
    return inf if isinstance(program, tuple) else relax(program, None).bound_s
