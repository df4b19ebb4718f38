"""Clusters with other rates, and the search for the rate that explains seconds."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from autopar_cost_models import Device
from autopar_cost_models.curves import Curve

from autopar.ir.cluster import ClusterSpec

MOST_FACTOR = 8.0
"""The largest factor of a rate that is looked for."""


def slower(points: Curve, factor: float) -> Curve:
    """A curve of (size, seconds) at `factor` times the rate."""
    return tuple((size, seconds / factor) for size, seconds in points)


def with_products(device: Device, dtypes: Collection[str], factor: float) -> Device:
    """The device with products in `dtypes` at `factor` times the rate, and at most at the datasheet's."""
    efficiency = dict(device.dtype_efficiency)
    curves = dict(device.matmul_curves)
    for dtype in dtypes:
        if dtype in curves:
            curves[dtype] = slower(curves[dtype], factor)
        now = efficiency.get(dtype, device.matmul_efficiency)
        efficiency[dtype] = min(now * factor, 1.0)
    return replace(device, dtype_efficiency=efficiency, matmul_curves=curves)


def with_memory(device: Device, factor: float) -> Device:
    """The device with memory at `factor` times the rate, and at most at the datasheet's."""
    if device.memory_curve is not None:
        return replace(device, memory_curve=slower(device.memory_curve, factor))
    return replace(device, bandwidth_efficiency=min(device.bandwidth_efficiency * factor, 1.0))


def with_compute(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster with products and memory of its devices at `factor` times the rate."""
    device = with_products(cluster.device, tuple(cluster.device.flops), factor)
    return replace(cluster, device=with_memory(device, factor))


def with_link(cluster: ClusterSpec, side: str, factor: float) -> ClusterSpec:
    """The cluster with the link `side` ('intra' or 'inter') at `factor` times the rate, and at most
    at the line rate.
    """
    topology = cluster.topology
    link = topology.intra if side == "intra" else topology.inter
    curves = {
        name: {ranks: slower(points, factor) for ranks, points in of.items()}
        for name, of in link.curves.items()
    }
    changed = replace(link, efficiency=min(link.efficiency * factor, 1.0), curves=curves)
    if side == "intra":
        return replace(cluster, topology=replace(topology, intra=changed))
    return replace(cluster, topology=replace(topology, inter=changed))


def factor_for(
    seconds: Callable[[float], float],
    wanted_s: float,
    most: float = MOST_FACTOR,
    close: float = 1e-6,
) -> float | None:
    """The factor of a rate at which `seconds(factor)`, which falls as it grows, is `wanted_s`, to a
    relative `close`. None if no factor from 1 / `most` to `most` is: the rate does not explain it.
    """
    low, high = 1 / most, most
    if not seconds(high) <= wanted_s <= seconds(low):
        return None
    while high / low > 1 + close:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if seconds(middle) > wanted_s else (low, middle)
    return (low * high) ** 0.5
