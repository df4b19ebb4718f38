"""Fits the rates of a cluster to a measured run, and says what the run does not show.

A trace with shapes gives rates of products, memory and links by kernel. A trace of `engine.profile`
gives the compute and the exchange of a step. A log gives one number, the step; then the rates of the
device change by one factor. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from statistics import median, quantiles

from autopar_cost_models import Device
from autopar_cost_models.collectives import collective_time_s
from autopar_cost_models.curves import Curve
from autopar_cost_models.matmul import shaped_matmul_time_s
from autopar_cost_models.roofline import stream_s
from autopar_cost_models.topology import group_shape

from autopar.errors import AutoparError
from autopar.foreign.measured.measured_run import MeasuredRun, Transfer
from autopar.foreign.measured.what_ran import Price, WhatRan
from autopar.ir.cluster import ClusterSpec
from autopar.text.units import ms

MOST_FACTOR = 8.0
"""The largest factor of a rate that is looked for."""

LEAST_STREAM_BYTES = 2**27
"""Element-wise kernels below this may find their operands in a cache: H100 has 50 MB of L2."""
LEAST_MESSAGE_BYTES = 2**20
"""Messages below this show latency, not a rate."""
LEAST_KERNELS = 8
"""Kernels of a kind from which a rate is fitted."""
MOST_OFF = {"cuda": 3.0, "cpu": 32.0}
"""By type of device: a run that takes this much longer or shorter than predicted is another one. The
catalogue has one CPU for all.
"""
HOST_SHARE = 0.05
"""Share of a step that waits for the host, above which its time says nothing of the device."""
_STEP_CLOSE = 1e-3


@dataclass(frozen=True, slots=True)
class FittedRate:
    """A fitted rate: its name, its value before and after, and what showed it. `unit` is '' for a
    share of the datasheet's rate.
    """

    name: str
    before: float
    after: float
    shown_by: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Refit:
    """The result: the fitted cluster, what changed, what the run does not show, and the prediction of
    what ran before and after, if it is known. `measured_s` and `measured_bytes` are of a step.
    """

    run: MeasuredRun
    cluster: ClusterSpec
    changes: tuple[FittedRate, ...]
    unseen: tuple[str, ...]
    before: Price | None = None
    after: Price | None = None
    measured_s: float | None = None


@dataclass(slots=True)
class _Fit:
    """A fit under way."""

    cluster: ClusterSpec
    changes: list[FittedRate] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)


def refit(run: MeasuredRun, cluster: ClusterSpec, ran: WhatRan | None = None) -> Refit:
    """Fit the rates of `cluster` to a measured run of `ran`.

    Raises AutoparError if the run shows nothing that could be fitted, if it cannot be one of `ran`, or
    if the host bounds its step.
    """
    measured_s = _step_s(run, ran)
    if ran and (other := run.segments - {segment.name for segment in ran.traced.segments}):
        raise AutoparError(
            f"the trace runs {min(other)}, and {ran.name} has no such segment: give the plan that ran"
        )
    before = ran.priced(cluster) if ran else None
    if ran and before and measured_s:
        _check_likely(measured_s, before, ran)
    fit = _Fit(cluster)
    _fit_memory(fit, run)  # first, since memory bounds some products
    has_products = _fit_products(fit, run)
    has_links = _fit_links(fit, run)
    if not has_products:
        _fit_whole(fit, run, ran, before, measured_s, has_links)
    if not fit.changes:
        raise AutoparError(
            f"{run.source} shows nothing that can be fitted: {'; '.join(fit.unseen)}"
        )
    _fit_gaps(fit, run)
    source = f"{fit.cluster.device.source}; rates fitted to {run.source}"
    found = replace(fit.cluster, device=replace(fit.cluster.device, source=source))
    found = replace(found, name=f"{cluster.name} refitted")
    after = ran.priced(found) if ran else None
    unseen = (*fit.unseen, *_always_unseen(run, before))
    return Refit(run, found, tuple(fit.changes), unseen, before, after, measured_s)


def _step_s(run: MeasuredRun, ran: WhatRan | None) -> float | None:
    """Seconds of a step, from the rate in tokens if need be. Raises AutoparError if the run's batch is
    not that of what ran.
    """
    if ran is None:
        return run.step_s
    if run.global_batch not in (None, ran.global_batch):
        raise AutoparError(
            f"the log has steps of {run.global_batch} sequences, and {ran.name} has {ran.global_batch}: give the file of the run that "
            "wrote the log"
        )
    if run.step_s is not None or run.tokens_per_s_per_gpu is None:
        return run.step_s
    rate = run.tokens_per_s_per_gpu * ran.cluster.num_devices
    return ran.global_batch * ran.seq / rate


def _check_likely(measured_s: float, before: Price, ran: WhatRan) -> None:
    ratio = measured_s / before.step_s
    most = MOST_OFF[ran.cluster.device_type]
    if not 1 / most <= ratio <= most:
        raise AutoparError(
            f"a step took {ms(measured_s)}, {ratio:.3g} times the {ms(before.step_s)} that are predicted for {ran.name} on "
            f"{ran.cluster.name}. That is another model, layout, batch or machine: give the file and the cluster of this run"
        )


# -------------------------------------------------------------------------------------------------------------- by kernel


def _fit_products(fit: _Fit, run: MeasuredRun) -> bool:
    """Fit the rate of products of each dtype in the trace. False if it shows none."""
    if run.has_kernels and not run.products:
        fit.unseen.append(
            "products by dtype: the trace has no shapes of torch's products; profile with record_shapes=True"
        )
    dtypes = dict.fromkeys(product.dtype for product in run.products)
    fitted = [_fit_dtype(fit, run, dtype) for dtype in dtypes]
    return any(fitted)


def _fit_dtype(fit: _Fit, run: MeasuredRun, dtype: str) -> bool:
    """Fit the rate of products of one dtype. False if the trace does not show it."""
    device, what = fit.cluster.device, f"products in {dtype}"
    own = [product for product in run.products if product.dtype == dtype]
    if dtype not in device.flops:
        fit.unseen.append(f"{what}: {device.name} has no rate in it")
        return False
    if len(own) < LEAST_KERNELS:
        fit.unseen.append(f"{what}: {len(own)}, and {LEAST_KERNELS} are needed")
        return False

    def seconds(factor: float) -> float:
        other = with_products(device, (dtype,), factor)
        return fsum(shaped_matmul_time_s(p.m, p.n, p.k, other, dtype, batch=p.batch) for p in own)

    factor = factor_for(seconds, fsum(product.seconds for product in own))
    if factor is None:
        fit.unseen.append(_beyond(what, fit.cluster))
        return False
    before = device.achieved_flops(dtype) / device.peak_flops(dtype)
    shown_by = f"{len(own):,} products of the trace"
    fit.changes.append(FittedRate(what, before, before * factor, shown_by))
    fit.cluster = replace(fit.cluster, device=with_products(device, (dtype,), factor))
    return True


def _fit_memory(fit: _Fit, run: MeasuredRun) -> None:
    large = [stream for stream in run.streams if stream.size_bytes >= LEAST_STREAM_BYTES]
    if not run.has_kernels:
        return
    if len(large) < LEAST_KERNELS:
        fit.unseen.append(
            f"memory: {len(large)} element-wise kernels with shapes and at least {LEAST_STREAM_BYTES // 2**20} MiB, and {LEAST_KERNELS} "
            "are needed"
        )
        return
    device = fit.cluster.device

    def seconds(factor: float) -> float:
        other = with_memory(device, factor)
        return fsum(stream_s(stream.size_bytes, other) for stream in large)

    factor = factor_for(seconds, fsum(stream.seconds for stream in large))
    if factor is None:
        fit.unseen.append(_beyond("memory", fit.cluster))
        return
    shown_by = f"{len(large):,} element-wise kernels of the trace"
    before = device.bandwidth_efficiency
    fit.changes.append(FittedRate("memory", before, before * factor, shown_by))
    fit.cluster = replace(fit.cluster, device=with_memory(device, factor))


def _fit_links(fit: _Fit, run: MeasuredRun) -> bool:
    """Fit the links to the collectives of the trace. False if it shows none.

    Kernels of a collective wait for the last rank. The lower quartile of measured over predicted
    counts, since most waits are then left out.
    """
    fitted, topology = False, fit.cluster.topology
    for side, words in (("intra", "link inside a node"), ("inter", "link between nodes")):
        own = [t for t in run.transfers if _side(t, fit.cluster) == side]
        own = [t for t in own if t.size_bytes >= LEAST_MESSAGE_BYTES]
        if len(own) < LEAST_KERNELS:
            if (
                run.has_kernels
                and topology.num_devices > 1
                and (side == "intra" or topology.nodes > 1)
            ):
                few = f"{len(own)} collectives of at least 1 MiB, and {LEAST_KERNELS} are needed"
                fit.unseen.append(f"{words}: {few}")
            continue
        factor = factor_for(_transfer_ratio(fit.cluster, side, own), 1.0)
        if factor is None:
            fit.unseen.append(_beyond(words, fit.cluster))
            continue
        before = getattr(topology, side).efficiency
        shown_by = f"{len(own):,} collectives of the trace"
        fit.changes.append(FittedRate(words, before, before * factor, shown_by))
        fit.cluster, fitted = with_link(fit.cluster, side, factor), True
    return fitted


def _transfer_ratio(
    cluster: ClusterSpec, side: str, transfers: Sequence[Transfer]
) -> Callable[[float], float]:
    """For a factor of a link's rate, the lower quartile of predicted seconds over measured ones, that
    of the transfers that wait least.
    """

    def ratio(factor: float) -> float:
        topology = with_link(cluster, side, factor).topology
        found = [
            t.seconds / collective_time_s(t.name, t.size_bytes, t.ranks, t.stride, topology)
            for t in transfers
        ]
        return 1 / quantiles(found, n=4, method="inclusive")[0]

    return ratio


def _side(transfer: Transfer, cluster: ClusterSpec) -> str | None:
    """The link that a transfer's slowest hop takes; None if its group has no place on the cluster."""
    try:
        _, nodes = group_shape(transfer.ranks, transfer.stride, cluster.topology)
    except ValueError:
        return None
    return "intra" if nodes == 1 else "inter"


