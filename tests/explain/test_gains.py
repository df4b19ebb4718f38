"""What other software saves is what a plan of the same layout takes under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.explain_tasks import task

from autopar import api
from autopar.explaining.gains import LEAST, gains
from autopar.ir.cluster import ClusterSpec
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

MODEL = "llama:layers=2,hidden=1024,heads=8,vocab=4096,seq=512"


@pytest.mark.parametrize(
    ("device", "pin", "also"),
    [
        ("h100:4", {"dp": 2, "tp": 2}, {"tp_overlap"}),
        pytest.param("a100-80g:4", {"dp": 4}, set(), marks=pytest.mark.slow),
        ("h100:4", {"pp": 2, "dp": 2, "schedule": "1f1b"}, {"matmul_dtype"}),
    ],
)
def test_a_gain_is_that_of_a_plan_under_the_software(device, pin, also):
    traced = task(MODEL, device, 32, 512).traced
    request = PlanRequest(ClusterSpec.parse(device), 32, Pins.of(pin), "bf16", False, MODEL)
    plan = api.plan_traced(traced, request)
    found = gains(plan, traced, request)
    fields = {gain.field for gain in found}
    assert {"compiled", "fused_kernels"} | also <= fields
    assert "h100" in device or "matmul_dtype" not in fields, "an A100 has no fp8"
    own = {"micro_batch": plan.micro_batch, "zero": plan.zero, "recompute": plan.recompute}
    for gain in found:
        value = {"matmul_dtype": "fp8"}.get(gain.field, True)
        software = replace(request.software, **{gain.field: value})
        changed = replace(request, pin=Pins.of(pin | own), software=software)
        again_s = api.plan_traced(traced, changed).predicted.step_time_s
        assert gain.saved >= LEAST
        # over tp the solver may place ops in another way, which is faster
        least = 0.9 if plan.mesh.tp > 1 else 0.98
        assert least * gain.step_time_s <= again_s <= 1.02 * gain.step_time_s


def test_software_that_has_it_gains_nothing_from_it():
    traced = task(MODEL, "h100:4", 32, 512).traced
    request = PlanRequest(ClusterSpec.parse("h100:4"), 32, Pins.of({"dp": 4}), "bf16", False, MODEL)
    request = replace(request, software=replace(request.software, compiled=True))
    plan = api.plan_traced(traced, request)
    assert "compiled" not in {gain.field for gain in gains(plan, traced, request)}


def test_processors_have_no_such_software():
    traced = task(MODEL, "cpu:4", 32, 512).traced
    request = PlanRequest(ClusterSpec.parse("cpu:4"), 32, Pins.of({"dp": 4}), "fp32", False, MODEL)
    assert gains(api.plan_traced(traced, request), traced, request) == []
