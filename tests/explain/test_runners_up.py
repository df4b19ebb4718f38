"""Simple plans and runners-up: real plans, priced as their pins are, and the same in every run."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
from support.effort import examples
from support.explain_tasks import task, words_of

from autopar import api
from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.compare import ComparedPlan, compare, compare_reply
from autopar.explaining.plan_report import plan_data, plan_text
from autopar.explaining.runners_up import none_words, preference_words, simplicity_of_plan, why
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.planning import planner
from autopar.request.pins import Pins, pins_of_entry
from autopar.request.plan_request import PlanRequest
from autopar.solve.search import families, steps
from autopar.solve.search.families import FAMILIES
from autopar.solve.search.limits import SearchLimits
from autopar.solve.search.workers import Team

MODEL, CLUSTER = "llama:layers=2,hidden=512,heads=4,vocab=1024,seq=64", "h100:4"


def planned(tolerance: float = 0.02, pin: dict | None = None) -> Plan:
    return _planned(tolerance, tuple((pin or {}).items()))


@cache
def _planned(tolerance: float, pin: tuple) -> Plan:
    t = task(MODEL, CLUSTER, 8, 64)
    cluster = t.cluster
    request = PlanRequest(
        cluster, 8, Pins.of(dict(pin)), "bf16", MODEL, tolerance=tolerance, runners_up=True
    )
    return api.plan_traced(t.traced, request)


def test_a_runner_up_is_the_plan_under_its_choices():
    plan = planned()
    found = [entry for entry in plan.certificate.runners_up if entry["time_s"] is not None]
    assert len(found) >= 3 and len({entry["family"] for entry in found}) == len(found)
    assert [entry["time_s"] for entry in found] == sorted(entry["time_s"] for entry in found)
    for entry in found[: examples(1, 3)]:
        again = planned(0.0, pins_of_entry(entry))
        assert again.predicted.step_time_s <= entry["time_s"] * (1 + 1e-9)
        assert again.predicted.step_time_s >= entry["time_s"] * 0.98
        assert sum(entry["breakdown"].values()) == pytest.approx(entry["time_s"])
        assert plan.certificate.bound_s <= entry["bound_s"] <= entry["time_s"] * (1 + 1e-9)


def test_none_fits_is_said_only_where_it_is_proved(monkeypatch):
    """Nothing is found in any other family; the search has proved of TP alone that nothing fits."""
    real = planner.search

    def proved(candidates, *rest):
        found = real(candidates, *rest)
        outcomes = tuple(
            entry | {"bound_s": None if families.family_of(c) == "TP" else 1e-9}
            for c, entry in zip(candidates, found.outcomes, strict=True)
        )
        return replace(found, outcomes=outcomes)

    monkeypatch.setattr(planner, "search", proved)
    monkeypatch.setattr(families, "_best_of", lambda *_: (None, 0))
    monkeypatch.setattr(families, "BOUNDED", 0)
    plan = _planned.__wrapped__(0.0, ())
    assert all(entry["time_s"] is None for entry in plan.certificate.runners_up)
    words = {entry["family"]: none_words(entry) for entry in plan.certificate.runners_up}
    assert len(words) > 3 and words.pop("TP") == "none fits"
    assert set(words.values()) == {"none found"}


def test_a_plan_that_only_the_search_has_is_the_best_of_its_family(monkeypatch):
    real = planner.search

    def solved(candidates, *rest):
        found = real(candidates, *rest)
        outcomes = [
            one | {"outcome": "solved", "time_s": 2.0 + k, "memory_bytes": 2**30}
            if families.family_of(c) == "TP"
            else one
            for k, (c, one) in enumerate(zip(candidates, found.outcomes, strict=True))
        ]
        return replace(found, outcomes=tuple(outcomes))

    monkeypatch.setattr(planner, "search", solved)
    monkeypatch.setattr(families, "_best_of", lambda *_: (None, 0))
    monkeypatch.setattr(families, "BOUNDED", 0)
    plan = _planned.__wrapped__(0.0, ())
    (tp,) = (one for one in plan.certificate.runners_up if one["family"] == "TP")
    least_s = min(one["time_s"] for one in plan.certificate.meshes if (one["time_s"] or 0) > 1)
    assert tp["time_s"] == least_s and tp["mesh"]["tp"] > 1 and tp["breakdown"] is None
    assert "slower" in why(plan, tp) and "TP" in plan_text(plan)
    assert Plan.from_json(plan.to_json()).certificate.runners_up == plan.certificate.runners_up


def test_families_are_searched_until_a_plan_fits(monkeypatch):
    real, tried = families.fastest, []

    def in_vain(restager, parts, *rest):
        tried.append(len(parts))
        return (None, 0) if len(tried) < 5 else real(restager, parts, *rest)

    monkeypatch.setattr(families, "BOUNDED", 0)
    t = task(MODEL, CLUSTER, 8, 64)
    request = PlanRequest(t.cluster, 8, Pins(), "bf16", MODEL)
    plan = api.plan_traced(t.traced, replace(request, runners_up=True))
    assert all(entry["solved"] <= families.STAGED for entry in plan.certificate.runners_up)
    monkeypatch.setattr(families, "fastest", in_vain)
    again = api.plan_traced(t.traced, replace(request, runners_up=True))
    first, *others = sorted(again.certificate.runners_up, key=lambda entry: -entry["solved"])
    assert tried[:5] == [families.STAGED, 1, 1, 1, 1] and first["solved"] == families.STAGED + 4
    assert first["time_s"] and all(entry["solved"] <= families.STAGED for entry in others)


@pytest.mark.slow
def test_no_plan_of_a_family_is_faster_than_its_bound():
    """Whatever mesh is pinned inside of a family; and its best plan is near the best of these."""
    proof = planned(tolerance=0.0).certificate
    times_s: dict[str, list[float]] = {entry["family"]: [] for entry in proof.runners_up}
    t = task(MODEL, CLUSTER, 8, 64)
    request = PlanRequest(t.cluster, 8, Pins(), "bf16", MODEL, tolerance=0)
    choices = {(*entry["mesh"].items(), ("zero", entry["zero"])) for entry in proof.meshes}
    for pin in map(dict, sorted(choices, key=repr)):
        mesh = MeshShape(**{name: size for name, size in pin.items() if name != "zero"})
        family = families.family_of(SimpleNamespace(mesh=mesh, zero=pin["zero"]))
        names = ("tp", "pp", "cp", "dp", "zero")
        pins = Pins.of({name: pin[name] for name in names if pin[name] is not None})
        if family in times_s:
            with suppress(NoPlanFits):
                plan = api.plan_traced(t.traced, replace(request, pin=pins))
                times_s[family].append(plan.predicted.step_time_s)
    assert len(times_s) > 3 and sum(map(len, times_s.values())) > 8
    for entry in proof.runners_up:
        least_s = min(times_s[entry["family"]])
        assert entry["bound_s"] <= least_s * (1 + 1e-9)
        assert entry["time_s"] * (1 - families.NEAR) <= least_s * (1 + 1e-9)


@pytest.mark.slow
def test_several_processes_find_the_same_runners_up(monkeypatch):
    helpers = []

    class Watched(Team):
        def call(self, number, work):
            helpers.append(FAMILIES[number])
            # the first one dies
            return super().call(number, work if len(helpers) > 1 else lambda *_: os._exit(1))

    monkeypatch.setattr(planner, "SearchLimits", partial(SearchLimits, alone_s=0.0))
    monkeypatch.setattr(families, "Team", Watched)
    t, plans = task(MODEL, CLUSTER, 8, 64), []
    request = PlanRequest(t.cluster, 8, Pins(), "bf16", MODEL, runners_up=True)
    for processes in (1, 3):
        plans.append(planner.plan_traced(t.traced, request, processes=processes))
        assert (len(helpers) > 1) == (processes > 1)
    assert plans[0].certificate.runners_up == plans[1].certificate.runners_up


def test_layouts_of_recipes_are_among_those_that_are_sketched(monkeypatch):
    sketched, asked, real = [], [], planner.common_layouts

    def layouts(candidates, devices_per_node):
        asked.extend(candidates[n] for n in real(candidates, devices_per_node))
        return real(candidates, devices_per_node)

    class Watched(planner.Restager):
        def likely_s(self, part):
            sketched.extend(part.group)
            return super().likely_s(part)

    monkeypatch.setattr(planner, "common_layouts", layouts)
    monkeypatch.setattr(planner, "Restager", Watched)
    monkeypatch.setattr(families, "SKETCHED", 1)
    t = task(MODEL, CLUSTER, 8, 64)
    request = PlanRequest(t.cluster, 8, Pins(), "bf16", MODEL, runners_up=True)
    plan = planner.plan_traced(t.traced, request, processes=1)
    found = {entry["family"] for entry in plan.certificate.runners_up if entry["solved"]}
    common = {families.family_of(c) for c in asked}
    assert found & common
    for family in found & common:
        assert any(c in asked for c in sketched if families.family_of(c) == family)
        assert any(c not in asked for c in sketched if families.family_of(c) == family)


def test_the_plan_is_within_the_tolerance_and_no_more_complicated_than_the_fastest():
    fastest = planned(0.0)
    for tolerance in (0.02, 0.2, 0.9):
        plan = planned(tolerance)
        assert plan.predicted.step_time_s <= (1 + tolerance) * fastest.predicted.step_time_s
        assert simplicity_of_plan(plan) <= simplicity_of_plan(fastest)
        assert plan.certificate.gap <= 1e-3 and plan.certificate.tolerance == tolerance
        assert [e["outcome"] for e in plan.certificate.meshes].count("chosen") == 1
        if plan.predicted.step_time_s > fastest.predicted.step_time_s * (1 + 1e-3):
            assert plan.certificate.fastest["time_s"] == fastest.predicted.step_time_s
            assert "proved optimum is" in preference_words(plan)
    assert planned(0.9).mesh.num_devices == 4 and simplicity_of_plan(planned(0.9)).axes == 1


def test_a_search_that_met_only_slow_plans_takes_the_best_family(monkeypatch):
    real = planner.search

    def ended_early(candidates, *rest):
        whole = real(candidates, *rest)
        slow = real([c for c in candidates if c.mesh.tp == 4], *rest[:-1])
        assert slow.fastest_s > 1.05 * whole.fastest_s
        return replace(
            whole, status="feasible", best=slow.best, model=slow.model, origin=slow.origin
        )

    monkeypatch.setattr(planner, "search", ended_early)
    plan, fastest = _planned.__wrapped__(0.02, ()), planned(0.0)
    assert plan.predicted.step_time_s <= 1.02 * fastest.predicted.step_time_s
    assert [e["outcome"] for e in plan.certificate.meshes].count("chosen") == 1
    families = [e["family"] for e in plan.certificate.runners_up]
    assert len(set(families)) == len(families) and "TP" in families


def test_a_search_that_met_only_complicated_plans_takes_a_simpler_family(monkeypatch):
    real = planner.search

    def ended_early(candidates, *rest):
        whole = real(candidates, *rest)
        both = real([c for c in candidates if c.mesh.tp == 2 == c.mesh.dp], *rest[:-1])
        unknown = tuple(entry | {"bound_s": 0.0} for entry in whole.outcomes)
        found = {"best": both.best, "model": both.model, "origin": both.origin, "outcomes": unknown}
        return replace(whole, status="feasible", **found)

    monkeypatch.setattr(planner, "search", ended_early)
    plan, exact = _planned.__wrapped__(0.9, ()), _planned.__wrapped__(0.0, ())
    assert simplicity_of_plan(exact).axes == 2 and simplicity_of_plan(plan).axes == 1
    assert plan.predicted.step_time_s <= 1.9 * exact.predicted.step_time_s
    assert plan.certificate.simpler_left == 0  # one axis is the simplest on 4 devices
    families = [e["family"] for e in plan.certificate.runners_up]
    assert len(set(families)) == len(families) and "TP" in families


def test_a_faster_runner_up_is_the_fastest_plan_that_was_found(monkeypatch):
    real = planner.search

    def ended_early(candidates, *rest):
        whole = real(candidates, *rest)
        slow = real([c for c in candidates if c.mesh.tp == 4], *rest[:-1])
        unknown = tuple(entry | {"bound_s": 0.0} for entry in whole.outcomes)
        found = {"best": slow.best, "model": slow.model, "origin": slow.origin, "outcomes": unknown}
        return replace(whole, status="feasible", **found)

    monkeypatch.setattr(planner, "search", ended_early)
    plan = _planned.__wrapped__(0.9, ())
    proof = plan.certificate
    first = proof.runners_up[0]
    assert simplicity_of_plan(plan).axes == 1 and first["time_s"] < plan.predicted.step_time_s
    assert proof.fastest["time_s"] == first["time_s"] == proof.fastest_s
    assert "fastest plan that was found is" in preference_words(plan) or proof.gap <= 1e-3


def test_simpler_plans_without_time_are_said(monkeypatch):
    real = planner.search

    def ended_early(candidates, *rest):
        whole = real(candidates, *rest)
        both = real([c for c in candidates if c.mesh.tp == 2 == c.mesh.dp], *rest[:-1])
        found = {"best": both.best, "model": both.model, "origin": both.origin}
        return replace(whole, status="feasible", **found)

    monkeypatch.setattr(planner, "search", ended_early)
    monkeypatch.setattr(planner, "_CHOSEN_SHARE", 0.0)
    monkeypatch.setattr(planner, "simpler_of", lambda *_: None)
    plan = _planned.__wrapped__(0.9, ())
    assert simplicity_of_plan(plan).axes == 2 and plan.certificate.simpler_left > 0
    assert "left without a proof" in preference_words(plan)


@pytest.mark.parametrize("late", [False, True])
def test_pinned_stages_say_whether_time_ended_the_solver(monkeypatch, late):
    """Simpler plans are not looked for with pinned stages, and none is said to be missing."""
    real = steps.solve_prepared

    def solve(*args):
        found = real(*args)
        return replace(found, status="feasible") if late and hasattr(found, "status") else found

    monkeypatch.setattr(steps, "solve_prepared", solve)
    plan = _planned.__wrapped__(0.02, (("pp", 2), ("stages", "even"), ("recompute", "none")))
    assert plan.certificate.is_cut == late
    assert plan.certificate.tolerance == 0 and preference_words(plan) == ""


def test_equal_requests_print_equal_reports():
    again = _planned.__wrapped__(0.02, ())
    assert again is not planned() and plan_text(planned()) == plan_text(again)


def test_a_plan_with_runners_up_is_a_plan_file():
    plan = planned()
    assert Plan.from_json(json.dumps(plan_data(plan))) == plan
    shown = plan_text(plan)
    assert "FSDP" in shown or "data parallel" in shown
    assert all(
        entry["family"] in " ".join(shown.split()) for entry in plan.certificate.runners_up[:1]
    )


def test_compare_without_pins_compares_the_families():
    t = task(MODEL, CLUSTER, 8, 64)
    plan = planned()
    entries = compare(
        lambda pin, cluster: planned(0.0 if pin else 0.02, dict(pin)), t.cluster, [], []
    )
    names = [entry.name for entry in entries if isinstance(entry, ComparedPlan)]
    assert names[0] == "best" and set(names[1:]) <= {
        e["family"] for e in plan.certificate.runners_up
    }
    assert "step time" in words_of(compare_reply(entries, t.cluster))


def test_headroom_is_kept_and_its_price_printed():
    t = task(MODEL, CLUSTER, 8, 64)
    tight = t.cluster.with_memory(5 * 2**29)
    request = PlanRequest(tight.kept_free(0.2), 8, Pins(), "bf16", MODEL, runners_up=True)
    plan = api.plan_traced(t.traced, request)
    assert max(plan.predicted.peak_memory_bytes) <= 0.8 * tight.device.memory_bytes
    assert plan.certificate.headroom == 0.2 and plan.certificate.unlimited_s is not None
    assert plan.certificate.unlimited_s <= plan.predicted.step_time_s * (1 + 1e-9)
    assert "(20.0 %) kept free" in " ".join(plan_text(plan).split())


def test_the_price_of_headroom_is_that_of_the_best_micro_batch():
    t = task(MODEL, CLUSTER, 8, 64)
    tight, pins = t.cluster.with_memory(5 * 2**29), Pins.of({"tp": 1, "pp": 1})
    kept, whole = (
        api.plan_traced(
            t.traced,
            PlanRequest(tight.kept_free(share), 512, pins, "bf16", MODEL, runners_up=True),
        )
        for share in (0.2, 0.0)
    )
    assert kept.mesh == whole.mesh and kept.micro_batch < whole.micro_batch
    assert kept.certificate.unlimited_s == pytest.approx(whole.predicted.step_time_s, rel=1e-3)
    assert whole.certificate.unlimited_s == whole.predicted.step_time_s


@pytest.mark.parametrize("wrong", [-0.1, 1.0, float("nan")])
def test_tolerances_that_are_none(wrong):
    with pytest.raises(AutoparError, match="must be a fraction from 0"):
        replace(PlanRequest(ClusterSpec.parse("cpu:1"), 1, Pins(), "fp32", "m"), tolerance=wrong)


ODD = (None, -1, True, "x", [], {}, {"x": 1}, float("nan"))


def test_a_damaged_runner_up_is_refused_or_said():
    """A plan file whose runners-up or fastest plan were edited is never another error."""
    plan = planned()
    data = json.loads(plan.to_json())
    proof = data["certificate"]
    proof["meshes"], proof["ledger"] = proof["meshes"][:1], []
    proof["runners_up"], refused = proof["runners_up"][:1], set()
    holders = {
        "runner-up": lambda proof: proof["runners_up"][0],
        "mesh": lambda proof: proof["runners_up"][0]["mesh"],
        "fastest": lambda proof: proof["fastest"],
    }
    proof["fastest"] = holders["runner-up"](proof)
    for name, holder in holders.items():
        for key in holder(proof):
            for value in (*ODD, "removed"):
                text = json.loads(json.dumps(data))
                where = holder(text["certificate"])
                where[key] = value
                if value == "removed":
                    del where[key]
                try:
                    words_of(plan_text(Plan.from_json(json.dumps(text))))
                except AutoparError as error:
                    assert "not a complete plan" in str(error)
                    refused.add((name, key))
    assert {("runner-up", "memory_bytes"), ("mesh", "pp"), ("fastest", "schedule")} <= refused
