"""Predicted and measured traces of llama-small on 4 CPU processes: the same names in the same order."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.trace_faults import trace_faults

import autopar
from autopar.models import parse_model
from autopar.report.trace_diff import read_trace, trace_diff

_BATCH, _SEQ = 8, 32
PINS = {
    "tensor": {"tp": 4, "micro_batch": 4},
    "tensor and data": {"tp": 2, "dp": 2, "micro_batch": 2},
    "1f1b": {"pp": 2, "tp": 2, "schedule": "1f1b", "micro_batch": 2},
    "interleaved": {"pp": 2, "dp": 2, "schedule": "interleaved_1f1b", "vpp": 2, "micro_batch": 1},
    "zero bubble": {"pp": 4, "schedule": "zero_bubble", "micro_batch": 2},
}


@cache
def model_and_inputs():
    spec = parse_model("llama-small")
    torch.manual_seed(0)
    return spec.build("cpu"), spec.example_inputs(_BATCH, _SEQ, "cpu")


def measured(rank: int, text: str, folder: str) -> None:
    """Train two steps of a plan on this rank, and write the trace of the second."""
    model, batch = model_and_inputs()
    plan = autopar.Plan.from_json(text)
    engine = autopar.parallelize(
        model, "cpu:4", batch, lambda p: torch.optim.SGD(p, 0.1), plan=plan
    )
    local = engine.local_batch(batch)
    engine.step(local)
    with engine.profile(folder):
        engine.step(local)


@pytest.mark.slow
@pytest.mark.parametrize("case", PINS)
def test_predicted_and_measured_ranges_have_the_same_names_in_the_same_order(case, pool4, tmp_path):
    model, batch = model_and_inputs()
    plan = autopar.plan(model, "cpu:4", batch, _BATCH, pin=PINS[case])
    report = autopar.explain(plan, model=model, example_inputs=batch)
    report.save_trace(tmp_path / "predicted.json", every_rank=True)
    predicted = read_trace(tmp_path / "predicted.json")
    assert trace_faults(predicted) == []
    pool4.run(measured, plan.to_json(), str(tmp_path))
    for rank in range(4):
        mine = {"traceEvents": [e for e in predicted["traceEvents"] if e["pid"] == rank]}
        found = trace_diff(mine, read_trace(tmp_path / f"rank-{rank}.json"))
        assert found.parts_at is None, (rank, found.parts_at)
        assert all(row.predicted == row.measured for row in found.rows)
