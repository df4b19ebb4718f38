"""Searches of many cells: the cheaper first bound, and what is solved before all candidates are opened."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.schedule import Schedule
from autopar.solve.search import branch_and_bound, driver
from autopar.solve.search.branch_and_bound import search
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.uniform_solver import ALONE
from benchmarks.search.exhaustive_search import judge
from benchmarks.search.random_instances import Task


def test_the_hasty_glance_is_below_the_glance():
    lower = 0
    for seed in range(25):
        task = Task(seed)
        for c in task.candidates[:3]:
            cell = Cell(lambda mode, c=c, t=task: t.annotate(replace(c, recompute=mode)), c.modes)
            schedules = [Schedule(name, c.mesh.pp, count) for name, count in c.schedules] or [ALONE]
            for schedule in schedules:
                hasty_s, glance_s = (
                    cell.glance_s(schedule, c.num_microbatches, hasty) for hasty in (True, False)
                )
                assert hasty_s <= glance_s * (1 + 1e-12)
                lower += hasty_s < glance_s
    assert lower, "conversions are what the hasty one leaves out"


@pytest.mark.slow
def test_what_a_search_says_is_true_with_hasty_bounds(monkeypatch):
    monkeypatch.setattr(branch_and_bound, "_MANY_CELLS", 0)
    for seed in range(12):
        judge(seed)


def test_a_plan_is_found_while_others_wait_to_be_opened(monkeypatch):
    """With no time to lose, the first candidate that is opened is solved at once."""
    monkeypatch.setattr(driver, "_DIVE_SHARE", 0.0)
    opened = []
    real = branch_and_bound.UniformRefiner.open

    def slowly(self, number):
        opened.append((number, self.state.best is not None))
        real(self, number)

    monkeypatch.setattr(branch_and_bound.UniformRefiner, "open", slowly)
    task = next(t for t in map(Task, range(50)) if len(t.candidates) >= 4)
    found = search(task.candidates, task.annotate, None, cell_of=task.cell_of)
    assert found.status == "optimal" and opened[-1][1] and not opened[0][1]


def test_likely_candidates_are_solved_first_and_change_no_answer(monkeypatch):
    monkeypatch.setattr(branch_and_bound, "_MANY_CELLS", 0)
    advanced = []
    real = branch_and_bound.UniformRefiner.advance

    def seen(self, number, at_once):
        advanced.append((number, at_once))
        real(self, number, at_once)

    monkeypatch.setattr(branch_and_bound.UniformRefiner, "advance", seen)
    for seed in range(8):
        task = Task(seed)
        plain = search(task.candidates, task.annotate, None, cell_of=task.cell_of)
        for likely in ([len(task.candidates) - 1], range(len(task.candidates))):
            advanced.clear()
            found = search(
                task.candidates, task.annotate, None, cell_of=task.cell_of, likely=likely
            )
            assert found.status == plain.status
            assert found.fastest_s == pytest.approx(plain.fastest_s, rel=1e-9)
            last = len(branch_and_bound.solved_together(task.candidates)) - 1
            assert not advanced or advanced[0] == (0 if len(likely) > 1 else last, True)


@pytest.mark.parametrize("limit_s", [0.0, 0.3])
def test_the_limit_is_wall_time_also_where_nothing_fits(limit_s, monkeypatch):
    real = branch_and_bound.UniformRefiner.open

    def slowly(self, number):
        time.sleep(0.1)
        real(self, number)

    monkeypatch.setattr(branch_and_bound.UniformRefiner, "open", slowly)
    task = Task(3)
    candidates = [replace(c, shard=0) for c in task.candidates] * 8
    start = time.perf_counter()
    found = search(candidates, task.annotate, None, SearchLimits(time_s=limit_s))
    assert time.perf_counter() - start < limit_s + 5.0
    assert found.status in ("time limit", "feasible", "optimal")
