"""A plan remembers what it was made for: nothing is given again, and what contradicts it is refused."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from support.effort import every

import autopar
from autopar import api
from autopar.errors import AutoparError
from autopar.explaining.lints import lint
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import MadeFor
from autopar.models import parse_model
from autopar.planning.model_facts import as_planned
from autopar.request.plan_request import request_of
from autopar.text.plan_words import named_cluster

SPEC = parse_model("llama:layers=4,hidden=256,heads=8,vocab=1024")
MODEL, BATCH = SPEC.build("meta"), SPEC.example_inputs(2, 256)
PIN = {"tp": 2, "sequence_parallel": True, "dp": 2}


@cache
def planned() -> Plan:
    """A plan whose price depends on its software and on a pin that its choices do not show."""
    plan = autopar.plan(MODEL, "h100:4", BATCH, 32, PIN, target="megatron", headroom=0.1)
    return Plan.from_json(plan.to_json())


def test_a_report_has_the_software_and_the_pins_of_the_plan():
    plan = planned()
    report = autopar.explain(plan, model=MODEL, example_inputs=BATCH)
    assert report.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)
    request = request_of(plan, named_cluster(plan))
    assert dict(request.pin) == PIN and request.software.fused_kernels
    assert request.cluster.one_kind.headroom == 0.1


@pytest.mark.parametrize(
    ("given", "words"),
    every(2, [
        ({"software": autopar.Software()}, r"made for software \{.*fused_kernels.*\}, not \{\}"),
        ({"pin": {"tp": 4}}, r"made for pins \{.*'tp': 2\}, not \{'tp': 4\}"),
        ({"cluster": "h100:8"}, r"they differ in devices_per_node 4 -> 8: plan again"),
    ]),
)  # fmt: skip
def test_what_contradicts_a_plan_is_refused_with_both_values(given, words):
    with pytest.raises(AutoparError, match=words):
        autopar.explain(planned(), **given)


def test_what_a_plan_says_may_be_given_again():
    plan = planned()
    software = autopar.Software.from_data(plan.made_for.software)
    report = autopar.explain(plan, cluster="h100:4", pin=PIN, software=software)
    assert report.cluster == named_cluster(plan)


def test_a_plan_of_an_earlier_version_takes_what_it_does_not_say():
    plan, traced = planned(), api.trace(MODEL, BATCH)
    old, software = (
        replace(plan, made_for=MadeFor()),
        autopar.Software.from_data(plan.made_for.software),
    )
    own = autopar.explain(old, traced=traced, pin=PIN, software=software)
    assert own.timeline.step_s == pytest.approx(plan.predicted.step_time_s, rel=1e-9)


def test_lints_price_what_the_plan_was_made_for(monkeypatch):
    plan, settings = planned(), []
    from autopar.explaining import lints

    original = lints.setting_of
    monkeypatch.setattr(
        lints, "setting_of", lambda *args: settings.append(original(*args)) or settings[-1]
    )
    lint(plan, named_cluster(plan), as_planned(api.trace(MODEL, BATCH), plan))
    assert settings[0].sequence_parallel is True and settings[0].software.fused_kernels


def test_a_saved_plan_is_explained_in_a_new_process(tmp_path):
    planned().save(tmp_path / "plan.json")
    code = f"import autopar; print(autopar.explain(autopar.Plan.load({str(tmp_path / 'plan.json')!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "h100:4" in done.stdout
