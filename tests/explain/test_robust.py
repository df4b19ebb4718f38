"""Robustness: against planning on a cluster that is changed by hand, and against made-up planners whose regrets are known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.explain_tasks import task, words_of

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.robust import Scenario, robust_reply, robustness, scenarios_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.request.pins import choices_of, pins_of

NAMES = ("compute rate", "memory bandwidth", "bandwidth in nodes", "bandwidth between nodes")


def changed(cluster: ClusterSpec, name: str, factor: float) -> ClusterSpec:
    """The cluster of a scenario, made by hand."""
    device, topology = cluster.device, cluster.topology
    match name:
        case "compute rate":
            return replace(
                cluster,
                device=replace(
                    device, flops={dtype: factor * rate for dtype, rate in device.flops.items()}
                ),
            )
        case "memory bandwidth":
            return replace(
                cluster,
                device=replace(device, memory_bandwidth_Bps=factor * device.memory_bandwidth_Bps),
            )
        case "bandwidth in nodes":
            link = replace(topology.intra, bandwidth_Bps=factor * topology.intra.bandwidth_Bps)
            return replace(cluster, topology=replace(topology, intra=link))
        case "bandwidth between nodes":
            link = replace(topology.inter, bandwidth_Bps=factor * topology.inter.bandwidth_Bps)
            return replace(cluster, topology=replace(topology, inter=link))
        case "memory need":
            return replace(
                cluster, device=replace(device, memory_bytes=int(device.memory_bytes / factor))
            )


@pytest.mark.slow
def test_regrets_are_those_of_plans_made_directly():
    t = task("gpt:layers=2,hidden=512,heads=8,vocab=4096", "cpu:4", 8, 512)
    pin = {"zero": 0, "tp": 2}
    cluster = replace(t.cluster, topology=replace(t.cluster.topology, nodes=2, devices_per_node=2))
    cluster = cluster.with_memory(int(0.97 * max(t.plan(pin, cluster).predicted.peak_memory_bytes)))
    scenarios = scenarios_of(cluster, 0.1)
    assert [str(scenario) for scenario in scenarios] == [
        f"{name} {sign}10 %" for name in (*NAMES, "memory need") for sign in "-+"
    ]
    scenarios = (scenarios[0], scenarios[6], *scenarios[8:])  # the others are tested below
    found = robustness(t.plan, cluster, pin, scenarios)
    chosen = t.plan(pin, cluster)
    assert found.chosen.plan == chosen
    for number, scenario in enumerate(scenarios):
        ((name, factor),) = scenario.factors.items()
        there = changed(cluster, name, factor)
        best = t.plan(pin, there)
        assert found.best_s(number) == pytest.approx(best.predicted.step_time_s) and choices_of(
            found.best[number]
        ) == choices_of(best)
        try:
            own_s = t.plan(pins_of(chosen), there).predicted.step_time_s
        except NoPlanFits:
            own_s = None
        if name == "memory need" and factor > 1:
            assert found.misfits(found.chosen) == [number]
            assert factor * max(chosen.predicted.peak_memory_bytes) > cluster.device.memory_bytes
            assert best.predicted.step_time_s > chosen.predicted.step_time_s
        else:
            assert found.regret(found.chosen, number) == pytest.approx(
                own_s / best.predicted.step_time_s - 1, abs=1e-9
            )
    regrets = [found.regret(found.chosen, number) for number in range(len(scenarios) - 1)]
    assert found.worst(found.chosen)[0] == max(regrets) > 0.001
    data = json.loads(robust_reply(found).json())
    assert (
        data["worst_regret"] == max(regrets)
        and data["does_not_fit"] == ["memory need +10 %"]
        and data["most_robust"] is None
    )
    assert data["scenarios"][-1]["regret"] is None and data["scenarios"][-1]["best"] is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_slower_machine_takes_longer(name):
    """A plan that uses all of the machine."""
    t = task("gpt:layers=2,hidden=512,heads=8,vocab=4096", "h100:4", 8, 256)
    cluster = replace(t.cluster, topology=replace(t.cluster.topology, nodes=2, devices_per_node=2))
    pin = {"tp": 2, "dp": 2, "zero": 0, "micro_batch": 4, "recompute": "none"}
    slow, now, fast = (
        t.plan(pin, Scenario({name: factor}).cluster(cluster)).predicted.step_time_s
        for factor in (0.5, 1.0, 2.0)
    )
    assert slow > 1.001 * now and now > 1.001 * fast and fast > 0.5 * now


def test_measured_curves_follow():
    points = ((1e6, 1e-5), (1e9, 1e-3))
    cluster = ClusterSpec.parse("cpu:2")
    curves = {
        name: {2: points}
        for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "point_to_point")
    }
    device = replace(cluster.device, matmul_curves={"fp32": points}, memory_curve=points)
    cluster = replace(
        cluster,
        device=device,
        topology=replace(cluster.topology, intra=replace(cluster.topology.intra, curves=curves)),
    )
    half = Scenario(
        {"compute rate": 0.5, "memory bandwidth": 0.5, "bandwidth in nodes": 0.5}
    ).cluster(cluster)
    doubled = ((1e6, 2e-5), (1e9, 2e-3))
    assert half.device.matmul_curves == {"fp32": doubled} and half.device.memory_curve == doubled
    assert (
        half.topology.intra.curves["all_to_all"] == {2: doubled}
        and half.topology.inter == cluster.topology.inter
    )


def test_scenarios():
    one = scenarios_of(ClusterSpec.parse("h100:1"))
    assert (
        list(map(str, one))[1:4]
        == ["compute rate +20 %", "memory bandwidth -20 %", "memory bandwidth +20 %"]
        and len(one) == 6
    )
    both = scenarios_of(ClusterSpec.parse("dgx-h100:2"), 0.1, together=True)
    assert len(both) == 10 + 16 and all(
        set(scenario.factors.values()) <= {0.9, 1.1} for scenario in both
    )
    for off in (0.0, 1.0, -0.2):
        with pytest.raises(AutoparError, match="cannot be off by"):
            scenarios_of(ClusterSpec.parse("h100:1"), off)


FAKE = {1: (10.0, 70), 2: (10.1, 60), 4: (10.05, 70), 8: (12.0, 20)}
"""tp -> (seconds, GiB of 79.65); seconds go with the inverse of the compute rate, with tp=1 of its square."""


def fake_plan_on(pin, cluster):
    """Plans that differ in tp."""
    t = task()
    base, rate, room = (
        t.plan(),
        cluster.device.flops["bf16"] / t.cluster.device.flops["bf16"],
        cluster.device.memory_bytes,
    )
    times = {
        tp: step_s / rate ** (2 if tp == 1 else 1)
        for tp, (step_s, size) in FAKE.items()
        if size * 2**30 <= room
    }
    wanted = {tp: step_s for tp, step_s in times.items() if tp == pin.get("tp", tp)}
    if not wanted:
        raise NoPlanFits("too large", 1)
    tp = min(wanted, key=wanted.get)
    entries = tuple({"mesh": {"pp": 1, "dp": 8 // other, "cp": 1, "tp": other, "ep": 1}, "micro_batch": 1, "zero": 0,
                     "recompute": "none", "outcome": "chosen" if other == tp else "pruned", "time_s": None, "bound_s": 9.9}
                    for other in FAKE)  # fmt: skip
    predicted = replace(
        base.predicted, step_time_s=wanted[tp], peak_memory_bytes=(FAKE[tp][1] * 2**30,)
    )
    return replace(
        base,
        mesh=MeshShape(dp=8 // tp, tp=tp),
        predicted=predicted,
        certificate=replace(base.certificate, meshes=entries),
    )


def test_the_most_robust_of_those_that_are_near():
    cluster = task().cluster
    found = robustness(fake_plan_on, cluster, {}, scenarios_of(cluster), near=0.03)
    assert [one.plan.mesh.tp for one in found.priced] == [1, 4, 2]  # tp=8 is 20 % slower
    regret, scenario = found.worst(found.chosen)
    assert str(scenario) == "compute rate -20 %" and regret == pytest.approx(
        10.0 / 0.8**2 / (10.05 / 0.8) - 1
    )
    assert (
        found.misfits(found.chosen)
        and found.misfits(found.priced[1])
        and not found.misfits(found.priced[2])
    )
    assert found.worst(found.priced[1])[0] < found.worst(found.priced[2])[0]
    # it fits if plans need more memory, which 4 does not
    assert found.most_robust.plan.mesh.tp == 2
    shown = words_of(robust_reply(found))
    assert (
        f"Worst regret where it fits: {100 * regret:.1f} % (compute rate -20 %)" in shown
        and "Plans within 3.0 % of the chosen" in shown
    )
    assert (
        "With memory need +20 % it does not fit: 84.00 GiB of 79.65 GiB; the best found that does takes 1.0 % longer"
        in shown
    )
    assert "Most robust: dp=4 tp=2" in shown
    data = json.loads(robust_reply(found).json())
    assert [one["choices"]["tp"] for one in data["candidates"]] == [1, 4, 2] and data[
        "most_robust"
    ]["mesh"]["tp"] == 2


def test_a_search_that_had_no_time_is_no_misfit():
    cluster, calls = task().cluster, []

    def plan_on(pin, at):
        calls.append(at)
        if len(calls) > 1:
            raise NoPlanFits("no plan that fits was found", proven=False)
        return fake_plan_on(pin, at)

    with pytest.raises(NoPlanFits, match="no plan that fits was found"):
        robustness(plan_on, cluster, {}, scenarios_of(cluster))
