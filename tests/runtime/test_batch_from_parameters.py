"""Blocks that make values of the batch's size from parameters alone: learned queries, prompts and positions, expanded over the batch."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.exactness import Reference, run_steps, setting, sgd, solved_plan, train, update_error
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import plan, trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

WIDTH, TOKENS, ROWS = 8, 5, 8


def attention() -> nn.Module:
    return nn.MultiheadAttention(WIDTH, 2, batch_first=True)


class Learned(nn.Module):
    """Learned tokens, through a layer, for each row."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.tokens, self.layer = (
            nn.Parameter(torch.randn(count, WIDTH) / 2),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, rows: int) -> Tensor:
        return torch.tanh(self.layer(self.tokens))[None].repeat(rows, 1, 1)


class Places(nn.Module):
    """Positions of a grid, learned by row and column."""

    def __init__(self) -> None:
        super().__init__()
        self.across, self.down = nn.Embedding(TOKENS, WIDTH // 2), nn.Embedding(TOKENS, WIDTH // 2)

    def forward(self, rows: int) -> Tensor:
        numbers = torch.arange(TOKENS)
        return torch.cat([self.across(numbers), self.down(numbers)], -1).expand(rows, -1, -1)


class Ages(nn.Module):
    """Learned decay over counted positions: a range as long as the batch, of which only the length counts."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.rand(WIDTH))

    def forward(self, rows: int) -> Tensor:
        return (self.rate * torch.ones(rows, TOKENS, 1, dtype=self.rate.dtype)).cumsum(1)


class Vision(nn.Module):
    """A kind of block in a list of two, which are read later than they are made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, WIDTH), nn.Linear(WIDTH, 4)
        self.layers = nn.ModuleList(attention() for _ in range(2))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(self.outer(self.run(self.inner(x))).mean(1), target)


class ClassTokens(Vision):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.ModuleList([Learned(1), Learned(2)])

    def run(self, x: Tensor) -> Tensor:
        x = torch.cat([*(tokens(x.shape[0]) for tokens in self.tokens), x], 1)
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return x[:, :2]


class DeepPrompts(Vision):
    def __init__(self) -> None:
        super().__init__()
        self.prompts = nn.ModuleList(Learned(2) for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        prompts = [prompt(x.size(0)) for prompt in self.prompts]
        for layer, prompt in zip(self.layers, prompts, strict=True):
            y = torch.cat([prompt, x], 1)
            x = (y + layer(y, y, y, need_weights=False)[0])[:, 2:]
        return x


class Queries(Vision):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.queries = (
            nn.ModuleList(Places() for _ in range(2)),
            nn.ModuleList(Learned(3) for _ in range(2)),
        )

    def run(self, x: Tensor) -> Tensor:
        places, queries = (
            [make(x.shape[0]) for make in makers] for makers in (self.places, self.queries)
        )
        for layer, place, query in zip(self.layers, places, queries, strict=True):
            query = query + layer(query, x + place, x, need_weights=False)[0]
        return query


class Decay(Vision):
    def __init__(self) -> None:
        super().__init__()
        self.ages = nn.ModuleList(Ages() for _ in range(2))

    def run(self, x: Tensor) -> Tensor:
        ages = [age(x.shape[0]) for age in self.ages]
        for layer, age in zip(self.layers, ages, strict=True):
            x = layer(x * age, x, x, need_weights=False)[0]
        return x


MODELS = {kind.__name__: kind for kind in (ClassTokens, DeepPrompts, Queries, Decay)}


@cache
def model(name: str) -> tuple:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    built = MODELS[name]().double()
    batches = [
        {"x": torch.randn(ROWS, TOKENS, 6).double(), "target": torch.randn(ROWS, 4).double()}
        for _ in range(3)
    ]
    torch.set_rng_state(state)
    return built, batches, trace(built, batches[0], precision="fp64")


@cache
def reference(name: str) -> Reference:
    built, batches, _ = model(name)
    return train(built, batches, call=lambda module, batch: module(**batch))


def steps(rank: int, name: str, text: str):
    built, batches, traced = model(name)
    return run_steps(Engine(built, traced, Plan.from_json(text), sgd, None, None, "cpu"), batches)


@pytest.mark.parametrize(
    ("name", "dp", "tp", "pp", "number"),
    [
        pytest.param(name, *layout, marks=pytest.mark.slow if place != turn or place % 3 else ())
        for place, name in enumerate(MODELS)
        for turn, layout in enumerate([(2, 1, 1, 1), (2, 1, 1, 2), (1, 2, 1, 1), (1, 1, 2, 2)])
    ],
)
def test_training_is_exact(pool2, name, dp, tp, pp, number):
    built, batches, traced = model(name)
    if pp == 1:
        found = solved_plan(traced, Annotator(traced), setting(MeshShape(dp=dp, tp=tp), number))
    else:
        pin = {"pp": pp, "micro_batch": ROWS // number}
        found = plan(built, "cpu:2", batches[0], ROWS, pin, traced=traced, precision="fp64")
    for losses, state in pool2.run(steps, name, found.to_json()):
        assert update_error(reference(name), state) <= 1.0
        assert losses == pytest.approx(reference(name).losses, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_only_segments_without_the_batch_read_a_model_input_for_it(name):
    traced = model(name)[2]
    for segment in traced.segments:
        placeholders = traced.classes[segment.class_index].graph.find_nodes(op="placeholder")
        unused = [
            source.name
            for node, source in zip(placeholders, segment.inputs, strict=True)
            if not node.users
        ]
        assert unused in ([], ["x"]) and (not unused or len(placeholders) == 1)
