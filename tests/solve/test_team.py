"""A search shared out to several processes finds what one alone finds, and survives helpers that die."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import chain, islice
from multiprocessing import get_context

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, tried
from support.fixed_choices import with_choices
from support.staging_models import random_models

from autopar.ir.annotated import AnnotatedModel
from autopar.ir.mesh import MeshShape
from autopar.solve.costs.candidate import Candidate
from autopar.solve.search import branch_and_bound as searching
from autopar.solve.search import work_sharing
from autopar.solve.search.board import NOBODY, Board
from autopar.solve.search.branch_and_bound import driver_of, search
from autopar.solve.search.driver import Driver
from autopar.solve.search.frontier import Frontier
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.result import SearchResult
from autopar.solve.search.uniform_solver import UniformSolver
from autopar.solve.search.work_sharing import Loan, Sharing
from autopar.solve.search.workers import processes_for_search
from benchmarks.search.random_instances import Task

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create"), reason="processes share memory on Linux alone"
)

CAPACITY = 60


def shared(
    task: Task, processes: int, annotate: Callable[[Candidate], AnnotatedModel] | None = None, tell=None, capacity: int = CAPACITY,
    time_limit_s: float = 60.0,
) -> SearchResult:  # fmt: skip
    return search(
        task.candidates,
        annotate or task.annotate,
        capacity,
        SearchLimits(time_s=time_limit_s, processes=processes, alone_s=0.0),
        tell,
        cell_of=task.cell_of,
    )


@cache
def large_task() -> Task:
    """One with many candidates, so that each process opens some."""
    task = next(task for task in map(Task, range(100)) if len(task.candidates) >= 5)
    task.cell_of = lambda candidate: candidate
    return task


def assert_same(found: SearchResult, alone: SearchResult, capacity: int = CAPACITY) -> None:
    assert found.status == alone.status
    assert len(found.outcomes) == len(alone.outcomes)
    assert not any(outcome["outcome"] in ("open", "unexplored") for outcome in found.outcomes)
    if alone.best is None:
        assert found.best is None and (found.smallest is None) == (alone.smallest is None)
        if alone.smallest is not None:
            assert found.smallest[1].memory_bytes == alone.smallest[1].memory_bytes
        return
    assert found.best[1].time_s == pytest.approx(alone.best[1].time_s, rel=2e-9)
    assert found.bound_s == pytest.approx(alone.bound_s, rel=2e-9)
    assert found.best[1].memory_bytes <= capacity and found.model is not None
    (chosen,) = (outcome for outcome in found.outcomes if outcome["outcome"] == "chosen")
    assert (
        chosen["time_s"] == found.best[1].time_s
        and chosen["micro_batch"] == found.best[0].micro_batch
    )


@given(st.integers(0, 10**6), st.integers(2, 3))
@settings(max_examples=examples(6, 25))
def test_several_processes_find_what_one_finds(seed: int, processes: int):
    assert_same(shared(Task(seed), processes), shared(Task(seed), 1))


def test_helpers_open_and_refine_candidates():
    """Each process notes what it annotates: without company it would be one process that does all."""
    reader, writer = os.pipe()
    task = large_task()

    def annotate(candidate: Candidate) -> AnnotatedModel:
        os.write(writer, f"{os.getpid()}\n".encode())
        time.sleep(0.01)
        return task.annotate(candidate)

    assert_same(shared(task, 3, annotate), shared(task, 1))
    os.close(writer)
    with os.fdopen(reader) as noted:
        assert len(set(noted.read().split())) == 3


@pytest.mark.parametrize("after", [0, 2])
def test_what_a_killed_helper_was_to_do_is_done_by_others(after: int):
    task, parent, calls, heard = large_task(), os.getpid(), [], []

    def annotate(candidate: Candidate) -> AnnotatedModel:
        calls.append(candidate)
        if os.getpid() != parent and len(calls) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02)
        return task.annotate(candidate)

    assert_same(shared(task, 3, annotate, heard.append), shared(task, 1))
    assert any("killed" in text for text in heard)


@pytest.mark.parametrize("dies", [True, False])
def test_who_has_nothing_left_hears_of_a_helper_that_fails(dies: bool):
    """While the helper opens its first cell the others do all the rest."""
    task, parent, start = large_task(), os.getpid(), time.monotonic()
    has_begun, calls = multiprocessing.Event(), []

    def annotate(candidate: Candidate) -> AnnotatedModel:
        calls.append(candidate)
        if os.getpid() == parent and len(calls) == 10:  # on a busy machine it begins late
            assert has_begun.wait(20.0)
        if os.getpid() != parent:
            has_begun.set()
            time.sleep(1.0)
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise LookupError("of a helper")
        return task.annotate(candidate)

    if dies:
        assert_same(shared(task, 2, annotate), shared(task, 1))
    else:
        with pytest.raises(LookupError, match="of a helper"):
            shared(task, 2, annotate)
    assert time.monotonic() - start < 30.0  # of a limit of 60


@pytest.mark.parametrize("most", [0, 1])
def test_a_search_goes_on_without_helpers_that_cannot_be_started(monkeypatch, most: int):
    task, fork, heard, forked = large_task(), os.fork, [], []

    def refused() -> int:
        if len(forked) == most:
            raise BlockingIOError("Resource temporarily unavailable")
        forked.append(True)
        return fork()

    monkeypatch.setattr(os, "fork", refused)
    assert_same(shared(task, 3, tell=heard.append), shared(task, 1))
    assert any("no process more" in text for text in heard)


def test_an_error_of_a_helper_is_raised():
    task, parent = large_task(), os.getpid()

    def annotate(candidate: Candidate) -> AnnotatedModel:
        if os.getpid() != parent:
            raise LookupError("of a helper")
        time.sleep(0.02)
        return task.annotate(candidate)

    with pytest.raises(LookupError, match="of a helper"):
        shared(task, 2, annotate)


def test_helpers_end_with_the_process_that_called_them(tmp_path):
    """The process that searches is killed while its helper works on."""
    noted = tmp_path / "helper"
    program = textwrap.dedent("""
        import os, sys, time
        from benchmarks.search.random_instances import Task
        from autopar.solve.search.branch_and_bound import search
        from autopar.solve.search.limits import SearchLimits
        task, parent = next(task for task in map(Task, range(100)) if len(task.candidates) >= 5), os.getpid()

        def annotate(candidate):
            if os.getpid() != parent:
                open(sys.argv[1], "w").write(str(os.getpid()))
                time.sleep(60)
            time.sleep(0.2)
            return task.annotate(candidate)

        search(task.candidates, annotate, 60, SearchLimits(processes=2, alone_s=0.0))
    """)
    path = os.pathsep.join(sys.path)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(noted)], env={**os.environ, "PYTHONPATH": path}
    )
    while not (noted.exists() and noted.read_text()):
        assert process.poll() is None
        time.sleep(0.05)
    process.kill()
    process.wait()
    helper, until = int(noted.read_text()), time.monotonic() + 20
    while os.path.exists(f"/proc/{helper}") and time.monotonic() < until:
        time.sleep(0.1)
    assert not os.path.exists(f"/proc/{helper}")


@pytest.fixture
def lending(monkeypatch: pytest.MonkeyPatch):
    """Whoever splits a candidate lends some of its families as soon as there are two; `value` is how often any process did."""
    values = (
        (work_sharing, "_LENT", 2),
        (searching, "_SPLITS", 1),
        (searching, "_CLOSE", 0.0),
    )
    for module, name, value in values:
        monkeypatch.setattr(module, name, value)
    count, part = get_context("fork").Value("i", 0), Frontier.part

    def noted(self: Frontier) -> list:
        with count.get_lock():
            count.value += 1
        return part(self)

    monkeypatch.setattr(Frontier, "part", noted)
    return count


SPLIT = (0, 37, 50, 56, 67, 74, 84, 88, 103, 108, 159, 164)
"""Seeds of models whose placements are split into several families."""


def split_search(
    seed: int, processes: int, tell: Callable[[str], None] | None = None
) -> SearchResult:
    """Of one candidate, so that helpers have nothing to do but what is lent, in less memory than it would like."""
    models = with_choices(random_models(seed, "1f1b", 2, 1, 6), random.Random(seed))
    micro = models["none"].num_microbatches
    candidate = Candidate(
        MeshShape(pp=2), 1, micro, 0, "mixed", 1, "1f1b", (("1f1b", 1), ("gpipe", 1))
    )
    wanted = (
        search([candidate], lambda candidate: models[candidate.recompute], None)
        .best[1]
        .memory_bytes
    )
    return search(
        [candidate],
        lambda candidate: models[candidate.recompute],
        int(0.8 * wanted),
        SearchLimits(processes=processes, alone_s=0.0),
        tell,
    )


def assert_same_plan(found: SearchResult, alone: SearchResult) -> None:
    assert found.status == alone.status == "optimal" and found.outcomes[0]["outcome"] == "chosen"
    assert found.best[1].time_s == pytest.approx(alone.best[1].time_s, rel=2e-9)
    assert found.bound_s == pytest.approx(alone.bound_s, rel=2e-9) and found.model is not None


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_families_that_are_lent_are_accounted_for(lending, processes: int):
    seeds = tried(SPLIT[::3], SPLIT)
    for seed in seeds:
        assert_same_plan(split_search(seed, processes), split_search(seed, 1))
    assert lending.value >= len(seeds) // 2


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 1])
def test_families_that_a_killed_helper_was_lent_are_split_by_who_lent_them(
    lending, monkeypatch, after: int
):
    narrow, parent, calls, heard = UniformSolver.narrow, os.getpid(), [], []

    def killed(self: UniformSolver, *given):
        calls.append(os.getpid())
        if os.getpid() != parent and calls.count(os.getpid()) > after:
            os.kill(os.getpid(), signal.SIGKILL)
        return narrow(self, *given)

    monkeypatch.setattr(UniformSolver, "narrow", killed)
    for seed in SPLIT:
        assert_same_plan(split_search(seed, 2, heard.append), split_search(seed, 1))
    assert lending.value and any("killed" in text for text in heard)


@pytest.fixture
def no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is lent something has no time for it."""
    borrow = Driver._borrow

    def without_time(self, loan, *given):
        self.state.limits = replace(self.state.limits, time_s=0.0)
        return borrow(self, loan, *given)

    monkeypatch.setattr(Driver, "_borrow", without_time)


