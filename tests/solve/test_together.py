"""Placement and modes in one program against brute force: every placement in every mode of every layer, priced as any plan is."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.solve_models import MODES, random_modes, transformer

from autopar.solve.costs.pipeline_cost import blocks_of
from autopar.solve.costs.placement_cost import InconsistentPlacement, price_placement
from autopar.solve.costs.recompute_mix import mixed
from autopar.solve.integer_program import recompute_counts
from autopar.solve.integer_program.recompute_counts import solve_together


def points(models) -> list[tuple[float, int]]:
    """(seconds, bytes) of every placement in all ways to share out the segments of a class among the modes."""
    base, found = models["none"], []
    layers = {base.segments[number] for number in blocks_of(base)}
    shares = [
        list(combinations_with_replacement(MODES if c in layers else MODES[:1], b.count))
        for c, b in enumerate(base.classes)
    ]
    by_class = [
        [
            dict(zip([op.name for op in b.ops], names, strict=True))
            for names in product(*([s.name for s in op.strategies] for op in b.ops))
        ]
        for b in base.classes
    ]
    for share in product(*shares):
        left = [list(modes) for modes in share]
        mix = mixed(models, [left[index].pop() for index in base.segments])
        for one in product(*by_class):
            try:
                priced = price_placement(mix.model, mix.choices(one))
            except InconsistentPlacement:
                continue
            found.append((priced.time_s, priced.memory_bytes))
    return found


def capacities(found: list[tuple[float, int]], part: float) -> int:
    low, high = min(size for _, size in found), max(size for _, size in found)
    return low + int((high - low) * part)


@settings(max_examples=examples(5, 60), deadline=None)
@given(seed=st.integers(0, 10**9), part=st.sampled_from([-0.1, 0.0, 0.01, 0.1, 0.2, 0.4, 1.0]))
@example(seed=7723889, part=0.2)  # a tie of a class that runs in two modes
def test_placement_and_modes_are_those_of_brute_force(seed, part):
    models = random_modes(seed)
    if not (every := points(models)):
        assert solve_together(models, 10**9, 60.0).bound_s == math.inf
        return
    capacity = capacities(every, part) if part >= 0 else min(size for _, size in every) - 1
    fitting = [time_s for time_s, size in every if size <= capacity]
    found = solve_together(models, capacity, 60.0)
    if not fitting:
        assert found.choices is None and found.bound_s == math.inf
        return
    best_s = min(fitting)
    assert best_s * (1 - 1e-9) <= found.bound_s <= best_s <= found.time_s <= best_s * (1 + 1e-9)
    base, left = (
        models["none"],
        [[mode for mode, number in c.items() for _ in range(number)] for c in found.counts],
    )
    mix = mixed(models, [left[index].pop() for index in base.segments])
    priced = price_placement(mix.model, mix.choices(found.choices))
    assert (
        not any(left)
        and priced.memory_bytes <= capacity
        and priced.time_s == pytest.approx(best_s, rel=1e-9)
    )
    assert solve_together(models, capacity, 60.0, best_s * (1 + 1e-6)).time_s == pytest.approx(
        best_s, rel=1e-9
    )
    beyond = solve_together(models, capacity, 60.0, best_s * (1 - 1e-6))
    assert beyond.choices is None and best_s * (1 - 1e-6) <= beyond.bound_s <= best_s


def test_a_time_limit_leaves_a_true_bound():
    models = {
        "none": replace_segments(transformer(layers=8)),
        "full": replace_segments(transformer(layers=8, recompute=True)),
    }
    whole = solve_together(models, 40 << 30, 60.0)
    cut = solve_together(models, 40 << 30, 1e-3)
    assert cut.choices is None and 0 <= cut.bound_s <= whole.bound_s < math.inf


def replace_segments(model):
    """Only the layers in the mode of the model."""
    prologue, layer, epilogue = model.classes
    ends = tuple(replace(block, recompute=False) for block in (prologue, epilogue))
    return replace(model, classes=(ends[0], layer, ends[1]), segments=(0, *[1] * layer.count, 2))


@pytest.mark.parametrize("wrong", ["moment", "kept", "freed"])
def test_what_is_left_out_of_memory_is_seen(wrong, monkeypatch):
    """Some random model has another answer if a part of its memory is not counted."""
    whole = recompute_counts.formulate_segment

    def less(model, index, domains):
        program, kept, moment = whole(model, index, domains)
        if wrong == "moment":
            moment = {}, 0
        elif wrong == "kept":
            program.size_bytes[:] = [
                size - kept.get(v, 0) for v, size in enumerate(program.size_bytes)
            ]
        else:
            kept = {}
        return program, kept, moment

    for seed in range(60):
        models = random_modes(seed)
        if not (every := points(models)):
            continue
        capacity = capacities(every, 0.1)
        expected = solve_together(models, capacity, 60.0).bound_s
        with monkeypatch.context() as patch:
            patch.setattr(recompute_counts, "formulate_segment", less)
            if solve_together(models, capacity, 60.0).bound_s != pytest.approx(expected, rel=1e-9):
                return
    raise AssertionError(f"nothing shows that {wrong} bytes are missing")
