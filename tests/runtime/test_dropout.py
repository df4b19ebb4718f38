"""Dropout under plans: any mesh, micro-batches and recompute train exactly as one device does, masks included."""

from __future__ import annotations

import pytest
import torch
from support.dropout_runs import ROWS, alone, batches, check, engine, model, solved
from support.exactness import (
    random_plan,
    run_steps,
    setting,
)
from support.meshes import DP2, DP2TP2, DP4, ONE, TP2
from torch import Tensor, nn

from autopar.api import trace
from autopar.ir.plan import Plan
from autopar.planning.notes import notes
from autopar.runtime.engine import Engine


def shards(plan: Plan) -> set[tuple[str, str]]:
    """(axis, layout) of what the plan's dropouts return."""
    return {
        (axis, str(choice.outputs[0]))
        for block in plan.blocks
        for name, choices in block.ops.items()
        if name.startswith(("dropout", "scaled_dot"))
        for axis, choice in choices.items()
    }


def train(rank: int, plans: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [run_steps(engine(Plan.from_json(text)), batches()) for text in plans]


def test_dropout_matters_and_follows_seed_and_step():
    losses, result = alone()
    again = run_steps(engine(solved(ONE)), batches())
    assert again[0] == losses and all(torch.equal(again[1][k], v) for k, v in result.after.items())
    assert alone(1)[0] != losses
    still = Engine(
        model()[0], model()[1], solved(ONE), lambda p: torch.optim.SGD(p, 0.0), None, None, "cpu"
    )
    first, second = (float(still.step(batches()[0])) for _ in range(2))
    assert first != second
    still.steps = 0
    assert float(still.step(batches()[0])) == first
    torch.manual_seed(123)  # the global generator is not read
    still.steps = 0
    assert float(still.step(batches()[0])) == first


def test_one_device_with_micro_batches_and_recompute():
    for number, recompute in ((2, "none"), (8, "none"), (1, "full"), (4, "full")):
        check(
            run_steps(engine(solved(ONE, number, recompute)), batches()),
            f"{number} micro-batches, recompute {recompute}",
        )


@pytest.mark.slow
def test_two_devices(pool2):
    plans = [
        solved(DP2),
        solved(DP2, 2, "full"),
        solved(TP2),
        solved(TP2, 2),
        solved(TP2, 1, "full"),
    ]
    plans += [
        random_plan(model()[1], model()[2], setting(TP2, 2, rows=ROWS), seed) for seed in range(4)
    ]
    assert {("tp", "S(1)"), ("tp", "S(2)")} <= set().union(*map(shards, plans)), (
        "sequence and hidden shards"
    )
    for results in pool2.run(train, [plan.to_json() for plan in plans]):
        for plan, found in zip(plans, results, strict=True):
            check(found, f"{plan.mesh}, {plan.num_microbatches} micro-batches, {shards(plan)}")


@pytest.mark.slow
def test_four_devices(pool4):
    plans = [solved(DP2TP2), solved(DP2TP2, 2, "full"), solved(DP4, 2)]
    plans += [
        random_plan(model()[1], model()[2], setting(DP2TP2, 2, rows=ROWS), seed)
        for seed in range(4)
    ]
    for results in pool4.run(train, [plan.to_json() for plan in plans]):
        for plan, found in zip(plans, results, strict=True):
            check(found, f"{plan.mesh}, {plan.num_microbatches} micro-batches, {shards(plan)}")


def test_recompute_sees_its_own_micro_batch():
    """Backward of micro-batch k after the forward of k + 1 draws the masks of k."""
    one = engine(solved(ONE, 2, "full"))
    expected = engine(solved(ONE, 2))
    gradients = []
    for built, together in ((one, True), (expected, False)):
        work = built.batches.split(batches()[0])
        losses = []
        for k, inputs in enumerate(work.inputs):
            losses.append(built._passes.forward(built.program, inputs, built._noise(work, k))[0])
            if not together:
                losses.pop().backward()
        for loss in losses:
            loss.backward()
        gradients.append({name: leaf.grad for name, leaf in built._leaves.items()})
    for name, grad in gradients[0].items():
        torch.testing.assert_close(grad, gradients[1][name], rtol=1e-12, atol=1e-14)


def test_evaluation_drops_nothing_and_the_notes_tell():
    built, traced, _ = model()
    with torch.no_grad():
        expected = float(built.eval()(**batches()[0]))
    built.train()
    made = engine(solved(ONE, 1, "full"))
    assert float(made.eval_step(batches()[0])) == pytest.approx(expected, rel=1e-12)
    assert any("unfused" in note for note in notes(traced)) and not any(
        "random" in note for note in notes(traced)
    )


class Rand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) + torch.poisson(x.abs())).pow(2).mean()


def test_other_random_ops_are_named():
    assert any(
        "poisson" in note and "other random numbers" in note
        for note in notes(trace(Rand(), {"x": torch.ones(4, 4)}))
    )
