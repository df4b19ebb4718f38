"""Small models that tests write around one layer, trained on two ranks under every axis against one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.exactness import (
    Reference,
    run_steps,
    setting,
    sgd,
    solved_plan,
    token_batches,
    train,
    update_error,
)
from support.staged_runs import staged
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

WIDTH, VOCAB = 12, 9
MESHES = {"tp": MeshShape(tp=2), "dp": MeshShape(dp=2), "pp": MeshShape(pp=2)}


class Stack(nn.Module):
    """Tokens, two layers with residuals, a loss; layers map (batch, positions, WIDTH) to the same."""

    def __init__(self, layer: Callable[[], nn.Module], loss: Callable = F.cross_entropy) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.layers, self.loss = nn.ModuleList(layer() for _ in range(2)), loss

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.loss(self.head(x).flatten(0, 1), labels.flatten())


@cache
def built(maker: Callable[[], nn.Module]):
    """The model of a top-level function, its trace and its annotator, once a process; equal in every process."""
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model = maker().double()
    torch.set_rng_state(state)
    traced = trace(model, token_batches(VOCAB)[0])
    return model, traced, Annotator(traced)


def trained(rank: int, maker: Callable[[], nn.Module], texts: list[str]) -> list:
    """(losses, state) of each plan."""
    model, traced, _ = built(maker)
    batches = token_batches(VOCAB)
    return [
        run_steps(Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu"), batches)
        for text in texts
    ]


def assert_exact(
    pool2, maker: Callable[[], nn.Module], axes: str = "tp dp pp", micro_batches: int = 2
) -> None:
    """Two ranks train the model in micro-batches, over each axis, as one device does on the whole."""
    model, traced, annotator = built(maker)
    plans = []
    for axis in axes.split():
        mesh = MESHES[axis]
        plan = solved_plan(traced, annotator, setting(mesh, micro_batches))
        cuts = (len(traced.segments) // 2, len(traced.segments) - len(traced.segments) // 2)
        plans.append(staged(plan, traced, "gpipe", cuts) if mesh.pp > 1 else plan)
    expected: Reference = train(model, token_batches(VOCAB))
    for by_plan in pool2.run(trained, maker, [plan.to_json() for plan in plans]):
        for plan, (losses, state) in zip(plans, by_plan, strict=True):
            assert update_error(expected, state) <= 1.0, (str(plan.mesh), maker)
            assert losses == pytest.approx(expected.losses, rel=1e-9)
