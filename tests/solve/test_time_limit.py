"""After the end of the time no more work begins, at whatever point of a command it ends.

The clock stands still until a given number of steps (models annotated, candidates bounded or
solved) were begun. Then the time is over. So no test depends on the speed of a machine.
"""

from __future__ import annotations

import time
from functools import cache
from math import inf

import pytest
from support.effort import tried
from support.explain_tasks import instant

from autopar import api
from autopar.annotate.annotator import Annotator
from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.ir.deadline import Deadline
from autopar.ir.stop import TimeIsOver, check_time, stops_at
from autopar.models import parse_model
from autopar.planning.searches import Searches
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.solve.search import branch_and_bound, steps
from autopar.solve.search.restaging import Restager
from autopar.solve.search.uniform_solver import UniformSolver

STEPS = ((UniformSolver, "raise_bounds"), (UniformSolver, "solve"), (UniformSolver, "narrow"),
         (Restager, "likely_s"), (Annotator, "annotate"))  # fmt: skip
MODEL = "llama:layers=4,hidden=256,heads=8,kv_heads=4,ffn=704,vocab=512,seq=128"
LIMIT_S = 100.0


class Clock:
    """A clock that stands still until `last` steps were begun, and then is far beyond any limit. If
    it `ticks`, each look at it is a step, so that the time also ends inside of other steps.
    """

    def __init__(self, last: float, ticks: bool = False) -> None:
        self.last, self.steps, self.ticks = last, 0, ticks
        self.late = 0  # steps that were begun after the end

    def __call__(self) -> float:
        self.steps += self.ticks
        return 1e9 if self.steps >= self.last else 0.0

    def begin(self) -> None:
        self.late += self.steps >= self.last
        self.steps += not self.ticks


@cache
def traced():
    return api.trace_spec(parse_model(MODEL), 128)


def planned(monkeypatch, last: float, ticks: bool = False, **asked):
    """(the plan or None, the clock), if the time is over after `last` steps."""
    clock = Clock(last, ticks)
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", clock)
        for kind, name in STEPS:
            real = getattr(kind, name)

            def counted(*args, real=real):
                clock.begin()
                return real(*args)

            patch.setattr(kind, name, counted)
        cluster = ClusterSpec.parse("dgx-h100:2").kept_free()
        request = PlanRequest(cluster, 32, Pins(), "bf16", "m", **asked)
        try:
            return api.plan_traced(traced(), request, LIMIT_S, processes=1), clock
        except NoPlanFits as error:
            assert error.is_cut and "raise the time limit" in str(error)
            return None, clock


def test_a_plan_is_the_best_so_far_wherever_the_time_ends(monkeypatch):
    """Simpler plans, runners-up and the layout on all memory are among the steps."""
    asked = {"tolerance": 0.02, "runners_up": True}
    whole, clock = planned(monkeypatch, inf, **asked)
    steps = clock.steps
    assert whole is not None and whole.certificate.gap <= 1e-3 and steps > 60
    best_s, found = whole.certificate.bound_s, 0
    for last in (1, *tried((), (3,)), *range(8, steps, max(steps // tried(3, 5), 1))):
        plan, clock = planned(monkeypatch, last, **asked)
        assert clock.late <= 8, (last, clock.late, steps)
        if plan is None:
            continue
        proof = plan.certificate
        found += 1
        assert proof.bound_s <= best_s * (1 + 1e-6)
        assert proof.fastest_s >= whole.certificate.bound_s * (1 - 1e-6)
        cut = [entry for entry in proof.runners_up if entry["cut"]]
        assert cut or last > steps // 2
    assert found >= tried(2, 3)


def test_a_step_that_has_begun_stops_with_the_time(monkeypatch):
    """Wherever a look at the clock ends the time: the plan of the search so far, or none."""
    asked = {"tolerance": 0.02, "runners_up": True}
    whole, clock = planned(monkeypatch, inf, ticks=True, **asked)
    assert whole is not None
    looks, found = clock.steps, 0
    for part in tried((0.05, 0.5), (0.01, 0.02, 0.1, 0.2, 0.3, 0.7, 0.9)):
        plan, clock = planned(monkeypatch, part * looks, ticks=True, **asked)
        assert clock.late <= 8 and clock.steps < part * looks + 500, (part, clock.steps, looks)
        if plan is not None:
            found += 1
            assert plan.certificate.bound_s <= whole.certificate.bound_s * (1 + 1e-6)
            assert plan.certificate.fastest_s >= whole.certificate.bound_s * (1 - 1e-6)
    assert found


def test_the_earlier_of_two_times_stops():
    check_time()  # without a time
    with stops_at(time.perf_counter() + 100.0):
        check_time()
        with pytest.raises(TimeIsOver), stops_at(0.0):
            check_time()
        check_time()
    with pytest.raises(TimeIsOver), stops_at(0.0), stops_at(inf):
        check_time()


def test_what_follows_a_capture_has_half_of_the_limit():
    now = [100.0]
    deadline = Deadline.after(10.0, lambda: now[0])
    assert (deadline.at_s, deadline.left_s, deadline.is_over) == (110.0, 10.0, False)
    now[0] = 104.0
    assert deadline.captured(4.0).left_s == 6.0
    now[0] = 130.0
    late = deadline.captured(30.0)
    assert deadline.is_over and late.left_s == 5.0 and late.at_s == 100.0 + 10.0 / 2 + 30.0
    assert late.captured(2.0).at_s == 137.0
    with pytest.raises(AutoparError, match="must be above 0"):
        Deadline.after(0.0)


def test_searches_share_what_is_left():
    now = [0.0]
    searches = Searches(Deadline.after(12.0, lambda: now[0]), 3)
    assert searches.next_s() == 4.0
    now[0] = 1.0  # the first took less: others have more
    assert searches.next_s() == 5.5
    now[0] = 8.0
    assert searches.next_s() == 4.0 and searches.next_s(0.5) == 2.0  # more than were said
    now[0] = 12.0
    with pytest.raises(NoPlanFits, match="time limit of 12 s was over") as error:
        searches.next_s()
    assert error.value.is_cut and not error.value.proven
    searches.deadline = searches.deadline.captured(9.0)
    now[0] = 20.0
    with pytest.raises(NoPlanFits, match=r"took 9.0 s of it; a limit of 24 s"):
        searches.next_s()


@pytest.mark.parametrize(("far", "first"), [(branch_and_bound._FAR, "tp=4"), (inf, "dp=4")])
def test_what_a_slow_network_costs_once_a_step_is_known_before_a_plan_is_made(
    monkeypatch, far, first
):
    solved, real = [], steps.solve

    def solve(state, entry, solver):
        solved.append(str(entry.candidate.mesh))
        return real(state, entry, solver)

    monkeypatch.setattr(branch_and_bound, "_FAR", far)
    monkeypatch.setattr(steps, "solve", solve)
    cluster = instant(ClusterSpec.make("h100", 2, 2, inter_bandwidth_Bps=1e9))
    request = PlanRequest(cluster, 8, Pins(pp=1), "bf16", "m", tolerance=0.0)
    plan = api.plan_traced(traced(), request, LIMIT_S, processes=1)
    assert str(plan.mesh) == "tp=4" and solved[0] == first
