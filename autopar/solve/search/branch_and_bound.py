"""The search over candidates on devices of one kind: mesh, micro-batch, ZeRO and recomputation,
each with its best placement and stages.

It is best-first, with lower bounds of increasing cost. Every candidate has a bound. In a pipeline
there is one for all ZeRO stages that shard (`zero_variants.py`).

A candidate with fixed recomputation and stages (`steps.py`) passes these steps:

- annotated: every op has its cheapest strategy (`quick_time_bound`).
- relaxed: the LP relaxation, including memory (`prepare`).
- solved: the placement itself, by CP-SAT if the relaxation is not integral.

A candidate whose recomputation and stages are optimized with the placement (`uniform_solver.py`)
passes these:

- opened: the cell's bound without a memory limit (`Cell.glance_s`). The cell is annotated once for
  many candidates.
- sketched: also with the memory limit (`Cell.sketch`).
- relaxed: by totals over all ranks (`raise_bounds`), then by the row of minimal costs (`narrow`).
- solved: the best of some placements, each with its best staging.
- narrowed: placements are split into families, a few at a time, until none can be faster than the
  best plan.

`driver.py` has the branch and bound itself. A longer search uses several processes
(`work_sharing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf
from random import Random

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.integer_program.placement_solver import Infeasible, smallest_memory
from autopar.solve.search import steps
from autopar.solve.search.board import Board
from autopar.solve.search.candidate_models import ModelOf
from autopar.solve.search.candidate_state import Entry, FixedSolver
from autopar.solve.search.driver import Driver, shape_of
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.result import SearchResult
from autopar.solve.search.search_state import SearchState
from autopar.solve.search.staged_placement import fullest_lean_rank_bytes, lean_schedules
from autopar.solve.search.steps import bound_quickly, relax_candidate, solve_fixed
from autopar.solve.search.uniform_solver import ALONE, UniformSolver
from autopar.solve.search.work_sharing import Sharing
from autopar.solve.search.workers import Team, patience_s

_TURNS = 6
"""Number of bounds that are raised before the next candidate is solved, since a plan prunes others.
After a candidate was solved without a better plan, twice as many, then three times, and so on.
"""

_HASTY = 2
"""Number of candidates solved without a better plan before all bounds of others are raised
first.
"""

_MANY_CELLS = 200
"""Number of cells above which candidates are opened by a bound that is cheaper and lower, so that all
have one early. Mixtures of experts on hundreds of devices have more.
"""

_SPLITS = 4
"""Number of families of a candidate that are split before the next candidate has its turn."""

_MOST_SPLITS, _BOUNDS, _CLOSE = 48, 4, 1e-3
"""Limits on proving a plan to be the best.

