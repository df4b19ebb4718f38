"""The benchmark of planning: fresh processes, the curve's tasks, and what it prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.ir.cluster import ClusterSpec
from autopar.models import parse_model
from benchmarks.speed import planning
from benchmarks.speed.planning import (
    CASES,
    MANY,
    Asked,
    Took,
    line,
    main,
    of_gpus,
    of_layers,
    plan_afresh,
    ratio,
)

TOOK = Took(5.0, 2.0, 1.0, 1.5, 400 * 2**20, "dp=8 1x1", 0.5, 0.01, 12)


@pytest.mark.slow
def test_a_plan_in_a_process_of_its_own():
    took = plan_afresh(Asked("tiny", "llama-tiny", "h100:4", 8, 16, {"tp": 2}), 10.0)
    assert not took.error and "tp=2" in took.plan and took.step_s > 0 and took.candidates > 0
    assert (
        took.process_s > took.import_s + took.plan_s > 0 and took.trace_s > 0 and took.search_s > 0
    )
    assert took.peak_bytes > 50 * 2**20


@pytest.mark.slow
def test_errors_are_rows():
    took = plan_afresh(Asked("odd", "no-such-model", "h100:4", 8, 16, {}), 10.0)
    assert "no-such-model" in took.error and "no-such-model" in line(
        Asked("odd", "", "", 1, 1, {}), took
    )


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_the_curve(family):
    for gpus in (8, 64, MANY):
        asked = of_gpus(family, gpus)
        assert (
            ClusterSpec.parse(asked.cluster).num_devices == gpus and asked.global_batch % gpus == 0
        )
    assert [parse_model(of_layers(family, layers).model).num_layers for layers in (8, 128)] == [
        8,
        128,
    ]


def test_named_cases_can_be_asked_for():
    devices = {asked.name: ClusterSpec.parse(asked.cluster).num_devices for asked in CASES}
    assert devices["llama3-405b/16384"] == 16384 and devices["gpt-1t/3072"] == 3072
    assert all(devices[name] == int(name.partition("/")[2]) for name in devices if "/" in name)
    for asked in CASES:
        assert parse_model(asked.model).max_seq >= asked.seq


def test_what_is_printed(monkeypatch, capsys, tmp_path):
    times = {"64 GPUs": TOOK, "16,384 GPUs": replace(TOOK, process_s=10.0, search_s=4.0)}
    monkeypatch.setattr(planning, "plan_afresh", lambda asked, limit: times.get(asked.name, TOOK))
    arguments = [
        "--gpus",
        "64",
        "16384",
        "--layers",
        "8",
        "--cases",
        "llama3-8b/64",
        "--output",
        str(tmp_path / "out.txt"),
    ]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert text == (tmp_path / "out.txt").read_text()
    assert (
        "16,384 GPUs take 2.00 times as long as 64 (2.00 times without start and imports)" in text
    )
    assert (
        "400 MiB   1.00 %     12  dp=8 1x1" in text
        and "8 layers" in text
        and "llama3-8b/64" in text
    )
    assert ratio({64: TOOK}) == "" and ratio({64: TOOK, MANY: replace(TOOK, error="no")}) == ""
    monkeypatch.setattr(
        planning, "plan_afresh", lambda asked, limit: replace(TOOK, error="nothing fits")
    )
    assert main(["--gpus", "8", "--layers", "--cases"]) == 1


def test_plans_with_and_without_fusion(monkeypatch, capsys):
    took = {
        "off": replace(TOOK, user_s=2.0, memory_bytes=2 * 2**30),
        "all": replace(TOOK, plan="dp=4 2x1", user_s=3.0, step_s=0.4, memory_bytes=2**30),
    }
    monkeypatch.setattr(planning, "plan_afresh", lambda asked, limit: took[asked.pin["fuse"]])
    arguments = ["--gpus", "--layers", "--fuse", "--cases"]
    assert main([*arguments, "llama3-8b/64"]) == 0
    text = capsys.readouterr().out
    for words in (
        "2.5 -> 2.5 s 1.000",
        "2.0 -> 3.0 s 1.500",
        "500.0 -> 400.0 ms 0.800",
        "2.0 -> 1.0 GiB 0.500",
        "dp=8 1x1 -> dp=4 2x1",
    ):
        assert words in text
    assert "together: 2.5 -> 2.5 s 1.000, processor 2.0 -> 3.0 s 1.500" in text
    took["all"] = replace(TOOK, error="nothing fits")
    assert main([*arguments, "llama3-8b/64"]) == 1
    text = capsys.readouterr().out
    assert "nothing fits" in text and "together" not in text
