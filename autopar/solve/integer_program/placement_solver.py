"""Finds the best strategies for one annotated model under a memory capacity, with a proof.

`formulation.py` states variables, constraints and objective, with the function that adds each.
There are three steps:

1. `relax` solves the LP relaxation. Without memory pressure its solution is nearly always integral,
  and then it is the optimum: the rigorous LP bound equals its price, and no search is needed.
2. Otherwise CP-SAT solves the same program with integer costs (`_minimise_time`).
3. If nothing fits, CP-SAT minimizes memory, in exact bytes (`smallest_memory`).

Costs are quantized once, in `quantise`. Every cost is rounded *down* to a multiple of the quantum,
a power of two, so CP-SAT's optimum and bound are lower bounds of the real ones. The reported time
is the floating-point price of the chosen strategies. They differ by at most one quantum per paid
cost, about 1e-11 of the step time. This remains visible as the difference of `time_s` and
`bound_s`.

Every result is checked with `placement_cost.price`, which shares no code with the formulation.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor, frexp, inf

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.pipeline_cost import Pipelined
from autopar.solve.costs.placement_cost import Choices, Priced, price_placement
from autopar.solve.integer_program import cp_sat
from autopar.solve.integer_program.formulation import IntegerProgram, formulate
from autopar.solve.integer_program.lp_relaxation import Relaxation, relax

OPTIMALITY_GAP = 1e-9
"""The relative gap between time and bound up to which a placement counts as optimal. Quantization
and double rounding stay below it.
"""

_RESOLUTION_BITS = 50
"""The sum of all costs is about 2**50 quanta. That is far inside int64, and doubles, as in CP-SAT's
own LP, represent such integers exactly.
"""


class SolverAuditError(RuntimeError):
    """Raised if the solver's result and its independent price disagree. This is a bug in autopar,
    never an error in the input.
    """


@dataclass(frozen=True, slots=True)
class Solution:
    """A placement (`choices`: for each class, op name -> strategy name), its exact price, and
    `bound_s`, a proved lower bound on the time of every placement that fits. `method` is how it was
    found: 'lp', 'cp-sat' or 'staging'.

    `status` is 'optimal' if the device's time and bound are known to differ by at most
    `OPTIMALITY_GAP`, otherwise 'feasible'. In a pipeline, `priced` covers all stages together, and `pipelined` has
    the time of a step once it is cut into stages; otherwise it is None.
    """

    status: str  # 'optimal' | 'feasible'
    choices: Choices
    priced: Priced
    bound_s: float
    solve_time_s: float
    method: str  # 'lp' | 'cp-sat'
    pipelined: Pipelined | None = None

    @property
    def time_s(self) -> float:
        """Seconds of a step, in the pipeline if there is one."""
        return self.pipelined.time_s if self.pipelined else self.priced.time_s

    @property
    def memory_bytes(self) -> int:
        """Peak bytes of the fullest device."""
        return max(self.pipelined.memory_bytes) if self.pipelined else self.priced.memory_bytes

    @property
    def breakdown(self) -> dict[str, float]:
        """Seconds by part; they sum to `time_s`."""
        return self.pipelined.time_parts if self.pipelined else self.priced.time_parts

    @property
    def memory_parts(self) -> dict[str, int]:
        """Bytes by part on the fullest device; they sum to `memory_bytes`."""
        return self.pipelined.memory_parts if self.pipelined else self.priced.memory_parts

    @property
    def gap(self) -> float:
        """(time - bound) / time of a step; 0 if the time is 0."""
        return (self.time_s - self.bound_s) / self.time_s if self.time_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Infeasible:
    """The reason why there is no placement; `detail` is a text that explains it.

    `reason` is one of:

    - 'memory': none fits. The smallest that was found needs `memory_bytes`, and none needs less than
      `bound_bytes`. Both are None if they were not computed.
    - 'bound': none that fits is faster than the requested `upper_bound_s`.
    - 'layouts': no choice of layouts is consistent. If one op is known to have no strategy left,
      `detail` names it.
    - 'time limit': nothing was found in time; only `bound_s` is proved.

    `bound_s` is a lower bound in seconds on the time of every placement that fits. `choices` is the
    placement that needs `memory_bytes`.
    """

    reason: str
    detail: str
    solve_time_s: float
    bound_s: float = 0.0
    memory_bytes: int | None = None
    bound_bytes: int | None = None
    choices: Choices | None = None  # of the placement that needs `memory_bytes`


@dataclass(frozen=True, slots=True)
class Prepared:
    """A model's 0/1 program and its LP relaxation, which is a lower bound. It is computed before
    the decision whether to solve.
    """

    model: AnnotatedModel
    capacity_bytes: int | None
    program: IntegerProgram
    relaxed: Relaxation

    @property
    def fits_not(self) -> bool:
        """Whether the relaxation already proves that no placement fits into the capacity."""
        return self.capacity_bytes is not None and self.relaxed.bound_bytes > self.capacity_bytes


def solve_placement(
    model: AnnotatedModel,
    capacity_bytes: int | None,
    time_limit_s: float = 30.0,
    upper_bound_s: float | None = None,
    workers: int = 1,
) -> Solution | Infeasible:
    """The fastest placement of `model` whose memory is at most `capacity_bytes` (None: unlimited),
    as a `Solution`. An `Infeasible` with the reason if none was found in `time_limit_s` seconds; if
    none fits, with the least memory.

    With `upper_bound_s`, only placements of at most that time are searched. `workers` is the number
    of CP-SAT threads. Results are reproducible for any number, unless the time limit is reached.
    One thread is the fastest: interleaved threads took ten times as long on a transformer. Raises
    ValueError for a malformed model.
    """
    start = time.perf_counter()
    prepared = prepare(model, capacity_bytes)
    if isinstance(prepared, Infeasible):
        return prepared
    result = solve_prepared(prepared, time_limit_s, upper_bound_s, workers)
    if isinstance(result, Infeasible) and result.reason == "memory":
        if capacity_bytes is None:
            raise ValueError("capacity_bytes is None, but the model does not fit")
        return smallest_memory(
            model, capacity_bytes, max(start + time_limit_s - time.perf_counter(), 1.0), workers
        )
    return replace(result, solve_time_s=time.perf_counter() - start)


def prepare(model: AnnotatedModel, capacity_bytes: int | None) -> Prepared | Infeasible:
    """The program of `model` and its LP relaxation, as a `Prepared`. An `Infeasible` with reason
    'layouts' if no choice of layouts is consistent.
    """
    start = time.perf_counter()
    program = formulate(model, capacity_bytes)
    if isinstance(program, tuple):
        return Infeasible(
            "layouts", _layout_conflict(model, program), time.perf_counter() - start, inf
        )
    return Prepared(model, capacity_bytes, program, relax(program, capacity_bytes))


def solve_prepared(
    prepared: Prepared,
    time_limit_s: float = 30.0,
    upper_bound_s: float | None = None,
    workers: int = 1,
) -> Solution | Infeasible:
    """Like `solve_placement`, for a program that `prepare` made. If nothing fits, the result has
    reason 'memory' without the least memory.
    """
    start = time.perf_counter()
    program, relaxed, capacity_bytes = prepared.program, prepared.relaxed, prepared.capacity_bytes
    if prepared.fits_not:
        return _fits_not(
            f"every placement needs at least {relaxed.bound_bytes} bytes, capacity is {capacity_bytes}",
            start,
        )
    if upper_bound_s is not None and relaxed.bound_s > upper_bound_s:
        return _too_slow(upper_bound_s, relaxed.bound_s, start)
    if relaxed.chosen is not None:
        found = _solution(program, relaxed.chosen, relaxed.bound_s, start, "lp")
        if found.status == "optimal" and (
            capacity_bytes is None or found.memory_bytes <= capacity_bytes
        ):
            return found
    result = _minimise_time(program, capacity_bytes, start + time_limit_s, upper_bound_s, workers)
    if result.chosen is not None:
        found = _solution(
            program, result.chosen, max(result.bound_s, relaxed.bound_s), start, "cp-sat"
        )
        _audit(found, capacity_bytes, result)
        return found
    if not result.finished:
        bound_s = max(
            relaxed.bound_s, min(result.bound_s, inf if upper_bound_s is None else upper_bound_s)
        )
        return Infeasible(
            "time limit",
            f"no placement found in {time_limit_s:g} s",
            time.perf_counter() - start,
            bound_s,
        )
    if upper_bound_s is not None:
        return _too_slow(upper_bound_s, max(relaxed.bound_s, upper_bound_s), start)
    if not program.has_memory:
        return Infeasible(
            "layouts", "no choice of layouts is consistent", time.perf_counter() - start, inf
        )
    return _fits_not(f"no placement fits into {capacity_bytes} bytes", start)


def smallest_memory(
    model: AnnotatedModel, capacity_bytes: int, time_limit_s: float = 30.0, workers: int = 1
) -> Infeasible:
    """An `Infeasible` that tells how little memory a placement can need: reason 'memory' with the
    leanest placement found in `time_limit_s` seconds, its bytes and a lower bound. Reason 'layouts'
    if there is no placement, 'time limit' if none was found in time.

    It minimizes memory even if the model would fit. `capacity_bytes` is only named in the message.
    `workers` is the number of CP-SAT threads.
    """
    start = time.perf_counter()
    program = formulate(model, capacity_bytes=-1)
    if isinstance(program, tuple):
        return Infeasible(
            "layouts", _layout_conflict(model, program), time.perf_counter() - start, inf
        )
    built, variables = _cp_model(program)
    built.minimize(cp_sat.LinearExpr.weighted_sum(variables, program.size_bytes))
    solver = cp_solver(time_limit_s, workers)
    status = solver.solve(built)
    if status not in (cp_sat.OPTIMAL, cp_sat.FEASIBLE):
        if status == cp_sat.INFEASIBLE:
            return Infeasible(
                "layouts", "no choice of layouts is consistent", time.perf_counter() - start, inf
            )
        return Infeasible(
            "time limit", f"memory not minimised in {time_limit_s:g} s", time.perf_counter() - start
        )
    choices = program.choices(chosen_variables(program, solver, variables))
    memory_bytes = price_placement(model, choices).memory_bytes
    # a whole number, held as a float
    bound_bytes = min(round(solver.best_objective_bound) + program.constant_bytes, memory_bytes)
    if status == cp_sat.OPTIMAL and bound_bytes != memory_bytes:
        raise SolverAuditError(
            f"CP-SAT's least memory is {bound_bytes} bytes; the same choices are priced {memory_bytes}"
        )
    detail = f"the smallest placement needs {memory_bytes} bytes, capacity is {capacity_bytes}"
    return Infeasible(
        "memory",
        detail,
        time.perf_counter() - start,
        bound_s=inf,
        memory_bytes=memory_bytes,
        bound_bytes=bound_bytes,
        choices=choices,
    )


@dataclass(frozen=True, slots=True)
class _Result:
    chosen: list[int] | None  # variables at 1
    bound_s: float
    time_s: float  # exact price of `chosen`
    error_s: float  # the most that quantisation took off the objective of `chosen`
    objective_s: float
    finished: bool  # proven optimal, or proven that there is nothing


def _minimise_time(
    program: IntegerProgram,
    capacity_bytes: int | None,
    deadline: float,
    upper_bound_s: float | None,
    workers: int,
) -> _Result:
    """Runs CP-SAT on costs that are rounded down to whole quanta. It runs again with a finer
    quantum if one huge cost made the first too coarse, and returns the second result if that is
    finished and has a placement. `deadline` is a time of `perf_counter`; at least 0.1 s is allowed.
    Other arguments as in `solve_prepared`.
    """
    first = _minimise_quantised(
        program, capacity_bytes, deadline, upper_bound_s, upper_bound_s, workers
    )
    if (
        first.chosen is None
        or not first.finished
        or first.error_s <= OPTIMALITY_GAP / 2 * first.time_s
    ):
        return first
    second = _minimise_quantised(
        program, capacity_bytes, deadline, upper_bound_s, first.time_s, workers
    )
    return second if second.finished and second.chosen is not None else first


def _minimise_quantised(
    program: IntegerProgram,
    capacity_bytes: int | None,
    deadline: float,
    upper_bound_s: float | None,
    ceiling_s: float | None,
    workers: int,
) -> _Result:
    costs, quantum_s = quantise(
        program.cost_s, [1] * len(program.cost_s), inf if ceiling_s is None else ceiling_s
    )
    built, variables = _cp_model(program)
    total = cp_sat.LinearExpr.weighted_sum(variables, costs)
    built.minimize(total)
    if program.has_memory:
        built.add(
            cp_sat.LinearExpr.weighted_sum(variables, program.size_bytes)
            <= program.room_bytes(capacity_bytes)
        )
    if upper_bound_s is not None:
        built.add(
            total
            <= floor(max(upper_bound_s - program.constant_s, 0.0) / quantum_s * (1 + 1e-12)) + 1
        )
    solver = cp_solver(max(deadline - time.perf_counter(), 0.1), workers)
    status = solver.solve(built)
    finished = status in (cp_sat.OPTIMAL, cp_sat.INFEASIBLE)
    if status == cp_sat.MODEL_INVALID:
        raise SolverAuditError(f"CP-SAT rejects the model: {built.validate()}")
    bound_s = max(solver.best_objective_bound, 0.0) * quantum_s * (1 - 1e-12) + program.constant_s
    if status not in (cp_sat.OPTIMAL, cp_sat.FEASIBLE):
        return _Result(None, bound_s, 0.0, 0.0, 0.0, finished)
    chosen = chosen_variables(program, solver, variables)
    error_s = quantum_s * sum(program.cost_s[v] > 0 for v in chosen)
    time_s = price_placement(program.model, program.choices(chosen)).device_s
    return _Result(
        chosen,
        bound_s,
        time_s,
        error_s,
        solver.objective_value * quantum_s + program.constant_s,
        finished,
    )


def quantise(
    costs_s: Sequence[float], most: Sequence[int], ceiling_s: float
) -> tuple[list[int], float]:
    """(costs in whole quanta, rounded down; the quantum in seconds). Cost i is paid at most
    `most[i]` times.

    Costs above `ceiling_s`, the time of a known or required placement, are reduced to it. No useful
    placement pays them, and reducing only lowers the bound of those that do.
    """
    costs_s = [min(cost_s, ceiling_s * (1 + 1e-9)) for cost_s in costs_s]
    _, exponent = frexp(
        max(sum(cost_s * times for cost_s, times in zip(costs_s, most, strict=True)), 1e-300)
    )
    quantum_s = 2.0 ** (exponent - _RESOLUTION_BITS)
    return [floor(cost_s / quantum_s) for cost_s in costs_s], quantum_s


def _cp_model(program: IntegerProgram) -> tuple[cp_sat.CpModel, list]:
    """(a CP-SAT model with the constraints of `program`, without capacity and objective; its
    variables, by number).
    """
    built = cp_sat.CpModel()
    variables = [built.new_bool_var("") for _ in program.cost_s]
    if program.transient >= 0:
        variables[program.transient] = built.new_int_var(0, program.transient_max, "")
    constrain(built, program, variables)
    for segment, constant in program.segments:
        total = cp_sat.LinearExpr.weighted_sum(
            [variables[v] for v in segment], list(segment.values())
        )
        built.add(total + constant <= variables[program.transient])
    return built, variables


def constrain(
    built: cp_sat.CpModel, program: IntegerProgram, variables: list, number: cp_sat.LinearExprT = 1
) -> None:
    """Adds to `built` the constraints on the 0/1 variables of `number` copies of `program`.
    `variables` has, for each variable, how many copies set it to 1. Moments of backward are not
    added.
    """
    is_one = isinstance(number, int)
    for indicator in program.exactly_one:
        chosen = [variables[v] for v in indicator]
        if is_one:
            built.add_exactly_one(chosen)
        else:
            built.add(sum(chosen) == number)
    for indicator, implied in program.implied:
        chosen = [variables[v] for v in indicator]
        if is_one:
            built.add_at_most_one([*chosen, variables[implied].negated()])
        else:
            built.add(sum(chosen) <= variables[implied])


def cp_solver(time_limit_s: float, workers: int) -> cp_sat.CpSolver:
    """A CP-SAT solver with this time limit and number of threads. Results are reproducible unless
    the time limit is reached.
    """
    solver = cp_sat.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.random_seed = 0
    solver.parameters.num_workers = workers
    solver.parameters.catch_sigint_signal = False  # Ctrl-C belongs to Python
    # threads proceed in lockstep, so that the result does not depend on timing
    solver.parameters.interleave_search = workers > 1
    # Measured on a 54-op transformer under three capacities: level 1 needs 3 to over 30 s, level 2 less than 0.5 s.  The
    # relaxation is tight once the LP sees every constraint.  The other three are presolve that costs more than it saves (0.40 -> 0.27 s).
    solver.parameters.linearization_level = 2
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.symmetry_level = 0
    solver.parameters.max_presolve_iterations = 1
    return solver


def chosen_variables(
    program: IntegerProgram, solver: cp_sat.CpSolver, variables: list
) -> list[int]:
    """The numbers of the variables that are 1 in the solver's solution, without
    `program.transient`.
    """
    return [
        v
        for v, variable in enumerate(variables)
        if v != program.transient and solver.value(variable) == 1
    ]


def _solution(
    program: IntegerProgram, chosen: list[int], bound_s: float, start: float, method: str
) -> Solution:
    choices = program.choices(chosen)
    priced = price_placement(program.model, choices)
    time_s = priced.device_s
    bound_s = min(bound_s, time_s)
    status = "optimal" if time_s - bound_s <= OPTIMALITY_GAP * time_s else "feasible"
    return Solution(status, choices, priced, bound_s, time.perf_counter() - start, method)


def _audit(found: Solution, capacity_bytes: int | None, result: _Result) -> None:
    """Raises SolverAuditError in three cases. The solution exceeds the capacity, costs more than
    CP-SAT's objective plus its rounding error, or costs less than CP-SAT's bound.
    """
    time_s = found.priced.device_s  # the host is not in the program
    slack_s = 1e-12 * time_s
    if capacity_bytes is not None and found.memory_bytes > capacity_bytes:
        raise SolverAuditError(
            f"CP-SAT's placement needs {found.memory_bytes} bytes of {capacity_bytes}"
        )
    if time_s > result.objective_s + result.error_s + slack_s:
        raise SolverAuditError(
            f"CP-SAT's objective is {result.objective_s} s (+ at most {result.error_s}); the price is {time_s} s"
        )
    if result.bound_s > time_s + slack_s:
        raise SolverAuditError(
            f"CP-SAT's bound {result.bound_s} s is above the price of its placement, {time_s} s"
        )


def _fits_not(detail: str, start: float) -> Infeasible:
    return Infeasible("memory", detail, time.perf_counter() - start, inf)


def _too_slow(upper_bound_s: float, bound_s: float, start: float) -> Infeasible:
    detail = f"no placement that fits is faster than {upper_bound_s:.6g} s"
    return Infeasible("bound", detail, time.perf_counter() - start, bound_s)


def _layout_conflict(model: AnnotatedModel, ref: tuple[int, int]) -> str:
    block = model.classes[ref[0]]
    return f"block {block.name}: no strategy of op {block.ops[ref[1]].name} fits the layouts of its neighbours"
