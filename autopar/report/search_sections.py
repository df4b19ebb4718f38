"""The sections of a page on the search: what is proved, runners-up, candidates, time against memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.explaining.certificate import (
    SPACE_COLUMNS,
    certificate_rows,
    outcome_counts,
    space_rows,
)
from autopar.explaining.found_plans import found_plans, pruned, why_lost
from autopar.explaining.runners_up import RUNNER_UP_COLUMNS, runner_up_rows
from autopar.ir.mesh import mesh_words
from autopar.report.page import Section, Table
from autopar.report.page_parts import PageParts
from autopar.report.pareto_figure import drawn_plans, front, pareto_figure, spots_of
from autopar.text.numbers import Number, Words
from autopar.text.plan_words import sharing_words
from autopar.text.replies import Spots

_SHOWN, _MOST_LOST = 6, 40


def certificate(parts: PageParts) -> Section:
    """What is proved about the plan."""
    rows = certificate_rows(parts.plan, parts.cluster, parts.numbers)
    tables, note = [Table(("", ""), rows)], ""
    if rules := space_rows(parts.plan):
        tables.append(Table(SPACE_COLUMNS, rules))
    else:
        note = f"Search space: {parts.plan.certificate.space}."
    return Section("certificate", "Certificate", "", tables=tuple(tables), note=note)


def runners_up(parts: PageParts) -> Section | None:
    """The best plan of each other family of layouts, with what it loses and where."""
    rows = runner_up_rows(parts.plan, parts.numbers)
    if not rows:
        return None
    lead = "The best plan of each other family of layouts."
    table = Table(RUNNER_UP_COLUMNS, rows, (2, 3, 4, 5))
    return Section("runners-up", "Runners-up", lead, tables=(table,))


def candidates(parts: PageParts) -> Section:
    """Each plan that the search found, and the best that it pruned, with why it lost."""
    plan, n = parts.plan, parts.numbers
    found = sorted(found_plans(plan), key=lambda other: other.entry["time_s"])
    rows = [_candidate(parts, f.path, f.entry) for f in found if not f.is_chosen]
    listed = pruned(plan)[: max(0, _MOST_LOST - len(rows))]
    meshes = plan.certificate.meshes
    rows += [_candidate(parts, f"certificate.meshes.{k}", meshes[k]) for k in listed]
    said = ", ".join(f"{count:,} {name}" for name, count in outcome_counts(plan).items())
    lead: list[str | Number] = [
        f"{len(meshes):,} candidates were considered ({said}). ", "The search took ",
        n.number("certificate.solve_time_s", lambda s: f"{s:.3g} s"),
        f". With those of runners-up, it found {len(found)} plans; the others are listed, and then what it pruned.",
    ]  # fmt: skip
    columns = ("mesh", "micro-batch", "schedule", "ZeRO", "recompute", "step time", "why it lost")
    table = Table(columns, rows[:_SHOWN], (5,), rows[_SHOWN:])
    return Section("candidates", "Candidates", lead, tables=(table,) if rows else ())


def pareto_section(parts: PageParts) -> Section | None:
    """Time against memory of all plans that the search found."""
    found = found_plans(parts.plan)
    drawn = drawn_plans(parts.plan, found)
    spots = spots_of(drawn, parts.numbers)
    if len(front(spots)) < 2:
        return None
    slow = f", without {len(found) - len(drawn)} far slower ones" * (len(drawn) < len(found))
    lead = (
        f"Time and memory of the {len(drawn)} plans that the search found{slow}. No other one is at least as good in both as those on the"
        " line. All use every device, so that cost grows with time."
    )
    figure = pareto_figure(Spots("Time against memory of candidates", spots, "step time"))
    return Section("pareto", "Time against memory", lead, figure)


def _candidate(parts: PageParts, at: str, entry: Mapping[str, Any]) -> list[Words]:
    """The row of a candidate or a runner-up whose data are at the path `at`."""
    n = parts.numbers
    step: Words = ""
    if entry.get("time_s"):
        step = n.ms(f"{at}.time_s")
    elif entry.get("bound_s"):
        step = ["at least ", n.ms(f"{at}.bound_s")]
    return [
        mesh_words(entry["mesh"]),
        n.count(f"{at}.micro_batch"),
        entry["schedule"],
        sharing_words(entry["zero"], entry.get("shard", 0)),
        entry["recompute"],
        step,
        why_lost(parts.plan, entry),
    ]
