"""solve_placement against brute force, and the price against a second, naive evaluation."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from support.brute_force import brute_force, combinations
from support.effort import examples
from support.solve_models import random_model, transformer

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    AnnotatedValue,
    BoundaryEdge,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.sharding import R, S
from autopar.solve.costs.placement_cost import InconsistentPlacement, price_placement
from autopar.solve.integer_program.formulation import formulate
from autopar.solve.integer_program.lp_relaxation import quick_memory_bound, quick_time_bound, relax
from autopar.solve.integer_program.placement_solver import (
    Infeasible,
    Solution,
    prepare,
    smallest_memory,
    solve_placement,
)

many = settings(
    max_examples=examples(10, 40),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
some = settings(many, max_examples=examples(5, 20))
seeds = st.integers(0, 10**9)


def random_capacity(model: AnnotatedModel, seed: int) -> int | None:
    """None, or a capacity between just too small and ample."""
    rng = random.Random(seed)
    if rng.random() < 0.2:
        return None
    free, smallest = brute_force(model, None), brute_force(model, -1)
    if isinstance(free, Infeasible):
        return rng.randint(0, 500)
    low, high = smallest.memory_bytes, free.memory_bytes
    return rng.choice(
        [low - 1, low, high, high - 1, rng.randint(low, max(low, high)), (low + high) // 2]
    )


def _per_micro(block, pick) -> Fraction | None:
    """Seconds of forward and backward of a segment; None if some layout cannot become another."""
    total, made, wanted = Fraction(0), {}, []
    for op in block.ops:
        s = pick[op.name]
        total += Fraction(s.forward_s) + Fraction(s.backward_s)
        made.update(zip(op.outputs, s.outputs, strict=True))
        wanted += list(zip(op.inputs, s.inputs, strict=True))
    for value, layout in dict.fromkeys(wanted):
        if made[value] != layout:
            if (made[value], layout) not in block.values[value].conversions:
                return None
            paid = block.values[value].conversions[made[value], layout]
            total += Fraction(paid.forward_s) + Fraction(paid.backward_s)
    return total


def naive(model: AnnotatedModel, choices) -> tuple[Fraction, int] | None:
    """(time, memory) in exact arithmetic, written without looking at pricing.py; None if the choices cannot run."""
    pick = [
        {op.name: op.strategy(choice[op.name]) for op in block.ops}
        for block, choice in zip(model.classes, choices, strict=True)
    ]
    total, memory, moments, kept = Fraction(model.fixed_s), model.fixed_bytes, [], []
    if any(len({pick[c][n].outputs[0].value for c, n in group}) != 1 for group in model.ties):
        return None
    for c, block in enumerate(model.classes):
        keys = {}
        for op in block.ops:
            s = pick[c][op.name]
            total += block.count * Fraction(s.step_s)
            memory += block.count * s.static_bytes
            for saved in s.saved:
                keys.setdefault(saved.key, []).append(saved.size_bytes)
        per_micro = _per_micro(block, pick[c])
        if per_micro is None:
            return None
        total += model.num_microbatches * block.count * per_micro
        saved_bytes = sum(max(sizes) for sizes in keys.values())
        moments.append(block.workspace_bytes)
        if block.recompute:
            moments[-1] += saved_bytes
            saved_bytes = sum(block.input_bytes[n][pick[c][n].outputs[0]] for n in block.inputs)
        memory += block.count * saved_bytes
        kept.append(saved_bytes)
    freed = 0 if model.last is None else kept[model.last]
    peak = max([0, *(size - freed * (c != model.last) for c, size in enumerate(moments))])
    for edge in model.edges:
        a = pick[edge.source][model.classes[edge.source].outputs[edge.source_output]].inputs[0]
        d = pick[edge.target][model.classes[edge.target].inputs[edge.target_input]].outputs[0]
        if a != d:
            if (a, d) not in edge.conversions:
                return None
            paid = edge.conversions[a, d]
            total += (
                model.num_microbatches
                * edge.count
                * (Fraction(paid.forward_s) + Fraction(paid.backward_s))
            )
    return total, memory + peak


@many
@given(seeds)
def test_solver_equals_brute_force(seed):
    model = random_model(seed)
    capacity = random_capacity(model, seed)
    expected, found = brute_force(model, capacity), solve_placement(model, capacity)
    assert type(found) is type(expected)
    if isinstance(expected, Infeasible):
        event(expected.reason)
        assert (found.reason, found.memory_bytes, found.bound_bytes) == (
            expected.reason,
            expected.memory_bytes,
            expected.bound_bytes,
        )
        return
    binding = capacity is not None and brute_force(model, None).memory_bytes > capacity
    event(f"{found.method}, capacity {'binds' if binding else 'does not bind'}")
    assert found.status == "optimal"
    assert found.time_s == pytest.approx(expected.time_s, rel=1e-9, abs=1e-300)
    assert found.bound_s <= expected.time_s * (1 + 1e-15)
    assert capacity is None or found.memory_bytes <= capacity
    assert sum(found.breakdown.values()) == pytest.approx(found.time_s)


@some
@given(seeds)
def test_cp_sat_alone_equals_brute_force(seed):
    """The same with the LP's shortcut taken away, so that CP-SAT decides every example."""
    model = random_model(seed)
    capacity = random_capacity(model, seed)
    expected = brute_force(model, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "autopar.solve.integer_program.placement_solver.relax",
            lambda program, cap: replace(relax(program, cap), chosen=None, bound_bytes=0),
        )
        found = solve_placement(model, capacity)
    assert type(found) is type(expected)
    if isinstance(found, Solution):
        assert found.method == "cp-sat" and found.status == "optimal"
        assert found.time_s == pytest.approx(expected.time_s, rel=1e-9, abs=1e-300)