def _fit_gaps(fit: _Fit, run: MeasuredRun) -> None:
    if len(run.gaps_s) < LEAST_KERNELS:
        if run.has_kernels:
            fit.unseen.append("launches: the host did not run ahead of the device")
        return
    device, gap_s = fit.cluster.device, median(run.gaps_s)
    fit.cluster = replace(fit.cluster, device=replace(device, launch_s=gap_s))
    shown_by = f"{len(run.gaps_s):,} gaps between kernels"
    fit.changes.append(FittedRate("launch", device.launch_s * 1e6, gap_s * 1e6, shown_by, "us"))


# ---------------------------------------------------------------------------------------------------------------- by step


def _fit_whole(
    fit: _Fit,
    run: MeasuredRun,
    ran: WhatRan | None,
    before: Price | None,
    measured_s: float | None,
    has_links: bool,
) -> None:
    """Fit one factor of the device, and one of the link inside a node if ranges show it, to what the
    run says of its step. Raises AutoparError if the host bounds the step.
    """
    if ran is None or before is None or measured_s is None:
        fit.unseen.append(
            "the step: give what ran as --plan or --job, since a step says something of a device only beside its prediction"
        )
        return
    if before.waiting_s > HOST_SHARE * before.step_s:
        raise AutoparError(
            f"of the {ms(before.step_s)} that are predicted, devices wait {ms(before.waiting_s)} for the host. The time of this step "
            "says nothing of the device: measure a larger micro-batch, or give a trace with record_shapes=True"
        )
    passes_s = run.ranges.get("passes", 0.0)
    exchange_s = fsum(seconds for name, seconds in run.ranges.items() if name != "passes")
    is_parted = passes_s > exchange_s and before.plan.mesh.pp == 1
    if is_parted:
        wanted_s, price_s, shown_by = passes_s - exchange_s, "compute_s", "the passes of a step"
    else:
        wanted_s, price_s, shown_by = measured_s, "step_s", "the time of a step"
    start = fit.cluster

    def seconds(factor: float) -> float:
        return float(getattr(ran.priced(with_compute(start, factor)), price_s))

    most = 2 * MOST_OFF[start.device_type]
    factor = factor_for(seconds, wanted_s, most, _STEP_CLOSE)
    if factor is None:
        fit.unseen.append(_beyond("the device", start, most))
        return
    device = start.device
    fit.cluster = with_compute(start, factor)
    for dtype in device.flops:
        share = device.achieved_flops(dtype) / device.peak_flops(dtype)
        fitted = share * factor if dtype in device.matmul_curves else min(share * factor, 1.0)
        fit.changes.append(FittedRate(f"products in {dtype}", share, fitted, shown_by))
    share = device.bandwidth_efficiency
    fitted = share * factor if device.memory_curve is not None else min(share * factor, 1.0)
    fit.changes.append(FittedRate("memory", share, fitted, shown_by))
    fit.unseen.append(
        "products apart from memory: one number changes both rates of the device by one factor"
    )
    if is_parted and exchange_s and not has_links:
        _fit_exchange(fit, ran, exchange_s)
    elif not has_links and start.num_devices > 1:
        fit.unseen.append("links: one number cannot tell them from the device")


