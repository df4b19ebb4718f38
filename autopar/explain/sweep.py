"""One plan for each of several clusters, sequences and batches: a table, its Pareto front, and where the chosen plan changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import sqrt
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.explain.choices import choices_of, device_hours_per_million_tokens, layout_words
from autopar.explain.report import gib, grid, ms, percent, plan_data
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan

if TYPE_CHECKING:
    from rich.console import Group

BREAK_EVEN_RATIO = 1.05
"""A bandwidth at which the plan changes is bracketed by two whose ratio is at most this."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where a plan is made.  `seq` None is what the model was designed for; `inter_Bps` is the line rate between nodes for each device,
    None that of the cluster."""

    devices: int
    seq: int | None
    global_batch: int
    inter_Bps: float | None = None

    def __str__(self) -> str:
        words = [f"{self.devices} devices", f"seq {self.seq}" if self.seq else "", f"global batch {self.global_batch}"]
        words += [f"{self.inter_Bps / 1e9:g} GB/s"] if self.inter_Bps else []
        return ", ".join(filter(None, words))


PlanAt = Callable[[ClusterSpec, int | None, int], Plan]
"""Plans one model on a cluster, with sequences of so many tokens (None: the model's), for a global batch."""


@dataclass(frozen=True, slots=True)
class Row:
    """A point with its plan, or None with the `reason`."""

    point: Point
    cluster: ClusterSpec
    plan: Plan | None
    reason: str = ""

    @property
    def device_hours(self) -> float:
        """Hours of a device for a million tokens."""
        return device_hours_per_million_tokens(self.plan)

    @property
    def cost(self) -> float:
        """Dollars for a million tokens, or hours of a device where the price is not known: in proportion."""
        return self.device_hours * (self.cluster.price_per_device_hour or 1.0)

    @property
    def rate(self) -> float:
        """Tokens per second and device."""
        return self.plan.predicted.tokens_per_s / self.plan.mesh.num_devices

    @property
    def peak_bytes(self) -> int:
        return max(self.plan.predicted.peak_memory_bytes, default=0)

    @property
    def merits(self) -> tuple[float, float, float]:
        """What the Pareto front is over, the less the better."""
        return self.plan.predicted.step_time_s, self.cost, self.peak_bytes


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Up to `below.point.inter_Bps` the plan is that of `below`, from `above.point.inter_Bps` on that of `above`."""

    below: Row
    above: Row


@dataclass(frozen=True, slots=True)
class Sweep:
    """`axes` are the fields of a point that the user varied."""

    axes: tuple[str, ...]
    rows: tuple[Row, ...]
    break_evens: tuple[BreakEven, ...]


def points_of(
    cluster: ClusterSpec, devices: Sequence[int], seqs: Sequence[int], batches: Sequence[int], inter_Bps: Sequence[float]
) -> list[Point]:
    """Every combination of the values, the last axis fastest; an empty axis is what cluster and model have.  AutoparError for devices that
    do not fill nodes and for a bandwidth between nodes where there is one."""
    wanted = devices or (cluster.num_devices,), seqs or (None,), batches, sorted(inter_Bps) or (None,)
    found = [Point(*values) for values in product(*wanted)]
    for point in found:
        cluster_at(cluster, point)
    return found


def cluster_at(cluster: ClusterSpec, point: Point) -> ClusterSpec:
    """The cluster of a point."""
    sized = cluster.with_devices(point.devices)
    return sized if point.inter_Bps is None else sized.with_inter_bandwidth(point.inter_Bps)


def sweep(plan_at: PlanAt, cluster: ClusterSpec, points: Sequence[Point], tell: Callable[[str], None]) -> Sweep:
    """Plan at every point; between bandwidths with different plans, find where the plan changes.  A point without plan has its reason."""

    def planned(point: Point) -> Row:
        tell(f"planning for {point}")
        at = cluster_at(cluster, point)
        try:
            return Row(point, at, plan_at(at, point.seq, point.global_batch))
        except AutoparError as error:
            return Row(point, at, None, str(error))

    rows = tuple(planned(point) for point in points)
    axes = tuple(name for name in Point.__dataclass_fields__ if len({getattr(point, name) for point in points}) > 1)
    neighbours = [(a, b) for a, b in zip(rows, rows[1:], strict=False)
                  if a.point.inter_Bps is not None and replace(a.point, inter_Bps=b.point.inter_Bps) == b.point]
    return Sweep(axes, rows, tuple(found for a, b in neighbours for found in _break_evens(planned, a, b)))


def _break_evens(planned: Callable[[Point], Row], low: Row, high: Row) -> Iterator[BreakEven]:
    """Where the plan changes between two bandwidths: their geometric mean halves the interval until it is narrow.  A plan that is best only
    between two of the bandwidths tried is missed."""
    if low.plan is None or high.plan is None or choices_of(low.plan) == choices_of(high.plan):
        return
    if high.point.inter_Bps <= BREAK_EVEN_RATIO * low.point.inter_Bps:
        yield BreakEven(low, high)
        return
    middle = planned(replace(low.point, inter_Bps=sqrt(low.point.inter_Bps * high.point.inter_Bps)))
    yield from _break_evens(planned, low, middle)
    yield from _break_evens(planned, middle, high)


def pareto(rows: Sequence[Row]) -> list[bool]:
    """For each row whether none is better in one of step time, cost and memory, and as good in the others."""
    known = [row.merits for row in rows if row.plan is not None]

    def dominated(own: tuple[float, float, float]) -> bool:
        return any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in known)

    return [row.plan is not None and not dominated(row.merits) for row in rows]


def sweep_data(found: Sweep) -> dict[str, Any]:
    """The sweep as plain data; plans as plan files have them, but without the candidates of their certificates, which are long."""
    first = next((row for row in found.rows if row.plan is not None), None)
    rows = [
        _point_data(row.point) | {"cluster": row.cluster.name, "reason": row.reason, "pareto": best, "plan": None}
        if row.plan is None
        else _point_data(row.point)
        | {
            "cluster": row.cluster.name,
            "reason": "",
            "pareto": best,
            "tokens_per_s_per_device": row.rate,
            "efficiency": row.rate / first.rate,
            "device_hours_per_million_tokens": row.device_hours,
            "dollars_per_million_tokens": row.cost if row.cluster.price_per_device_hour is not None else None,
            "plan": plan_data(replace(row.plan, certificate=replace(row.plan.certificate, meshes=()))),
        }
        for row, best in zip(found.rows, pareto(found.rows), strict=True)
    ]
    changes = [
        {
            **_point_data(change.below.point),
            "below_Bps": change.below.point.inter_Bps,
            "above_Bps": change.above.point.inter_Bps,
            "below": choices_of(change.below.plan),
            "above": choices_of(change.above.plan),
        }
        for change in found.break_evens
    ]
    return {"axes": list(found.axes), "rows": rows, "break_evens": changes}


def _point_data(point: Point) -> dict[str, Any]:
    return {name: getattr(point, name) for name in Point.__dataclass_fields__}


_HEADS = {"devices": "GPUs", "seq": "seq", "global_batch": "batch", "inter_Bps": "GB/s"}


def sweep_table(found: Sweep, model: str, cluster: ClusterSpec) -> Group:
    """The sweep as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    varied = found.axes or ("devices",)
    priced = cluster.price_per_device_hour is not None
    first = next((row for row in found.rows if row.plan is not None), None)
    heads = (*(_HEADS[axis] for axis in varied), "plan", "step", "tok/s/GPU", "eff.", "memory", "$/Mtok" if priced else "GPUh/Mtok", "")
    rows = []
    for row, best in zip(found.rows, pareto(found.rows), strict=True):
        where = tuple(_axis_words(row.point, axis) for axis in varied)
        if row.plan is None:
            rows.append((*where, f"none: {row.reason}", *("-",) * 5, ""))
            continue
        numbers = f"{row.rate:,.0f}", percent(row.rate / first.rate), gib(row.peak_bytes), f"{row.cost:.3g}", "*" if best else ""
        rows.append((*where, layout_words(row.plan), ms(row.plan.predicted.step_time_s), *numbers))
    table = grid("", heads, rows, right=tuple(i for i in range(len(heads)) if heads[i] != "plan"))
    for column in table.columns:
        column.no_wrap = column.header != "plan"
    table.padding = (0, 1, 0, 0)
    parts: list[Any] = [Text(f"{model} on {cluster.name}: {len(found.rows)} points", style="bold"), table]
    parts.append(Text("* on the Pareto front of step time, cost and memory; eff.: tokens/s/GPU of the first row's"))
    fixed = found.rows[0].point
    parts += [Text(f"All points: {', '.join(f'{_HEADS[a]} {_axis_words(fixed, a)}' for a in _HEADS if a not in varied)}")]
    parts += [Text(_change_words(change, found.axes)) for change in found.break_evens]
    if "inter_Bps" in found.axes and not found.break_evens:
        parts.append(Text("The chosen plan is the same at all these bandwidths."))
    return Group(*parts)


def _axis_words(point: Point, axis: str) -> str:
    value = getattr(point, axis)
    return "as given" if value is None else f"{value / 1e9:g}" if axis == "inter_Bps" else str(value)


def _change_words(change: BreakEven, axes: Sequence[str]) -> str:
    low, high = change.below.point.inter_Bps / 1e9, change.above.point.inter_Bps / 1e9
    where = ", ".join(f"{_HEADS[axis]} {_axis_words(change.below.point, axis)}" for axis in axes if axis != "inter_Bps")
    return (
        f"{where + ': ' if where else ''}the plan changes between {low:.4g} and {high:.4g} GB/s a GPU between nodes: below it is "
        f"{layout_words(change.below.plan)}; above, {layout_words(change.above.plan)}"
    )
