"""Objectives of planning: step time, cost per token, number of devices, or memory of the fullest
device.

The planner finds the fastest plan on one cluster. The other objectives call it several times, on
parts of the cluster or on devices with less memory, and state what this proves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isinf
from typing import Any

from autopar_cost_models.checks import finite

from autopar.errors import AutoparError, NoLayout, NoPlanFits, shown
from autopar.ir.cluster import Cluster, plain_data
from autopar.ir.plan import Plan
from autopar.request.options import OBJECTIVES
from autopar.text.plan_words import (
    PlanOn,
    device_hours_per_million_tokens,
    layout_words,
    short_words,
)
from autopar.text.replies import Field, Reply, field_table, records
from autopar.text.tables import Table
from autopar.text.units import PROVED, gib, ms, percent

LEAST_MEMORY_TOLERANCE = 0.01
"""Relative tolerance between the least memory found and the proved minimum."""
MOST_NODES = 8
"""Up to this many nodes, every number of nodes is considered; beyond it, powers of two and all
nodes.
"""
_ROOM = 1.001
"""Memory with which the smallest plan is planned, relative to what it needs. CP-SAT rounds bytes up
to its own units.
"""
_LEANEST_TRIES = 12
"""About how many searches find the least memory."""
_NOTHING_PROVED = 0.9
"""The gap from which a bound is not worth printing."""
_SAME = 1e-6
"""Relative excess of an objective over its bound that still counts as equal."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a plan is to be best at: one of `OBJECTIVES`. 'gpus' means the fewest devices with a
    step of at most `deadline_s` seconds, or with at least `tokens_per_s`; it needs one of the two,
    other objectives neither. Raises AutoparError for anything else.
    """

    objective: str = "time"
    deadline_s: float | None = None
    tokens_per_s: float | None = None

    def __post_init__(self) -> None:
        if self.objective not in OBJECTIVES:
            raise AutoparError(
                f"objective {shown(self.objective)} is not known; {', '.join(OBJECTIVES)} are"
            )
        asked = {"deadline": self.deadline_s, "tokens per second": self.tokens_per_s}
        given = {name: value for name, value in asked.items() if value is not None}
        for name, value in given.items():
            if (
                isinstance(value, bool)
                or not isinstance(value, (int, float))
                or not finite(value)
                or value <= 0
            ):
                raise AutoparError(f"{name} {shown(value)} must be a finite number > 0")
        if self.objective == "gpus" and len(given) != 1:
            raise AutoparError(
                f"objective gpus needs one of a deadline (seconds of a step) and tokens per second, and has {len(given)}: for example "
                "--deadline 2.5"
            )
        if self.objective != "gpus" and given:
            raise AutoparError(
                f"a {' and '.join(given)} belongs to objective gpus, and the objective is {self.objective}"
            )

    def limit_s(self, plan: Plan) -> float:
        """The longest step, in seconds, that meets the goal; infinite without a deadline. A rate is
        converted with the tokens of the plan's step.
        """
        if self.tokens_per_s is None:
            return inf if self.deadline_s is None else self.deadline_s
        return plan.predicted.tokens_per_s * plan.predicted.step_time_s / self.tokens_per_s

    def __str__(self) -> str:
        return (
            f"a step of at most {ms(self.deadline_s)}"
            if self.deadline_s is not None
            else f"{self.tokens_per_s:,.0f} tokens a second"
        )


@dataclass(frozen=True, slots=True)
class Fitted:
    """A part of the cluster, or the whole cluster with less memory, and the fastest plan found on
    it.
    """

    cluster: Cluster
    plan: Plan

    @property
    def bound_s(self) -> float:
        """A lower bound on the step seconds of every plan on this cluster."""
        return self.plan.certificate.bound_s

    @property
    def device_hours(self) -> float:
        """Device-hours per million tokens of the plan."""
        return device_hours_per_million_tokens(self.plan)


@dataclass(frozen=True, slots=True)
class Failed:
    """A part of the cluster, or the whole cluster with less memory, on which planning raised
    `error`.
    """

    cluster: Cluster
    error: AutoparError

    @property
    def settled(self) -> bool:
        """Whether it is proved that there is no plan. False after any error that does not say so:
        the search was out of time, or planning failed.
        """
        return isinstance(self.error, NoLayout) or (
            isinstance(self.error, NoPlanFits) and self.error.proven
        )

    @property
    def bound_s(self) -> float:
        """A lower bound on the step seconds of every plan on this cluster: infinite if it is proved
        that there is none, otherwise 0.
        """
        return inf if self.settled else 0.0


Tried = Fitted | Failed
Attempt = Callable[[Cluster], Tried]
"""The type of a function that plans on a cluster, under the user's pins."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The best plan for a goal, and what is proved about it.

    Attributes:
        goal: the goal.
        cluster: the part of the cluster that the plan is for.
        plan: the plan.
        value: the objective: seconds of a step, device-hours for a million tokens, devices, or
            bytes of the fullest device.
        bound: a lower bound on the objective of every plan in the search space, on any of the
            clusters.
        claim: what is proved, in words.
        tried: the attempts, in order, also those without a plan; () for the objective 'time'.
    """

    goal: Goal
    cluster: Cluster
    plan: Plan
    value: float
    bound: float
    claim: str
    tried: tuple[Tried, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether the bound proves that no plan is better; for memory, better by more than
        `LEAST_MEMORY_TOLERANCE`. For the time, it is about the fastest plan, also if a simpler one was chosen.
        """
        if self.goal.objective == "time":
            return self.plan.certificate.fastest_s <= self.bound * (1 + _SAME)
        return self.value <= self.bound * (
            1 + (LEAST_MEMORY_TOLERANCE if self.goal.objective == "memory" else _SAME)
        )


