"""Tables and JSON of fits of constants, and of ablations of the cost model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any

from autopar_cost_models import FITTED

from autopar.foreign.published.fit import FREE_CONSTANTS, Fit
from autopar.foreign.published.report import finite_percent, json_text, text_grid
from autopar.foreign.published.score import mape, mean
from autopar.text.tables import Grid

if TYPE_CHECKING:
    from rich.console import Group

    from autopar.foreign.published.ablate import Ablation  # loads torch

# -------------------------------------------------------------------------------------------------------------------------- fits


def fit_json(*fits: Fit) -> str:
    """Fits as JSON text: `constants`, `errors` by run, `mape` and `bias`; by group (`by`), the
    errors with constants fitted without it. Of several fits, a list of these.
    """
    data = [_fit_data(found) for found in fits]
    return json_text(data[0] if len(data) == 1 else data)


def _fit_data(found: Fit) -> dict[str, Any]:
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


def fit_table(found: Fit, families: Mapping[str, str]) -> Group:
    """Tables of the constants, and of each group's errors with constants fitted with and without
    it. `families` has the family of each run, by its id.
    """
    from rich.console import Group
    from rich.table import Table

    constants = Table(title="Constants", title_justify="left", box=None)
    for column in ("constant", "in use", "fitted", f"range, without one {found.by}"):
        constants.add_column(column, justify="left" if column == "constant" else "right")
    for name in FREE_CONSTANTS:
        without = [getattr(c, name) for c in found.constants_without.values()]
        values = getattr(FITTED, name), getattr(found.constants, name)
        constants.add_row(
            name, *(f"{value:.3g}" for value in values), f"{min(without):.3g} to {max(without):.3g}"
        )
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
    columns = (found.by, "runs", "MAPE with", "bias with", "MAPE without", "bias without")
    return Group(constants, "", text_grid(title, columns, rows, right=range(1, 6)))


# --------------------------------------------------------------------------------------------------------------------- mechanisms


def ablation_json(found: Ablation) -> str:
    """The ablation as JSON text: errors by run with all mechanisms on; for each mechanism, the
    errors without it and the runs that it changes.
    """
    without = [
        {
            "mechanism": each.mechanism.name,
            "instead": each.mechanism.instead,
            "mape": each.mape(),
            "refitted_mape": each.mape(True),
            "changed": list(each.changed),
            "refused": list(each.refused),
            "memory_mape": mape(each.memory_errors.values()),
            "memory_changed": list(each.memory_changed),
            "rejected": each.rejected,
            "errors": each.errors,
            "refitted_errors": each.refitted,
        }
        for each in found.without
    ]
    data = {
        "mape": mape(found.errors.values()),
        "refitted_mape": mape(found.refitted.values()),
        "errors": found.errors,
        "refitted_errors": found.refitted,
        "memory_mape": mape(found.memory_errors.values()),
        "memory_errors": found.memory_errors,
        "rejected": found.rejected,
        "without": without,
    }
    return json_text(data)


def ablation_table(found: Ablation) -> Group:
    """A table of the ablation, one row per mechanism: what replaces it, and how the errors
    change.
    """
    from rich.console import Group
    from rich.text import Text

    whole, refitted = mape(found.errors.values()), mape(found.refitted.values())
    rows = [("all on", "", "", finite_percent(whole), "", "", "", finite_percent(refitted), "")]
    for each in found.without:
        own = mape(found.errors[run] for run in each.changed)
        refused = f" ({len(each.refused)} refused)" if each.refused else ""
        rows.append(
            (
                each.mechanism.name,
                each.mechanism.instead,
                f"{len(each.changed)}{refused}",
                finite_percent(each.mape()),
                _points(each.mape() - whole),
                finite_percent(own),
                finite_percent(each.mape(changed=True)),
                finite_percent(each.mape(True)),
                _points(each.mape(True) - refitted),
            )
        )
    columns = (
        "without",
        "instead",
        "runs it changes",
        "MAPE",
        "change",
        "of those runs with",
        "and without",
        "MAPE refitted",
        "change",
    )
    title = f"Step times of {len(found.errors)} runs without one mechanism"
    table = text_grid(title, columns, rows, right=range(2, 9))
    note = (
        "Changes are in points.  Refitted: constants fitted again on the same runs without the mechanism, an approximation: how errors "
        "depend on constants is taken from the model with all mechanisms on.  A refused run cannot be predicted without the mechanism "
        "and keeps its prediction."
    )
    return Group(table, Text(note), Text(""), _memory_ablation(found))


def _memory_ablation(found: Ablation) -> Grid:
    """A row for each mechanism that changes the memory of a run."""
    whole = mape(found.memory_errors.values())
    rows = [("all on", "", "", finite_percent(whole), "", "", "", str(found.rejected))]
    for each in found.without:
        if not each.memory_changed:
            continue
        measured = [run for run in each.memory_changed if run in found.memory_errors]
        memory = mape(each.memory_errors.values())
        rows.append(
            (
                each.mechanism.name,
                each.mechanism.instead,
                f"{len(each.memory_changed)}, {len(measured)} measured",
                finite_percent(memory),
                _points(memory - whole),
                finite_percent(mape(found.memory_errors[run] for run in measured)),
                finite_percent(mape(each.memory_errors[run] for run in measured)),
                str(each.rejected),
            )
        )
    columns = (
        "without",
        "instead",
        "runs it changes",
        "MAPE",
        "change",
        "of those runs with",
        "and without",
        "ran, but rejected",
    )
    title = f"Memory of {len(found.memory_errors)} runs without one mechanism"
    return text_grid(title, columns, rows, right=range(2, 8))


def _points(change: float) -> str:
    return f"{100 * change:+.1f}" if isfinite(change) else "-"
