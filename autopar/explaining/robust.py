"""How much slower than the best a plan becomes if the cost model is wrong: in rates, bandwidths or
memory, separately or together.

The *regret* of a plan under a scenario is its step time there relative to that of the best plan
there, minus 1. To price a plan under a scenario, its choices are pinned (`pins_of`). Pins do not
fix layouts of ops, nor recomputation that differs between layers. These are optimized again, and
the report says so. The regret of the unchanged plan is then at least the reported one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import inf, isfinite
from typing import Any

from autopar_cost_models import Link

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.certificate import not_proved_words
from autopar.explaining.plan_report import plan_data
from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.mesh import mesh_words
from autopar.ir.plan import Plan
from autopar.request.pins import choices_of, pins_of, pins_of_entry
from autopar.text.device_words import misfit_chance
from autopar.text.plan_words import PlanOn, layout_words, short_words
from autopar.text.replies import Field, Reply, doubted, field_table, records
from autopar.text.tables import Table
from autopar.text.units import gib, ms, percent

OFF = 0.20
"""The default relative error of predictions."""
MOST_NEAR = 24
"""The largest number of candidates of a certificate that are priced, the most promising first."""
_NOTHING = 5e-4
"""Regret below which "none" is printed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """An assumption on how wrong the cost model is: true values as multiples of what it assumes.
    Keys of `factors` are those of `FACTORS`, or 'memory need'.
    """

    factors: Mapping[str, float]

    def __str__(self) -> str:
        return ", ".join(
            f"{name} {100 * (factor - 1):+g} %" for name, factor in self.factors.items()
        )

    @property
    def need(self) -> float:
        """The factor by which plans need more memory than predicted; 1 if the scenario does not
        change it.
        """
        return self.factors.get("memory need", 1.0)

    def cluster(self, cluster: ClusterSpec) -> ClusterSpec:
        """A changed copy of a cluster, on which the cost model's predictions equal the true values.
        If plans need more memory, its devices have less.
        """
        for name, factor in self.factors.items():
            cluster = FACTORS[name](cluster, factor) if name in FACTORS else cluster
        if self.need == 1.0:
            return cluster
        return cluster.with_memory(
            max(int(cluster.device.memory_bytes / self.need), cluster.device.reserved_bytes + 1)
        )


@dataclass(frozen=True, slots=True)
class RepricedPlan:
    """A plan, and for each scenario a plan with its choices priced there, or None if they do not
    fit.
    """

    plan: Plan
    there: tuple[Plan | None, ...]

    def time_s(self, number: int) -> float:
        """Seconds of a step under scenario `number`; infinite if the plan does not fit."""
        there = self.there[number]
        return inf if there is None else there.predicted.step_time_s

    def adapts(self, number: int) -> bool:
        """Whether layouts of ops, recomputation or stages under scenario `number` differ from the
        plan's, since they were optimized again. False if it does not fit.
        """
        there = self.there[number]
        return there is not None and (there.blocks, there.stages) != (
            self.plan.blocks,
            self.plan.stages,
        )


@dataclass(frozen=True, slots=True)
class Robustness:
    """The result of a robustness analysis.

    `priced` has the chosen plan first, then those nearly as good. `best` is the best plan found
    under each scenario without extra pins, or None. `near` is by what fraction a plan in `priced`
    may be slower than the chosen one (None: only the chosen one). `left_out` counts candidates that
    were not priced. `off` is the fraction by which predictions are off, for the report.
    """

    cluster: ClusterSpec
    off: float
    scenarios: tuple[Scenario, ...]
    best: tuple[Plan | None, ...]
    priced: tuple[RepricedPlan, ...]
    near: float | None = None
    left_out: int = 0

    @property
    def chosen(self) -> RepricedPlan:
        """The `RepricedPlan` plan that is best if predictions are right, with its prices in the
        scenarios: the first of `priced`.
        """
        return self.priced[0]

    def best_s(self, number: int) -> float:
        """Seconds of the fastest step known under scenario `number`, from `best` and `priced`;
        infinite if nothing fits there.
        """
        known = [plan.predicted.step_time_s for plan in (self.best[number],) if plan is not None]
        return min([*known, *(one.time_s(number) for one in self.priced)])

    def regret(self, one: RepricedPlan, number: int) -> float:
        """The regret of a plan under scenario `number`: how much slower it is than the best known
        there, as a fraction. Infinite if it does not fit there.
        """
        time_s = one.time_s(number)
        return time_s / self.best_s(number) - 1 if isfinite(time_s) else inf

    def worst(self, one: RepricedPlan) -> tuple[float, Scenario]:
        """(greatest regret of a plan over the scenarios where it fits, the first scenario with that
        regret). Raises ValueError if it fits in none.
        """
        fitting = [number for number, there in enumerate(one.there) if there is not None]
        number = max(fitting, key=lambda number: self.regret(one, number))
        return self.regret(one, number), self.scenarios[number]

    def misfits(self, one: RepricedPlan) -> list[int]:
        """Indices of the scenarios under which the plan does not fit."""
        return [number for number, there in enumerate(one.there) if there is None]

    @property
    def most_robust(self) -> RepricedPlan:
        """The `RepricedPlan` plan, of `priced`, with the fewest scenarios in which it does not fit. Among
        equal ones, the plan with the smallest worst regret, then the fastest as predicted.
        """
        return min(
            self.priced,
            key=lambda one: (
                len(self.misfits(one)),
                self.worst(one)[0],
                one.plan.predicted.step_time_s,
            ),
        )


