"""Elimination of choices, and the bounds made of it, against every placement there is."""

from __future__ import annotations

import itertools
import math
import operator
import random
from dataclasses import replace

import pytest
from autopar_cost_models import check_schedule
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.fixed_choices import with_choices
from support.solve_models import random_model
from support.staging_models import random_models, stagings

from autopar.ir.annotated import AnnotatedModel, BoundaryEdge, Saved, Strategy
from autopar.ir.mesh import MeshShape
from autopar.solve.bounds.cell import Cell, least_costs
from autopar.solve.bounds.family import Family, PlacementRange
from autopar.solve.bounds.family_bounds import Families
from autopar.solve.bounds.lagrangian import leanest
from autopar.solve.bounds.segment_minima import least_in_range
from autopar.solve.bounds.weighted_ranks import Weighted
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import blocks_of, pipelined, segment_costs, stages_of
from autopar.solve.costs.placement_cost import InconsistentPlacement, fits_together, price_placement
from autopar.solve.costs.recompute_mix import Models, mixed
from autopar.solve.costs.schedule import Schedule
from autopar.solve.elimination import bucket_elimination, cost_tables
from autopar.solve.elimination.bucket_elimination import Question, Tables
from autopar.solve.integer_program.lp_relaxation import least_static_by_class
from autopar.solve.search.uniform_solver import ALONE, UniformSolver
from autopar.solve.staging.interleaved import dealt_sizes
from autopar.solve.staging.least_recomputation import least
from autopar.solve.staging.one_stage_per_rank import staging_of_ranks
from autopar.solve.staging.row_of_costs import row_of_costs, row_of_placement
from benchmarks.search.random_instances import Task

seeds = st.integers(0, 10**9)


def every_choice(model: AnnotatedModel):
    ops = [(c, op) for c, block in enumerate(model.classes) for op in block.ops]
    for names in itertools.product(*([s.name for s in op.strategies] for _, op in ops)):
        choices = tuple({} for _ in model.classes)
        for (c, op), name in zip(ops, names, strict=True):
            choices[c][op.name] = name
        yield choices


def asked(model: AnnotatedModel, choices, question: Question) -> float:
    """What a question asks for, by the definition of a price."""
    one = replace(model, num_microbatches=1, fixed_s=0.0, fixed_bytes=0)
    priced = price_placement(one, choices)
    # all questions here count backward as they count forward
    seconds = question.forward * (priced.time_s - priced.step_s)
    return (
        seconds
        + question.step * priced.step_s
        + question.kept * priced.kept_bytes
        + question.static * priced.static_bytes
    )


def least_of(model: AnnotatedModel, questions):
    tables = Tables({"none": model})
    return tables.least(questions, tables.parameters({"none": model}))


@settings(max_examples=examples(10, 40))
@given(seed=seeds)
def test_each_strategy_costs_the_least_of_the_placements_that_have_it(seed):
    model = random_model(seed)
    tables, question = (
        Tables({"none": model}),
        Question(step=0.5, kept=1e-8, kept_by_ends=1e-8, static=1e-8),
    )
    least = {}
    for choices in every_choice(model):
        try:
            cost_s = asked(model, choices, question)
        except InconsistentPlacement:
            continue
        for c, of in enumerate(choices):
            for name in of.items():
                least[c, *name] = min(least.get((c, *name), math.inf), cost_s)
    for (c, o), cost_s in tables.least_with([question], tables.parameters({"none": model})).items():
        op = model.classes[c].ops[o]
        wanted = [least.get((c, op.name, strategy.name), math.inf) for strategy in op.strategies]
        assert cost_s[0].tolist() == pytest.approx(wanted, rel=1e-9)
    for allowed in (
        {(0, o): (len(op.strategies) - 1,)} for o, op in enumerate(model.classes[0].ops)
    ):
        found = tables.least([question], tables.parameters({"none": model}), allowed)
        (((c, o), (n,)),) = allowed.items()
        wanted = least.get(
            (c, model.classes[c].ops[o].name, model.classes[c].ops[o].strategies[n].name), math.inf
        )
        assert (math.inf if found is None else found.cost_s[0]) == pytest.approx(wanted, rel=1e-9)


def some_model(seed: int, alike: bool) -> AnnotatedModel:
    """Any graph at all, or one as models have it (`alike`): a value is saved by the op that makes it and by the one that reads it."""
    if not alike:
        return random_model(seed)
    at = Candidate(MeshShape(tp=2), 1, 8, 0, "none")
    return Task(seed, (at,)).annotate(at)


