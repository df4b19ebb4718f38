"""Random small tasks for `every_point.py`: captured models of a few layers, on a few devices."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from autopar_cost_models.memory import STATE_RECIPES
from torch import nn

from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.planning.space import space_rules
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision
from autopar.request.software import Software
from benchmarks.search.printed_space import Layout, layouts

MODELS = (
    "llama:layers=2,hidden=64,heads=1,vocab=64,seq=16", "llama:layers=3,hidden=1024,heads=1,vocab=1024,seq=256",
    "llama:layers=4,hidden=256,heads=1,vocab=8192,seq=64", "llama:layers=2,hidden=4096,heads=1,vocab=512,seq=512",
    "llama:layers=2,hidden=128,heads=1,vocab=64,seq=8192", "gpt:layers=4,hidden=512,heads=1,vocab=2048,seq=128",
    "gpt:layers=3,hidden=64,heads=1,vocab=128,seq=32,tied=true", "gpt:layers=5,hidden=256,heads=1,vocab=512,seq=64",
    "llama:layers=4,hidden=2048,heads=1,vocab=4096,seq=128,tied=true",
    "moe:layers=2,hidden=256,heads=1,vocab=256,experts=4,top_k=2,seq=64",
    "moe:layers=3,hidden=512,heads=1,vocab=512,experts=2,top_k=1,seq=128", "linear:2", "linear:3",
)  # fmt: skip
"""One attention head, so that tp is 1; the words let any tp divide the devices for linear models."""
SHAPES = ((1, 1), (1, 2), (1, 3), (1, 4), (1, 4), (1, 6), (1, 8), (2, 1), (2, 2), (2, 4), (4, 2))
DEVICES = ("h100", "a100-40g", "l4", "t4", "v100-32g", "rtx4090", "mi300x")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


class Linear(nn.Module):
    """A row of `layers` linear layers with ReLU, and a squared loss: few strategies for each."""

    def __init__(self, layers: int, width: int = 512, ends: int = 128) -> None:
        super().__init__()
        self.embed = nn.Linear(ends, width, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(layers)
        )
        self.head = nn.Linear(width, ends, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.head(x), y)


@cache
def traced_of(model: str) -> TracedModel:
    """The captured model of one of `MODELS`."""
    family, _, size = model.partition(":")
    if family == "linear":
        example = {name: torch.zeros(2, 128) for name in "xy"}
        return api.trace(Linear(int(size)), example)
    spec = parse_model(model)
    return api.trace_spec(spec, spec.max_seq)


def words_of(request: PlanRequest, traced: TracedModel) -> dict[str, str]:
    """The words of a request's space, by choice, as its certificate prints them."""
    return {rule.choice: rule.values for rule in space_rules(request, traced)}


def random_task(draw: random.Random) -> PlanRequest:
    """A random request for one of `MODELS`, with pins of one of its layouts in two of five."""
    model = draw.choice(MODELS)
    nodes, each = draw.choice(SHAPES[:4] if model.startswith("linear") else SHAPES)
    batch = draw.choice(BATCHES[:6] if model.startswith("linear") else BATCHES)
    while batch % (nodes * each) and draw.random() < 0.8:  # else often no layout splits it
        batch = draw.choice(BATCHES)
    network_Bps = draw.choice((1.25e9, 12.5e9, 50e9))
    cluster = ClusterSpec.make(draw.choice(DEVICES), nodes, each, inter_bandwidth_Bps=network_Bps)
    precision = draw.choice(("fp32", choose_precision(cluster), choose_precision(cluster)))
    recipe = draw.choice((None, *STATE_RECIPES)) if precision == "bf16" else None
    software = Software(
        state_recipe=recipe,
        fused_optimizer=draw.random() < 0.7,
        keeps_stage_outputs=draw.random() < 0.5,
    )
    request = PlanRequest(cluster, batch, Pins(), precision, model, software)
    if model.startswith("linear") and each * nodes > 3:
        request = replace(request, pin=Pins.of({"pp": 1}))
    traced = traced_of(model)
    if draw.random() < 0.4:
        listed = list(layouts(words_of(request, traced)))
        pin = (
            random_pins(draw, draw.choice(listed), len(traced.layers), cluster.host is not None)
            if listed
            else {}
        )
        request = replace(request, pin=Pins.of({**pin, **request.pin}))
    return request


def random_pins(draw: random.Random, one: Layout, layers: int, offloads: bool) -> dict[str, Any]:
    """Random pins that agree with a layout. `offloads`: whether offloading is among them."""
    pin: dict[str, Any] = {name: getattr(one, name) for name in ("pp", "tp", "dp", "ep", "micro_batch", "zero")}  # fmt: skip
    pin = {name: pin[name] for name in draw.sample(list(pin), draw.randint(1, 3))}
    if draw.random() < 0.3:
        pin["recompute"] = draw.choice(one.modes)
    if offloads and draw.random() < 0.4:
        kind = draw.choice(("optimizer", "parameters"))
        pin["offload"] = "optimizer" if one.pp > 1 else kind  # parameters need pp=1
        pin = {name: value for name, value in pin.items() if name != "zero"}
    elif one.schedules and draw.random() < 0.5:
        pin["pp"] = one.pp
        pin["schedule"], pin["vpp"] = draw.choice(one.schedules)
        if draw.random() < 0.5:
            cuts = sorted(draw.sample(range(1, layers), one.pp * pin["vpp"] - 1))
            sizes = [b - a for a, b in pairwise((0, *cuts, layers))]
            pin["stages"] = "-".join(map(str, sizes))
            if pin["vpp"] == 1 and draw.random() < 0.5:
                del pin["schedule"], pin["vpp"]
    return pin