def scenarios_of(
    cluster: Cluster, off: float = OFF, together: bool = False
) -> tuple[Scenario, ...]:
    """Scenarios in which one factor is lowered by the fraction `off`, or raised by it, for each
    factor in turn. With `together`, also every combination of all rates lowered or raised.

    Factors of links that the cluster lacks are left out. Raises AutoparError unless `off` is
    between 0 and 1, or for devices of several kinds.
    """
    if not 0 < off < 1:
        raise AutoparError(
            f"predictions cannot be off by {percent(off)}: more than 0 % and less than 100 % can be asked for"
        )
    names = [name for name in FACTORS if _has(cluster.one_kind, name)]
    alone = [
        Scenario({name: factor})
        for name in (*names, "memory need")
        for factor in (1 - off, 1 + off)
    ]
    corners = [
        Scenario(dict(zip(names, factors, strict=True)))
        for factors in product((1 - off, 1 + off), repeat=len(names))
    ]
    return (*alone, *(corners if together else ()))


def robustness(
    plan_on: PlanOn,
    cluster: Cluster,
    pin: Mapping[str, Any],
    scenarios: Sequence[Scenario],
    off: float = OFF,
    near: float | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Robustness:
    """The `Robustness` of the best plan under `pin`; `plan_on` plans under pins on a cluster. It is
    planned as predicted and priced under every scenario, for each of which the best plan is found
    too. `off` is only stored, for the report.

    With `near` (a fraction), plans of its certificate that are at most that much slower are priced
    too. `tell` gets a line for each step. Raises AutoparError if there is no plan as predicted, if
    a search ends without an answer, or for devices of several kinds.
    """
    tell("planning")
    chosen = plan_on(pin, cluster)
    spec = cluster.one_kind
    pricing = _Pricing(plan_on, spec, pin, scenarios)
    best = []
    for scenario in scenarios:
        tell(f"planning with {scenario}")
        best.append(pricing.plan(pin, scenario.cluster(spec)))
    plans, left_out = pricing.near(chosen, near, tell) if near is not None else ([], 0)
    return Robustness(
        cluster=spec,
        off=off,
        scenarios=tuple(scenarios),
        best=tuple(best),
        priced=tuple(map(pricing.priced, [chosen, *plans])),
        near=near,
        left_out=left_out,
    )


@dataclass(frozen=True, slots=True)
class _Pricing:
    """Plans, with `plan_on`, on the cluster and on those of the scenarios, under the user's pins.
    It holds what all calls share.
    """

    plan_on: PlanOn
    cluster: ClusterSpec
    pin: Mapping[str, Any]
    scenarios: Sequence[Scenario]

    def plan(self, pin: Mapping[str, Any], cluster: ClusterSpec) -> Plan | None:
        """The best plan under `pin` on a cluster. None if it is proved that no plan fits, or if the
        smallest that was found does not fit.

        Raises NoPlanFits if neither is known, as after a time-out, or if the host lacks memory for
        offloaded bytes. Raises AutoparError for impossible pins.
        """
        try:
            return self.plan_on(pin, cluster)
        except NoPlanFits as error:
            if error.proven or error.least_bytes is not None:
                return None
            raise

    def priced(self, plan: Plan) -> RepricedPlan:
        return RepricedPlan(plan, tuple(self._there(plan, scenario) for scenario in self.scenarios))

    def _there(self, plan: Plan, scenario: Scenario) -> Plan | None:
        """The plan priced under a scenario, or None if it does not fit. Memory is checked for the
        unchanged plan. Its choices are pinned under other rates; if only the memory need differs,
        the plan itself is returned.
        """
        if scenario.need * max(plan.predicted.peak_memory_bytes) > self.cluster.device.memory_bytes:
            return None
        rates = [name for name in scenario.factors if name in FACTORS]
        return (
            self.plan({**self.pin, **pins_of(plan)}, scenario.cluster(self.cluster))
            if rates
            else plan
        )

    def near(
        self, chosen: Plan, share: float, tell: Callable[[str], None]
    ) -> tuple[list[Plan], int]:
        """(plans, number of promising candidates that were too many to price). The plans are
        candidates of the certificate that are at most the fraction `share` slower than the chosen
        plan, fastest first. `tell` gets a line for each priced candidate.
        """
        limit_s = (1 + share) * chosen.predicted.step_time_s
        entries = sorted(
            _hopeful(chosen, limit_s), key=lambda entry: entry["time_s"] or entry["bound_s"]
        )
        plans = []
        for entry in entries[:MOST_NEAR]:
            tell(f"pricing {mesh_words(entry['mesh'])}")
            plan = self.plan({**self.pin, **pins_of_entry(entry)}, self.cluster)
            if plan is not None and plan.predicted.step_time_s <= limit_s:
                plans.append(plan)
        return sorted(plans, key=lambda plan: plan.predicted.step_time_s), len(entries[MOST_NEAR:])


def _hopeful(chosen: Plan, limit_s: float) -> Iterator[dict]:
    """Entries of the certificate, without the chosen plan, whose time (or, if unsolved, lower
    bound) is at most `limit_s`.
    """
    for entry in chosen.certificate.meshes:
        least_s = entry["time_s"] if entry["time_s"] is not None else entry["bound_s"]
        if (
            entry["outcome"] in ("solved", "pruned", "unexplored")
            and least_s is not None
            and least_s <= limit_s
        ):
            yield entry


def _has(cluster: ClusterSpec, name: str) -> bool:
    links = {
        "bandwidth in nodes": cluster.topology.devices_per_node > 1,
        "bandwidth between nodes": cluster.topology.nodes > 1,
    }
    return links.get(name, True)


def _faster(curves: Mapping[Any, Any], factor: float) -> dict:
    """Measured curves, (size, seconds) points by key, of something `factor` times as fast. Curves
    may be nested in mappings.
    """
    return {
        key: _faster(value, factor) if isinstance(value, Mapping) else _faster_curve(value, factor)
        for key, value in curves.items()
    }


def _faster_curve(
    curve: Sequence[tuple[float, float]], factor: float
) -> tuple[tuple[float, float], ...]:
    return tuple((size, seconds / factor) for size, seconds in curve)


def _with_compute(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    device = cluster.device
    flops = {dtype: rate * factor for dtype, rate in device.flops.items()}
    curves = _faster(device.matmul_curves, factor)
    return replace(cluster, device=replace(device, flops=flops, matmul_curves=curves))


def _with_memory_bandwidth(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    device = cluster.device
    rate = device.memory_bandwidth_Bps * factor
    curve = device.memory_curve and _faster_curve(device.memory_curve, factor)
    return replace(cluster, device=replace(device, memory_bandwidth_Bps=rate, memory_curve=curve))


def _with_link(name: str, cluster: ClusterSpec, factor: float) -> ClusterSpec:
    """The cluster whose link `name` has `factor` times the bandwidth. Latencies stay, except those
    contained in a measured curve.
    """
    link: Link = getattr(cluster.topology, name)
    rate, curves = link.bandwidth_Bps * factor, _faster(link.curves, factor)
    faster: dict[str, Any] = {name: replace(link, bandwidth_Bps=rate, curves=curves)}
    return replace(cluster, topology=replace(cluster.topology, **faster))


FACTORS: dict[str, Callable[[ClusterSpec, float], ClusterSpec]] = {
    "compute rate": _with_compute,
    "memory bandwidth": _with_memory_bandwidth,
    "bandwidth in nodes": partial(_with_link, "intra"),
    "bandwidth between nodes": partial(_with_link, "inter"),
}
"""What may be mispredicted: its name, and a function from a cluster and a factor to the cluster
with that quantity scaled.
"""


def robust_reply(found: Robustness) -> Reply:
    """The chosen plan, a verdict in words, scenarios, and, if `near` was asked for, plans nearly as
    good. In JSON, regrets are fractions, None if a plan does not fit, and plans have the format of
    plan files. If `near` was not asked for, 'candidates' is [] and 'most_robust' None.
    """
    plan, robust, priced = found.chosen.plan, found.most_robust, _plan_fields(found)
    doubt, scenarios, candidates = not_proved_words(plan), _scenario_fields(found), found.priced
    numbers = range(len(found.scenarios))
    size = f"{ms(plan.predicted.step_time_s)}, {gib(max(plan.predicted.peak_memory_bytes))}"
    parts: list[str | Table] = [
        f"Chosen: {layout_words(plan)}: {size}.{_chance_words(found)}",
        _verdict(found, found.chosen),
        field_table(scenarios, numbers),
    ]
    if any(found.chosen.adapts(number) for number in numbers):
        parts.append(
            "+: the choices are pinned, but layouts of ops are chosen anew there; the plan as it is loses that or more."
        )
    if found.near is not None:
        more = f" ({found.left_out} more candidates that may be were not priced)"
        title = f"Plans within {percent(found.near)} of the chosen one{more * bool(found.left_out)}"
        which = "the chosen one" if robust is found.chosen else layout_words(robust.plan)
        parts.append(field_table(priced, candidates, title))
        parts.append(f"Most robust: {which}.  {_verdict(found, robust)}")
    data = {
        "off": found.off,
        "chosen": plan_data(plan),
        **records(priced, candidates)[0],
        "scenarios": records(scenarios, numbers),
        "near": found.near,
        "candidates": records(priced, candidates) if found.near is not None else [],
        "candidates_left_out": found.left_out,
        "most_robust": plan_data(robust.plan) if found.near is not None else None,
    }
    title = f"{plan.model_name} on {plan.cluster_name}: predictions off by {percent(found.off)}"
    return Reply(parts, doubted(doubt, data), title, doubt)


def _plan_fields(found: Robustness) -> tuple[Field, ...]:
    """The facts of each plan that is priced in the scenarios."""
    best_s = found.chosen.plan.predicted.step_time_s

    def where(one: RepricedPlan) -> str:
        regret, worst = found.worst(one)
        return str(worst) if regret >= _NOTHING else ""

    return (
        Field("choices", lambda one: choices_of(one.plan)),
        Field("", lambda one: short_words(one.plan), "plan"),
        Field("step_time_s", lambda one: one.plan.predicted.step_time_s, "step", ms),
        Field("", lambda one: one.plan.predicted.step_time_s / best_s - 1, "slower", percent),
        Field("peak_memory_bytes", lambda one: max(one.plan.predicted.peak_memory_bytes)),
        Field("misfit_chance", lambda one: misfit_chance(one.plan, found.cluster)),
        Field("", lambda one: "no" if found.misfits(one) else "yes", "fits always"),
        Field("worst_regret", lambda one: found.worst(one)[0], "worst regret", percent),
        Field("worst_scenario", lambda one: str(found.worst(one)[1])),
        Field("", where, "where"),
        Field("does_not_fit", lambda one: [str(found.scenarios[k]) for k in found.misfits(one)]),
    )


def _scenario_fields(found: Robustness) -> tuple[Field, ...]:
    """The facts of each scenario, by its number."""
    chosen = found.chosen

    def finite(value: float) -> float | None:
        return value if isfinite(value) else None

    def there(k: int) -> str:
        time_s = chosen.time_s(k)
        return ms(time_s) + " +" * chosen.adapts(k) if isfinite(time_s) else "does not fit"

    def best_words(k: int) -> str:
        if (best := found.best[k]) is None:
            return "none fits"
        return "the same" if choices_of(best) == choices_of(chosen.plan) else short_words(best)

    return (
        Field("scenario", lambda k: str(found.scenarios[k]), "scenario"),
        Field("factors", lambda k: dict(found.scenarios[k].factors)),
        Field("", there, "chosen", str),
        Field("chosen_s", lambda k: finite(chosen.time_s(k))),
        Field("best_s", lambda k: finite(found.best_s(k)), "best found", ms),
        Field("regret", lambda k: finite(found.regret(chosen, k)), "regret", percent),
        Field("layouts_adapt", chosen.adapts),
        Field("", best_words, "best plan there"),
        Field("best", lambda k: found.best[k] and choices_of(found.best[k])),
    )


def _verdict(found: Robustness, one: RepricedPlan) -> str:
    regret, worst = found.worst(one)
    text = f"Worst regret where it fits: {percent(regret)} ({worst})."
    if regret < _NOTHING:
        text = "Nothing found is faster, wherever it fits."
    for misfit in found.misfits(one):
        scenario, peak = found.scenarios[misfit], max(one.plan.predicted.peak_memory_bytes)
        capacity = gib(found.cluster.device.memory_bytes)
        text += f"  With {scenario} it does not fit: {gib(scenario.need * peak)} of {capacity}; "
        longer = found.best_s(misfit) / one.plan.predicted.step_time_s - 1
        text += (
            f"the best found that does takes {percent(longer)} longer."
            if isfinite(longer)
            else "nothing does."
        )
    return text


def _chance_words(found: Robustness) -> str:
    chance = misfit_chance(found.chosen.plan, found.cluster)
    if chance is None:
        return ""
    return f"  The chance that it does not fit is {percent(chance)}, by the measured error of predicted memory."