def test_what_a_lent_family_leaves_open_is_in_the_bound(lending, no_time):
    seeds = []
    for seed in tried(SPLIT[::3], SPLIT):
        lending.value = 0
        found, alone = split_search(seed, 2), split_search(seed, 1)
        assert (
            found.bound_s <= alone.best[1].time_s * (1 + 1e-9)
            and found.bound_s <= found.best[1].time_s
        )
        seeds += [seed] * (lending.value > 0 and found.status == "feasible")
    assert seeds


def test_what_a_helper_leaves_of_what_it_was_lent_is_not_infeasible(lending, no_time, monkeypatch):
    """No placement of the half that was kept fits, and no plan is known."""
    monkeypatch.setattr(
        UniformSolver, "solve", lambda self, upper_bound_s, limit_s: (None, self.bounds.least_s)
    )
    monkeypatch.setattr(UniformSolver, "_met", lambda self, family, upper_bound_s: None)
    monkeypatch.setattr(
        UniformSolver, "_settle", lambda self, frontier, family, upper_bound_s: None
    )
    models = with_choices(random_models(0, "1f1b", 2, 1, 6), random.Random(0))
    candidate = Candidate(
        MeshShape(pp=2),
        1,
        models["none"].num_microbatches,
        0,
        "mixed",
        1,
        "1f1b",
        (("1f1b", 1), ("gpipe", 1)),
    )
    found = search(
        [candidate],
        lambda candidate: models[candidate.recompute],
        10**9,
        SearchLimits(processes=2, alone_s=0.0),
    )
    assert (
        lending.value
        and found.status == "time limit"
        and found.outcomes[0]["outcome"] == "unexplored"
    )


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch):
    """Whoever owns two candidates lends one, and so do those that are lent some; `value` is how many were."""
    monkeypatch.setattr(work_sharing, "_LENT", 2)
    monkeypatch.setattr(Board, "is_free", lambda self, most: True)
    count, lend = get_context("fork").Value("i", 0), Sharing._lend_to_one

    def noted(self: Sharing, loan: Loan, borrow) -> None:
        with count.get_lock():
            count.value += 0 if loan.families is not None else len(loan.numbers)
        lend(self, loan, borrow)

    monkeypatch.setattr(Sharing, "_lend_to_one", noted)
    return count


