"""The least memory of a pipeline that does not fit: under the schedule and with the stages that hold least."""

from __future__ import annotations

from itertools import product

import pytest

from autopar import api
from autopar.errors import NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest

_SPEC = "gpt:layers=8,hidden=1024,heads=4,vocab=8000,seq=256"
_PIN = {"pp": 4, "dp": 1, "tp": 1, "micro_batch": 1, "recompute": "full"}


@pytest.fixture(scope="module")
def traced():
    return api.trace_spec(parse_model(_SPEC), 256)


def planned(traced, cluster: ClusterSpec, batch: int, **pin):
    request = PlanRequest(cluster, batch, Pins.of({**_PIN, **pin}), "bf16", "gpt")
    return api.plan_traced(traced, request, 30.0, processes=1)


@pytest.mark.parametrize("batch", [2, 32])
def test_no_schedule_and_no_stages_need_less_than_the_least_that_is_said(traced, batch):
    cluster = ClusterSpec.parse("l4:4")
    small = cluster.with_memory(cluster.device.reserved_bytes + 2**20)
    with pytest.raises(NoPlanFits, match=r"No plan.* fits") as error:
        planned(traced, small, batch)
    sizes = ["-".join(map(str, each)) for each in product(range(1, 6), repeat=4) if sum(each) == 8]
    schedules = ("gpipe", "1f1b", "zero_bubble") if batch >= 4 else ("gpipe", "zero_bubble")
    needed = [
        max(plan.predicted.peak_memory_bytes) - cluster.device.reserved_bytes
        for schedule, stages in product(schedules, ("even", *sizes))
        for plan in [planned(traced, cluster, batch, schedule=schedule, stages=stages)]
    ]
    least = error.value.least_bytes - cluster.device.reserved_bytes
    assert least == pytest.approx(min(needed), rel=0.01)
    assert max(needed) > 1.2 * min(needed)
