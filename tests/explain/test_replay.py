"""The replay of a plan: agrees with the planner whatever the schedule, stages and recomputation, and does not where the plan is wrong."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from autopar_cost_models import Action, StageTimes
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.explain_tasks import words_of

from autopar import api, recheck
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.recheck.plan_costs import StageCost, plan_costs
from autopar.recheck.replay import Replay, peak_held_bytes, replay
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

RECHECK = Path(recheck.__file__).parent
SEQ, BATCH = 2048, 32
DEEP = "llama:layers=9,hidden=2048,heads=16,vocab=64000,seq=2048"
TIED = "gpt:layers=6,hidden=2048,heads=16,vocab=64000,seq=2048"


@cache
def traced_of(name: str) -> TracedModel:
    return api.trace_spec(parse_model(name), SEQ)


def request_of(pin: dict, memory_gib: float = 80.0, cluster: str = "h100:8") -> PlanRequest:
    spec = ClusterSpec.parse(cluster)
    spec = replace(spec, device=replace(spec.device, memory_bytes=int(memory_gib * 2**30)))
    return PlanRequest(spec, BATCH, Pins.of(pin), "bf16", "test")


@cache
def planned(
    name: str, pins: tuple[tuple[str, object], ...], memory_gib: float = 80.0
) -> tuple[Plan, Replay]:
    request = request_of(dict(pins), memory_gib)
    plan = api.plan_traced(traced_of(name), request)
    return plan, replay(plan, traced_of(name), request)


def check(found: Replay) -> None:
    assert found.disagreements == ()
    assert found.replayed_s == pytest.approx(found.predicted_s, rel=0.02)
    assert found.together_bytes == pytest.approx(found.predicted_bytes, rel=0.01)
    assert all(a <= b for a, b in zip(found.replayed_bytes, found.together_bytes, strict=True))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_stages_as_the_planner_cuts_them(schedule):
    plan, found = planned(
        DEEP, (("pp", 4), ("tp", 1), ("zero", 0), ("micro_batch", 2), ("schedule", schedule))
    )
    assert plan.schedule == schedule and len({len(stage) for stage in plan.stages}) > 1, (
        "stages are uneven"
    )
    assert found.idle_share > 0 and found.replayed_bytes == found.together_bytes
    check(found)


@pytest.mark.slow
def test_interleaved_stages():
    plan, found = planned(
        DEEP,
        (
            ("pp", 2),
            ("tp", 2),
            ("zero", 1),
            ("micro_batch", 1),
            ("schedule", "interleaved_1f1b"),
            ("vpp", 3),
        ),
    )
    assert len(plan.stages) == 6
    check(found)
    assert found.memory_differences[0] < -0.01, "the embedding's backward is not when most is kept"
    shown = words_of(found.reply())
    assert "Where memory is a range, the stages of a rank need it at different times" in shown
    # what the table prints is what it says of the difference
    assert found.memory_errors[0] == 0 and "GiB +0.00 %" in shown
    assert not any(abs(off) > 0.01 for *_, off in found.ranks)


@pytest.mark.parametrize("memory_gib", [13.5, 16.0])
def test_layers_that_recompute_differently(memory_gib):
    plan, found = planned(
        DEEP,
        (("pp", 2), ("tp", 1), ("zero", 1), ("micro_batch", 4), ("schedule", "1f1b")),
        memory_gib,
    )
    assert plan.recompute == "mixed"
    check(found)


def test_without_a_pipeline():
    plan, found = planned(TIED, (("pp", 1), ("tp", 2), ("micro_batch", 2), ("recompute", "full")))
    assert len(found.replayed_bytes) == 1 and found.idle_share == pytest.approx(0, abs=1e-12)
    assert found.replayed_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    check(found)


def test_tied_parameters_of_two_ranks():
    plan, found = planned(
        TIED,
        (
            ("pp", 2),
            ("tp", 1),
            ("zero", 0),
            ("micro_batch", 2),
            ("schedule", "1f1b"),
            ("stages", "even"),
        ),
    )
    check(found)
    costs = plan_costs(plan, traced_of(TIED), request_of({}))
    shared = 64000 * 2048 * 2  # bytes of the embedding in bf16, at least
    assert min(costs.static_bytes) > shared + request_of({}).cluster.device.reserved_bytes


@settings(max_examples=examples(7, 30))
@given(
    st.sampled_from(["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b"]),
    st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2)]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from(["none", "selective", "full", "every-2"]),
)
def test_pinned_pipelines(schedule, degrees, micro_batch, recompute):
    """Few micro-batches too: some of these have one for each rank, or fewer."""
    ranks, tp = degrees
    pin = {
        "pp": ranks,
        "tp": tp,
        "zero": 0,
        "micro_batch": micro_batch,
        "recompute": recompute,
        "stages": "even",
        "schedule": schedule,
    }
    pin |= {"vpp": 2} if schedule == "interleaved_1f1b" else {}
    try:
        _, found = planned(DEEP, tuple(pin.items()), 4096.0)
    except AutoparError as error:
        assert "pp=" in str(error)  # torch has no such schedule for so few micro-batches
        return
    check(found)


def test_a_wrong_prediction_is_found():
    pins = (("pp", 4), ("tp", 1), ("zero", 0), ("micro_batch", 2), ("schedule", "1f1b"))
    plan, found = planned(DEEP, pins)
    request = request_of(dict(pins))
    fuller = (
        *plan.predicted.peak_memory_bytes[:2],
        int(plan.predicted.peak_memory_bytes[2] * 1.02),
        plan.predicted.peak_memory_bytes[3],
    )
    wrong = replace(
        plan,
        predicted=replace(
            plan.predicted, step_time_s=plan.predicted.step_time_s * 0.97, peak_memory_bytes=fuller
        ),
    )
    off = replay(wrong, traced_of(DEEP), request)
    assert (
        len(off.disagreements) == 2
        and "a step takes 3.09 % more than predicted" in off.disagreements[0]
    )
    assert "rank 2 holds 1.96 % less" in off.disagreements[1]
    assert not off.reply().data["agrees"] and found.reply().data["agrees"]
    assert "THE REPLAY DISAGREES: a step takes 3.09 % more" in words_of(off.reply())
    assert "agrees within 2 % of time and 1 % of memory" in words_of(found.reply())


def test_choices_are_priced_anew():
    """The prediction of other choices does not pass: another cut, recomputation, a ZeRO stage."""
    pins = (("pp", 4), ("tp", 1), ("zero", 0), ("micro_batch", 2), ("schedule", "1f1b"))
    plan, _ = planned(DEEP, pins)
    first, second, *rest = plan.stages
    blocks = tuple(replace(block, recompute="full") for block in plan.blocks)
    for other in (replace(plan, stages=(first[:-1], (first[-1], *second), *rest)), replace(plan, blocks=blocks, recompute="full"),
                  replace(plan, zero=1)):  # fmt: skip
        assert replay(other, traced_of(DEEP), request_of(dict(pins))).disagreements


def test_damaged_plans_are_refused():
    pins = (("pp", 4), ("tp", 1), ("zero", 0), ("micro_batch", 2), ("schedule", "1f1b"))
    plan, _ = planned(DEEP, pins)
    request = request_of(dict(pins))
    for wrong in (replace(plan, stages=plan.stages[::-1]), replace(plan, blocks=plan.blocks[1:])):
        with pytest.raises(AutoparError, match="it was damaged; plan again"):
            replay(wrong, traced_of(DEEP), request)
    tensor, _ = planned(TIED, (("pp", 1), ("tp", 2), ("micro_batch", 2), ("recompute", "full")))
    first, block, *others = tensor.blocks
    ops = {
        name: {**axes, "tp": replace(axes["tp"], strategy="odd")}
        for name, axes in block.ops.items()
    }
    odd = replace(tensor, blocks=(first, replace(block, ops=ops), *others))
    with pytest.raises(AutoparError, match="over tp=2 as odd, which this model cannot"):
        replay(odd, traced_of(TIED), request)


def test_what_a_list_of_actions_holds():
    """Stages of a rank that keep 10, 3 and 20 bytes; backwards need 5, 100 and 1 for a moment, or 7, 100 and 1 in two parts, between which
    2, 0 and 0 more stay, and 0, 0 and 8 less."""
    stages = (StageCost(StageTimes(1, 2), 10, 5, 7, 2, 0), StageCost(StageTimes(1, 2), 3, 100, 100, 0, 0),
              StageCost(StageTimes(1, 2), 20, 1, 1, 0, 8))  # fmt: skip

    def held(text: str) -> tuple[int, int]:
        return peak_held_bytes(
            [Action(word[1], int(word[0]), int(word[2])) for word in text.split()], stages
        )

    assert held("0F0 0B0 0F1 0B1") == (15, 15)
    assert held("0F0 0F1 0B0 0B1") == (25, 25)
    assert held("0F0 1F0 1B0 0B0") == (113, 113)
    assert held("1F0 1B0 0F0 0F1 0B0 0B1") == (103, 120)
    assert held("0F0 0F1 0I0 0I1 0W0 0W1") == (31, 31) and held("0F0 0I0 0W0 0F1 0I1 0W1") == (
        19,
        19,
    )
    assert held("1F0 1I0 1W0 0F0 0I0 0W0") == (103, 112)
    assert held("2F0 2I0 2F1 2I1 2W0 2W1") == (33, 33), "12 of the one that waits, 20, 1"
    assert held("2F0 2I0 2W0 2F1 2I1 2W1") == (21, 21) and held("2F0 2I0 0F0 0I0 2W0 0W0") == (
        31,
        39,
    )


def test_the_replay_shares_no_code_with_the_planner():
    for name in ("replay", "plan_costs"):
        tree = ast.parse((RECHECK / f"{name}.py").read_text())
        modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not any(module.startswith("autopar.solve") for module in modules)
        taken = {
            a.name
            for n in ast.walk(tree)
            if isinstance(n, ast.ImportFrom) and n.module == "autopar_cost_models"
            for a in n.names
        }
        assert taken <= {"Action", "StageTimes", "simulate_pipeline"}


def test_data_is_json():
    _, found = planned(TIED, (("pp", 1), ("tp", 2), ("micro_batch", 2), ("recompute", "full")))
    data = json.loads(json.dumps(found.reply().data))
    assert data["memory_bytes"][0]["predicted"] == found.predicted_bytes[0]
    assert data["step_time_s"]["replayed"] == found.replayed_s