@many
@given(seeds)
def test_price_equals_naive_evaluation(seed):
    model = random_model(seed, max_combinations=64)
    for choices in combinations(model):
        expected = naive(model, choices)
        if expected is None:
            with pytest.raises(InconsistentPlacement):
                price_placement(model, choices)
            continue
        priced = price_placement(model, choices)
        assert priced.time_s == pytest.approx(float(expected[0]), rel=1e-13)
        assert priced.memory_bytes == expected[1] == sum(priced.memory_parts.values())


@many
@given(seeds)
def test_lower_bounds_are_below_the_optimum(seed):
    model = random_model(seed)
    free, smallest = brute_force(model, None), brute_force(model, -1)
    if isinstance(free, Infeasible):
        return
    assert quick_time_bound(model) <= free.time_s
    assert quick_memory_bound(model) <= smallest.memory_bytes
    capacity = random_capacity(model, seed + 1)
    best = brute_force(model, capacity)
    relaxed = relax(formulate(model, capacity), capacity)
    if isinstance(best, Solution):
        assert relaxed.bound_s <= best.time_s
        assert capacity is None or relaxed.bound_bytes <= capacity
    else:
        assert relaxed.bound_bytes <= smallest.memory_bytes


@some
@given(seeds, st.sampled_from([0.5, 0.999, 1.0, 1.001, 2.0]))
def test_upper_bound_only_cuts_slower_placements(seed, factor):
    model = random_model(seed)
    capacity = random_capacity(model, seed)
    best = brute_force(model, capacity)
    if isinstance(best, Infeasible):
        return
    found = solve_placement(model, capacity, upper_bound_s=best.time_s * factor)
    if factor >= 1 or best.time_s == 0:
        assert found.time_s == pytest.approx(best.time_s, rel=1e-9)
    else:
        assert found.reason == "bound" and best.time_s * factor <= found.bound_s <= best.time_s * (
            1 + 1e-15
        )


