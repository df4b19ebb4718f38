"""The comparison with hand-written loops: both sides train alike, every case is measured, and what fails is said to fail."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.fidelity import vs_handwritten
from benchmarks.fidelity.vs_handwritten import (
    CASES,
    LOSS_TOLERANCE,
    Measured,
    Work,
    measure,
    planner,
    table,
    verdict,
)

WORK = Work("llama:layers=4,hidden=32,heads=4,kv_heads=4,ffn=64,vocab=64,seq=16", 8, 16, 8, "sgd")
GOOD = Measured("DDP", "dp=4 zero=0", 0.100, 0.104, 0.9, 1.1, 1.0, 1e-7)
NOISE = replace(GOOD, name="DDP, again", layout="itself", autopar_s=0.097)


QUICK = ("DDP", "FSDP2", "DTensor TP", "pipelining 1F1B")


@pytest.mark.slow
def test_the_engine_and_the_loops_train_alike(pool4):
    check([case for case in CASES if case.name in QUICK], pool4)


@pytest.mark.slow
def test_the_other_loops(pool4):
    check([case for case in CASES if case.name not in QUICK], pool4)


def check(cases, pool):
    plan_under = planner(WORK)
    found = [measure(pool, case, WORK, plan_under, 1, 3) for case in cases]
    assert [
        line.startswith(case.name)
        for line, case in zip(table(found).splitlines()[1:], cases, strict=True)
    ] == [True] * len(cases)
    # with momentum and this learning rate a doubled gradient is far more within five steps
    for one in found:
        assert one.loss_difference <= LOSS_TOLERANCE, one
        assert one.ratio > 0 and one.low <= one.high and one.cpu_ratio > 0


def test_the_verdict():
    words, good = verdict([NOISE, GOOD])
    assert good and "at most 1.040" in words and "a loop against itself is 0.970" in words
    slow = replace(GOOD, name="FSDP2", autopar_s=0.106)
    assert verdict([NOISE, GOOD, slow]) == (
        "above 1.05: FSDP2 (1.060); a loop against itself is 0.970",
        False,
    )
    for difference in (2 * LOSS_TOLERANCE, float("nan")):
        words, good = verdict([NOISE, replace(GOOD, loss_difference=difference)])
        assert not good and words.startswith("LOSSES DIFFER") and words.endswith("DDP")


def test_exit_code_and_json(monkeypatch, capsys):
    monkeypatch.setattr(vs_handwritten, "planner", lambda work: None)
    monkeypatch.setattr(
        vs_handwritten, "measure", lambda pool, case, *rest: replace(GOOD, name=case.name)
    )
    assert vs_handwritten.main(["--json", "--rounds", "1", "--steps", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == pytest.approx(1.04)
    monkeypatch.setattr(
        vs_handwritten,
        "measure",
        lambda pool, case, *rest: replace(GOOD, name=case.name, autopar_s=0.2),
    )
    assert vs_handwritten.main(["--cases", "DDP"]) == 1
    with pytest.raises(SystemExit):
        vs_handwritten.main(["--rounds", "0"])