def crowded(seed: int) -> Task:
    """A task with the candidates of several."""
    alike = (
        task for task in map(Task, range(seed + 1, seed + 200)) if task.layers == Task(seed).layers
    )
    more = chain.from_iterable(task.candidates for task in islice(alike, 8))
    return Task(seed, tuple(dict.fromkeys((*Task(seed).candidates, *more))))


CROWDED = [(crowded(seed), 60 if seed % 4 == 0 else 200) for seed in range(16)]
"""Tasks and what their devices hold, which is too little for some."""


@pytest.mark.slow
def test_candidates_that_are_lent_are_accounted_for(generous):
    for task, capacity in CROWDED:
        assert_same(
            shared(task, 2, capacity=capacity), shared(task, 1, capacity=capacity), capacity
        )
    assert generous.value >= 4


@pytest.mark.slow
def test_candidates_that_a_killed_helper_was_lent_are_refined_by_who_lent_them(
    generous, monkeypatch
):
    work_off, parent, heard = Driver._work_off, os.getpid(), []

    def killed(self: Driver) -> None:
        self.state.queue = self.state.queue[:1]  # some of it is done
        work_off(self)
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Driver, "_work_off", killed)
    for task, capacity in CROWDED:
        assert_same(
            shared(task, 2, tell=heard.append, capacity=capacity),
            shared(task, 1, capacity=capacity),
            capacity,
        )
    assert generous.value and any("killed" in text for text in heard)


