"""The search against every plan there is: raw strategies of ops, recompute modes, cuts, schedules and candidates of small random tasks."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.effort import examples, tried

from autopar.ir.mesh import MeshShape
from autopar.solve.costs import pipeline_cost, placement_cost
from autopar.solve.costs.candidate import MIXED, Candidate
from autopar.solve.integer_program.placement_solver import SolverAuditError
from autopar.solve.search import row_bound
from autopar.solve.search.branch_and_bound import search
from autopar.solve.search.uniform_solver import UniformSolver
from benchmarks.search import exhaustive_oracle
from benchmarks.search.exhaustive_oracle import Point, above_hull, best, deals, front, placements
from benchmarks.search.exhaustive_search import Counts, judge, points_of
from benchmarks.search.random_instances import Task


def counted(tasks: int, fixed: bool = False) -> Counts:
    """So many tasks, each held to all plans that it has; `judge` raises where the search says what is not so."""
    counts = Counts()

    @settings(
        max_examples=tasks,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(0, 10**9))
    def run(seed: int) -> None:
        counts.add(judge(seed, fixed))

    run()
    print("\n".join(counts.lines()))
    return counts


def check(counts: Counts, equal: int, memory: int, fronts: int) -> None:
    kinds = counts.kinds
    assert (
        kinds["equal"] >= equal
        and kinds["memory, equal"] >= memory
        and kinds["front, equal"] >= fronts
        and kinds["infeasible"]
    )
    assert kinds["proven"] >= 0.8 * kinds["equal"] and kinds["pipeline"] and kinds["mixed"]
    assert kinds["missed"] == 0


def test_the_search_equals_enumeration():
    check(counted(examples(24, 60)), *tried((16, 8, 2), (45, 25, 8)))


def test_the_search_equals_enumeration_where_a_framework_cuts_the_stages():
    check(counted(examples(16, 40), fixed=True), *tried((8, 3, 1), (25, 12, 4)))


@pytest.mark.slow
def test_the_search_equals_enumeration_of_many_tasks_with_fixed_stages():
    check(counted(600, fixed=True), 200, 60, 30)


@pytest.mark.slow
def test_the_search_equals_enumeration_of_many_tasks():
    check(counted(1000), 300, 100, 50)


def test_what_waits_is_no_bound_where_a_rank_has_several_stages():
    """A segment that keeps more may need less memory: a stage of zero bubble can be held less often than it waits."""
    one = Candidate(MeshShape(pp=2, tp=2), 1, 8, 0, MIXED, 2, "zero_bubble", (("zero_bubble", 2),))
    for dp, zero in product((1, 2), (0, 1)):
        candidate = replace(one, mesh=MeshShape(pp=2, dp=dp, tp=2), zero=zero)
        task = Task(157, (candidate,))
        models = {
            mode: task.annotate(replace(candidate, recompute=mode)) for mode in candidate.modes
        }
        points = set().union(
            *(set(placement.dealt("zero_bubble", 2)) for placement in placements(models))
        )
        for capacity in range(441, 456, tried(6, 3)):
            expected, found = (
                best(points, capacity),
                search([candidate], task.annotate, capacity, cell_of=task.cell_of),
            )
            assert (found.best is None) == (expected is None), (dp, zero, capacity)
            if expected is not None:
                assert found.bound_s <= expected.time_s * (1 + 1e-9), (dp, zero, capacity)


def test_a_mode_that_does_not_fit_closes_no_other():
    """All of one mesh and ZeRO stage: layers that must keep everything do not fit, and those that recompute do."""
    mesh = MeshShape(dp=2)
    none, mixed = (
        Candidate(mesh, micro, 4 // micro, 0, mode) for micro, mode in ((1, "none"), (2, MIXED))
    )
    for seed in range(40):
        task = Task(seed, (none, mixed))
        fits = {
            c: best(points_of(task, c)).size_bytes
            if c is none
            else front(points_of(task, c))[0].size_bytes
            for c in (none, mixed)
        }
        if fits[mixed] < fits[none]:
            result = search(task.candidates, task.annotate, fits[mixed], cell_of=task.cell_of)
            assert result.best is not None and result.best[0].micro_batch == 2
            return
    raise AssertionError("no task recomputes enough to make up for a larger micro-batch")


def test_ranks_that_share_out_with_few_others_close_no_other():
    """Pairs of one mesh and ZeRO stage hold too much, and all ranks together do not."""
    whole = Candidate(MeshShape(dp=8), 1, 1, 3, MIXED)
    pairs, seen = replace(whole, shard=2), 0
    for seed in range(tried(20, 40)):
        task = Task(seed, (pairs, whole))
        least = {c: front(points_of(task, c))[0].size_bytes for c in (pairs, whole)}
        if least[whole] < least[pairs]:
            result = search(task.candidates, task.annotate, least[whole], cell_of=task.cell_of)
            assert result.best is not None and result.best[0].shard == 0, seed
            seen += 1
    assert seen >= tried(5, 10)


def test_candidates_that_shard_within_groups_and_among_all_are_not_equally_simple():
    """They are solved together, and the simplest plan shards among all, not within groups."""
    assert {"simplest", "pipeline"} <= set(judge(584).kinds)


def _half(function):
    return lambda *args: function(*args) // 2


def _longer(function):
    return lambda *args: tuple(1.1 * seconds for seconds in function(*args))


def _slower(function):
    def found(*args):
        staging = function(*args)
        return (
            1.1 * staging
            if isinstance(staging, float)
            else replace(staging, bound_s=1.1 * staging.bound_s)
        )

    return found


@pytest.mark.parametrize(("module", "name", "wrong"), [
    (placement_cost, "saved_bytes", _half), (placement_cost, "transient_bytes", _half), (UniformSolver, "raise_bounds", _longer),
    (row_bound, "best_staging", _slower),
    (pipeline_cost, "peak_held", lambda right: lambda *args: tuple(size // 2 for size in right(*args))),
    pytest.param(
        pipeline_cost, "fullest_of", lambda right: lambda *args: tuple(size // 2 for size in right(*args)), marks=pytest.mark.slow
    ),
    (pipeline_cost, "pipeline_time", lambda right: lambda *args: replace(right(*args), time_s=0.99 * right(*args).time_s)),
])  # fmt: skip
def test_what_is_priced_or_bounded_wrongly_is_seen(module, name, wrong, monkeypatch):
    """Some of a few tasks fails, by the search's own audits or by the oracle's."""
    monkeypatch.setattr(module, name, wrong(getattr(module, name)))
    with pytest.raises((AssertionError, SolverAuditError)):
        list(map(judge, range(60)))


def test_the_oracle_shares_no_code_with_the_solver():
    tree = ast.parse(Path(exhaustive_oracle.__file__).read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(module.startswith("autopar.solve") for module in modules)
    taken = {
        a.name
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module == "autopar_cost_models"
        for a in n.names
    }
    assert taken == {"StageTimes", "pipeline_time"}


def test_fronts_and_hulls():
    found = {
        Point(10.0, 1),
        Point(9.0, 5),
        Point(2.0, 6),
        Point(3.0, 8),
        Point(1.0, 10),
        Point(5.0, 6),
    }
    assert front(found) == [Point(10.0, 1), Point(9.0, 5), Point(2.0, 6), Point(1.0, 10)]
    assert [p.size_bytes for p in front(found) if above_hull(p, found)] == [5]
    assert best(found, 5) == Point(9.0, 5) and best(found, 0) is None
    assert (
        deals(4, 4) == [[1, 1, 1, 1]]
        and [1, 2, 2, 1] in deals(6, 4)
        and [2, 2, 2, 2] in deals(8, 4)
    )