def choose(
    goal: Goal,
    plan_on: PlanOn,
    cluster: Cluster,
    pin: Mapping[str, Any],
    tell: Callable[[str], None],
) -> Chosen:
    """The best plan for a goal, on the cluster or on some of its devices, as a `Chosen`. `plan_on`
    plans under the pins `pin` on a cluster. If the goal is not the time, `tell` gets a line for
    each attempt, and the plan's first note states what is proved.

    Raises AutoparError like the planner, for other goals on several kinds of devices, and if no
    part of the cluster meets the limit of 'gpus'.
    """

    def attempt(at: Cluster) -> Tried:
        tell(f"planning for {at.num_devices} devices of {gib(at.device.memory_bytes)}")
        try:
            return Fitted(at, plan_on(pin, at))
        except AutoparError as error:
            return Failed(at, error)

    if goal.objective == "time":
        return _fastest(goal, cluster, plan_on(pin, cluster))
    if len(cluster.groups) > 1:
        raise AutoparError(
            f"objective {goal.objective} looks at parts of a cluster, and {cluster.name} has devices of several kinds: plan for each "
            f"part that you have in mind, for example {cluster.groups[0].name}"
        )
    found = {"cost": _cheapest, "gpus": _fewest, "memory": _leanest}[goal.objective](
        goal, cluster, attempt
    )
    return replace(
        found,
        plan=replace(
            found.plan, notes=(f"objective {goal.objective}: {found.claim}", *found.plan.notes)
        ),
    )


def most_searches(goal: Goal, cluster: Cluster) -> int:
    """About how many searches `choose` makes for a goal."""
    if goal.objective == "time" or len(cluster.groups) > 1:
        return 1
    return _LEANEST_TRIES if goal.objective == "memory" else len(sizes_of(cluster))


def sizes_of(cluster: Cluster) -> list[int]:
    """The numbers of devices to consider, ascending: powers of two that divide a node, and whole
    nodes. With more than `MOST_NODES` nodes, only powers of two and all nodes.
    """
    per_node, nodes = cluster.topology.devices_per_node, cluster.topology.nodes
    parts = [2**k for k in range(per_node.bit_length()) if 2**k < per_node and per_node % 2**k == 0]
    counts = (
        range(1, nodes + 1)
        if nodes <= MOST_NODES
        else [*(2**k for k in range(nodes.bit_length()) if 2**k < nodes), nodes]
    )
    return [*parts, *(per_node * count for count in counts)]


