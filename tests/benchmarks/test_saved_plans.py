"""The benchmark of saved plans: what it draws, what it passes, and what it finds."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from autopar.request.options import OPTIONS, PARTS
from autopar.request.pins import PINS
from benchmarks.exactness import own_modules, saved_plans
from benchmarks.exactness.drawn_requests import NEVER_DRAWN, Draw, Request
from benchmarks.exactness.saved_plans import Outcome, run_request, summary

ON_CPU = Request(
    own_modules.TEXTS[0], "cpu:2", 8, None, {"dp": 2, "zero": 1, "pp": 1}, {"precision": "fp64"}, True
)  # fmt: skip


class Fixed(Draw):
    """Never draws what only some requests are checked for."""

    def maybe(self, share: float) -> bool:
        return False


def outcome_of(asked: Request) -> Outcome:
    outcome = Outcome(0, 0, asked.line, "")
    run_request(asked, outcome, Fixed(0))
    return outcome


def test_every_option_and_pin_is_drawn():
    drawn = [Draw(f"0-{number}").request() for number in range(600)]
    options = {name for asked in drawn for name in asked.options}
    assert options == (OPTIONS | PARTS).keys() - NEVER_DRAWN
    assert {name for asked in drawn for name in asked.pin} == PINS.keys()
    assert sum(asked.runs for asked in drawn) > 200


def test_a_request_is_planned_and_run_from_its_file():
    outcome = outcome_of(ON_CPU)
    assert (outcome.kind, outcome.ran, outcome.findings) == ("planned", "exact", [])
    assert outcome.error < 1e-12 and {"doors", "audit", "replay"} <= set(outcome.checked)


def test_a_refusal_is_the_same_at_both_doors():
    outcome = outcome_of(replace(ON_CPU, pin={"tp": 3}))
    assert (outcome.kind, outcome.findings) == ("refused", []) and "tp=3" in outcome.words


@pytest.mark.parametrize("kind", ["plans differ, command -> Python", "a run is wrong"])
def test_what_disagrees_is_found(kind, monkeypatch):
    if kind == "a run is wrong":
        from benchmarks.exactness import file_runs

        monkeypatch.setattr(file_runs, "TOLERANCES", {"fp64": (0.0, 0.0)})
        named = "fp64"
    else:
        original = Request.planned
        monkeypatch.setattr(Request, "planned", lambda self: replace(original(self), zero=0))
        named = "zero: 1 -> 0"
    outcome = outcome_of(ON_CPU)
    found = dict(outcome.findings)
    assert kind in found and (named == "fp64" or named in found[kind])
    assert kind in summary([outcome])


def test_outcomes_are_lines_of_json(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(saved_plans, "run_request", lambda asked, outcome, draw: None)
    path = tmp_path / "outcomes.jsonl"
    assert saved_plans.main(["--requests", "3", "--first", "5", "--output", str(path)]) == 0
    numbers = [json.loads(line)["number"] for line in path.read_text().splitlines()]
    assert numbers == [5, 6, 7] and "3 requests" in capsys.readouterr().out
