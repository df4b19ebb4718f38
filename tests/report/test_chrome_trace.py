"""The trace of a simulated step: its format, its sums, its memory, and the comparison with a measured one."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from copy import deepcopy
from pathlib import Path

import pytest
from support.effort import slow_but
from support.report_plans import CASES, plan_of, report_of, request_of, timeline_of, traced_of
from support.trace_faults import trace_faults

from autopar.errors import AutoparError
from autopar.recheck.replay import replay
from autopar.report import chrome_trace
from autopar.report.chrome_trace import trace_data
from autopar.report.trace_diff import read_trace, trace_diff


def slices(data: dict, pid: int, thread: str) -> list[dict]:
    tids = {e["tid"] for e in data["traceEvents"]
            if e["name"] == "thread_name" and e["pid"] == pid and e["args"]["name"] == thread}  # fmt: skip
    return [
        e for e in data["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["tid"] in tids
    ]


@pytest.mark.parametrize("case", slow_but(["interleaved"], CASES))
def test_the_format_is_right_and_nothing_overlaps(case):
    data = json.loads(json.dumps(trace_data(timeline_of(case), plan_of(case))))
    assert trace_faults(data) == []
    processes = {e["pid"] for e in data["traceEvents"]}
    assert len(processes) == plan_of(case).mesh.pp


@pytest.mark.parametrize("case", CASES)
def test_slices_add_up_to_the_step_and_counters_to_the_peak(case):
    plan, timeline = plan_of(case), timeline_of(case)
    data = trace_data(timeline, plan)
    for rank in range(timeline.ranks):
        (step,) = [e for e in slices(data, rank, "ranges") if e["name"] == "step 1"]
        assert step["dur"] == pytest.approx(1e6 * timeline.step_s)
        leaves = slices(data, rank, "compute")
        leaves += [
            e
            for axis in ("tp", "cp", "ep", "dp")
            for e in slices(data, rank, f"{axis} communication")
        ]
        folded = sum(
            e["dur"] for e in slices(data, rank, "ranges") if e["name"].startswith("folded")
        )
        busy = sum(e["dur"] for e in leaves)
        idle = 1e6 * timeline.seconds_by_kind(rank).get("idle", 0.0)
        if not folded:
            assert busy + idle == pytest.approx(step["dur"], rel=1e-3)
            assert busy + idle == pytest.approx(step["dur"], rel=1e-9), "and far closer"
        assert busy + folded <= step["dur"] * (1 + 1e-9)
        counters = [e["args"] for e in data["traceEvents"] if e["ph"] == "C" and e["pid"] == rank]
        assert max(sum(args.values()) for args in counters) == timeline.memory[rank].peak_bytes


@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zero bubble"])
def test_a_trace_is_the_replayed_step(case):
    """On each rank, work, communication and the pauses between last as long as the replayed step,
    nothing of a track overlaps, and the counter's maximum is the plan's peak.
    """
    plan, data = plan_of(case), json.loads(json.dumps(trace_data(timeline_of(case), plan_of(case))))
    replayed = replay(plan, traced_of(CASES[case][0]), request_of(case))
    assert trace_faults(data) == [], "which looks for slices of a track that overlap"
    for rank in range(plan.mesh.pp):
        work = [of for name in ("compute", "tp communication", "dp communication")
                for of in slices(data, rank, name)]  # fmt: skip
        work.sort(key=lambda event: event["ts"])
        ends = [0.0, *(event["ts"] + event["dur"] for event in work)]
        starts = [*(event["ts"] for event in work), 1e6 * replayed.replayed_s]
        pauses = [start - end for start, end in zip(starts, ends, strict=True)]
        assert min(pauses) > -1e-3, "one thing at a time"
        whole = sum(event["dur"] for event in work) + sum(pauses)
        assert whole == pytest.approx(1e6 * replayed.replayed_s, rel=1e-3)
        (step,) = [e for e in slices(data, rank, "ranges") if e["name"] == "step 1"]
        assert step["dur"] == pytest.approx(1e6 * replayed.replayed_s, rel=1e-3)
        held = max(
            sum(e["args"].values())
            for e in data["traceEvents"]
            if e["ph"] == "C" and e["pid"] == rank
        )
        assert held == replayed.replayed_bytes[rank]
        # of ranks with several stages a plan may count peaks at different times as one
        most = replayed.together_bytes[rank] if case == "interleaved" else held
        assert held <= plan.predicted.peak_memory_bytes[rank] <= most


def test_names_are_those_of_the_profile():
    data = trace_data(timeline_of("1f1b"), plan_of("1f1b"))
    names = [e["name"] for e in slices(data, 1, "ranges")]
    assert names[:3] == ["step 1", "pipeline", "stage 1 forward of micro-batch 0"]
    assert "layers.2 forward" in names and "layers.2 backward" in names and "update" in names
    assert {e["name"].rpartition(" over ")[2] for e in slices(data, 1, "tp communication")} == {
        "tp"
    }
    alone = [
        e["name"]
        for e in slices(trace_data(timeline_of("no pipeline"), plan_of("no pipeline")), 0, "ranges")
    ]
    assert (
        alone[:3] == ["step 1", "micro-batch 0 forward", "embed_tokens forward"]
        or alone[1] == "micro-batch 0 forward"
    )


def test_every_rank_may_have_a_process():
    plan = plan_of("1f1b")
    data = trace_data(timeline_of("1f1b"), plan, every_rank=True)
    assert trace_faults(data) == []
    assert len({e["pid"] for e in data["traceEvents"]}) == plan.mesh.num_devices == 8


def test_what_is_folded_is_said(monkeypatch):
    timeline, plan = timeline_of("many micro-batches"), plan_of("many micro-batches")
    data = trace_data(timeline, plan)
    assert f"{timeline.folded:,} actions alike" in data["otherData"]["folded"]
    few = len(data["traceEvents"]) // 2
    monkeypatch.setattr(chrome_trace, "MOST_EVENTS", few)
    shorter = trace_data(timeline, plan)
    assert len(shorter["traceEvents"]) <= few and trace_faults(shorter) == []
    assert "segments and single collectives" in shorter["otherData"]["folded"]
    monkeypatch.setattr(chrome_trace, "MOST_EVENTS", 100)
    with pytest.raises(AutoparError, match="more than 100 events"):
        trace_data(timeline, plan)


def test_a_file_may_be_compressed(tmp_path):
    for name in ("trace.json", "trace.json.gz"):
        number = report_of("1f1b").save_trace(tmp_path / name)
        assert len(read_trace(tmp_path / name)["traceEvents"]) == number
    assert (
        gzip.decompress((tmp_path / "trace.json.gz").read_bytes())
        == (tmp_path / "trace.json").read_bytes()
    )
    (tmp_path / "odd.json").write_text("[1, 2")
    with pytest.raises(AutoparError, match="cannot read trace"):
        read_trace(tmp_path / "odd.json")
    (tmp_path / "odd.json").write_text("{}")
    with pytest.raises(AutoparError, match="no Chrome trace"):
        read_trace(tmp_path / "odd.json")


@pytest.mark.skipif(
    "TRACE_PROCESSOR" not in os.environ,
    reason="TRACE_PROCESSOR does not name Perfetto's trace_processor",
)
@pytest.mark.parametrize("case", ["1f1b", "interleaved", "zero bubble"])
def test_perfetto_reads_every_slice(case, tmp_path):
    path = tmp_path / "trace.json.gz"
    report_of(case).save_trace(path)
    slices = sum(event["ph"] == "X" for event in read_trace(path)["traceEvents"])
    assert asked_perfetto("select count(*) from slice", path) == [str(slices)]
    faults = "select name from stats where severity = 'error' and value > 0"
    assert asked_perfetto(faults, path) == []


def asked_perfetto(query: str, trace: Path) -> list[str]:
    """The rows that Perfetto's trace processor prints for a query on a trace, without the header."""
    sql = trace.with_name("query.sql")
    sql.write_text(query)
    command = [os.environ["TRACE_PROCESSOR"], "-q", str(sql), str(trace)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [line for line in done.stdout.splitlines()[1:] if line]


def test_faults_are_found():
    good = {
        "traceEvents": [
            {"ph": "X", "name": "a", "pid": 0, "tid": 1, "ts": 0, "dur": 10},
            {"ph": "X", "name": "b", "pid": 0, "tid": 1, "ts": 2, "dur": 3},
            {"ph": "X", "name": "c", "pid": 1, "tid": 1, "ts": 8, "dur": 3},
            {"ph": "s", "name": "m", "pid": 0, "tid": 1, "ts": 4, "id": 1},
            {"ph": "f", "name": "m", "pid": 1, "tid": 1, "ts": 8, "id": 1},
            {"ph": "C", "name": "memory", "pid": 0, "ts": 1, "args": {"kept": 3}},
        ]
    }
    assert trace_faults(good) == []
    for number, change, words in (
        (1, {"ts": 8}, "overlaps a"),
        (0, {"dur": -1}, "dur is -1"),
        (0, {"ts": float("nan")}, "ts is nan"),
        (2, {"ph": "Z"}, "unknown kind"),
        (3, {"ts": 9}, "ends before it starts"),
        (4, {"id": 2}, "has 1 ends"),
        (4, {"ts": 20}, "attached to no slice"),
        (5, {"args": {"kept": "much"}}, "no number"),
    ):
        wrong = deepcopy(good)
        wrong["traceEvents"][number] |= change
        assert any(words in fault for fault in trace_faults(wrong)), words
    del good["traceEvents"][0]["tid"]
    assert "lacks tid" in trace_faults(good)[0]


def test_a_trace_agrees_with_itself_and_not_with_another():
    data = trace_data(timeline_of("1f1b"), plan_of("1f1b"))
    second = {"traceEvents": [e for e in data["traceEvents"] if e["pid"] == 2]}
    found = trace_diff(data, second)
    assert found.parts_at is None and found.process.startswith("stage 2")
    assert all(
        row.predicted_s == row.measured_s and row.predicted == row.measured for row in found.rows
    )
    late = deepcopy(second)
    for event in late["traceEvents"]:
        if event["name"] == "stage 2 forward of micro-batch 3":
            event["ts"], event["dur"] = event["ts"] + 1e3, 2 * event["dur"]
    other = trace_diff(data, late)
    assert other.parts_at is not None and other.reply().data["same_order"] is False
    rows = {row.name: row for row in other.rows}
    assert (
        rows["stage 2 forward of micro-batches"].measured_s
        > rows["stage 2 forward of micro-batches"].predicted_s
    )
    with pytest.raises(AutoparError, match="no range of a step"):
        trace_diff(data, {"traceEvents": []})
