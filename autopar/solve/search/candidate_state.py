"""The state of a candidate during a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.plan_fields import OUT_OF_TIME
from autopar.solve.costs.candidate import INFINITE, Candidate
from autopar.solve.integer_program.placement_solver import Prepared, Solution
from autopar.solve.search.candidate_solver import CandidateSolver
from autopar.solve.search.frontier import Frontier
from autopar.solve.search.result import outcome_data
from autopar.solve.search.staged_placement import Staged

NONE_LENT = (inf, "", "")
"""The value of `Entry.lent` if no other process has families of the candidate."""


@dataclass(slots=True)
class FixedSolver:
    """What is known of a candidate with fixed stages and recompute modes: its model, and its
    program with the LP relaxation (`prepared`) once computed.
    """

    model: AnnotatedModel
    prepared: Prepared | None = None


@dataclass(slots=True)
class Entry:
    """A candidate with its state and results in a search. `outcome` is 'unexplored' before it is
    opened and 'open' while it is in work. Then it is as in `SearchResult.outcomes`. `bound_s` is a
    lower bound on step seconds.
    """

    candidate: Candidate
    others: tuple[Candidate, ...] = ()  # that differ in ZeRO alone and are solved together with it
    solver: FixedSolver | CandidateSolver | None = None  # once it was opened here
    outcome: str = "unexplored"
    reason: str = OUT_OF_TIME
    bound_s: float = 0.0
    lengthened: float = 0.0  # by what share the step is likely to be longer
    solution: Solution | None = None
    staged: Staged | None = None
    found: Candidate | None = None  # with what was found, where `staged` is not here
    least_bytes: int | None = None  # of the fullest rank, once that is known
    bounds_left: int = 0  # how many times its bound can be raised before it is solved
    is_solved: bool = False  # by a `CandidateSolver`: families are left
    is_split: bool = False  # into families, which go after candidates that are not
    splits: int = 0  # of families, so far
    is_opened: bool = False
    lent: tuple[float, str, str] = NONE_LENT
    """(bound, outcome, reason) of the families lent to other processes; of several, the one with
    the lowest bound.
    """

    @property
    def frontier(self) -> Frontier | None:
        """The remaining families of placements of the candidate. None if it is not split in this
        process.
        """
        return None if isinstance(self.solver, FixedSolver | None) else self.solver.frontier

    @property
    def estimate_s(self) -> float:
        """The expected step seconds of its best plan: the bound, lengthened by a share."""
        return self.bound_s * (1 + self.lengthened)

    @property
    def turn(self) -> tuple[bool, float]:
        """The sort key of the queue: (whether it is split into families, estimated seconds).
        Promising candidates come first, since a plan prunes others; families are split after all
        are known.
        """
        return self.is_split, self.estimate_s

    @property
    def ranks(self) -> int:
        """The number of pipeline ranks. What all stages need together is at most this many times
        what the fullest or slowest rank needs.
        """
        return self.candidate.mesh.pp

    def expect(self, bound_s: float, likely_s: float = 0.0) -> None:
        """Raises the lower bound to `bound_s`, and sets `lengthened` so that the estimate is
        `likely_s`; it is never below the bound.
        """
        self.bound_s = max(self.bound_s, bound_s)
        self.lengthened = (
            max(likely_s / self.bound_s - 1, 0.0)
            if 0 < self.bound_s < INFINITE and likely_s < INFINITE
            else 0.0
        )

    def close(self, outcome: str, reason: str, bound_s: float) -> None:
        """Ends the candidate with an outcome, as in `SearchResult.outcomes`, a reason in words and
        a final bound. A program that was prepared is dropped.
        """
        self.outcome, self.reason, self.bound_s = outcome, reason, bound_s
        if isinstance(self.solver, FixedSolver):
            self.solver.prepared = None

    def have_lent(self) -> None:
        """Takes over outcome and bound of the families that were lent to other processes, if their
        bound is lower than its own.
        """
        bound_s, outcome, reason = self.lent
        if bound_s < self.bound_s:
            self.close("solved" if self.solution else outcome, reason, bound_s)

    def alone(self) -> Entry:
        """A copy without solver and stages, small enough to send to another process. Its `found`
        names the choices.
        """
        return replace(self, found=self.chosen(), solver=None, staged=None)

    def with_plan(self) -> Entry:
        """A copy with its plan, to send to another process. Only a `FixedSolver` is kept, for its
        model.
        """
        fixed = isinstance(self.solver, FixedSolver)
        return replace(self, solver=self.solver if fixed else None)

    def chosen(self) -> Candidate:
        """The candidate with the schedule, stages per rank, recompute mode and ZeRO stage of the
        plan that was found. The candidate itself if there is none.
        """
        if self.staged is None:
            return self.found or self.candidate
        return chosen_of((self.candidate, *self.others), self.staged)

    def outcomes(self) -> list[dict]:
        """One dict for the candidate and for each of the others solved with it, as in
        `SearchResult.outcomes`. If there is a plan, only the ZeRO stage that it uses is solved;
        others are 'pruned'.
        """
        found, chosen = [], self.chosen()
        for candidate in (self.candidate, *self.others):
            if self.solution is None or chosen.parameters == candidate.parameters:
                found.append(
                    outcome_data(
                        chosen if self.solution else candidate,
                        self.solution,
                        self.outcome,
                        self.bound_s,
                        self.reason,
                    )
                )
            else:
                found.append(
                    outcome_data(
                        candidate, None, "pruned", self.bound_s, f"zero {chosen.zero} is no slower"
                    )
                )
        return found


def chosen_of(candidates: Sequence[Candidate], staged: Staged) -> Candidate:
    """Of candidates that are solved together, the one that `staged` is a plan of, with the plan's
    schedule, stages per rank and recompute mode.
    """
    schedule = staged.schedule
    return replace(
        candidates[staged.variant],
        recompute=staged.recompute,
        schedule=schedule.name if schedule.ranks > 1 else "none",
        stages_per_rank=schedule.stages_per_rank,
        schedules=(),
    )
