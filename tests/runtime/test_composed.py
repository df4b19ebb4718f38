"""Pipelines, ZeRO, recompute, clipping and precision together, against one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from exactness import case, engine_for, run_steps, setting, solved_plan, train, update_error
from pipelines import pipelined, staged
from test_precision import NEAR, error, run, traced
from test_precision import reference as half_reference
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan

DP, ONES, LIMIT = MeshShape(pp=2, dp=2), (1, 1, 1, 1), 0.05
MIXED = ("none", "op", "selective", "full")
CELLS = [  # ZeRO, schedule, segments of each stage, micro-batches, recompute of segments in turn; gpt-tiny's table of tokens is tied
    (1, "1f1b", (2, 2), 2, MIXED),
    (2, "interleaved_1f1b", ONES, 2, MIXED),
    (3, "1f1b", (1, 3), 4, MIXED),
    (1, "zero_bubble", (2, 2), 4, ("selective", "full")),
]


def plan_of(zero: int, *how) -> Plan:
    return replace(pipelined("gpt-tiny", DP, *how), zero=zero)


def clipped(rank: int, texts: list[str]) -> list[tuple[list[float], dict[str, Tensor], list[float]]]:
    found = []
    for text in texts:
        engine = engine_for("gpt-tiny", Plan.from_json(text), LIMIT)
        losses, state = run_steps(engine, case("gpt-tiny").batches)
        found.append((losses, state, [float(engine.eval_step(engine.local_batch(b))) for b in case("gpt-tiny").batches]))
    return found


def test_zero_in_pipelines_is_exact(pool4):
    found = case("gpt-tiny")
    expected = train(found.model, found.batches, max_grad_norm=LIMIT)
    for by_rank in pool4.run(clipped, [plan_of(*cell).to_json() for cell in CELLS], timeout_s=300):
        for cell, (losses, state, evaluated) in zip(CELLS, by_rank, strict=True):
            assert update_error(expected, state) <= 1.0, (cell, update_error(expected, state))
            assert losses == pytest.approx(expected.losses, abs=1e-9) and evaluated == pytest.approx(by_rank[0][2], abs=1e-9)


def test_every_recompute_mode_gathers_under_zero3(pool4):
    found = case("gpt-tiny")
    whole = replace(solved_plan(found.traced, found.annotator, setting(MeshShape(dp=4), 2)), zero=3)
    plan = replace(staged(whole, found.traced, "none", (4,), MIXED[1:]), stages=())
    expected = train(found.model, found.batches, max_grad_norm=LIMIT)
    for by_rank in pool4.run(clipped, [plan.to_json()]):
        assert update_error(expected, by_rank[0][1]) <= 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_in_a_pipeline(pool4, precision):
    solved = solved_plan(*traced(precision), setting(DP, 2))
    plan = staged(replace(solved, zero=2, precision=precision), traced(precision)[0], "1f1b", (2, 2), ("none", "full"))
    for (losses, state, dtypes), *_ in pool4.run(run, [plan.to_json()]):
        assert len(dtypes) == 1 and {v.dtype for v in state.values()} == {torch.float32}
        assert error(half_reference(precision, 2), state) <= NEAR[precision]
        assert losses == pytest.approx(half_reference(precision, 2).losses, rel=3e-3)


@pytest.mark.parametrize("change", [{"zero": 3}, {"precision": "bf16"}])
def test_what_zero_bubble_cannot_do_is_refused(change):
    plan = replace(plan_of(1, "zero_bubble", (2, 2), 4, ("none",)), **change)
    with pytest.raises(AutoparError, match="under zero_bubble"):
        engine_for("gpt-tiny", plan)
