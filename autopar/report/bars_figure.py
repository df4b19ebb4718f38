"""Draws the steps of several plans as bars of their parts, one below the other."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from autopar.report.svg import Svg
from autopar.text.plan_words import TIME_WORDS
from autopar.text.replies import StepBar
from autopar.text.units import ms

_CLASSES = {
    "forward": "c-forward",
    "backward": "c-backward",
    "stages": "c-weights",
    "recompute": "c-recompute",
    "conversion": "c-tp",
    "edge": "c-tp",
    "bubble": "c-idle",
    "host": "c-host",
    "step": "c-dp",
}
"""The class of the colour of each part of `Prediction.breakdown`; others are 'c-fixed'."""
_JOINT = {"c-tp": "tensor-parallel communication"}
"""The words of classes that several parts have."""
_WIDE, _LETTERS = 900.0, 120


def class_of(part: str) -> str:
    """The class of the colour of a part of a step."""
    return _CLASSES.get(part, "c-fixed")


def bars_figure(bars: Sequence[StepBar]) -> Svg:
    """The drawing of steps, each under its name."""
    figure = Svg("steps", "Steps by part", _WIDE, 0)
    scale = (_WIDE - 90) / max(sum(bar.parts.values()) for bar in bars)
    y, legend = 0.0, dict[str, str]()
    for bar in bars:
        for line in textwrap.wrap(bar.name, _LETTERS):
            y += 16
            figure.text(0, y, line, "strong")
        x = 0.0
        for name, seconds in bar.parts.items():
            cls = class_of(name)
            if seconds > 0:
                words = TIME_WORDS.get(name, name)
                legend.setdefault(cls, _JOINT.get(cls, words))
                figure.rect(x, y + 5, seconds * scale, 18, cls, f"{words}: {ms(seconds)}")
                x += seconds * scale
        figure.text(x + 6, y + 19, bar.step, "ink")
        y += 32
    figure.height = figure.legend(0, y + 6, list(legend.items()))
    return figure
