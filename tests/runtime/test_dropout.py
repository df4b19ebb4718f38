"""Dropout under plans: any mesh, micro-batches and recompute train exactly as one device does, masks included."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.exactness import (
    Reference,
    random_plan,
    run_steps,
    setting,
    sgd,
    solved_plan,
    update_error,
)
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.planning.notes import notes
from autopar.runtime.engine import Engine

ROWS, SEQ, HIDDEN = 8, 6, 16
ONE, DP2, TP2, DP2TP2, DP4 = (
    MeshShape(),
    MeshShape(dp=2),
    MeshShape(tp=2),
    MeshShape(dp=2, tp=2),
    MeshShape(dp=4),
)


class Block(nn.Module):
    """Grouped attention with dropout on its probabilities, and an MLP with dropout inside and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 8),
            nn.Linear(HIDDEN, 8),
        )
        self.out, self.up, self.down = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, 24),
            nn.Linear(24, HIDDEN),
        )
        self.norm, self.drop = nn.LayerNorm(HIDDEN), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (
            linear(h).unflatten(-1, (-1, 4)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=0.25 if self.training else 0.0, enable_gqa=True
        )
        x = x + self.drop(self.out(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(x)))))


class Dropping(nn.Module):
    """Dropout after the embedding, on positions (no batch dim), in two equal blocks, on flattened tokens and on whole channels."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(40, HIDDEN), nn.Parameter(torch.randn(SEQ, HIDDEN))
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head, self.drop = nn.Linear(HIDDEN, 40), nn.Dropout(0.3)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids)) + self.drop(self.places)
        for layer in self.layers:
            x = layer(x)
        x = (
            F.dropout2d(x.unflatten(-1, (4, 4)).permute(0, 2, 1, 3), 0.2, self.training)
            .permute(0, 2, 1, 3)
            .flatten(2)
        )
        return F.cross_entropy(
            self.head(F.dropout(x.flatten(0, 1), 0.2, self.training)), labels.flatten()
        )


@cache
def model() -> tuple[nn.Module, object, Annotator]:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    built = Dropping().double()
    torch.set_rng_state(state)
    traced = trace(built, batches()[0])
    return built, traced, Annotator(traced)


@cache
def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(3):
        ids, labels = (torch.randint(0, 40, (ROWS, SEQ), generator=generator) for _ in range(2))
        for row in range(ROWS):
            labels[row, : row % SEQ] = -100
        found.append({"ids": ids, "labels": labels})
    return found


def engine(plan: Plan, seed: int = 0) -> Engine:
    return Engine(model()[0], model()[1], plan, sgd, None, None, "cpu", seed=seed)


def solved(mesh: MeshShape, number: int = 1, recompute: str = "none") -> Plan:
    return solved_plan(model()[1], model()[2], setting(mesh, number, recompute, ROWS))


@cache
def alone(seed: int = 0) -> tuple[list[float], Reference]:
    """One device, the whole batch at once."""
    before = {k: v.clone() for k, v in model()[0].state_dict().items()}
    losses, after = run_steps(engine(solved(ONE), seed), batches())
    return losses, Reference(losses, before, after)


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


def check(found: tuple[list[float], dict[str, Tensor]], what: str) -> None:
    losses, result = alone()
    assert found[0] == pytest.approx(losses, rel=1e-9), what
    assert update_error(result, found[1]) <= 1.0, what


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
            losses.append(built._forward(built.program, inputs, built._noise(work, k))[0])
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
        return (self.inner(x) + torch.rand_like(x)).pow(2).mean()


def test_other_random_ops_are_named():
    assert any(
        "rand_like" in note and "other random numbers" in note
        for note in notes(trace(Rand(), {"x": torch.ones(4, 4)}))
    )
