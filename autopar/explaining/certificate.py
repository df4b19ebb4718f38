"""What is proved about a plan, as words of its text and of its page."""

from __future__ import annotations

from autopar.explaining.runners_up import left_words, nearness_words, preference_words
from autopar.ir.cluster import Cluster
from autopar.ir.cluster_parts import headroom_words
from autopar.ir.plan import Plan
from autopar.request.pins import pin_text
from autopar.text.numbers import Numbers, Words
from autopar.text.units import NOT_PROVED, NOTHING_KNOWN, PROVED, gap_words, gib, percent

_NO_GAIN = 5e-4
"""Fraction of a step below which more memory is said to gain nothing."""
_MORE_TIME = "a higher --time-limit (time_limit_s in Python) may prove or find more"
_NO_MORE = "every candidate was searched, and more time does not help"


def certificate_rows(plan: Plan, cluster: Cluster | None, n: Numbers) -> list[tuple[str, Words]]:
    """Rows (name, words) of what is proved, without the search space. `n` looks up the plan's data."""
    proof = plan.certificate
    rows: list[tuple[str, Words]] = [("status", _status_words(plan))]
    rows.append(("objective", n.ms("certificate.objective_s")))
    if proof.gap > PROVED:
        known = proof.bound_s > 0
        rows.append(("lower bound", n.ms("certificate.bound_s") if known else "none in time"))
    if words := preference_words(plan):
        rows.append(("simplicity", words))
    if proof.headroom:
        rows.append(("headroom", _headroom_words(plan, cluster, n)))
    rows.append(("candidates", f"{len(proof.meshes):,}"))
    return rows


SPACE_COLUMNS = ("choice", "what is searched", "why no others")
"""The columns of `space_rows`."""


def space_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """A row for each rule of the search space; none for a plan of an earlier version."""
    return [(rule["choice"], rule["values"], rule["why"]) for rule in plan.certificate.rules]


def not_proved_words(plan: Plan) -> str:
    """The first line of an answer whose plan has a gap above `NOT_PROVED`: that it is not proved, the
    gap, and what to do. '' for others.
    """
    proof = plan.certificate
    if proof.gap <= NOT_PROVED:
        return ""
    gap = gap_words(proof.gap)
    if proof.gap > NOTHING_KNOWN:
        known = (
            f"no useful lower bound was found (gap {gap}), and a plan that is much faster may exist"
        )
    else:
        known = f"another plan may take up to {gap} less"
    return f"Not proved: {known}{pinned_words(plan)}; {advice_on_gap(plan)}."


def pinned_words(plan: Plan) -> str:
    """A clause on the part of the search space that pins leave; '' without pins."""
    pins = plan.made_for.pins
    return f", among plans with {pin_text(pins).replace(',', ', ')}" if pins else ""


def proof_words(plan: Plan) -> str:
    """What the certificate proves, as the end of a sentence."""
    proof = plan.certificate
    found = "the best found in the time limit" if proof.is_cut else "the best found"
    best = "proved optimal within the search space" if proof.status == "optimal" else found
    words = best + pinned_words(plan)
    if proof.objective_s <= (1 + PROVED) * proof.fastest_s:
        return words
    if proof.tp_inside:
        more = 100 * (proof.objective_s / proof.fastest_s - 1)
        return f"a plan whose tensor parallelism does not cross nodes or PCIe, {more:.2g} % above what is {words}"
    return f"{nearness_words(plan)} of what is {words}{left_words(plan)}"


def advice_on_gap(plan: Plan) -> str:
    """What to do about the gap of a plan that is not proved optimal."""
    return _MORE_TIME if plan.certificate.is_cut else _NO_MORE


def outcome_counts(plan: Plan) -> dict[str, int]:
    """The number of candidates of the search by outcome, such as 'pruned'."""
    counts: dict[str, int] = {}
    for entry in plan.certificate.meshes:
        counts[entry["outcome"]] = counts.get(entry["outcome"], 0) + 1
    return counts


def _status_words(plan: Plan) -> str:
    proof, pinned = plan.certificate, pinned_words(plan)
    if proof.gap <= PROVED:
        return f"optimal, to within {percent(PROVED)}{pinned}"
    return f"{proof.status}, gap {gap_words(proof.gap)}{pinned}; {advice_on_gap(plan)}"


def _headroom_words(plan: Plan, cluster: Cluster | None, n: Numbers) -> Words:
    """What is kept free on each device, and what that costs."""
    proof = plan.certificate
    kept = headroom_words(proof.headroom)
    if cluster is not None and proof.headroom < 1 and len(cluster.groups) == 1:
        kept = f"{gib(proof.headroom * cluster.device.memory_bytes)} ({kept})"
    if proof.unlimited_s is None:
        return f"{kept} kept free"
    saved = 1 - proof.unlimited_s / plan.predicted.step_time_s
    if saved <= _NO_GAIN:
        return f"{kept} kept free, which costs this layout no time"
    unlimited = n.ms("certificate.unlimited_s")
    return [f"{kept} kept free; with it this layout would take ", unlimited, f", {percent(saved)} less"]  # fmt: skip
