"""The bound of all stagings by lines against every cut and deal, and ZeRO stages together against each by itself."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.brute_force import brute_force
from support.effort import examples
from support.solve_models import random_model

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.sketch import Sketch, prefix_sums
from autopar.solve.bounds.zero_variants import least_of, undominated_variants
from autopar.solve.costs.schedule import Schedule
from autopar.solve.integer_program.placement_solver import Solution
from autopar.solve.staging.interleaved import dealt_sizes, runs_of


def some_sketch(rng: random.Random, units: int) -> tuple[Sketch, list[list[float]]]:
    forward_s, work_s = ([rng.random() for _ in range(units)] for _ in range(2))
    work_s = [forward + more for forward, more in zip(forward_s, work_s, strict=True)]
    lines_s = [[work + rng.random() for work in work_s] for _ in range(2)]
    more_s, once_s = ([rng.random() for _ in range(units)] for _ in range(2))
    plain = Sketch.of_units(forward_s, work_s)
    priced = replace(
        plain,
        lines_s=np.array([prefix_sums(line) for line in lines_s]),
        prices=np.array([0.1, 0.4]),
    )
    whole_s = [[line + more for line, more in zip(of, more_s, strict=True)] for of in lines_s]
    return priced.with_parameters(
        [more / 3 for more in more_s], more_s, once_s, [0.0] * len(more_s)
    ), whole_s


def by_hand(
    sketch: Sketch,
    lines_s,
    schedule: Schedule,
    micro: int,
    held,
    room: float,
    static: list[float],
    runs,
) -> float:
    """The longest that a rank takes with what it waits, from the definition."""
    forward_s, work_s, once_s = (
        np.diff(sketch.forward_s),
        np.diff(sketch.work_s),
        np.diff(sketch.once_s),
    )
    waits_s, found, steps_s = forward_s if schedule.name == "zero_bubble" else work_s, [], []
    for rank in range(schedule.ranks):
        mine = [unit for first, end in runs[rank :: schedule.ranks] for unit in range(first, end)]
        left = room - sum(static[unit] for unit in mine)
        if left < 0:
            return math.inf
        each = [sum(work_s[unit] for unit in mine)]
        each += [
            sum(line[unit] for unit in mine) - price * left / held[rank]
            for line, price in zip(lines_s, (0.1, 0.4), strict=True)
        ]
        steps_s.append(sum(once_s[unit] for unit in mine))
        found.append(sum(waits_s[: runs[rank][0]]) + micro * max(each))
    if schedule.stages_per_rank > 1:
        return max(found) + max(steps_s)
    return max(path + step for path, step in zip(found, steps_s, strict=True))


@pytest.mark.parametrize(
    ("name", "chunks"), [("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2)]
)
@settings(max_examples=examples(10, 40), deadline=None)
@given(seed=st.integers(0, 10**6), ranks=st.integers(1, 4), more=st.integers(0, 4))
def test_hosts_take_no_less_than_the_sketch_under_any_cut_or_deal(name, chunks, seed, ranks, more):
    """Devices take nothing here, so that the bound is that of the hosts: the least of all cuts."""
    rng = random.Random(seed)
    units, micro = ranks * chunks + more, rng.randint(1, 8)
    issue_s, none = [rng.random() for _ in range(units)], [0.0] * units
    if chunks > 1:
        cuts = [runs_of(sizes) for sizes in dealt_sizes(units, ranks * chunks)]
    else:
        cuts = [
            list(itertools.pairwise((0, *inner, units)))
            for inner in itertools.combinations(range(1, units), ranks - 1)
        ]
    least_s = math.inf
    for runs in cuts:
        of_rank = [sum(sum(issue_s[a:b]) for a, b in runs[rank::ranks]) for rank in range(ranks)]
        most_s = max(of_rank)
        least_s = min(least_s, micro * most_s + (sum(of_rank) - most_s) / chunks)
    sketch = Sketch.of_units(none, none, issue_s)
    bound_s = sketch.bound_s(Schedule(name, ranks, chunks), micro)
    assert bound_s == pytest.approx(least_s, rel=1e-6) and bound_s <= least_s


@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("1f1b", 1),
        ("gpipe", 1),
        ("zero_bubble", 1),
        ("interleaved_1f1b", 2),
        ("interleaved_1f1b", 3),
    ],
)
@settings(max_examples=examples(10, 40), deadline=None)
@given(
    seed=st.integers(0, 10**6),
    ranks=st.integers(1, 4),
    more=st.integers(0, 4),
    room=st.floats(0, 12),
)
def test_a_sketch_is_the_least_of_all_cuts_and_deals(name, chunks, seed, ranks, more, room):
    rng = random.Random(seed)
    units, schedule = ranks * chunks + more, Schedule(name, ranks, chunks)
    sketch, lines_s = some_sketch(rng, units)
    held, static, micro = (
        [rng.uniform(1, 4) for _ in range(ranks)],
        [rng.random() for _ in range(units)],
        rng.randint(1, 8),
    )
    if chunks > 1:
        cuts = [runs_of(sizes) for sizes in dealt_sizes(units, ranks * chunks)]
    else:
        cuts = [
            list(itertools.pairwise((0, *inner, units)))
            for inner in itertools.combinations(range(1, units), ranks - 1)
        ]
    least_s = min(
        (by_hand(sketch, lines_s, schedule, micro, held, room, static, runs) for runs in cuts),
        default=math.inf,
    )
    assert sketch.bound_s(schedule, micro, held, room, prefix_sums(static)) == pytest.approx(
        least_s, rel=2e-9
    )
    assert sketch.bound_s(schedule, micro) <= least_s
    if cuts:
        sizes = tuple(end - first for first, end in rng.choice(cuts))
        runs, fixed = runs_of(sizes), Schedule(name, ranks, chunks, sizes)
        bound_s = sketch.bound_s(fixed, micro, held, room, prefix_sums(static))
        own_s = by_hand(sketch, lines_s, schedule, micro, held, room, static, runs)
        assert least_s * (1 - 1e-8) <= bound_s
        assert chunks == 1 or bound_s == pytest.approx(own_s, rel=2e-9)


def with_other_parameters(model: AnnotatedModel, rng: random.Random) -> AnnotatedModel:
    """The same model whose parameters take and hold something else, as under another ZeRO stage."""

    def other(op):
        if op.kind != "parameter":
            return op
        return replace(op, strategies=tuple(
            replace(s, backward_s=s.backward_s * rng.choice([0.5, 1, 2]), step_s=s.step_s * rng.choice([0.5, 1, 2]), step_comm_s=0.0,
                    static_bytes=int(s.static_bytes * rng.choice([0.5, 1, 2]))) for s in op.strategies
        ))  # fmt: skip

    classes = tuple(replace(block, ops=tuple(map(other, block.ops)), workspace_bytes=block.workspace_bytes + rng.choice([0, 9]))
                    for block in model.classes)  # fmt: skip
    return replace(model, classes=classes, fixed_bytes=model.fixed_bytes + rng.choice([0, 20]))


@settings(max_examples=examples(10, 40), deadline=None)
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_what_is_least_of_all_stages_bounds_each_and_what_is_left_out_is_never_better(seed, tight):
    rng = random.Random(seed)
    base = random_model(seed, 80)
    models = [base, *(with_other_parameters(base, rng) for _ in range(2))]
    needs = [
        found.memory_bytes
        for model in models
        if isinstance(found := brute_force(model, None), Solution)
    ]
    if not needs:
        return
    capacity = int(min(needs) + tight * (max(needs) - min(needs)))

    def least_s(model: AnnotatedModel) -> float:
        found = brute_force(model, capacity)
        return found.time_s if isinstance(found, Solution) else math.inf

    each_s = [least_s(model) for model in models]
    assert least_s(least_of(models)) <= min(each_s) * (1 + 1e-12)
    left = undominated_variants([{"none": model} for model in models])
    assert min(each_s[number] for number in left) == min(each_s)
    assert undominated_variants([{"none": base}, {"none": base}]) == [0]


def test_stages_that_keep_other_tensors_are_told():
    model = random_model(3, 80)
    block = next(
        block for block in model.classes if any(op.kind == "parameter" for op in block.ops)
    )
    named = replace(block, ops=tuple(
        replace(op, strategies=tuple(replace(s, name="odd") for s in op.strategies)) if op.kind == "parameter" else op for op in block.ops
    ))  # fmt: skip
    other = replace(model, classes=tuple(named if one is block else one for one in model.classes))
    with pytest.raises(ValueError, match="another name"):
        least_of([model, other])
