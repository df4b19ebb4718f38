"""Plans side by side: the best one, the best under pins, and saved ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import truediv
from typing import Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.certificate import advice_on_gap, not_proved_words
from autopar.explaining.plan_report import plan_data
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.request.pins import check_pin_names, first_difference, pin_text, pins_of_entry
from autopar.request.software import software_line
from autopar.text.device_words import fullest_rank
from autopar.text.numbers import Numbers
from autopar.text.plan_words import (
    TIME_WORDS,
    PlanOn,
    dollars_per_million_tokens,
    layout_words,
    sharing_words,
    staleness,
)
from autopar.text.replies import ABSENT, Field, Reply, StepBar, Styled, records
from autopar.text.tables import Table
from autopar.text.units import PROVED, gap_words, gib, ms, percent


@dataclass(frozen=True, slots=True)
class ComparedPlan:
    """A named plan in a comparison. `note` is a reason why it is not quite comparable, or ''."""

    name: str
    plan: Plan
    note: str = ""


@dataclass(frozen=True, slots=True)
class Impossible:
    """A name in a comparison for which there is no plan: pins that none satisfies, or a saved plan
    for another request. `reason` says why.
    """

    name: str
    reason: str


def check_compared(pins: Sequence[Mapping[str, Any]], saved: Sequence[str]) -> None:
    """Raises AutoparError if a pin is unknown, or if pins or a saved plan are named twice."""
    for number, pin in enumerate(pins):
        check_pin_names(pin)
        if pin in pins[:number]:
            words = ",".join(f"{name}={value}" for name, value in pin.items())
            raise AutoparError(f"--pin {words} is given twice: once is enough to compare")
    if twice := [path for number, path in enumerate(saved) if path in saved[:number]]:
        raise AutoparError(f"--plan {twice[0]} is given twice: once is enough to compare")


def compare(
    plan_on: PlanOn,
    cluster: Cluster,
    pins: Sequence[Mapping[str, Any]],
    saved: Sequence[tuple[str, Plan]],
    hash_for: Callable[[Plan], str] | None = None,
) -> list[ComparedPlan | Impossible]:
    """The best plan, the best plan under each of `pins`, and the `saved` plans (name, plan), as
    entries in this order. `plan_on` plans under pins on a cluster. Without pins and saved plans,
    the other plans are the runners-up of the best one's certificate. `first_name` names the first.
    `hash_for` gives the hash of the model as captured for a saved plan: in half precision, other
    software has another graph. By default it is that of the best plan.

    Impossible pins, and a saved plan for another request, give an `Impossible` with the reason.
    Raises AutoparError if there is no plan even without pins.
    """
    best = plan_on({}, cluster)
    entries: list[ComparedPlan | Impossible] = [ComparedPlan(first_name(best), best)]
    for pin in pins:
        # the best of all is the best of those that have the pins
        if not first_difference(pin, best):
            entries.append(ComparedPlan(pin_text(pin), best))
            continue
        try:
            entries.append(ComparedPlan(pin_text(pin), plan_on(pin, cluster)))
        except AutoparError as error:
            entries.append(Impossible(pin_text(pin), str(error)))
    if not pins and not saved:
        entries += _families(plan_on, cluster, best)
    hash_for = hash_for or (lambda plan: best.model_hash)
    return entries + [_saved_entry(name, plan, best, hash_for(plan)) for name, plan in saved]


def first_name(plan: Plan) -> str:
    """What the first plan of a comparison is called: 'best' only if that is proved."""
    return "best" if plan.certificate.gap <= PROVED else "best found"


def known_words(plan: Plan) -> str:
    """What is known about the first plan of a comparison, as a sentence; '' if it is proved to be
    the best. `not_proved_words` tells it of a plan with a large gap.
    """
    proof = plan.certificate
    if proof.gap <= PROVED:
        return ""
    return (
        f"It is not proved best: no plan takes less than {ms(proof.bound_s)}, "
        f"{gap_words(proof.gap)} less than the fastest that was found; {advice_on_gap(plan)}."
    )


def _families(plan_on: PlanOn, cluster: Cluster, best: Plan) -> Iterator[ComparedPlan | Impossible]:
    """An entry for each runner-up of the certificate of `best`, by the name of its family."""
    for entry in best.certificate.runners_up:
        if entry["time_s"] is None:
            late = " in time" if entry.get("cut") else ""
            yield Impossible(entry["family"], f"no plan that fits was found{late}")
        else:
            try:
                yield ComparedPlan(entry["family"], plan_on(pins_of_entry(entry), cluster))
            except NoPlanFits as error:
                yield Impossible(entry["family"], str(error))


def _saved_entry(name: str, plan: Plan, best: Plan, model_hash: str) -> ComparedPlan | Impossible:
    """The entry of a saved plan; `Impossible` if it is for another model than the one with
    `model_hash`, or for another cluster or batch than the best plan.
    """
    if plan.model_hash != model_hash:
        reason = (
            f"for {plan.model_name}, of structure {plan.model_hash[:12]}, and this model's is {model_hash[:12]}: "
            "give the model and --seq it was made for"
        )
    elif plan.cluster_hash != best.cluster_hash:
        reason = (
            f"for cluster {plan.cluster_name}, whose description differs from {best.cluster_name}'s"
        )
    elif plan.global_batch != best.global_batch:
        reason = f"for a global batch of {plan.global_batch}, not of {best.global_batch}"
    else:
        return ComparedPlan(name, plan, staleness(plan))
    return Impossible(name, f"the plan is {reason}")


def compare_reply(entries: Sequence[ComparedPlan | Impossible], cluster: Cluster) -> Reply:
    """Plans side by side, in a column each, then impossible entries and notes as lines. The page draws
    their steps by part. The JSON of an impossible entry has a reason, and None for what plans have.
    """
    placed = [(k, entry) for k, entry in enumerate(entries) if isinstance(entry, ComparedPlan)]
    plans = [entry.plan for _, entry in placed]
    fields, best, bars = list(_fields(plans, cluster)), plans[0], list[StepBar]()
    data = [
        {"name": entry.name, "reason": entry.reason, "note": "", **dict.fromkeys(_OF_PLANS)}
        if isinstance(entry, Impossible)
        else records(fields, [entry])[0]
        for entry in entries
    ]
    n, software = Numbers(data), list(map(_software_words, plans))
    for k, entry in placed:
        name, step = f"{entry.name}: {layout_words(entry.plan)}", "plan.predicted.step_time_s"
        bars.append(StepBar(name, entry.plan.predicted.breakdown, n.ms(f"{k}.{step}")))
    is_said = best.made_for.cluster and len(set(software)) == 1
    names = [entry.name.replace(",", ", ") for _, entry in placed]
    rows = [
        [field.head or "", *(field.cell(entry, str(k)) for k, entry in placed)]
        for field in fields
        if field.head is not None
    ]
    doubt = not_proved_words(best)
    parts: list[str | Styled | Table] = [
        f"Software: {software[0]}." * bool(is_said),
        Table(("", *names), rows, range(1, len(names) + 1), alike=True),
        Styled(known_words(best) * (not doubt), "yellow"),
        *(Styled(_caution(entry), "yellow") for entry in entries),
    ]
    title = f"{best.model_name} on {best.cluster_name}, global batch {best.global_batch}"
    figure = bars, "Bars are steps by part."
    return Reply(parts, data, title, doubt, figure, "compare", best.cost_model_version)


def _caution(entry: ComparedPlan | Impossible) -> str:
    """Why an entry is impossible, or to be read with care; '' otherwise."""
    if isinstance(entry, Impossible):
        return f"{entry.name} is not possible: {entry.reason}."
    return f"{entry.name} is to be read with care: {entry.note}." if entry.note else ""


_OF_PLANS = ("ratio", "dollars_per_million_tokens", "plan")
"""The facts that an impossible entry lacks."""


def _fields(plans: Sequence[Plan], cluster: Cluster) -> Iterator[Field]:
    """The facts of the entry of a plan. Schedule, stages, offload, software and cost are shown where
    they say something.
    """
    best, several = plans[0], len({_software_words(plan) for plan in plans}) > 1
    rows, best_s = best.made_for.rows, best.predicted.step_time_s

    def of(
        key: str, get: Callable[[Plan], Any], head: str | None = None, words: Any = None
    ) -> Field:
        return Field(key, lambda entry: get(entry.plan), head, words)

    def predicted(name: str, head: str, words: Callable[[Any], str]) -> Field:
        return of(f"plan.predicted.{name}", lambda plan: getattr(plan.predicted, name), head, words)

    def fullest(plan: Plan) -> str:
        peak, room = fullest_rank(plan, cluster)
        return gib(peak) + f" of {gib(room)}" * several_kinds

    yield Field("name", lambda entry: entry.name)
    yield Field("reason", lambda entry: "")
    yield Field("note", lambda entry: entry.note)
    yield of("", lambda plan: str(plan.mesh), "mesh")
    yield of("", lambda plan: f"{plan.num_microbatches} of {plan.micro_batch}", "micro-batches")
    if any(plan.mesh.pp > 1 for plan in plans):
        yield of("", lambda plan: plan.schedule, "schedule")
        yield of("", lambda plan: len(plan.stages) // plan.mesh.pp, "stages a rank")
    if several:
        yield of("", _software_words, "software")
    yield of("", lambda plan: sharing_words(plan.zero, plan.shard), "ZeRO stage")
    yield of("", lambda plan: plan.recompute, "recompute")
    if any(plan.offload != "none" for plan in plans):
        yield of("", lambda plan: plan.offload, "offload")
    yield predicted("step_time_s", "step time", ms)
    ratio = f"of the {first_name(best)}"
    yield of("ratio", lambda plan: plan.predicted.step_time_s / best_s, ratio, "{:.3f} x".format)
    yield predicted("tokens_per_s", f"{rows} per second", "{:,.0f}".format)
    yield predicted("mfu", "model FLOPs utilization", percent)
    several_kinds = len(cluster.groups) > 1
    room = "" if several_kinds else f" of {gib(cluster.device.memory_bytes)}"
    yield of("", fullest, f"memory{room}")
    yield of("", lambda plan: percent(truediv(*fullest_rank(plan, cluster))), "share of the memory")
    cost = f"cost of a million {rows}" * (cluster.price_per_device_hour is not None) or None
    dollars = partial(dollars_per_million_tokens, cluster=cluster)
    yield of("dollars_per_million_tokens", dollars, cost, "${:.4g}".format)
    yield of("plan", plan_data)
    yield of("not_proved", lambda plan: not_proved_words(plan) or ABSENT)
    order = {part: place for place, part in enumerate(TIME_WORDS)}
    parts = dict.fromkeys(part for p in plans for part, s in p.predicted.breakdown.items() if s)
    for part in sorted(parts, key=lambda part: order.get(part, len(order))):
        # a pipeline has other parts than a plan without one
        get = partial(lambda part, plan: plan.predicted.breakdown.get(part), part)
        yield of(f"plan.predicted.breakdown.{part}", get, TIME_WORDS.get(part, part), ms)
    yield of("", _proof_words, "certificate")
    yield of("", lambda plan: f"no: {plan.lacks}" if plan.lacks else "yes", "engine runs it")


def _software_words(plan: Plan) -> str:
    """The software that a plan was made for; files of earlier versions do not say it."""
    return software_line(plan.made_for.software) if plan.made_for.cluster else "not known"


def _proof_words(plan: Plan) -> str:
    return f"{plan.certificate.status}, gap {gap_words(plan.certificate.gap)}"
