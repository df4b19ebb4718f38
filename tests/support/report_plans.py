"""Plans of several schedules with their simulated steps, for the tests of pictures."""

from __future__ import annotations

from functools import cache
from typing import Any

from autopar import api
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.report.explained import full_report
from autopar.report.report import Report
from autopar.report.timeline import Timeline
from autopar.request.arguments import parsed_cluster
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

DENSE = "llama:layers=8,hidden=512,heads=8,vocab=4096,seq=512"
EXPERTS = "moe:layers=4,hidden=256,heads=8,vocab=2048,ffn=512,experts=8,seq=256"
CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gpipe": (DENSE, {"pp": 4, "tp": 1, "schedule": "gpipe", "micro_batch": 1}, 16),
    "1f1b": (DENSE, {"pp": 4, "tp": 2, "schedule": "1f1b", "micro_batch": 1}, 16),
    "1f1b recomputed": (
        DENSE,
        {"pp": 2, "tp": 2, "schedule": "1f1b", "micro_batch": 2, "recompute": "full"},
        32,
    ),
    "interleaved": (
        DENSE,
        {"pp": 2, "tp": 2, "schedule": "interleaved_1f1b", "vpp": 2, "micro_batch": 1},
        16,
    ),
    "zero bubble": (DENSE, {"pp": 4, "tp": 1, "schedule": "zero_bubble", "micro_batch": 1}, 16),
    "no pipeline": (DENSE, {"pp": 1, "tp": 2, "micro_batch": 2}, 16),
    "ZeRO-3": (DENSE, {"pp": 1, "tp": 1, "zero": 3, "micro_batch": 2}, 32),
    "experts": (EXPERTS, {"pp": 1, "tp": 2, "ep": 4, "dp": 4, "micro_batch": 2}, 16),
    "context": (DENSE, {"pp": 1, "cp": 2, "tp": 2, "micro_batch": 2}, 16),
    "two kinds": (DENSE, {"pp": 2, "tp": 2, "schedule": "1f1b", "micro_batch": 1}, 16),
    "many micro-batches": (DENSE, {"pp": 2, "dp": 1, "tp": 4, "schedule": "1f1b", "micro_batch": 1}, 160),
}  # fmt: skip
"""Model, pins and sequences of a step."""
_CLUSTERS = {"two kinds": "h100:4+a100-80g:4"}
"""The clusters of cases that are not on 8 H100."""


@cache
def traced_of(model: str) -> TracedModel:
    spec = parse_model(model)
    return api.trace_spec(spec, spec.max_seq or 512)


@cache
def report_of(case: str) -> Report:
    traced, request = traced_of(CASES[case][0]), request_of(case)
    plan = api.plan_traced(traced, request, time_limit_s=8.0)  # any plan has a picture
    return full_report(plan, traced, request)


def plan_of(case: str) -> Plan:
    return report_of(case).plan


def timeline_of(case: str) -> Timeline:
    found = report_of(case).timeline
    assert found is not None
    return found


def request_of(case: str) -> PlanRequest:
    model, pins, batch = CASES[case]
    cluster = parsed_cluster(_CLUSTERS.get(case, "h100:8"))
    return PlanRequest(cluster, batch, Pins.of(pins), "bf16", model)
