"""The steps of a candidate that has a `CandidateSolver`."""

from __future__ import annotations

from math import inf

from autopar.solve.search.candidate_solver import CandidateSolver
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.search_state import SearchState


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
