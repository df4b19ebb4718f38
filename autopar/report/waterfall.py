"""Where the time of a step goes: from what the model's FLOPs would take at the peak rate to the
step that is predicted, on the busiest pipeline rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.plan import Plan
from autopar.report.bars_figure import class_of
from autopar.report.svg import Svg
from autopar.report.timeline import COMMUNICATION_AXES, Timeline
from autopar.text.numbers import Numbers
from autopar.text.plan_words import TIME_WORDS
from autopar.text.units import ms

IDEAL = "model FLOPs at the peak rate"
SLOWER = "kernels below the peak rate"
UNEVEN = "kernels below the peak rate, uneven stages"
CLOSED_FORM = "closed form less simulation"


@dataclass(frozen=True, slots=True)
class Bar:
    """A part of the step: its words, seconds, which may be negative, and class of its colour."""

    part: str
    seconds: float
    cls: str


def waterfall(plan: Plan, timeline: Timeline | None) -> list[Bar]:
    """The parts of the step, which add up to the predicted step time. Without a timeline they are
    those of the plan's own breakdown.
    """
    predicted = plan.predicted
    ideal_s = predicted.mfu * predicted.step_time_s
    if timeline is None:
        return _of_breakdown(plan, ideal_s)
    seconds = timeline.seconds_by_kind(timeline.busiest)
    work_s = sum(seconds.get(kind, 0.0) for kind in ("forward", "backward", "weights"))
    bars = [
        Bar(IDEAL, ideal_s, "c-ideal"),
        Bar(UNEVEN if timeline.ranks > 1 else SLOWER, work_s - ideal_s, "c-slow"),
    ]
    bars.append(Bar("recomputation", seconds.get("recompute", 0.0), "c-recompute"))
    bars += [
        Bar(f"communication over {a}", seconds.get(a, 0.0), f"c-{a}") for a in COMMUNICATION_AXES
    ]
    bars.append(Bar("idle (bubble and messages)", seconds.get("idle", 0.0), "c-idle"))
    bars.append(Bar("waiting for the host", seconds.get("host", 0.0), "c-host"))
    bars.append(Bar("optimizer", seconds.get("optimizer", 0.0), "c-optimizer"))
    bars.append(Bar("fixed", seconds.get("fixed", 0.0), "c-fixed"))
    off_s = predicted.step_time_s - timeline.step_s
    bars.append(Bar(CLOSED_FORM, off_s, "c-fixed"))
    least = 1e-6 * predicted.step_time_s
    return [bar for bar in bars if abs(bar.seconds) > least]


def _of_breakdown(plan: Plan, ideal_s: float) -> list[Bar]:
    parts = {name: seconds for name, seconds in plan.predicted.breakdown.items() if seconds}
    work = [name for name in ("forward", "backward", "stages") if name in parts]
    slower_s = sum(parts[name] for name in work) - ideal_s
    words = "kernels below the peak rate, and what else stages do" if "stages" in parts else SLOWER
    return [
        Bar(IDEAL, ideal_s, "c-ideal"),
        Bar(words, slower_s, "c-slow"),
        *(
            Bar(TIME_WORDS.get(name, name), seconds, class_of(name))
            for name, seconds in parts.items()
            if name not in work
        ),
    ]


def waterfall_figure(bars: list[Bar], numbers: Numbers) -> Svg:
    """The drawing of a waterfall. `numbers` has the seconds of bar N under
    'report.waterfall.N.seconds' and the step under 'predicted.step_time_s'.
    """
    left, wide, tall = 290.0, 900.0, 24.0
    figure = Svg("waterfall", "Where the step goes", wide, tall * (len(bars) + 1) + 12)
    total = sum(bar.seconds for bar in bars)
    reach = max(total, *_heights(bars))
    scale = (wide - left - 150) / reach
    before = 0.0
    for number, bar in enumerate(bars):
        y = 4 + tall * number
        start = left + min(before, before + bar.seconds) * scale
        size = max(abs(bar.seconds) * scale, 1.0)
        figure.text(left - 10, y + 16, bar.part, "ink", "end")
        figure.rect(start, y + 3, size, tall - 7, bar.cls, f"{bar.part}: {ms(bar.seconds)}")
        after = left + (before + max(bar.seconds, 0.0)) * scale
        figure.text(after + 6, y + 16, numbers.ms(f"report.waterfall.{number}.seconds"), "ink")
        share = numbers.percent(f"report.waterfall.{number}.share")
        figure.text(wide - 4, y + 16, share, "soft", "end")
        before += bar.seconds
        figure.line(left + before * scale, y + 3, left + before * scale, y + tall + 3)
    y = 4 + tall * len(bars)
    figure.text(left - 10, y + 16, "predicted step", "strong", "end")
    figure.rect(left, y + 3, total * scale, tall - 7, "c-fixed")
    figure.text(left + total * scale + 6, y + 16, numbers.ms("predicted.step_time_s"), "strong")
    return figure


def _heights(bars: list[Bar]) -> list[float]:
    found, total = [], 0.0
    for bar in bars:
        total += bar.seconds
        found.append(total)
    return found
