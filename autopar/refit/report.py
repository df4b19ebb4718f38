"""What `autopar calibrate --from-run` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from autopar.refit.fit import Refit
from autopar.text.tables import grid
from autopar.text.units import gib, ms

if TYPE_CHECKING:
    from rich.console import Group


def refit_table(found: Refit, path: str) -> Group:
    """The fitted rates, the step as measured and predicted, and what the run does not show. `path` is
    the cluster file that was written.
    """
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            change.name,
            *(_value(x, change.unit) for x in (change.before, change.after)),
            change.shown_by,
        )
        for change in found.changes
    ]
    columns = ("share of the datasheet's rate", "before", "fitted", "shown by")
    parts: list[Any] = [grid(f"Fitted to {found.run.source}", columns, rows, (1, 2))]
    if found.before is not None and found.after is not None:
        parts.append(grid("A step", ("", "measured", "before", "fitted"), _steps(found), (1, 2, 3)))
    lines = [f"not fitted: {words}" for words in found.unseen]
    last = f"written to {path}: autopar explain MODEL {path} --global-batch N plans for it"
    return Group(*parts, Text("\n".join([*lines, last])))


def _value(value: float, unit: str) -> str:
    return f"{value:.3g} {unit}" if unit else f"{100 * value:.1f} %"


def _steps(found: Refit) -> list[tuple[str, str, str, str]]:
    assert found.before is not None and found.after is not None
    measured = "not in it" if found.measured_s is None else ms(found.measured_s)
    rows = [("seconds", measured, ms(found.before.step_s), ms(found.after.step_s))]
    held = found.run.reserved_bytes
    memory = [gib(max(one.plan.predicted.peak_memory_bytes)) for one in (found.before, found.after)]
    rows.append(("memory", "not in it" if held is None else gib(held), memory[0], memory[1]))
    return rows


def refit_data(found: Refit) -> dict[str, Any]:
    """The same as plain data for JSON. Seconds and bytes are of a step; shares are of datasheets'
    rates.
    """
    return {
        "source": found.run.source,
        "changes": [asdict(change) for change in found.changes],
        "not_fitted": list(found.unseen),
        "measured_s": found.measured_s,
        "measured_reserved_bytes": found.run.reserved_bytes,
        "predicted_before_s": found.before.step_s if found.before else None,
        "predicted_s": found.after.step_s if found.after else None,
        "cluster": found.cluster.as_data(),
    }
