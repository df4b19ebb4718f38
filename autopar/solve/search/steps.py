"""The steps of a candidate: of one that has a `CandidateSolver`, and of one with fixed recomputation
and stages, which has a `FixedSolver`.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.solve.costs.pipeline_cost import pipelined
from autopar.solve.integer_program.lp_relaxation import quick_memory_bound, quick_time_bound
from autopar.solve.integer_program.placement_solver import (
    Infeasible,
    Prepared,
    Solution,
    prepare,
    solve_prepared,
)
from autopar.solve.search.candidate_solver import CandidateSolver
from autopar.solve.search.candidate_state import Entry, FixedSolver
from autopar.solve.search.search_state import SearchState, time_of


def raise_bound(state: SearchState, entry: Entry, solver: CandidateSolver) -> None:
    """Raises the bound of a candidate: by a formula at first, and the last time (`bounds_left` is
    then 0) by the family of all its placements.
    """
    entry.bounds_left -= 1
    if entry.bounds_left:
        entry.expect(*solver.raise_bounds(state.wanted_s))
    else:
        entry.expect(solver.narrow(state.wanted_s, 0, 0.0)[1])


def solve(state: SearchState, entry: Entry, solver: CandidateSolver) -> bool:
    """Stages some placements of a candidate, and keeps a plan that is the new best one. Marks the
    candidate as solved; closes it as infeasible if no staging fits. Returns whether there is a new
    best plan.
    """
    staged, bound_s = solver.solve(state.wanted_s, max(state.time_left_s, 0.5))
    entry.bound_s, entry.is_solved = max(entry.bound_s, bound_s), True
    if staged is not None:
        state.keep(entry, staged.solution, staged)
    if entry.bound_s == inf:
        entry.close("infeasible", "no staging of its placements fits", inf)
    return staged is not None


def narrow(state: SearchState, entry: Entry, solver: CandidateSolver, splits: int) -> bool:
    """Splits up to `splits` families of a candidate, and keeps a plan that is the new best one.
    Closes the candidate if no family is left. Returns whether there is a new best plan.
    """
    staged, bound_s = solver.narrow(state.wanted_s, splits, state.time_left_s)
    entry.bound_s, entry.is_split = max(entry.bound_s, bound_s), True
    entry.splits += splits
    if staged is not None:
        state.keep(entry, staged.solution, staged)
    if solver.frontier is not None and not solver.frontier.waiting:
        outcome = (
            "solved"
            if entry.solution
            else "infeasible"
            if entry.bound_s == inf
            else "pruned"
            if state.best_s < inf
            else "too large"
        )
        entry.close(outcome, "all its placements are accounted for", entry.bound_s)
    return staged is not None


def bound_quickly(entry: Entry, model: AnnotatedModel, capacity_bytes: int | None) -> None:
    """Sets solver, bound and least bytes of a candidate, by the cheapest strategy of every op.
    Closes it as infeasible if it needs more than the capacity.
    """
    entry.solver = FixedSolver(model)
    entry.bound_s = quick_time_bound(model) / entry.ranks
    entry.least_bytes = quick_memory_bound(model) // entry.ranks
    if capacity_bytes is not None and entry.least_bytes > capacity_bytes:
        entry.close("infeasible", f"needs at least {entry.least_bytes} bytes", inf)


def relax_candidate(entry: Entry, solver: FixedSolver, capacity_bytes: int | None) -> None:
    """Raises the bound of a candidate by its LP relaxation, with the memory of all pipeline ranks
    together. Closes it as infeasible if the relaxation proves that nothing fits.
    """
    total_bytes = None if capacity_bytes is None else capacity_bytes * entry.ranks
    prepared = prepare(solver.model, total_bytes)
    if isinstance(prepared, Infeasible):
        entry.close("infeasible", prepared.detail, inf)
    elif prepared.fits_not:
        entry.close("infeasible", f"needs at least {prepared.relaxed.bound_bytes} bytes", inf)
    else:
        solver.prepared = prepared
        entry.bound_s = max(entry.bound_s, prepared.relaxed.bound_s / entry.ranks)


def solve_fixed(
    state: SearchState, entry: Entry, prepared: Prepared, capacity_bytes: int | None
) -> bool:
    """Solves the placement of a candidate, checks that each rank fits, and closes the candidate. If
    it is the new best plan, keeps it in `state`. Returns whether it is.
    """
    model, upper_bound_s = prepared.model, None
    if state.best_s < inf:
        upper_bound_s = state.best_s * entry.ranks
    found = solve_prepared(prepared, state.time_left_s, upper_bound_s, state.limits.threads)
    bound_s = max(entry.bound_s, found.bound_s / entry.ranks)
    if isinstance(found, Infeasible):
        outcome = {"bound": "pruned", "time limit": "unexplored"}.get(found.reason, "infeasible")
        reason = OUT_OF_TIME if found.reason == "time limit" else found.detail
        entry.close(outcome, reason, inf if outcome == "infeasible" else bound_s)
        return False
    # only the time limit ends the solver before it proves its placement
    reason = "solved" if found.status == "optimal" else OUT_OF_TIME
    found = replace(found, bound_s=found.bound_s / entry.ranks)
    if model.pipeline is not None:
        found = replace(found, pipelined=pipelined(model, found.choices), status="feasible")
    entry.solution = found
    if capacity_bytes is not None and found.memory_bytes > capacity_bytes:
        entry.close("too large", f"its fullest rank needs {found.memory_bytes} bytes", bound_s)
        return False
    entry.close("solved", reason, bound_s)
    return _keep_if_best(state, entry, found)


def _keep_if_best(state: SearchState, entry: Entry, found: Solution) -> bool:
    if state.best is not None and found.time_s >= time_of(state.best):
        return False
    state.keep(entry, found)
    return True
