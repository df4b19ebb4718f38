"""The search on devices of several kinds: pipelines in which each rank lies within one *group* of
devices of one kind.

Every group has its own model: the same classes and strategies, at its own prices. A candidate's
mesh says which rank is on which group (`MeshShape.groups`). All ranks have the same placement. The
number of blocks of a rank, and what they recompute, depends on its devices.

- Placements: those that are optimal on one of the groups at some price of a byte (`CandidateBounds`
  of that group alone).
- Stages: each placement is staged exactly, with a row of its units for each group
  (`staging_of_ranks`).
- Bound by weights: for any weights w of the ranks, a step takes at least the sum of w x (work of a
  rank). A unit costs at least the minimum of w x (its work there) over the ranks that can have it
  (`weighted_ranks.py`).
- Bound by rows: segments with the minimum of each cost over placements (`least_costs`), with the
  best staging.
- Bound by families: the same for the remaining placements when ops lose strategies
  (`family_bounds.py`), in a branch and bound.

Work is not one number that ranks divide: a unit may be half of the work on one group and a third on
another. A bound therefore adds units, not fractions. `driver.py` has the branch and bound itself;
`mixed_solver.py` solves one candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds.cell import Cell
from autopar.solve.bounds.weighted_ranks import Weighted
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.placement_solver import Infeasible
from autopar.solve.search import steps
from autopar.solve.search.board import Board
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.driver import Driver, shape_of
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.mixed_solver import MixedSolver
from autopar.solve.search.result import SearchResult
from autopar.solve.search.search_state import SearchState
from autopar.solve.search.staged_placement import staged_placement
from autopar.solve.search.work_sharing import Sharing
from autopar.solve.search.workers import Team, patience_s
from autopar.solve.staging.one_stage_per_rank import staging_of_ranks
from autopar.solve.staging.row_of_costs import row_of_placement

_DIVES = 4
"""Number of candidates that are staged at once, before more bounds are raised."""

_EARLY = 16
"""Number of candidates that are staged before families are split: a good plan prunes more than they
do.
"""

_TURNS = 6
"""Number of bounds raised for each candidate that is staged, since a plan prunes others."""

_SPLITS = 4
"""Number of families of a candidate that are split before the next candidate has its turn."""

_MOST_SPLITS = 32
"""Total number of families that are split."""


def search_groups(
    candidates: Iterable[Candidate],
    annotate: Callable[[Candidate, int], AnnotatedModel],
    capacities: Sequence[int | None],
    limits: SearchLimits | None = None,
    progress: Callable[[str], None] | None = None,
    cell_of: Callable[[Candidate, int], Hashable] = lambda candidate, group: (candidate, group),
) -> SearchResult:
    """The fastest plan over all candidates within the time limit, with a lower bound on all of
    them, on devices of several kinds, as a `SearchResult`. It runs in one process.

    `annotate(candidate, group)` returns the model at the prices of a group of devices; the models
    of all groups have the same classes, strategies and bytes. `capacities` has the bytes of a
    device of each group (None: unlimited). `cell_of` is as in `search`, for each group.
    """
    entries = [Entry(candidate) for candidate in candidates]
    numbers = range(len(entries))
    state = SearchState(
        entries=entries,
        limits=replace(limits or SearchLimits(), processes=1),
        progress=progress or (lambda text: None),
        board=Board(len(entries), len(entries), 1, is_shared=False),
    )
    refiner = MixedRefiner(
        state=state,
        capacities=capacities,
        cell_of=cell_of,
        models_of=cache(
            lambda c, group: {mode: annotate(replace(c, recompute=mode), group) for mode in c.modes}
        ),
        weighted=Weighted(annotate, capacities),
    )
    return Driver(
        state=state,
        refiner=refiner,
        sharing=Sharing(
            state=state,
            team=Team(state.progress, stuck_s=patience_s(state.limits.time_s)),
            cells=numbers,
        ),
        members=[[number] for number in numbers],
        order=numbers,
    ).run()


@dataclass(slots=True, kw_only=True)
class MixedRefiner:
    """The `Refiner` for devices of several kinds: opens, bounds and stages candidates.

    `models_of(candidate, group)` returns the models at the prices of a group, by recompute mode. It
    holds no reference to the search, so that no reference cycle arises. `raised` and `staged` count
    steps; `dived` has the meshes that were staged early.
    """

    opening_share = 1.0
    most_beside = 0
    without_plan = "not found"

    state: SearchState
    capacities: Sequence[int | None]
    cell_of: Callable[[Candidate, int], Hashable]
    models_of: Callable[[Candidate, int], Models]
    weighted: Weighted
    cells: dict[Hashable, Cell] = field(default_factory=dict)
    dived: set[MeshShape] = field(default_factory=set)
    raised: int = 0
    staged: int = 0

    def cells_by_name(self) -> dict[Hashable, Cell]:
        """None: nothing is restaged on devices of several kinds."""
        return {}

    def open(self, number: int) -> None:
        """Makes the solver of candidate `number`, and bounds it by weights of its ranks
        (`weighted_ranks.py`).
        """
        entry, cells, models_of = self.state.entries[number], [], self.models_of
        candidate, groups = entry.candidate, range(len(self.capacities))
        # what each group takes does not depend on where its ranks are
        alike = replace(candidate, mesh=replace(candidate.mesh, deal=""))
        for group in groups:
            key = self.cell_of(candidate, group), candidate.modes, group
            if key not in self.cells:
                self.cells[key] = Cell.of(models_of(alike, group))
            cells.append(self.cells[key])
        schedules = [
            Schedule(name, candidate.mesh.pp, 1, candidate.stage_sizes)
            for name, _ in candidate.schedules
        ]
        entry.outcome, entry.is_opened = "open", True
        solver = entry.solver = MixedSolver(
            candidate=candidate,
            models_of=lambda: [models_of(alike, group) for group in groups],
            cells=cells,
            capacities=self.capacities,
            bounds_s={
                schedule: self.weighted.least_s(candidate, alike, cells, schedule)
                for schedule in schedules
            },
        )
        entry.bound_s = solver.bound_s

    def advance(self, number: int, at_once: bool) -> None:
        """One step of candidate `number`: finds the best stages of some placements, raises its
        bound, or splits its families. Early candidates are staged before their bound is raised.
        `at_once` is ignored.
        """
        entry = self.state.entries[number]
        solver, mesh = _solver_of(entry), shape_of(entry.candidate)
        early = (
            (len(self.dived) < _DIVES and mesh not in self.dived)
            or (solver.is_raised and self.staged < _EARLY)
            or self.raised > _TURNS * (self.staged + 1)
        )
        if not entry.is_solved and (solver.frontier is not None or early):
            self.dived.add(mesh)
            self.staged += 1
            steps.solve(self.state, entry, solver)
        elif not solver.is_raised:
            self.raised += 1
            entry.expect(solver.raise_bounds(self.state.wanted_s)[0])
        else:
            self._narrow(entry, solver)
        entry.is_split = entry.is_solved and solver.frontier is not None
        if entry.outcome == "open" and entry.bound_s == inf:
            reason = "no placement fits its ranks, or none is consistent"
            entry.close("infeasible", reason, inf)

    def _narrow(self, entry: Entry, solver: MixedSolver) -> None:
        """Bounds the family of all placements of a candidate, or splits some of the remaining
        families. Closes it once `_MOST_SPLITS` families were split in the search.
        """
        splits = 0
        if entry.is_solved and solver.frontier is not None:
            splits = min(_SPLITS, _MOST_SPLITS - sum(one.splits for one in self.state.entries))
        steps.narrow(self.state, entry, solver, splits)
        entry.splits = 0 if solver.frontier is None else solver.frontier.popped
        if entry.outcome == "open" and sum(e.splits for e in self.state.entries) >= _MOST_SPLITS:
            entry.close("solved", f"{_MOST_SPLITS} families were split", entry.bound_s)

    def smallest(self) -> tuple[Candidate, Infeasible] | None:
        """Of the leanest placement of each candidate, the one that exceeds its devices' memory by
        the smallest factor, with the bytes of its fullest rank. It recomputes most and is cut as is
        fastest. None if none is consistent.
        """
        least, found = inf, None
        for entry in self.state.entries:
            solver = _solver_of(entry)
            choices = solver.leanest()
            if choices is None:
                continue
            mode = solver.candidate.modes[-1]
            rows = [row_of_placement({mode: models[mode]}, choices) for models in solver.models]
            for schedule in solver.bounds_s:
                of_ranks = [rows[group] for group in solver.groups]
                staging = staging_of_ranks(of_ranks, schedule, [None] * len(solver.groups))
                if isinstance(staging, float):
                    continue
                plan = staged_placement(solver.models, solver.groups, choices, staging, schedule)
                if plan.solution.pipelined is None:
                    raise ValueError(f"{entry.candidate} is no pipeline")
                held = plan.solution.pipelined.memory_bytes
                over, rank = max(
                    (size / (self.capacities[group] or inf), rank)
                    for rank, (size, group) in enumerate(zip(held, solver.groups, strict=True))
                )
                if found is None or over < least:
                    detail = f"rank {rank} of the pipeline, on group {solver.groups[rank]}"
                    least = over
                    found = (
                        entry.candidate,
                        Infeasible("memory", detail, 0.0, memory_bytes=held[rank]),
                    )
        return found


def _solver_of(entry: Entry) -> MixedSolver:
    if not isinstance(entry.solver, MixedSolver):
        raise TypeError(f"{entry.candidate} was not opened")
    return entry.solver
