"""Picks the runs that meet conditions, such as `framework=nanotron` or `memory=10..70`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path

from autopar_cost_models.checks import nearest
from autopar_cost_models.constants import GIB

from autopar.errors import AutoparError, shown
from autopar.foreign.published.run import Run
from autopar.foreign.published.score import GROUPINGS


def _memory_gib(run: Run) -> float | None:
    measured = run.measured
    return measured.memory_bytes / GIB if measured.has_memory and measured.memory_bytes else None


_NUMBERS: dict[str, Callable[[Run], float | None]] = {
    "gpus": lambda run: run.machine.gpus,
    "tp": lambda run: run.layout.tp,
    "pp": lambda run: run.layout.pp,
    "dp": lambda run: run.layout.dp,
    "ep": lambda run: run.layout.ep,
    "micro_batch": lambda run: run.layout.micro_batch,
    "year": lambda run: run.software.year,
    "memory": _memory_gib,
}
"""Numbers of a run by which it may be picked; None meets no condition. `memory` is measured GiB."""

TEXTS = {name: of for name, of in GROUPINGS.items() if name not in _NUMBERS}
"""Texts of a run by which it may be picked."""

Pick = Callable[[Run], bool]
_RANGE = re.compile(r"(\d+(?:\.\d+)?)?\.\.(\d+(?:\.\d+)?)?")


def pick_of(conditions: Sequence[str]) -> Pick:
    """Whether a run meets every one of the conditions. A condition is `NAME=VALUES` or
    `NAME!=VALUES`, with values separated by commas. A number may be a range such as `8..16`,
    `..70` or `10..`, ends included. Raises AutoparError for text of another form.
    """
    found = [_condition(text) for text in conditions]
    return lambda run: all(condition(run) for condition in found)


def picked(runs: Sequence[Run], pick: Pick, paths: Sequence[str | Path]) -> tuple[Run, ...]:
    """The runs of the files that `pick` picks. Raises AutoparError if there are runs, but it picks
    none.
    """
    found = tuple(run for run in runs if pick(run))
    if runs and not found:
        raise AutoparError(
            f"none of the {len(runs)} runs of {', '.join(map(str, paths))} meets --only"
        )
    return found


def _condition(text: str) -> Pick:
    name, differs, values = _parts(text)
    if name in TEXTS:
        wanted = {value.lower() for value in values}
        return lambda run: (TEXTS[name](run).lower() in wanted) != differs
    ranges = [_range(name, value) for value in values]

    def holds(run: Run) -> bool:
        value = _NUMBERS[name](run)
        if value is None:
            return False
        return any(low <= value <= high for low, high in ranges) != differs

    return holds


def _parts(text: str) -> tuple[str, bool, list[str]]:
    """(name, whether the condition is `!=`, values)."""
    name, equals, rest = text.partition("=")
    differs = name.endswith("!")
    name, values = name.rstrip("!").strip().lower(), [x.strip() for x in rest.split(",")]
    if not equals or not all(values):
        raise AutoparError(
            f"condition {shown(text)} is not of the form NAME=VALUES, such as framework=nanotron or memory=10..70"
        )
    if name not in TEXTS and name not in _NUMBERS:
        raise AutoparError(
            f"condition {shown(text)}: {shown(name)} is not known; {nearest(name, [*TEXTS, *_NUMBERS])}"
        )
    return name, differs, values


def _range(name: str, text: str) -> tuple[float, float]:
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text), float(text)
    found = _RANGE.fullmatch(text)
    if found is None or not any(found.groups()):
        raise AutoparError(
            f"{name}={shown(text)} is neither a number nor a range such as 8..16, ..70 or 10.."
        )
    return float(found[1] or 0.0), float(found[2] or inf)
