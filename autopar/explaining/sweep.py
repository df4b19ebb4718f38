"""Plans for many combinations of devices, sequence length, batch and bandwidth: a table, its Pareto
front, and where the plan changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import sqrt
from typing import Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.plan_report import plan_data
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.request.pins import choices_of, pins_of
from autopar.request.software import software_line
from autopar.text.numbers import Numbers
from autopar.text.plan_words import device_hours_per_million_tokens, layout_words, short_words
from autopar.text.replies import ABSENT, Field, Reply, Spot, Spots, doubted, field_table, records
from autopar.text.tables import Table
from autopar.text.units import NOT_PROVED, gap_words, gib, ms, percent

BREAK_EVEN_RATIO = 1.05
"""A bandwidth at which the plan changes is bracketed by two whose ratio is at most this."""
PROVEN = 1e-3
"""A plan with at most this gap counts as proved best."""
TIE = 0.01
"""A plan at most this fraction slower than the best counts as equally good, so a change of plan is
not reported for less.
"""


@dataclass(frozen=True, slots=True)
class Point:
    """One combination of devices, sequence length, batch and bandwidth to plan for. `seq=None` is
    the model's designed length. `inter_Bps` is the line rate between nodes per device, in bytes per
    second; None is the cluster's own.
    """

    devices: int
    seq: int | None
    global_batch: int
    inter_Bps: float | None = None

    def __str__(self) -> str:
        return ", ".join(self.words(axis) for axis in _HEADS if getattr(self, axis) is not None)

    def words(self, axis: str) -> str:
        """The field `axis` as text with its unit: `64 GPUs`, `25 GB/s`."""
        return (
            f"{self.value(axis)} {_HEADS[axis]}"
            if axis in ("devices", "inter_Bps")
            else f"{_HEADS[axis]} {self.value(axis)}"
        )

    def value(self, axis: str) -> str:
        """The field `axis` as text, without the unit of its column heading."""
        return _text(axis, getattr(self, axis))


_HEADS = {"devices": "GPUs", "seq": "seq", "global_batch": "batch", "inter_Bps": "GB/s"}
PlanAt = Callable[[Cluster, int | None, int, Mapping[str, Any]], Plan]
"""The type of a function that plans one model: cluster, tokens per sequence (None: the model's
own), global batch, pins.
"""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """A point of a sweep with its cluster and its plan."""

    point: Point
    cluster: Cluster
    plan: Plan

    @property
    def device_hours(self) -> float:
        """Device-hours per million tokens of the plan."""
        return device_hours_per_million_tokens(self.plan)

    @property
    def cost(self) -> float:
        """Dollars per million tokens; device-hours per million tokens if the cluster has no
        price.
        """
        return self.device_hours * (self.cluster.price_per_device_hour or 1.0)

    @property
    def rate(self) -> float:
        """Predicted tokens per second per device."""
        return self.plan.predicted.tokens_per_s / self.plan.mesh.num_devices

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes of the fullest device."""
        return max(self.plan.predicted.peak_memory_bytes, default=0)

    @property
    def merits(self) -> tuple[float, float, float]:
        """(step seconds, cost, bytes of the fullest device): the objectives of the Pareto front,
        all minimized.
        """
        return self.plan.predicted.step_time_s, self.cost, self.peak_bytes


@dataclass(frozen=True, slots=True)
class Unplanned:
    """A point of a sweep that has no plan, with the reason."""

    point: Point
    cluster: Cluster
    reason: str


@dataclass(frozen=True, slots=True)
class BreakEven:
    """A change of plan: `below` is best or within `TIE` up to the bandwidth `below_Bps`. At the
    higher bandwidth of `above` it is not, and the plan of `above` is best.
    """

    below: Plan
    below_Bps: float
    above: SweepRow


@dataclass(frozen=True, slots=True)
class Sweep:
    """The result of a sweep. `axes` are the fields of a point that have several values. `rows` are
    in the order of the points. `break_evens` are the changes of plan with the bandwidth between
    nodes. `is_cut`: the time was over before all of these were found.
    """

    axes: tuple[str, ...]
    rows: tuple[SweepRow | Unplanned, ...]
    break_evens: tuple[BreakEven, ...]
    is_cut: bool = False

    @property
    def planned(self) -> list[SweepRow]:
        """The rows that have plans."""
        return [row for row in self.rows if isinstance(row, SweepRow)]

    def efficiency(self, row: SweepRow) -> float:
        """The tokens per second per device of `row`, relative to the first row that has a plan."""
        return row.rate / next(first.rate for first in self.rows if isinstance(first, SweepRow))


