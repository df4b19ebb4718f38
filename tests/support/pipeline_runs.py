"""Pipelines against one device: of usual models, and of one whose stages pass masks, tables and buffers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from support.exactness import (
    Reference,
    run_steps,
    train_under,
    update_error,
)
from support.staged_runs import Carrying, annotated, staged
from torch import Tensor

from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine


def check(pool, name: str, plans: list[Plan]) -> None:
    for rank in pool.run(train_under, name, [plan.to_json() for plan in plans]):
        for plan, result in zip(plans, rank, strict=True):
            shown = f"{plan.mesh} {plan.schedule} {[len(s) for s in plan.stages]} {[b.recompute for b in plan.blocks]}"
            assert not isinstance(result, str), f"{shown}\n{result}"
            assert result[0] <= 1.0 and result[1] <= 1e-9, (
                f"{shown}: {result[0]:g} times the tolerance, loss off by {result[1]:g}"
            )


@cache
def carrying() -> tuple[Carrying, object, list[dict[str, Tensor]]]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model, batches = Carrying().double(), []
    for _ in range(3):
        x, target = torch.randn(8, 6, 5).double(), torch.randn(8, 6, 3).double()
        batches.append({"x": x, "places": torch.randint(0, 9, (8, 6)), "target": target})
    torch.set_rng_state(state)
    return model, trace(model, batches[0]), batches


def carried(
    rank: int, text: str, compile: bool | dict = False
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model, traced, batches = carrying()
    engine = Engine(
        model,
        traced,
        Plan.from_json(text),
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        0.5,
        None,
        "cpu",
        compile=compile,
    )
    losses, state = run_steps(engine, batches)
    return losses, [float(engine.eval_step(engine.local_batch(batch))) for batch in batches], state


def check_carried(
    pool4,
    mesh: MeshShape,
    schedule: str,
    cuts: tuple[int, ...],
    modes: tuple[str, ...],
    compile: bool | dict = False,
):
    """The pipeline against one device, in losses, evaluations, parameters and buffers."""
    model, traced, _ = carrying()
    losses, evaluated, state = carried(0, annotated(traced, MeshShape(), 4, 8).to_json())
    expected = Reference(losses, {k: v.clone() for k, v in model.state_dict().items()}, state)
    plan = staged(annotated(traced, mesh, 4, 8), traced, schedule, cuts, modes)
    for found, seen, tensors in pool4.run(carried, plan.to_json(), compile):
        assert update_error(expected, tensors) <= 1.0 and found == pytest.approx(losses, rel=1e-9)
        assert seen == pytest.approx(evaluated, rel=1e-9)
        assert all(
            torch.equal(v, state[k]) for k, v in tensors.items() if not v.is_floating_point()
        )
