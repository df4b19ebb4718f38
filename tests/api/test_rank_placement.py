"""Which axes of the mesh lie inside nodes: searched, pinned, told, and priced the same by everyone."""

from __future__ import annotations

import json
from functools import cache

import pytest

import autopar
from autopar import api
from autopar.errors import AutoparError
from autopar.explaining.lints import lint
from autopar.explaining.plan_report import choice_rows, plan_text
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.planning.candidates import placements_of
from autopar.recheck.audit import audit
from autopar.recheck.replay import replay
from autopar.request.pins import Pins, choices_of, first_difference, pins_of
from autopar.request.plan_request import PlanRequest
from autopar.text.plan_words import placement_words

NODES = ClusterSpec.make(
    "h100", nodes=2, devices_per_node=4, inter_bandwidth_Bps=1e9, inter_efficiency=1.0
)
PIN = {
    "pp": 2,
    "tp": 2,
    "dp": 2,
    "zero": 0,
    "schedule": "gpipe",
    "recompute": "none",
    "sequence_parallel": False,
}
DEFAULT, INSIDE = "pp-dp-tp", "dp-pp-tp"
LONG, SHORT = (2048, 16), (16, 4)
"""Positions and sequences of a batch: with many, what stages send weighs more than gradients do."""


@cache
def traced_of(seq: int) -> TracedModel:
    return api.trace_spec(
        parse_model(f"llama:layers=2,hidden=256,heads=4,vocab=512,seq={seq}"), seq
    )


def request_of(task: tuple[int, int], **pin) -> PlanRequest:
    return PlanRequest(
        NODES, task[1], Pins.of(PIN | {"micro_batch": task[1] // 2} | pin), "bf16", "test"
    )


@cache
def planned(task: tuple[int, int], order: str | None = None) -> Plan:
    return api.plan_traced(
        traced_of(task[0]), request_of(task, **({"order": order} if order else {})), 600.0
    )


@pytest.mark.slow
@pytest.mark.parametrize(("task", "order"), [(LONG, INSIDE), (SHORT, "")])
def test_the_search_keeps_on_a_node_what_sends_most(task, order):
    free, pinned = planned(task), {name: planned(task, name) for name in (DEFAULT, INSIDE)}
    times = {name: plan.predicted.step_time_s for name, plan in pinned.items()}
    assert (
        free.mesh.order == order
        and free.predicted.step_time_s == pytest.approx(min(times.values()))
        and len(set(times.values())) == 2
    )
    assert {entry["mesh"]["order"] for entry in free.certificate.meshes} == {"", INSIDE}
    assert (
        free.certificate.bound_s <= free.predicted.step_time_s
        and ", or dp-pp if" in free.certificate.space
    )
    assert f"order: {INSIDE}" in pinned[INSIDE].certificate.space


@pytest.mark.slow
def test_the_plan_says_where_its_axes_lie():
    plan = planned(LONG)
    assert (
        Plan.from_json(plan.to_json()) == plan
        and json.loads(plan.to_json())["mesh"]["order"] == INSIDE
    )
    assert dict(choice_rows(plan, NODES))["placement"] == "tp and pp inside nodes, dp across nodes"
    assert f"pp=2 dp=2 tp=2 ({INSIDE})" in plan_text(plan)
    told = [str(difference) for difference in autopar.diff(planned(LONG, DEFAULT), plan)]
    assert f"choices: order pp-dp-ep-cp-tp -> {INSIDE}" in told
    assert choices_of(
        api.plan_traced(traced_of(LONG[0]), request_of(LONG, **pins_of(plan)))
    ) == choices_of(plan)
    assert (
        first_difference({"order": "dp-pp-cp-tp"}, plan) == ""
        and first_difference({"order": DEFAULT}, plan) == "order"
    )


@pytest.mark.slow
@pytest.mark.parametrize("order", [INSIDE, "dp-tp-pp", "tp-dp-pp"])
def test_replay_and_audit_price_the_same_placement(order):
    plan, traced, request = planned(LONG, order), traced_of(LONG[0]), request_of(LONG, order=order)
    played = replay(plan, traced, request)
    assert (
        plan.mesh.order == order
        and played.disagreements == ()
        and played.replayed_s == pytest.approx(played.predicted_s, rel=0.02)
    )
    assert audit(plan, traced, request).disagreements == ()
    across = [
        finding
        for finding in lint(plan, NODES)
        if finding.lint == "tensor parallelism across nodes"
    ]
    assert len(across) == (order == "tp-dp-pp")


def test_only_placements_that_bring_a_pipeline_together_are_searched():
    dgx = ClusterSpec.parse("dgx-h100:8").topology
    both = placements_of(MeshShape(pp=4, dp=8, tp=2), dgx)
    assert [mesh.order for mesh in both] == ["", INSIDE]
    assert [placement_words(mesh, dgx) for mesh in both] == [
        "tp inside nodes, dp 4 of 8 ranks to a node, pp across nodes", "tp and pp inside nodes, dp across nodes"
    ]  # fmt: skip
    for mesh in (
        MeshShape(dp=32, tp=2),
        MeshShape(pp=8, dp=1, tp=8),
        MeshShape(pp=4, dp=2, tp=8),
        MeshShape(pp=16, tp=4),
    ):
        assert placements_of(mesh, dgx) == [mesh], "both are the same, or there is one"
    assert (
        len(placements_of(MeshShape(pp=2, dp=2, tp=2), ClusterSpec.parse("h100:8").topology)) == 1
    ), "one node"


def test_an_order_that_is_none_is_refused():
    with pytest.raises(AutoparError, match="order='dp-xy' must name mesh axes"):
        api.plan_traced(traced_of(SHORT[0]), request_of(SHORT, order="dp-xy"))
