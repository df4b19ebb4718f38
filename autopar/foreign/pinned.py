"""Requests for plans as other frameworks run them, and the price of a layout: the plan with every
choice pinned, on devices with unlimited memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar import api
from autopar.ir.cluster import ClusterSpec
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.request.pins import Pins, layout_pins
from autopar.request.plan_request import PlanRequest
from autopar.request.software import Software

UNLIMITED_BYTES = 2**50
"""Memory of the devices for which a layout is priced: practically unlimited, so that layouts that do
not fit have a price too.
"""


def unlimited(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with devices of unlimited memory."""
    return replace(cluster, device=replace(cluster.device, memory_bytes=UNLIMITED_BYTES))


def foreign_request(
    cluster: ClusterSpec,
    batch: int,
    pin: Mapping[str, Any],
    software: Software,
    precision: str = "bf16",
    name: str = "",
) -> PlanRequest:
    """The request for a plan with a framework's software. Its plans are priced and not run."""
    return PlanRequest(cluster, batch, Pins.of(pin), precision, name, software=software)


def layout_request(
    layout: Layout, layers: int, cluster: ClusterSpec, software: Software, *words: str, **pins: Any
) -> PlanRequest:
    """The request for the plan with a layout, of a model with `layers` layers. `words` are precision
    and name, as for `foreign_request`; `pins` are further ones.
    """
    gpus = cluster.num_devices
    pin = layout_pins(layout, gpus, layers) | pins
    return foreign_request(cluster, layout.batch_on(gpus), pin, software, *words)


def price(traced: TracedModel, request: PlanRequest) -> Plan:
    """The plan of a request that pins a layout, on devices with unlimited memory. Raises AutoparError
    if it cannot be priced.
    """
    on = replace(request, cluster=unlimited(request.cluster.one_kind))
    # one or two candidates: helper processes would take longer to start than to search
    return api.plan_traced(traced, on, processes=1)
