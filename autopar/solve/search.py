"""The search over candidates: mesh, micro-batch, ZeRO and recompute, each with its best placement, and in a pipeline its best stages.

Best-first, with lower bounds of increasing price.  Every candidate has a bound; the one with the lowest (longer by what it likely takes
besides) is refined next.  Of a candidate whose recomputation and stages are fixed:

    annotated   every op at its cheapest strategy (`quick_time_bound`)
    relaxed     the LP relaxation, memory included (`prepare`)
    solved      the placement itself, by CP-SAT if the relaxation is not integral

and of one where they are found together with the placement (`joint.py`):

    opened      what its cell tells (`Cell.total_s`, `Cell.waiting_s`), without annotating it
    relaxed     by totals of all ranks (`Joint.raise_bounds`), then by the row of what no placement goes below (`Joint.narrow`)
    solved      the best of some placements, each staged best
    narrowed    placements are split into families until none may be faster than the best plan, a few at a time

A candidate is left as soon as its bound reaches the time of the best placement found, so that no pruned candidate can hold a faster one.
The bound of the whole search is the least bound over all candidates, the pruned and unexplored ones included.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds import Cell, shape_of
from autopar.solve.joint import ALONE, Joint, Staged
from autopar.solve.pipeline import blocks_of, pipelined
from autopar.solve.placement import OPTIMALITY_GAP, Infeasible, Prepared, Solution, prepare, smallest_memory, solve_prepared
from autopar.solve.relax import least_static, quick_memory_bound, quick_time_bound
from autopar.solve.staging import Schedule

INFINITE = float("inf")

_TURNS = 6
"""So many bounds are raised for each candidate that is solved: what is found prunes others, and there is a plan when time ends."""

_SPLITS = 4
"""How many families of a candidate are split before the next candidate has its turn."""

_MOST_SPLITS, _BOUNDS = 48, 4
"""How many families are split in all to prove a plan to be the best; more where more bounds were raised, one for each `_BOUNDS`, which
take about as long."""

_PATIENCE = 40
"""A candidate that is solved counts as half as promising as its bound says; after so many splits as a third."""

MIXED = "mixed"
"""Each block recomputes as is best."""

MODES = ("none", "selective", "full")
"""What a block may do under `MIXED`: from the one that keeps most to the one that keeps least."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is decided before the placement."""

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    zero: int
    recompute: str  # a recompute mode for all blocks, or `MIXED`
    stages_per_rank: int = 1
    schedule: str = "none"  # of a pipeline
    schedules: tuple[tuple[str, int], ...] = ()  # if stages are to be found: schedules to choose from, with their stages a rank
    offload: str = "none"  # what is in host memory; one for all candidates of a search
    shard: int = 0  # data-parallel ranks that share out what ZeRO does, of which groups hold copies; 0: all

    @property
    def parameters(self) -> tuple[MeshShape, int, int]:
        """Parameters cost the same where these are equal."""
        return self.mesh, self.zero, self.shard

    @property
    def is_joint(self) -> bool:
        """Whether recompute modes or stages are found together with the placement."""
        return self.recompute == MIXED or bool(self.schedules)

    @property
    def modes(self) -> tuple[str, ...]:
        """Recompute modes that blocks may have."""
        return MODES if self.recompute == MIXED else (self.recompute,)

    def __str__(self) -> str:
        choices = [f"{name} of {count} stages a rank" for name, count in self.schedules or ((self.schedule, self.stages_per_rank),)]
        stages = ", " + " or ".join(choices) if self.mesh.pp > 1 else ""
        zero = f"{self.zero}" + (f" over {self.shard} ranks" if self.shard else "")
        return f"{self.mesh}, micro-batch {self.micro_batch}, zero {zero}, recompute {self.recompute}{stages}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`status`: 'optimal', 'feasible' (time limit; see `bound_s`), 'infeasible' (proven: nothing fits), 'not found' (on devices of several
    kinds: no placement that was tried fits) or 'time limit' (nothing found).

    `outcomes` has one dict per candidate, in the given order, for `Certificate.meshes`.  Its `outcome` is 'chosen', 'solved', 'pruned',
    'infeasible', 'too large' (the fastest placement of a pipeline does not fit its stages), or 'unexplored' where the time limit came
    first; `bound_s` is None for an infeasible one.
    """

    status: str
    best: tuple[Candidate, Solution] | None
    model: AnnotatedModel | None  # of the best candidate: with a class for each class and mode, if recompute modes are mixed
    origin: tuple[tuple[int, str], ...] | None  # then for each class of `model`: class of the traced model, recompute mode
    bound_s: float  # no placement of any candidate that fits is faster
    outcomes: tuple[dict, ...]
    smallest: tuple[Candidate, Infeasible] | None  # if nothing fits: the least memory over all candidates
    solve_time_s: float
    groups: tuple[AnnotatedModel, ...] = ()  # on devices of several kinds: `model` at the prices of each (`groups.py`)

    @property
    def gap(self) -> float:
        """(time - bound) / time of the best placement; 0 is proven optimal, up to `OPTIMALITY_GAP`."""
        return 1.0 if self.best is None else (self.best[1].time_s - self.bound_s) / max(self.best[1].time_s, 1e-300)


@dataclass(slots=True)
class _Entry:
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
    bounds_left: int = 2  # how many times `_relax` can raise the bound
    is_solved: bool = False  # of a joint one: families are left
    splits: int = 0  # of families, so far

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

    def chosen(self) -> Candidate:
        """The candidate with what was found."""
        if self.staged is None:
            return self.candidate
        schedule = self.staged.schedule
        name, count = (schedule.name if schedule.ranks > 1 else "none"), schedule.stages_per_rank
        return replace(self.candidate, recompute=self.staged.recompute, schedule=name, stages_per_rank=count, schedules=())

    def as_dict(self) -> dict:
        return outcome_data(self.chosen(), self.solution, self.outcome, self.bound_s, self.reason)


def outcome_data(c: Candidate, found: Solution | None, outcome: str, bound_s: float, reason: str) -> dict:
    """What became of a candidate, as in `SearchResult.outcomes`."""
    return {"mesh": c.mesh.as_dict(), "micro_batch": c.micro_batch, "num_microbatches": c.num_microbatches, "zero": c.zero,
            "shard": c.shard, "recompute": c.recompute, "stages_per_rank": c.stages_per_rank, "schedule": c.schedule,
            "outcome": outcome, "time_s": found and found.time_s, "memory_bytes": found and found.memory_bytes,
            "bound_s": None if bound_s == INFINITE else bound_s, "reason": reason}  # fmt: skip


def search(candidates: Iterable[Candidate], annotate: Callable[[Candidate], AnnotatedModel], capacity_bytes: int | None,
           time_limit_s: float = 60.0, progress: Callable[[str], None] | None = None, workers: int = 1,
           cell_of: Callable[[Candidate], Hashable] = lambda candidate: candidate) -> SearchResult:
    """The fastest placement over all candidates.

    Candidates of one `cell_of` must have ops that cost the same, and those of one `parameters` the same parameters.
    `time_limit_s` covers annotation and solving; while nothing has been found it is stretched to twice that.  `progress` gets one line
    of text per event.
    """
    return _Search(list(candidates), capacity_bytes, time_limit_s, progress or (lambda text: None), workers, cell_of).run(annotate)


@dataclass(slots=True)
class _Search:
    candidates: list[Candidate]
    capacity_bytes: int | None
    time_limit_s: float
    progress: Callable[[str], None]
    workers: int
    cell_of: Callable[[Candidate], Hashable]
    entries: list[_Entry] = field(default_factory=list)
    queue: list[tuple[bool, float, int]] = field(default_factory=list)  # (`_Entry.turn`, entry number): the lowest first
    cells: dict[Hashable, Cell] = field(default_factory=dict)  # what candidates share whose ops cost the same
    fixed: dict[tuple, tuple[int, int]] = field(default_factory=dict)  # bytes: static of all ranks, fixed of each
    best: _Entry | None = None
    dived: set[MeshShape] = field(default_factory=set)
    raised: int = 0  # bounds
    solved: int = 0  # candidates whose recomputation or stages are found
    start: float = field(default_factory=time.perf_counter)

    def run(self, annotate: Callable[[Candidate], AnnotatedModel]) -> SearchResult:
        self._annotate_all(annotate)
        while self.queue and self._time_left():
            *_, number = heapq.heappop(self.queue)
            entry = self.entries[number]
            if not self._prune(entry):
                self._advance(entry)
            if entry.outcome == "open":
                heapq.heappush(self.queue, (*entry.turn, number))
        for *_, number in self.queue:
            entry = self.entries[number]
            if entry.solution is not None:
                entry.close("solved", "the time limit came first", entry.bound_s)
            elif not self._prune(entry):
                entry.close("unexplored", "the time limit came first", entry.bound_s)
        return self._result()

    def _advance(self, entry: _Entry) -> None:
        """The next bound of a candidate, or its solution; both at once for the first of each mesh that is likely to be better, since
        what is found prunes others."""
        mesh = replace(entry.candidate.mesh, order="")
        is_new = mesh not in self.dived and entry.estimate_s < self._wanted_s
        at_once = is_new or self.raised > _TURNS * (self.solved + 1)
        self.dived |= {mesh} if at_once else set()
        while entry.outcome == "open":
            if entry.prepared is None and entry.bounds_left > (at_once and entry.joint is not None and not entry.is_solved):
                self._relax(entry)
            elif entry.joint is None:
                self._solve(entry)
            elif not entry.is_solved:
                self._solve_jointly(entry)
            else:
                self._narrow(entry)
            if not at_once or entry.is_solved:
                return

    @property
    def _wanted_s(self) -> float:
        """What a step must take less than to be faster than the best plan: by more than rounding, and by less than what is proven."""
        return self.best.solution.time_s * (1 - OPTIMALITY_GAP / 2) if self.best else INFINITE

    def _time_left(self) -> float:
        """Seconds until the limit, or 0."""
        limit_s = self.time_limit_s * (1 if self.best else 2)
        return max(limit_s - (time.perf_counter() - self.start), 0.0)

    def _annotate_all(self, annotate: Callable[[Candidate], AnnotatedModel]) -> None:
        self.entries = [_Entry(candidate) for candidate in self.candidates]
        too_much: dict[tuple, int] = {}  # (parameters, recompute modes) -> micro-batch from which nothing fits
        random = Random(0)
        turn = {mesh: random.random() for mesh in dict.fromkeys(entry.candidate.mesh for entry in self.entries)}
        order = sorted(enumerate(self.entries), key=lambda pair: (pair[1].candidate.micro_batch, turn[pair[1].candidate.mesh]))
        for number, entry in order:  # so that meshes of all sorts are known if time ends
            kind = entry.candidate.parameters, entry.candidate.modes
            if entry.candidate.is_joint and kind in too_much:
                entry.close("infeasible", f"a micro-batch of {too_much[kind]} does not fit", INFINITE)
                continue
            if time.perf_counter() - self.start > self.time_limit_s / 2:
                self.progress(f"half of the time is spent on annotating {number} of {len(self.entries)} candidates")
                return
            (self._open_jointly if entry.candidate.is_joint else self._open)(entry, annotate)
            if self.capacity_bytes is not None and entry.least_bytes > self.capacity_bytes:
                entry.close("infeasible", f"needs at least {entry.least_bytes} bytes", INFINITE)
                too_much.setdefault(kind, entry.candidate.micro_batch)
                continue
            entry.outcome = "open"
            heapq.heappush(self.queue, (*entry.turn, number))

    def _open(self, entry: _Entry, annotate: Callable[[Candidate], AnnotatedModel]) -> None:
        """Bounds of a candidate whose recomputation and stages are fixed."""
        entry.model = model = annotate(entry.candidate)
        _check_micro_batches(entry.candidate, model)
        entry.bound_s, entry.least_bytes = quick_time_bound(model) / entry.ranks, quick_memory_bound(model) // entry.ranks

    def _open_jointly(self, entry: _Entry, annotate: Callable[[Candidate], AnnotatedModel]) -> None:
        """Bounds of a candidate from what it shares with others."""
        candidate, ranks = entry.candidate, entry.ranks
        model_of = cache(lambda mode: annotate(replace(candidate, recompute=mode)))
        key, kind = (self.cell_of(candidate), candidate.modes), (candidate.parameters, candidate.modes)
        if key not in self.cells:
            self.cells[key] = Cell({mode: model_of(mode) for mode in candidate.modes})
        if kind not in self.fixed:
            model = model_of(candidate.modes[0])
            self.fixed[kind] = least_static(model), model.fixed_bytes
        cell, (static, fixed) = self.cells[key], self.fixed[kind]
        schedules = tuple(Schedule(name, ranks, count) for name, count in candidate.schedules) or (ALONE,)
        entry.joint = Joint(model_of, candidate.modes, schedules, self.capacity_bytes, cell)
        entry.least_bytes = fixed + static // ranks + cell.moment_bytes
        if self.capacity_bytes is not None and entry.least_bytes > self.capacity_bytes:
            return
        room = None if self.capacity_bytes is None else self.capacity_bytes - fixed
        units, micro = len(blocks_of(cell.first)), candidate.num_microbatches
        shapes = {s: shape_of(s, micro, units, cell.alike) for s in schedules}
        found = {s: max(cell.total_s(x, None, 0), cell.waiting_s(s, micro), cell.total_s(x, room, static)) for s, x in shapes.items()}
        entry.joint.bounds_s, entry.bound_s = found, min(found.values())
        likely_s = min(max(found[s], cell.likely_s(s, micro, x, room, static)) for s, x in shapes.items())
        entry.lengthened = likely_s / entry.bound_s - 1 if 0 < entry.bound_s < INFINITE else 0.0

    def _prune(self, entry: _Entry) -> bool:
        if entry.bound_s < self._wanted_s:
            return False
        entry.close("solved" if entry.solution else "pruned", f"takes at least {entry.bound_s:.6g} s", entry.bound_s)
        return True

    def _capacity_bytes(self, entry: _Entry) -> int | None:
        """What all ranks of the pipeline hold together; that each fits is checked once stages are cut."""
        return None if self.capacity_bytes is None else self.capacity_bytes * entry.ranks

    def _relax(self, entry: _Entry) -> None:
        entry.bounds_left -= 1
        self.raised += 1
        if entry.joint is not None:
            _check_micro_batches(entry.candidate, entry.joint.first)
            best_s, likely_s = self._wanted_s, entry.estimate_s
            found_s = entry.joint.raise_bounds(best_s) if entry.bounds_left else entry.joint.narrow(best_s, 0, 0.0)[1]
            entry.bound_s = max(entry.bound_s, found_s)
            unknown = entry.bounds_left and 0 < entry.bound_s < INFINITE
            entry.lengthened = max(likely_s / entry.bound_s - 1, 0.0) if unknown else 0.0
            if entry.bound_s == INFINITE:
                entry.close("infeasible", "no placement fits its ranks, or none is consistent", INFINITE)
            return
        prepared = prepare(entry.model, self._capacity_bytes(entry))
        if isinstance(prepared, Infeasible):
            entry.close("infeasible", prepared.detail, INFINITE)
        elif prepared.fits_not:
            entry.close("infeasible", f"needs at least {prepared.relaxed.bound_bytes} bytes", INFINITE)
        else:
            entry.prepared, entry.bound_s = prepared, max(entry.bound_s, prepared.relaxed.bound_s / entry.ranks)

    def _solve_jointly(self, entry: _Entry) -> None:
        self.solved += 1
        staged, bound_s = entry.joint.solve(self._wanted_s, max(self._time_left(), 0.5))
        entry.bound_s, entry.is_solved = max(entry.bound_s, bound_s), True
        if staged is not None:
            self._found(entry, staged)
        if entry.bound_s == INFINITE:
            entry.close("infeasible", "no staging of its placements fits", INFINITE)
        self._put_back(entry)

    def _narrow(self, entry: _Entry) -> None:
        """Split some families of a candidate."""
        if (splits := sum(one.splits for one in self.entries)) >= max(_MOST_SPLITS, self.raised // _BOUNDS):
            entry.close("solved" if entry.solution else "unexplored", f"{splits} families were split", entry.bound_s)
            return
        staged, bound_s = entry.joint.narrow(self._wanted_s, _SPLITS, self._time_left())
        entry.bound_s = max(entry.bound_s, bound_s)
        if staged is not None:
            self._found(entry, staged)
        entry.splits += _SPLITS
        self._put_back(entry)
        if not entry.joint.frontier.waiting:
            outcome = "solved" if entry.solution else "infeasible" if entry.bound_s == INFINITE else "pruned" if self.best else "too large"
            entry.close(outcome, "all its placements are accounted for", entry.bound_s)

    def _put_back(self, entry: _Entry) -> None:
        """Those that may hold a good plan and are not solved yet go first, then those that were not split often in vain."""
        entry.lengthened = 0.0
        if self.best is not None and entry.bound_s > 0:
            part = (entry.splits + _PATIENCE) / (entry.splits + 2 * _PATIENCE)
            entry.lengthened = max(self.best.solution.time_s / entry.bound_s - 1, 0.0) * part

    def _found(self, entry: _Entry, staged: Staged) -> None:
        """A faster way than all before."""
        entry.staged, entry.solution, self.best = staged, staged.solution, entry
        self.progress(f"{entry.chosen()}: {entry.solution.time_s * 1e3:.3f} ms")

    def _solve(self, entry: _Entry) -> None:
        upper_bound_s = self.best.solution.time_s * entry.ranks if self.best else None
        result = solve_prepared(entry.prepared, self._time_left(), upper_bound_s, self.workers)
        result = replace(result, bound_s=result.bound_s / entry.ranks)
        if isinstance(result, Solution) and entry.model.pipeline is not None:
            result = replace(result, pipelined=pipelined(entry.model, result.choices), status="feasible")
        if isinstance(result, Solution) and self.capacity_bytes is not None and result.memory_bytes > self.capacity_bytes:
            entry.solution = result
            entry.close("too large", f"its fullest rank needs {result.memory_bytes} bytes", max(entry.bound_s, result.bound_s))
        elif isinstance(result, Solution):
            entry.solution = result
            entry.close("solved", result.status, max(entry.bound_s, result.bound_s))
            if self.best is None or result.time_s < self.best.solution.time_s:
                self.best = entry
                self.progress(f"{entry.candidate}: {result.time_s * 1e3:.3f} ms")
        elif result.reason == "bound":
            entry.close("pruned", result.detail, max(entry.bound_s, result.bound_s))
        elif result.reason == "time limit":
            entry.close("unexplored", result.detail, max(entry.bound_s, result.bound_s))
        else:
            entry.close("infeasible", result.detail, INFINITE)

    def _result(self) -> SearchResult:
        status, best, smallest = "infeasible", None, None
        bound_s = min((entry.bound_s for entry in self.entries), default=INFINITE)
        if self.best is not None:
            self.best.outcome = "chosen"
            best = self.best.chosen(), self.best.solution
            bound_s = min(bound_s, self.best.solution.time_s)
            status = "optimal" if self.best.solution.time_s - bound_s <= OPTIMALITY_GAP * self.best.solution.time_s else "feasible"
        elif any(entry.outcome == "unexplored" for entry in self.entries):
            status = "time limit"
        else:
            smallest = self._smallest()
        took_s = time.perf_counter() - self.start
        outcomes = tuple(entry.as_dict() for entry in self.entries)
        staged = self.best and self.best.staged
        model, origin = (staged.mixed.model, staged.mixed.origin) if staged else (self.best and self.best.model, None)
        return SearchResult(status, best, model, origin, bound_s, outcomes, smallest, took_s)

    def _smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The least memory over all candidates, most promising first; None if no candidate has a consistent placement."""
        bounds = sorted((entry.least_bytes, number) for number, entry in enumerate(self.entries) if entry.model or entry.joint)
        found: tuple[Candidate, Infeasible] | None = None
        for bound_bytes, number in bounds:
            if found is not None and bound_bytes >= found[1].memory_bytes:
                break
            left_s = max(2 * self.time_limit_s - (time.perf_counter() - self.start), 0.0)
            if found is not None and left_s == 0.0:  # what is left may need less, but not less than this bound
                return found[0], replace(found[1], bound_bytes=min(found[1].bound_bytes, bound_bytes))
            entry = self.entries[number]
            model = entry.model if entry.joint is None else entry.joint.model_of(entry.candidate.modes[-1])
            result = smallest_memory(model, self.capacity_bytes or 0, max(left_s, 1.0), self.workers)
            if model.pipeline is not None and result.choices is not None:
                fullest = max(pipelined(model, result.choices).memory_bytes)
                result = replace(result, memory_bytes=fullest, bound_bytes=bound_bytes)
            if result.memory_bytes is not None and (found is None or result.memory_bytes < found[1].memory_bytes):
                found = entry.candidate, result
        return found


def _check_micro_batches(candidate: Candidate, model: AnnotatedModel) -> None:
    if model.num_microbatches != candidate.num_microbatches:
        raise ValueError(f"{candidate}: {candidate.num_microbatches} micro-batches asked for, {model.num_microbatches} annotated")

