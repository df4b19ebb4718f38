"""Plans side by side: the best one, the best under pins, and saved ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.explaining.plan_report import plan_data
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.request.pins import check_pin_names, first_difference, pin_text
from autopar.text.device_words import fullest_rank
from autopar.text.plan_words import (
    TIME_WORDS,
    PlanOn,
    dollars_per_million_tokens,
    sharing_words,
    staleness,
)
from autopar.text.tables import grid
from autopar.text.units import gap_words, gib, ms, percent

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

_LABEL_WIDTH, _PLAN_WIDTH, _EDGES = (
    24,
    16,
    2,
)  # characters; three plans beside the labels, and what is around all, fit 80


@dataclass(frozen=True, slots=True)
class Entry:
    """A named layout: its plan, or None with the `reason`; of a plan that cannot quite be compared, `note` says why."""

    name: str
    plan: Plan | None
    reason: str = ""
    note: str = ""


def check_compared(pins: Sequence[Mapping[str, Any]], saved: Sequence[str]) -> None:
    """Raise AutoparError if there is nothing to compare with, for a pin that does not exist, and for a plan that is named twice."""
    if not pins and not saved:
        raise AutoparError(
            "compare needs at least one --pin or --plan, for example --pin tp=8 --pin tp=4,zero=1"
        )
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
) -> list[Entry]:
    """The best plan, the best under each of `pins`, and the `saved` plans by name.

    A layout that is impossible has its reason; AutoparError is raised where nothing fits even without pins.
    """
    best = plan_on({}, cluster)
    entries = [Entry("best", best)]
    for pin in pins:
        # the best of all is the best of those that have the pins
        if not first_difference(pin, best):
            entries.append(Entry(pin_text(pin), best))
            continue
        try:
            entries.append(Entry(pin_text(pin), plan_on(pin, cluster)))
        except AutoparError as error:
            entries.append(Entry(pin_text(pin), None, str(error)))
    return entries + [_saved_entry(name, plan, best) for name, plan in saved]


def _saved_entry(name: str, plan: Plan, best: Plan) -> Entry:
    """A saved plan beside the best, if both are for one task."""
    if plan.model_hash != best.model_hash:
        return Entry(name, None, f"the plan is for {plan.model_name}, of structure {plan.model_hash[:12]}, and this model's is "
                                 f"{best.model_hash[:12]}: give the model and --seq it was made for")  # fmt: skip
    if plan.cluster_hash != best.cluster_hash:
        return Entry(
            name,
            None,
            f"the plan is for cluster {plan.cluster_name}, whose description differs from {best.cluster_name}'s",
        )
    if plan.global_batch != best.global_batch:
        return Entry(
            name,
            None,
            f"the plan is for a global batch of {plan.global_batch}, not of {best.global_batch}",
        )
    return Entry(name, plan, note=staleness(plan))


def compare_data(entries: Sequence[Entry], cluster: Cluster) -> list[dict[str, Any]]:
    """The entries as plain data; plans as plan files have them."""
    best_s = entries[0].plan.predicted.step_time_s
    return [
        {
            "name": entry.name,
            "reason": entry.reason,
            "note": entry.note,
            "ratio": entry.plan and entry.plan.predicted.step_time_s / best_s,
            "dollars_per_million_tokens": entry.plan
            and dollars_per_million_tokens(entry.plan, cluster),
            "plan": entry.plan and plan_data(entry.plan),
        }
        for entry in entries
    ]


@dataclass(frozen=True, slots=True)
class CompareTable:
    """The comparison as a rich renderable: a column for each plan, as many beside one another as the terminal is wide."""

    entries: Sequence[Entry]
    cluster: Cluster

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        best = self.entries[0].plan
        planned = [entry for entry in self.entries if entry.plan is not None]
        yield Text(
            f"{best.model_name} on {best.cluster_name}, global batch {best.global_batch}",
            style="bold",
        )
        room = options.max_width - _LABEL_WIDTH - _EDGES
        at_once = min(max(room // (_PLAN_WIDTH + 2), 1), len(planned))
        width = max(room // at_once - 2, _PLAN_WIDTH)
        rows = self._rows(planned)
        for first in range(0, len(planned), at_once):
            names = [entry.name.replace(",", ", ") for entry in planned[first : first + at_once]]
            table = grid("", ("", *names), [(what, *values[first : first + at_once]) for what, values in rows],
                         right=tuple(range(1, at_once + 1)))  # fmt: skip
            table.columns[0].max_width = _LABEL_WIDTH
            for column in table.columns[1:]:
                column.max_width = width
            yield table
        for entry in self.entries:
            for why, words in (
                ("is not possible", entry.reason),
                ("is to be read with care", entry.note),
            ):
                if words:
                    yield Text(f"{entry.name} {why}: {words}.", style="yellow")

    def _rows(self, planned: Sequence[Entry]) -> list[tuple[str, list[str]]]:
        """(what, its value for each plan); what no plan has is left out."""
        plans = [entry.plan for entry in planned]
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
        rows += [
            ("ZeRO stage", [sharing_words(plan.zero, plan.shard) for plan in plans]),
            ("recompute", [plan.recompute for plan in plans]),
            *(
                [("offload", [plan.offload for plan in plans])]
                if any(plan.offload != "none" for plan in plans)
                else []
            ),
            ("step time", [ms(plan.predicted.step_time_s) for plan in plans]),
            ("of the best", [f"{plan.predicted.step_time_s / best_s:.3f} x" for plan in plans]),
            ("tokens per second", [f"{plan.predicted.tokens_per_s:,.0f}" for plan in plans]),
            ("model FLOPs utilization", [percent(plan.predicted.mfu) for plan in plans]),
            (
                f"memory of {gib(fullest[0][1])}" if alike else "memory",
                [gib(peak) + ("" if alike else f" of {gib(room)}") for peak, room in fullest],
            ),
            ("share of the memory", [percent(peak / room) for peak, room in fullest]),
        ]
        costs = [dollars_per_million_tokens(plan, self.cluster) for plan in plans]
        if None not in costs:
            rows.append(("cost of a million tokens", [f"${cost:.4g}" for cost in costs]))
        found = [
            part for plan in plans for part, seconds in plan.predicted.breakdown.items() if seconds
        ]
        for part in sorted(
            dict.fromkeys(found),
            key=lambda part: (
                list(TIME_WORDS).index(part) if part in TIME_WORDS else len(TIME_WORDS)
            ),
        ):
            # a pipeline has other parts than one rank
            seconds = [plan.predicted.breakdown.get(part) for plan in plans]
            rows.append(
                (TIME_WORDS.get(part, part), ["-" if s is None else ms(s) for s in seconds])
            )
        rows.append(
            (
                "certificate",
                [f"{p.certificate.status}, gap {gap_words(p.certificate.gap)}" for p in plans],
            )
        )
        rows.append(
            (
                "engine runs it",
                ["no: " + plan.runnable if plan.runnable else "yes" for plan in plans],
            )
        )
        return rows
