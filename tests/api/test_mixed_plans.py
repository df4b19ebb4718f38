"""Plans on devices of several kinds, from the text of the cluster to what explain, audit, replay and the other commands say of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from click.testing import CliRunner

from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.compare import ComparedPlan, compare
from autopar.explaining.lints import lint
from autopar.explaining.plan_report import plan_text
from autopar.explaining.robust import scenarios_of
from autopar.explaining.why_not import why_not
from autopar.ir.cluster import Cluster, ClusterSpec, MixedCluster
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.planning.candidates import candidates_for, meshes_for
from autopar.planning.objectives import Goal, choose
from autopar.planning.pin_checks import check_pins
from autopar.recheck.audit import audit
from autopar.recheck.replay import replay
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

MODEL = "llama:layers=6,hidden=1024,ffn=2816,heads=16,vocab=8192"
TEXT = "h100:2+a100-80g:2"
ONE = {"pp": 2, "dp": 2, "zero": 1, "micro_batch": 2, "schedule": "1f1b", "recompute": "none"}
"""Pins that leave the deal and the stages."""


@cache
def traced():
    return api.trace_spec(parse_model(MODEL), 512)


def request_of(cluster: Cluster, **pin) -> PlanRequest:
    return PlanRequest(cluster, 16, Pins.of(pin), "bf16", MODEL)


@cache
def planned(text: str = TEXT, **pin) -> Plan:
    return api.plan_traced(traced(), request_of(ClusterSpec.parse(text), **pin))


def blocks(plan: Plan) -> dict[str, int]:
    """Blocks on each kind of devices."""
    found = dict.fromkeys(plan.devices, 0)
    for name, stage in zip(plan.devices, plan.stages, strict=True):
        found[name] += sum(segment.startswith("layers.") for segment in stage)
    return found


@pytest.mark.parametrize("pin", [ONE, ONE | {"pp": 4, "dp": 1, "zero": 0, "schedule": "gpipe"}])
def test_faster_devices_get_more_blocks_and_the_plan_is_what_it_costs(pin):
    plan = planned(**pin)
    assert blocks(plan)["h100"] > blocks(plan)["a100-80g"] > 0 and len(plan.devices) == plan.mesh.pp
    request = request_of(ClusterSpec.parse(TEXT), **pin)
    assert Plan.from_json(plan.to_json()) == plan
    assert (
        audit(plan, traced(), request).disagreements
        == ()
        == replay(plan, traced(), request).disagreements
    )
    assert (
        plan.certificate.bound_s <= plan.predicted.step_time_s
        and "vpp: 1" in plan.certificate.space
    )


def test_an_audit_sees_a_price_of_the_wrong_devices():
    """The ledger of one group under the name of the other."""
    plan = planned(**ONE)
    swapped = tuple(entry | {"group": 1 - entry["group"]} for entry in plan.certificate.ledger)
    wrong = replace(plan, certificate=replace(plan.certificate, ledger=swapped))
    found = audit(wrong, traced(), request_of(ClusterSpec.parse(TEXT), **ONE)).disagreements
    assert any("on h100" in words for words in found) and any(
        "on a100-80g" in words for words in found
    )
    other = replace(
        plan, mesh=replace(plan.mesh, deal="1-0" if plan.mesh.deal == "0x1-1x1" else "0-1")
    )
    assert any(
        words.startswith("step: ")
        for words in audit(
            other, traced(), request_of(ClusterSpec.parse(TEXT), **ONE)
        ).disagreements
    )


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_equal_groups_are_planned_like_one_cluster(schedule):
    """Two nodes, and the same as two groups: the same plan at the same price."""
    pin = ONE | {
        "schedule": schedule,
        "vpp": 1,
        "order": "pp-dp-ep-cp-tp",
        "dp": 4,
        "micro_batch": 1,
    }
    node = ClusterSpec.make("h100", nodes=1, devices_per_node=4)
    whole = replace(node, topology=replace(node.topology, nodes=2))
    one, two = (
        api.plan_traced(traced(), request_of(at, **pin))
        for at in (whole, MixedCluster.of([node, node]))
    )
    assert two.predicted.step_time_s == pytest.approx(one.predicted.step_time_s, rel=1e-9)
    assert two.mesh.deal == "0x1-1x1" and two.devices == ("h100", "h100")


def test_a_slow_link_between_groups_is_paid_for():
    groups = ClusterSpec.parse(TEXT).groups
    usual = MixedCluster.of(groups)
    slow = replace(
        usual, between=replace(usual.between, bandwidth_Bps=usual.between.bandwidth_Bps / 50)
    )
    assert (
        api.plan_traced(traced(), request_of(slow, **ONE)).predicted.step_time_s
        > planned(**ONE).predicted.step_time_s
    )


def test_memory_is_that_of_each_kind():
    """Groups of which the faster one has hardly any memory: the other takes more blocks than it would."""
    h100, a100 = ClusterSpec.parse(TEXT).groups
    pin = {key: value for key, value in ONE.items() if key != "recompute"}
    free = planned(**pin)
    need = dict(zip(free.devices, free.predicted.peak_memory_bytes, strict=True))
    tight = MixedCluster.of([h100.with_memory(int(0.93 * need["h100"])), a100])
    plan = api.plan_traced(traced(), request_of(tight, **pin))
    for name, held in zip(plan.devices, plan.predicted.peak_memory_bytes, strict=True):
        assert (
            held <= {"h100": int(0.93 * need["h100"]), "a100-80g": a100.device.memory_bytes}[name]
        )
    assert blocks(plan)["h100"] < blocks(free)["h100"] or plan.recompute != free.recompute
    assert need["h100"] > need["a100-80g"]
    # what the slower one lacks the faster one may have
    just = MixedCluster.of([a100.with_memory(need["a100-80g"]), h100])
    plan = api.plan_traced(traced(), request_of(just, **pin))
    assert plan.predicted.step_time_s == pytest.approx(free.predicted.step_time_s, rel=1e-9)
    nothing = MixedCluster.of([h100.with_memory(5 * 2**29), a100.with_memory(5 * 2**29)])
    with pytest.raises(
        NoPlanFits, match=r"No plan that fits was found: .* GiB .*2.50 on h100, 2.50 on a100-80g"
    ):
        api.plan_traced(traced(), request_of(nothing, **pin))


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        (
            {"tp": 4},
            "groups of 2 and 2 devices, and a rank of the pipeline lies within one of them: tp=4 = 4 .* each; 1, 2 do",
        ),
        ({"dp": 2, "tp": 2}, "tp=2 x dp=2 = 4 devices must divide each"),
        ({"pp": 1}, "pp=1 cannot; 2, 4 can"),
        ({"vpp": 2}, "vpp=2: the devices .* are of several kinds, and a rank has one stage there"),
        ({"schedule": "interleaved_1f1b"}, "a rank has one stage there"),
        ({"stages": "even"}, "stages are sized to them"),
        ({"offload": "optimizer"}, "their hosts differ"),
        ({"cp": 2}, "pin context_method="),
        ({"deal": "x"}, "deal='x' must be a text"),
    ],
)
def test_pins_that_cannot_be(pin, message):
    with pytest.raises(AutoparError, match=message):
        check_pins(request_of(ClusterSpec.parse(TEXT), **pin), traced())


def test_deals_are_searched_and_pinned():
    cluster = ClusterSpec.parse("h100:2+a100-80g:4")
    found = {(mesh.pp, mesh.deal) for mesh in meshes_for(request_of(cluster), traced())}
    assert found == {(3, "0x1-1x2"), (3, "1x2-0x1"), (6, "0x2-1x4"), (6, "1x4-0x2")}
    assert {mesh.deal for mesh in meshes_for(request_of(cluster, deal="1-1-0"), traced())} == {
        "1x2-0x1"
    }
    with pytest.raises(AutoparError, match="are of one kind; drop the pin"):
        check_pins(request_of(ClusterSpec.parse("h100:4"), deal="0-0"), traced())


def test_a_model_of_fewer_layers_than_ranks_is_refused():
    with pytest.raises(
        AutoparError,
        match=r"no pipeline over all devices of h100:1\+a100-80g:8, .* at least one of 6 layers",
    ):
        candidates_for(request_of(ClusterSpec.parse("h100:1+a100-80g:8")), traced())


def test_questions_about_plans_are_answered_or_refused():
    cluster = ClusterSpec.parse(TEXT)

    def plan_on(more, at):
        return api.plan_traced(traced(), request_of(at, **{**ONE, **more}))

    answer = why_not(plan_on, cluster, {"micro_batch": 4})
    assert answer.pinned is not None and answer.differs == "micro_batch" and answer.pinned.devices
    assert [
        isinstance(entry, ComparedPlan)
        for entry in compare(plan_on, cluster, [{"deal": "0-1"}, {"dp": 4}], [])
    ] == [True, True, False]
    for finding in lint(plan_on({}, cluster), cluster, traced()):
        assert "small" not in finding.lint or finding.text.startswith(("on h100", "on a100-80g"))
    for objective in ("cost", "memory"):
        with pytest.raises(AutoparError, match="has devices of several kinds: plan for each part"):
            choose(Goal(objective), plan_on, cluster, {}, lambda text: None)
    with pytest.raises(AutoparError, match=r"has several \(h100, a100-80g\)"):
        scenarios_of(cluster, 0.2)


def test_explain_says_who_has_what(monkeypatch):
    plan = planned(**ONE)
    shown = " ".join(plan_text(plan).split())
    for words in (
        "Ranks of the pipeline",
        "of 79.65 GiB",
        "of 80.00 GiB",
        "start the processes along the pipeline: ranks 0 to 1 on",
    ):
        assert words in shown, words
    monkeypatch.setenv("COLUMNS", "80")
    pins = ",".join(f"{key}={value}" for key, value in ONE.items())
    args = [
        "explain",
        MODEL,
        TEXT,
        "--global-batch",
        "16",
        "--seq",
        "512",
        "--pin",
        pins,
        "--audit",
        "--replay",
    ]
    result = CliRunner().invoke(cli, args)
    assert result.exit_code == 0 and "Every edge agrees" in " ".join(result.stdout.split()), (
        result.output
    )
    assert all(len(line) <= 80 for line in result.stdout.splitlines())
