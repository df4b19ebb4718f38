"""Lower bounds on a candidate over all cuts, recomputations and placements at once.

The bound by totals: a step takes at least `ScheduleShape.each` times the micro-batch seconds of all
segments, however they are cut. Rank r holds `held[r]` times what its segments keep. A plan that
fits has no more bytes than there are, so for any price u of a byte

    seconds >= least (seconds + u x kept + u / held[0] x static)
               - u x sum over ranks (bytes of a rank / held[r])

This is a Lagrangian bound; `Dual` finds the price that maximizes it. Bytes that segments outside of
blocks keep count only in part, since micro-batches that wait for gradients of parameters hold fewer
of these.

A sketch (`sketch.py`) considers whole blocks, waiting and memory together, with lower bounds of
segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import fsum, inf

import numpy as np
from autopar_cost_models import held_moments, late_moments

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.costs.schedule import Schedule, ramp
from autopar.solve.elimination.bucket_elimination import Question, Tables
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.integer_program.lp_relaxation import least_issue_s
from autopar.solve.staging.interleaved import least_held, unit_deals

_CLOSE = 1e-5
"""The search for the best price ends if it could raise the bound by at most this fraction."""

_ROUNDS = 5
"""The largest number of rounds in which the price of a byte is improved."""


@dataclass(slots=True)
class Dual:
    """Searches for the maximum of a concave function over prices u >= 0, by cutting planes. `known`
    has the evaluated points as (price, value, slope); callers append to it.
    """

    known: list[tuple[float, float, float]] = field(default_factory=list)  # price, value, slope

    @property
    def best_s(self) -> float:
        """The largest known value of the function; 0 if none is known."""
        return max((value for _, value, _ in self.known), default=0.0)

    @property
    def best_price(self) -> float:
        """The price with the largest known value; 0 if none is known."""
        return max(self.known, key=lambda point: point[1])[0] if self.known else 0.0

    @property
    def turning_price(self) -> float | None:
        """The best price, if it is positive and the maximum is bracketed by known slopes; otherwise
        None.
        """
        slopes = [slope for *_, slope in self.known]
        return (
            self.best_price or None
            if self.best_s < inf and max(slopes, default=0.0) > 0 > min(slopes)
            else None
        )

    def next_prices(self, likely: float, most: float) -> tuple[float, ...]:
        """The prices to evaluate next: first 0 and `likely`; while the function still rises, `most`
        or beyond; then one between a rising and a falling point. () if the maximum cannot be much
        larger than the best known value.
        """
        if not self.known:
            return (0.0, likely) if likely else (0.0,)
        rising = [point for point in self.known if point[2] > 0]
        falling = [point for point in self.known if point[2] <= 0]
        if not rising:
            return ()
        price, value, slope = max(rising)
        if not falling:
            return (max(most, 2 * price),)
        other, other_value, other_slope = min(falling)
        if other_slope - slope == 0:
            return ()
        found = (other_value - other_slope * other - value + slope * price) / (slope - other_slope)
        most = value + slope * (found - price)
        return (found,) if most - self.best_s > _CLOSE * abs(most) and price < found < other else ()


@dataclass(frozen=True, slots=True)
class ScheduleShape:
    """A schedule as bounds see it. `each`: a step takes at least this many times the micro-batch
    seconds of all segments. `held`: for each rank, a lower bound on how many micro-batches' kept
    bytes it holds. `by_ends`: for segments outside of blocks, the fraction of these micro-batches
    that hold everything.
    """

    each: float
    held: tuple[float, ...]
    by_ends: float = 1.0

    @property
    def room(self) -> float:
        """The kept bytes of one micro-batch that all ranks together can hold, per byte of memory of
        one rank.
        """
        return sum(1 / held for held in self.held)


@lru_cache(maxsize=4096)
def schedule_shape(
    schedule: Schedule, micro_batches: int, units: int, alike: bool
) -> ScheduleShape:
    """The `ScheduleShape` of a schedule for a row of `units` units. `alike`: all blocks have one class.
    Cached.

    With one stage per rank and whole backwards, a rank starts when the first micro-batch has passed
    the ranks before it, and ends correspondingly early. Therefore m t + (t of the ranks before) is
    minimal if all are equal.
    """
    ranks, chunks = schedule.ranks, schedule.stages_per_rank
    if ranks == 1:
        return ScheduleShape(float(micro_batches), (1.0,))
    whole = chunks == 1 and schedule.has_one_stage  # how long others wait: `Sketch`
    each = ramp(1.0, ranks, micro_batches) * (1 - 1e-9) if whole else micro_batches / ranks
    moments = held_moments(schedule.name, ranks, chunks, micro_batches)
    deals = unit_deals(schedule, units) if chunks > 1 else [(1,) * ranks]
    held = tuple(
        max(
            min(least_held(moment, sizes[rank::ranks]) for sizes in deals)
            if alike
            else float(min(moment))
            for moment in of
        )
        for rank, of in enumerate(moments)
    )
    waiting = 0 if chunks > 1 else late_moments(schedule.name, ranks, 1, micro_batches)[-1][0][0][0]
    # of several stages a rank not all are held alike
    by_ends = 0.0 if chunks > 1 else 1 - max(waiting - 1, 0) / held[-1]
    return ScheduleShape(each * (1 - 1e-12), held, by_ends)


@dataclass(slots=True)
class Total:
    """The bound by totals of one schedule of a candidate: the prices of a byte tried so far
    (`dual`), and the placements that were optimal at them.
    """

    shape: ScheduleShape
    dual: Dual = field(default_factory=Dual)
    placements: list[Choices] = field(default_factory=list)

    def question(self, price: float) -> Question:
        """The weights of costs whose minimum gives the bound at `price` seconds a kept byte."""
        each_step, each_rank = (
            1 / len(self.shape.held) / self.shape.each,
            price / max(self.shape.held),
        )
        return Question(
            step=each_step, kept=price, kept_by_ends=price * self.shape.by_ends, static=each_rank
        )

    def bound_s(self, cost_s: float, price: float, room: float) -> float:
        """A lower bound on step seconds at `price`, if the question's minimum is at least `cost_s`
        and a rank has `room` bytes.
        """
        return self.shape.each * (cost_s - price * room * self.shape.room)


def raise_totals(
    cell: Cell,
    models: Models,
    parameters: Sequence[Stack],
    totals: Sequence[Total],
    capacity_bytes: int | None,
    upper_bound_s: float,
) -> None:
    """Improves each total's bound in place by trying prices of a byte, until the bound reaches
    `upper_bound_s` or stops rising. Also collects the optimal placements, and sets
    `cell.likely_price`. Bounds become infinite if no placement is consistent.

    `parameters` are cost tables of the parameters of the candidate's own `models`. A capacity of
    None is unlimited.
    """
    is_limited, room = capacity_bytes is not None, 0
    if capacity_bytes is not None:
        room = capacity_bytes - next(iter(models.values())).fixed_bytes
    likely = cell.likely_price if is_limited else 0.0
    for _ in range(_ROUNDS if is_limited else 1):
        asked = [
            (total, price)
            for total in totals
            if total.dual.best_s < upper_bound_s
            for price in total.dual.next_prices(likely, cell.prices[-1])
        ]
        if not asked:
            return
        questions = list(dict.fromkeys(total.question(price) for total, price in asked))
        found = cell.tables.least(questions, parameters)
        if found is None:
            for total, _ in asked:
                total.dual.known.append((0.0, inf, 0.0))
            return
        held = np.stack(
            [found.counted(name) for name in ("kept", "kept_by_ends", "static")], axis=1
        ).tolist()
        model = next(iter(models.values()))
        placements = [found.placement(number, model) for number in range(len(questions))]
        for total, price in asked:
            number = questions.index(total.question(price))
            (kept, of_ends, static), choices = held[number], placements[number]
            kept += of_ends * total.shape.by_ends
            value = total.bound_s(float(found.cost_s[number]), price, room)
            slope = total.shape.each * (
                kept + static / max(total.shape.held) - room * total.shape.room
            )
            total.dual.known.append((price, value, slope if is_limited else 0.0))
            if choices and choices not in total.placements:
                total.placements.append(choices)
        cell.likely_price = next(
            filter(None, (total.dual.turning_price for total in totals)), cell.likely_price
        )


def leanest(tables: Tables, parameters: Sequence[Stack], model: AnnotatedModel) -> Choices | None:
    """The placement of `model` with the fewest bytes, kept for one micro-batch plus static, at any
    time cost. None if no consistent one was found.
    """
    found = tables.least(
        [Question(forward=0.0, backward=0.0, kept=1.0, kept_by_ends=1.0, static=1.0)], parameters
    )
    return None if found is None else found.placement(0, model)


# ----------------------------------------------------------------------------------------------- costs that no placement goes below


def parameters_s(models: Models) -> list[tuple[float, float, float, float]]:
    """For each class, lower bounds in any recompute mode on the seconds of (forward, forward and
    backward, once a step, the host's for parameters). The first two count only ops that depend on
    dp.
    """
    found = []
    for blocks in zip(*(model.classes for model in models.values()), strict=True):
        following = [[op.strategies for op in block.ops if op.follows_dp] for block in blocks]
        whole = [[op.strategies for op in block.ops] for block in blocks]
        found.append(
            (
                min(fsum(min(s.forward_s for s in of) for of in own) for own in following),
                min(
                    fsum(min(s.forward_s + s.backward_s for s in of) for of in own)
                    for own in following
                ),
                min(fsum(min(s.step_s for s in of) for of in own) for own in whole),
                min(least_issue_s(block, ("parameter",)) for block in blocks),
            )
        )
    return found
