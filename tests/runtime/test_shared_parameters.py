"""Parameters that segments share in any way: every rank is charged for each that it reads once, and trains it as one device does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples, slow_but
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

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.recheck.plan_costs import owned_by, segments_by_rank, stage_segments
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest
from autopar.runtime.engine import Engine

VOCAB, WIDTH = 9, 8


class Layer(nn.Module):
    def __init__(self, up: nn.Parameter, down: nn.Parameter) -> None:
        super().__init__()
        self.up, self.down, self.gain = up, down, nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * F.linear(torch.tanh(F.linear(x, self.up)), self.down)


class Web(nn.Module):
    """Layer k has the matrices number `up[k]` and `down[k]`; `before` and `after` are numbers of matrices (of the layers' `up`, then of
    their `down`) whose squares are added up before the first layer and after the last, and count in the loss."""

    def __init__(
        self,
        up: tuple[int, ...],
        down: tuple[int, ...],
        before: tuple[int, ...],
        after: tuple[int, ...],
        tied: bool,
    ) -> None:
        super().__init__()
        own = {
            kind: [nn.Parameter(torch.empty(size)) for _ in up]
            for kind, size in (("up", (3, WIDTH)), ("down", (WIDTH, 3)))
        }
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(
            Layer(own["up"][a], own["down"][b]) for a, b in zip(up, down, strict=True)
        )
        self.early, self.late = (
            [(own["up"] + own["down"])[number] for number in of] for of in (before, after)
        )
        for number, parameter in enumerate((*self.early, *self.late)):
            self.register_parameter(f"read{number}", parameter)
        if tied:
            self.head.weight = self.embed.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for parameter in self.early:
            x = x + 0.01 * parameter.square().mean()
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        for parameter in self.late:
            logits = logits * (1 + 0.01 * parameter.square().mean())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@cache
def web(*how):
    state = torch.get_rng_state()
    torch.manual_seed(3)
    model = Web(*how).double()
    torch.set_rng_state(state)
    traced = trace(model, token_batches(VOCAB)[0])
    return model, traced, Annotator(traced)


def cuts(count: int, parts: int, first: int) -> list[tuple[int, ...]]:
    """Ways to cut so many segments into parts, of which the first has at least `first`."""
    return (
        [(count,)]
        if parts == 1
        else [
            (n, *more)
            for n in range(first, count - parts + 2)
            for more in cuts(count - n, parts - 1, 1)
        ]
    )


@st.composite
def webs(draw):
    layers = draw(st.integers(2, 5))
    numbers = st.integers(0, layers - 1)
    pick = st.one_of(st.just(tuple(range(layers))), st.tuples(*[numbers] * layers))
    up, down = draw(pick), draw(pick)
    used = sorted({*up, *(layers + n for n in down)})
    some = st.lists(st.sampled_from(used), max_size=3, unique=True).map(tuple)
    return up, down, draw(some), draw(some), draw(st.booleans())


@settings(max_examples=examples(3, 25))
@given(webs(), st.data())
def test_a_rank_is_charged_for_what_it_reads_once(how, data):
    model, traced, annotator = web(*how)
    assert len(traced.layers) == len(how[0]), "layers stay layers, whatever they share"
    assert sum(spec.trainable for spec in traced.parameters.values()) == len(
        list(model.parameters())
    )
    ranks = data.draw(st.integers(1, min(4, len(how[0]))))
    plan = solved_plan(traced, annotator, setting(MeshShape(pp=ranks), ranks))
    if ranks > 1:
        plan = staged(
            plan,
            traced,
            "1f1b",
            data.draw(st.sampled_from(cuts(len(traced.segments), ranks, 2))),
            ("none",),
        )
        plan = replace(plan, predicted=replace(plan.predicted, peak_memory_bytes=(0,) * ranks))
    request = PlanRequest(
        ClusterSpec.parse(f"cpu:{ranks}"), plan.global_batch, Pins(), plan.precision, "web"
    )
    of_stage = stage_segments(plan, traced) if ranks > 1 else [range(len(traced.segments))]
    on = segments_by_rank(plan, traced, request)
    for rank, held in enumerate(of_stage):
        charged = sum(
            s.static_bytes - s.gradient_bytes - s.optimizer_bytes for s in owned_by(*on[rank], held)
        )
        own = {
            name
            for n in held
            for name in traced.segments[n].parameters
            if name in traced.parameters
        }  # not constants
        assert charged == 8 * sum(prod(traced.parameters[name].shape) for name in own)
    check_what_is_gathered(traced, annotator)


def check_what_is_gathered(traced, annotator):
    """ZeRO 3 has room for what a segment alone reads, and from last reader to first for what others read too, with its gradient."""
    model = annotator.annotate(replace(setting(MeshShape(dp=2), 1), zero=3))
    readers: dict[str, list[int]] = {}
    for number, segment in enumerate(traced.segments):
        for name in segment.parameters:
            readers.setdefault(name, []).append(number)
    for number, segment in enumerate(traced.segments):
        needed = 0
        for name, of in readers.items():
            if name in traced.parameters and of[0] <= number <= of[-1]:
                needed += 8 * prod(traced.parameters[name].shape) * (1 if of[0] == of[-1] else 2)
        assert model.classes[segment.class_index].workspace_bytes >= needed


CASES = {
    "a loss that reads layers": ((0, 1, 2, 3), (0, 1, 2, 3), (), (0, 3, 5), False),
    "what comes first reads layers": ((0, 1, 2, 3), (0, 1, 2, 3), (1, 6), (6,), True),
    "pairs share": ((0, 0, 2, 2), (0, 0, 2, 2), (), (), True),
    "in turn, one apart": ((0, 1, 0, 3), (0, 0, 1, 1), (3,), (4,), False),
}
RUNS = (  # mesh, ZeRO, schedule, segments of each stage, micro-batches
    (MeshShape(dp=2, tp=2), 3, "none", None, 2),
    (MeshShape(pp=2, tp=2), 0, "1f1b", (3, 3), 2),
    (MeshShape(pp=2, dp=2), 0, "zero_bubble", (2, 4), 4),
    (MeshShape(pp=4), 0, "gpipe", (2, 1, 1, 2), 4),
)


def trained(rank: int, how: tuple, texts: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    model, traced, _ = web(*how)
    return [
        run_steps(
            Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu"),
            token_batches(VOCAB),
        )
        for text in texts
    ]


@pytest.mark.parametrize("name", slow_but(["in turn, one apart"], CASES))
def test_they_train_as_on_one_device(pool4, name):
    model, traced, annotator = web(*CASES[name])
    plans = []
    for mesh, zero, schedule, sizes, number in RUNS:
        plan = replace(solved_plan(traced, annotator, setting(mesh, number)), zero=zero)
        plans.append(staged(plan, traced, schedule, sizes, ("none",)) if sizes else plan)
    expected: Reference = train(model, token_batches(VOCAB))
    for plan, (losses, state) in zip(
        plans, pool4.run(trained, CASES[name], [plan.to_json() for plan in plans])[0], strict=True
    ):
        assert update_error(expected, state) <= 1.0, (
            str(plan.mesh),
            plan.schedule,
            update_error(expected, state),
        )
        assert losses == pytest.approx(expected.losses, rel=1e-9)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH, bias=False),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Halves(nn.Module):
    """The loss reads views of a layer's weight that are made before the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        self.layers = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x, (gate, up) = self.embed(input_ids), self.layers[0].both.weight.chunk(2, 0)
        for layer in self.layers:
            x = layer(x)
        return (
            F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.1 * (gate * up).mean()
        )


@cache
def halves():
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model = Halves().double()
    torch.set_rng_state(state)
    traced = trace(model, token_batches(VOCAB)[0])
    return model, traced, Annotator(traced)


def trained_halves(rank: int, text: str) -> tuple[list[float], dict[str, Tensor]]:
    model, traced, _ = halves()
    return run_steps(
        Engine(model, traced, Plan.from_json(text), sgd, None, None, "cpu"), token_batches(VOCAB)
    )


@pytest.mark.parametrize("offload", ["none", "parameters"])
def test_views_of_a_gathered_parameter_stay_until_backward(pool4, offload):
    model, traced, annotator = halves()
    plan = replace(
        solved_plan(traced, annotator, setting(MeshShape(dp=4), 2)), zero=3, offload=offload
    )
    expected: Reference = train(model, token_batches(VOCAB))
    for losses, state in pool4.run(trained_halves, plan.to_json()):
        assert update_error(expected, state) <= 1.0 and losses == pytest.approx(
            expected.losses, rel=1e-9
        )
