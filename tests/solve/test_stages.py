"""A placement cut into stages: every segment once, memory and time added up by hand and by a simulation."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from autopar_cost_models import StageTimes, simulate_pipeline
from hypothesis import assume, given
from hypothesis import strategies as st
from support.solve_models import borrowing, random_model

import autopar
from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    AnnotatedOp,
    AnnotatedValue,
    PipelineSetting,
    Saved,
    Shared,
    Strategy,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.sharding import R
from autopar.models.spec import parse_model
from autopar.runtime.pipeline.schedule_actions import schedule_actions
from autopar.solve.costs.candidate import Candidate
from autopar.solve.costs.pipeline_cost import cut_blocks, pipelined
from autopar.solve.costs.placement_cost import arrivals, class_costs, price_placement
from autopar.solve.integer_program.placement_solver import Solution, solve_placement
from autopar.solve.search.branch_and_bound import search


def block(
    name: str,
    count: int,
    forward_s: float,
    backward_s: float,
    recompute: bool = False,
    weight: bool = True,
) -> AnnotatedBlock:
    """One op that reads an input of 10 bytes and a parameter of 7, and saves 30 bytes."""
    ops = [AnnotatedOp("in", "input", "", (), ("x",), (Strategy("R", (), (R,)),))]
    if weight:
        ops.append(
            AnnotatedOp("w", "parameter", "", (), ("w",), (Strategy("R", (), (R,), 0, 0, 0.5, 7),))
        )
    reads = ("x", "w") if weight else ("x",)
    run = Strategy(
        "R",
        (R,) * len(reads),
        (R,),
        forward_s,
        backward_s,
        saved=(Saved("y", 30),),
        backward_weight_s=backward_s / 2,
    )
    ops += [
        AnnotatedOp("f", "op", "aten.some", reads, ("y",), (run,)),
        AnnotatedOp("out", "output", "", ("y",), (), (Strategy("R", (R,), ()),)),
    ]
    values = {
        name: AnnotatedValue(name, 10, {}) for name in ("x", "w", "y")[: 3 if weight else 1]
    } | {"y": AnnotatedValue("y", 10, {})}
    return AnnotatedBlock(
        name, count, tuple(ops), values, ("in",), ("out",), recompute, {"in": {R: 10}}
    )


def chain(
    blocks: int, ranks: int, chunks: int, schedule: str, micro: int, recompute: bool = False
) -> AnnotatedModel:
    """Prologue, `blocks` blocks, epilogue, each reading the one before."""
    classes = (
        block("prologue", 1, 0.1, 0.2),
        block("layers", blocks, 1.0, 2.0, recompute),
        block("epilogue", 1, 0.5, 0.7),
    )
    segments = (0, *(1,) * blocks, 2)
    reads = (((-1, 0),), *(((number, 0),) for number in range(blocks + 1)))
    setting = PipelineSetting(ranks, chunks, schedule, 0.001, 0.01)
    return AnnotatedModel(
        classes, (), (), micro, 0.25, 1000, setting, segments=segments, reads=reads
    )


def only(model: AnnotatedModel) -> tuple[dict[str, str], ...]:
    return tuple({op.name: "R" for op in b.ops} for b in model.classes)


@given(seed=st.integers(0, 400))
def test_segments_cost_what_the_model_costs(seed):
    model = random_model(seed)
    found = solve_placement(model, None)
    assume(isinstance(found, Solution))
    assume(
        len({(e.source, e.source_output, e.target, e.target_input) for e in model.edges})
        == len(model.edges)
    )
    whole, costs = price_placement(model, found.choices), class_costs(model, found.choices)
    counts = [b.count for b in model.classes]
    seconds = sum(
        n * (model.num_microbatches * (c.forward_s + c.backward_s) + c.step_s)
        for n, c in zip(counts, costs, strict=True)
    )
    sent = arrivals(model, found.choices)
    edges = [
        (e.count, sent.get((e.source, e.source_output, e.target, e.target_input), (0.0, 0.0)))
        for e in model.edges
    ]
    assert sum(
        count * sum(both) for count, both in edges
    ) * model.num_microbatches == pytest.approx(whole.edge_s, rel=1e-9)
    assert seconds + whole.edge_s + model.fixed_s == pytest.approx(whole.time_s, rel=1e-9)
    assert sum(n * c.static_bytes for n, c in zip(counts, costs, strict=True)) == whole.static_bytes
    assert sum(n * c.kept_bytes for n, c in zip(counts, costs, strict=True)) == whole.kept_bytes
    freed = 0 if model.last is None else costs[model.last].kept_bytes
    needed = [
        c.transient_bytes - (freed if index != model.last else 0) for index, c in enumerate(costs)
    ]
    assert max([0, *needed]) == whole.transient_bytes
    assert all(0 <= c.weight_s <= c.backward_s for c in costs)


@given(
    blocks=st.integers(1, 30),
    ranks=st.integers(1, 6),
    chunks=st.integers(1, 3),
    ends=st.tuples(st.floats(0, 9), st.floats(0, 9)),
)
def test_stages_are_even_and_the_slowest_is_fastest(blocks, ranks, chunks, ends):
    count = ranks * chunks
    stages = cut_blocks(count, range(1, blocks + 1), [ends[0], *[1.0] * blocks, ends[1]])
    assert [s for stage in stages for s in stage] == list(range(blocks + 2)), (
        "every segment once, in order"
    )
    dealt = [sum(0 < s <= blocks for s in stage) for stage in stages]
    assert max(dealt) - min(dealt) <= 1
    each, more = divmod(blocks, count)

    def slowest(full: tuple[int, ...]) -> float:
        held = [float(each + (stage in full)) for stage in range(count)]
        held[0] += ends[0]
        held[-1] += ends[1]
        return max(held)

    if count <= 9:
        assert slowest(tuple(s for s in range(count) if dealt[s] > each)) == min(
            map(slowest, itertools.combinations(range(count), more))
        )


CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zero_bubble", 1)]


@pytest.mark.parametrize(("schedule", "chunks"), CASES)
@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (4, 8)])
def test_a_step_is_what_the_simulated_schedule_takes(schedule, chunks, ranks, micro):
    model = chain(2 * ranks * chunks, ranks, chunks, schedule, micro)
    found = pipelined(model, only(model))
    stages = [StageTimes(2.0, 4.0, 2.0)] * (ranks * chunks)
    stages[0], stages[-1] = StageTimes(2.1, 4.2, 4.2), StageTimes(2.5, 4.7, 2.35)
    simulated = simulate_pipeline(
        schedule_actions(schedule, ranks, chunks, micro), stages, 0.01 + 10 * 0.001
    )
    step = max(2 * chunks * 0.5 + (0.5 if rank in (0, ranks - 1) else 0.0) for rank in range(ranks))
    assert found.time_s == pytest.approx(simulated.makespan_s + step + 0.25, rel=0.02)
    assert (
        sum(found.time_parts.values()) == pytest.approx(found.time_s)
        and found.time_parts["bubble"] > 0
    )


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_1f1b_by_hand(recompute):
    model = chain(8, 4, 1, "1f1b", 8, recompute)
    kept = 10 if recompute else 30
    ends = [1, 0, 0, 1]  # a prologue or epilogue keeps 30 bytes and has a parameter of 7
    expected = tuple(
        1000
        + 7 * (2 + ends[rank])
        + (4 - rank) * (2 * kept + 30 * ends[rank])
        + (30 if recompute else 0)
        for rank in range(4)
    )
    found = pipelined(model, only(model))
    assert found.memory_bytes == expected
    assert sum(found.memory_parts.values()) == max(expected)


def test_a_tied_parameter_is_held_where_it_is_read():
    free = chain(8, 4, 1, "1f1b", 8)
    *others, last = free.classes
    shared = (Shared(((0, "w"),), ((len(free.segments) - 1, "w"),)),)
    model = replace(
        free, classes=(*others, borrowing(last, "w")), ties=(((0, "w"), (2, "w")),), shared=shared
    )
    tied, apart = pipelined(model, only(model)), pipelined(free, only(free))
    assert tied.memory_bytes == apart.memory_bytes, "first and last stage both hold it"
    alone = replace(model, pipeline=replace(model.pipeline, ranks=1), num_microbatches=1)
    assert pipelined(alone, only(alone)).memory_parts["parameters"] == 7 * 9, (
        "one rank holds it once"
    )


def test_the_search_prices_pipelines_and_its_bound_holds():
    def annotate(candidate: Candidate) -> AnnotatedModel:
        return chain(
            8,
            candidate.mesh.pp,
            candidate.stages_per_rank,
            candidate.schedule,
            candidate.num_microbatches,
        )

    candidates = [
        Candidate(MeshShape(pp=4), 1, 8, 0, "none", chunks, schedule) for schedule, chunks in CASES
    ]
    found = search(candidates, annotate, None)
    times = [pipelined(annotate(c), only(annotate(c))).time_s for c in candidates]
    assert found.best[1].time_s == min(times) and found.status == "feasible"
    work_s = 8 * (8 * 3.0 + 0.3 + 1.2) + 10 * 0.5 + 0.25
    assert found.bound_s == pytest.approx(work_s / 4, rel=1e-6) and found.bound_s < min(times)
    small = search(candidates, annotate, 1000)
    assert small.best is None and small.smallest[1].memory_bytes > 1000


@pytest.fixture(scope="module")
def gpt():
    spec = parse_model("gpt:layers=6,hidden=1024,heads=16,vocab=32000")
    example = spec.example_inputs(2, 1024)
    return spec.build("meta"), example, trace(spec.build("meta"), example, precision="bf16")


def test_plans_name_their_stages(gpt):
    model, example, traced = gpt

    def planned(**pin):
        pin = {"tp": 2, "dp": 1, "micro_batch": 1, "recompute": "full", "stages": "even"} | pin
        return make_plan(
            model,
            "dgx-h100:1",
            example,
            32,
            {k: v for k, v in pin.items() if v is not None},
            traced=traced,
        )

    plan = planned(pp=4, recompute="full")
    assert plan.schedule == "1f1b" and len(plan.stages) == 4 == len(
        plan.predicted.peak_memory_bytes
    )
    assert [name for stage in plan.stages for name in stage] == [
        segment.name for segment in traced.segments
    ]
    assert "1f1b, 4 stages, 1 on each of 4 ranks" in autopar.explain(plan)
    assert sum(plan.predicted.breakdown.values()) == pytest.approx(plan.predicted.step_time_s)
    assert plan.certificate.bound_s <= plan.certificate.objective_s == plan.predicted.step_time_s
    interleaved = planned(pp=2, vpp=3, dp=2, tp=2, schedule="zero_bubble")
    assert interleaved.schedule == "zero_bubble" and len(interleaved.stages) == 6
    sized = planned(pp=4, stages="3-2-1-0")
    layers = {traced.segments[number].name for number in traced.layers}
    assert [len(layers.intersection(stage)) for stage in sized.stages] == [3, 2, 1, 0]
    with pytest.raises(AutoparError, match="give 4 numbers that add up to 6"):
        planned(pp=4, stages="3-3")
    more = planned(pp=4, recompute="full", dp=1, tp=2, schedule="gpipe")
    assert max(more.predicted.peak_memory_bytes) > max(plan.predicted.peak_memory_bytes), (
        "gpipe keeps every micro-batch"
    )


@pytest.mark.slow
def test_a_pinned_pipeline_finds_its_schedule_stages_and_recomputation(gpt):
    """Never slower than what it may choose from, and what it says adds up."""
    model, example, traced = gpt
    fixed = {"pp": 4, "tp": 2, "dp": 1, "micro_batch": 1}

    def planned(**pin):
        return make_plan(model, "dgx-h100:1", example, 32, fixed | pin, traced=traced)

    free = planned()
    even = [
        planned(stages="even", recompute=mode, schedule=name)
        for mode in ("none", "full")
        for name in ("1f1b", "zero_bubble")
    ]
    assert free.predicted.step_time_s <= min(plan.predicted.step_time_s for plan in even) * (
        1 + 1e-9
    )
    assert [name for stage in free.stages for name in stage] == [
        segment.name for segment in traced.segments
    ]
    assert sorted(name for block in free.blocks for name in block.segments) == sorted(
        segment.name for segment in traced.segments
    )
    assert sum(free.predicted.breakdown.values()) == pytest.approx(free.predicted.step_time_s)
    assert free.certificate.bound_s <= free.predicted.step_time_s and free.certificate.gap < 0.2
    roomy = max(free.predicted.peak_memory_bytes)
    tight = ClusterSpec.parse("dgx-h100:1")
    tight = replace(tight, device=replace(tight.device, memory_bytes=int(0.9 * (roomy - free.predicted.memory["fixed"]))
                                          + free.predicted.memory["fixed"]))  # fmt: skip
    less = make_plan(model, tight.kept_free(0.0), example, 32, fixed, traced=traced)
    assert max(less.predicted.peak_memory_bytes) <= tight.device.memory_bytes < roomy
    assert less.predicted.step_time_s >= free.predicted.step_time_s
    again = Plan.from_json(less.to_json())
    assert again == less and "recompute" in autopar.explain(less)