@pytest.mark.parametrize("alike", [False, True])
@settings(max_examples=examples(10, 40))
@given(seed=seeds)
def test_what_is_eliminated_is_the_least_of_all_placements(alike, seed):
    model = some_model(seed, alike)
    rng = random.Random(seed)
    prices = [(0.0, 0.0), (1e-9, 0.0), (rng.random() * 1e-7, rng.random() * 1e-7)]
    several = [
        Question(step=0.5, kept=kept, kept_by_ends=kept, static=static) for kept, static in prices
    ]
    leanest = Question(forward=0.0, backward=0.0, kept=1.0, kept_by_ends=1.0, static=1.0)
    for questions in (several, [leanest]):
        check_least(model, questions)


def check_least(model: AnnotatedModel, questions: list[Question]) -> None:
    found = least_of(model, questions)
    totals = []
    for choices in every_choice(model):
        try:
            totals.append([asked(model, choices, question) for question in questions])
        except InconsistentPlacement:
            continue
    if not totals:
        assert found is None
        return
    least = [min(column) for column in zip(*totals, strict=True)]
    assert found.is_exact and found.cost_s == pytest.approx(least, rel=1e-9)
    for number, question in enumerate(questions):
        choices, _ = found.decode(number)
        assert asked(model, choices, question) == pytest.approx(least[number], rel=1e-9)
        for names in (("kept", "kept_by_ends"), ("step",), ("static",)):
            alone = Question(forward=0.0, backward=0.0, **dict.fromkeys(names, 1.0))
            assert sum(found.counted(name)[number] for name in names) == pytest.approx(
                asked(model, choices, alone), rel=1e-9
            )


@settings(max_examples=examples(7, 30))
@given(seed=seeds)
def test_split_tables_give_a_bound(seed):
    model, question = random_model(seed), Question(kept=1e-8, kept_by_ends=1e-8)
    exact = least_of(model, [question])
    largest, cost_tables.LARGEST = cost_tables.LARGEST, 6
    bucket_elimination._plan.cache_clear()
    try:
        bound = least_of(model, [question])
    finally:
        cost_tables.LARGEST = largest
        bucket_elimination._plan.cache_clear()
    if exact is not None:
        assert bound is not None and bound.cost_s[0] <= exact.cost_s[0] * (1 + 1e-9)


def test_split_tables_name_no_placement_that_does_not_fit_together(monkeypatch):
    monkeypatch.setattr(cost_tables, "LARGEST", 2)
    odd = 0
    for seed in range(340, 400):
        model = random_model(seed)
        bucket_elimination._plan.cache_clear()
        tables = Tables({"none": model})
        parameters = tables.parameters({"none": model})
        found = tables.least([Question(kept=1e-8)], parameters)
        if found is not None and not found.is_exact:
            choices, named = found.decode(0)[0], found.placement(0, model)
            fits = fits_together(model, choices)
            assert named == (choices if fits else None)
            odd += not fits
            lean = leanest(tables, parameters, model)
            assert lean is None or fits_together(model, lean)
    bucket_elimination._plan.cache_clear()
    assert odd


@pytest.mark.parametrize("largest", [cost_tables.LARGEST, 4])
@settings(max_examples=examples(5, 20))
@given(seed=seeds)
def test_questions_about_several_modes_are_answered_as_each_alone(largest, seed):
    """Whether tables are split or not: in one part of a split table alone is seen which modes a question bars."""
    models = with_choices(random_models(seed, "gpipe", 1, 1, 4), random.Random(seed))
    asked_of = [None, *models, None]
    questions = [Question(kept=kept, mode=mode) for kept in (0.0, 1e-3, 1.0) for mode in asked_of]
    before, cost_tables.LARGEST = cost_tables.LARGEST, largest
    bucket_elimination._plan.cache_clear()
    try:
        cost = Tables(models)
        together = cost.least(questions, cost.parameters(models))
        alone = [cost.least([question], cost.parameters(models)) for question in questions]
    finally:
        cost_tables.LARGEST = before
        bucket_elimination._plan.cache_clear()
    assert together.cost_s == pytest.approx([float(one.cost_s[0]) for one in alone], rel=1e-12)
    for number, one in enumerate(alone):
        assert together.decode(number)[1] == one.decode(0)[1]
        assert together.counted("kept")[number] == pytest.approx(one.counted("kept")[0], rel=1e-12)