They are the total number of families split, and how many raised bounds count as one split more,
since they take about as long. The third is the fraction of the best time within which these limits
apply. If a candidate may be faster by more than that fraction, splitting continues while there is
time.
"""

_PATIENCE = 40
"""After this many splits a solved candidate is weighted as one third as promising as its bound
says; at first, one half.
"""

_FAR = 1.5
"""A candidate is not solved out of turn if it is expected to take longer than another one by more
than this factor. First bounds leave out what is paid once a step, which is much on slow networks.
"""

_BOUNDS_TO_RAISE = 3
"""Number of bounds raised before a candidate is solved: a sketch, the bound by totals, and the
first family.
"""


def search(
    candidates: Iterable[Candidate],
    annotate: Callable[[Candidate], AnnotatedModel],
    capacity_bytes: int | None,
    limits: SearchLimits | None = None,
    progress: Callable[[str], None] | None = None,
    cell_of: Callable[[Candidate], Hashable] = lambda candidate: candidate,
    likely: Sequence[int] = (),
) -> SearchResult:
    """The fastest placement over all candidates, with a lower bound on all of them, as a
    `SearchResult`. Devices are of one kind.

    Args:
        candidates: the candidates to search.
        annotate: returns the model of a candidate.
        capacity_bytes: memory of a device; None if unlimited.
        limits: time and processes.
        progress: called with one line of text for each event.
        cell_of: a key for candidates. Candidates with equal keys must have ops with the same costs;
            with equal `parameters` too, also the same costs of parameters.
        likely: indices of candidates that are likely good. A search of many cells solves them
            first, since a plan prunes others.
    """
    limits, tell = limits or SearchLimits(), progress or (lambda text: None)
    driver = driver_of(list(candidates), annotate, capacity_bytes, limits, tell, cell_of, likely)
    return driver.run()


def driver_of(
    candidates: Sequence[Candidate],
    annotate: Callable[[Candidate], AnnotatedModel],
    capacity_bytes: int | None,
    limits: SearchLimits,
    progress: Callable[[str], None],
    cell_of: Callable[[Candidate], Hashable],
    likely: Sequence[int] = (),
) -> Driver:
    """A search over candidates that has not started; `run()` starts it. The arguments are those of
    `search`.
    """
    members = solved_together(candidates)
    entries = [
        Entry(candidates[first], tuple(candidates[n] for n in others)) for first, *others in members
    ]
    cells: dict[Hashable, int] = {}
    kinds: dict[Hashable, int] = {}
    cell_numbers, kind_numbers = [], []
    for entry in entries:
        c, kind = entry.candidate, tuple(one.holds for one in (entry.candidate, *entry.others))
        cell = (cell_of(c), c.modes) if c.is_joint else c
        cell_numbers.append(cells.setdefault(cell, len(cells)))
        kind_numbers.append(kinds.setdefault(kind, len(kinds)))
    state = SearchState(
        entries=entries,
        limits=limits,
        progress=progress,
        board=Board(len(entries), len(cells), len(kinds), limits.processes > 1),
    )
    refiner = UniformRefiner(
        state=state,
        annotate=annotate,
        capacity_bytes=capacity_bytes,
        cells=cell_numbers,
        kinds=kind_numbers,
        names=tuple(cells),
    )
    sharing = Sharing(
        state=state, team=Team(progress, stuck_s=patience_s(limits.time_s)), cells=cell_numbers
    )
    first: list[int] = []
    if len(cells) > _MANY_CELLS:
        entry_of = {one: number for number, group in enumerate(members) for one in group}
        first = [entry_of[one] for one in likely]
    return Driver(
        state=state,
        refiner=refiner,
        sharing=sharing,
        members=members,
        order=_order(entries),
        first=tuple(dict.fromkeys(first)),
    )


def solved_together(candidates: Sequence[Candidate]) -> list[list[int]]:
    """Lists of candidate indices, one list for each group that is solved together. In a pipeline,
    joint candidates that differ only in `shard` or in a ZeRO stage above 0 form a group, since they
    differ little. All others are alone.
    """
    together: dict[Hashable, list[int]] = {}
    for number, c in enumerate(candidates):
        alike = c.is_joint and c.mesh.pp > 1 and c.zero > 0
        together.setdefault(replace(c, zero=0, shard=0) if alike else number, []).append(number)
    return list(together.values())


def _order(entries: Sequence[Entry]) -> list[int]:
    """Indices of entries in the order of opening. Data parallelism alone comes first, with large
    micro-batches before small ones. Of others small micro-batches come first, with all meshes mixed
    at random (a fixed seed). All kinds of meshes are then opened if time runs out.
    """
    random = Random(0)
    meshes = dict.fromkeys(entry.candidate.mesh for entry in entries)
    turn = {mesh: random.random() for mesh in meshes}

    def place(number: int) -> tuple[bool, int, float]:
        candidate = entries[number].candidate
        mesh, size = candidate.mesh, candidate.micro_batch
        is_alone = mesh.dp == mesh.num_devices and mesh.ep == 1
        return not is_alone, -size if is_alone else size, turn[mesh]

    return sorted(range(len(entries)), key=place)


@dataclass(slots=True, kw_only=True)
class UniformRefiner:
    """The `Refiner` for devices of one kind: opens, bounds and solves candidates.

    `cells` has the cell index of each entry (ops of one cell cost the same). `kinds` has its kind:
    entries of one kind hold the same bytes of parameters. `names` has the key of each cell.
    `known_cells` and `held` are caches.
    """

    opening_share = 0.65
    most_beside = 3
    without_plan = "infeasible"

    state: SearchState
    annotate: Callable[[Candidate], AnnotatedModel]
    capacity_bytes: int | None
    cells: Sequence[int]
    kinds: Sequence[int]
    names: Sequence[Hashable]
    known_cells: dict[int, Cell] = field(default_factory=dict)  # by number
    # by kind, bytes: static of a segment by class, fixed
    held: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    dived: set[MeshShape] = field(default_factory=set)  # of which some candidate was solved
    raised: int = 0  # bounds
    in_vain: int = 0  # candidates that were solved since the best one was found
    due: int = _TURNS  # after this many raised bounds, the next candidate is solved out of turn

    def cells_by_name(self) -> dict[Hashable, Cell]:
        """The cells that were made in this process, by their keys."""
        return {self.names[number]: cell for number, cell in self.known_cells.items()}

    def open(self, number: int) -> None:
        """Makes the solver of entry `number` and finds its first lower bound. If stages or
        recompute modes are open, that is the cell's bound with unlimited memory; otherwise the
        cheapest strategy of every op. Closes the entry as infeasible if it is known not to fit.
        """
        entry = self.state.entries[number]
        candidate, most = entry.candidate, self.state.board.too_much[self.kinds[number]]
        if candidate.is_joint and candidate.micro_batch > most:
            entry.close("infeasible", f"a micro-batch of {most:.0f} does not fit", inf)
            return
        entry.outcome, entry.is_opened = "open", True
        if candidate.is_joint:
            solver = entry.solver = self._solver(entry, self.cells[number])
            entry.bounds_left = _BOUNDS_TO_RAISE
            is_hasty = len(self.names) > _MANY_CELLS
            entry.bound_s = solver.bounds.glance(candidate.num_microbatches, is_hasty)
        else:
            model = self.annotate(candidate)
            _check_micro_batches(candidate, model)
            bound_quickly(entry, model, self.capacity_bytes)

    def _solver(self, entry: Entry, number: int) -> UniformSolver:
        """A new solver of a joint candidate. It shares the cell with index `number` with other
        candidates; the cell is made if it is new.
        """
        candidate, cells, annotate = entry.candidate, self.known_cells, self.annotate

        def model_of(
            candidate: Candidate,
        ) -> ModelOf:  # not of the search, which ends without a cycle
            return cache(lambda mode: annotate(replace(candidate, recompute=mode)))

        first, *others = map(model_of, (candidate, *entry.others))
        if number not in cells:
            cells[number] = Cell(first, candidate.modes)
        schedules = tuple(
            Schedule(name, entry.ranks, count, candidate.stage_sizes)
            for name, count in candidate.schedules
        ) or (ALONE,)
        return UniformSolver(
            first, candidate.modes, schedules, self.capacity_bytes, cells[number], tuple(others)
        )

    def advance(self, number: int, at_once: bool) -> None:
        """One step of entry `number`: raises its bound, solves it, or splits its families. With
        `at_once`, steps are repeated until it is solved or cannot be the best. The same holds for
        the first promising candidate of each mesh, and after many bounds were raised, since a plan
        prunes others. In any case it stops once another candidate is far more promising.
        """
        entry, state = self.state.entries[number], self.state
        together = isinstance(entry.solver, UniformSolver)
        if isinstance(entry.solver, UniformSolver) and entry.bounds_left == _BOUNDS_TO_RAISE:
            self._sketch(entry, entry.solver, self.kinds[number])
            if not at_once or entry.outcome != "open" or entry.bound_s >= state.wanted_s:
                return
        is_new = shape_of(entry.candidate) not in self.dived and entry.estimate_s < state.wanted_s
        at_once = at_once or is_new or self.raised > self.due
        row_waits = at_once and self.in_vain < _HASTY and together and not entry.is_solved
        while entry.outcome == "open":
            self._step(entry, row_waits)
            if not at_once or entry.is_solved or entry.bound_s >= state.wanted_s:
                return
            if state.queue and entry.estimate_s > _FAR * state.queue[0][1]:
                return

    def _step(self, entry: Entry, row_waits: bool) -> None:
        """One step of an open candidate: raises its bound, solves it, or splits its families,
        whichever is next. `row_waits`: its last bound is raised only after it is solved.
        """
        solver = entry.solver
        if isinstance(solver, FixedSolver):
            if solver.prepared is None:
                self.raised += 1
                relax_candidate(entry, solver, self.capacity_bytes)
            else:
                self._count_solved(entry)
                if solve_fixed(self.state, entry, solver.prepared, self.capacity_bytes):
                    self._set_in_vain(0)
        elif not isinstance(solver, UniformSolver):
            raise TypeError(f"{entry.candidate} is open, but has no solver: {solver!r}")
        elif entry.bounds_left > row_waits:
            self.raised += 1
            _check_micro_batches(entry.candidate, solver.models.first)
            steps.raise_bound(self.state, entry, solver)
        elif not entry.is_solved:
            self._count_solved(entry)
            if steps.solve(self.state, entry, solver):
                self._set_in_vain(0)
            self._lengthen(entry)
        else:
            self._narrow(entry, solver)

    def _sketch(self, entry: Entry, solver: UniformSolver, kind: int) -> None:
        """Raises the bound of an entry by its cell's sketch, with the bytes of parameters that its
        `kind` holds. Closes it as infeasible if these bytes, or those of a smaller micro-batch, do
        not fit.
        """
        candidate, cell, too_much = entry.candidate, solver.bounds.cell, self.state.board.too_much
        entry.bounds_left -= 1
        if candidate.micro_batch > too_much[kind]:
            entry.close("infeasible", f"a micro-batch of {too_much[kind]:.0f} does not fit", inf)
            return
        if kind not in self.held:
            model = solver.models.least_of(candidate.modes[0])
            self.held[kind] = least_static_by_class(model), model.fixed_bytes
        static, fixed = self.held[kind]
        segments_bytes = sum(static[index] for index in cell.first.segments)
        entry.least_bytes = fixed + segments_bytes // entry.ranks + cell.moment_bytes
        if self.capacity_bytes is not None and entry.least_bytes > self.capacity_bytes:
            entry.close("infeasible", f"needs at least {entry.least_bytes} bytes", inf)
            too_much[kind] = min(too_much[kind], candidate.micro_batch)
            return
        wanted_s = self.state.wanted_s
        entry.expect(
            *solver.bounds.raise_by_cell(static, fixed, candidate.num_microbatches, wanted_s)
        )

    def _narrow(self, entry: Entry, solver: UniformSolver) -> None:
        """Splits some families of placements of an entry. Closes it instead if enough were split in
        the search, and its bound is within 0.1 % of the best time. It is closed at once if its
        devices wait for the host, since families are bounded by the device.
        """
        splits = sum(one.splits for one in self.state.entries)
        waits = entry.solution is not None and "host" in entry.solution.breakdown
        is_close = entry.bound_s >= (1 - _CLOSE) * self.state.best_s
        if waits or (is_close and splits >= max(_MOST_SPLITS, self.raised // _BOUNDS)):
            outcome = "solved" if entry.solution else "unexplored"
            why = "its devices wait for the host" if waits else f"{splits} families were split"
            entry.close(outcome, why, entry.bound_s)
            return
        if steps.narrow(self.state, entry, solver, _SPLITS):
            self._set_in_vain(0)
        self._lengthen(entry)

    def _lengthen(self, entry: Entry) -> None:
        """Sets how much longer than its bound the candidate's step is expected to be
        (`lengthened`), which orders the queue. It is a larger part of the distance to the best
        time, the more families were split in vain.
        """
        entry.lengthened, best_s = 0.0, self.state.best_s
        if best_s < inf and entry.bound_s > 0:
            part = (entry.splits + _PATIENCE) / (entry.splits + 2 * _PATIENCE)
            entry.lengthened = max(best_s / entry.bound_s - 1, 0.0) * part

    def _count_solved(self, entry: Entry) -> None:
        """Counts a solved candidate, and notes that its mesh was tried. While no plan is known, the
        next one is solved soon; otherwise later.
        """
        self.dived.add(shape_of(entry.candidate))
        self._set_in_vain(self.in_vain + (self.state.best_s < inf))

    def _set_in_vain(self, count: int) -> None:
        self.in_vain, self.due = count, self.raised + _TURNS * (1 + count)

    def smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The candidate that needs least memory, with its `Infeasible`; None if none has a
        consistent placement. Tries the smallest lower bounds first. Skips micro-batches larger
        than one known not to fit. Out of time, it returns the least so far.
        """
        too_much = self.state.board.too_much
        bounds = sorted(
            (entry.least_bytes, number)
            for number, entry in enumerate(self.state.entries)
            if entry.least_bytes is not None
            and entry.candidate.micro_batch <= too_much[self.kinds[number]]
        )
        least_bytes, found = inf, None
        for bound_bytes, number in bounds:
            if bound_bytes >= least_bytes:
                break
            entry = self.state.entries[number]
            for candidate in (entry.candidate, *entry.others):
                left_s = self.state.time_left_s
                # what is left may need less, but not less than this bound
                if found is not None and left_s == 0.0:
                    known_bytes = found[1].bound_bytes
                    least = bound_bytes if known_bytes is None else min(known_bytes, bound_bytes)
                    return found[0], replace(found[1], bound_bytes=least)
                result = self._least_memory(candidate, bound_bytes, left_s)
                if result.memory_bytes is not None and result.memory_bytes < least_bytes:
                    least_bytes, found = result.memory_bytes, (candidate, result)
        return found

    def _least_memory(self, candidate: Candidate, bound_bytes: int, limit_s: float) -> Infeasible:
        """An `Infeasible` with the bytes of the leanest placement of a candidate, in the recompute
        mode that keeps least. In a pipeline, it has the bytes of the fullest rank under the schedule
        and with the stages that hold least, and `bound_bytes` as its bound. CP-SAT runs for at most
        `limit_s` seconds, or 1 if that is less.
        """
        threads, found = self.state.limits.threads, list[Infeasible]()
        for one in lean_schedules(candidate):
            model = self.annotate(replace(one, recompute=candidate.modes[-1]))
            result = smallest_memory(model, self.capacity_bytes or 0, max(limit_s, 1.0), threads)
            if model.pipeline is not None and result.choices is not None:
                fullest = fullest_lean_rank_bytes(model, result.choices)
                result = replace(result, memory_bytes=fullest, bound_bytes=bound_bytes)
            found.append(result)
        known = [one for one in found if one.memory_bytes is not None]
        return min(known, key=lambda one: one.memory_bytes or 0, default=found[0])


def _check_micro_batches(candidate: Candidate, model: AnnotatedModel) -> None:
    if model.num_microbatches != candidate.num_microbatches:
        raise ValueError(
            f"{candidate}: {candidate.num_microbatches} micro-batches asked for, {model.num_microbatches} annotated"
        )
