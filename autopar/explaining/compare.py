"""Plans side by side: the best one, the best under pins, and saved ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.explaining.certificate import advice_on_gap, not_proved_words
from autopar.explaining.plan_report import plan_data
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.request.pins import check_pin_names, first_difference, pin_text, pins_of_entry
from autopar.request.software import software_line
from autopar.text.device_words import fullest_rank
from autopar.text.plan_words import (
    TIME_WORDS,
    PlanOn,
    dollars_per_million_tokens,
    sharing_words,
    staleness,
)
from autopar.text.tables import grid
from autopar.text.units import PROVED, gap_words, gib, ms, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# characters; three plans beside the labels, and what is around all, fit 80
_LABEL_WIDTH, _PLAN_WIDTH, _EDGES = 24, 16, 2


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
) -> list[ComparedPlan | Impossible]:
    """The best plan, the best plan under each of `pins`, and the `saved` plans (name, plan), as
    entries in this order. `plan_on` plans under pins on a cluster. Without pins and saved plans,
    the other plans are the runners-up of the best one's certificate. `first_name` names the first.

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
    return entries + [_saved_entry(name, plan, best) for name, plan in saved]


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


def _saved_entry(name: str, plan: Plan, best: Plan) -> ComparedPlan | Impossible:
    """The entry of a saved plan; `Impossible` if it is for another model, cluster or batch than the
    best plan.
    """
    if plan.model_hash != best.model_hash:
        reason = (
            f"for {plan.model_name}, of structure {plan.model_hash[:12]}, and this model's is {best.model_hash[:12]}: "
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


def compare_data(
    entries: Sequence[ComparedPlan | Impossible], cluster: Cluster
) -> list[dict[str, Any]]:
    """One dict for each entry: name, reason, note, ratio (step time relative to the first plan's),
    dollars per million tokens, plan (as in plan files). If impossible, the last three are None, and
    `reason` says why.
    """
    best_s = next(e.plan.predicted.step_time_s for e in entries if isinstance(e, ComparedPlan))
    return [
        {
            "name": entry.name,
            "reason": "",
            "note": entry.note,
            "ratio": entry.plan.predicted.step_time_s / best_s,
            "dollars_per_million_tokens": dollars_per_million_tokens(entry.plan, cluster),
            "plan": plan_data(entry.plan),
        }
        | ({"not_proved": doubt} if (doubt := not_proved_words(entry.plan)) else {})
        if isinstance(entry, ComparedPlan)
        else {"name": entry.name, "reason": entry.reason, "note": ""}
        | dict.fromkeys(("ratio", "dollars_per_million_tokens", "plan"))
        for entry in entries
    ]


@dataclass(frozen=True, slots=True)
class CompareTable:
    """A comparison that rich prints as tables: a column for each plan, as many side by side as fit
    the terminal. Impossible entries and notes follow as lines.
    """

    entries: Sequence[ComparedPlan | Impossible]
    cluster: Cluster

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        planned = [entry for entry in self.entries if isinstance(entry, ComparedPlan)]
        best = planned[0].plan
        if doubt := not_proved_words(best):
            yield Text(doubt, style="yellow")
        yield Text(
            f"{best.model_name} on {best.cluster_name}, global batch {best.global_batch}",
            style="bold",
        )
        software = list(map(_software_words, (entry.plan for entry in planned)))
        if best.made_for.cluster and len(set(software)) == 1:
            yield Text(f"Software: {software[0]}.")
        room = options.max_width - _LABEL_WIDTH - _EDGES
        at_once = min(max(room // (_PLAN_WIDTH + 2), 1), len(planned))
        rows = self._rows([entry.plan for entry in planned])
        for first in range(0, len(planned), at_once):
            names = [entry.name.replace(",", ", ") for entry in planned[first : first + at_once]]
            yield grid(
                "",
                ("", *names),
                [(what, *values[first : first + at_once]) for what, values in rows],
                right=tuple(range(1, at_once + 1)),
            )
        if not doubt and (known := known_words(best)):
            yield Text(known, style="yellow")
        for entry in self.entries:
            if isinstance(entry, Impossible):
                yield Text(f"{entry.name} is not possible: {entry.reason}.", style="yellow")
            elif entry.note:
                yield Text(f"{entry.name} is to be read with care: {entry.note}.", style="yellow")

    def _rows(self, plans: Sequence[Plan]) -> list[tuple[str, list[str]]]:
        """Table rows as (name, value for each plan as text). Schedule, stages, offload, software
        and cost are left out where they say nothing.
        """
        alike = len(self.cluster.groups) == 1
        best_s = plans[0].predicted.step_time_s
        fullest = [fullest_rank(plan, self.cluster) for plan in plans]
        rows = [
            ("mesh", [str(plan.mesh) for plan in plans]),
            ("micro-batches", [f"{plan.num_microbatches} of {plan.micro_batch}" for plan in plans]),
        ]
        if any(plan.mesh.pp > 1 for plan in plans):
            rows.append(("schedule", [plan.schedule for plan in plans]))
            rows.append(
                ("stages a rank", [str(len(plan.stages) // plan.mesh.pp) for plan in plans])
            )
        software = list(map(_software_words, plans))
        if len(set(software)) > 1:
            rows.append(("software", software))
        rows.append(("ZeRO stage", [sharing_words(plan.zero, plan.shard) for plan in plans]))
        rows.append(("recompute", [plan.recompute for plan in plans]))
        if any(plan.offload != "none" for plan in plans):
            rows.append(("offload", [plan.offload for plan in plans]))
        rows += [
            ("step time", [ms(plan.predicted.step_time_s) for plan in plans]),
            (
                f"of the {first_name(plans[0])}",
                [f"{plan.predicted.step_time_s / best_s:.3f} x" for plan in plans],
            ),
            (
                f"{plans[0].made_for.rows} per second",
                [f"{plan.predicted.tokens_per_s:,.0f}" for plan in plans],
            ),
            ("model FLOPs utilization", [percent(plan.predicted.mfu) for plan in plans]),
            (
                f"memory of {gib(fullest[0][1])}" if alike else "memory",
                [gib(peak) + ("" if alike else f" of {gib(room)}") for peak, room in fullest],
            ),
            ("share of the memory", [percent(peak / room) for peak, room in fullest]),
        ]
        costs = [dollars_per_million_tokens(plan, self.cluster) for plan in plans]
        if None not in costs:
            rows.append(
                (f"cost of a million {plans[0].made_for.rows}", [f"${cost:.4g}" for cost in costs])
            )
        rows += _part_rows(plans)
        certificates = [plan.certificate for plan in plans]
        proofs = [f"{found.status}, gap {gap_words(found.gap)}" for found in certificates]
        rows.append(("certificate", proofs))
        runs = ["no: " + plan.runnable if plan.runnable else "yes" for plan in plans]
        rows.append(("engine runs it", runs))
        return rows


def _software_words(plan: Plan) -> str:
    """The software that a plan was made for; files of earlier versions do not say it."""
    return software_line(plan.made_for.software) if plan.made_for.cluster else "not known"


def _part_rows(plans: Sequence[Plan]) -> Iterator[tuple[str, list[str]]]:
    """(part of a step in words, its time in each plan as text) for the parts that take time in some
    plan. A plan without the part has '-', since a pipeline has other parts than a plan without one.
    """
    order = {part: place for place, part in enumerate(TIME_WORDS)}
    breakdowns = [plan.predicted.breakdown for plan in plans]
    parts = dict.fromkeys(part for each in breakdowns for part, seconds in each.items() if seconds)
    for part in sorted(parts, key=lambda part: order.get(part, len(order))):
        found = [each.get(part) for each in breakdowns]
        yield TIME_WORDS.get(part, part), ["-" if s is None else ms(s) for s in found]
