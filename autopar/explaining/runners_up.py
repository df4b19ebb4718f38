"""The best plan of each other family of layouts: what it loses against the plan, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autopar.explaining.cost_parts import breakdown_parts
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.simplicity import Simplicity, simplicity_of
from autopar.text.plan_words import TIME_WORDS, choice_words
from autopar.text.tables import grid
from autopar.text.units import PROVED, gib, ms, percent

if TYPE_CHECKING:
    from rich.table import Table

_EQUAL = 5e-4
"""Fraction of a step below which a runner-up is said to be as fast."""


def runners_up_table(plan: Plan) -> list[Table]:
    """A list with one table of the plan's runners-up: a row for each other family of layouts, with
    its best plan, what it loses and where. [] if none are known.
    """
    entries = plan.certificate.runners_up
    if not entries:
        return []
    rows = [_row(plan, entry) for entry in entries]
    columns = ("family", "best plan", "step time", "longer", "memory", "why")
    return [grid("Runners-up", columns, rows, right=(2, 3, 4))]


def _row(plan: Plan, entry: Mapping[str, Any]) -> tuple[str, ...]:
    if entry["time_s"] is None:
        return (entry["family"], "none fits", "-", "-", "-", "")
    more = entry["time_s"] / plan.predicted.step_time_s - 1
    return (
        entry["family"],
        choice_words(entry),
        ms(entry["time_s"]),
        f"{100 * more:+.1f} %",
        gib(entry["memory_bytes"]),
        why(plan, entry),
    )


def why(plan: Plan, entry: Mapping[str, Any]) -> str:
    """Why the plan was preferred to a runner-up, as text: the part of a step that takes most longer
    there. If the runner-up is not slower, it is what makes it less simple.
    """
    if entry["time_s"] <= (1 + _EQUAL) * plan.predicted.step_time_s:
        own, other = simplicity_of_plan(plan), simplicity_of_entry(entry)
        return f"less simple: {other}" if other > own else "as good"
    parts = breakdown_parts(plan.predicted.breakdown, entry["breakdown"])
    part, ours, theirs = max(parts, key=lambda part: part[2] - part[1])
    return f"{TIME_WORDS.get(part, part)}: {ms(theirs)}, not {ms(ours)}"


def simplicity_of_plan(plan: Plan) -> Simplicity:
    """The simplicity of a plan, `crowded` aside."""
    per_rank = len(plan.stages) // plan.mesh.pp
    return simplicity_of(plan.mesh, plan.shard, per_rank, plan.recompute, plan.schedule)


def simplicity_of_entry(entry: Mapping[str, Any]) -> Simplicity:
    """The simplicity of a solved candidate in a certificate, `crowded` aside."""
    return simplicity_of(
        MeshShape(**entry["mesh"]),
        entry["shard"],
        entry["stages_per_rank"],
        entry["recompute"],
        entry["schedule"],
    )


def preference_words(plan: Plan) -> str:
    """What the certificate proves about the plan's simplicity, as text; '' with a tolerance of
    0.
    """
    proof = plan.certificate
    if not proof.tolerance:
        return ""
    within = f"within {percent(proof.tolerance)} of the {optimum_words(plan)}"
    faster = 1 - proof.fastest_s / plan.predicted.step_time_s
    if faster <= PROVED:
        return f"{simplicity_of_plan(plan)}; nothing simpler was found {within}{_left_words(plan)}"
    return (
        f"{simplicity_of_plan(plan)}: the simplest {within}{_left_words(plan)}; the {optimum_words(plan)} is "
        f"{choice_words(proof.fastest)}: {ms(proof.fastest_s)}, {100 * faster:.2g} % less"
    )


def optimum_words(plan: Plan) -> str:
    """What the fastest plan that was found is called: a proved optimum up to 0.1 %, or not."""
    return "proved optimum" if plan.certificate.gap <= PROVED else "fastest plan that was found"


def _left_words(plan: Plan) -> str:
    # not how many: bounds that exclude a class depend on which process found a plan first
    left = plan.certificate.simpler_left
    return " (some simpler ones were tried without a proof)" if left else ""
