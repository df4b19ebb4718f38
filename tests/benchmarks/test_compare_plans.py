"""The comparison of plans: which rivals there are, what is said of them, and when it fails."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from benchmarks.search import compare_plans
from benchmarks.search.compare_plans import AGAIN, Compared, fails, main, measured, summary, table
from benchmarks.search.rival_plans import (
    Rival,
    megatron_pins,
    other_meshes,
    planned,
    random_pins,
    rivals,
)
from benchmarks.tasks import Task

TASK = Task("llama-tiny", "h100:4", 8, 16)
NODES = ClusterSpec.parse("dgx-h100:2")


@pytest.fixture(scope="module")
def found() -> list[Rival]:
    plan = TASK.planner()
    return rivals(lambda pin: plan({"pp": 1} | dict(pin)), TASK.cluster_spec, False, 1, 0)


def slower(plan: Plan, factor: float) -> Plan:
    return replace(
        plan, predicted=replace(plan.predicted, step_time_s=plan.predicted.step_time_s * factor)
    )


@pytest.mark.slow
def test_the_chosen_plan_and_its_rivals(found):
    assert [r.name for r in found][:5] == [
        "chosen",
        "runner-up",
        "Megatron rule",
        "pure DP",
        "FSDP",
    ]
    assert sum(r.name.startswith("random") and r.plan is not None for r in found) == 1
    chosen, runner, *_, pure, sharded = (r.plan for r in found[:5])
    assert (
        runner.mesh != chosen.mesh and runner.predicted.step_time_s >= chosen.predicted.step_time_s
    )
    assert pure.mesh.dp == sharded.mesh.dp == 4 and (pure.zero, sharded.zero) == (0, 3)
    compared = Compared(TASK, tuple(found), {})
    assert not compared.faster and not fails(compared)
    assert "the chosen plan is the fastest of" in table(
        compared
    ) and "1 of 1 chosen plans" in summary([compared])


def test_what_decides_the_same_is_said_once(found):
    marked = rivals(lambda pin: found[0].plan, TASK.cluster_spec, True, 0, 0)
    assert [r.same_as for r in marked] == ["", *["chosen"] * (len(marked) - 1)]
    assert "the same as chosen" in table(Compared(TASK, tuple(marked), {}))


def test_a_faster_rival_is_a_failure(found):
    chosen = found[0]
    faster = Rival("quick", {"tp": 2}, slower(chosen.plan, 0.9))
    compared = Compared(
        TASK, (chosen, faster, Rival("none", {"tp": 3}, None, "tp=3 does not divide")), {}
    )
    assert compared.faster == [faster] and fails(compared)
    text = table(compared)
    assert (
        "FASTER THAN THE CHOSEN PLAN: quick" in text
        and " -10.0 %" in text
        and "tp=3: tp=3 does not divide" in text
    )
    assert text.index("quick") < text.index("chosen  ")


def test_other_meshes_of_a_certificate(found):
    plan = replace(found[0].plan, mesh=MeshShape(dp=4))
    own, other, third, small = (
        {"pp": 1, "dp": dp, "cp": 1, "tp": 4 // dp, "ep": 1} for dp in (plan.mesh.dp, 1, 2, 8)
    )
    known = [(own, "solved", 1.0, 1.0), (other, "pruned", None, 3.0), (third, "solved", 2.0, 0.5), (other, "pruned", None, 4.0),
             (small, "infeasible", None, None)]  # fmt: skip
    entries = tuple(
        dict(zip(("mesh", "outcome", "time_s", "bound_s"), entry, strict=True)) for entry in known
    )
    certificate = replace(plan.certificate, meshes=entries)
    assert list(other_meshes(replace(plan, certificate=certificate))) == [third, other]


def test_the_rule_takes_the_least_tensor_parallelism_that_fits():
    pins = megatron_pins(NODES, runnable=False)
    assert [(pin["tp"], pin["pp"]) for pin in pins] == [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2)]
    assert all(pin.get("sequence_parallel", False) == (pin["tp"] > 1) for pin in pins)
    assert [pin["zero"] for pin in pins] == [1, 1, 1, 1, 0] and pins[-1]["schedule"] == "1f1b"
    assert all(pin["pp"] == 1 and pin["zero"] == 1 for pin in megatron_pins(NODES, runnable=True))


def test_the_rule_goes_on_where_nothing_fits(found):
    asked: list[dict] = []

    def fits_from_4(pin: dict) -> Plan:
        asked.append(dict(pin))
        if pin.get("tp", 4) < 4:
            raise AutoparError("No plan fits: " + "too much " * 40)
        return found[0].plan

    rule = next(r for r in rivals(fits_from_4, NODES, False, 0, 0) if r.name == "Megatron rule")
    assert rule.pin["tp"] == 4 and [pin["tp"] for pin in asked if pin.get("sequence_parallel")] == [
        2,
        4,
    ]
    failed = planned("pure DP", fits_from_4, {"tp": 1})
    assert (
        failed.plan is None
        and failed.reason.startswith("No plan fits: too much")
        and len(failed.reason) <= 160
    )


def test_random_pins_come_from_their_seed():
    first, again, other = (list(islice(random_pins(NODES, False, seed), 40)) for seed in (3, 3, 4))
    assert first == again != other and len({tuple(pin.items()) for pin in first}) == 40
    assert all(16 % (pin["tp"] * pin["pp"]) == 0 for pin in first) and any(
        pin["pp"] > 1 for pin in first
    )
    few = list(random_pins(ClusterSpec.parse("cpu:4"), True, 0))
    assert 40 < len(few) <= 88, "a small cluster has only so many"
    assert all(pin["pp"] == 1 for pin in few) and {pin["zero"] for pin in few} == {0, 1, 3}


def test_measured_plans(found, monkeypatch):
    """The chosen plan is measured twice, what decides the same not at all; its mean against the best of all."""
    best, other = found[0].plan, found[1].plan
    listed = [
        Rival("chosen", {}, best),
        Rival("other", {"tp": 2}, other),
        Rival("same", {}, best, same_as="chosen"),
    ]
    monkeypatch.setattr(compare_plans, "rivals", lambda *arguments: listed)
    monkeypatch.setattr(Task, "planner", lambda self, **options: None)
    run: list[Plan] = []

    def in_turn(task, plans, rounds):
        run.extend(plans)
        return [1.0, 1.0, 1.2]

    monkeypatch.setattr(compare_plans, "measure", in_turn)
    compared = measured(TASK, 0, 0, 1)
    assert list(compared.measured_s) == ["chosen", "other", AGAIN] and run == [best, other, best]
    assert (
        compared.measured_regret == pytest.approx(0.1)
        and compared.noise == pytest.approx(0.2)
        and fails(compared)
    )
    assert "10.0 % above the best of 2 plans (other)" in table(
        compared
    ) and "differ by 20.0 %" in table(compared)
    assert (
        "within 10.0 % of the best of all plans tried (at most 5 %); noise up to 20.0 %"
        in summary([compared])
    )
    close = replace(compared, measured_s={"chosen": 1.0, AGAIN: 1.0, "other": 0.99})
    assert not fails(close)


def test_the_command(found, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(compare_plans, "rivals", lambda *arguments: found)
    monkeypatch.setattr(Task, "planner", lambda self, *arguments: None)
    assert main(["--cases", "small", "--output", str(tmp_path / "out.txt")]) == 0
    assert capsys.readouterr().out == (tmp_path / "out.txt").read_text()
    worse = [replace(found[0], plan=slower(found[0].plan, 2.0)), *found[1:]]
    monkeypatch.setattr(compare_plans, "rivals", lambda *arguments: worse)
    assert main(["--cases", "small"]) == 1


def test_the_runner_up_is_the_fastest_of_some_meshes(found):
    """The certificate's order is by bounds: the mesh with the second lowest may be the fastest."""
    plan = found[0].plan
    known = [
        {"mesh": {"tp": tp}, "outcome": "pruned", "time_s": None, "bound_s": float(tp)}
        for tp in (1, 2, 3, 4)
    ]
    chosen = replace(plan, certificate=replace(plan.certificate, meshes=tuple(known)))
    factors = {1: 3.0, 2: 1.5, 3: 2.0, 4: 1.1}
    listed = rivals(
        lambda pin: slower(plan, factors[pin["tp"]]) if list(pin) == ["tp"] else chosen,
        TASK.cluster_spec,
        True,
        0,
        0,
    )
    assert listed[1].name == "runner-up" and listed[1].pin == {"tp": 2}
