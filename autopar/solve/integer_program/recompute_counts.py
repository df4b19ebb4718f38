"""Placement and recompute modes of a model without a pipeline, in one integer program with a proof.

`family_bounds.py` bounds placements by prices of a byte. That is weak if the capacity leaves only
few ways of running a small model, which are optimal at no price. This program covers them.

    Variables, besides those of `formulation.py` for what lies between segments (x, z, y over all ops and edges)
      n[class, mode]       segments of the class that run in the mode; 0 .. count
      p[class, mode, v]    n if variable v of a segment of that class in that mode is 1, else 0
      w[class, mode, v]    1 if p > 0, for variables that the peak of backward depends on
      T                    bytes that backward adds at its peak to what is kept

    Constraints
      sum_mode n[class, mode] = count
      the constraints on the v of a segment, n times    `formulation.formulate_segment`
      sum_mode p[class, mode, x] = count * x            one strategy for all segments of a class
      moment(class, mode) over w <= T                   if n > 0, as in `formulation.py`
      static + kept + T + fixed <= capacity

Objective: seconds of p, and of what lies between segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import floor, inf

from autopar.solve.costs.pipeline_cost import blocks_of
from autopar.solve.costs.placement_cost import Choices
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.integer_program import cp_sat
from autopar.solve.integer_program.formulation import (
    IntegerProgram,
    Moment,
    formulate_between,
    formulate_segment,
)
from autopar.solve.integer_program.links import (
    Domains,
    OpRef,
    find_links,
    find_ties,
    reduce_domains,
)
from autopar.solve.integer_program.placement_solver import (
    chosen_variables,
    constrain,
    cp_solver,
    quantise,
)


@dataclass(frozen=True, slots=True)
class Together:
    """The result of `solve_together`. `choices` is the best placement found, `time_s` an upper
    bound on its seconds; None and infinite if there is none. `bound_s` is a lower bound on all
    placements that fit and take at most what was requested.

    `counts` has, for each class, the number of segments in each recompute mode; () without a
    placement.
    """

    choices: Choices | None
    counts: tuple[dict[str, int], ...]
    time_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class _ModePart:
    """The segments of class `index` in one recompute mode: `number` (at most `most`) times `factor`
    of them. `variables` has, for each variable of `program`, how many of the `number` copies set it
    to 1. `kept` is the bytes that a segment keeps, by variable; `moment` is what its backward
    needs.
    """

    index: int
    mode: str
    program: IntegerProgram
    kept: dict[int, int]  # by variable of `program`
    moment: Moment
    factor: int
    number: cp_sat.LinearExprT
    most: int  # that `number` is
    variables: list

    def sum_of(self, coefficients: Mapping[int, int]) -> cp_sat.LinearExprT:
        return cp_sat.LinearExpr.weighted_sum(
            [self.variables[v] for v in coefficients], list(coefficients.values())
        )


def solve_together(
    models: Models,
    capacity_bytes: int,
    time_limit_s: float,
    upper_bound_s: float = inf,
    allowed: Domains | None = None,
) -> Together:
    """The fastest placement that fits into `capacity_bytes` and takes at most `upper_bound_s`, with
    the number of segments of each class in each recompute mode, as a `Together`. Its `choices` are
    None if there is none, or none was found in `time_limit_s` seconds.

    `models` has the model annotated for each recompute mode, the one that keeps most first. Layers
    may use any mode, other segments only the first. `allowed` restricts the strategies of some ops.
    """
    base = next(iter(models.values()))
    domains = reduce_domains(list(models.values()), find_links(base), find_ties(base), allowed)
    if isinstance(domains, tuple):
        return Together(None, (), inf, inf)
    built, between = cp_sat.CpModel(), formulate_between(base, domains)
    shared = [built.new_bool_var("") for _ in between.cost_s]
    constrain(built, between, shared)
    parts = _add_classes(
        built, models, domains, {ref: shared[v] for v, ref in between.strategy_of.items()}
    )
    _add_memory(built, parts, capacity_bytes - base.fixed_bytes, base.last)

    costs_s = [
        *between.cost_s,
        *(part.factor * cost_s for part in parts for cost_s in part.program.cost_s),
    ]
    variables = [*shared, *(variable for part in parts for variable in part.variables)]
    most = [*(1 for _ in shared), *(part.most for part in parts for _ in part.variables)]
    costs, quantum_s = quantise(costs_s, most, upper_bound_s)
    total = cp_sat.LinearExpr.weighted_sum(variables, costs)
    if upper_bound_s < inf:
        built.add(
            total <= floor(max(upper_bound_s - base.fixed_s, 0.0) / quantum_s * (1 + 1e-12)) + 1
        )
    built.minimize(total)
    solver = cp_solver(time_limit_s, 1)
    status = solver.solve(built)
    if status == cp_sat.INFEASIBLE:
        return Together(None, (), inf, upper_bound_s)
    bound_s = max(solver.best_objective_bound, 0.0) * quantum_s * (1 - 1e-12) + base.fixed_s
    if status not in (cp_sat.OPTIMAL, cp_sat.FEASIBLE):
        return Together(None, (), inf, min(bound_s, upper_bound_s))
    paid = sum(
        number
        for number, cost_s in zip(map(solver.value, variables), costs_s, strict=True)
        if cost_s > 0
    )
    counts: tuple[dict[str, int], ...] = tuple({} for _ in base.classes)
    for part in parts:
        counts[part.index][part.mode] = part.factor * solver.value(part.number)
    time_s = (solver.objective_value + paid) * quantum_s * (1 + 1e-12) + base.fixed_s
    return Together(
        between.choices(chosen_variables(between, solver, shared)), counts, time_s, bound_s
    )


def _add_classes(
    built: cp_sat.CpModel,
    models: Models,
    domains: Domains,
    strategies: Mapping[tuple[OpRef, int], cp_sat.IntVar],
) -> list[_ModePart]:
    """Adds to `built` the segments of each class in each recompute mode, with one strategy for all
    segments of a class. Returns the parts, by class and then mode. `strategies` has the variable of
    each (op, strategy).
    """
    base = next(iter(models.values()))
    layers, parts = {base.segments[number] for number in blocks_of(base)}, []
    for index, block in enumerate(base.classes):
        modes = list(models) if index in layers else list(models)[:1]
        numbers = [built.new_int_var(0, block.count, "") for _ in modes] if len(modes) > 1 else [1]
        factor, most = (1, block.count) if len(modes) > 1 else (block.count, 1)
        of_class = []
        for mode, number in zip(modes, numbers, strict=True):
            program, kept, (sizes, workspace) = formulate_segment(models[mode], index, domains)
            moment = (
                sizes,
                workspace + models[mode].fixed_bytes - base.fixed_bytes,
            )  # buffers of what the mode makes again
            variables = [built.new_int_var(0, most, "") for _ in program.cost_s]
            constrain(built, program, variables, number)
            of_class.append(
                _ModePart(
                    index=index,
                    mode=mode,
                    program=program,
                    kept=kept,
                    moment=moment,
                    factor=factor,
                    number=number,
                    most=most,
                    variables=variables,
                )
            )
        if len(modes) > 1:
            built.add(sum(numbers) == block.count)
        # the first variables of all programs of a class are the same
        for v, ref in of_class[0].program.strategy_of.items():
            built.add(sum(part.variables[v] for part in of_class) == most * strategies[ref])
        parts += of_class
    return parts


def _add_memory(
    built: cp_sat.CpModel, parts: list[_ModePart], room_bytes: int, last: int | None
) -> None:
    """Adds the constraint that static bytes, kept bytes and the peak of backward together are at
    most `room_bytes`. `last` is the class of the model's last segment, which frees what it keeps
    before others reach their peak.
    """
    largest = max(
        sum(sizes.values()) + constant for sizes, constant in (part.moment for part in parts)
    )
    transient = built.new_int_var(0, max(largest, 0), "")
    freed = sum(part.sum_of(part.kept) for part in parts if part.index == last)
    for part in parts:
        sizes, constant = part.moment
        there, variables = (
            (part.number, part.variables) if part.most == 1 else _add_there(built, part)
        )
        moment = (
            cp_sat.LinearExpr.weighted_sum([variables[v] for v in sizes], list(sizes.values()))
            + constant * there
        )
        built.add(moment - (freed if part.index != last else 0) <= transient)
    held = sum(
        part.factor * part.sum_of(dict(enumerate(part.program.size_bytes))) for part in parts
    )
    built.add(held + transient <= room_bytes)


def _add_there(
    built: cp_sat.CpModel, part: _ModePart
) -> tuple[cp_sat.IntVar, dict[int, cp_sat.IntVar]]:
    """Adds 0/1 variables for one segment of a part. Returns (whether the part has any segments, by
    variable of `program` that its peak depends on: whether some segment sets it).
    """
    there = built.new_bool_var("")
    built.add(part.number <= part.most * there)
    implied = [
        (indicator, reached)
        for indicator, reached in part.program.implied
        if reached in part.moment[0]
    ]
    wanted = sorted(set(part.moment[0]).union(*(indicator for indicator, _ in implied)))
    one = {v: built.new_bool_var("") for v in wanted}
    for v, variable in one.items():
        built.add(part.variables[v] <= part.most * variable)
    for indicator in part.program.exactly_one:
        if all(v in one for v in indicator):
            built.add(sum(one[v] for v in indicator) == there)
    for indicator, reached in implied:
        built.add(sum(one[v] for v in indicator) <= one[reached])
    return there, one
