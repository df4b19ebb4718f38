"""sweep: a row a point, scaling efficiency, the Pareto front, and the bandwidths at which the plan changes."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.explain_tasks import task, text_of, words_of

from autopar.errors import AutoparError
from autopar.explaining.sweep import (
    BREAK_EVEN_RATIO,
    Point,
    SweepRow,
    pareto,
    points_of,
    sweep,
    sweep_reply,
)
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape


def swept(cluster: ClusterSpec, **axes):
    t = task()
    points = points_of(
        cluster,
        axes.get("gpus", ()),
        axes.get("seq", ()),
        axes.get("batch", (16,)),
        axes.get("inter", ()),
    )
    return sweep(
        lambda at, seq, batch, pin: t.plan(pin, at, batch), cluster, points, lambda text: None
    )


@pytest.mark.slow
def test_a_row_is_the_plan_of_its_point():
    t = task()
    found = swept(replace(t.cluster, price_per_device_hour=3.0), gpus=(2, 4, 8), batch=(8, 16))
    assert found.axes == ("devices", "global_batch") and len(found.rows) == 6
    assert [(row.point.devices, row.point.global_batch) for row in found.rows] == [
        (2, 8),
        (2, 16),
        (4, 8),
        (4, 16),
        (8, 8),
        (8, 16),
    ]
    last = found.rows[-1]
    assert last.plan.predicted == t.plan().predicted and last.plan.mesh.num_devices == 8
    assert last.rate == pytest.approx(16 * 32 / last.plan.predicted.step_time_s / 8)
    assert last.cost == pytest.approx(
        3.0 * 8 / 3600 * last.plan.predicted.step_time_s / (16 * 32) * 1e6
    )
    data = json.loads(sweep_reply(found, "m", t.cluster).json())
    assert data["rows"][0]["efficiency"] == 1.0 and data["rows"][-1]["efficiency"] == pytest.approx(
        last.rate / found.rows[0].rate
    )
    assert data["rows"][-1]["dollars_per_million_tokens"] == pytest.approx(last.cost)
    shown = text_of(sweep_reply(found, "llama-tiny", replace(t.cluster, price_per_device_hour=3.0)))
    assert "$/M" in shown and "tok/s/GPU" in shown and "6 points" in shown and "100.0" in shown


def test_one_point_is_a_sweep():
    t = task()
    found = swept(t.cluster)
    assert found.axes == () and len(found.rows) == 1 and pareto(found.rows) == [True]
    shown = text_of(sweep_reply(found, "llama-tiny", t.cluster))
    assert "1 point" in shown and "GPUh/M" in shown and " * " in shown and "bandwidth" not in shown


def test_a_point_without_plan_has_its_reason():
    found = swept(task().cluster, gpus=(8, 31 * 8), batch=(16, 3))
    reasons = {
        (row.point.devices, row.point.global_batch): getattr(row, "reason", "")
        for row in found.rows
    }
    assert not reasons[8, 16] and "batch of 3" in reasons[248, 3]
    best = dict(zip(reasons, pareto(found.rows), strict=True))
    assert not best[248, 3] and any(best.values())
    assert f"248 GPUs, batch 3: {reasons[248, 3]}." in words_of(
        sweep_reply(found, "llama-tiny", task().cluster)
    )
    assert json.loads(sweep_reply(found, "m", task().cluster).json())["rows"][-1]["plan"] is None


def test_points_that_cannot_be():
    eight = task().cluster
    with pytest.raises(AutoparError, match="12 devices are neither"):
        points_of(eight, (8, 12), (), (16,), ())
    with pytest.raises(AutoparError, match="is one node"):
        points_of(eight, (), (), (16,), (1e9,))


def test_every_combination_is_a_point_and_bandwidths_ascend():
    found = points_of(ClusterSpec.parse("dgx-h100:2"), (16, 32), (64,), (16, 32), (5e9, 1e9))
    assert (
        len(found) == 8
        and [p.inter_Bps for p in found[:4]] == [1e9, 5e9, 1e9, 5e9]
        and found[0] == Point(16, 64, 16, 1e9)
    )


def fake_plans(times):
    """A planner of plans that differ in tp, and take times[tp](bandwidth in GB/s) seconds; with the number of its calls."""
    base, calls = task().plan(), []

    def plan_at(cluster, seq, batch, pin):
        rate = cluster.topology.inter.bandwidth_Bps / 1e9
        calls.append(rate)
        tp = pin.get("tp") or min(times, key=lambda tp: times[tp](rate))
        predicted = replace(base.predicted, step_time_s=times[tp](rate))
        return replace(base, mesh=MeshShape(dp=16 // tp, tp=tp), predicted=predicted)

    return plan_at, calls


def break_evens(times, rates):
    plan_at, calls = fake_plans(times)
    cluster = ClusterSpec.parse("dgx-h100:2")
    found = sweep(
        plan_at,
        cluster,
        points_of(cluster, (), (), (16,), [1e9 * rate for rate in rates]),
        lambda text: None,
    )
    return found, [(change.below.mesh.tp, change.below_Bps / 1e9, change.above.point.inter_Bps / 1e9, change.above.plan.mesh.tp)
                   for change in found.break_evens], len(calls)  # fmt: skip


def test_a_break_even_brackets_where_a_plan_ceases_to_be_good():
    """tp=8 takes 12 + 20 / b, tp=2 takes 10 + 100 / b: within 1 % of each other up to b = 81 / 1.9."""
    found, changes, calls = break_evens(
        {8: lambda b: 12 + 20 / b, 2: lambda b: 10 + 100 / b}, (10, 100, 400)
    )
    assert len(changes) == 1 and calls < 30
    before, low, high, after = changes[0]
    assert (before, after) == (8, 2) and low <= 81 / 1.9 <= high <= BREAK_EVEN_RATIO * low
    shown = words_of(sweep_reply(found, "m", ClusterSpec.parse("dgx-h100:2")))
    assert (
        f"the plan changes between {low:.4g} and {high:.4g} GB/s between nodes: below it is dp=2 tp=8"
        in shown
    )
    data = json.loads(sweep_reply(found, "m", ClusterSpec.parse("dgx-h100:2")).json())[
        "break_evens"
    ][0]
    assert data["below"]["tp"] == 8 and data["above"]["tp"] == 2 and data["below_Bps"] == low * 1e9


def test_several_changes_in_one_interval_are_all_found():
    times = {16: lambda b: 20 + 10 / b, 4: lambda b: 15 + 60 / b, 1: lambda b: 10 + 300 / b}
    _, changes, _ = break_evens(times, (1, 1000))
    assert [(before, after) for before, _, _, after in changes] == [(16, 4), (4, 1)]
    # after they are equal, at b = 10 and 48
    assert 50 / 5 <= changes[0][2] <= 20 and 240 / 5 <= changes[1][2] <= 80


def test_gaps_are_told():
    plan_at, _ = fake_plans({8: lambda b: 12 + 20 / b, 2: lambda b: 10 + 100 / b})

    def unproven(cluster, seq, batch, pin):
        plan = plan_at(cluster, seq, batch, pin)
        return replace(
            plan, certificate=replace(plan.certificate, gap=0.25 if plan.mesh.tp == 2 else 0.0)
        )

    cluster = ClusterSpec.parse("dgx-h100:2")
    points = points_of(cluster, (), (), (16,), [1e10, 1e11])
    found = sweep(unproven, cluster, points, lambda text: None)
    shown = words_of(sweep_reply(found, "m", cluster))
    assert (
        "another plan may be faster): 100 GB/s: 25 %." in shown
        and "Plans at a change are not proven best" in shown
    )
    assert [row["gap"] for row in sweep_reply(found, "m", cluster).data["rows"]] == [0.0, 0.25]
    proven = words_of(sweep_reply(sweep(plan_at, cluster, points, lambda text: None), "m", cluster))
    assert "Not proven best" not in proven and "Plans at a change" not in proven


def test_ties_are_no_change():
    """The two are best in turn, by a tenth of a percent."""
    times = {8: lambda b: 10 + 0.005 * (int(b) % 2), 4: lambda b: 10.0025}
    found, changes, _ = break_evens(times, (10, 11, 200))
    assert len({row.plan.mesh.tp for row in found.rows}) == 2 and not changes
    assert "No bandwidth changes the plan" in text_of(
        sweep_reply(found, "m", ClusterSpec.parse("dgx-h100:2"))
    )


@given(st.lists(st.tuples(*[st.integers(1, 4)] * 3), min_size=1, max_size=8))
def test_the_pareto_front_is_what_nothing_dominates(merits):
    base, rows = task().plan(), []
    for (
        step,
        cost,
        memory,
    ) in merits:  # cost is hours of devices for a token: devices x step / tokens
        predicted = replace(
            base.predicted,
            step_time_s=float(step),
            tokens_per_s=1.0 / cost,
            peak_memory_bytes=(memory,),
        )
        rows.append(
            SweepRow(Point(8, None, 16), task().cluster, replace(base, predicted=predicted))
        )
    front = [
        not any(a[0] <= b[0] and a[1] <= b[1] and a[2] <= b[2] and a != b for a in merits)
        for b in merits
    ]
    assert pareto(rows) == front and any(front)
