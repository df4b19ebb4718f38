"""The search over candidates on devices of one kind: mesh, micro-batch, ZeRO and recompute, each with its best placement, and in a
pipeline its best stages.

Best-first, with lower bounds of increasing price. Every candidate has a bound (in a pipeline one for all ZeRO stages that share out,
`zero_variants.py`). Of a candidate whose recomputation and stages are fixed (`fixed_candidates.py`):

    annotated   every op at its cheapest strategy (`quick_time_bound`)
    relaxed     the LP relaxation, memory included (`prepare`)
    solved      the placement itself, by CP-SAT if the relaxation is not integral

and of one where they are found together with the placement (`uniform_solver.py`):

    opened      what its cell tells in whatever memory (`Cell.glance_s`), which is annotated once for many candidates
    sketched    also what memory asks for (`Cell.sketch`)
    relaxed     by totals of all ranks (`raise_bounds`), then by the row of what no placement goes below (`narrow`)
    solved      the best of some placements, each staged best
    narrowed    placements are split into families until none may be faster than the best plan, a few at a time

`driver.py` has the branch and bound itself. A search that goes on for a while is shared out to several processes (`work_sharing.py`).
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
from autopar.solve.costs.pipeline_cost import pipelined
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.integer_program.placement_solver import Infeasible, smallest_memory
from autopar.solve.search import steps
from autopar.solve.search.board import Board
from autopar.solve.search.candidate_models import ModelOf
from autopar.solve.search.candidate_state import Entry, FixedSolver
from autopar.solve.search.driver import Driver, shape_of
from autopar.solve.search.fixed_candidates import bound_quickly, relax, solve_fixed
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.result import SearchResult
from autopar.solve.search.search_state import SearchState
from autopar.solve.search.uniform_solver import ALONE, UniformSolver
from autopar.solve.search.work_sharing import Sharing
from autopar.solve.search.workers import Team

_TURNS = 6
"""So many bounds are raised before the next candidate is solved, since what is found prunes others; twice as many after one that was solved
in vain, then three times, and so on."""

_HASTY = 2
"""So many candidates are solved in vain before others have all their bounds raised first."""

_SPLITS = 4
"""How many families of a candidate are split before the next candidate has its turn."""

_MOST_SPLITS, _BOUNDS, _CLOSE = 48, 4, 1e-3
"""How many families are split in all to prove a plan to be the best; more where more bounds were raised, one for each `_BOUNDS`, which
take about as long, and as many as there is time for while a candidate may be faster by more than so much of the best."""

_PATIENCE = 40
"""A candidate that is solved counts as half as promising as its bound says; after so many splits as a third."""

_BOUNDS_TO_RAISE = 3
"""A sketch, the bounds by totals and the first family."""


def search(
    candidates: Iterable[Candidate],
    annotate: Callable[[Candidate], AnnotatedModel],
    capacity_bytes: int | None,
    limits: SearchLimits | None = None,
    progress: Callable[[str], None] | None = None,
    cell_of: Callable[[Candidate], Hashable] = lambda candidate: candidate,
) -> SearchResult:
    """The fastest placement over all candidates.

    Args:
        candidates: What the search goes through.
        annotate: The model of a candidate.
        capacity_bytes: Memory of a device; None if it does not matter.
        limits: Time and processes.
        progress: Gets one line of text for each event.
        cell_of: Candidates for which it is equal must have ops that cost the same, and those of one `parameters` the same parameters.
    """
    limits, tell = limits or SearchLimits(), progress or (lambda text: None)
    return driver_of(list(candidates), annotate, capacity_bytes, limits, tell, cell_of).run()


def driver_of(
    candidates: Sequence[Candidate],
    annotate: Callable[[Candidate], AnnotatedModel],
    capacity_bytes: int | None,
    limits: SearchLimits,
    progress: Callable[[str], None],
    cell_of: Callable[[Candidate], Hashable],
) -> Driver:
    """A search that has not begun; arguments as of `search`."""
    members = _solved_together(candidates)
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
    )
    sharing = Sharing(state=state, team=Team(progress), cells=cell_numbers)
    return Driver(
        state=state, refiner=refiner, sharing=sharing, members=members, order=_order(entries)
    )


def _solved_together(candidates: Sequence[Candidate]) -> list[list[int]]:
    """The numbers of candidates, those together that are solved together.

    In a pipeline, ZeRO stages that share out differ little."""
    together: dict[Hashable, list[int]] = {}
    for number, c in enumerate(candidates):
        alike = c.is_joint and c.mesh.pp > 1 and c.zero > 0
        together.setdefault(replace(c, zero=0, shard=0) if alike else number, []).append(number)
    return list(together.values())


def _order(entries: Sequence[Entry]) -> list[int]:
    """The numbers of candidates as they are opened: the small micro-batches of all meshes first, so that meshes of all sorts are known if
    time ends."""
    random = Random(0)
    meshes = dict.fromkeys(entry.candidate.mesh for entry in entries)
    turn = {mesh: random.random() for mesh in meshes}
    return sorted(
        range(len(entries)),
        key=lambda n: (entries[n].candidate.micro_batch, turn[entries[n].candidate.mesh]),
    )


@dataclass(slots=True, kw_only=True)
class UniformRefiner:
    """The `Refiner` of candidates on devices of one kind.

    By entry, `cells` has the number of its cell, and `kinds` that of its kind: parameters of one kind hold the same bytes.
    """

    opening_share = 0.5
    most_beside = 3
    without_plan = "infeasible"

    state: SearchState
    annotate: Callable[[Candidate], AnnotatedModel]
    capacity_bytes: int | None
    cells: Sequence[int]
    kinds: Sequence[int]
    known_cells: dict[int, Cell] = field(default_factory=dict)  # by number
    # by kind, bytes: static of a segment by class, fixed
    held: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    dived: set[MeshShape] = field(default_factory=set)  # of which some candidate was solved
    raised: int = 0  # bounds
    in_vain: int = 0  # candidates that were solved since the best one was found
    due: int = _TURNS  # with so many bounds raised, the next candidate is solved out of turn

    def open(self, number: int) -> None:
        """Find the first bound of a candidate."""
        entry = self.state.entries[number]
        candidate, most = entry.candidate, self.state.board.too_much[self.kinds[number]]
        if candidate.is_joint and candidate.micro_batch > most:
            entry.close("infeasible", f"a micro-batch of {most:.0f} does not fit", inf)
            return
        entry.outcome, entry.is_opened = "open", True
        if candidate.is_joint:
            solver = entry.solver = self._solver(entry, self.cells[number])
            entry.bounds_left = _BOUNDS_TO_RAISE
            entry.bound_s = solver.bounds.glance(candidate.num_microbatches)
        else:
            model = self.annotate(candidate)
            _check_micro_batches(candidate, model)
            bound_quickly(entry, model, self.capacity_bytes)

    def _solver(self, entry: Entry, number: int) -> UniformSolver:
        """The solver of a candidate, with what it shares with others of its cell."""
        candidate, cells, annotate = entry.candidate, self.known_cells, self.annotate

        def model_of(
            candidate: Candidate,
        ) -> ModelOf:  # not of the search, which ends without a cycle
            return cache(lambda mode: annotate(replace(candidate, recompute=mode)))

        first, *others = map(model_of, (candidate, *entry.others))
        if number not in cells:
            cells[number] = Cell(first, candidate.modes)
        schedules = tuple(
            Schedule(name, entry.ranks, count) for name, count in candidate.schedules
        ) or (ALONE,)
        return UniformSolver(
            first, candidate.modes, schedules, self.capacity_bytes, cells[number], tuple(others)
        )

    def advance(self, number: int, at_once: bool) -> None:
        """The next bound of a candidate, or its solution; both if asked for, and for the first of each mesh that is likely to be better,
        since what is found prunes others."""
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

    def _step(self, entry: Entry, row_waits: bool) -> None:
        """`row_waits`: the bound by the row is raised after the candidate is solved."""
        solver = entry.solver
        if isinstance(solver, FixedSolver):
            if solver.prepared is None:
                self.raised += 1
                relax(entry, solver, self.capacity_bytes)
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
        """A bound of a candidate by what its cell tells and the bytes that candidates of its kind hold."""
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
        """Split some families of a candidate."""
        splits = sum(one.splits for one in self.state.entries)
        is_close = entry.bound_s >= (1 - _CLOSE) * self.state.best_s
        if is_close and splits >= max(_MOST_SPLITS, self.raised // _BOUNDS):
            outcome = "solved" if entry.solution else "unexplored"
            entry.close(outcome, f"{splits} families were split", entry.bound_s)
            return
        if steps.narrow(self.state, entry, solver, _SPLITS):
            self._set_in_vain(0)
        self._lengthen(entry)

    def _lengthen(self, entry: Entry) -> None:
        """Those that may hold a good plan and are not solved yet go first, then those that were not split often in vain."""
        entry.lengthened, best_s = 0.0, self.state.best_s
        if best_s < inf and entry.bound_s > 0:
            part = (entry.splits + _PATIENCE) / (entry.splits + 2 * _PATIENCE)
            entry.lengthened = max(best_s / entry.bound_s - 1, 0.0) * part

    def _count_solved(self, entry: Entry) -> None:
        """A candidate of its mesh is solved, and the next one out of turn is due later; soon, as long as nothing is found."""
        self.dived.add(shape_of(entry.candidate))
        self._set_in_vain(self.in_vain + (self.state.best_s < inf))

    def _set_in_vain(self, count: int) -> None:
        self.in_vain, self.due = count, self.raised + _TURNS * (1 + count)

    def smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The least memory over all candidates, most promising first; None if no candidate has a consistent placement."""
        bounds = sorted(
            (entry.least_bytes, number)
            for number, entry in enumerate(self.state.entries)
            if entry.least_bytes is not None
        )
        least_bytes, found = inf, None
        for bound_bytes, number in bounds:
            if bound_bytes >= least_bytes:
                break
            entry = self.state.entries[number]
            for candidate in (entry.candidate, *entry.others):
                left_s = max(2 * self.state.limits.time_s - self.state.elapsed_s, 0.0)
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
        """What the leanest placement of a candidate needs; in a pipeline at least `bound_bytes`."""
        model = self.annotate(replace(candidate, recompute=candidate.modes[-1]))
        threads = self.state.limits.threads
        result = smallest_memory(model, self.capacity_bytes or 0, max(limit_s, 1.0), threads)
        if model.pipeline is not None and result.choices is not None:
            fullest = max(pipelined(model, result.choices).memory_bytes)
            result = replace(result, memory_bytes=fullest, bound_bytes=bound_bytes)
        return result


def _check_micro_batches(candidate: Candidate, model: AnnotatedModel) -> None:
    if model.num_microbatches != candidate.num_microbatches:
        raise ValueError(
            f"{candidate}: {candidate.num_microbatches} micro-batches asked for, {model.num_microbatches} annotated"
        )
