"""Checks that data is a Chrome trace: the rules of the Trace Event Format that viewers rely on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NEEDED = {
    "X": ("name", "pid", "tid", "ts", "dur"),
    "M": ("name", "pid", "args"),
    "C": ("name", "pid", "ts", "args"),
    "s": ("name", "pid", "tid", "ts", "id"),
    "f": ("name", "pid", "tid", "ts", "id"),
}
_CLOSE_US = 1e-3
"""By how many microseconds slices may overlap through rounding."""


def trace_faults(data: Mapping[str, Any]) -> list[str]:
    """What is wrong with a trace, one text each; [] if nothing is.

    Events have the fields of their kind, and finite times from 0 on. Slices of a thread nest or
    follow each other. Every arrow starts and ends in a slice, once. Counters are numbers.
    """
    events = data["traceEvents"]
    faults = [fault for event in events for fault in _event_faults(event)]
    if faults:
        return faults
    threads: dict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["pid"], event["tid"]].append(event)
    faults += [fault for place, own in threads.items() for fault in _overlaps(place, own)]
    return [*faults, *_arrow_faults(events, threads)]


def _event_faults(event: Any) -> Iterator[str]:
    if not isinstance(event, dict) or event.get("ph") not in _NEEDED:
        yield f"an event of unknown kind: {str(event)[:80]}"
        return
    kind = event["ph"]
    if missing := [key for key in _NEEDED[kind] if key not in event]:
        yield f"an event {kind} lacks {', '.join(missing)}: {str(event)[:80]}"
        return
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            yield f"{event['name']}: {key} is {value}"
    if kind == "C" and not all(isinstance(x, (int, float)) for x in event["args"].values()):
        yield f"counter {event['name']} has a value that is no number"


def _overlaps(place: tuple[Any, Any], slices: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Slices of a thread that overlap without one being inside the other."""
    open_until: list[tuple[float, str]] = []
    for event in sorted(slices, key=lambda e: (e["ts"], -e["dur"])):
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_until and open_until[-1][0] <= start + _CLOSE_US:
            open_until.pop()
        if open_until and end > open_until[-1][0] + _CLOSE_US:
            yield f"on thread {place}, {event['name']} overlaps {open_until[-1][1]}"
        open_until.append((end, event["name"]))


def _arrow_faults(
    events: Sequence[Mapping[str, Any]],
    threads: Mapping[tuple[Any, Any], Sequence[Mapping[str, Any]]],
) -> Iterator[str]:
    ends: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]].append(event)
    starts = {
        place: sorted((slice["ts"], slice["ts"] + slice["dur"]) for slice in own)
        for place, own in threads.items()
    }
    for number, both in ends.items():
        if sorted(event["ph"] for event in both) != ["f", "s"]:
            yield f"arrow {number} has {len(both)} ends"
            continue
        sent, read = sorted(both, key=lambda event: event["ph"], reverse=True)
        if read["ts"] < sent["ts"] - _CLOSE_US:
            yield f"arrow {number} ends before it starts"
        for event in both:
            of = starts.get((event["pid"], event["tid"]), [])
            at = event["ts"]
            if not any(a - _CLOSE_US <= at <= b + _CLOSE_US for a, b in of):
                yield f"arrow {number} is attached to no slice"
