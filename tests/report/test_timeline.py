"""The timeline of a step: its parts add up to the replayed step, and its memory peaks are the plan's."""

from __future__ import annotations

import json
from dataclasses import replace
from html import unescape
from itertools import pairwise

import pytest
from support.effort import slow_but
from support.prose import ROOT
from support.report_plans import CASES, plan_of, report_of, request_of, timeline_of, traced_of

import autopar
from autopar.models import parse_model
from autopar.recheck.replay import replay
from autopar.report.timeline import FOLDED_BEYOND, Slice
from autopar.report.timeline_figure import bands, timeline_figure
from autopar.text.numbers import Numbers

ONE_STAGE_A_RANK = [case for case in CASES if case != "interleaved"]


@pytest.mark.parametrize("case", slow_but(["interleaved"], CASES))
def test_seconds_add_up_to_the_replayed_step(case):
    plan, timeline = plan_of(case), timeline_of(case)
    replayed = replay(plan, traced_of(CASES[case][0]), request_of(case))
    assert timeline.step_s == pytest.approx(replayed.replayed_s, rel=1e-12)
    for rank in range(timeline.ranks):
        seconds = timeline.seconds_by_kind(rank)
        assert sum(seconds.values()) == pytest.approx(timeline.step_s, rel=1e-3)
        assert sum(seconds.values()) == pytest.approx(timeline.step_s, rel=1e-9), "and far closer"
    assert timeline.predicted_s == plan.predicted.step_time_s


@pytest.mark.parametrize("case", CASES)
def test_intervals_of_a_rank_do_not_overlap(case):
    timeline = timeline_of(case)
    for line in timeline.lines:
        for before, after in pairwise(line):
            assert before.end_s <= after.start_s + 1e-12
        assert line[-1].end_s <= timeline.step_s * (1 + 1e-12)


@pytest.mark.parametrize("case", ONE_STAGE_A_RANK)
def test_the_most_that_is_held_is_the_plans_peak(case):
    plan, timeline = plan_of(case), timeline_of(case)
    assert tuple(m.peak_bytes for m in timeline.memory) == plan.predicted.peak_memory_bytes


def test_interleaved_ranks_hold_at_most_what_the_plan_adds_up():
    plan, timeline = plan_of("interleaved"), timeline_of("interleaved")
    replayed = replay(plan, traced_of(CASES["interleaved"][0]), request_of("interleaved"))
    assert tuple(m.peak_bytes for m in timeline.memory) == replayed.replayed_bytes
    assert all(m.peak_bytes <= m.predicted_bytes for m in timeline.memory)


@pytest.mark.parametrize("case", CASES)
def test_static_memory_and_the_end_of_the_step(case):
    """All that was kept is free at the end, and the parts are those of the plan on its fullest rank."""
    plan, timeline = plan_of(case), timeline_of(case)
    for memory in timeline.memory:
        assert memory.holdings[-1].kept_bytes == 0 and memory.holdings[-1].transient_bytes == 0
    fullest = max(timeline.memory, key=lambda m: m.predicted_bytes)
    for part in ("parameters", "gradients", "optimizer"):
        assert getattr(fullest.static, part) == plan.predicted.memory[part]


def test_each_kind_of_work_and_each_axis_is_there():
    kinds = {case: {k for r in range(timeline_of(case).ranks) for k in timeline_of(case).seconds_by_kind(r)}
             for case in CASES}  # fmt: skip
    assert "weights" in kinds["zero bubble"] and "weights" not in kinds["1f1b"]
    assert "recompute" in kinds["1f1b recomputed"]
    assert "tp" in kinds["1f1b"] and "tp" not in kinds["gpipe"]
    assert "dp" in kinds["ZeRO-3"] and "ep" in kinds["experts"] and "cp" in kinds["context"]
    assert all("idle" in kinds[case] for case in ("gpipe", "1f1b", "interleaved", "zero bubble"))


