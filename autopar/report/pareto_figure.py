"""Draws points by two merits, of which less is better, with a line through the Pareto-optimal ones."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

from autopar.explaining.found_plans import FoundPlan
from autopar.ir.plan import Plan
from autopar.report.svg import Svg
from autopar.text.numbers import Numbers
from autopar.text.plan_words import choice_words
from autopar.text.replies import Spot, Spots

_WIDE, _TALL, _LEFT, _BOTTOM = 720.0, 320.0, 78.0, 44.0
_MOST_SLOWER = 4.0
"""Candidates that take more than this times the plan's step are not drawn."""


def front(spots: Sequence[Spot]) -> list[Spot]:
    """The Pareto-optimal spots, from left to right."""
    found, least = list[Spot](), float("inf")
    for spot in sorted(spots, key=lambda spot: (spot.across.value, spot.up.value)):
        if spot.up.value < least:
            least = spot.up.value
            found.append(spot)
    return found


def drawn_plans(plan: Plan, found: Sequence[FoundPlan]) -> list[FoundPlan]:
    """The plans that are not far slower than the plan itself."""
    limit_s = _MOST_SLOWER * plan.predicted.step_time_s
    return [other for other in found if other.entry["time_s"] <= limit_s]


def spots_of(found: Sequence[FoundPlan], numbers: Numbers) -> list[Spot]:
    """Plans that a search found, by step time and memory."""
    return [
        Spot(
            choice_words(other.entry),
            numbers.ms(f"{other.path}.time_s"),
            numbers.gib(f"{other.path}.memory_bytes"),
            "the plan" if other.is_chosen else "",
        )
        for other in found
    ]


def pareto_figure(drawn: Spots) -> Svg:
    """The drawing. The axis to the right is logarithmic."""
    figure, spots = Svg("pareto", drawn.title, _WIDE, _TALL), drawn.spots
    by_time = sorted(spots, key=lambda spot: spot.across.value)
    by_size = sorted(spots, key=lambda spot: spot.up.value)
    low, high = log10(by_time[0].across.value), log10(by_time[-1].across.value)
    least, most = by_size[0].up.value, by_size[-1].up.value

    def place(spot: Spot) -> tuple[float, float]:
        right = (log10(spot.across.value) - low) / ((high - low) or 1.0)
        up = (spot.up.value - least) / ((most - least) or 1)
        x, y = _LEFT + 12 + right * (_WIDE - _LEFT - 40), _TALL - _BOTTOM - 14
        return x, y - up * (_TALL - _BOTTOM - 44)

    figure.line(_LEFT, _TALL - _BOTTOM, _WIDE - 8, _TALL - _BOTTOM)
    figure.line(_LEFT, 12, _LEFT, _TALL - _BOTTOM)
    figure.text(_LEFT + 12, _TALL - 24, by_time[0].across, "soft")
    figure.text(_WIDE - 28, _TALL - 24, by_time[-1].across, "soft", "end")
    figure.text((_WIDE + _LEFT) / 2, _TALL - 8, f"{drawn.across} (logarithmic)", "soft", "middle")
    for spot in by_size[:1] if most == least else (by_size[0], by_size[-1]):
        figure.text(_LEFT - 6, place(spot)[1] + 4, spot.up, "soft", "end")
    points = map(place, front(spots))
    figure.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), "flow")
    for spot in sorted(spots, key=lambda spot: bool(spot.words)):
        x, y = place(spot)
        cls, size = ("chosen", 5.0) if spot.words else ("dot", 3.0)
        named = f"{spot.name}: {spot.across}, {spot.up}"
        figure.rect(x - size, y - size, 2 * size, 2 * size, cls, named)
        if spot.words:
            near_end = x > _WIDE - 120
            figure.text(
                x + (-9 if near_end else 9),
                y - 7,
                spot.words,
                "strong",
                "end" * near_end or "start",
            )
    return figure