def _fastest(goal: Goal, cluster: Cluster, plan: Plan) -> Chosen:
    value, bound = plan.predicted.step_time_s, plan.certificate.bound_s
    return Chosen(
        goal,
        cluster,
        plan,
        value,
        bound,
        f"a step takes {ms(value)}{_proof_words(plan)}",
    )


def _proof_words(plan: Plan) -> str:
    """A clause on what the certificate of a plan proves about the fastest step."""
    proof = plan.certificate
    if proof.gap > _NOTHING_PROVED:
        return "; the search ended before it could prove a bound worth naming"
    if proof.gap > PROVED:
        return f", and with no plan of the space less than {ms(proof.bound_s)}"
    more = proof.objective_s / proof.fastest_s - 1
    if more <= PROVED:
        return f": the optimum of the space, to within {percent(PROVED)}"
    which = (
        "whose tensor parallelism crosses nodes or PCIe"
        if proof.tp_inside
        else "which is less simple"
    )
    return f", {percent(more)} more than the optimum of the space, {which}"


def _cheapest(goal: Goal, cluster: Cluster, attempt: Attempt) -> Chosen:
    """The plan (in a `Chosen`) with the lowest cost per token over all sizes of `sizes_of`; of
    equal ones the faster. Every size is planned, since the cost need not be monotone in the size.
    Raises the planner's error if there is none. `attempt` plans on a cluster.
    """
    tried = tuple(attempt(cluster.with_devices(size)) for size in sizes_of(cluster))
    planned = _planned(tried)
    best = min(planned, key=lambda one: (one.device_hours, one.plan.predicted.step_time_s))
    bound = min(_device_hours(one.cluster.num_devices * one.bound_s, best.plan) for one in tried)
    here = f"on {best.cluster.num_devices} of {cluster.num_devices} devices"
    claim = (
        f"{_cost_words(best.device_hours, cluster)} for a million tokens {here}: the lowest found on {_listed(tried)}; "
        f"no plan of the space on any of these costs less than {_cost_words(bound, cluster)}{_unsettled(tried)}"
    )
    return Chosen(goal, best.cluster, best.plan, best.device_hours, bound, claim, tried=tried)


def _fewest(goal: Goal, cluster: Cluster, attempt: Attempt) -> Chosen:
    """The plan (in a `Chosen`) on the fewest devices that meets the goal. Sizes are tried in
    ascending order. Raises AutoparError if none meets it, or the planner's last error if there is
    no plan at all. `attempt` plans on a cluster.
    """
    tried: list[Tried] = []
    for size in sizes_of(cluster):
        last = attempt(cluster.with_devices(size))
        tried.append(last)
        if isinstance(last, Fitted) and last.plan.predicted.step_time_s <= goal.limit_s(last.plan):
            limit_s = goal.limit_s(last.plan)
            bound = min(one.cluster.num_devices for one in tried if one.bound_s <= limit_s)
            claim = f"{size} devices are the fewest found with {goal}: {ms(last.plan.predicted.step_time_s)}{_fewer_words(tried, limit_s)}"
            return Chosen(goal, last.cluster, last.plan, size, bound, claim, tried=tuple(tried))
    best = min(_planned(tried), key=lambda one: one.plan.predicted.step_time_s)
    raise AutoparError(_missed_words(goal, cluster, best, tried))


