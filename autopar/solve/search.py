"""The search over candidates: mesh, micro-batch, ZeRO and recompute, each with its best placement.

Best-first, with three lower bounds of increasing price.  Every candidate has a bound; the one with the lowest is refined next:

    annotated   every op at its cheapest strategy (`quick_time_bound`)
    relaxed     the LP relaxation, memory included (`prepare`)
    solved      the placement itself

A candidate is left as soon as its bound reaches the time of the best placement found; since the lowest bound comes first, all others
may then be left too.  So the order of the candidates does not matter, and no pruned candidate can hold a faster placement.
The bound of the whole search is the least bound over all candidates, the pruned and unexplored ones included.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.pipeline import pipelined
from autopar.solve.placement import OPTIMALITY_GAP, Infeasible, Prepared, Solution, prepare, smallest_memory, solve_prepared
from autopar.solve.relax import quick_memory_bound, quick_time_bound

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is decided before the placement."""

    mesh: MeshShape
    micro_batch: int  # sequences per data-parallel rank per micro-batch
    num_microbatches: int
    zero: int
    recompute: str  # 'none' | 'full'
    stages_per_rank: int = 1
    schedule: str = "none"  # of a pipeline

    def __str__(self) -> str:
        stages = f", {self.schedule} of {self.stages_per_rank} stages a rank" if self.mesh.pp > 1 else ""
        return f"{self.mesh}, micro-batch {self.micro_batch}, zero {self.zero}, recompute {self.recompute}{stages}"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`status`: 'optimal', 'feasible' (time limit; see `bound_s`), 'infeasible' (proven: nothing fits) or 'time limit' (nothing found).

    `outcomes` has one dict per candidate, in the given order, for `Certificate.meshes`.  Its `outcome` is 'chosen', 'solved', 'pruned',
    'infeasible', 'too large' (the fastest placement of a pipeline does not fit its stages), or 'unexplored' where the time limit came
    first; `bound_s` is None for an infeasible one.
    """

    status: str
    best: tuple[Candidate, Solution] | None
    model: AnnotatedModel | None  # of the best candidate
    bound_s: float  # no placement of any candidate that fits is faster
    outcomes: tuple[dict, ...]
    smallest: tuple[Candidate, Infeasible] | None  # if nothing fits: the least memory over all candidates
    solve_time_s: float

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
    solution: Solution | None = None

    @property
    def ranks(self) -> int:
        """Ranks of the pipeline: what all stages need together is at most so many times what the fullest or slowest needs."""
        return self.candidate.mesh.pp

    def close(self, outcome: str, reason: str, bound_s: float) -> None:
        self.outcome, self.reason, self.bound_s, self.prepared = outcome, reason, bound_s, None

    def as_dict(self) -> dict:
        c, found = self.candidate, self.solution
        return {"mesh": c.mesh.as_dict(), "micro_batch": c.micro_batch, "num_microbatches": c.num_microbatches, "zero": c.zero,
                "recompute": c.recompute, "stages_per_rank": c.stages_per_rank, "schedule": c.schedule,
                "outcome": self.outcome, "time_s": found and found.time_s,
                "memory_bytes": found and found.memory_bytes, "bound_s": None if self.bound_s == INFINITE else self.bound_s,
                "reason": self.reason}


def search(candidates: Iterable[Candidate], annotate: Callable[[Candidate], AnnotatedModel], capacity_bytes: int | None,
           time_limit_s: float = 60.0, progress: Callable[[str], None] | None = None, workers: int = 1) -> SearchResult:
    """The fastest placement over all candidates.

    `time_limit_s` covers annotation and solving; while nothing has been found it is stretched to twice that.  `progress` gets one line
    of text per event.
    """
    return _Search(list(candidates), capacity_bytes, time_limit_s, progress or (lambda text: None), workers).run(annotate)


@dataclass(slots=True)
class _Search:
    candidates: list[Candidate]
    capacity_bytes: int | None
    time_limit_s: float
    progress: Callable[[str], None]
    workers: int
    entries: list[_Entry] = field(default_factory=list)
    queue: list[tuple[float, int]] = field(default_factory=list)  # (bound, entry number): the lowest bound first
    best: _Entry | None = None
    start: float = field(default_factory=time.perf_counter)

    def run(self, annotate: Callable[[Candidate], AnnotatedModel]) -> SearchResult:
        self._annotate_all(annotate)
        while self.queue and self._time_left():
            _, number = heapq.heappop(self.queue)
            entry = self.entries[number]
            if self._prune(entry):
                continue
            if entry.prepared is None:
                self._relax(entry)
            else:
                self._solve(entry)
            if entry.outcome == "open":
                heapq.heappush(self.queue, (entry.bound_s, number))
        for _, number in self.queue:
            entry = self.entries[number]
            if not self._prune(entry):
                entry.close("unexplored", "the time limit came first", entry.bound_s)
        return self._result()

    def _time_left(self) -> float:
        """Seconds until the limit, or 0."""
        limit_s = self.time_limit_s * (1 if self.best else 2)
        return max(limit_s - (time.perf_counter() - self.start), 0.0)

    def _annotate_all(self, annotate: Callable[[Candidate], AnnotatedModel]) -> None:
        self.entries = [_Entry(candidate) for candidate in self.candidates]
        for number, entry in enumerate(self.entries):
            if time.perf_counter() - self.start > self.time_limit_s / 2:
                self.progress(f"half of the time is spent on annotating {number} of {len(self.entries)} candidates")
                return
            entry.model = annotate(entry.candidate)
            if entry.model.num_microbatches != entry.candidate.num_microbatches:
                raise ValueError(f"{entry.candidate}: {entry.candidate.num_microbatches} micro-batches asked for,"
                                 f" {entry.model.num_microbatches} annotated")
            least_bytes = quick_memory_bound(entry.model) // entry.ranks
            if self.capacity_bytes is not None and least_bytes > self.capacity_bytes:
                entry.close("infeasible", f"needs at least {least_bytes} bytes", INFINITE)
                continue
            entry.outcome, entry.bound_s = "open", quick_time_bound(entry.model) / entry.ranks
            heapq.heappush(self.queue, (entry.bound_s, number))

    def _prune(self, entry: _Entry) -> bool:
        if self.best is None or entry.bound_s < self.best.solution.time_s:
            return False
        entry.close("pruned", f"takes at least {entry.bound_s:.6g} s", entry.bound_s)
        return True

    def _capacity_bytes(self, entry: _Entry) -> int | None:
        """What all ranks of the pipeline hold together; that each fits is checked once stages are cut."""
        return None if self.capacity_bytes is None else self.capacity_bytes * entry.ranks

    def _relax(self, entry: _Entry) -> None:
        prepared = prepare(entry.model, self._capacity_bytes(entry))
        if isinstance(prepared, Infeasible):
            entry.close("infeasible", prepared.detail, INFINITE)
        elif prepared.fits_not:
            entry.close("infeasible", f"needs at least {prepared.relaxed.bound_bytes} bytes", INFINITE)
        else:
            entry.prepared, entry.bound_s = prepared, max(entry.bound_s, prepared.relaxed.bound_s / entry.ranks)

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
        bound_s = min((entry.bound_s for entry in self.entries), default=INFINITE)
        status, best, smallest = "infeasible", None, None
        if self.best is not None:
            self.best.outcome = "chosen"
            best = self.best.candidate, self.best.solution
            bound_s = min(bound_s, self.best.solution.time_s)
            status = "optimal" if self.best.solution.time_s - bound_s <= OPTIMALITY_GAP * self.best.solution.time_s else "feasible"
        elif any(entry.outcome == "unexplored" for entry in self.entries):
            status = "time limit"
        else:
            smallest = self._smallest()
        took_s = time.perf_counter() - self.start
        outcomes = tuple(entry.as_dict() for entry in self.entries)
        return SearchResult(status, best, self.best and self.best.model, bound_s, outcomes, smallest, took_s)

    def _smallest(self) -> tuple[Candidate, Infeasible] | None:
        """The least memory over all candidates, most promising first; None if no candidate has a consistent placement."""
        bounds = sorted((quick_memory_bound(entry.model) // entry.ranks, number) for number, entry in enumerate(self.entries))
        found: tuple[Candidate, Infeasible] | None = None
        for bound_bytes, number in bounds:
            if found is not None and bound_bytes >= found[1].memory_bytes:
                break
            left_s = max(2 * self.time_limit_s - (time.perf_counter() - self.start), 0.0)
            if found is not None and left_s == 0.0:  # what is left may need less, but not less than this bound
                return found[0], replace(found[1], bound_bytes=min(found[1].bound_bytes, bound_bytes))
            entry = self.entries[number]
            result = smallest_memory(entry.model, self.capacity_bytes or 0, max(left_s, 1.0), self.workers)
            if entry.model.pipeline is not None and result.choices is not None:
                fullest = max(pipelined(entry.model, result.choices).memory_bytes)
                result = replace(result, memory_bytes=fullest, bound_bytes=bound_bytes)
            if result.memory_bytes is not None and (found is None or result.memory_bytes < found[1].memory_bytes):
                found = entry.candidate, result
        return found