@settings(max_examples=examples(3, 10))
@given(seed=seeds)
def test_candidates_that_fit_nowhere_leave_the_likely_price_of_a_byte_alone(seed):
    models = with_choices(random_models(seed, "gpipe", 1, 1, 4), random.Random(seed))
    cell, first = Cell.of(models), next(iter(models.values()))
    likely = cell.likely_price
    for _ in range(3):
        UniformSolver(
            models.__getitem__, tuple(models), (ALONE,), first.fixed_bytes + 1, cell
        ).raise_bounds(math.inf)
    assert cell.likely_price == likely


def with_steps(models: Models, rng: random.Random) -> Models:
    """The same models whose strategies differ in what they take once a step, in each mode in another way."""

    def of(strategy: Strategy, number: int, hides: float) -> Strategy:
        return replace(strategy, step_s=strategy.step_s + (1 + number) * hides * 1e-3)

    found = {}
    for mode, model in models.items():
        hides = rng.choice([0.2, 0.6, 1.0])
        classes = []
        for block in model.classes:
            each = [
                tuple(
                    of(s, n * rng.choice([-1, 1]) % 3, hides) for n, s in enumerate(op.strategies)
                )
                for op in block.ops
            ]
            classes.append(
                replace(
                    block,
                    ops=tuple(
                        replace(op, strategies=s) for op, s in zip(block.ops, each, strict=True)
                    ),
                )
            )
        found[mode] = replace(model, classes=tuple(classes))
    return found


def every_cost(models: Models) -> list[tuple[float, int]]:
    """(seconds, bytes of the fullest rank) of every placement, cut and mode of every block."""
    found = []
    for modes, stages in stagings(models):
        whole = mixed(models, modes)
        for choices in every_choice(models["none"]):
            own = whole.choices(choices)
            if models["none"].pipeline is None:
                priced = price_placement(whole.model, own)
                found.append((priced.time_s, priced.memory_bytes))
            else:
                cut = pipelined(whole.model, own, stages)
                found.append((cut.time_s, max(cut.memory_bytes)))
    return found


@pytest.mark.parametrize(
    ("schedule", "ranks", "most"),
    [("gpipe", 1, 4), ("gpipe", 2, 3), ("1f1b", 2, 4), ("zero_bubble", 2, 3)],
)
@settings(max_examples=examples(2, 12))
# the last segment of the best placement gives back more than that of the leanest
@example(seed=413665, tight=0.0)
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1))
def test_bounds_hold_and_what_is_found_is_priced_truly(schedule, ranks, most, seed, tight):
    models = with_choices(random_models(seed, schedule, ranks, 1, most), random.Random(seed))
    everything = every_cost(models)
    needs = sorted({size for _, size in everything})
    capacity = needs[int(tight * (len(needs) - 1))]
    least_s = min(seconds for seconds, size in everything if size <= capacity)
    at = ALONE if ranks == 1 else Schedule(schedule, ranks, 1)
    cell = Cell.of(models)
    solver = UniformSolver(models.__getitem__, tuple(models), (at,), capacity, cell)
    assert sketched(solver) <= least_s * (1 + 1e-9)
    assert solver.raise_bounds(math.inf)[0] <= least_s * (1 + 1e-9), "totals"
    assert solver.narrow(math.inf, 0, 60.0)[1] <= least_s * (1 + 1e-9), "the family of all"
    found, bound_s = solver.solve(math.inf, 60.0)
    assert bound_s <= least_s * (1 + 1e-9)
    best_s = found.solution.time_s if found else math.inf
    better, bound_s = solver.narrow(best_s, 40, 10.0)
    assert bound_s <= least_s * (1 + 1e-9), "families"
    for one in (found, better):
        if one is not None:
            assert one.solution.memory_bytes <= capacity and one.solution.time_s >= least_s * (
                1 - 1e-9
            )


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"),
    [
        ("gpipe", 2, 1),
        ("1f1b", 2, 1),
        ("zero_bubble", 2, 1),
        ("interleaved_1f1b", 2, 2),
        ("zero_bubble", 2, 2),
    ],
)
@settings(max_examples=examples(3, 10))
# another stage has its fullest moment while the last gives back
@example(seed=19, tight=0.0, mode="none", times=6, moment=150)
@given(seed=st.integers(0, 10**6), tight=st.floats(0, 1), mode=st.sampled_from(["none", "full"]), times=st.integers(0, 8),
       moment=st.sampled_from([0, 0, 150]))  # fmt: skip