def test_one_huge_cost_does_not_blur_the_others():
    """A penalty of 1e12 s would make the quantum coarse: the second pass restores the resolution."""
    for seed in range(examples(15, 40)):
        model = random_model(seed)
        block = model.classes[0]
        values = {
            name: replace(
                value, conversions={pair: Conversion(1e12, 0.0) for pair in value.conversions}
            )
            for name, value in block.values.items()
        }
        model = replace(model, classes=(replace(block, values=values), *model.classes[1:]))
        capacity = random_capacity(model, seed)
        expected, found = brute_force(model, capacity), solve_placement(model, capacity)
        assert type(found) is type(expected)
        if isinstance(found, Solution):
            assert found.status == "optimal" and found.time_s == pytest.approx(
                expected.time_s, rel=1e-9
            )


def test_a_shared_conversion_is_paid_once_and_what_runs_again_is_told_apart():
    """A value x is made in S(0); two ops need it in R, one as it is: one gather, per micro-batch and segment."""
    keep = (Saved("x", 100),)
    ops = (
        AnnotatedOp("x", "input", "", (), ("x",), (Strategy("s", (), (S(0),)),)),
        AnnotatedOp(
            "a",
            "op",
            "",
            ("x",),
            ("a",),
            (Strategy("r", (R,), (R,), forward_s=1.0, backward_s=2.0, saved=keep),),
        ),
        AnnotatedOp(
            "b", "op", "", ("x", "a", "x"), ("b",), (Strategy("r", (R, R, S(0)), (R,), saved=keep),)
        ),
        AnnotatedOp("y", "output", "", ("b",), (), (Strategy("r", (R,), ()),)),
    )
    values = {
        "x": AnnotatedValue("x", 1, {(S(0), R): Conversion(0.25, 0.5)}),
        "a": AnnotatedValue("a", 1, {}),
        "b": AnnotatedValue("b", 1, {}),
    }
    edge = BoundaryEdge(0, 0, 0, 0, 2, {(R, S(0)): Conversion(0.125, 0.0)})
    block = AnnotatedBlock("block", 3, ops, values, ("x",), ("y",), input_bytes={"x": {S(0): 7}})
    once = solve_placement(AnnotatedModel((block,), (edge,), (), 10), None)
    assert (once.time_s, once.memory_bytes) == (10 * (3 * (3 + 0.75) + 2 * 0.125), 300)
    again = replace(
        block,
        recompute=True,
        ops=(ops[0], replace(ops[1], strategies=(ops[1].strategies[0].rerun(),)), *ops[2:]),
        values=values | {"x": AnnotatedValue("x", 1, {(S(0), R): Conversion(0.25, 0.5).rerun()})},
    )
    twice = solve_placement(AnnotatedModel((again,), (edge,), (), 10), None)
    assert (twice.time_s, twice.memory_bytes) == (
        10 * (3 * (4 + 1.0) + 2 * 0.125),
        3 * 7,
    )  # `x` is the segment's input, kept anyway
    parts = {
        "forward": 30.0,
        "backward": 60.0,
        "recompute": 10 * 3 * 1.25,
        "conversion": 10 * 3 * 0.75,
    }
    assert twice.priced.time_parts == parts | {"edge": 2.5, "step": 0.0, "fixed": 0.0}
    again = replace(again, workspace_bytes=40)
    assert (
        solve_placement(AnnotatedModel((again,), (edge,), (), 10), None).memory_bytes == 3 * 7 + 40
    )


def test_price_refuses_what_cannot_run():
    model = transformer(layers=2)
    choices = [dict(choice) for choice in solve_placement(model, None).choices]
    del choices[1]["act"]
    with pytest.raises(InconsistentPlacement, match="act"):
        price_placement(model, choices)
    choices = solve_placement(model, None).choices
    block = replace(model.classes[1], recompute=True, input_bytes={})
    again = replace(model, classes=(model.classes[0], block, model.classes[2]))
    with pytest.raises(ValueError, match="input_bytes"):
        price_placement(again, choices)


