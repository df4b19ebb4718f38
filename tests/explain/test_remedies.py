"""Remedies: each is planned again, and so is the next smaller change, which must not fit; made-up planners for the search itself."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.explain_tasks import task

from autopar.cli.session import Asked, Planner
from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.planning.remedies import (
    Ask,
    Climb,
    Ladder,
    Rung,
    ladders_of,
    larger_clusters,
    remedies,
    remedies_data,
)

PINS = {"micro_batch": 8, "recompute": "none", "zero": 0, "tp": 1, "dp": 2}


@cache
def planner() -> Planner:
    model = "gpt:layers=2,hidden=256,heads=4,vocab=1024"
    return Planner(Asked(model=model, cluster="cpu:2", global_batch=16, seq=256), lambda text: None)


def refused(pin: dict, gib: float) -> tuple[Ask, NoPlanFits]:
    ask = Ask(pin, planner().cluster.with_memory(int(gib * 2**30)), 16, 256)
    with pytest.raises(NoPlanFits) as error:
        planner().plan_for(ask, 60.0)
    return ask, error.value


def fits(ask: Ask) -> bool | None:
    """What the planner says; None for what is impossible whatever the memory is, and for what it could neither find nor rule out."""
    try:
        plan = planner().plan_for(ask, 60.0)
    except NoPlanFits as error:
        return False if error.proven else None
    except AutoparError:
        return None
    assert max(plan.predicted.peak_memory_bytes) <= ask.cluster.device.memory_bytes
    return True


@pytest.mark.parametrize(("pin", "gib", "kinds"), [
    (PINS, 0.6, ["micro_batch", "recompute", "seq"]), (PINS, 0.54, ["pins"]), ({"micro_batch": 8, "zero": 0}, 0.53, ["devices", "seq"]),
])  # fmt: skip
@pytest.mark.slow
def test_each_remedy_fits_and_the_next_smaller_change_does_not(pin, gib, kinds):
    ask, error = refused(pin, gib)
    answer = remedies(error, planner().plan_for, ask, budget_s=1000.0)
    assert set(kinds) <= {remedy.what for remedy in answer.found}
    assert not {
        ladder.what for ladder in ladders_of(ask) if ladder.rungs[-1].words in answer.unverified
    } & set(kinds)
    rungs = {ladder.what: ladder.rungs for ladder in ladders_of(ask)}
    for remedy in answer.found:
        at = next(
            number for number, rung in enumerate(rungs[remedy.what]) if rung.words == remedy.words
        )
        assert fits(remedy.ask) and remedy.ask == rungs[remedy.what][at].ask
        smaller = [fits(rung.ask) for rung in reversed(rungs[remedy.what][:at])]
        assert next((known for known in smaller if known is not None), False) is False, remedy
        assert remedy.smallest or None in smaller
        again = planner().plan_for(remedy.ask, 60.0)
        assert (
            again.predicted == remedy.plan.predicted
            and f"{again.predicted.step_time_s * 1e3:.4g} ms a step" in str(answer)
        )
    for words in answer.useless:
        ladder = next(
            ladder
            for ladder in ladders_of(ask)
            if any(rung.words == words for rung in ladder.rungs)
        )
        assert not fits(ladder.rungs[0].ask) and not fits(ladder.rungs[-1].ask), words


@pytest.mark.slow
def test_the_message_has_the_numbers():
    ask, error = refused(PINS, 0.6)
    answer = remedies(error, planner().plan_for, ask, budget_s=1000.0)
    lines = str(answer).splitlines()
    assert lines[0].startswith(
        f"No plan fits: the smallest needs {error.least_bytes / 2**30:.2f} GiB per device of 0.60 (dp=2, micro-"
    )
    assert (
        "most of it is fixed (context, buffers), " in lines[0]
        and lines[1] == "It fits"
        and "GiB (dp=2, 2 x 4" in lines[2]
    )
    moved = "with the optimizer state in host memory, nor with the parameters and optimizer state in host memory"
    assert (
        lines[-1]
        == f"Nothing fits without zero=0, nor without tp=1, nor without dp=2, nor {moved}."
    )
    data = json.loads(json.dumps(remedies_data(answer)))
    assert (
        data["answer"] == "does not fit" and data["least_memory"]["peak_bytes"] == error.least_bytes
    )
    assert (
        data["remedies"][0]["pin"]["micro_batch"] == 4
        and data["remedies"][0]["choices"]["micro_batch"] == 4
    )
    assert data["remedies"][-1]["seq"] == 176 and len(data["do_not_help"]) == 5


class Clock:
    """Seconds that pass as the planner says."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def climbed(outcomes: list[str], up: bool, budget_s: float = 1e9):
    """A climb over rungs that fit, fail, are impossible or are not settled; a plan takes a second."""
    plan, clock, asked = task().plan(), Clock(), []
    base = Ask({}, task().cluster, 1, None)
    rungs = [Rung(str(number), replace(base, seq=number)) for number in range(len(outcomes))]

    def plan_for(ask: Ask, limit_s: float):
        assert ask.seq not in asked and limit_s > 0
        asked.append(ask.seq)
        clock.now += 1.0
        match outcomes[ask.seq]:
            case "fails":
                raise NoPlanFits("too large", 1)
            case "late":
                raise NoPlanFits("no time", proven=False)
            case "impossible":
                raise AutoparError("no mesh")
        return plan

    climb = Climb(Ladder("x", "x", rungs, up), plan_for, budget_s, clock, lambda text: None)
    return climb.first_fit(), climb, asked


