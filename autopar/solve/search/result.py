"""The result of a search."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.simplicity import Simplicity
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.candidate import INFINITE, Candidate
from autopar.solve.integer_program.placement_solver import Infeasible, Solution


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search. `best` is (candidate, solution) or None; `bound_s` is a lower bound
    on all candidates.

    Values of `status`:

    - 'optimal'.
    - 'feasible': the time limit was reached; see `bound_s`.
    - 'infeasible': it is proved that nothing fits.
    - 'not found': on devices of several kinds, no tried placement fits.
    - 'time limit': nothing was found.

    `outcomes` has one dict per candidate, in order, for `Certificate.meshes`. Its `outcome` is
    'chosen', 'solved', 'pruned', 'infeasible', 'too large' (the fastest placement of a pipeline
    does not fit its stages), or 'unexplored' because of the time limit. `bound_s` is None for an
    infeasible one.
    """

    status: str
    best: tuple[Candidate, Solution] | None
    # of the best candidate: with a class for each class and mode, if recompute modes are mixed
    model: AnnotatedModel | None
    # then for each class of `model`: class of the traced model, recompute mode
    origin: tuple[tuple[int, str], ...] | None
    bound_s: float  # no placement of any candidate that fits is faster
    outcomes: tuple[dict, ...]
    # if nothing fits: the least memory over all candidates
    smallest: tuple[Candidate, Infeasible] | None
    solve_time_s: float
    groups: tuple[
        AnnotatedModel, ...
    ] = ()  # on devices of several kinds: `model` at the prices of each (`mixed_devices.py`)
    fastest: tuple[Candidate, Solution] | None = None  # if `best` is a simpler one (`simplest.py`)
    # whether `best` is slower than `fastest` so that tensor parallelism stays on fast links
    tp_inside: bool = False
    simpler_left: tuple[Simplicity, ...] = ()  # simpler kinds of candidates without plan and proof
    glances_s: tuple[float, ...] = ()  # for each candidate, its first bound; infinite without one
    cells: dict[Hashable, Cell] = field(default_factory=dict, repr=False, compare=False)
    runners_up: tuple[dict, ...] = ()  # for `Certificate.runners_up`
    unlimited_s: float | None = None  # time on the chosen mesh with all memory of a device

    @property
    def fastest_s(self) -> float:
        """Step seconds of the fastest plan that was found; infinite without one."""
        known = self.fastest or self.best
        return INFINITE if known is None else known[1].time_s

    @property
    def gap(self) -> float:
        """(time - bound) / time of the fastest plan. 0 means proved optimal, up to
        `OPTIMALITY_GAP`; 1 means that no plan was found.
        """
        if self.best is None:
            return 1.0
        return (self.fastest_s - self.bound_s) / max(self.fastest_s, 1e-300)


def outcome_data(
    c: Candidate, found: Solution | None, outcome: str, bound_s: float, reason: str
) -> dict:
    """One candidate as a dict: its choices, `outcome`, `reason`, and the plan's `time_s` and
    `memory_bytes` (None without a plan). `bound_s` is None if it is infinite.
    """
    return {
        "mesh": c.mesh.as_dict(),
        "micro_batch": c.micro_batch,
        "num_microbatches": c.num_microbatches,
        "zero": c.zero,
        "shard": c.shard,
        "recompute": c.recompute,
        "stages_per_rank": c.stages_per_rank,
        "schedule": c.schedule,
        "outcome": outcome,
        "time_s": found and found.time_s,
        "memory_bytes": found and found.memory_bytes,
        "bound_s": None if bound_s == INFINITE else bound_s,
        "reason": reason,
    }
