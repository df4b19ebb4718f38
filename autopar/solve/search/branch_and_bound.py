"""The search over candidates: mesh, micro-batch, ZeRO and recompute, each with its best placement, and in a pipeline its best stages.

Best-first, with lower bounds of increasing price. Every candidate has a bound (in a pipeline one for all ZeRO stages that share out,
`zero_variants.py`); the one with the lowest (longer by what it likely takes besides) is refined next. Of a candidate whose recomputation
and stages are fixed:

    annotated   every op at its cheapest strategy (`quick_time_bound`)
    relaxed     the LP relaxation, memory included (`prepare`)
    solved      the placement itself, by CP-SAT if the relaxation is not integral

and of one where they are found together with the placement (`candidate_solver.py`):

    opened      what its cell tells in whatever memory (`Cell.glance_s`), which is annotated once for many candidates
    sketched    also what memory asks for (`Cell.sketch`)
    relaxed     by totals of all ranks (`Joint.raise_bounds`), then by the row of what no placement goes below (`Joint.narrow`)
    solved      the best of some placements, each staged best
    narrowed    placements are split into families until none may be faster than the best plan, a few at a time

A candidate is left as soon as its bound reaches the time of the best placement found, so that no pruned candidate can hold a faster one.
The bound of the whole search is the least bound over all candidates, the pruned and unexplored ones included.

A search that goes on for a while is shared out to several processes (`work_sharing.py`).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from math import inf
from random import Random

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import pipelined
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.lp_relaxation import (
    least_static_by_class,
    quick_memory_bound,
    quick_time_bound,
)
from autopar.solve.integer_program.placement_solver import (
    OPTIMALITY_GAP,
    Infeasible,
    Solution,
    prepare,
    smallest_memory,
    solve_prepared,
)
from autopar.solve.search.board import NOBODY, Board
from autopar.solve.search.candidate_solver import ALONE, Joint, Staged
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.result import SearchResult
from autopar.solve.search.work_sharing import Sharing
from autopar.solve.search.workers import Team

_TURNS = 6
"""So many bounds are raised before the next candidate is solved, since what is found prunes others; twice as many after one that was solved
in vain, then three times, and so on."""

_HASTY = 2
"""So many candidates are solved in vain before others have all their bounds raised first."""

_BESIDE = 3
"""So many candidates of the best one's mesh are solved in vain before others have their turn again."""

_SPLITS = 4
"""How many families of a candidate are split before the next candidate has its turn."""

_MOST_SPLITS, _BOUNDS, _CLOSE = 48, 4, 1e-3
"""How many families are split in all to prove a plan to be the best; more where more bounds were raised, one for each `_BOUNDS`, which
take about as long, and as many as there is time for while a candidate may be faster by more than so much of the best."""

_PATIENCE = 40
"""A candidate that is solved counts as half as promising as its bound says; after so many splits as a third."""

_BOUNDS_OF_JOINT = 3
"""A sketch, the bounds by totals and the first family."""


def search(
    candidates: Iterable[Candidate],
    annotate: Callable[[Candidate], AnnotatedModel],
    capacity_bytes: int | None,
    time_limit_s: float = 60.0,
    progress: Callable[[str], None] | None = None,
    workers: int = 1,
    cell_of: Callable[[Candidate], Hashable] = lambda candidate: candidate,
    processes: int = 1,
) -> SearchResult:
    """The fastest placement over all candidates.

    Candidates of one `cell_of` must have ops that cost the same, and those of one `parameters` the same parameters.
    `time_limit_s` covers annotation and solving; while nothing has been found it is stretched to twice that.  `progress` gets one line
    of text per event.  `workers`: threads of CP-SAT.  `processes`: how many may search; they are forked if it takes a while.
    """
    of = list(candidates)
    return _Search(
        time_limit_s=time_limit_s, progress=progress or (lambda text: None), processes=processes, candidates=of, annotate=annotate,
        capacity_bytes=capacity_bytes, workers=workers, cell_of=cell_of,
    ).run()  # fmt: skip


