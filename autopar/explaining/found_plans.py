"""The plans that a search found, and why each candidate is not the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.explaining.runners_up import why
from autopar.ir.plan import Plan
from autopar.text.units import gap_words

_CHOICES = (
    "micro_batch",
    "zero",
    "shard",
    "recompute",
    "schedule",
    "stages_per_rank",
)
_AS_FAST = 5e-4
"""Fraction of a step below which two steps are called as fast."""


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan of the search: the path of its data in the plan's, what the data have, and whether it
    was chosen.
    """

    path: str
    entry: Mapping[str, Any]
    is_chosen: bool


def found_plans(plan: Plan) -> list[FoundPlan]:
    """Every plan of which the certificate has time and memory, once: those of the candidates, then
    those of runners-up that are no candidate's.
    """
    proof, found = plan.certificate, dict[tuple, FoundPlan]()
    for number, entry in enumerate(proof.meshes):
        if entry["outcome"] in ("chosen", "solved") and _has_merits(entry):
            path, is_chosen = f"certificate.meshes.{number}", entry["outcome"] == "chosen"
            found.setdefault(_choices(entry), FoundPlan(path, entry, is_chosen))
    for number, entry in enumerate(proof.runners_up):
        if not _has_merits(entry):
            continue
        same = found.get(_choices(entry))
        path = same.path if same else f"certificate.runners_up.{number}"
        whole = {**entry, **(same.entry if same else {})}
        found[_choices(entry)] = FoundPlan(path, whole, same is not None and same.is_chosen)
    return list(found.values())


def pruned(plan: Plan) -> list[int]:
    """The indices of candidates of which only a bound is known, the best first. Each mesh with its
    choices is listed once, with its best micro-batch.
    """
    meshes, best = plan.certificate.meshes, dict[tuple, int]()
    for number, entry in enumerate(meshes):
        if entry["outcome"] in ("chosen", "solved", "unexplored") or entry.get("bound_s") is None:
            continue
        key = _choices({**entry, "micro_batch": None})
        if key not in best or entry["bound_s"] < meshes[best[key]]["bound_s"]:
            best[key] = number
    return sorted(best.values(), key=lambda number: meshes[number]["bound_s"])


def why_lost(plan: Plan, entry: Mapping[str, Any]) -> str:
    """Why a candidate or a runner-up is not the plan, as a phrase."""
    if entry.get("outcome", "solved") == "solved":
        return why(plan, entry)
    if entry["outcome"] != "pruned":
        return entry["reason"]
    slower = entry["bound_s"] / plan.certificate.fastest_s - 1
    if abs(slower) <= _AS_FAST:
        return "at best as fast as the fastest plan"
    return f"at best {gap_words(abs(slower))} {'slower' if slower > 0 else 'faster'} than the fastest plan"


def _has_merits(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("time_s") and entry.get("memory_bytes"))


def _choices(entry: Mapping[str, Any]) -> tuple:
    return (*entry["mesh"].values(), *(entry.get(name) for name in _CHOICES))