def points_of(
    cluster: Cluster,
    devices: Sequence[int],
    seqs: Sequence[int],
    batches: Sequence[int],
    inter_Bps: Sequence[float],
) -> list[Point]:
    """Every combination of the values, in which bandwidths vary fastest and ascend. Empty
    `devices`, `seqs` or `inter_Bps` (bytes per second): the value of the cluster or model.
    `batches` must not be empty, or there are no points.

    Raises AutoparError for devices that neither fill nodes nor divide one, or a bandwidth between
    nodes with one node.
    """
    wanted = (
        devices or (cluster.num_devices,),
        seqs or (None,),
        batches,
        sorted(inter_Bps) or (None,),
    )
    found = [Point(*values) for values in product(*wanted)]
    for point in found:
        cluster_at(cluster, point)
    return found


def cluster_at(cluster: Cluster, point: Point) -> Cluster:
    """`cluster` with the number of devices of `point`, and with its bandwidth between nodes if it
    has one. Raises AutoparError if that is impossible, as `points_of` does.
    """
    sized = cluster.with_devices(point.devices)
    return sized if point.inter_Bps is None else sized.with_inter_bandwidth(point.inter_Bps)


def sweep(
    plan_at: PlanAt, cluster: Cluster, points: Sequence[Point], tell: Callable[[str], None]
) -> Sweep:
    """Plans at every point, and finds the bandwidths between nodes at which the best plan changes.
    Returns a `Sweep`. `plan_at` makes a plan; `tell` gets a line for each point. A point whose
    planning raises AutoparError becomes an `Unplanned` with the reason.
    """

    def planned(point: Point, is_probe: bool = False) -> SweepRow | Unplanned:
        tell(f"planning for {point}")
        at = cluster_at(cluster, point)
        try:
            return SweepRow(point, at, plan_at(at, point.seq, point.global_batch, {}))
        except AutoparError as error:
            if is_probe:
                _raise_if_cut(error)
            return Unplanned(point, at, str(error))

    def as_good(plan: Plan, row: SweepRow) -> bool:
        """Whether a plan, priced with its choices at the point of `row`, is at most the fraction
        `TIE` slower than the best plan there. False if it is not possible there.
        """
        if choices_of(plan) == choices_of(row.plan):
            return True
        try:
            there = plan_at(row.cluster, row.point.seq, row.point.global_batch, pins_of(plan))
        except AutoparError as error:
            _raise_if_cut(error)
            return False
        return there.predicted.step_time_s <= (1 + TIE) * row.plan.predicted.step_time_s

    rows = tuple(planned(point) for point in points)
    axes = tuple(
        name
        for name in Point.__dataclass_fields__
        if len({getattr(point, name) for point in points}) > 1
    )
    alike: dict[Point, list[SweepRow]] = {}
    for row in rows:
        if isinstance(row, SweepRow) and row.point.inter_Bps is not None:
            alike.setdefault(replace(row.point, inter_Bps=None), []).append(row)
    changes, is_cut = list[BreakEven](), False
    for group in alike.values():
        try:
            # one after the other, so that those before the end of the time are kept
            for change in _break_evens(partial(planned, is_probe=True), as_good, group):
                changes.append(change)
        except NoPlanFits:
            is_cut = True
    return Sweep(axes, rows, tuple(changes), is_cut)


def _raise_if_cut(error: AutoparError) -> None:
    """Raises `error` again if it says that the time was over."""
    if isinstance(error, NoPlanFits) and error.is_cut:
        raise error


def _break_evens(
    planned: Callable[[Point], SweepRow | Unplanned],
    as_good: Callable[[Plan, SweepRow], bool],
    rows: Sequence[SweepRow],
) -> Iterator[BreakEven]:
    """A `BreakEven` for each change of the best plan, by ascending bandwidth.

    `rows` differ only in bandwidth, ascending. The plan of the lowest bandwidth is followed upwards
    until it is no longer within `TIE` of the best; then the plan that is best there is followed.
    Bisection by geometric means locates each change. A plan that is bad only between two of `rows`
    is missed. `planned(point)` plans at a point; `as_good(plan, row)` says whether a plan is within
    `TIE` of the best there.
    """
    current = low = rows[0]
    for high in rows[1:]:
        while not as_good(current.plan, high):
            below_Bps, above, above_Bps = (
                low.point.inter_Bps or 0.0,
                high,
                high.point.inter_Bps or 0.0,
            )
            while above_Bps > BREAK_EVEN_RATIO * below_Bps:
                middle_Bps = sqrt(below_Bps * above_Bps)
                middle = planned(replace(low.point, inter_Bps=middle_Bps))
                if isinstance(middle, Unplanned) or as_good(current.plan, middle):
                    below_Bps = middle_Bps
                else:
                    above, above_Bps = middle, middle_Bps
            yield BreakEven(current.plan, below_Bps, above)
            current = low = above
        low = high


