"""One model, traced once, that the tests of this folder plan under pins and on clusters."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from rich.console import Console

from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision


@dataclass
class Task:
    """Plans of a model, without a pipeline unless one is pinned, and remembered; `asked` lists the pins of all that were asked for."""

    model: Any
    inputs: Any
    traced: TracedModel
    cluster: ClusterSpec
    batch: int
    asked: list[dict] = field(default_factory=list)
    known: dict[tuple, Plan] = field(default_factory=dict)

    def plan(
        self,
        pin: Mapping[str, Any] | None = None,
        cluster: ClusterSpec | None = None,
        batch: int | None = None,
    ) -> Plan:
        self.asked.append(dict(pin or {}))
        pin, cluster, batch = (
            {"pp": 1} | dict(pin or {}),
            cluster or self.cluster,
            batch or self.batch,
        )
        key = cluster, batch, tuple(pin.items())
        if key not in self.known:
            request = PlanRequest(
                cluster,
                batch,
                Pins.of(pin),
                choose_precision(cluster),
                type(self.model).__name__,
            )
            self.known[key] = api.plan_traced(self.traced, request)
        return self.known[key]


def instant(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with hosts that issue at once, so that devices decide although a model is tiny."""
    return replace(cluster, device=replace(cluster.device, dispatch_s=0.0))


@cache
def task(
    name: str = "llama-tiny",
    cluster: str = "h100:8",
    batch: int = 16,
    seq: int = 32,
    waits: bool = False,
) -> Task:
    """A task whose devices wait for a host only if it `waits`: kernels of tiny models are short."""
    spec = parse_model(name)
    model, inputs = spec.build("meta"), spec.example_inputs(2, seq)
    on = ClusterSpec.parse(cluster)
    on = on if waits else instant(on)
    return Task(model, inputs, api.trace_spec(spec, seq, choose_precision(on)), on, batch)


def text_of(renderable: Any, width: int = 80) -> str:
    """A renderable as a terminal of so many columns shows it; no line is longer."""
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(renderable)
    assert all(len(line) <= width for line in out.getvalue().splitlines())
    return out.getvalue()


def words_of(renderable: Any) -> str:
    """The same with every run of white space as one blank, so that tests do not depend on where lines break."""
    return " ".join(text_of(renderable).split())
