"""Tensor parallelism stays inside nodes, and off PCIe, where that costs at most a tenth: against all meshes of a small cluster."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
from support.effort import every
from support.explain_tasks import instant

from autopar import api
from autopar.explaining.certificate import proof_words
from autopar.explaining.plan_report import plan_text
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.simplicity import INSIDE, UNSPLIT
from autopar.models import parse_model
from autopar.planning import planner
from autopar.planning.objectives import Goal, choose
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.solve.search import branch_and_bound, simplest
from autopar.solve.search.simplest import Preference

PINS = {"zero": 0, "recompute": "none", "pp": 1}
MODEL = "llama:layers=2,hidden=2048,heads=16,kv_heads=8,ffn=5504,vocab=2048,seq=2048"
RATES = (20.0, 60.0, 90.0, 100.0, 160.0, 300.0)  # GB/s between nodes


@cache
def traced():
    return api.trace_spec(parse_model(MODEL), 2048)


@cache
def planned(rate: float, tolerance: float, inside: bool = True, tp: int | None = None) -> Plan:
    cluster = instant(ClusterSpec.make("h100", 2, 2, inter_bandwidth_Bps=rate * 1e9, name="small"))
    pin = Pins.of(PINS | ({"tp": tp} if tp else {}))
    asked = PlanRequest(cluster, 2, pin, "bf16", "m", tolerance=tolerance, keeps_tp_inside=inside)
    return api.plan_traced(traced(), asked, 60.0, processes=1)


def seconds(rate: float) -> dict[int, float]:
    """Seconds of the fastest plan by the degree of tp; 4 devices are two nodes, and dp is 1 or 2."""
    return {tp: planned(rate, 0.0, tp=tp).predicted.step_time_s for tp in (2, 4)}


@pytest.mark.parametrize("rate", every(3, RATES))
def test_it_crosses_nodes_only_where_the_best_plan_without_is_a_tenth_slower(rate):
    within, across = seconds(rate)[2], seconds(rate)[4]
    plan = planned(rate, 0.02)
    fastest, proof = min(within, across), plan.certificate
    assert proof.status == "optimal" and proof.fastest_s == pytest.approx(fastest)
    assert plan.mesh.tp == (2 if within <= (1 + INSIDE) * fastest else 4)
    assert proof.tp_inside == (plan.mesh.tp == 2 and across < within)
    assert plan.predicted.step_time_s == pytest.approx(seconds(rate)[plan.mesh.tp])
    text = plan_text(plan)
    assert (
        "Tensor parallelism does not cross nodes or PCIe, which costs" in text
    ) == proof.tp_inside
    if proof.tp_inside:
        more = f"{100 * (within / across - 1):.2g} %"
        assert f"costs {more} of a step" in text and f"{more} above what is" in proof_words(plan)
        assert Plan.from_json(json.dumps(json.loads(plan.to_json()))).certificate == proof


def test_all_cases_are_met():
    ratios = [seconds(rate)[2] / seconds(rate)[4] for rate in RATES]
    assert min(ratios) < 1 < max(ratios) and max(ratios) > 1 + INSIDE
    assert any(1 < ratio < 1 + INSIDE for ratio in ratios)


@cache
def planned_on_pcie(
    device: str, rows: int, tolerance: float, tp: int | None = None, rivals: bool = False
) -> Plan:
    pin = Pins.of(PINS | ({"tp": tp} if tp else {}))
    cluster = instant(ClusterSpec.parse(f"{device}:4").one_kind)
    asked = PlanRequest(cluster, rows, pin, "bf16", "m", tolerance=tolerance, runners_up=rivals)
    return api.plan_traced(traced(), asked, 60.0, processes=1)


@pytest.mark.parametrize(
    ("device", "rows", "is_kept"),
    [("l4", 4, False), ("l4", 8, False), ("l4", 16, False), ("a10g", 4, True), ("l40s", 8, True)],
)
def test_it_crosses_pcie_only_where_all_others_are_a_tenth_slower(device, rows, is_kept):
    """Up to a twentieth, it does not cross since data parallelism alone is simpler."""
    times = {tp: planned_on_pcie(device, rows, 0.0, tp).predicted.step_time_s for tp in (1, 2, 4)}
    plan, fastest = planned_on_pcie(device, rows, 0.02), min(times.values())
    assert plan.certificate.fastest_s == pytest.approx(fastest)
    assert (plan.mesh.tp == 1) == (times[1] <= (1 + INSIDE) * fastest)
    is_far = times[1] > (1 + UNSPLIT * 0.02) * fastest
    assert plan.certificate.tp_inside == (plan.mesh.tp == 1 and is_far) == is_kept


def test_a_rival_on_fast_links_takes_the_place_of_a_plan_that_crosses(monkeypatch):
    """The time may be over before plans on fast links are looked for."""
    monkeypatch.setattr(Preference, "chosen", lambda self, found, *_: found)
    plan = planned_on_pcie.__wrapped__("a10g", 4, 0.02, rivals=True)
    crossing = planned_on_pcie("a10g", 4, 0.0)
    assert plan.mesh.tp == 1 < crossing.mesh.tp and plan.certificate.tp_inside
    assert plan.certificate.fastest_s == pytest.approx(crossing.predicted.step_time_s)
    assert planned_on_pcie.__wrapped__("l4", 4, 0.02, rivals=True).mesh.tp > 1  # 16 % slower


@pytest.mark.parametrize(
    "asked",
    [{"tolerance": 0.0}, {"tolerance": 0.02, "tp": 4}, {"tolerance": 0.02, "inside": False}],
)
def test_a_pin_no_tolerance_and_other_objectives_lift_it(asked):
    plan = planned(100.0, **asked)
    assert plan.mesh.tp == 4 and not plan.certificate.tp_inside


def test_it_stays_inside_after_a_search_that_its_time_ended(monkeypatch):
    """What is left of the time is for plans inside nodes, before it is for simpler ones."""
    rate = next(rate for rate in RATES if 1 < seconds(rate)[2] / seconds(rate)[4] < 1 + INSIDE)
    whole, real = branch_and_bound.search, Preference._simplest

    def late(self, *given):
        """No time is left after it."""
        monkeypatch.setattr(Preference, "_simplest", real)
        monkeypatch.setattr(simplest, "fastest", lambda *_: (None, 0))
        return real(replace(self, until=0.0), *given)

    def cut(*given):
        monkeypatch.setattr(Preference, "_simplest", late)
        return replace(whole(*given), status="feasible")

    monkeypatch.setattr(planner, "search", cut)
    plan = planned.__wrapped__(rate, 0.02)
    assert plan.mesh.tp == 2 and plan.certificate.tp_inside
    assert plan.certificate.fastest_s == pytest.approx(seconds(rate)[4])


def test_the_objective_says_what_it_costs():
    plan = planned(100.0, 0.02)
    chosen = choose(Goal(), lambda pin, at: plan, ClusterSpec.parse("h100:4"), {}, print)
    assert "whose tensor parallelism crosses nodes or PCIe" in chosen.claim


def test_crossing_is_that_of_some_group_of_ranks():
    axes = ("pp", "dp", "cp", "tp")
    for sizes in product((1, 2, 3, 4), repeat=4):
        for order in ("", "tp-dp", "dp-pp-tp", "tp-pp-dp"):
            mesh = MeshShape(**dict(zip(axes, sizes, strict=True)), order=order)
            stride, size, count = mesh.stride("tp"), mesh.tp, mesh.num_devices
            groups = {
                tuple(sorted(first + k * stride for k in range(size)))
                for first in range(count)
                if first // stride % size == 0
            }
            for per_node in (1, 2, 4, 6, 8):
                if count % per_node:
                    continue
                crosses = any(len({rank // per_node for rank in group}) > 1 for group in groups)
                assert mesh.crosses_nodes("tp", per_node) == crosses, (mesh, per_node)