def pareto(rows: Sequence[SweepRow | Unplanned]) -> list[bool]:
    """For each row, whether it is Pareto-optimal in step time, cost and memory among all rows.
    False for points without a plan; rows with equal values do not exclude each other.
    """
    known = [row.merits for row in rows if isinstance(row, SweepRow)]

    def dominated(own: tuple[float, float, float]) -> bool:
        return any(
            other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in known
        )

    return [isinstance(row, SweepRow) and not dominated(row.merits) for row in rows]


def sweep_reply(found: Sweep, model: str, cluster: Cluster) -> Reply:
    """A row for each point of the sweep of `model` on `cluster`, and lines on units, points without a
    plan, changes of plan, and what is not proved. The page draws step time against cost.
    """
    varied, price = found.axes or ("devices",), cluster.price_per_device_hour
    fields, numbers = _fields(found, varied, price), range(len(found.rows))
    changes = [
        {
            **{axis: getattr(change.above.point, axis) for axis in _HEADS} | {"inter_Bps": None},
            "below_Bps": change.below_Bps,
            "above_Bps": change.above.point.inter_Bps,
            "below": choices_of(change.below),
            "above": choices_of(change.above.plan),
        }
        for change in found.break_evens
    ]
    doubt, at = doubt_words(found), found.rows[0].point
    rows = records(fields, numbers)
    data = doubted(doubt, {"axes": list(found.axes), "rows": rows, "break_evens": changes})
    cost = "hours of a GPU" if price is None else f"dollars at ${price:g} a GPU and hour"
    same = ", ".join(at.words(axis) for axis in _HEADS if axis not in varied and getattr(at, axis))
    parts: list[str | Table] = [
        field_table(fields, numbers, at="rows"),
        *(f"Software: {software_line(row.plan.made_for.software)}." for row in found.planned[:1]),
        f"{f'All points: {same}.  ' if same else ''}A plan's 8x4: 8 micro-batches of 4 sequences.  eff.: tokens/s/GPU, of the first "
        f"row's.  {_unit(price)}: {cost} for a million tokens.  *: on the Pareto front of step time, cost and memory.",
        *(f"{_where(r, varied)}: {r.reason}." for r in found.rows if isinstance(r, Unplanned)),
        *(_change_words(change, found.axes) for change in found.break_evens),
        *_caveats(found, varied),
    ]
    points = "1 point" if len(found.rows) == 1 else f"{len(found.rows)} points"
    title = f"{model} on {cluster.name}: {points}"
    return Reply(parts, data, title, doubt, _figure(found, data, price), "sweep")


def _fields(found: Sweep, varied: Sequence[str], price: float | None) -> tuple[Field, ...]:
    """The facts of each row, by its number. `varied` are the fields of a point that are shown."""
    best = pareto(found.rows)

    def planned(get: Callable[[SweepRow], Any], otherwise: Any = ABSENT) -> Callable[[int], Any]:
        def of(k: int) -> Any:
            row = found.rows[k]
            return get(row) if isinstance(row, SweepRow) else otherwise

        return of

    def axis(name: str) -> Field:
        head = _HEADS[name] if name in varied else None
        return Field(name, lambda k: getattr(found.rows[k].point, name), head, partial(_text, name))

    def predicted(name: str) -> Any:
        return planned(lambda row: getattr(row.plan.predicted, name))

    def dollars(row: SweepRow) -> float | None:
        return None if row.cluster.price_per_device_hour is None else row.cost

    def short(row: SweepRow) -> dict[str, Any]:
        """The plan without the long list of candidates in its certificate."""
        proof = replace(row.plan.certificate, meshes=())
        return plan_data(replace(row.plan, certificate=proof))

    hours, money = (None, _unit(price)) if price is not None else (_unit(price), None)
    return (
        *map(axis, _HEADS),
        Field("cluster", lambda k: found.rows[k].cluster.name),
        Field("pareto", best.__getitem__),
        Field("reason", lambda k: getattr(found.rows[k], "reason", "")),
        Field("gap", planned(lambda row: row.plan.certificate.gap)),
        Field("", planned(lambda row: short_words(row.plan), "none: see below"), "plan"),
        Field("plan.predicted.step_time_s", predicted("step_time_s"), "step", ms),
        Field("plan.predicted.tokens_per_s", predicted("tokens_per_s"), "tok/s", "{:,.0f}".format, True),
        Field("plan.predicted.mfu", predicted("mfu"), "MFU", percent, True),
        Field("tokens_per_s_per_device", planned(lambda row: row.rate), "tok/s/GPU", "{:,.0f}".format),
        Field("efficiency", planned(found.efficiency), "eff. %", lambda x: f"{100 * x:.1f}"),
        Field("", planned(lambda row: row.peak_bytes), "GiB", lambda x: gib(x).removesuffix(" GiB")),
        Field("device_hours_per_million_tokens", planned(lambda row: row.device_hours), hours, "{:.3g}".format),
        Field("dollars_per_million_tokens", planned(dollars), money, "{:.3g}".format),
        Field("plan", planned(short, None)),
        Field("", lambda k: "*" * best[k], ""),
    )  # fmt: skip