def test_negative_cost_is_refused():
    model = transformer(layers=2)
    edge = replace(model.edges[0], conversions={(R, S(1)): Conversion(-1.0, 0.0)})
    with pytest.raises(ValueError, match="costs -"):
        solve_placement(replace(model, edges=(edge,)), None)


def test_the_same_question_gets_the_same_answer():
    model = transformer(layers=8, jitter=3)
    capacity = solve_placement(model, None).memory_bytes * 7 // 10
    first, second = (solve_placement(model, capacity) for _ in range(2))
    assert (
        first.method == "cp-sat"
        and first.choices == second.choices
        and first.bound_s == second.bound_s
    )


def test_two_workers_agree_with_themselves():
    solved_by_cp_sat = 0
    for seed in range(30):
        model = random_model(seed)
        capacity = random_capacity(model, seed)
        first, second = (solve_placement(model, capacity, workers=2) for _ in range(2))
        assert (
            getattr(first, "bound_s", None) == getattr(second, "bound_s", None)
            and first.choices == second.choices
        )
        solved_by_cp_sat += isinstance(first, Solution) and first.method == "cp-sat"
    assert solved_by_cp_sat >= 5


def test_a_time_limit_leaves_an_honest_bound():
    model = transformer(layers=32, jitter=5)
    capacity = int(solve_placement(model, None).memory_bytes * 0.6)
    exact = solve_placement(model, capacity)
    hurried = solve_placement(model, capacity, time_limit_s=0.01)
    assert hurried.bound_s <= exact.time_s
    if isinstance(hurried, Solution):
        assert hurried.time_s >= exact.time_s * (1 - 1e-9) and hurried.memory_bytes <= capacity
    else:
        assert hurried.reason == "time limit"


@pytest.mark.slow
@pytest.mark.parametrize("fraction", [None, 0.7, 0.5, 0.3])
@pytest.mark.parametrize("recompute", [False, True])
def test_speed_on_a_transformer(recompute, fraction, capsys):
    """Printed, not asserted: the machine decides."""
    model = transformer(jitter=1, recompute=recompute)
    least = smallest_memory(model, 0).memory_bytes
    most = solve_placement(model, None).memory_bytes
    capacity = None if fraction is None else int(least + fraction * (most - least))
    prepared = prepare(model, capacity)
    found = solve_placement(model, capacity)
    ops = sum(len(block.ops) for block in model.classes)
    with capsys.disabled():
        print(
            f"\n  {ops} ops, {len(prepared.program.cost_s)} variables, recompute {recompute}, capacity {fraction}:"
            f" {found.solve_time_s:.3f} s by {found.method}, gap {found.gap:.1e}"
        )
    assert found.status == "optimal"


def test_nothing_to_choose_needs_no_solver(monkeypatch):
    """Ops of one strategy each: the placement is there, its price is the bound, and memory is exact."""
    monkeypatch.setattr("autopar.solve.integer_program.lp_relaxation._solve", None)
    monkeypatch.setattr("autopar.solve.integer_program.placement_solver._minimise_time", None)
    for seed in range(200):
        model = random_model(seed)
        decided = tuple(
            replace(b, ops=tuple(replace(op, strategies=op.strategies[:1]) for op in b.ops))
            for b in model.classes
        )
        model = replace(model, classes=decided)
        best = brute_force(model, None)
        if isinstance(best, Infeasible):
            continue
        found = solve_placement(model, None)
        assert (
            found.status == "optimal"
            and found.choices == best.choices
            and found.time_s == best.time_s
        )
        assert (
            0 <= found.gap <= 1e-9
            and solve_placement(model, best.memory_bytes).memory_bytes == best.memory_bytes
        )
        prepared = prepare(model, best.memory_bytes - 1)
        assert prepared.fits_not and prepared.relaxed.bound_bytes == best.memory_bytes
