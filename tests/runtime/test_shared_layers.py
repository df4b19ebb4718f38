"""Layers that share their parameters, as in ALBERT and Zamba: charged once for them, audited, and exact wherever they run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
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
from torch.nn import functional as F

import autopar
from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.recheck.audit import audit
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.runtime.engine import Engine


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(3 * width, width),
        )
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Shared(nn.Module):
    """Layers take turns with some sets of parameters; the gain is of each layer alone."""

    def __init__(self, sets: int, layers: int = 6, width: int = 8, vocab: int = 9) -> None:
        super().__init__()
        self.embed, self.layers = (
            nn.Embedding(vocab, width),
            nn.ModuleList(Layer(width) for _ in range(layers)),
        )
        for number, layer in enumerate(self.layers):
            layer.norm, layer.up, layer.down = (
                getattr(self.layers[number % sets], name) for name in ("norm", "up", "down")
            )
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def shared(sets: int):
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = Shared(sets).double()
    torch.set_rng_state(state)
    traced = trace(model, token_batches(9)[0])
    return model, traced, Annotator(traced)


def trained(rank: int, sets: int, texts: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    model, traced, _ = shared(sets)
    return [
        run_steps(
            Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu"), token_batches(9)
        )
        for text in texts
    ]


CASES = [  # sets, mesh, ZeRO, schedule, segments of each stage (of 8), micro-batches, recompute of segments in turn
    (1, MeshShape(dp=2, tp=2), 3, "none", (8,), 2, ("none",)),
    (2, MeshShape(dp=4), 1, "none", (8,), 1, ("full", "none")),
    (1, MeshShape(pp=2, dp=2), 1, "1f1b", (3, 5), 4, ("none", "full")),
    (2, MeshShape(pp=2, tp=2), 0, "interleaved_1f1b", (2, 2, 2, 2), 2, ("none",)),
    (2, MeshShape(pp=4), 0, "zero_bubble", (2, 2, 2, 2), 4, ("none",)),
    (5, MeshShape(pp=2, dp=2), 0, "gpipe", (4, 4), 2, ("none",)),
]


@pytest.mark.parametrize(
    "sets", [1, *(pytest.param(sets, marks=pytest.mark.slow) for sets in (2, 5))]
)
def test_they_train_as_on_one_device(pool4, sets):
    model, traced, annotator = shared(sets)
    plans = []
    for own, mesh, zero, schedule, cuts, number, modes in CASES:
        if own == sets:
            plan = replace(solved_plan(traced, annotator, setting(mesh, number)), zero=zero)
            plans.append(
                staged(plan, traced, schedule, cuts, modes)
                if mesh.pp > 1 or modes != ("none",)
                else plan
            )
    expected: Reference = train(model, token_batches(9))
    for by_plan in pool4.run(trained, sets, [plan.to_json() for plan in plans]):
        for plan, (losses, state) in zip(plans, by_plan, strict=True):
            assert update_error(expected, state) <= 1.0, (
                str(plan.mesh),
                plan.schedule,
                update_error(expected, state),
            )
            assert losses == pytest.approx(expected.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("pin", "sets"),
    [
        pytest.param(pin, sets, marks=pytest.mark.slow if (place + sets) % 3 or place < 2 else ())
        for place, pin in enumerate(
            [
                {"pp": 1},
                {"pp": 2, "schedule": "1f1b"},
                {"pp": 2, "schedule": "interleaved_1f1b", "vpp": 2},
            ]
        )
        for sets in (1, 2, 3)
    ],
)
def test_a_rank_has_room_for_each_set_once(sets, pin):
    with torch.device("meta"):
        model = Shared(sets, layers=7, width=256, vocab=1000)
        batch = {name: torch.zeros(8, 64, dtype=torch.long) for name in ("input_ids", "labels")}
    cluster = ClusterSpec.parse(f"h100:{pin['pp']}")
    pin = {"tp": 1, "dp": 1, "micro_batch": 1, "zero": 0, **pin}
    plan = autopar.plan(model, cluster, batch, pin=pin)
    traced = trace(model, batch, precision="bf16")
    request = PlanRequest(cluster, plan.global_batch, Pins.of(pin), "bf16", type(model).__name__)
    assert not audit(plan, traced, request).findings
    numel = {name: p.numel() for name, p in model.named_parameters(remove_duplicate=False)}
    name_of = {id(p): name for name, p in model.named_parameters()}
    own = {name: name_of[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    stages = plan.stages or (tuple(segment.name for segment in traced.segments),)
    parameters = {
        segment.name: {own[name] for name in segment.parameters if name in own}
        for segment in traced.segments
    }
    held = [
        set().union(*(parameters[name] for stage in stages[rank :: pin["pp"]] for name in stage))
        for rank in range(pin["pp"])
    ]
    sizes = [2 * sum(numel[name] for name in of) for of in held]  # bf16
    assert plan.predicted.memory["parameters"] in sizes