def _leanest(goal: Goal, cluster: Cluster, attempt: Attempt) -> Chosen:
    """The plan (in a `Chosen`) with the least memory of the fullest device, to within `LEAST_MEMORY_TOLERANCE`.
    Raises the planner's error if none fits the cluster. `attempt` plans on a cluster.

    Devices get less memory until nothing fits. The first try is slightly above the planner's own
    minimum. Then steps downwards grow until nothing fits, and shrink from there, until the interval
    is `LEAST_MEMORY_TOLERANCE` wide.
    """
    tried = [attempt(cluster)]
    fastest = best = _planned(tried)[0]
    high, low = _peak_bytes(best.plan), cluster.device.reserved_bytes + 1
    cluster = cluster.kept_free(0.0)  # of the less memory that is tried
    least = attempt(cluster.with_memory(low))  # nothing fits: the error tells the least
    tried.append(least)
    known = least.error if isinstance(least, Failed) else None
    just = ceil(_ROOM * (getattr(known, "least_bytes", None) or high))
    if just < high:
        tried.append(last := attempt(cluster.with_memory(just)))
        if isinstance(last, Fitted):
            best, high = last, _peak_bytes(last.plan)
    bound, step = low, 1
    while high > (1 + LEAST_MEMORY_TOLERANCE) * low:
        room = max(ceil(high / (1 + LEAST_MEMORY_TOLERANCE) ** step), low + 1)
        tried.append(last := attempt(cluster.with_memory(room)))
        if isinstance(last, Fitted):
            best, high, step = last, _peak_bytes(last.plan), 2 * step
        else:
            low, step = last.cluster.device.memory_bytes, 1
            bound = low if last.settled else bound
    plan = replace(
        best.plan,
        cluster_name=cluster.name,
        cluster_hash=cluster.spec_hash(),
        made_for=replace(best.plan.made_for, cluster=plain_data(cluster)),
    )
    return Chosen(
        goal,
        cluster,
        plan,
        high,
        bound,
        claim=_memory_words(fastest, best, bound, low),
        tried=tuple(tried),
    )


def _planned(tried: Sequence[Tried]) -> list[Fitted]:
    """The attempts that found plans (`Fitted`), in order. If there is none, raises the error of the
    last attempt.
    """
    if planned := [one for one in tried if isinstance(one, Fitted)]:
        return planned
    raise next(one.error for one in reversed(tried) if isinstance(one, Failed))


def _peak_bytes(plan: Plan) -> int:
    return max(plan.predicted.peak_memory_bytes)


def _device_hours(device_seconds: float, plan: Plan) -> float:
    """Device-hours per million tokens, if the tokens of one step of `plan` take
    `device_seconds`.
    """
    tokens = plan.predicted.tokens_per_s * plan.predicted.step_time_s
    return device_seconds / tokens * 1e6 / 3600


def _listed(tried: Sequence[Tried]) -> str:
    return ", ".join(str(one.cluster.num_devices) for one in tried)


def _cost_words(device_hours: float, cluster: Cluster) -> str:
    """A cost per million tokens as text: `$0.0745`, or `0.0298 device-hours` if the cluster has no
    price.
    """
    price = cluster.price_per_device_hour
    return f"{device_hours:.4g} device-hours" if price is None else f"${device_hours * price:.4g}"


def _unsettled(tried: Sequence[Tried]) -> str:
    """A clause that lists the sizes without a plan for which nothing is proved; '' if there are
    none.
    """
    unknown = [one for one in tried if isinstance(one, Failed) and not one.settled]
    return f"; on {_listed(unknown)} no plan was found, which proves nothing" if unknown else ""


def _fewer_words(tried: Sequence[Tried], limit_s: float) -> str:
    """A clause about what is proved for the sizes before the last: whether a plan there may meet
    `limit_s`. '' if there are none.
    """
    fewer = tried[:-1]
    if not fewer:
        return ""
    open_ = [one for one in fewer if one.bound_s <= limit_s]
    if not open_:
        return f"; no plan of the space on {_listed(fewer)} takes at most {ms(limit_s)}"
    return f"; that none on {_listed(open_)} takes at most {ms(limit_s)} is not proved{_unsettled(fewer)}"


def _missed_words(goal: Goal, cluster: Cluster, best: Fitted, tried: Sequence[Tried]) -> str:
    limit_s = goal.limit_s(best.plan)
    possible = _listed([one for one in tried if one.bound_s <= limit_s])
    return (
        f"no plan found on {_listed(tried)} devices of {cluster.name} has {goal}: the best takes {ms(best.plan.predicted.step_time_s)} "
        f"({best.plan.predicted.tokens_per_s:,.0f} tokens a second) on {best.cluster.num_devices} ({layout_words(best.plan)})"
        + (
            f"; that none on {possible} has is not proved"
            if possible
            else "; the bounds of the certificates prove that there is none"
        )
        + "; allow that much, use more devices, or drop pins"
    )


