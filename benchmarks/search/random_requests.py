"""Random requests, and random pins that agree with a candidate of a search space."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod
from typing import Any

from autopar_cost_models import device

from autopar import api
from autopar.foreign.limits.frameworks import limits_of, restriction_of
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import AXES
from autopar.ir.model_shape import ModelShape
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.models.shapes import shape_of_spec
from autopar.planning.model_facts import divisors
from autopar.request.options import TOLERANCE
from autopar.request.pins import Pins, is_recompute, pin_text
from autopar.request.plan_request import PlanRequest, choose_precision
from autopar.solve.costs.candidate import MIXED, MODES, Candidate

MODELS = {
    "gpt2-small": 0.12, "gpt2-xl": 1.6, "llama3.2-1b": 1.2, "qwen2.5-0.5b": 0.5, "smollm2-1.7b": 1.7,
    "olmo2-1b": 1.5, "qwen3-4b": 4, "llama3-8b": 8, "llama2-13b": 13, "granite3-1b-a400m": 1.3,
    "olmoe-1b-7b": 7, "bert-large": 0.34, "deepseek-v2-lite": 16, "gemma2-2b": 2.6, "qwen2.5-32b": 33,
    "mixtral-8x7b": 47, "llama3-70b": 71,
}  # fmt: skip
"""Names and billions of parameters."""
DEVICES = (
    *("h100", "a100-80g", "a100-40g", "h200", "b200", "mi300x", "v100-32g"),
    *("l4", "a10g", "rtx3090", "rtx4090", "rtx5090", "l40s", "t4"),
)
NETWORKS_BPS = (1.25e9, 3.125e9, 12.5e9, 50e9)
"""Ethernet of 10 and 25 Gb/s, and InfiniBand of 100 and 400 Gb/s."""
_STATE_BYTES = 16
"""Bytes of a parameter with its gradient and the states of Adam, in mixed precision."""
TARGETS = ("megatron", "torchtitan", "deepspeed", "accelerate")
_PINS: Mapping[str, Sequence[Any]] = {
    "tp": (), "pp": (), "zero": (0, 1, 3), "micro_batch": (1, 2, 4), "recompute": ("none", "full"),
}  # fmt: skip
"""Pins of a request and their values; divisors of the devices if there are none."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for a plan of `batch` sequences of `seq` tokens a step, on `shape` (nodes, devices of
    a node). `network_Bps` is the bandwidth between nodes for each device.
    """

    model: str
    device: str
    shape: tuple[int, int]
    network_Bps: float
    batch: int
    seq: int
    target: str = ""
    pin: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        nodes, each = self.shape
        network = f" {self.network_Bps * 8e-9:g} Gb/s" if nodes > 1 else ""
        target = f" --target {self.target}" if self.target else ""
        pin = f" --pin {pin_text(self.pin)}" if self.pin else ""
        where = f"{nodes}x{each} {self.device}{network}"
        return f"{self.model} on {where}: {self.batch} x {self.seq}{target}{pin}"

    def traced(self) -> TracedModel:
        """The traced model, captured once as long as few others come between."""
        return _traced(self.model, self.seq)

    def request(self) -> PlanRequest:
        """The request with the defaults of the command line, and with runners-up."""
        cluster = ClusterSpec.make(self.device, *self.shape, inter_bandwidth_Bps=self.network_Bps)
        request = PlanRequest(
            cluster.kept_free(),
            self.batch,
            Pins(),
            precision=choose_precision(cluster),
            model_name=self.model,
            tolerance=TOLERANCE,
            runners_up=True,
        )
        return self.pinned(request, {})

    def pinned(self, request: PlanRequest, pin: Mapping[str, Any]) -> PlanRequest:
        """The request with more pins, within its target."""
        request = replace(request, pin=Pins.of({**pin, **self.pin}), restriction=None, asked=None)
        if not self.target:
            return request
        generation = request.cluster.one_kind.device.generation
        software = limits_of(self.target).software_for(generation, compute=request.precision)
        shape = shape_of_spec(parse_model(self.model)) or ModelShape()
        limits = restriction_of(self.target, shape, self.seq)
        return replace(request, software=software).within(limits)


@lru_cache(maxsize=4)
def _traced(model: str, seq: int) -> TracedModel:
    return api.trace_spec(parse_model(model), seq)


def random_request(draw: random.Random, models: Sequence[str] = tuple(MODELS)) -> Asked:
    """A random request of 1 to 64 devices. One in three is within a target, one in four has a pin.
    Where a model of `MODELS` hardly fits, the devices are drawn again, at most five times.
    """
    model = draw.choice(models)
    for _ in range(5):
        device_name, each = draw.choice(DEVICES), draw.choice((1, 2, 4, 8, 8))
        nodes = draw.choice((1, 1, 2, 4, 8)) if each > 1 else 1
        memory_bytes = nodes * each * device(device_name).memory_bytes
        if _STATE_BYTES * MODELS.get(model, 0) * 1e9 < memory_bytes:
            break
    seq = min(draw.choice((512, 1024, 2048, 4096, 8192, 32768)), parse_model(model).max_seq)
    batch = nodes * each * draw.choice((1, 2, 4, 8, 24, 64))
    target = draw.choice(TARGETS) if draw.random() < 0.33 else ""
    pin = {}
    if draw.random() < 0.25:
        name = draw.choice(tuple(_PINS))
        pin[name] = draw.choice(_PINS[name] or divisors(nodes * each))
    network_Bps = draw.choice(NETWORKS_BPS)
    return Asked(model, device_name, (nodes, each), network_Bps, batch, seq, target, pin)


def random_pins(c: Candidate, draw: random.Random) -> dict[str, Any]:
    """Random full or partial pins that agree with a candidate. A schedule or stages of a rank are
    pinned with pp alone, since they are refused without.
    """
    degrees = ("pp", "dp", "cp", "tp", "ep")
    pin: dict[str, Any] = {name: getattr(c.mesh, name) for name in degrees}
    pin |= {"micro_batch": c.micro_batch, "zero": c.zero, "shard": c.shard}
    if draw.random() < 0.5:
        pin["order"] = c.mesh.order or "-".join(AXES)
    pin["recompute"] = draw.choice(MODES) if c.recompute == MIXED else c.recompute
    if not is_recompute(pin["recompute"]):
        del pin["recompute"]
    if c.schedules:
        pin["schedule"], pin["vpp"] = draw.choice(c.schedules)
    names = list(pin)
    draw.shuffle(names)
    left_out = draw.choice((0.0, 0.2, 0.5))
    kept = [name for name in names if draw.random() >= left_out]
    if {"schedule", "vpp"} & set(kept) and "pp" not in kept:
        kept.append("pp")
    return {name: pin[name] for name in kept}


def respelled(pin: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The same pins in another spelling and order. The degree that follows from the others is left
    out, or said, and so is that there is no pipeline.
    """
    shares = ("tp", "pp", "cp", "dp")
    degrees = {name: pin[name] for name in shares if name in pin}
    other = dict(reversed(pin.items()))
    if len(degrees) == 4:
        del other["dp"]
    elif len(degrees) == 3:
        (missing,) = set(shares) - degrees.keys()
        other[missing] = devices // prod(degrees.values())
    if pin.get("pp") == 1:
        other |= {"schedule": "none", "vpp": 1}
    return other