def _text(axis: str, value: float) -> str:
    """A field of a point as text, without the unit of its column heading."""
    return f"{value / 1e9:.4g}" if axis == "inter_Bps" else str(value)


def _unit(price: float | None) -> str:
    return "GPUh/M" if price is None else "$/M"


def _figure(found: Sweep, data: Any, price: float | None) -> tuple[Spots, str] | None:
    """Step time against cost, and how to read that."""
    n, kind, unit = Numbers(data), "dollars", "$ per million tokens"
    if price is None:
        kind, unit = "device_hours", "device-hours per million tokens"
    spots = [
        Spot(
            str(row.point),
            n.ms(f"rows.{k}.plan.predicted.step_time_s"),
            n.count(f"rows.{k}.{kind}_per_million_tokens"),
        )
        for k, row in enumerate(found.rows)
        if isinstance(row, SweepRow)
    ]
    words = f"Each point is a plan: its step time to the right, {unit} upwards. No plan beats those on the line in both."
    return (Spots(f"Step time and {unit}", spots, "step time"), words) if spots else None


def doubt_words(found: Sweep) -> str:
    """The first line of the answer if plans of some points are far from proved; '' otherwise."""
    gaps = [row.plan.certificate.gap for row in found.planned]
    open_ = [gap for gap in gaps if gap > NOT_PROVED]
    if not open_:
        return ""
    points = f"the plans of {len(open_)} of {len(found.rows)} points"
    return f"Not proved: {points}; others may take up to {gap_words(max(open_))} less; a higher --time-limit may prove or find more."


def _where(row: SweepRow | Unplanned, varied: Sequence[str]) -> str:
    return ", ".join(row.point.words(axis) for axis in varied)


def _caveats(found: Sweep, varied: Sequence[str]) -> Iterator[str]:
    """Sentences about what the search did not prove, and one if no bandwidth changes the plan.
    `varied` are the fields that name a point.
    """
    open_ = [row for row in found.planned if row.plan.certificate.gap > PROVEN]
    if open_:
        gaps = (f"{_where(row, varied)}: {gap_words(row.plan.certificate.gap)}" for row in open_)
        yield f"Not proven best (by how much another plan may be faster): {'; '.join(gaps)}."
    around = [plan for change in found.break_evens for plan in (change.above.plan, change.below)]
    if any(plan.certificate.gap > PROVEN for plan in around):
        yield "Plans at a change are not proven best: with a longer --time-limit it may be elsewhere, or not be."
    if found.is_cut:
        yield "The time was over before all bandwidths were found at which the plan changes."
    elif "inter_Bps" in found.axes and not found.break_evens and found.planned:
        yield f"No bandwidth changes the plan: that of the lowest stays within {percent(TIE)} of the best."


def _change_words(change: BreakEven, axes: Sequence[str]) -> str:
    where = ", ".join(change.above.point.words(axis) for axis in axes if axis != "inter_Bps")
    below, above = (
        replace(change.above.point, inter_Bps=change.below_Bps).value("inter_Bps"),
        change.above.point.value("inter_Bps"),
    )
    return (
        f"{where + ': ' if where else ''}the plan changes between {below} and {above} GB/s between nodes: below it is "
        f"{layout_words(change.below)}; above, {layout_words(change.above.plan)}."
    )
