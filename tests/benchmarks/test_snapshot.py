"""Answers that are saved are compared value by value."""

from __future__ import annotations

import json

from benchmarks import snapshot
from benchmarks.search.random_requests import Asked


def test_equal_answers_and_those_that_differ(tmp_path, capsys, monkeypatch):
    small = Asked("gpt2-small", "h100", (1, 2), 50e9, 64, 512)
    monkeypatch.setattr(snapshot, "random_request", lambda draw: small)
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        assert snapshot.main(["take", str(folder), "--requests", "1"]) == 0
    assert (before / "help-explain.json").exists()
    assert snapshot.main(["compare", str(before), str(after)]) == 0
    saved = json.loads((after / "plan-0.json").read_text())
    assert saved["answer"]["certificate"]["status"] == "optimal"
    saved["answer"]["predicted"]["step_time_s"] *= 2
    saved["answer"]["certificate"]["solve_time_s"] *= 2
    (after / "plan-0.json").write_text(json.dumps(saved))
    (after / "help-explain.json").unlink()
    capsys.readouterr()
    assert snapshot.main(["compare", str(before), str(after)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "help-explain.json: only in one folder"
    assert lines[1].startswith("plan-0.json: answer.predicted.step_time_s: ")
    assert lines[2].endswith("answers are equal, 0 of searches that the time ended are left out")
    assert len(lines) == 3


def test_an_answer_may_be_an_error():
    found = snapshot.output_of(["check", "no-such-file", "--cluster", "dgx-h100:1"])
    assert found["exit"] == 2 and found["stderr"]