@dataclass(slots=True, kw_only=True)
class _Search(Sharing):
    candidates: list[Candidate]
    annotate: Callable[[Candidate], AnnotatedModel]
    capacity_bytes: int | None
    workers: int
    cell_of: Callable[[Candidate], Hashable]
    members: list[list[int]] = field(default_factory=list)  # by entry: numbers of its candidates
    order: list[int] = field(default_factory=list)  # in which entries are opened
    cells: dict[int, Cell] = field(default_factory=dict)  # what candidates share, by number
    fixed: dict[int, tuple[list[int], int]] = field(
        default_factory=dict
    )  # by kind, bytes: static of a segment by class, fixed
    dived: set[MeshShape] = field(default_factory=set)  # of which some candidate was solved
    raised: int = 0  # bounds
    due: int = (
        _TURNS  # so many bounds, when the next candidate is solved, whether it is its turn or not
    )
    in_vain: int = 0  # candidates that were solved since the best one was found

    def __post_init__(self) -> None:
        together: dict[Hashable, list[int]] = {}
        for number, c in enumerate(self.candidates):
            alike = (
                c.is_joint and c.mesh.pp > 1 and c.zero > 0
            )  # in a pipeline ZeRO stages that share out differ little
            together.setdefault(replace(c, zero=0, shard=0) if alike else number, []).append(number)
        self.members = list(together.values())
        self.entries = [
            Entry(self.candidates[first], tuple(self.candidates[n] for n in others))
            for first, *others in self.members
        ]
        random = Random(0)
        turn = {
            mesh: random.random()
            for mesh in dict.fromkeys(entry.candidate.mesh for entry in self.entries)
        }
        by_mesh = sorted(
            enumerate(self.entries),
            key=lambda pair: (pair[1].candidate.micro_batch, turn[pair[1].candidate.mesh]),
        )
        self.order = [
            number for number, _ in by_mesh
        ]  # so that meshes of all sorts are known if time ends
        cells: dict[Hashable, int] = {}
        kinds: dict[Hashable, int] = {}
        for entry in self.entries:
            c, kind = entry.candidate, tuple(one.holds for one in (entry.candidate, *entry.others))
            cell = cells.setdefault((self.cell_of(c), c.modes) if c.is_joint else c, len(cells))
            self.places.append((cell, kinds.setdefault(kind, len(kinds))))
        self.board = Board(len(self.entries), len(cells), len(kinds), self.processes > 1)
        self.team = Team(self.progress)

    def run(self) -> SearchResult:
        self._complete(self._work)
        return self._result()

    def _refine(self, number: int, at_once: bool = False) -> None:
        """As `Sharing._refine`; `at_once`: raise the bound and solve it."""
        entry = self.entries[number]
        if not self._prune(entry):
            self._advance(entry, self.places[number][1], at_once)
        if entry.outcome == "open":
            heapq.heappush(self.queue, (*entry.turn, number))

    def _refine_beside(self) -> None:
        """Solve what is most promising of the best one's mesh, such as the next micro-batch, which is often better still."""
        mesh, missed = _shape(self.best.candidate), 0
        numbers = [
            number
            for number, entry in enumerate(self.entries)
            if _shape(entry.candidate) == mesh and not entry.is_solved
        ]
        for number in sorted(numbers, key=self._likely_s):
            best = self.best
            if missed == _BESIDE or not self._time_left():
                break
            if self._likely_s(number) < self._wanted_s and self._take(number):
                self.queue = [turn for turn in self.queue if turn[-1] != number]
                heapq.heapify(self.queue)
                self._refine(number, at_once=True)
                missed = 0 if self.best is not best else missed + self.entries[number].is_solved

    def _likely_s(self, number: int) -> float:
        """What the step of a candidate is likely to take, by what is known here or by who opened it."""
        entry = self.entries[number]
        return entry.estimate_s if entry.is_opened else float(self.board.estimate_s[number])

    def _advance(self, entry: Entry, kind: int, at_once: bool) -> None:
        """The next bound of a candidate, or its solution; both at once if asked for, and for the first of each mesh that is likely to be
        better, since what is found prunes others."""
        if entry.joint is not None and entry.bounds_left == _BOUNDS_OF_JOINT:
            self._sketch(entry, kind)
            if not at_once or entry.outcome != "open" or entry.bound_s >= self._wanted_s:
                return
        is_new = _shape(entry.candidate) not in self.dived and entry.estimate_s < self._wanted_s
        at_once = at_once or is_new or self.raised > self.due
        row_waits = (
            at_once and self.in_vain < _HASTY and entry.joint is not None and not entry.is_solved
        )
        while entry.outcome == "open":
            if (
                entry.prepared is None and entry.bounds_left > row_waits
            ):  # the bound by its row may wait until it is solved
                self._relax(entry)
            elif entry.joint is None:
                self._solve(entry)
            elif not entry.is_solved:
                self._solve_jointly(entry)
            else:
                self._narrow(entry)
            if not at_once or entry.is_solved or entry.bound_s >= self._wanted_s:
                return

    def _open_all(self) -> None:
        """Open what nobody has opened."""
        self.board.busy[self.me] = 1
        for place, number in enumerate(self.order):
            entry, (cell, _) = self.entries[number], self.places[number]
            if (
                entry.outcome != "unexplored"
                or entry.is_opened
                or self.board.owner[number] not in (self.me, NOBODY)
            ):
                continue
            if time.perf_counter() - self.start > self.time_limit_s / 2:
                self.progress(
                    f"half of the time is spent on annotating {place} of {len(self.entries)} candidates"
                )
                break
            if self.board.take(self.board.opener, cell, self.me):
                self._open(number)
                if entry.outcome == "open":
                    heapq.heappush(self.queue, (*entry.turn, number))
                self._share_out()
        self.board.busy[self.me] = 0

    def _open(self, number: int) -> None:
        """The first bounds of a candidate."""
        entry, (cell, kind) = self.entries[number], self.places[number]
        candidate, too_much = entry.candidate, self.board.too_much
        if candidate.is_joint and candidate.micro_batch > too_much[kind]:
            entry.close("infeasible", f"a micro-batch of {too_much[kind]:.0f} does not fit", inf)
            return
        entry.outcome, entry.is_opened = "open", True
        if candidate.is_joint:
            self._open_jointly(entry, cell)
        else:
            entry.model = model = self.annotate(candidate)
            _check_micro_batches(candidate, model)
            entry.bound_s, entry.least_bytes = (
                quick_time_bound(model) / entry.ranks,
                quick_memory_bound(model) // entry.ranks,
            )
            if self.capacity_bytes is not None and entry.least_bytes > self.capacity_bytes:
                entry.close("infeasible", f"needs at least {entry.least_bytes} bytes", inf)
        self.board.bound_s[number], self.board.estimate_s[number] = entry.bound_s, entry.estimate_s

    def _open_jointly(self, entry: Entry, number: int) -> None:
        """The bound of a candidate from what it shares with others of its cell, in whatever memory."""
        candidate, cells, annotate = entry.candidate, self.cells, self.annotate

        def model_of(
            candidate: Candidate,
        ) -> Callable[
            [str], AnnotatedModel
        ]:  # knows nothing of the search, which ends without a cycle
            return cache(lambda mode: annotate(replace(candidate, recompute=mode)))

        first, *others = map(model_of, (candidate, *entry.others))
        cell = cells[number] = cells[number] if number in cells else Cell(first, candidate.modes)
        schedules = tuple(
            Schedule(name, entry.ranks, count) for name, count in candidate.schedules
        ) or (ALONE,)
        entry.joint = Joint(
            first, candidate.modes, schedules, self.capacity_bytes, cell, tuple(others)
        )
        entry.bounds_left, entry.bound_s = (
            _BOUNDS_OF_JOINT,
            entry.joint.glance(candidate.num_microbatches),
        )

    def _sketch(self, entry: Entry, kind: int) -> None:
        """A bound of a candidate by what its cell tells and the bytes that candidates of its kind hold."""
        candidate, joint, too_much = entry.candidate, entry.joint, self.board.too_much
        entry.bounds_left -= 1
        if candidate.micro_batch > too_much[kind]:
            entry.close("infeasible", f"a micro-batch of {too_much[kind]:.0f} does not fit", inf)
            return
        if kind not in self.fixed:
            model = joint.least_of(candidate.modes[0])
            self.fixed[kind] = least_static_by_class(model), model.fixed_bytes
        (static, fixed), segments = self.fixed[kind], joint.cell.first.segments
        entry.least_bytes = (
            fixed
            + sum(static[index] for index in segments) // entry.ranks
            + joint.cell.moment_bytes
        )
        if self.capacity_bytes is not None and entry.least_bytes > self.capacity_bytes:
            entry.close("infeasible", f"needs at least {entry.least_bytes} bytes", inf)
            too_much[kind] = min(too_much[kind], candidate.micro_batch)
            return
        entry.expect(*joint.sketch(static, fixed, candidate.num_microbatches, self._wanted_s))

    def _prune(self, entry: Entry) -> bool:
        if entry.bound_s < self._wanted_s:
            return False
        if entry.bound_s == inf:
            entry.close("infeasible", "no placement fits its ranks, or none is consistent", inf)
        else:
            entry.close(
                "solved" if entry.solution else "pruned",
                f"takes at least {entry.bound_s:.6g} s",
                entry.bound_s,
            )
        return True

    def _capacity_bytes(self, entry: Entry) -> int | None:
        """What all ranks of the pipeline hold together; that each fits is checked once stages are cut."""
        return None if self.capacity_bytes is None else self.capacity_bytes * entry.ranks

    def _relax(self, entry: Entry) -> None:
        entry.bounds_left -= 1
        self.raised += 1
        if entry.joint is not None:
            _check_micro_batches(entry.candidate, entry.joint.first)
            if entry.bounds_left:
                entry.expect(*entry.joint.raise_bounds(self._wanted_s))
            else:
                entry.expect(entry.joint.narrow(self._wanted_s, 0, 0.0)[1])
            return
        prepared = prepare(entry.model, self._capacity_bytes(entry))
        if isinstance(prepared, Infeasible):
            entry.close("infeasible", prepared.detail, inf)
        elif prepared.fits_not:
            entry.close("infeasible", f"needs at least {prepared.relaxed.bound_bytes} bytes", inf)
        else:
            entry.prepared, entry.bound_s = (
                prepared,
                max(entry.bound_s, prepared.relaxed.bound_s / entry.ranks),
            )

    def _solve_jointly(self, entry: Entry) -> None:
        self._count_solved(entry)
        staged, bound_s = entry.joint.solve(self._wanted_s, max(self._time_left(), 0.5))
        entry.bound_s, entry.is_solved = max(entry.bound_s, bound_s), True
        if staged is not None:
            self._found(entry, staged)
        if entry.bound_s == inf:
            entry.close("infeasible", "no staging of its placements fits", inf)
        self._put_back(entry)

    def _narrow(self, entry: Entry) -> None:
        """Split some families of a candidate."""
        splits, is_close = (
            sum(one.splits for one in self.entries),
            entry.bound_s >= (1 - _CLOSE) * self._best_s,
        )
        if is_close and splits >= max(_MOST_SPLITS, self.raised // _BOUNDS):
            entry.close(
                "solved" if entry.solution else "unexplored",
                f"{splits} families were split",
                entry.bound_s,
            )
            return
        staged, bound_s = entry.joint.narrow(self._wanted_s, _SPLITS, self._time_left())
        entry.bound_s = max(entry.bound_s, bound_s)
        if staged is not None:
            self._found(entry, staged)
        entry.splits += _SPLITS
        self._put_back(entry)
        if not entry.joint.frontier.waiting:
            others = (
                "infeasible"
                if entry.bound_s == inf
                else "pruned"
                if self._best_s < inf
                else "too large"
            )
            entry.close(
                "solved" if entry.solution else others,
                "all its placements are accounted for",
                entry.bound_s,
            )

    def _put_back(self, entry: Entry) -> None:
        """Those that may hold a good plan and are not solved yet go first, then those that were not split often in vain."""
        entry.lengthened = 0.0
        if self._best_s < inf and entry.bound_s > 0:
            part = (entry.splits + _PATIENCE) / (entry.splits + 2 * _PATIENCE)
            entry.lengthened = max(self._best_s / entry.bound_s - 1, 0.0) * part

    def _found(self, entry: Entry, staged: Staged) -> None:
        """A faster way than all before."""
        entry.staged, entry.solution = staged, staged.solution
        self._set_best(entry)
        self.progress(f"{entry.chosen()}: {entry.solution.time_s * 1e3:.3f} ms")

    def _count_solved(self, entry: Entry) -> None:
        """A candidate of its mesh is solved, and the next one out of turn is due later; soon, as long as nothing is found."""
        self.dived.add(_shape(entry.candidate))
        self._set_in_vain(self.in_vain + (self._best_s < inf))

    def _set_best(self, entry: Entry) -> None:
        self.best = entry
        self._set_in_vain(0)
        self.board.found(entry.solution.time_s)

    def _set_in_vain(self, count: int) -> None:
        self.in_vain, self.due = count, self.raised + _TURNS * (1 + count)

    def _solve(self, entry: Entry) -> None:
        self._count_solved(entry)
        upper_bound_s = self._best_s * entry.ranks if self._best_s < inf else None
        result = solve_prepared(entry.prepared, self._time_left(), upper_bound_s, self.workers)
        result = replace(result, bound_s=result.bound_s / entry.ranks)
        if isinstance(result, Solution) and entry.model.pipeline is not None:
            result = replace(
                result, pipelined=pipelined(entry.model, result.choices), status="feasible"
            )
        if (
            isinstance(result, Solution)
            and self.capacity_bytes is not None
            and result.memory_bytes > self.capacity_bytes
        ):
            entry.solution = result
            entry.close(
                "too large",
                f"its fullest rank needs {result.memory_bytes} bytes",
                max(entry.bound_s, result.bound_s),
            )
        elif isinstance(result, Solution):
            entry.solution = result
            entry.close("solved", result.status, max(entry.bound_s, result.bound_s))
            if self.best is None or result.time_s < self.best.solution.time_s:
                self._set_best(entry)
                self.progress(f"{entry.candidate}: {result.time_s * 1e3:.3f} ms")
        elif result.reason == "bound":
            entry.close("pruned", result.detail, max(entry.bound_s, result.bound_s))
        elif result.reason == "time limit":
            entry.close("unexplored", result.detail, max(entry.bound_s, result.bound_s))
        else:
            entry.close("infeasible", result.detail, inf)

    def _result(self) -> SearchResult:
        for entry in self.entries:  # of what a process that was killed had, nobody takes what cannot be faster, nor what is late
            if entry.outcome == "unexplored":
                self._prune(entry)
            self._close_in_time(entry)
        status, best, smallest = "infeasible", None, None
        bound_s = min((entry.bound_s for entry in self.entries), default=inf)
        if self.best is not None:
            self.best.outcome = "chosen"
            best = self.best.chosen(), self.best.solution
            bound_s = min(bound_s, self.best.solution.time_s)
            status = (
                "optimal"
                if self.best.solution.time_s - bound_s <= OPTIMALITY_GAP * self.best.solution.time_s
                else "feasible"
            )
        elif any(entry.outcome == "unexplored" for entry in self.entries):
            status = "time limit"
        else:
            smallest = self._smallest()
        took_s = time.perf_counter() - self.start
        pairs = (
            zip(numbers, entry.outcomes(), strict=True)
            for numbers, entry in zip(self.members, self.entries, strict=True)
        )
        outcomes = tuple(
            outcome for _, outcome in sorted(chain.from_iterable(pairs), key=lambda pair: pair[0])
        )
        staged = self.best and self.best.staged
        model, origin = (
            (staged.mixed.model, staged.mixed.origin)
            if staged
            else (self.best and self.best.model, None)
        )
        return SearchResult(status, best, model, origin, bound_s, outcomes, smallest, took_s)

    def _smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The least memory over all candidates, most promising first; None if no candidate has a consistent placement."""
        bounds = sorted(
            (entry.least_bytes, number)
            for number, entry in enumerate(self.entries)
            if entry.least_bytes is not None
        )
        found: tuple[Candidate, Infeasible] | None = None
        for bound_bytes, number in bounds:
            if found is not None and bound_bytes >= found[1].memory_bytes:
                break
            entry = self.entries[number]
            for candidate in (entry.candidate, *entry.others):
                left_s = max(2 * self.time_limit_s - (time.perf_counter() - self.start), 0.0)
                if (
                    found is not None and left_s == 0.0
                ):  # what is left may need less, but not less than this bound
                    return found[0], replace(
                        found[1], bound_bytes=min(found[1].bound_bytes, bound_bytes)
                    )
                model = self.annotate(replace(candidate, recompute=candidate.modes[-1]))
                result = smallest_memory(
                    model, self.capacity_bytes or 0, max(left_s, 1.0), self.workers
                )
                if model.pipeline is not None and result.choices is not None:
                    fullest = max(pipelined(model, result.choices).memory_bytes)
                    result = replace(result, memory_bytes=fullest, bound_bytes=bound_bytes)
                if result.memory_bytes is not None and (
                    found is None or result.memory_bytes < found[1].memory_bytes
                ):
                    found = candidate, result
        return found


def _shape(candidate: Candidate) -> MeshShape:
    """The mesh, however its ranks lie."""
    return replace(candidate.mesh, order="")


def _check_micro_batches(candidate: Candidate, model: AnnotatedModel) -> None:
    if model.num_microbatches != candidate.num_microbatches:
        raise ValueError(
            f"{candidate}: {candidate.num_microbatches} micro-batches asked for, {model.num_microbatches} annotated"
        )
