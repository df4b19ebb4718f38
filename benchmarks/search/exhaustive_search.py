"""The search against every plan of small random tasks: `python
benchmarks/search/exhaustive_search.py --tasks 400`.

Each task (`random_instances.py`) is planned within a capacity drawn from what its plans hold, and
all of them are enumerated (`exhaustive_oracle.py`).  The statements of the search must be true of
every task, whether proven or not. Its plan fits and costs what it says, no plan that fits is faster
than its bound, and nothing fits where it says so.  How often it finds the optimum and proves it is
counted.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from pathlib import Path

import click

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.ir.simplicity import Simplicity, simplicity_of
from autopar.solve.costs.candidate import Candidate
from autopar.solve.search.branch_and_bound import search, solved_together
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.restaging import Restager
from autopar.solve.search.result import SearchResult
from autopar.solve.search.simplest import Preference, candidate_simplicity
from benchmarks.search.exhaustive_oracle import Point, above_hull, best, points
from benchmarks.search.random_instances import Task, with_fixed_stages

TOLERANCE = 0.05
"""The tolerance within which simpler plans are preferred. Tasks are small, so that times of plans
lie far apart.
"""
CLOSE = 1e-9
"""How much the seconds of two ways to add up may differ, as a share."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one task.

    Attributes:
        seed: the seed of the task.
        kinds: the keys of `KINDS` that hold for the task, such as "equal" if the optimum was found.
        lacks: how much slower the plan is than the optimum, as a share; 1 if no plan was found.
        gap: the search's own upper bound on that share.
        plans: the number of enumerated plans.
    """

    seed: int
    kinds: tuple[str, ...]
    lacks: float
    gap: float
    plans: int


@dataclass
class Counts:
    """Counts of the results of several tasks: of each kind, and of enumerated plans. `lacking` has
    the verdicts of tasks whose optimum was not found.
    """

    kinds: Counter = field(default_factory=Counter)
    lacking: list[Verdict] = field(default_factory=list)
    plans: int = 0

    def add(self, verdict: Verdict) -> None:
        self.kinds.update(verdict.kinds)
        self.plans += verdict.plans
        if "missed" in verdict.kinds:
            self.lacking.append(verdict)

    def lines(self) -> list[str]:
        """The lines of a table: how many results are of each kind of `KINDS`, plans priced, and the
        largest `lacks`.
        """
        rows = [f"  {self.kinds[kind]:6}  {words}" for kind, words in KINDS.items()]
        worst = max((v.lacks for v in self.lacking), default=0.0)
        rows.append(f"  {self.plans:6}  plans priced (those that cost the same, once)")
        rows.append(
            f"  {100 * worst:5.1f}%  by which a plan is slower than the missed optimum, at most (100 %: none was found)"
        )
        return rows


KINDS = {
    "task": "tasks",
    "infeasible": "of which nothing fits, as the search says",
    "equal": "optimum found",
    "proven": "of these proven: gap 0",
    "open": "of these with a gap above 0",
    "missed": "optimum not found; the bound is below it, the plan above",
    "memory": "bound by memory: the fastest plan of all does not fit",
    "memory, equal": "of these with the optimum found",
    "front": "with the optimum above the lower convex hull: best at no price of a byte",
    "front, equal": "of these with the optimum found",
    "simplest": f"with the simplest plan within {TOLERANCE:.0%} chosen",
    "not simplest": "with a simpler plan that was missed, and said to be possible",
    "pipeline": "of which the optimum is a pipeline",
    "mixed": "in which layers may recompute differently",
}


def judge(seed: int, fixed: bool = False) -> Verdict:
    """Plan the task of a seed, within a random capacity, and compare the answer with all plans.
    `fixed`: the stages of pipelines are fixed at random. Raises AssertionError if a statement of
    the search is false.
    """
    task, rng = Task(seed), random.Random(seed)
    task = with_fixed_stages(task) if fixed else task
    by_candidate = {candidate: points_of(task, candidate) for candidate in task.candidates}
    everything = set().union(*by_candidate.values())
    capacity = _capacity(rng, everything)
    result = search(
        task.candidates,
        task.annotate,
        capacity,
        SearchLimits(time_s=30.0),
        cell_of=task.cell_of,
    )
    fitting = _fastest(everything, capacity)
    kinds = ["task", *(["mixed"] if any(c.recompute == "mixed" for c in task.candidates) else [])]
    if fitting is None:
        assert result.best is None, (
            f"seed {seed}: a plan of {result.best[1].memory_bytes} bytes in {capacity}"
        )
        assert result.status == "infeasible", f"seed {seed}: {result.status}, and nothing fits"
        return Verdict(seed, (*kinds, "infeasible"), 0.0, 0.0, len(everything))
    kinds += _kinds(task, by_candidate, fitting, everything)
    assert result.bound_s <= fitting.time_s * (1 + CLOSE), (
        f"seed {seed}: bound {result.bound_s} above {fitting}"
    )
    assert result.status != "infeasible", f"seed {seed}: {fitting} fits"
    _check_bounds(seed, result, by_candidate, task, capacity)
    if result.best is None:
        return _missed(seed, kinds, 1.0, 1.0, len(everything))
    found = result.best[1]
    _check_plan(seed, result, by_candidate, task, capacity)
    assert found.time_s >= fitting.time_s * (1 - CLOSE), (
        f"seed {seed}: {found.time_s} where the fastest takes {fitting}"
    )
    lacks = found.time_s / fitting.time_s - 1
    if lacks > CLOSE:
        assert result.status != "optimal", (
            f"seed {seed}: {found.time_s} called optimal, and {fitting} fits"
        )
        return _missed(seed, kinds, lacks, result.gap, len(everything))
    kinds += _preferred(seed, task, capacity, result, fitting)
    kinds += ["equal", "proven" if result.status == "optimal" else "open"]
    kinds += [f"{kind}, equal" for kind in ("memory", "front") if kind in kinds]
    return Verdict(seed, tuple(kinds), 0.0, result.gap, len(everything))


def _preferred(
    seed: int, task: Task, capacity: int | None, result: SearchResult, fitting: Point
) -> list[str]:
    """The kinds of a task, of which the fastest plan takes `fitting`, by what is chosen within
    `TOLERANCE`. Raises AssertionError if the choice is too slow or does not fit, or if a simpler
    plan fits in time where the result says that none was left.
    """
    restager = Restager(task.annotate, capacity, task.cell_of)
    preference = Preference(restager=restager, tolerance=TOLERANCE, memory_bytes=None)
    chosen = preference.chosen(result, solved_together(task.candidates), task.candidates)
    candidate, solution = chosen.best
    first = candidate_simplicity(result.best[0])

    def limit_s(simplicity: Simplicity) -> float:
        return (1 + first.times_tolerance(simplicity) * TOLERANCE) * fitting.time_s

    own = candidate_simplicity(candidate)
    is_slow = solution.time_s > limit_s(own) * (1 + CLOSE)
    assert not is_slow, f"seed {seed}: {candidate} is too slow"
    assert capacity is None or solution.memory_bytes <= capacity, f"seed {seed}: does not fit"
    least = min(
        simplicity
        for simplicity, of in _by_simplicity(task)
        if (fastest := _fastest(of, capacity)) is not None and fastest.time_s <= limit_s(simplicity)
    )
    assert own <= least or chosen.simpler_left, f"seed {seed}: {own} was chosen, and {least} fits"
    return ["simplest" if own <= least else "not simplest"]


def _by_simplicity(task: Task) -> Iterator[tuple[Simplicity, set[Point]]]:
    """(simplicity, plans) for every candidate, schedule, and recompute mode of all layers or
    several.
    """
    for c in task.candidates:
        models = {mode: task.annotate(replace(c, recompute=mode)) for mode in c.modes}
        kinds = [(mode, {mode: models[mode]}) for mode in c.modes]
        kinds += [("mixed", models)] if len(models) > 1 else []
        for (name, count), (mode, of) in product(c.schedules or (("none", 1),), kinds):
            schedules = ((name, count),) if c.schedules else ()
            found = points(of, schedules, c.stage_sizes)
            yield simplicity_of(c.mesh, c.zero, c.shard, count, mode, name), found


def _fastest(found: set[Point], capacity: int | None) -> Point | None:
    return best(found, inf if capacity is None else capacity)


def points_of(task: Task, candidate: Candidate) -> set[Point]:
    """(seconds, bytes) of every plan of one candidate, by enumeration."""
    models = {mode: task.annotate(replace(candidate, recompute=mode)) for mode in candidate.modes}
    return points(models, candidate.schedules, candidate.stage_sizes)


def _missed(seed: int, kinds: list[str], lacks: float, gap: float, plans: int) -> Verdict:
    assert gap > 0
    return Verdict(seed, (*kinds, "missed"), lacks, gap, plans)


def _capacity(rng: random.Random, everything: set[Point]) -> int | None:
    """A random capacity in bytes of a rank: None (no limit), one byte too few for any plan, or the
    bytes of a plan smaller than the fastest. If no plan is smaller, they are those of any plan.
    """
    sizes = sorted({point.size_bytes for point in everything})
    draw = rng.random()
    if draw < 0.1:
        return None
    if draw < 0.15:
        return sizes[0] - 1
    fastest = best(everything).size_bytes
    between = [size for size in sizes if size < fastest] or sizes
    return rng.choice(between)


def _kinds(
    task: Task, by_candidate: dict[Candidate, set[Point]], fitting: Point, everything: set[Point]
) -> list[str]:
    found = ["memory"] if fitting.time_s > best(everything).time_s * (1 + CLOSE) else []
    found += ["front"] if above_hull(fitting, everything) else []
    found += (
        ["pipeline"]
        if any(c.mesh.pp > 1 and fitting in of for c, of in by_candidate.items())
        else []
    )
    return found


def _check_bounds(
    seed: int,
    result: SearchResult,
    by_candidate: dict[Candidate, set[Point]],
    task: Task,
    capacity: int | None,
) -> None:
    """Assert for every candidate that its bound is not above its best plan that fits, and that
    nothing fits where it is called infeasible.
    """
    for candidate, outcome in zip(task.candidates, result.outcomes, strict=True):
        of = _fastest(by_candidate[candidate], capacity)
        if outcome["outcome"] == "infeasible":
            assert of is None, (
                f"seed {seed}: {candidate} is called infeasible ({outcome['reason']}), and {of} fits"
            )
        elif of is not None and outcome["bound_s"] is not None:
            assert outcome["bound_s"] <= of.time_s * (1 + CLOSE), (
                f"seed {seed}: {candidate} has bound {outcome['bound_s']} above {of}"
            )
        elif of is not None:
            raise AssertionError(
                f"seed {seed}: {candidate} is {outcome['outcome']} without a bound, and {of} fits"
            )


def _check_plan(
    seed: int,
    result: SearchResult,
    by_candidate: dict[Candidate, set[Point]],
    task: Task,
    capacity: int | None,
) -> None:
    """Assert that the search's plan fits, and has the seconds and bytes of an enumerated plan of
    its candidate.
    """
    candidate, found = result.best
    assert capacity is None or found.memory_bytes <= capacity, (
        f"seed {seed}: {found.memory_bytes} bytes in {capacity}"
    )
    number = next(n for n, outcome in enumerate(result.outcomes) if outcome["outcome"] == "chosen")
    assert (candidate.mesh, candidate.micro_batch, candidate.zero) == (
        task.candidates[number].mesh, task.candidates[number].micro_batch, task.candidates[number].zero
    )  # fmt: skip
    same = [p for p in by_candidate[task.candidates[number]]
            if abs(p.time_s - found.time_s) <= CLOSE * p.time_s and p.size_bytes == found.memory_bytes]  # fmt: skip
    assert same, (
        f"seed {seed}: no plan of {candidate} takes {found.time_s} s and {found.memory_bytes} bytes"
    )


@click.command()
@click.option("--tasks", default=400, show_default=True, help="How many random tasks.")
@click.option("--first", default=0, show_default=True, help="Seed of the first.")
@click.option(
    "--list", "listed", is_flag=True, help="List the tasks of which the optimum was not found."
)
def main(tasks: int, first: int, listed: bool) -> None:
    """Plan random small tasks, and compare each answer with the best of all plans. Print the
    counts, and with --list the tasks whose optimum was not found.
    """
    start, counts = time.perf_counter(), Counts()
    for seed in range(first, first + tasks):
        counts.add(judge(seed))
    print("\n".join(counts.lines()))
    for verdict in sorted(counts.lacking, key=lambda v: -v.lacks) if listed else ():
        print(
            f"  seed {verdict.seed}: {100 * verdict.lacks:.3f} % slower than the optimum, gap {100 * verdict.gap:.2f} %"
        )
    print(f"  {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
