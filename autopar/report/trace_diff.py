"""Compares a predicted trace with a measured one, range by range.

Ranges are those that `engine.profile` names. Ranges that differ only in the numbers of a segment or
micro-batch are one row. The order compares the names of all ranges, as they begin. Collectives
outside passes and the update are left out: with them the engine checks the batch and adds up the
loss, which no plan prices.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.files import path_of, reason_of
from autopar.ir.mesh import AXES
from autopar.text.replies import Field, Reply, field_table, records
from autopar.text.units import ms

_AXES = "|".join((*AXES, "copies"))
_PASS = re.compile(
    r"update|micro-batch \d+ (forward|backward)"
    r"|stage \d+ (forward|backward|weight gradients) of micro-batch \d+"
)
_COLLECTIVE = re.compile(rf"\w+ over ({_AXES})")
_NAMED = re.compile(
    rf"step \d+|pipeline|{_PASS.pattern}|[\w.]+ (forward|backward)|{_COLLECTIVE.pattern}"
)


@dataclass(frozen=True, slots=True)
class RangeRow:
    """Ranges of one name: seconds of a step and how many, predicted and measured."""

    name: str
    predicted_s: float
    measured_s: float
    predicted: int
    measured: int


@dataclass(frozen=True, slots=True)
class TraceDiff:
    """Two traces side by side. `rows` are in the order in which names begin. `parts_at` says where
    the order of names first differs: (position, predicted name, measured name), with '' at an end.
    It is None if all agree. `ranges` counts the predicted ranges, `process` names their process.
    """

    process: str
    rows: tuple[RangeRow, ...]
    ranges: int
    parts_at: tuple[int, str, str] | None

    def reply(self) -> Reply:
        """The comparison: a row for each name, and whether the order is the same."""
        fields = (
            Field("name", lambda row: row.name, "range"),
            Field("predicted_s", lambda row: row.predicted_s),
            Field("measured_s", lambda row: row.measured_s),
            Field("predicted", lambda row: row.predicted),
            Field("measured", lambda row: row.measured),
            Field("", _number_words, "number", str),
            Field("", lambda row: row.predicted_s, "predicted", ms),
            Field("", lambda row: row.measured_s, "measured", ms),
            Field("", _ratio_words, "measured / predicted", str),
        )
        words = f"All {self.ranges:,} ranges have the same names in the same order.\n"
        if self.parts_at is not None:
            place, predicted, measured = self.parts_at
            words = (
                f"The order differs from range {place + 1} on: predicted is {predicted or 'the end'},"
                f" measured is {measured or 'the end'}.\n"
            )
        data = {
            "process": self.process,
            "same_order": self.parts_at is None,
            "parts_at": self.parts_at,
            "ranges": self.ranges,
            "rows": records(fields, self.rows),
        }
        return Reply([field_table(fields, self.rows, f"A step of {self.process}"), words], data)


def _number_words(row: RangeRow) -> str:
    same = row.predicted == row.measured
    return f"{row.predicted}" if same else f"{row.predicted} / {row.measured}"


def _ratio_words(row: RangeRow) -> str:
    return f"{row.measured_s / row.predicted_s:.2f} x" if row.predicted_s else ""


def read_trace(path: str | Path) -> dict[str, Any]:
    """The trace in a file, which may be compressed by gzip. Raises AutoparError if it cannot be
    read or is no trace.
    """
    found = path_of(path, "trace")
    try:
        raw = found.read_bytes()
        text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        data = json.loads(text)
    except (OSError, EOFError, ValueError, zlib.error, RecursionError) as error:
        raise AutoparError(f"cannot read trace {found}: {reason_of(error)}") from None
    if not isinstance(data, dict) or not isinstance(data.get("traceEvents"), list):
        raise AutoparError(f"{found} is no Chrome trace: it has no list 'traceEvents'")
    return data


def trace_diff(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> TraceDiff:
    """Compare two traces, as read by `read_trace`. Of the predicted one, the process whose ranges
    are most like the measured ones is taken. Of the measured one, the first whole step of the first
    process that has one is taken.

    Raises AutoparError if one of them has no step.
    """
    stepped = (ranges for ranges in map(_ranges, _by_process(measured).values()) if _steps(ranges))
    theirs = _first_step(next(stepped, []), "the measured trace")
    names = Counter(name for name, _ in theirs)
    processes = _by_process(predicted)
    found = {pid: _ranges(of) for pid, of in processes.items()}
    if not any(found.values()):
        raise AutoparError("the predicted trace has no ranges; write one with explain --trace")
    pid = max(found, key=lambda p: (names & Counter(n for n, _ in found[p])).total())
    ours = _first_step(found[pid], "the predicted trace")
    labels = [e["args"]["name"] for e in processes[pid] if e.get("name") == "process_name"]
    return TraceDiff(
        process=labels[0] if labels else str(pid),
        rows=tuple(_rows(ours, theirs)),
        ranges=len(ours),
        parts_at=_first_difference([n for n, _ in ours], [n for n, _ in theirs]),
    )


_Range = tuple[str, tuple[float, float]]


def _by_process(data: Mapping[str, Any]) -> dict[Any, list[Mapping[str, Any]]]:
    """The events of each process, by its number, in the order of the trace."""
    processes: dict[Any, list[Mapping[str, Any]]] = {}
    for event in data["traceEvents"]:
        processes.setdefault(event.get("pid"), []).append(event)
    return processes


def _steps(ranges: Sequence[_Range]) -> list[_Range]:
    return [of for of in ranges if of[0].startswith("step ")]


def _ranges(events: Sequence[Mapping[str, Any]]) -> list[_Range]:
    """(name, (start, end) in seconds) of the named ranges, in the order in which they begin."""
    slices = [
        event
        for event in events
        if event.get("ph") == "X"
        and event.get("cat") == "user_annotation"
        and _NAMED.fullmatch(str(event.get("name")))
    ]
    slices.sort(key=lambda event: (event["ts"], -event["dur"]))
    return [
        (event["name"], (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)) for event in slices
    ]


def _first_step(ranges: Sequence[_Range], what: str) -> list[_Range]:
    """The ranges inside the first step, the step included, which is called 'step'."""
    steps = _steps(ranges)
    if not steps:
        raise AutoparError(f"{what} has no range of a step; run engine.step inside engine.profile")
    start, end = steps[0][1]
    found, pass_end = [("step", steps[0][1])], start
    for name, of in ranges:
        if not start <= of[0] < end or name.startswith("step "):
            continue
        if _PASS.fullmatch(name):
            pass_end = of[1]
        if of[0] < pass_end or not _COLLECTIVE.fullmatch(name):
            found.append((name, of))
    return found


def _rows(ours: Sequence[_Range], theirs: Sequence[_Range]) -> list[RangeRow]:
    seconds: dict[str, list[float]] = {}
    counts: dict[str, list[int]] = {}
    for place, ranges in enumerate((ours, theirs)):
        for name, (start, end) in ranges:
            key = _generic(name)
            seconds.setdefault(key, [0.0, 0.0])[place] += end - start
            counts.setdefault(key, [0, 0])[place] += 1
    return [
        RangeRow(name, predicted_s, measured_s, counts[name][0], counts[name][1])
        for name, (predicted_s, measured_s) in seconds.items()
    ]


def _generic(name: str) -> str:
    """The name without the numbers of micro-batches and of segments."""
    name = re.sub(r"^micro-batch \d+ ", "micro-batches ", name)
    name = re.sub(r"of micro-batch \d+$", "of micro-batches", name)
    return re.sub(r"\.\d+", ".*", name)


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[int, str, str] | None:
    for place in range(max(len(ours), len(theirs))):
        a, b = (names[place] if place < len(names) else "" for names in (ours, theirs))
        if a != b:
            return place, a, b
    return None
