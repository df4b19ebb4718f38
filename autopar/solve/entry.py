"""A candidate on its way through a search."""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.candidate import Candidate, outcome_data
from autopar.solve.joint import Joint, Staged
from autopar.solve.placement import Prepared, Solution


@dataclass(slots=True)
class Entry:
    """A candidate and what is known of it so far."""

    candidate: Candidate
    model: AnnotatedModel | None = None
    prepared: Prepared | None = None
    outcome: str = "unexplored"
    reason: str = "the time limit came first"
    bound_s: float = 0.0
    lengthened: float = 0.0  # by what share the step is likely to be longer
    solution: Solution | None = None
    joint: Joint | None = None
    staged: Staged | None = None
    least_bytes: int = 0  # of the fullest rank
    bounds_left: int = 2  # how many times it can be raised before the candidate is solved
    is_solved: bool = False  # of a joint one: families are left
    splits: int = 0  # of families, so far
    is_opened: bool = False

    @property
    def estimate_s(self) -> float:
        """What the step is likely to take."""
        return self.bound_s * (1 + self.lengthened)

    @property
    def turn(self) -> tuple[bool, float]:
        """Candidates are looked at in this order: a good one comes early and prunes the rest, and families are split when all are known."""
        return self.splits > 0, self.estimate_s

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline: what all stages need together is at most so many times what the fullest or slowest needs."""
        return self.candidate.mesh.pp

    def close(self, outcome: str, reason: str, bound_s: float) -> None:
        self.outcome, self.reason, self.bound_s, self.prepared = outcome, reason, bound_s, None

    def alone(self) -> Entry:
        """The same as another process needs it."""
        return replace(self, candidate=self.chosen(), model=None, prepared=None, staged=None, joint=None)

    def chosen(self) -> Candidate:
        """The candidate with what was found."""
        if self.staged is None:
            return self.candidate
        schedule = self.staged.schedule
        name, count = (schedule.name if schedule.ranks > 1 else "none"), schedule.stages_per_rank
        return replace(self.candidate, recompute=self.staged.recompute, schedule=name, stages_per_rank=count, schedules=())

    def as_dict(self) -> dict:
        return outcome_data(self.chosen(), self.solution, self.outcome, self.bound_s, self.reason)
