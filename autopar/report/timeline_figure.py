"""Draws the timeline of a step: pipeline ranks as rows, and what each does in real time."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from html import escape

from autopar.report.chrome_trace import folded_words
from autopar.report.svg import Svg
from autopar.report.timeline import COMMUNICATION_AXES, WORK, Slice, Timeline
from autopar.text.numbers import Numbers

_WORDS = {
    "forward": "forward",
    "backward": "backward",
    "weights": "backward: gradients of weights",
    "recompute": "recomputation",
    "host": "waiting for the host",
    "optimizer": "optimizer",
    "fixed": "fixed",
    "tp": "tensor parallel (tp)",
    "cp": "context parallel (cp)",
    "ep": "expert parallel (ep)",
    "dp": "data parallel (dp)",
    "idle": "idle",
}
"""Kinds of work and communication in words."""
_LEFT, _RIGHT, _TOP, _WIDE = 88.0, 62.0, 10.0, 960.0
_GAP = 22.0
"""Width of the fold."""
_MOST_ROWS = 32
"""Most pipeline ranks that are drawn."""


class _Scale:
    """Maps seconds of the step to x, without the folded middle."""

    def __init__(self, timeline: Timeline) -> None:
        self.fold = timeline.fold
        inner = _WIDE - _LEFT - _RIGHT
        hidden = self.fold[1] - self.fold[0] if self.fold else 0.0
        self.per_s = (inner - (_GAP if self.fold else 0.0)) / (timeline.step_s - hidden)

    def x(self, time_s: float) -> float:
        if self.fold is None or time_s <= self.fold[0]:
            return _LEFT + time_s * self.per_s
        return _LEFT + _GAP + (time_s - (self.fold[1] - self.fold[0])) * self.per_s


def timeline_figure(timeline: Timeline, numbers: Numbers) -> Svg:
    """The drawing of a timeline. `numbers` has the step time under 'report.step_time_s', and each
    rank's idle share under 'report.ranks.N.idle_share'.
    """
    rows = shown_rows(timeline.ranks)
    tall = 26.0 if len(rows) > 8 else 34.0
    bottom = _TOP + tall * len(rows)
    figure = Svg("timeline", "Timeline of one step", _WIDE, bottom + 84)
    scale = _Scale(timeline)
    boxes: dict[str, list[tuple[float, float, float, float]]] = defaultdict(list)
    for row, rank in enumerate(rows):
        y = _TOP + tall * row
        boxes["c-idle"].append((_LEFT, y + 3, _WIDE - _LEFT - _RIGHT, tall - 6))
        for piece in timeline.shown(rank):
            for kind, start_s, seconds in bands(timeline, rank, piece):
                x = scale.x(start_s)
                wide = seconds * scale.per_s
                boxes[f"c-{kind}"].append((x, y + 3, wide, tall - 6))
        figure.text(_LEFT - 8, y + tall / 2 + 4, _row_words(timeline, rank), "ink", "end")
        idle = numbers.percent(f"report.ranks.{rank}.idle_share")
        figure.text(_WIDE - _RIGHT + 6, y + tall / 2 + 4, idle, "soft")
    for cls, own in boxes.items():
        figure.boxes(own, cls)
    figure.text(_WIDE - _RIGHT + 6, bottom + 14, "idle", "soft")
    _fold_mark(figure, timeline, scale, bottom)
    _axis(figure, timeline, scale, bottom, numbers)
    kinds = {part.kind for of in timeline.parts.values() for part in of}
    kinds |= {part.kind for of in timeline.updates for part in of}
    kinds |= {piece.kind for piece in timeline.lines[0] if piece.kind in ("fixed", "host")}
    entries = [
        (f"c-{kind}", _WORDS[kind]) for kind in (*WORK, *COMMUNICATION_AXES) if kind in kinds
    ]
    figure.height = figure.legend(_LEFT, bottom + 42, [*entries, ("c-idle", "idle")]) + 4
    figure.data = f"data-lines='{escape(_lines(timeline, rows, scale), quote=False)}'"
    return figure


def shown_rows(ranks: int) -> list[int]:
    """The pipeline ranks that are drawn: all of up to 32, else evenly spaced ones and the last."""
    step = -(-ranks // _MOST_ROWS)
    return sorted({*range(0, ranks, step), ranks - 1})


def bands(timeline: Timeline, rank: int, piece: Slice) -> list[tuple[str, float, float]]:
    """(kind, start, seconds) of an interval, its parts gathered by kind."""
    total: dict[str, float] = defaultdict(float)
    for part in timeline.parts_of(rank, piece):
        total[part.kind] += part.seconds
    whole_s = sum(total.values()) or 1.0
    found, at = [], piece.start_s
    for kind in (
        "recompute",
        "forward",
        "backward",
        "weights",
        "optimizer",
        "fixed",
        "host",
        *COMMUNICATION_AXES,
    ):
        if kind in total:
            seconds = total[kind] * min(piece.seconds / whole_s, 1.0)
            found.append((kind, at, seconds))
            at += seconds
    return found


def _row_words(timeline: Timeline, rank: int) -> str:
    if timeline.ranks == 1:
        return "each device"
    return f"rank {rank}"


def _fold_mark(figure: Svg, timeline: Timeline, scale: _Scale, bottom: float) -> None:
    if (fold := timeline.fold) is None:
        return
    x = scale.x(fold[0])
    figure.rect(x, _TOP, _GAP, bottom - _TOP, "page", f"Left out: {folded_words(timeline)}")
    for k in range(3):
        figure.rect(x + 4 + 6 * k, (_TOP + bottom) / 2 - 1.5, 3, 3, "soft")


def _axis(figure: Svg, timeline: Timeline, scale: _Scale, bottom: float, numbers: Numbers) -> None:
    figure.line(_LEFT, bottom + 2, _WIDE - _RIGHT, bottom + 2)
    figure.text(_LEFT, bottom + 16, "0", "soft")
    figure.text(_WIDE - _RIGHT, bottom + 16, numbers.ms("report.step_time_s"), "strong", "end")
    if timeline.fold is not None:
        x = scale.x(timeline.fold[0]) + _GAP / 2
        figure.text(x, bottom + 32, f"{timeline.folded:,} actions alike left out", "soft", "middle")


def _lines(timeline: Timeline, rows: Sequence[int], scale: _Scale) -> str:
    """What the page's script tells of the interval under the pointer: for each row its y and
    height, and (x, width, kind, stage, micro-batch, microseconds) of each interval.
    """
    kinds = ["F", "B", "I", "W", "update", "fixed", "host"]
    of = [
        [
            [
                round(scale.x(piece.start_s), 1),
                round(piece.seconds * scale.per_s, 1),
                kinds.index(piece.action),
                piece.stage,
                piece.micro_batch,
                float(f"{piece.seconds * 1e6:.4g}"),
            ]
            for piece in timeline.shown(rank)
        ]
        for rank in rows
    ]
    tall = 26.0 if len(rows) > 8 else 34.0
    return json.dumps({"top": _TOP, "tall": tall, "rows": of}, separators=(",", ":"))
