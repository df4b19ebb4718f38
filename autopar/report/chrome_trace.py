"""A simulated step as a Chrome trace, for Perfetto or chrome://tracing.

A process stands for a pipeline rank, or for each rank of the mesh. Its threads are `ranges`, with
the names of `engine.profile`, `compute`, each axis that communicates, and messages. Arrows lead
from a message to the action that reads it, and a counter has the memory. The middle of a step with
many micro-batches is one event, which says what it stands for.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from itertools import count, groupby, islice
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.files import path_of, reason_of, write_text
from autopar.ir.plan import Plan
from autopar.report.timeline import COMMUNICATION_AXES, ActionPart, Message, Slice, Timeline
from autopar.text.units import ms

MOST_EVENTS = 10**6
"""Most events of a trace; Perfetto opens one of this size in seconds."""
_MICRO = 1e6
_RANGES, _COMPUTE, _AXIS, _MESSAGES = 1, 2, 3, 10
"""Numbers of threads; axes are numbered from `_AXIS`, and lanes of messages from `_MESSAGES`."""

_Event = dict[str, Any]


def trace_data(timeline: Timeline, plan: Plan, every_rank: bool = False) -> dict[str, Any]:
    """The trace as plain data for JSON.

    Args:
        timeline: the simulated step of `plan`.
        plan: the plan, for the places of its ranks.
        every_rank: a process for each rank of the mesh, not only for each pipeline rank.

    If that would be more than `MOST_EVENTS` events, the segments and single collectives inside
    actions are left out, which the trace says.

    Raises:
        AutoparError: the trace would have more than `MOST_EVENTS` events even so.
    """
    events = _events(timeline, plan, every_rank, deep=True)
    left_out = [words] if (words := folded_words(timeline)) else []
    if events is None:
        left_out.append("segments and single collectives inside actions")
        events = _events(timeline, plan, every_rank, deep=False)
    if events is None:
        raise AutoparError(
            f"the trace would have more than {MOST_EVENTS:,} events"
            f"{'; leave --ranks all out' if every_rank else ': pin fewer stages or micro-batches'}"
        )
    said = {"model": plan.model_name, "cluster": plan.cluster_name, "mesh": str(plan.mesh)}
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": said | {"folded": "; ".join(left_out) or "nothing"},
    }


def _events(timeline: Timeline, plan: Plan, every_rank: bool, deep: bool) -> list[_Event] | None:
    """All events; None if there are more than `MOST_EVENTS`. `deep`: with what actions consist of."""
    events: list[_Event] = []
    for rank in range(timeline.ranks):
        mine = list(islice(_process(timeline, rank, deep), MOST_EVENTS + 1))
        members = [n for n in range(plan.mesh.num_devices) if plan.mesh.coordinate(n, "pp") == rank]
        shown = members if every_rank else members[:1]
        if len(events) + (len(mine) + 2) * len(shown) > MOST_EVENTS:
            return None
        for member in shown:
            pid = member if every_rank else rank
            words = f"rank {member}" if every_rank else _process_words(plan, rank, members)
            events += [_named(pid, "process_name", words), _sorted(pid, rank)]
            events += [event | {"pid": pid} for event in mine]
    processes = _first_processes(plan, every_rank)
    for rank, pid in enumerate(processes):
        events += _arrows(timeline, rank, pid, processes)
    return events if len(events) <= MOST_EVENTS else None


def write_trace(path: str | Path, timeline: Timeline, plan: Plan, every_rank: bool = False) -> int:
    """Write the trace to `path`, compressed if its name ends in `.gz`. Returns the number of
    events. Raises AutoparError like `trace_data`, or if the file cannot be written.
    """
    data = trace_data(timeline, plan, every_rank)
    text = json.dumps(data, separators=(",", ":"))
    found = path_of(path, "trace")
    if found.suffix != ".gz":
        write_text(found, text, "trace")
    else:
        try:
            found.write_bytes(gzip.compress(text.encode(), compresslevel=4, mtime=0))
        except OSError as error:
            raise AutoparError(f"cannot write trace {found}: {reason_of(error)}") from None
    return len(data["traceEvents"])


def folded_words(timeline: Timeline) -> str:
    """What pictures and traces of the step leave out, in words; '' if nothing."""
    if (fold := timeline.fold) is None:
        return ""
    return (
        f"{timeline.folded:,} actions alike, from {ms(fold[0])} to {ms(fold[1])} of the step,"
        f" which has {timeline.micro_batches} micro-batches"
    )


def range_name(timeline: Timeline, piece: Slice) -> str:
    """The name of an interval as `engine.profile` has it, with or without a pipeline."""
    if timeline.ranks > 1 or piece.stage < 0:
        return piece.name
    words = "forward" if piece.kind == "F" else "backward"
    return f"micro-batch {piece.micro_batch} {words}"


def _first_processes(plan: Plan, every_rank: bool) -> list[int]:
    """The process of the first rank of each pipeline rank."""
    ranks = range(plan.mesh.pp)
    return [rank * plan.mesh.stride("pp") if every_rank else rank for rank in ranks]


def _process_words(plan: Plan, rank: int, members: Sequence[int]) -> str:
    stages = range(rank, len(plan.stages), plan.mesh.pp)
    if plan.mesh.pp == 1:
        return f"each of {len(members)} ranks" if len(members) > 1 else "rank 0"
    words = f"stage {rank}" if len(stages) == 1 else f"stages {', '.join(map(str, stages))}"
    return f"{words}: each of {len(members)} ranks"


def _process(timeline: Timeline, rank: int, deep: bool) -> Iterator[_Event]:
    """The events of a pipeline rank, without arrows and the process itself. `deep`: with what its
    actions consist of.
    """
    axes = [axis for axis in COMMUNICATION_AXES if axis in timeline.seconds_by_kind(rank)]
    threads = {_RANGES: "ranges", _COMPUTE: "compute"}
    threads |= {_AXIS + COMMUNICATION_AXES.index(axis): f"{axis} communication" for axis in axes}
    sent = _lanes([message for message in timeline.messages if message.sender == rank])
    lanes = range(1 + max((lane for lane, _ in sent), default=-1))
    threads |= {_MESSAGES + lane: "p2p" if lane == 0 else f"p2p {lane + 1}" for lane in lanes}
    for tid, name in threads.items():
        yield _named(0, "thread_name", name) | {"tid": tid}
        yield _sorted(0, tid, "thread_sort_index") | {"tid": tid}
    yield _slice("step 1", _RANGES, 0.0, timeline.step_s)
    if timeline.ranks > 1:
        yield _slice("pipeline", _RANGES, 0.0, timeline.pipeline_s)
    fold = timeline.fold
    if fold is not None:
        yield _slice(f"folded: {folded_words(timeline)}", _RANGES, fold[0], fold[1] - fold[0])
    for piece in timeline.shown(rank):
        yield _slice(range_name(timeline, piece), _RANGES, piece.start_s, piece.seconds)
        if deep or piece.stage < 0:
            yield from _inside(timeline, rank, piece)
    for lane, message in sent:
        if fold is None or not fold[0] <= message.start_s < fold[1]:
            yield _slice(message.name, _MESSAGES + lane, message.start_s, message.seconds)
    yield from _counters(timeline, rank)


def _inside(timeline: Timeline, rank: int, piece: Slice) -> Iterator[_Event]:
    """The segments and parts of an interval. Of a cut interval, its first or last ones."""
    parts = timeline.parts_of(rank, piece)
    fold, whole_s = timeline.fold, sum(part.seconds for part in parts)
    cut_before = fold is not None and piece.start_s == fold[1] and whole_s > piece.seconds
    at = piece.end_s - whole_s if cut_before else piece.start_s
    for segment, of in groupby(parts, key=lambda part: part.segment):
        own = list(of)
        seconds = sum(part.seconds for part in own)
        if segment and piece.action != "W":
            way = "forward" if piece.kind == "F" else "backward"
            yield from _within(piece, f"{segment} {way}", _RANGES, at, seconds)
        for part in own:
            yield from _within(piece, part.name, _thread(part), at, part.seconds)
            at += part.seconds


def _within(piece: Slice, name: str, tid: int, start_s: float, seconds: float) -> Iterator[_Event]:
    first, last = max(start_s, piece.start_s), min(start_s + seconds, piece.end_s)
    if last > first:
        yield _slice(name, tid, first, last - first)


def _thread(part: ActionPart) -> int:
    return (
        _AXIS + COMMUNICATION_AXES.index(part.kind) if part.kind in COMMUNICATION_AXES else _COMPUTE
    )


def _lanes(messages: Sequence[Message]) -> list[tuple[int, Message]]:
    """A lane for each message, such that messages of a lane do not overlap."""
    ends: list[float] = []
    found = []
    for message in messages:
        free = next((k for k, end in enumerate(ends) if end <= message.start_s), len(ends))
        if free == len(ends):
            ends.append(0.0)
        ends[free] = message.start_s + message.seconds
        found.append((free, message))
    return found


def _counters(timeline: Timeline, rank: int) -> Iterator[_Event]:
    memory, fold = timeline.memory[rank], timeline.fold
    static = memory.static
    for held in memory.holdings:
        if fold is None or not fold[0] < held.time_s < fold[1]:
            parts = {
                "parameters": static.parameters,
                "gradients": static.gradients,
                "optimizer": static.optimizer,
                "fixed": static.fixed,
                "kept": held.kept_bytes,
                "transient": held.transient_bytes,
            }
            yield {"ph": "C", "name": "memory in bytes", "ts": held.time_s * _MICRO, "args": parts}


def _arrows(timeline: Timeline, rank: int, pid: int, processes: Sequence[int]) -> Iterator[_Event]:
    """The arrows of the messages that a rank sends: from the message to the action that reads."""
    starts = {
        ("F" if piece.kind == "F" else "I", piece.stage, piece.micro_batch): piece.start_s
        for line in timeline.lines
        for piece in line
        if piece.kind in "FBI"
    }
    fold, numbers = timeline.fold, count()
    for lane, message in _lanes([m for m in timeline.messages if m.sender == rank]):
        to = message.stage + (1 if message.kind == "F" else -1)
        at = starts.get((message.kind, to, message.micro_batch))
        hidden = fold is not None and (message.start_s < fold[1] and (at or 0.0) >= fold[0])
        if at is None or hidden:
            continue
        arrow = {"name": "message", "cat": "message", "id": pid * 10**7 + next(numbers)}
        sent = {"ph": "s", "pid": pid, "tid": _MESSAGES + lane, "ts": message.start_s * _MICRO}
        read = {"ph": "f", "bp": "e", "pid": processes[message.receiver], "tid": _RANGES}
        yield arrow | sent
        yield arrow | read | {"ts": at * _MICRO}


def _slice(name: str, tid: int, start_s: float, seconds: float) -> _Event:
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "tid": tid,
        "ts": start_s * _MICRO,
        "dur": seconds * _MICRO,
    }


def _named(pid: int, what: str, name: str) -> _Event:
    return {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": {"name": name}}


def _sorted(pid: int, index: int, what: str = "process_sort_index") -> _Event:
    return {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": {"sort_index": index}}
