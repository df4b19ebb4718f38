"""Layers that gather their inputs again in backward, over tp=2 and 4, beside dp and cp, under every
schedule: training is that of one device.

`tests/rewrite/test_random_plans.py` has random layouts without a pipeline, and
`tests/rewrite/test_mutations.py` what would be caught. Meshes of this file with tp=2 and without cp
are also in the matrix of the runtime, with ZeRO.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from support.effort import slow_but

from autopar.models import parse_model
from autopar.verify.verify import verify
from benchmarks.exactness.runtime_matrix import SCHEDULES

MESHES = ({"tp": 2, "dp": 1}, {"tp": 4, "dp": 1}, {"tp": 2, "dp": 2}, {"tp": 2, "dp": 1, "cp": 2})
"""What each stage of a pipeline of two ranks has."""
TEXTS = {kind: f"{kind}:layers=4,hidden=32,heads=4,vocab=64,seq=12" for kind in ("llama", "gpt")}
"""Models with a layer for each virtual stage."""


def check(model: str, pins: dict[str, Any]) -> None:
    nproc = 1
    for axis in ("tp", "dp", "cp", "pp"):
        nproc *= pins.get(axis, 1)
    pins = {"sequence_parallel": True, "recompute": "gather"} | pins
    report = verify(parse_model(TEXTS[model]), nproc, pin=pins, rows=8, shrink=False)
    assert report.exact, report
    assert [mesh.recompute for mesh in report.meshes] == ["gather"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [MESHES[3], *(pytest.param(mesh, marks=pytest.mark.slow) for mesh in MESHES[:3])],
    ids=str,
)
def test_without_a_pipeline(mesh):
    check("llama", mesh | {"pp": 1})


EVERY = list(product(TEXTS, MESHES, SCHEDULES))
FEW = [case for case in EVERY if case == ("llama", MESHES[0], "zero_bubble")]
"""What runs without --runslow: a backward in two parts reads what is kept twice."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", slow_but(FEW, EVERY), ids=str)
def test_every_schedule(case):
    model, mesh, schedule = case
    stages = {"vpp": 2} if schedule == "interleaved_1f1b" else {}
    check(model, mesh | {"pp": 2, "schedule": schedule, "micro_batch": 1} | stages)
