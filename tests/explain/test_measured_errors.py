"""Errors of published runs beside a prediction: kinds, the nearest run, and the file that the package ships."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopar
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.text.measured import (
    ANY_LAYOUT,
    PLAN_KINDS,
    PublishedRun,
    device_errors,
    evidence,
    measured,
    plan_kind,
)

RUN = PublishedRun(
    id="a", source="b", device="h100", devices=8, seq=4096, step_time_s=1.0, error=0.1
)


@pytest.fixture(scope="module")
def plan() -> Plan:
    spec = parse_model("llama-tiny")
    inputs = spec.example_inputs(2, 16)
    pin = {"tp": 2, "pp": 1, "dp": 2}
    return autopar.plan(spec.build("meta"), "h100:4", inputs, global_batch=8, pin=pin)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"experts": 8, "fp8": True, "tp": 2}, "experts"),
        ({"fp8": True, "pp": 2}, "fp8"),
        ({"pp": 2, "tp": 8}, "pipelines"),
        ({"tp": 8, "zero": 3}, "tensor parallelism"),
        ({"zero": 3}, "FSDP or ZeRO-3"),
        ({"zero": 1}, "data parallelism"),
    ],
)
def test_kinds_do_not_overlap(changes, kind):
    assert plan_kind(replace(RUN, **changes)) == kind in PLAN_KINDS
    run = replace(RUN, **changes)
    assert PublishedRun(**run.as_data()) == run


def test_the_shipped_errors_are_those_of_the_shipped_runs():
    kinds, runs = measured()
    assert len(runs) > 100 and {plan_kind(run) for run in runs} <= set(PLAN_KINDS)
    for kind, row in kinds.items():
        errors = [abs(run.error) for run in runs if kind in (plan_kind(run), ANY_LAYOUT)]
        assert (row.runs, row.mean_error) == (
            len(errors),
            pytest.approx(sum(errors) / len(errors), abs=1e-4),
        )
    assert sum(row.runs for row in device_errors().values()) == len(runs)
    assert all(run.source and run.id for run in runs)


def test_a_report_names_the_error_and_the_nearest_run(plan):
    found = evidence(plan, "h100")
    assert found is not None and found.error.kind == "tensor parallelism"
    assert plan_kind(found.nearest) == "tensor parallelism" and found.same_device
    shown = " ".join(str(autopar.explain(plan)).split())
    assert "such predictions off by" in shown and found.nearest.id in shown
    other = evidence(plan, "t4")
    assert other is not None and "no run on this device is known" in str(other)
    assert evidence(plan, "cpu") is None


def test_pipelines_and_experts_have_rows_of_their_own():
    spec = parse_model("moe-tiny")
    inputs = spec.example_inputs(2, 16)
    pin = {"ep": 2, "pp": 2, "dp": 2, "tp": 1, "zero": 0, "recompute": "none", "micro_batch": 2}
    plan = autopar.plan(
        spec.build("meta"), "h100:4", inputs, global_batch=8, pin=pin, allow_micro_batch_mean=True
    )
    details = plan.predicted.details
    assert (
        details["experts"] > 0
        and details["forward"] > 0
        and details["backward"] > details["forward"]
    )
    assert sum(details.values()) == pytest.approx(plan.predicted.breakdown["stages"], rel=0.2)
    assert "all-to-all of experts" in str(autopar.explain(plan))