def _memory_words(fastest: Fitted, best: Fitted, bound: int, low: int) -> str:
    room, plan = best.cluster.device.memory_bytes, fastest.plan
    proof = f"no plan of the space fits into {gib(bound)}"
    if bound == low:
        proof += f", so that none needs less by more than {percent(LEAST_MEMORY_TOLERANCE)}"
    else:
        proof += f"; with {gib(low)} none was found, which proves nothing"
    return (
        f"{gib(_peak_bytes(best.plan))} on the fullest device; {proof}.  The certificate is for the fastest plan that fits into "
        f"{gib(room)}; without that limit a step takes {ms(plan.predicted.step_time_s)} with {gib(_peak_bytes(plan))}"
    )


_HEADS = {
    "time": "the fastest step",
    "cost": "the lowest cost per token",
    "gpus": "the fewest devices",
    "memory": "the least memory",
}
_UNITS = {
    "time": "s",
    "cost": "device-hours per million tokens",
    "gpus": "devices",
    "memory": "bytes",
}


def chosen_reply(chosen: Chosen) -> Reply:
    """The objective and the claim as a sentence, then a row for each attempt, if there were any. In
    JSON, value and bound are in `unit`.
    """
    goal, price = chosen.goal, chosen.cluster.price_per_device_hour
    fields = _tried_fields(price)
    said = f"{chosen.claim[0].upper()}{chosen.claim[1:]}."
    parts: list[str | Table] = [f"Objective: {_HEADS[goal.objective]}.  {said}"]
    if chosen.tried:
        parts.append(field_table(fields, chosen.tried))
    data = {
        "objective": goal.objective,
        "deadline_s": goal.deadline_s,
        "tokens_per_s": goal.tokens_per_s,
        "value": chosen.value,
        "bound": chosen.bound,
        "unit": _UNITS[goal.objective],
        "proven": chosen.proven,
        "claim": chosen.claim,
        "dollars_per_device_hour": price,
        "tried": records(fields, chosen.tried),
    }
    return Reply(parts, data)


def _tried_fields(price: float | None) -> tuple[Field, ...]:
    """The facts of an attempt. One that failed has neither plan nor times."""

    def fitted(get: Callable[[Fitted], Any]) -> Callable[[Tried], Any]:
        return lambda one: get(one) if isinstance(one, Fitted) else None

    def plan_words(one: Tried) -> str:
        if isinstance(one, Fitted):
            return short_words(one.plan)
        why = "none fits" if isinstance(one.error, NoPlanFits) else "impossible"
        return why if one.settled else "none found"

    def bare_gib(size: float) -> str:
        return gib(size).removesuffix(" GiB")

    def cost(hours: float) -> str:
        return f"{hours * (price or 1.0):.3g}"

    unit = "GPUh/M" if price is None else "$/M"
    hours = fitted(lambda one: one.device_hours)
    return (
        Field("devices", lambda one: one.cluster.num_devices, "devices", str),
        Field("memory_bytes", lambda one: one.cluster.device.memory_bytes, "GiB each", bare_gib),
        Field("", plan_words, "plan"),
        Field("plan", fitted(lambda one: short_words(one.plan))),
        Field("step_time_s", fitted(lambda one: one.plan.predicted.step_time_s), "step", ms),
        Field("", fitted(lambda one: one.bound_s), "at least", ms),
        Field("bound_s", lambda one: None if isinf(one.bound_s) else one.bound_s),
        Field("peak_memory_bytes", fitted(lambda one: _peak_bytes(one.plan)), "GiB", bare_gib),
        Field("device_hours_per_million_tokens", hours, unit, cost),
        Field("reason", lambda one: str(one.error) if isinstance(one, Failed) else ""),
    )