@pytest.fixture
def mortal(generous, monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers are killed anywhere: those that were lent something, those that lent it, and those that had told nothing yet of what others
    asked for."""
    refine, parent = Driver._refine, os.getpid()

    def killed(self: Driver, number: int, at_once: bool = False) -> None:
        if os.getpid() != parent and random.Random(f"{os.getpid()} {number}").random() < 0.1:
            os.kill(os.getpid(), signal.SIGKILL)
        refine(self, number, at_once)

    monkeypatch.setattr(Driver, "_refine", killed)


@pytest.mark.slow
@pytest.mark.parametrize("lent", [1, 2])
def test_a_search_whose_helpers_are_killed_anywhere_accounts_for_all(
    mortal, monkeypatch, lent: int
):
    heard = []
    monkeypatch.setattr(work_sharing, "_LENT", lent)
    for task, capacity in CROWDED[::2]:
        assert_same(
            shared(task, 3, tell=heard.append, capacity=capacity),
            shared(task, 1, capacity=capacity),
            capacity,
        )
    assert any("killed" in text for text in heard)


@pytest.mark.slow
def test_what_is_said_of_a_search_that_time_and_kills_end_is_true(mortal):
    heard, late = [], 0
    for task, capacity in CROWDED:
        alone = shared(task, 1, capacity=capacity)
        for limit_s in (0.02, 0.05, 0.15):
            found = shared(task, 3, tell=heard.append, capacity=capacity, time_limit_s=limit_s)
            assert_true(found, alone)
            late += any(outcome["outcome"] == "unexplored" for outcome in found.outcomes)
    assert late and any("killed" in text for text in heard)


def assert_true(found: SearchResult, alone: SearchResult) -> None:
    """What a search says that left some of it is true beside what one says that left nothing."""
    assert len(found.outcomes) == len(alone.outcomes) and not any(
        outcome["outcome"] == "open" for outcome in found.outcomes
    )
    if alone.best is None:
        assert found.best is None and found.status in (alone.status, "time limit")
        return
    assert found.status != "infeasible" and found.bound_s <= alone.best[1].time_s * (1 + 1e-9)
    assert found.best is None or alone.best[1].time_s * (1 - 1e-9) <= found.best[1].time_s


def test_a_helper_tells_nothing_of_a_candidate_that_another_had(monkeypatch):
    """Who owned it died, and it is nobody's for a moment: who hears of that does it anew, which must stay."""
    task, dropped = large_task(), []

    def work(self: Driver) -> None:
        self._open_all()
        dropped.append(self.state.queue.pop()[-1])  # as `_next` does of what another owns
        self._end()

    monkeypatch.setattr(Driver, "_work", work)
    limits = SearchLimits(processes=2)
    helper = driver_of(task.candidates, task.annotate, CAPACITY, limits, print, task.cell_of)
    entries, best = helper._help(1, print)
    assert entries.keys() == set(range(len(helper.state.entries))) - set(dropped) and not best
    assert helper.state.entries[dropped[0]].outcome == "open"


@pytest.mark.slow
def test_what_a_lent_candidate_leaves_open_is_in_the_bound(generous, no_time):
    left = 0
    for task, capacity in CROWDED:
        found, alone = shared(task, 2, capacity=capacity), shared(task, 1, capacity=capacity)
        assert_true(found, alone)
        left += any(outcome["outcome"] == "unexplored" for outcome in found.outcomes)
    assert left


def test_a_process_that_is_gone_is_not_at_work():
    board, gone = Board(1, 1, 1, True), subprocess.Popen(["true"])
    assert board.is_free(2) and not board.is_free(1)
    board.enter(gone.pid)
    assert not board.is_free(2)
    gone.wait()
    assert board.is_free(2) and not board.is_free(1)
    board.leave()
    assert board.is_free(1)


def test_one_of_many_has_a_place_on_the_board():
    board = Board(40, 1, 1, True)
    pids = []
    for who in range(1, 4):
        if (pid := os.fork()) == 0:
            for place in range(40):
                if board.take(board.owner, place, who):
                    board.found(100.0 - place - who)
            os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    assert NOBODY not in board.owner and set(board.owner) <= {1, 2, 3}
    assert board.best_s == min(100.0 - place - who for place, who in enumerate(board.owner))


def test_there_is_a_process_for_each_core():
    assert processes_for_search() == min(len(os.sched_getaffinity(0)), 8)
