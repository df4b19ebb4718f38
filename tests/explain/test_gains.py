"""What other software saves is what a plan of the same layout takes under it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.explain_tasks import task

from autopar import api
from autopar.explaining.gains import HOME, HOME_LEAST, LEAST, gains, home
from autopar.foreign.limits.asked_software import software_like
from autopar.ir.cluster import ClusterSpec
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.request.software import Software

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
    t = task(MODEL, device, 32, 512)
    traced = t.traced
    request = PlanRequest(t.cluster, 32, Pins.of(pin), "bf16", MODEL)
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
    request = PlanRequest(ClusterSpec.parse("h100:4"), 32, Pins.of({"dp": 4}), "bf16", MODEL)
    request = replace(request, software=replace(request.software, compiled=True))
    plan = api.plan_traced(traced, request)
    assert "compiled" not in {gain.field for gain in gains(plan, traced, request)}


def test_processors_have_no_such_software():
    traced = task(MODEL, "cpu:4", 32, 512).traced
    request = PlanRequest(ClusterSpec.parse("cpu:4"), 32, Pins.of({"dp": 4}), "fp32", MODEL)
    assert gains(api.plan_traced(traced, request), traced, request) == []


def test_the_home_is_what_the_options_plan():
    """The sentence names a time; the options that it names plan the same choices in that time."""
    t = task(MODEL, "h100:4", 32, 512)
    traced, cluster = t.traced, t.cluster
    request = PlanRequest(cluster, 512, Pins.of({"dp": 4}), "bf16", MODEL)
    plan = api.plan_traced(traced, request)
    found = home(plan, traced, request)
    assert found is not None and found.saved >= HOME_LEAST
    pins = {
        "dp": 4,
        "zero": plan.zero,
        "micro_batch": plan.micro_batch,
        "recompute": plan.recompute,
    }
    software = software_like(HOME, Software(), cluster, {}, "bf16", "megatron")
    under = replace(request, pin=Pins.of(pins), software=software)
    again_s = api.plan_traced(traced, under).predicted.step_time_s
    assert again_s == pytest.approx(found.step_time_s, rel=0.02)
    assert home(plan, traced, replace(request, software=software)) is None
    tight = replace(cluster, device=replace(cluster.device, memory_bytes=2 << 30, reserved_bytes=0))
    assert home(plan, traced, replace(request, cluster=tight)) is None
    two = ClusterSpec.parse("h100:4+a100-80g:4")
    assert home(plan, traced, replace(request, cluster=two)) is None
    images = replace(plan, made_for=replace(plan.made_for, rows="images"))
    assert home(images, traced, request) is None