def test_parts_have_the_time_that_the_breakdown_has():
    """Without a pipeline the plan's own breakdown has recomputation, communication and the update too."""
    for case in ("no pipeline", "ZeRO-3", "experts", "context"):
        timeline, parts = timeline_of(case), plan_of(case).predicted.breakdown
        inside = [p for key in (("F", 0), ("B", 0)) for p in timeline.parts[key]]
        seconds = timeline.micro_batches * sum(part.seconds for part in inside)
        names = ("forward", "backward", "recompute", "conversion", "edge")
        assert seconds == pytest.approx(sum(parts[name] for name in names), rel=1e-9)
        again = timeline.micro_batches * sum(p.seconds for p in inside if p.kind == "recompute")
        assert again == pytest.approx(parts["recompute"], rel=1e-9)
        assert sum(p.seconds for p in timeline.updates[0]) == pytest.approx(parts["step"], rel=1e-9)


def test_messages_join_the_action_that_sends_and_the_one_that_reads():
    timeline = timeline_of("1f1b")
    starts = {(s.kind, s.stage, s.micro_batch): s.start_s for line in timeline.lines for s in line}
    ends = {(s.kind, s.stage, s.micro_batch): s.end_s for line in timeline.lines for s in line}
    assert len(timeline.messages) == 2 * 3 * timeline.micro_batches
    for message in timeline.messages:
        kind = "F" if message.kind == "F" else "B"
        to = message.stage + (1 if kind == "F" else -1)
        assert message.start_s == pytest.approx(ends[kind, message.stage, message.micro_batch])
        assert message.start_s + message.seconds <= starts[kind, to, message.micro_batch] + 1e-12


def test_what_waits_for_the_host_is_drawn(tmp_path):
    spec = parse_model("moe-tiny")
    model, batch = spec.build("meta"), spec.example_inputs(2, 16)
    plan = autopar.plan(model, "h200:2", batch, 8, {"pp": 1, "dp": 2, "zero": 1})
    report = autopar.explain(plan, model=model, example_inputs=batch)
    assert "host" in plan.predicted.breakdown and report.timeline.lines[0][-1].kind == "host"
    kind, start_s, seconds = bands(report.timeline, 0, report.timeline.lines[0][-1])[-1]
    assert (kind, start_s + seconds) == ("host", pytest.approx(report.timeline.step_s))
    report.save(tmp_path / "page.html")
    assert "c-host" in (tmp_path / "page.html").read_text()


def test_what_is_gathered_again_is_drawn():
    spec = parse_model("gpt-tiny")
    model, batch = spec.build("meta"), spec.example_inputs(2, 32)
    pin = {"tp": 4, "dp": 1, "pp": 1, "recompute": "gather"}
    plan = autopar.plan(model, "cpu:4", batch, 4, pin)
    timeline = autopar.explain(plan, model=model, example_inputs=batch).timeline
    assert timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    again = plan.predicted.details["recompute"]
    names = {part.name for part in timeline.parts["B", 0]}
    assert again > 0 and "all_gather over tp" in names


def test_middle_micro_batches_are_folded():
    timeline = timeline_of("many micro-batches")
    assert timeline.micro_batches > FOLDED_BEYOND and timeline.fold is not None
    start, end = timeline.fold
    total = sum(len(line) for line in timeline.lines)
    assert 0 < timeline.folded < total
    for rank in range(timeline.ranks):
        shown = list(timeline.shown(rank))
        assert all(s.end_s <= start + 1e-12 or s.start_s >= end - 1e-12 for s in shown)
        inside = sum(min(s.end_s, end) - max(s.start_s, start) for s in timeline.lines[rank]
                     if s.end_s > start and s.start_s < end)  # fmt: skip
        whole = sum(s.seconds for s in timeline.lines[rank])
        assert sum(s.seconds for s in shown) == pytest.approx(whole - inside, rel=1e-9)
    assert timeline_of("1f1b").fold is None and timeline_of("1f1b").folded == 0


def test_a_wait_for_the_host_is_drawn():
    timeline, numbers = timeline_of("1f1b"), Numbers(report_of("1f1b").data)
    waits = Slice("host", -1, -1, timeline.step_s, 1e-3)
    late = replace(timeline, lines=tuple((*line, waits) for line in timeline.lines))
    rows = json.loads(unescape(timeline_figure(late, numbers).data).partition("'")[2][:-1])["rows"]
    script = (ROOT / "autopar/report/templates/report.js").read_text()
    assert all(row[-1][2:4] == [6, -1] for row in rows) and '"waiting for the host"' in script
