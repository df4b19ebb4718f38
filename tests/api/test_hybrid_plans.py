"""Hybrid sharding in plans: pinned, refused, priced by hand, searched where it wins, saved, told and audited."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from autopar_cost_models import collective_time_s, static_bytes
from autopar_cost_models.constants import BUCKET_BYTES

import autopar
from autopar import api
from autopar.annotate.annotator import annotator_of
from autopar.annotate.setting import Setting
from autopar.errors import AutoparError
from autopar.explaining.plan_report import plan_text
from autopar.ir.annotated import Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.planning.candidates import candidates_for
from autopar.recheck.audit import audit
from autopar.recheck.replay import replay
from autopar.request.pins import Pins, choices_of, first_difference, pins_of
from autopar.request.plan_request import PlanRequest
from autopar.text.plan_words import layout_words

NODES = ClusterSpec.make(
    "h100",
    nodes=2,
    devices_per_node=4,
    memory_bytes=10 * 2**30,
    inter_bandwidth_Bps=2e9,
    inter_efficiency=1.0,
)
PIN = {"pp": 1, "tp": 1, "cp": 1}


@cache
def traced_of(
    name: str = "llama:layers=8,hidden=2048,heads=16,vocab=32000", seq: int = 2048
) -> TracedModel:
    return api.trace_spec(parse_model(name), seq)


def request_of(pin: dict, cluster: ClusterSpec = NODES, batch: int = 32) -> PlanRequest:
    return PlanRequest(cluster, batch, Pins.of(pin), "bf16", "test")


@cache
def planned(**pin) -> Plan:
    return api.plan_traced(traced_of(), request_of(PIN | pin))


def test_parameters_are_gathered_inside_nodes_where_the_links_between_them_are_slow():
    free, whole = planned(), planned(shard=0)
    assert (free.zero, free.shard) == (3, 4) and free.certificate.status == "optimal"
    assert free.predicted.step_time_s < whole.predicted.step_time_s and whole.shard == 0
    assert free.predicted.step_time_s == pytest.approx(
        planned(zero=3, shard=4).predicted.step_time_s
    )
    assert "also those within a node" in free.certificate.space
    assert (
        "shard: 0" in whole.certificate.space and "shard: 2" in planned(shard=2).certificate.space
    )
    assert {(entry["zero"], entry["shard"]) for entry in free.certificate.meshes} == {
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (3, 4),
    }
    again = api.plan_traced(traced_of(), request_of(pins_of(free)))
    assert choices_of(again) == choices_of(free) and again.predicted.step_time_s == pytest.approx(
        free.predicted.step_time_s
    )


def test_a_hybrid_plan_is_saved_told_replayed_and_audited():
    plan, request = planned(), request_of(PIN)
    assert Plan.from_json(plan.to_json()) == plan and plan.shard == 4
    assert "shared out by groups of 4 of 8 data-parallel ranks" in plan_text(
        plan
    ) and "ZeRO-3 over 4" in layout_words(plan)
    assert "choices: shard 4 -> 0" in [
        str(difference) for difference in autopar.diff(plan, replace(plan, shard=0))
    ]
    assert (
        first_difference({"shard": 4}, plan) == ""
        and first_difference({"shard": 0}, plan) == "shard"
    )
    assert first_difference({"shard": 8}, planned(zero=3, shard=8)) == "", "all ranks are no groups"
    assert (
        audit(plan, traced_of(), request).disagreements
        == ()
        == replay(plan, traced_of(), request).disagreements
    )
    assert audit(replace(plan, shard=2), traced_of(), request).disagreements, (
        "other groups take and hold something else"
    )


@pytest.mark.parametrize(("pin", "words"), [
    ({"shard": 3}, "shard=3 does not part the data-parallel ranks .dp x cp = 8 in dp=8. into groups .* 2, 4, 8 does"),
    ({"shard": 1}, "shard=1: a rank alone shares out nothing"),
    ({"shard": -2}, "shard=-2 must be a whole number"),
    ({"shard": True}, "shard=True must be a whole number"),
    ({"shard": 4, "zero": 0}, "zero=0 shares out nothing"),
    ({"shard": 2, "dp": 1, "tp": 8}, "shard=2 does not part .* nothing does"),
    ({"shard": 2, "cp": 4, "dp": 2}, "shard=2 does not part .* 4, 8 does"),
])  # fmt: skip
def test_groups_that_cannot_be_are_refused(pin, words):
    with pytest.raises(AutoparError, match=words):
        api.plan_traced(traced_of(), request_of((PIN if len(pin) < 3 else {"pp": 1}) | pin))


def test_a_damaged_plan_is_refused():
    for change in ({"shard": 3}, {"shard": 4, "zero": 0}, {"shard": -4}, {"shard": "4"}):
        with pytest.raises(AutoparError, match="damaged"):
            api.check_plan(replace(planned(), **change), traced_of(), NODES)


def test_groups_have_all_ranks_of_experts_and_positions():
    moe = traced_of("moe:layers=2,hidden=256,heads=4,vocab=512,ffn=512,experts=8", 64)
    found = candidates_for(request_of({"pp": 1, "tp": 1, "ep": 2, "zero": 3, "shard": 4}), moe)
    assert {(c.mesh.dp, c.mesh.ep, c.shard) for c in found} == {(8, 2, 4)}
    assert MeshShape(dp=8, ep=2).sharing_dp(4) == 2 and not MeshShape(dp=8, ep=8).can_share(4)
    assert MeshShape(dp=4, cp=2).copies(4) == (2, 4) and MeshShape(dp=4, cp=2).levels(
        ("dp", "ep", "cp"), 4
    ) == ((4, 1),)
    assert MeshShape(pp=2, dp=4, order="dp-pp").levels(("dp",), 2) == ((2, 2),) and MeshShape(
        pp=2, dp=4, order="dp-pp"
    ).copies(2) == (2, 4)


# ------------------------------------------------------------------------------------------------------------------------- by hand

CPUS = ClusterSpec.make(
    "cpu", nodes=2, devices_per_node=4, intra_bandwidth_Bps=1e11, inter_bandwidth_Bps=1e8
)


def parameters(
    name: str, mesh: MeshShape, zero: int, shard: int, micro_batches: int = 1, **more
) -> list[tuple[int, Strategy, int]]:
    """(segments, strategy, elements) of every parameter; in fp32 it has 16 bytes an element under ZeRO 0."""
    annotator = annotator_of(traced_of(name, 16))
    where = Setting(mesh, 1, micro_batches, zero, "none", "fp32", CPUS, shard=shard, **more)
    unshared = annotator.annotate(replace(where, zero=0, shard=0))
    pairs = zip(annotator.annotate(where).classes, unshared.classes, strict=True)
    return [(block.count, op.strategies[0], whole.strategies[0].static_bytes // 16)
            for block, other in pairs for op, whole in zip(block.ops, other.ops, strict=True) if op.kind == "parameter"]  # fmt: skip


def moved_s(kind: str, ranks: int, stride: int) -> float:
    """Seconds of a byte in a full bucket."""
    return collective_time_s(kind, BUCKET_BYTES, ranks, stride, CPUS.topology) / BUCKET_BYTES


@pytest.mark.parametrize(("mesh", "inside", "between"), [
    (MeshShape(dp=8), (4, 1), (2, 4)),  # a group is a node
    (MeshShape(pp=2, dp=4), (2, 1), (2, 2)),  # a stage is a node, and has both groups
    (MeshShape(pp=2, dp=4, order="dp-pp"), (2, 2), (2, 4)),
])  # fmt: skip
def test_gradients_are_scattered_inside_and_added_up_between_groups(mesh, inside, between):
    more = {"schedule": "1f1b", "micro_batches": 2} if mesh.pp > 1 else {}
    found = parameters("llama-tiny", mesh, 1, inside[0], **more)
    sent_bytes = 4 * sum(count * numel for count, _, numel in found)
    expected_s = (
        moved_s("reduce_scatter", *inside)
        + moved_s("all_gather", *inside)
        + moved_s("all_reduce", *between) / inside[0]
    )
    assert sum(count * s.step_comm_s for count, s, _ in found) == pytest.approx(
        sent_bytes * expected_s, rel=1e-3
    )


def test_parameters_of_stage_3_never_leave_their_group_but_for_gradients_once_a_step():
    found = parameters("llama-tiny", MeshShape(dp=8), 3, 4, 2)
    sent_bytes = 4 * sum(count * numel for count, _, numel in found)
    assert sum(count * s.step_comm_s for count, s, _ in found) == pytest.approx(
        sent_bytes / 4 * moved_s("all_reduce", 2, 4), rel=1e-3
    )
    faster = replace(
        CPUS,
        topology=replace(CPUS.topology, inter=replace(CPUS.topology.inter, bandwidth_Bps=1e10)),
    )
    again = annotator_of(traced_of("llama-tiny", 16)).annotate(
        Setting(MeshShape(dp=8), 1, 2, 3, "none", "fp32", faster, shard=4)
    )
    passes = [
        op.strategies[0] for block in again.classes for op in block.ops if op.kind == "parameter"
    ]
    assert [(s.forward_s, s.backward_s) for s in passes] == [
        (s.forward_s, s.backward_s) for _, s, _ in found
    ]
    assert sum(s.forward_s for s in passes) > 0


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_held_is_divided_by_the_ranks_of_a_group(zero):
    for _, strategy, numel in parameters("llama-tiny", MeshShape(dp=8), zero, 4):
        assert strategy.static_bytes == static_bytes(numel, "fp32", zero, 4).total


def test_experts_are_shared_out_by_fewer_ranks():
    """Of ep=2 each holds half of the experts, which two of the four ranks of a group have in common."""
    found = parameters("moe-tiny", MeshShape(dp=8, ep=2), 3, 4)
    experts = [strategy.static_bytes / numel == 16 / 2 for _, strategy, numel in found]
    assert sum(experts) == 2 and all(
        own or s.static_bytes == 16 / 4 * numel
        for own, (_, s, numel) in zip(experts, found, strict=True)
    )