def test_bounds_hold_under_one_mode_and_with_several_stages_a_rank(
    schedule, ranks, chunks, seed, tight, mode, times, moment
):
    """`moment`: so many bytes more that the last blocks but one of another class need for one."""
    several = with_choices(
        random_models(seed, schedule, ranks, chunks, 2 * ranks * chunks), random.Random(seed)
    )
    model = with_heavy_end(several[mode], times, False) if times else several[mode]
    if moment:
        *others, other, last = model.classes
        model = replace(
            model,
            classes=(*others, replace(other, workspace_bytes=other.workspace_bytes + moment), last),
        )
    try:
        check_schedule(schedule, ranks, chunks, model.num_microbatches)
    except ValueError:
        return
    blocks = blocks_of(model)
    sizes = (
        dealt_sizes(len(blocks), ranks * chunks)
        if chunks > 1
        else [(n, len(blocks) - n) for n in range(1, len(blocks))]
    )
    cuts = [stages_of(size, blocks, len(model.segments)) for size in sizes]
    everything = [pipelined(model, choices, cut) for cut in cuts for choices in every_choice(model)]
    needs = sorted({max(one.memory_bytes) for one in everything})
    capacity = needs[int(tight * (len(needs) - 1))]
    least_s = min(one.time_s for one in everything if max(one.memory_bytes) <= capacity) * (
        1 + 1e-9
    )
    at, cell = Schedule(schedule, ranks, chunks), Cell.of({mode: model})
    solver = UniformSolver({mode: model}.__getitem__, (mode,), (at,), capacity, cell)
    assert sketched(solver) <= least_s
    assert solver.raise_bounds(math.inf)[0] <= least_s, "totals"
    assert solver.narrow(math.inf, 0, 60.0)[1] <= least_s, "the family of all"
    found, _ = solver.solve(math.inf, 60.0)
    better, bound_s = solver.narrow(found.solution.time_s if found else math.inf, 40, 10.0)
    assert bound_s <= least_s, "families"
    assert all(
        one is None or one.solution.time_s * (1 + 1e-8) >= least_s for one in (found, better)
    )


def sketched(solver: UniformSolver) -> float:
    """The bound of a candidate by its cell, with memory, which is no lower than the one without."""
    first = solver.models.first
    glance_s = solver.bounds.glance(first.num_microbatches)
    bound_s, likely_s = solver.bounds.raise_by_cell(
        least_static_by_class(first), first.fixed_bytes, first.num_microbatches, math.inf
    )
    assert glance_s <= bound_s <= likely_s
    return bound_s


def with_heavy_end(model: AnnotatedModel, times: int, unique: bool) -> AnnotatedModel:
    """The same model whose last segment keeps so many times as much and gives it back before others; `unique`: every segment is of a class
    of its own."""
    *others, last = model.classes
    ops = [
        replace(
            op,
            strategies=tuple(
                replace(s, saved=tuple(Saved(k.key, times * k.size_bytes) for k in s.saved))
                for s in op.strategies
            ),
        )
        for op in last.ops
    ]
    model = replace(model, classes=(*others, replace(last, ops=tuple(ops))), last=len(others))
    if not unique:
        return model
    classes, count = (
        tuple(replace(model.classes[index], count=1) for index in model.segments),
        len(model.segments),
    )
    edges = tuple(BoundaryEdge(number, 0, number + 1, 0, 1, {}) for number in range(count - 1))
    return replace(
        model,
        classes=classes,
        segments=tuple(range(count)),
        edges=edges,
        ties=(),
        shared=(),
        last=count - 1,
    )


