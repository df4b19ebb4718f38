"""The search over candidates against brute force over candidates."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.brute_force import brute_force
from support.effort import every, examples
from support.solve_models import random_model, transformer

from autopar.ir.mesh import MeshShape
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.recompute_mix import Mixed
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.lp_relaxation import quick_time_bound
from autopar.solve.integer_program.placement_solver import Infeasible, Solution, solve_placement
from autopar.solve.search import branch_and_bound
from autopar.solve.search.branch_and_bound import search
from autopar.solve.search.candidate_state import Entry
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.staged_placement import Staged

several = settings(
    max_examples=examples(10, 30),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)


def some_candidates(seed: int) -> dict:
    """3-7 candidates -> random models."""
    rng = random.Random(seed)
    models = {}
    for number in range(rng.randint(3, 7)):
        model = random_model(rng.randrange(10**9), max_combinations=150)
        models[Candidate(MeshShape(dp=number + 1), 1, model.num_microbatches, 0, "none")] = model
    return models


@several
@given(st.integers(0, 10**9))
def test_search_equals_brute_force_in_any_order(seed):
    models = some_candidates(seed)
    rng = random.Random(seed)
    free = [brute_force(model, None) for model in models.values()]
    sizes = sorted(found.memory_bytes for found in free if isinstance(found, Solution))
    capacity = rng.choice([None, -1, *sizes])
    exact = {candidate: brute_force(model, capacity) for candidate, model in models.items()}
    times = {
        candidate: found.time_s for candidate, found in exact.items() if isinstance(found, Solution)
    }
    by_time = sorted(models, key=lambda c: times.get(c, 1e9))
    for order in (
        list(models),
        by_time,
        by_time[::-1],
    ):  # fastest first, and the adversary's: every solve improves on the last
        result = search(order, models.__getitem__, capacity)
        if not times:
            assert result.status == "infeasible" and result.best is None
            least = [
                found.memory_bytes for found in exact.values() if found.memory_bytes is not None
            ]
            assert (result.smallest and result.smallest[1].memory_bytes) == (
                min(least) if least else None
            )
            continue
        best = min(times.values())
        assert result.status == "optimal" and result.best[1].time_s == pytest.approx(best, rel=1e-9)
        assert result.bound_s <= best * (1 + 1e-15)
        assert result.model is models[result.best[0]]
        check_outcomes(result, order, exact)


def check_outcomes(result, order, exact) -> None:
    """Each outcome is true, and its bound is below what brute force found."""
    assert [o["mesh"] for o in result.outcomes] == [c.mesh.as_dict() for c in order]
    assert sum(o["outcome"] == "chosen" for o in result.outcomes) == 1
    json.dumps(result.outcomes, allow_nan=False)
    for candidate, outcome in zip(order, result.outcomes, strict=True):
        found = exact[candidate]
        if outcome["outcome"] == "infeasible":
            assert isinstance(found, Infeasible) and outcome["bound_s"] is None
        elif isinstance(found, Solution):
            assert outcome["bound_s"] <= found.time_s * (1 + 1e-15)
            if outcome["outcome"] in ("chosen", "solved"):
                assert outcome["time_s"] == pytest.approx(found.time_s, rel=1e-9)


@pytest.mark.parametrize("lie", every(2, [0.0, 1.0]))
def test_loose_bounds_cost_time_but_never_the_optimum(lie, monkeypatch):
    """With the quick bound at zero, the candidates are relaxed in the given order, worst first."""
    from autopar.solve.search import steps as module

    quick = module.quick_time_bound
    monkeypatch.setattr(module, "quick_time_bound", lambda model: lie * quick(model))
    for seed in range(examples(10, 30)):
        models = some_candidates(seed)
        times = {
            c: found.time_s
            for c, m in models.items()
            if isinstance(found := brute_force(m, None), Solution)
        }
        order = sorted(models, key=lambda c: -times.get(c, 0.0))
        result = search(order, models.__getitem__, None)
        assert (result.best[1].time_s if times else None) == (
            pytest.approx(min(times.values()), rel=1e-9) if times else None
        )


def test_the_lowest_bound_need_not_win():
    """Conversions are what the quick bound leaves out: the candidate that it puts first is the slower one."""
    promising, fast = transformer(layers=8, jitter=1), transformer(layers=8, jitter=4)
    assert quick_time_bound(promising) < quick_time_bound(fast)
    models = {
        Candidate(MeshShape(tp=8), 1, 8, 0, "none"): promising,
        Candidate(MeshShape(tp=4, dp=2), 1, 8, 0, "none"): fast,
    }
    result = search(models, models.__getitem__, None)
    assert result.model is fast
    assert result.best[1].time_s < solve_placement(promising, None).time_s


def test_a_spent_time_limit_tells_the_truth():
    models = {
        Candidate(MeshShape(dp=n), 1, 8, 0, "none"): transformer(layers=8, jitter=n)
        for n in range(1, 6)
    }
    exact = search(models, models.__getitem__, 40 << 30)
    for limit_s in (0.0, 0.05, 0.2):
        result = search(models, models.__getitem__, 40 << 30, SearchLimits(time_s=limit_s))
        assert result.bound_s <= exact.best[1].time_s
        if result.best is None:
            assert result.status == "time limit" and result.gap == 1.0
        else:
            assert result.status in ("feasible", "optimal") and result.best[1].time_s >= exact.best[
                1
            ].time_s * (1 - 1e-9)


def test_micro_batches_must_agree():
    model = transformer(layers=2)
    with pytest.raises(ValueError, match="micro-batches"):
        search([Candidate(MeshShape(), 1, 3, 0, "none")], lambda c: model, None)


def test_no_candidates():
    result = search([], lambda c: None, None)
    assert result.status == "infeasible" and result.best is None and result.smallest is None


@pytest.mark.slow
def test_speed_of_a_search(capsys):
    """48 candidates of a 32-layer transformer; printed, not asserted."""
    models = {}
    for n, (tp, micro, zero, recompute) in enumerate(
        (tp, m, z, r)
        for tp in (1, 2, 4, 8)
        for m in (1, 2)
        for z in (0, 1, 3)
        for r in ("none", "full")
    ):
        model = transformer(
            tp=tp,
            tokens=4096 * micro,
            num_microbatches=16 // micro,
            recompute=recompute == "full",
            jitter=n,
        )
        models[Candidate(MeshShape(dp=64 // tp, tp=tp), micro, 16 // micro, zero, recompute)] = (
            replace(model, fixed_bytes=(4 - zero) << 30)
        )
    for capacity in (None, 80 << 30, 40 << 30, 8 << 30):
        result = search(models, models.__getitem__, capacity)
        kinds = [o["outcome"] for o in result.outcomes]
        with capsys.disabled():
            counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
            print(
                f"\n  {len(models)} candidates, capacity {capacity and capacity >> 30} GiB: {result.status} in"
                f" {result.solve_time_s:.2f} s, gap {result.gap:.1e}, {counts}"
            )
        assert result.status in ("optimal", "infeasible")


def test_what_a_helper_tells_has_the_outcomes_of_all_that_were_solved_together():
    """Whichever ZeRO stage was the best."""
    mesh = MeshShape(pp=2, dp=4)
    first, *others = [
        Candidate(mesh, 1, 8, zero, "mixed", 1, "1f1b", (("1f1b", 1),)) for zero in (1, 2, 3)
    ]
    model = random_model(3, 80)
    solution = brute_force(model, None)
    assert isinstance(solution, Solution)
    for variant in range(3):
        staged = Staged(solution, (Mixed(model, ()),), Schedule("1f1b", 2, 1), "none", variant)
        entry = Entry(
            first, tuple(others), outcome="solved", bound_s=0.5, solution=solution, staged=staged
        )
        found = entry.outcomes()
        assert [one["zero"] for one in found] == [1, 2, 3]
        assert [one["outcome"] for one in found] == [
            "solved" if number == variant else "pruned" for number in range(3)
        ]
        assert found[variant]["time_s"] == solution.time_s and all(
            one["bound_s"] == 0.5 for one in found
        )
        assert entry.alone().outcomes() == found


def test_buffers_of_what_is_made_again_follow_the_micro_batch():
    def holds(recompute: str, micro_batch: int) -> tuple:
        return Candidate(MeshShape(dp=4), micro_batch, 8 // micro_batch, 1, recompute).holds

    assert holds("selective", 1) != holds("selective", 2) and holds("mixed", 1) == holds(
        "mixed", 2
    ) == (holds("none", 4)[0], ("none", "selective", "full"), 0)


def test_data_parallelism_alone_is_opened_first_and_its_large_micro_batches_before_small_ones():
    meshes = (MeshShape(dp=2, tp=2), MeshShape(dp=4), MeshShape(dp=4, ep=2), MeshShape(pp=2, dp=2))
    entries = [
        Entry(Candidate(mesh, size, 8 // size, zero, "none"))
        for mesh in meshes
        for size in (1, 2, 4)
        for zero in (1, 3)
    ]
    order = [entries[number].candidate for number in branch_and_bound._order(entries)]
    alone = [c.micro_batch for c in order[:6]]
    assert {c.mesh for c in order[:6]} == {MeshShape(dp=4)} and alone == sorted(alone, reverse=True)
    others = [c.micro_batch for c in order[6:]]
    assert others == sorted(others) and len(order) == len(entries)