@given(
    st.lists(st.sampled_from(["possible", "possible", "impossible"]), min_size=1, max_size=40),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_first_rung_that_fits_is_found(kinds, first, up):
    outcomes = [
        kind if kind == "impossible" else "fits" if number >= first else "fails"
        for number, kind in enumerate(kinds)
    ]
    remedy, climb, asked = climbed(outcomes, up)
    if "fits" not in outcomes:
        assert remedy is None and not climb.late
        return
    assert remedy.words == str(outcomes.index("fits")) and remedy.smallest and not climb.late
    assert len(asked) - outcomes.count("impossible") <= 12  # of at most 40


@pytest.mark.parametrize("up", [False, True])
def test_what_was_not_settled_is_said(up):
    remedy, climb, _ = climbed(["fails", "late", "fits"], up)
    assert (
        remedy.words == "2"
        and not remedy.smallest
        and "a smaller change was not ruled out in time" in str(remedy)
    )
    remedy, climb, _ = climbed(["fails", "late"], up)
    assert remedy is None and climb.late  # what may fit is not called useless
    remedy, climb, asked = climbed(["fails"] * 20 + ["fits"] * 20, up, budget_s=0.5)
    assert len(asked) == 1 and climb.late and (remedy is None) == up and (up or not remedy.smallest)


def test_a_budget_that_is_spent_is_said():
    ask, clock = Ask({"tp": 2}, task().cluster, 16, 32), Clock()

    def plan_for(ask: Ask, limit_s: float):
        clock.now += 100.0
        raise NoPlanFits("too large", None, proven=False)

    answer = remedies(NoPlanFits("No plan fits: X"), plan_for, ask, 20.0, clock)
    moved = (
        "with the optimizer state in host memory",
        "with the parameters and optimizer state in host memory",
    )
    assert not answer.found
    assert answer.unverified == (
        "without tp=2",
        *moved,
        "smaller global batches",
        "more devices",
        "shorter sequences",
    )
    assert (
        f"Not verified within 20 s: without tp=2; {'; '.join(moved)}; smaller global batches"
        in str(answer)
    )


def test_the_cheapest_remedy_is_first_and_doubts_are_said():
    plan = task().plan({"tp": 4})

    def plan_for(ask: Ask, limit_s: float):
        if ask.cluster.num_devices > task().cluster.num_devices:
            return plan
        if ask.pin.get("offload") != "optimizer":
            raise NoPlanFits("too large", None, proven=True)
        slow = replace(plan.predicted, tokens_per_s=plan.predicted.tokens_per_s / 3)
        memory = (int(0.95 * ask.cluster.device.memory_bytes),) * plan.mesh.pp
        unproved = replace(plan.certificate, gap=0.3)
        slow = replace(slow, peak_memory_bytes=memory)
        return replace(plan, predicted=slow, certificate=unproved)

    ask = Ask({}, task().cluster.kept_free(), 16, None)
    first, second = remedies(NoPlanFits("No plan fits: X"), plan_for, ask).found
    assert first.what == "devices" and second.what == "offload"
    assert first.device_s < second.device_s and str(first).endswith(")")
    assert "; a plan that takes up to 30 % less was not ruled out in time; a chance of 3" in str(
        second
    )


@pytest.mark.parametrize(("pinned", "fits", "expected", "useless"), [
    ("none", {"optimizer"}, ["optimizer"], 0), ("none", {"parameters"}, ["parameters"], 1),
    ("none", {"optimizer", "parameters"}, ["optimizer"], 0), ("optimizer", {"parameters"}, ["parameters"], 0),
    ("parameters", set(), [], 0), (None, {"optimizer"}, ["optimizer"], 0), (None, set(), [], 2),
])  # fmt: skip
def test_each_kind_of_offloading_is_tried_for_itself(pinned, fits, expected, useless):
    """Parameters in host memory allow no pipeline: that they do not fit says nothing of the optimizer state alone."""

    def plan_for(ask: Ask, limit_s: float):
        if ask.pin.get("offload") in fits:
            return task().plan({"tp": 4})
        raise NoPlanFits("too large", None, proven=True)

    pin = {} if pinned is None else {"offload": pinned}
    answer = remedies(NoPlanFits("No plan fits: X"), plan_for, Ask(pin, task().cluster, 1, None))
    assert [remedy.ask.pin["offload"] for remedy in answer.found] == expected
    assert sum("host memory" in words for words in answer.useless) == useless


def test_what_the_command_line_does_not_know_is_no_remedy():
    kinds = [
        ladder.what
        for ladder in ladders_of(Ask({"tp": 2, "pp": 2, "vpp": 2}, task().cluster, 16, None))
    ]
    assert kinds == [
        "tp",
        "pp",
        "vpp",
        "pins",
        "headroom",
        "offload",
        "offload",
        "global_batch",
        "devices",
    ]
    gone = {
        ladder.what: ladder.rungs[-1]
        for ladder in ladders_of(Ask({"tp": 2, "pp": 2, "vpp": 2}, task().cluster, 16, None))
        if ladder.rungs
    }
    assert gone["pp"].ask.pin == {"tp": 2} and gone["pp"].words == "without pp=2,vpp=2"


def test_larger_clusters():
    names = [cluster.name for cluster in larger_clusters(ClusterSpec.parse("h100:2"))]
    assert (
        names[:4] == ["h100:4", "h100:8", "dgx-h100:2", "dgx-h100:4"] and names[-1] == "dgx-h100:64"
    )
    assert [
        cluster.num_devices // 8 for cluster in larger_clusters(ClusterSpec.parse("dgx-h100:3"))
    ] == [4, 5, 6, 12, 24, 48, 96, 192]
    assert [cluster.num_devices for cluster in larger_clusters(ClusterSpec.parse("cpu:3"))] == [
        6,
        12,
        24,
        48,
        96,
        192,
    ]
    lab = ClusterSpec.make(
        "h100", nodes=1, devices_per_node=2, intra_bandwidth_Bps=1e9, price_per_device_hour=2.0
    )
    assert [
        (c.num_devices, c.topology.nodes, c.price_per_device_hour) for c in larger_clusters(lab)
    ][:2] == [(4, 2, 2.0), (8, 4, 2.0)]