@pytest.mark.parametrize("unique", [False, True])
@settings(max_examples=examples(1, 15))
@example(seed=303, times=5)
@given(seed=st.integers(0, 10**6), times=st.integers(1, 8))
def test_bounds_count_what_the_last_segment_keeps_once_where_it_gives_that_back(
    unique, seed, times
):
    """Every cut and placement, with just the memory that it needs."""
    several = with_choices(random_models(seed, "zero_bubble", 2, 1, 3), random.Random(seed))
    model = with_heavy_end(replace(several["none"], num_microbatches=16), times, unique)
    blocks, at, cell = blocks_of(model), Schedule("zero_bubble", 2, 1), Cell.of({"none": model})
    cuts = [
        stages_of((n, len(blocks) - n), blocks, len(model.segments)) for n in range(1, len(blocks))
    ]
    mesh = MeshShape(pp=2, deal="0x1-1x1")
    dealt = Candidate(mesh, 1, 16, 0, "none", 1, "zero_bubble", (("zero_bubble", 1),))
    for choices, cut in itertools.product(every_choice(model), cuts):
        one = pipelined(model, choices, cut)
        capacity, took_s = max(one.memory_bytes), one.time_s * (1 + 1e-9)
        solver = UniformSolver({"none": model}.__getitem__, ("none",), (at,), capacity, cell)
        assert sketched(solver) <= took_s
        assert solver.raise_bounds(math.inf)[0] <= took_s, "totals"
        assert solver.narrow(math.inf, 0, 60.0)[1] <= took_s, "the family of all"
        groups = Weighted(lambda candidate, group: model, [capacity] * 2)
        assert (
            groups.least_s(dealt, replace(dealt, mesh=MeshShape(pp=2)), [cell] * 2, at) <= took_s
        ), "groups"
        row = row_of_costs({"none": model}, least_costs({"none": model}, cell))
        staged = staging_of_ranks([row] * 2, at, [capacity] * 2)
        assert (staged if isinstance(staged, float) else staged.bound_s) <= took_s, (
            "the least of each segment, as for groups"
        )


def _families(
    models: Models, schedule: str = "1f1b", worth: float = 1.0
) -> tuple[Models, Families]:
    at = Schedule(schedule, models["none"].pipeline.ranks, 1)
    solver = UniformSolver(models.__getitem__, tuple(models), (at,), None, Cell.of(models))
    solver.raise_bounds(math.inf)
    facts = solver.bounds.families.facts
    return models, Families(replace(facts, price=worth * solver.bounds.cell.prices[2]))


@settings(max_examples=examples(3, 15))
@given(
    seed=st.integers(0, 10**6), least=st.floats(0, 1), more=st.floats(0, 1), once=st.floats(0, 1)
)
def test_a_part_of_a_family_costs_no_more_than_the_placements_in_it(seed, least, more, once):
    """Segments of placements by what the repeated block takes, forward and once a step; some of them in each part."""
    models = with_steps(
        with_choices(random_models(seed, "1f1b", 2, 1, 4), random.Random(seed)), random.Random(seed)
    )
    models, families = _families(models)
    if families.facts.repeated is None:
        return
    micro = families.facts.first.num_microbatches
    number = next(
        n for n, key in enumerate(families.facts.cell.keys) if key == families.facts.repeated
    )
    costs = [
        [segment_costs(model, choices)[number] for model in models.values()]
        for choices in every_choice(families.facts.first)
    ]
    known = families.minima.least(families.root(), *families.facts.repeated)
    for of in costs:
        part = PlacementRange(
            (least * of[0].forward_s, of[0].forward_s + more),
            (once * of[0].step_s, of[0].step_s + more * 1e-3),
        )
        bounds, works_s = least_in_range(known, part, micro)
        for cost, bound, work_s in zip(of, bounds, works_s, strict=True):
            assert (
                bound.forward_s <= cost.forward_s * (1 + 1e-9)
                and bound.backward_s <= cost.backward_s * (1 + 1e-9) + 1e-9
            )
            assert (
                bound.backward_s - bound.weight_s
                <= (cost.backward_s - cost.weight_s) * (1 + 1e-9) + 1e-9
            )
            assert (
                bound.step_s <= cost.step_s * (1 + 1e-9) + 1e-9
                and work_s <= (cost.forward_s + cost.backward_s) * (1 + 1e-9) + 1e-9
            )


LEFT = st.dictionaries(
    st.integers(0, 2),
    st.sets(st.integers(0, 2), min_size=1, max_size=2).map(lambda left: tuple(sorted(left))),
)


@given(own=st.tuples(LEFT, LEFT), other=st.tuples(LEFT, LEFT))
def test_a_family_within_another_has_the_placements_of_both(own, other):
    def placements(family: Family | None) -> set[tuple[int, ...]]:
        left = (
            [family.allowed[c].get(op, range(3)) for c in range(2) for op in range(3)]
            if family
            else [()]
        )
        return set(itertools.product(*left))

    family, of = Family(own), Family(other)
    found = family.within(of)
    assert placements(found) == placements(family) & placements(of)
    assert (found is family) == (placements(found) == placements(family))


