"""Stagings against brute force: every way to cut, every mode of every block, priced as any plan is."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from autopar_cost_models import StageTimes, pipeline_time
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.staging_models import choices_of, random_models, stagings

from autopar.ir.annotated import (
    Shared,
)
from autopar.solve.bounds.cell import Cell
from autopar.solve.costs.pipeline_cost import pipelined, stages_of
from autopar.solve.costs.placement_cost import price_placement
from autopar.solve.costs.recompute_mix import Models, mixed
from autopar.solve.costs.schedule import Schedule, Staging
from autopar.solve.search.uniform_solver import UniformSolver
from autopar.solve.staging import one_stage_per_rank
from autopar.solve.staging.best_staging import best_staging, quick_bound_s
from autopar.solve.staging.interleaved import dealt_sizes
from autopar.solve.staging.longest_paths import least_step_s
from autopar.solve.staging.row_of_costs import row_of_placement
from autopar.solve.staging.stage_runs import StageRun


def cost(models: Models, modes: tuple[str, ...], stages) -> tuple[float, int]:
    """(seconds, bytes of the fullest rank), by the definition."""
    found = mixed(models, modes)
    choices = found.choices(choices_of(models))
    if models["none"].pipeline is None:
        priced = price_placement(found.model, choices)
        return priced.time_s, priced.memory_bytes
    cut = pipelined(found.model, choices, stages)
    return cut.time_s, max(cut.memory_bytes)


def found_cost(models: Models, found: Staging) -> tuple[float, int]:
    return cost(models, found.modes, found.stages)


@pytest.mark.parametrize(
    ("schedule", "ranks", "most"),
    [("gpipe", 1, 5), ("gpipe", 2, 4), ("1f1b", 2, 4), ("1f1b", 3, 5), ("zero_bubble", 2, 4)],
)
@settings(max_examples=examples(6, 25))
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_the_best_staging_is_that_of_brute_force(schedule, ranks, most, seed, tight):
    models = random_models(seed, schedule, ranks, 1, most)
    everything = {
        (modes, stages): cost(models, modes, stages) for modes, stages in stagings(models)
    }
    needs = sorted({size for _, size in everything.values()})
    capacity = needs[int(tight * (len(needs) - 1))] - (tight == 0)
    fitting = [seconds for seconds, size in everything.values() if size <= capacity]
    found = best_staging(
        row_of_placement(models, choices_of(models)), Schedule(schedule, ranks, 1), capacity
    )
    if not fitting:
        assert found == math.inf
        return
    seconds, size = found_cost(models, found)
    assert size <= capacity
    assert found.bound_s <= min(fitting) * (1 + 1e-9), "a bound is below every staging that fits"
    assert seconds == pytest.approx(min(fitting), rel=1e-9) and found.bound_s == pytest.approx(
        seconds, rel=1e-9
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@settings(max_examples=examples(3, 15))
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_cuts_by_paths_are_those_of_all_cuts(schedule, seed, tight):
    """What serves long rows, against pricing every cut."""
    models = random_models(seed, schedule, 3, 1, 9)
    row, at = row_of_placement(models, choices_of(models)), Schedule(schedule, 3, 1)
    free = best_staging(row, at, None)
    capacity = int(found_cost(models, free)[1] * (0.7 + 0.3 * tight))
    exact = best_staging(row, at, capacity)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_stage_per_rank, "_FEW", 0)
        found = best_staging(row, at, capacity)
    if isinstance(exact, float):
        assert found == exact == math.inf
        return
    best_s = found_cost(models, exact)[0]
    assert found.bound_s <= best_s * (1 + 1e-9) and found_cost(models, found)[1] <= capacity
    assert found_cost(models, found)[0] <= best_s * (1 + 1e-9 if schedule == "gpipe" else 1.05)


def step_and_path_s(
    schedule: str, stages: list[StageTimes], micro: int, hop_s: float
) -> tuple[float, float]:
    """What a step of stages of one unit takes, and the longest path of it that cuts know."""
    whole = ((times.forward_s, times.backward_s) for times in stages)
    forward_s, backward_s = np.cumsum([(0.0, 0.0), *whole], axis=0).T
    row = SimpleNamespace(
        micro_batches=micro,
        hop_s=hop_s,
        before=SimpleNamespace(forward_s=forward_s, backward_s=backward_s),
        lines=(),
    )
    runs = [
        StageRun(
            stage=n,
            first=n,
            end=n + 1,
            forward_s=times.forward_s,
            backward_s=times.backward_s,
            weight_s=times.weight_s,
            total_s=times.total_s,
            step_s=0.0,
            least_s=0.0,
            amounts=np.zeros(0),
            room=(1, math.inf, 0),
        )
        for n, times in enumerate(stages)
    ]
    path_s = least_step_s([row] * len(stages), Schedule(schedule, len(stages), 1), runs)
    first = replace(stages[0], weight_s=stages[0].backward_s)  # whose input needs no gradient
    return pipeline_time(schedule, [first, *stages[1:]], len(stages), micro, hop_s).time_s, path_s


@settings(max_examples=examples(50, 200))
@example(seed=734, schedule="1f1b", ranks=32)
@given(
    seed=st.integers(0, 10**6),
    schedule=st.sampled_from(["1f1b", "zero_bubble"]),
    ranks=st.integers(2, 12),
)
def test_no_path_of_cuts_is_longer_than_a_step(seed, schedule, ranks):
    rng = random.Random(seed)
    micro = rng.choice([1, 2, 5]) * ranks + (schedule == "1f1b") * rng.choice([0, 1, 3])
    forward = rng.choice([lambda: 1.0, lambda: rng.choice([6, 7]) / 6, lambda: rng.uniform(0.3, 2)])
    backward = [
        (f, 2 * f if rng.random() < 0.8 else rng.uniform(0.3, 3))
        for f in (forward() for _ in range(ranks))
    ]
    stages = [StageTimes(f, b, b * rng.choice([0.3, 0.5])) for f, b in backward]
    step_s, path_s = step_and_path_s(
        schedule, stages, micro, rng.choice([0.0, 0.01, 0.1, 0.5, 1.5])
    )
    assert path_s <= step_s * (1 + 1e-9)


@pytest.mark.parametrize("slow", ["ssssssss", "fssfssfs", "fsssfsss", "sfsfsfss", "ffssssss"])
@pytest.mark.parametrize("micro", [9, 16, 40, 129])
def test_cuts_know_that_slow_neighbours_wait_for_messages(slow, micro):
    """A rank between others as slow as itself gets no gradient in time: it loses more than a message for each micro-batch, in all some
    5 % here."""
    stages = [StageTimes(f, 2 * f, f) for f in (1.2 if rank == "s" else 1.0 for rank in slow)]
    instant_s, _ = step_and_path_s("1f1b", stages, micro, 0.0)
    step_s, path_s = step_and_path_s("1f1b", stages, micro, 0.1)
    waits_s = 14 * 0.1  # there and back
    assert step_s - instant_s > waits_s + (micro > 40) * 0.02 * instant_s
    assert path_s >= step_s - 0.25 * (step_s - instant_s)


@pytest.mark.parametrize("weight", [0.2, 0.6, 1.0, 1.4])
@pytest.mark.parametrize(
    "slow", ["ffffffff", "sfffffff", "fffffffs", "sfffffss", "ffssssff", "sfsfsfsf"]
)
@pytest.mark.parametrize("micro", [8, 16, 128])
def test_cuts_know_what_zero_bubble_takes_where_messages_are_instant(slow, micro, weight):
    stages = [
        StageTimes(f, 2 * f, weight * f) for f in (1.2 if rank == "s" else 1.0 for rank in slow)
    ]
    step_s, path_s = step_and_path_s("zero_bubble", stages, micro, 0.0)
    assert path_s == pytest.approx(step_s, rel=1e-9)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble"])
@settings(max_examples=examples(3, 15))
@example(seed=2676, tight=0.25)  # more recomputation in all, but less in the last stage
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_several_stages_a_rank_are_the_best_of_their_space(schedule, seed, tight):
    """Every deal, every number of blocks in each mode that all stages of a rank run."""
    ranks, chunks = 2, 2
    models = random_models(seed, schedule, ranks, chunks, 7)
    base = models["none"]
    blocks = [n for n, index in enumerate(base.segments) if base.classes[index].count > 1]
    everything = []
    for sizes in dealt_sizes(len(blocks), ranks * chunks):
        stages = stages_of(sizes, blocks, len(base.segments))
        ways = [
            (a, b)
            for a, b in itertools.product(range(max(sizes) + 1), repeat=2)
            if a + b <= max(sizes)
        ]
        for amounts in itertools.product(ways, repeat=ranks):
            modes = ["none"] * len(base.segments)
            for number, stage in enumerate(stages):
                selective, full = amounts[number % ranks]
                mine = [s for s in stage if s in blocks]
                for place, s in enumerate(mine):
                    modes[s] = (
                        "full"
                        if place < full
                        else "selective"
                        if place < full + selective
                        else "none"
                    )
            everything.append(cost(models, tuple(modes), stages))
    needs = sorted({size for _, size in everything})
    capacity = needs[int(tight * (len(needs) - 1))]
    best_s = min(seconds for seconds, size in everything if size <= capacity)
    found = best_staging(
        row_of_placement(models, choices_of(models)), Schedule(schedule, ranks, chunks), capacity
    )
    seconds, size = found_cost(models, found)
    assert size <= capacity and found.bound_s <= best_s * (1 + 1e-9)
    assert best_s * (1 - 1e-9) <= seconds <= best_s * 1.02, (
        "of each rank the least work, which is nearly always the least step"
    )


def drawn_sizes(rng: random.Random, blocks: int, stages: int) -> tuple[int, ...]:
    inner = sorted(rng.sample(range(1, blocks), stages - 1))
    return tuple(b - a for a, b in itertools.pairwise([0, *inner, blocks]))


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "most"),
    [("gpipe", 2, 1, 5), ("1f1b", 3, 1, 5), ("zero_bubble", 2, 1, 5), ("1f1b", 4, 1, 5)],
)
@settings(max_examples=examples(6, 25))
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_fixed_sizes_leave_one_cut(name, ranks, chunks, most, seed, tight):
    models = random_models(seed, name, ranks, chunks, most)
    base = models["none"]
    blocks = [n for n, index in enumerate(base.segments) if base.classes[index].count > 1]
    sizes = drawn_sizes(random.Random(seed), len(blocks), ranks * chunks)
    cut = stages_of(sizes, blocks, len(base.segments))
    everything = {cost(models, modes, s) for modes, s in stagings(models) if s == cut}
    needs = sorted({size for _, size in everything})
    capacity = needs[int(tight * (len(needs) - 1))] - (tight == 0)
    fitting = [seconds for seconds, size in everything if size <= capacity]
    schedule = Schedule(name, ranks, chunks, sizes)
    row = row_of_placement(models, choices_of(models))
    found = best_staging(row, schedule, capacity)
    if not fitting:
        assert found == math.inf
        return
    seconds, size = found_cost(models, found)
    assert found.stages == cut and size <= capacity
    assert seconds == pytest.approx(min(fitting), rel=1e-9)
    assert found.bound_s == pytest.approx(seconds, rel=1e-9)
    assert quick_bound_s(row, schedule) <= seconds
    free = best_staging(row, Schedule(name, ranks, chunks), capacity)
    assert found_cost(models, free)[0] <= seconds * (1 + 1e-9)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "zero_bubble"])
@settings(max_examples=examples(6, 25))
@given(seed=st.integers(0, 10**6))
def test_fixed_sizes_of_several_stages_a_rank(name, seed):
    models = random_models(seed, name, 2, 2, 9)
    base = models["none"]
    blocks = [n for n, index in enumerate(base.segments) if base.classes[index].count > 1]
    sizes = drawn_sizes(random.Random(seed), len(blocks), 4)
    schedule, row = Schedule(name, 2, 2, sizes), row_of_placement(models, choices_of(models))
    found = best_staging(row, schedule, None)
    seconds = found_cost(models, found)[0]
    assert found.stages == stages_of(sizes, blocks, len(base.segments))
    assert seconds <= cost(models, ("none",) * len(base.segments), found.stages)[0] * (1 + 1e-9)
    assert max(quick_bound_s(row, schedule), found.bound_s) <= seconds * (1 + 1e-9)


def test_sizes_that_are_not_those_of_all_stages():
    for sizes in ((1, 2, 3), (3, 0), (4, -1)):
        with pytest.raises(ValueError, match="2 stages with one block or more each, not"):
            Schedule("1f1b", 2, 1, sizes)


@given(
    seed=st.integers(0, 10**6),
    schedule=st.sampled_from(
        [("gpipe", 1), ("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)]
    ),
)
@settings(max_examples=examples(15, 60))
def test_formulas_bound_every_staging(seed, schedule):
    name, chunks = schedule
    models = random_models(seed, name, 2, chunks, 6)
    row = row_of_placement({"none": models["none"]}, choices_of(models))
    found = best_staging(row, Schedule(name, 2, chunks), None)
    assert quick_bound_s(row, Schedule(name, 2, chunks)) <= found_cost(models, found)[0]
    least_s = found.bound_s * (1 - 1e-9)  # of what is not found a bound comes back
    assert best_staging(row, Schedule(name, 2, chunks), None, upper_bound_s=least_s) >= least_s * (
        1 - 1e-9
    )


def test_segments_keep_their_places_when_modes_mix():
    models = random_models(3, "1f1b", 2, 1, 5)
    modes = tuple("full" if n % 2 else "none" for n in range(len(models["none"].segments)))
    found = mixed(models, modes)
    assert [found.origin[k] for k in found.model.segments] == [
        (c, m) for c, m in zip(models["none"].segments, modes, strict=True)
    ]
    assert sum(b.count for b in found.model.classes) == len(modes)
    whole = mixed(models, ("none",) * len(modes))
    assert price_placement(whole.model, whole.choices(choices_of(models))) == price_placement(
        models["none"], choices_of(models)
    )


def hiding(models: Models, seed: int) -> Models:
    """The same where recomputation hides as much more of what parameters take once a step as backward gets longer."""
    rng, base = random.Random(3 * seed + 1), models["none"]
    sharing = {
        base.segments[number]
        for shared in base.shared
        for number, _ in (*shared.paying, *shared.reading)
    }
    found = {mode: list(model.classes) for mode, model in models.items()}
    for index in range(len(base.classes)):
        step_s = rng.choice([0, rng.randint(0, 6)]) if index not in sharing else None
        for mode, classes in found.items() if step_s is not None else ():
            again_s = next(op for op in classes[index].ops if op.name == "f").strategies[0].rerun_s
            left = [
                replace(s, step_s=max(step_s - again_s, 0))
                for s in next(op for op in classes[index].ops if op.name == "w").strategies
            ]
            ops = tuple(
                replace(op, strategies=tuple(left)) if op.name == "w" else op
                for op in classes[index].ops
            )
            found[mode][index] = replace(classes[index], ops=ops)
    return {mode: replace(model, classes=tuple(found[mode])) for mode, model in models.items()}


@pytest.mark.parametrize(
    ("schedule", "ranks", "most"),
    [("gpipe", 1, 5), ("gpipe", 2, 4), ("1f1b", 3, 5), ("zero_bubble", 3, 4)],
)
@settings(max_examples=examples(6, 25))
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_recomputation_that_hides_what_is_once_a_step(schedule, ranks, most, seed, tight):
    models = hiding(random_models(seed, schedule, ranks, 1, most), seed)
    everything = {cost(models, modes, stages) for modes, stages in stagings(models)}
    needs = sorted({size for _, size in everything})
    capacity = needs[int(tight * (len(needs) - 1))]
    least_s = min(seconds for seconds, size in everything if size <= capacity)
    found = best_staging(
        row_of_placement(models, choices_of(models)), Schedule(schedule, ranks, 1), capacity
    )
    assert found_cost(models, found)[1] <= capacity
    assert (
        found_cost(models, found)[0]
        == pytest.approx(least_s, rel=1e-9)
        == pytest.approx(found.bound_s, rel=1e-9)
    )


@pytest.mark.parametrize(
    ("seed", "schedule", "ranks"),
    [(10554, "1f1b", 4), (8159, "1f1b", 4), (7623, "1f1b", 3), (5034, "zero_bubble", 3)],
)
def test_recomputation_may_pay_where_memory_does_not_ask_for_it(seed, schedule, ranks):
    models, at = (
        hiding(random_models(seed, schedule, ranks, 1, 7), seed),
        Schedule(schedule, ranks, 1),
    )
    best_s, size = found_cost(
        models, best_staging(row_of_placement(models, choices_of(models)), at, None)
    )
    for capacity in (None, size):
        solver = UniformSolver(models.__getitem__, tuple(models), (at,), capacity, Cell.of(models))
        assert solver.raise_bounds(math.inf)[0] <= best_s * (1 + 1e-9)
        staged, bound_s = solver.solve(math.inf, 30.0)
        assert staged.solution.time_s == pytest.approx(best_s, rel=1e-9) and bound_s <= best_s * (
            1 + 1e-9
        )


def test_every_rank_that_holds_a_tied_parameter_updates_it():
    found = (random_models(seed, "1f1b", 2, 1, 4) for seed in range(1000))
    models = next(
        m
        for m in found
        if m["none"].shared == (Shared(((0, "w"),), ((len(m["none"].segments) - 1, "w"),)),)
    )
    model = models["none"]
    free = replace(model, ties=(), shared=())
    once = {
        n: next(op for op in model.classes[index].ops if op.name == "w").strategies[0].step_s
        for n, index in enumerate(model.segments)
    }
    once[len(once) - 1] = once[0]  # the last segment's is the first's
    for stages in (stage for _, stage in stagings(models)):
        priced = pipelined(model, choices_of(models), stages)
        assert priced.time_parts["step"] == max(sum(once[n] for n in stage) for stage in stages)
        assert (
            priced.time_parts["stages"]
            == pipelined(free, choices_of(models), stages).time_parts["stages"]
        )
        found = best_staging(
            row_of_placement(models, choices_of(models)), Schedule("1f1b", 2, 1), None
        )
        assert found_cost(models, found)[0] == pytest.approx(found.bound_s, rel=1e-9)
