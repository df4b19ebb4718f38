"""Replies on fits of constants, and on ablations of the cost model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from autopar_cost_models import FITTED

from autopar.foreign.published.fit import FREE_CONSTANTS, Fit
from autopar.foreign.published.report import finite_percent
from autopar.foreign.published.score import mape, mean
from autopar.text.replies import Field, Reply, field_table, records
from autopar.text.tables import Table

if TYPE_CHECKING:
    from autopar.foreign.published.ablate import Ablation, Without  # loads torch


def fit_data(found: Fit) -> dict[str, Any]:
    """A fit as plain data: `constants`, `errors` by run, `mape` and `bias`; by group (`by`), the errors
    with constants fitted without it.
    """
    left_out = {
        group: {
            "mape": mape(errors.values()),
            "errors": errors,
            "constants": asdict(found.constants_without[group]),
        }
        for group, errors in found.left_out.items()
    }
    return {
        "by": found.by,
        "constants": asdict(found.constants),
        "mape": found.mape,
        "bias": found.bias,
        "errors": found.errors,
        "left_out_mape": found.left_out_mape,
        "left_out": left_out,
    }


def fits_reply(fits: Sequence[Fit], families: Mapping[str, str]) -> Reply:
    """Tables of the constants, and of each group's errors with constants fitted with and without
    it. `families` has the family of each run, by its id. The JSON of several fits is a list.
    """
    parts: list[str | Table] = [part for found in fits for part in _fit_parts(found, families)]
    data = list(map(fit_data, fits))
    return Reply(parts, data[0] if len(data) == 1 else data)


def _fit_parts(found: Fit, families: Mapping[str, str]) -> Iterator[str | Table]:
    constants = []
    for name in FREE_CONSTANTS:
        without = [getattr(c, name) for c in found.constants_without.values()]
        values = getattr(FITTED, name), getattr(found.constants, name)
        cells = (f"{value:.3g}" for value in values)
        constants.append((name, *cells, f"{min(without):.3g} to {max(without):.3g}"))
    columns = ("constant", "in use", "fitted", f"range, without one {found.by}")
    yield Table(columns, constants, (1, 2, 3), title="Constants")
    unseen = {run: e for errors in found.left_out.values() for run, e in errors.items()}
    groups = {group: list(errors) for group, errors in found.left_out.items()}
    for family in dict.fromkeys(families.values()):
        groups[f"all: {family}"] = [run for run in unseen if families[run] == family]
    groups["all"] = list(unseen)
    rows = []
    for name, runs in groups.items():
        own, left = [found.errors[run] for run in runs], [unseen[run] for run in runs]
        scores = (mape(own), mean(own), mape(left), mean(left))
        rows.append((name, str(len(runs)), *(f"{100 * x:.1f} %" for x in scores)))
    title = f"Step times, each {found.by} by constants fitted with it and without it"
    heads = (found.by, "runs", "MAPE with", "bias with", "MAPE without", "bias without")
    yield Table(heads, rows, range(1, 6), title=title)


def ablation_reply(found: Ablation) -> Reply:
    """A row for each mechanism: what replaces it, and how the errors change. The JSON has errors by run
    with all mechanisms on; for each mechanism, the errors without it and the runs that it changes.
    """
    whole, refitted = mape(found.errors.values()), mape(found.refitted.values())

    def of_changed(each: Without) -> float:
        return mape(found.errors[run] for run in each.changed)

    def changes(each: Without) -> str:
        return str(len(each.changed)) + f" ({len(each.refused)} refused)" * bool(each.refused)

    fields = (
        Field("mechanism", lambda each: each.mechanism.name, "without"),
        Field("instead", lambda each: each.mechanism.instead, "instead"),
        Field("", changes, "runs it changes", str),
        Field("mape", lambda each: each.mape(), "MAPE", finite_percent),
        Field("", lambda each: each.mape() - whole, "change", _points),
        Field("", of_changed, "of those runs with", finite_percent),
        Field("", lambda each: each.mape(changed=True), "and without", finite_percent),
        Field("refitted_mape", lambda each: each.mape(True), "MAPE refitted", finite_percent),
        Field("", lambda each: each.mape(True) - refitted, "change", _points),
        Field("changed", lambda each: list(each.changed)),
        Field("refused", lambda each: list(each.refused)),
        Field("memory_mape", lambda each: mape(each.memory_errors.values())),
        Field("memory_changed", lambda each: list(each.memory_changed)),
        Field("rejected", lambda each: each.rejected),
        Field("errors", lambda each: each.errors),
        Field("refitted_errors", lambda each: each.refitted),
    )
    title = f"Step times of {len(found.errors)} runs without one mechanism"
    table = field_table(fields, found.without, title)
    first = ("all on", "", "", finite_percent(whole), "", "", "", finite_percent(refitted), "")
    table.rows = [first, *table.rows]
    note = (
        "Changes are in points.  Refitted: constants fitted again on the same runs without the mechanism, an approximation: how errors "
        "depend on constants is taken from the model with all mechanisms on.  A refused run cannot be predicted without the mechanism "
        "and keeps its prediction.\n"
    )
    data = {
        "mape": whole,
        "refitted_mape": refitted,
        "errors": found.errors,
        "refitted_errors": found.refitted,
        "memory_mape": mape(found.memory_errors.values()),
        "memory_errors": found.memory_errors,
        "rejected": found.rejected,
        "without": records(fields, found.without),
    }
    return Reply([table, note, _memory_ablation(found)], data)


def _memory_ablation(found: Ablation) -> Table:
    """A row for each mechanism that changes the memory of a run."""
    whole = mape(found.memory_errors.values())

    def measured(each: Without) -> list[str]:
        return [run for run in each.memory_changed if run in found.memory_errors]

    def without(each: Without) -> float:
        return mape(each.memory_errors.values())

    def of(errors: Mapping[str, float], each: Without) -> float:
        return mape(errors[run] for run in measured(each))

    fields = (
        Field("", lambda each: each.mechanism.name, "without"),
        Field("", lambda each: each.mechanism.instead, "instead"),
        Field("", lambda each: f"{len(each.memory_changed)}, {len(measured(each))} measured", "runs it changes", str),
        Field("", without, "MAPE", finite_percent),
        Field("", lambda each: without(each) - whole, "change", _points),
        Field("", lambda each: of(found.memory_errors, each), "of those runs with", finite_percent),
        Field("", lambda each: of(each.memory_errors, each), "and without", finite_percent),
        Field("", lambda each: each.rejected, "ran, but rejected", str),
    )  # fmt: skip
    title = f"Memory of {len(found.memory_errors)} runs without one mechanism"
    table = field_table(fields, [each for each in found.without if each.memory_changed], title)
    first = ("all on", "", "", finite_percent(whole), "", "", "", str(found.rejected))
    table.rows = [first, *table.rows]
    return table


def _points(change: float) -> str:
    return f"{100 * change:+.1f}" if isfinite(change) else "-"
