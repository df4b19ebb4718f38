"""Models whose updates tests change: by optimizers, hooks, clipping and tensors that the user sets.

No gradient is zero but for rounding, which signs and divisors by norms would magnify.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from support.exactness import Reference, setting, solved_plan
from support.meshes import DP2, ONE, PP2, TP2
from support.staged_runs import staged
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.runtime.engine import Engine

ROWS, STEPS = 8, 3
CELLS = {
    "one": (ONE, 0, 2),
    "dp2": (DP2, 0, 2),
    "tp2": (TP2, 0, 2),
    "pp2": (PP2, 0, 2),
    "zero1": (DP2, 1, 2),
    "zero3": (DP2, 3, 2),
}
"""Mesh, ZeRO stage and micro-batches."""
PAIRS = ("dp2", "tp2", "pp2", "zero1", "zero3")
"""The cells that two ranks run."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


class Updated(nn.Module):
    """Four layers between two projections; the loss weighs its columns by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Linear(6, 8)
        self.layers = nn.ModuleList([Layer() for _ in range(4)])
        self.head = nn.Linear(8, 4)
        self.register_buffer("weights", torch.tensor([1.0, 0.5, 2.0, 1.5]))
        self.register_buffer("scale", torch.tensor(1.0))
        self.temperature = 1.0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = layer(x)
        distance = self.head(x) * self.scale * self.temperature - labels
        return (distance.square() * self.weights).mean()


@dataclass(frozen=True)
class Case:
    model: nn.Module
    batches: tuple[dict[str, Tensor], ...]
    traced: TracedModel
    annotator: Annotator


@cache
def case() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Updated().double()
        batches = tuple(
            {"x": torch.randn(ROWS, 6).double(), "labels": torch.randn(ROWS, 4).double()}
            for _ in range(STEPS + 3)
        )
    traced = trace(model, batches[0])
    return Case(model, batches, traced, Annotator(traced))


@cache
def plan_of(cell: str, precision: str = "fp64") -> Plan:
    mesh, zero, number = CELLS[cell]
    found = case()
    plan = solved_plan(found.traced, found.annotator, setting(mesh, number))
    if mesh.pp > 1:
        count = len(found.traced.segments)
        plan = staged(plan, found.traced, "1f1b", (count // 2, count - count // 2))
    return replace(plan, zero=zero, precision=precision)


def engine_of(cell: str, factory: Callable, **options: Any) -> tuple[Engine, nn.Module]:
    """The engine, and the model that it was made of, which the test may change."""
    found = case()
    model = copy.deepcopy(found.model)
    max_grad_norm = options.pop("max_grad_norm", None)
    engine = Engine(
        model, found.traced, plan_of(cell), factory, max_grad_norm, None, "cpu", **options
    )
    return engine, model


def go(engine: Engine, steps: int = STEPS, first: int = 0) -> list[float]:
    return [
        float(engine.step(engine.local_batch(batch)))
        for batch in case().batches[first : first + steps]
    ]


def eager(
    factory: Callable,
    clip: Callable[[nn.Module], None] | None = None,
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None,
    named: bool = False,
    steps: int = STEPS,
) -> Reference:
    """Steps on one device in eager mode. `between(step, model, optimizer)` runs before each."""
    model = copy.deepcopy(case().model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    optimizer = factory(trained if named else [p for _, p in trained])
    losses = []
    for step, batch in enumerate(case().batches[:steps]):
        if between is not None:
            between(step, model, optimizer)
        model.zero_grad()
        loss = model(**batch)
        loss.backward()
        if clip is not None:
            clip(model)
        optimizer.step()
        losses.append(loss.item())
    return Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()})


def eager_by_closure(factory: Callable, first: bool, steps: int = STEPS) -> Reference:
    """As `eager`, for steps that take a closure. `first`: gradients are there before the step."""
    model = copy.deepcopy(case().model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer, losses = factory(list(model.parameters())), []
    for batch in case().batches[:steps]:
        seen: list[float] = []

        def closure(batch=batch, seen=seen) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(**batch)
            loss.backward()
            seen.append(loss.item())
            return loss

        if first:
            closure()
        optimizer.step(closure)
        losses.append(seen[0])
    return Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()})


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 0.02, weight_decay=0.1)
