"""Draws what a device of each pipeline rank holds over the step, by part, against its limit."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.report.svg import Svg
from autopar.report.timeline import HeldMemory, Memory, Timeline
from autopar.text.numbers import Numbers

_WORDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer state",
    "fixed": "fixed (context, buffers)",
    "kept": "activations kept for backward",
    "transient": "transient in backward",
}
_WIDE, _MOST = 960.0, 12
_FAR = 0.4
"""Fraction of the limit below which the limit is not drawn."""


def memory_figure(timeline: Timeline, numbers: Numbers) -> Svg:
    """The drawing of memory over time: a chart for each of up to 12 pipeline ranks. `numbers` has
    each rank's peak under 'report.ranks.N.peak_bytes' and its limit under 'limit_bytes'.
    """
    ranks = drawn_ranks(timeline)
    columns = 1 if len(ranks) == 1 else 2 if len(ranks) <= 4 else 4 if len(ranks) > 9 else 3
    wide = (_WIDE - 20.0 * (columns - 1)) / columns
    tall = 210.0 if columns < 3 else 165.0
    rows = -(-len(ranks) // columns)
    figure = Svg("memory", "Memory of a device over the step", _WIDE, rows * (tall + 20) + 40)
    most = _top_bytes(timeline)
    for place, rank in enumerate(ranks):
        x, y = (place % columns) * (wide + 20), (place // columns) * (tall + 20)
        _chart(figure, timeline, rank, (x, y, wide, tall), most, numbers)
    entries = [(f"m-{name}", words) for name, words in _WORDS.items()]
    figure.height = figure.legend(0, rows * (tall + 20) + 4, entries) + 4
    return figure


def _top_bytes(timeline: Timeline) -> int:
    """Bytes at the top of the charts: the largest limit, or a little more than the largest peak if
    that is far below every limit.
    """
    peak = max(memory.peak_bytes for memory in timeline.memory)
    limits = [memory.limit_bytes for memory in timeline.memory]
    return max(*limits, peak) if peak > _FAR * min(limits) else int(1.1 * peak)


def drawn_ranks(timeline: Timeline) -> list[int]:
    """The pipeline ranks that are drawn: of more than 12, evenly spread ones and the fullest."""
    if timeline.ranks <= _MOST:
        return list(range(timeline.ranks))
    step = -(-timeline.ranks // (_MOST - 2))
    return sorted({*range(0, timeline.ranks, step), timeline.ranks - 1, timeline.fullest})


def _chart(
    figure: Svg,
    timeline: Timeline,
    rank: int,
    box: tuple[float, float, float, float],
    most: int,
    numbers: Numbers,
) -> None:
    x, y, wide, tall = box
    memory, path = timeline.memory[rank], f"report.ranks.{rank}"
    top, bottom = y + 40, y + tall
    high = bottom - top
    several = timeline.ranks > 1
    figure.text(x, y + 13, f"rank {rank}" if several else "each device", "strong")
    figure.text(x + 58 if several else x + 86, y + 13, numbers.gib(f"{path}.peak_bytes"), "ink")
    figure.text(x + wide, y + 13, numbers.percent(f"{path}.peak_share"), "ink", "end")
    of = bottom
    static = memory.static
    for name in ("fixed", "parameters", "gradients", "optimizer"):
        size = getattr(static, name) / most * high
        figure.rect(x, of - size, wide, size, f"m-{name}")
        of -= size
    fold = timeline.fold
    hidden = fold[1] - fold[0] if fold else 0.0
    scale = wide / (timeline.step_s - hidden)

    def at(time_s: float) -> float:
        past = fold is not None and time_s >= fold[1]
        return x + (time_s - (hidden if past else 0.0)) * scale

    held = visible(memory, fold)
    kept = [(at(h.time_s), h.kept_bytes / most * high) for h in held]
    both = [(at(h.time_s), (h.kept_bytes + h.transient_bytes) / most * high) for h in held]
    end = x + wide
    if any(h.transient_bytes for h in held):
        figure.path(_steps(both, of, end), "m-transient")
    figure.path(_steps(kept, of, end), "m-kept")
    limit_words = numbers.gib(f"{path}.limit_bytes")
    if memory.limit_bytes <= most:
        limit = bottom - memory.limit_bytes / most * high
        figure.line(x, limit, x + wide, limit, "limit")
        figure.text(x + wide, limit - 4, limit_words, "small", "end")
    else:
        figure.text(x, y + 28, "limit, far above this chart", "small")
        figure.text(x + wide, y + 28, limit_words, "small", "end")
    peak = memory.peak
    figure.line(x, bottom, x + wide, bottom)
    if fold is None or not fold[0] < peak.time_s < fold[1]:
        peak_y = bottom - memory.peak_bytes / most * high
        figure.path(f"M{at(peak.time_s):.1f} {peak_y - 2:.1f}l-4 -7h8z", "bad", "the peak")


def visible(memory: Memory, fold: tuple[float, float] | None) -> list[HeldMemory]:
    """The changes outside the fold, joined where several are at one time."""
    found: list[HeldMemory] = []
    for held in memory.holdings:
        if fold is not None and fold[0] < held.time_s < fold[1]:
            continue
        if found and found[-1].time_s == held.time_s:
            found.pop()
        found.append(held)
    return found


def _steps(points: Sequence[tuple[float, float]], base: float, end: float) -> str:
    """A filled step curve over `base`, up to x = `end`, in tenths of a unit. Neighbouring points of
    one height are left out.
    """
    d, height, at = [f"M{points[0][0]:.1f} {base:.1f}"], 0.0, points[0][0]
    for x, tall in points:
        if abs(tall - height) < 0.05:
            continue
        d.append(f"h{x - at:.1f}v{height - tall:.1f}")
        at += float(f"{x - at:.1f}")
        height -= float(f"{height - tall:.1f}")
    d.append(f"H{end:.1f}V{base:.1f}z")
    return "".join(d)
