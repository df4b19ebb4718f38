"""Cheap lower bounds: on time by linear programming or a sum of minima, on memory by a sum of
minima.

GLOP computes in floating point, so its objective proves nothing. Its dual values do: for *any*
multipliers with the right signs, the Lagrangian bound is below the optimum. The bound is recomputed
from them here, and holds for any tolerance of GLOP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, fsum, inf

import numpy as np
from ortools.linear_solver import linear_solver_pb2, pywraplp

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.costs.placement_cost import input_bytes
from autopar.solve.integer_program.formulation import IntegerProgram

_ROUNDING = 1e-12
"""Relative slack for double rounding in sums of fewer than 1e3 x 1e3 terms of equal sign (each
rounds by 1.1e-16).
"""


Row = tuple[list[tuple[int, float]], bool, float]
"""A constraint: (terms (variable, factor), whether it is an equation rather than <=, right-hand
side).
"""


@dataclass(frozen=True, slots=True)
class Relaxation:
    """Lower bounds from a linear program. `bound_s` holds for the time of every placement that
    fits. `bound_bytes` holds for the memory of every placement; it is 0 where it was not needed.
    `chosen` lists the variables at 1 if the solution is integral, otherwise None.
    """

    bound_s: float
    bound_bytes: int
    chosen: list[int] | None


def relax(program: IntegerProgram, capacity_bytes: int | None) -> Relaxation:
    """Rigorous lower bounds (a `Relaxation`) of `program` by linear programming. If each op has one
    strategy left, the only placement with its exact cost.
    """
    if all(len(indicator) == 1 for indicator in program.exactly_one):
        return _decided(program)
    # bytes are in units of the capacity, which keeps the matrix well scaled
    scale = float(max(capacity_bytes or 1, 1))
    upper = np.ones(len(program.cost_s))
    if program.transient >= 0:
        upper[program.transient] = program.transient_max / scale
    rows = _rows(program, scale)
    size = np.array(
        [
            1.0 if v == program.transient else size / scale
            for v, size in enumerate(program.size_bytes)
        ]
    )
    capacity = []
    if program.has_memory:
        capacity = [
            (
                [(int(v), float(size[v])) for v in np.flatnonzero(size)],
                False,
                program.room_bytes(capacity_bytes) / scale,
            )
        ]
    bound_s, values = _solve(np.array(program.cost_s), rows + capacity, upper)
    bound_s = max(bound_s, 0.0) * (1 - _ROUNDING) + program.constant_s
    if values is None:
        least = _solve(size, rows, upper)[0] * scale if program.has_memory else 0.0
        return Relaxation(bound_s, max(ceil(least), 0) + program.constant_bytes, None)
    binary = np.delete(values, program.transient) if program.transient >= 0 else values
    integral = bool(np.all(np.abs(binary - np.round(binary)) < 1e-6))
    chosen = [int(v) for v in np.flatnonzero(values > 0.5) if v != program.transient]
    return Relaxation(bound_s, 0, chosen if integral else None)


def _decided(program: IntegerProgram) -> Relaxation:
    """The cost of the only placement of a program whose ops have one strategy each, as a
    `Relaxation`.
    """
    chosen = {variable for (variable,) in program.exactly_one}
    chosen |= {
        implied for indicator, implied in program.implied if not chosen.isdisjoint(indicator)
    }
    moments = [
        constant + sum(size for v, size in segment.items() if v in chosen)
        for segment, constant in program.segments
    ]
    seconds = fsum(program.cost_s[v] for v in chosen) * (1 - _ROUNDING) + program.constant_s
    size_bytes = (
        program.constant_bytes + sum(program.size_bytes[v] for v in chosen) + max([0, *moments])
    )
    return Relaxation(seconds, size_bytes if program.has_memory else 0, sorted(chosen))


def _rows(program: IntegerProgram, scale: float) -> list[Row]:
    """All constraints of `program` except the capacity. Byte coefficients are divided by
    `scale`.
    """
    rows = [([(v, 1.0) for v in indicator], True, 1.0) for indicator in program.exactly_one]
    rows += [
        ([*((v, 1.0) for v in indicator), (implied, -1.0)], False, 0.0)
        for indicator, implied in program.implied
    ]
    rows += [
        (
            [*((v, size / scale) for v, size in segment.items()), (program.transient, -1.0)],
            False,
            -constant / scale,
        )
        for segment, constant in program.segments
    ]
    return rows


def _solve(cost: np.ndarray, rows: list[Row], upper: np.ndarray) -> tuple[float, np.ndarray | None]:
    """(a rigorous lower bound of min cost @ v subject to `rows` and 0 <= v <= upper; the LP's
    solution by variable). If GLOP finds no solution: (0, None).
    """
    scale = max(float(cost.max(initial=0.0)), 1e-300)
    # filled row by row, which is half the time of pywraplp's own calls
    problem = linear_solver_pb2.MPModelProto()
    for limit, coefficient in zip(upper.tolist(), (cost / scale).tolist(), strict=True):
        problem.variable.add(lower_bound=0.0, upper_bound=limit, objective_coefficient=coefficient)
    for terms, equal, limit in rows:
        variables, factors = zip(*terms, strict=True) if terms else ((), ())
        problem.constraint.add(
            lower_bound=limit if equal else -inf,
            upper_bound=limit,
            var_index=variables,
            coefficient=factors,
        )
    solver = pywraplp.Solver.CreateSolver("GLOP")
    solver.LoadModelFromProto(problem)
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return 0.0, None
    duals = np.array([constraint.dual_value() for constraint in solver.constraints()]) * scale
    return _lagrangian(cost, rows, upper, duals), np.array(
        [variable.solution_value() for variable in solver.variables()]
    )


def _lagrangian(cost: np.ndarray, rows: list[Row], upper: np.ndarray, duals: np.ndarray) -> float:
    """The minimum, over 0 <= v <= upper, of cost @ v plus duals times (right-hand side - left-hand
    side) of the rows, less a slack for rounding. It is a lower bound on the program for any duals;
    those of <= rows are first lowered to at most 0.
    """
    limits = np.array([limit for _, _, limit in rows])
    duals = np.where([equal for _, equal, _ in rows], duals, np.minimum(duals, 0.0))
    places = np.repeat(np.arange(len(rows)), [len(terms) for terms, _, _ in rows])
    variables = np.array([variable for terms, _, _ in rows for variable, _ in terms], dtype=int)
    parts = duals[places] * np.array([factor for terms, _, _ in rows for _, factor in terms])
    reduced = cost - np.bincount(variables, weights=parts, minlength=len(cost))
    magnitude = (
        np.abs(cost) @ upper + np.abs(duals * limits).sum() + np.abs(parts) @ upper[variables]
    )
    return (
        fsum(duals * limits)
        + float(np.minimum(reduced, 0.0) @ upper)
        - _ROUNDING * float(magnitude)
    )


def quick_time_bound(model: AnnotatedModel) -> float:
    """A lower bound on the step seconds of any placement: every op with its cheapest strategy, and
    free conversions. Or as long as the host takes, if that is more.
    """
    total = [model.fixed_s]
    waiting = [
        block.count
        * (
            model.num_microbatches * least_issue_s(block)
            + fsum(min(s.step_s for s in op.strategies) for op in block.ops)
        )
        for block in model.classes
    ]
    for block in model.classes:
        for op in block.ops:
            total.append(
                block.count
                * min(
                    model.num_microbatches * (s.forward_s + s.backward_s) + s.step_s
                    for s in op.strategies
                )
            )
    return max(fsum(total), fsum([model.fixed_s, *waiting])) * (1 - _ROUNDING)


def least_issue_s(block: AnnotatedBlock, kinds: Sequence[str] = ()) -> float:
    """A lower bound on the seconds in which the host issues a micro-batch of a class, or only of ops
    of these kinds.
    """
    of = [op.strategies for op in block.ops if not kinds or op.kind in kinds]
    return fsum(min(s.forward_dispatch_s + s.backward_dispatch_s for s in own) for own in of)


def quick_memory_bound(model: AnnotatedModel) -> int:
    """A lower bound on the bytes of any placement: every op with its smallest static bytes, and
    saved tensors as in `least_saved`.

    What the last segment keeps plus the transient is at least what either peak of backward needs.
    """
    total, moment = model.fixed_bytes + least_static(model), 0
    for c, block in enumerate(model.classes):
        if block.recompute:
            moment = max(moment, block.workspace_bytes + least_saved(block, block.inputs))
            entries = [op for op in block.ops if op.name in block.inputs]
            total += block.count * sum(
                min(input_bytes(block, op.name, s.outputs[0]) for s in op.strategies)
                for op in entries
            )
        elif c == model.last:
            moment = max(moment, block.workspace_bytes + block.count * least_saved(block))
        else:
            moment = max(moment, block.workspace_bytes)
            total += block.count * least_saved(block)
    return total + moment


def least_static(model: AnnotatedModel) -> int:
    """A lower bound on the static bytes of all segments together."""
    return sum(
        block.count * size
        for block, size in zip(model.classes, least_static_by_class(model), strict=True)
    )


def least_static_by_class(model: AnnotatedModel) -> list[int]:
    """For each class, a lower bound on the static bytes of one of its segments."""
    return [
        sum(min(s.static_bytes for s in op.strategies) for op in block.ops)
        for block in model.classes
    ]


def least_saved(block: AnnotatedBlock, without: Sequence[str] = ()) -> int:
    """A lower bound on the bytes that one segment saves, without the values in `without`. A key
    that some op saves under every strategy is always saved, with at least the largest of those ops'
    smallest sizes.
    """
    least: dict[str, int] = {}
    for op in block.ops:
        per_strategy = [
            {saved.key: saved.size_bytes for saved in s.saved if saved.value not in without}
            for s in op.strategies
        ]
        for key in per_strategy[0]:
            smallest = min(sizes.get(key, 0) for sizes in per_strategy)
            least[key] = max(least.get(key, 0), smallest)
    return sum(least.values())
