"""A model with dropout, trained under plans and on one device."""

from __future__ import annotations

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
    update_error,
)
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
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


def check(found: tuple[list[float], dict[str, Tensor]], what: str) -> None:
    losses, result = alone()
    assert found[0] == pytest.approx(losses, rel=1e-9), what
    assert update_error(result, found[1]) <= 1.0, what