def _fit_exchange(fit: _Fit, ran: WhatRan, exchange_s: float) -> None:
    """Fit the link inside a node to the seconds of collectives inside passes."""
    start = fit.cluster

    def seconds(factor: float) -> float:
        return ran.priced(with_link(start, "intra", factor)).exchange_s

    most = 2 * MOST_OFF[start.device_type]
    factor = factor_for(seconds, exchange_s, most, _STEP_CLOSE)
    if factor is None:
        fit.unseen.append(_beyond("the link inside a node", start, most))
        return
    share = start.topology.intra.efficiency
    fit.changes.append(
        FittedRate("link inside a node", share, share * factor, "collectives inside passes")
    )
    fit.cluster = with_link(start, "intra", factor)


def _beyond(what: str, cluster: ClusterSpec, most: float = MOST_FACTOR) -> str:
    near = f"no rate within a factor of {most:g}, and up to the datasheet's, explains it"
    return f"{what}: {near}; is this {cluster.device.name}, as in {cluster.name}?"


def _always_unseen(run: MeasuredRun, before: Price | None) -> list[str]:
    """What no fit of a run changes, as far as the run has to do with it."""
    found = []
    if run.has_kernels:
        found.append("the host: a profiler slows it down")
    if run.reserved_bytes is not None and before is not None:
        found.append("memory that is held: the log's is compared above, and no rate changes it")
    return found


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