@given(
    first=st.tuples(st.floats(0, 1), st.floats(0, 1)), least=st.tuples(st.floats(0, 0.5), st.floats(0, 0.5)),
    slack=st.tuples(*[st.one_of(st.just(0.0), st.floats(1e-6, 2))] * 2),
)  # fmt: skip
def test_parts_have_every_placement(first, least, slack):
    parts = [PlacementRange()]
    for _ in range(12):
        halves = parts[-1].halves(least, slack)
        if halves is None:
            break
        parts = [*parts[:-1], *halves]
    ends = [(part.forward_s, part.once_s) for part in parts]
    inside = [
        of
        for of in ends
        if all(low <= one <= high for (low, high), one in zip(of, first, strict=True))
    ]
    assert inside and (len(parts) > 1) == any(slack)


@pytest.mark.slow
@pytest.mark.parametrize("unique", [False, True])
@settings(max_examples=examples(10, 40))
@given(
    seed=st.integers(0, 10**6), ranks=st.sampled_from([2, 3, 6]), held=st.integers(1, 6), late=st.integers(0, 6), times=st.integers(0, 8),
    worth=st.floats(0.01, 10),
)  # fmt: skip
def test_what_runs_of_a_family_take_at_least_no_placement_that_fits_goes_below(
    unique, seed, ranks, held, late, times, worth
):
    """Every placement in every mix of modes, with just the memory that it needs; of the micro-batches that are held, some may wait for
    gradients of parameters."""
    late = min(late, held)
    schedule = "zero_bubble" if late else "1f1b"
    models = with_choices(
        random_models(seed, schedule, ranks, 1, max(ranks, 3)), random.Random(seed)
    )
    if times:
        models = {mode: with_heavy_end(model, times, unique) for mode, model in models.items()}
    models, families = _families(models, schedule, worth)
    row = families.row(families.root(), False, len(models))
    for choices in itertools.islice(every_choice(families.facts.first), 0, None, 3):
        truth = row_of_placement(models, choices)
        for first, end in itertools.combinations(range(len(truth) + 1), 2):
            at, counts = truth.at, tuple(map(operator.sub, truth.counts[end], truth.counts[first]))
            ways = truth.recompute.options(counts, late > 0)
            more = (ways.late + at.late[end] - at.late[first]) * (late > 0)
            needs = (
                truth.memory([(first, end)])
                + held * (at.kept[end] - at.kept[first] + truth.sent(end) + ways.more_kept)
                + late * more
            )
            needs += truth.moment(first, end, ways.moment, more, late > 0) - max(
                late - 1, 0
            ) * truth.last.freed_parted * (end == len(truth))
            took_s = (
                truth.total_s(first, end)
                + truth.once_s([(first, end)]) / truth.micro_batches
                + ways.least_s
            )
            for need, seconds in zip(needs.tolist(), took_s.tolist(), strict=True):
                found = least(row, first, end, held, need, late)
                assert found is not None and found[2] <= seconds * (1 + 1e-9)


@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 1), ("1f1b", 2)])
def test_one_placement_that_is_too_slow_is_not_impossible(schedule, ranks):
    models = random_models(5, schedule, ranks, 1, 4)
    at = ALONE if ranks == 1 else Schedule(schedule, ranks, 1)
    solver = UniformSolver(models.__getitem__, tuple(models), (at,), 10**6, Cell.of(models))
    assert solver.models.has_one_placement
    # what is wanted is faster than all there is, so that no placement is looked for
    bound_s, _ = solver.raise_bounds(1e-3)
    found, least_s = solver.solve(1e-3, 60.0)
    assert found is None and bound_s <= least_s < math.inf
    found, least_s = solver.solve(math.inf, 60.0)
    assert found is not None and least_s <= found.solution.time_s


@pytest.mark.parametrize(("width", "values"), [(36, 10**9), (24, 10**13), (2, 10**200)])
def test_orders_of_tables_with_more_entries_than_any_float(width, values):
    """As an unrolled loop of thousands of ops makes them."""
    count = width + 3
    scopes = [tuple(range(width)), (0, width), (width, width + 1), (width + 2,)]
    assert values**width > 10**308
    for more in (0, 1):  # the second time an order is known that may be good enough
        sizes = (*[values] * width, 2, 2, 2 + more)
        assert sorted(bucket_elimination._order(scopes, sizes)) == list(range(count))
    steps = bucket_elimination._plan(tuple(scopes[1:]), sizes)
    assert {step.variable for step in steps} == {0, width, width + 1, width + 2}
