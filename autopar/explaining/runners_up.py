"""The best plan of each other family of layouts: what it loses against the plan, and why."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from autopar.explaining.cost_parts import breakdown_parts
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.ir.simplicity import INSIDE, Simplicity, simplicity_of
from autopar.text.numbers import Numbers, Words
from autopar.text.plan_words import TIME_WORDS, choice_words
from autopar.text.units import PROVED, gap_words, ms, percent

_EQUAL = 5e-4
"""Fraction of a step below which a runner-up is said to be as fast."""


RUNNER_UP_COLUMNS = ("family", "best found", "step time", "longer", "at least", "memory", "why")
"""The columns of `runner_up_rows`, of which 2 to 5 are numbers. At least so much longer is each plan
of the family, by its bound.
"""


def runner_up_rows(plan: Plan, n: Numbers) -> list[list[Words]]:
    """A row for each other family of layouts, with its best plan, what it loses and where. `n` looks
    up the plan's data.
    """
    own_s, rows = plan.predicted.step_time_s, list[list[Words]]()
    for k, entry in enumerate(plan.certificate.runners_up):
        at = f"certificate.runners_up.{k}"
        if entry["time_s"] is None:
            rows.append([entry["family"], none_words(entry), "-", "-", "-", "-", ""])
            continue
        longer = n.number(f"{at}.time_s", partial(_longer, own_s))
        is_bounded = bool(entry.get("bound_s"))
        least = n.number(f"{at}.bound_s", partial(_longer, own_s)) if is_bounded else "-"
        rows.append([
            entry["family"], choice_words(entry), n.ms(f"{at}.time_s"), longer, least,
            n.gib(f"{at}.memory_bytes"), why(plan, entry),
        ])  # fmt: skip
    return rows


def _longer(own_s: float, other_s: float) -> str:
    """How much longer another step takes, as text; never -0.0 %."""
    return f"{round(100 * (other_s / own_s - 1), 1) + 0.0:+.1f} %"


def none_words(entry: Mapping[str, Any]) -> str:
    """What is known of a family in which no plan was found: 'none fits' only if that is proved."""
    if entry.get("bound_s", 0.0) is None:
        return "none fits"
    return "not in time" if entry.get("cut") else "none found"


def why(plan: Plan, entry: Mapping[str, Any]) -> str:
    """Why the plan was preferred to another one that was found, as text: the part of a step that takes
    most longer there, if that is known. If the other is not slower, it is what makes it less simple.
    """
    if entry["time_s"] <= (1 + _EQUAL) * plan.predicted.step_time_s:
        own, other = simplicity_of_plan(plan), simplicity_of_entry(entry)
        return f"less simple: {other}" if other > own else "as good"
    if not entry.get("breakdown"):
        return f"{gap_words(entry['time_s'] / plan.predicted.step_time_s - 1)} slower"
    parts = breakdown_parts(plan.predicted.breakdown, entry["breakdown"])
    part, ours, theirs = max(parts, key=lambda part: part[2] - part[1])
    return f"{TIME_WORDS.get(part, part)}: {ms(theirs)}, not {ms(ours)}"


def simplicity_of_plan(plan: Plan) -> Simplicity:
    """The simplicity of a plan, `crowded` aside."""
    per_rank = len(plan.stages) // plan.mesh.pp
    return simplicity_of(plan.mesh, plan.zero, plan.shard, per_rank, plan.recompute, plan.schedule)


def simplicity_of_entry(entry: Mapping[str, Any]) -> Simplicity:
    """The simplicity of a solved candidate in a certificate, `crowded` aside."""
    return simplicity_of(
        MeshShape(**entry["mesh"]),
        entry["zero"],
        entry["shard"],
        entry["stages_per_rank"],
        entry["recompute"],
        entry["schedule"],
    )


def allowed_more(plan: Plan) -> float:
    """The fraction by which a plan as simple as this one may take longer than the fastest."""
    proof = plan.certificate
    if not proof.fastest:
        return proof.tolerance
    fastest = simplicity_of_entry(proof.fastest)
    return fastest.allowed_more(simplicity_of_plan(plan), proof.tolerance)


def nearness_words(plan: Plan) -> str:
    """How near a plan that was preferred for its simplicity is to the fastest, as text. Where it may
    take longer than the tolerance, still simpler kinds of plans may have had a lower limit.
    """
    allowed, tolerance = allowed_more(plan), plan.certificate.tolerance
    what = "the simplest within" if allowed <= tolerance else "simpler, within"
    return f"{what} {percent(allowed)}"


def preference_words(plan: Plan) -> str:
    """What the certificate proves about the plan's simplicity, as text; '' with a tolerance of
    0.
    """
    proof = plan.certificate
    if not proof.tolerance:
        return ""
    faster = 1 - proof.fastest_s / plan.predicted.step_time_s
    if proof.tp_inside:
        return (
            f"{simplicity_of_plan(plan)}, and tensor parallelism does not cross nodes or PCIe; the {optimum_words(plan)} is "
            f"{choice_words(proof.fastest)}, where it does: {ms(proof.fastest_s)}. {inside_words(plan)}"
        )
    left = f"{optimum_words(plan)}{left_words(plan)}"
    if faster <= PROVED:
        nothing = f"nothing simpler was found within {percent(proof.tolerance)} of the {left}"
        return f"{simplicity_of_plan(plan)}; {nothing}"
    return (
        f"{simplicity_of_plan(plan)}: {nearness_words(plan)} of the {left}; the {optimum_words(plan)} is "
        f"{choice_words(proof.fastest)}: {ms(proof.fastest_s)}, {100 * faster:.2g} % less"
    )


def inside_words(plan: Plan) -> str:
    """What it costs that tensor parallelism does not cross nodes or PCIe, as a sentence; '' if it costs
    nothing.
    """
    proof = plan.certificate
    if not proof.tp_inside:
        return ""
    more = plan.predicted.step_time_s / proof.fastest_s - 1
    return (
        f"Tensor parallelism does not cross nodes or PCIe, which costs {100 * more:.2g} % of a step (up to {percent(INSIDE)} is allowed; "
        "a pin of tp or --tolerance 0 lifts this)"
    )


def optimum_words(plan: Plan) -> str:
    """What the fastest plan that was found is called: a proved optimum up to 0.1 %, or not."""
    return "proved optimum" if plan.certificate.gap <= PROVED else "fastest plan that was found"


def left_words(plan: Plan) -> str:
    """That simpler plans were not excluded, as text; '' if they were."""
    # not how many: bounds that exclude a class depend on which process found a plan first
    left = plan.certificate.simpler_left
    return " (some simpler ones are left without a proof)" if left else ""
