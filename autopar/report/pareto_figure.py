"""Draws time against memory of the candidates for which the search found a plan."""

from __future__ import annotations

from math import log10
from typing import Any

from autopar.ir.mesh import mesh_words
from autopar.ir.plan import Plan
from autopar.report.numbers import Numbers
from autopar.report.svg import Svg
from autopar.text.units import gib, ms

_WIDE, _TALL, _LEFT, _BOTTOM = 720.0, 320.0, 70.0, 44.0
_MOST_SLOWER = 4.0
"""Candidates that take more than this times the plan's step are not drawn."""


def pareto_front(plan: Plan) -> list[int]:
    """The indices of `certificate.meshes` that are Pareto-optimal in time and memory, fastest
    first.
    """
    meshes = plan.certificate.meshes
    found, least = [], float("inf")
    for number in sorted(
        _solved(plan), key=lambda k: (meshes[k]["time_s"], meshes[k]["memory_bytes"])
    ):
        if meshes[number]["memory_bytes"] < least:
            least = meshes[number]["memory_bytes"]
            found.append(number)
    return found


def pareto_figure(plan: Plan, numbers: Numbers) -> Svg:
    """The drawing; candidates far slower than the plan are left out."""
    meshes = plan.certificate.meshes
    limit_s = plan.predicted.step_time_s * _MOST_SLOWER
    shown = [k for k in _solved(plan) if meshes[k]["time_s"] <= limit_s]
    front = [k for k in pareto_front(plan) if k in set(shown)]
    figure = Svg("pareto", "Time against memory of candidates", _WIDE, _TALL)
    times = [meshes[k]["time_s"] for k in shown]
    sizes = [meshes[k]["memory_bytes"] for k in shown]
    low, high = log10(min(times)), log10(max(times))
    least, most = min(sizes), max(sizes)

    def place(number: int) -> tuple[float, float]:
        across = (log10(meshes[number]["time_s"]) - low) / ((high - low) or 1.0)
        up = (meshes[number]["memory_bytes"] - least) / ((most - least) or 1)
        return _LEFT + 12 + across * (_WIDE - _LEFT - 40), _TALL - _BOTTOM - 14 - up * (
            _TALL - _BOTTOM - 44
        )

    figure.line(_LEFT, _TALL - _BOTTOM, _WIDE - 8, _TALL - _BOTTOM)
    figure.line(_LEFT, 12, _LEFT, _TALL - _BOTTOM)
    by_time = sorted(shown, key=lambda number: meshes[number]["time_s"])
    by_size = sorted(shown, key=lambda number: meshes[number]["memory_bytes"])
    fastest, slowest, smallest, fullest = by_time[0], by_time[-1], by_size[0], by_size[-1]
    figure.text(
        _LEFT + 12, _TALL - 24, numbers.ms(f"certificate.meshes.{fastest}.time_s"), "soft", "middle"
    )
    figure.text(
        _WIDE - 28, _TALL - 24, numbers.ms(f"certificate.meshes.{slowest}.time_s"), "soft", "end"
    )
    figure.text((_WIDE + _LEFT) / 2, _TALL - 8, "step time (logarithmic)", "soft", "middle")
    for number in dict.fromkeys((smallest, fullest)):
        figure.text(
            _LEFT - 6,
            place(number)[1] + 4,
            numbers.gib(f"certificate.meshes.{number}.memory_bytes"),
            "soft",
            "end",
        )
    points = [place(number) for number in front]
    figure.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), "flow")
    for number in shown:
        x, y = place(number)
        chosen = meshes[number]["outcome"] == "chosen"
        cls, size = ("chosen", 5.0) if chosen else ("dot", 3.0)
        figure.rect(x - size, y - size, 2 * size, 2 * size, cls, _words(meshes[number]))
        if chosen:
            figure.text(x + 9, y - 7, "the plan", "strong")
    return figure


def _solved(plan: Plan) -> list[int]:
    return [
        number
        for number, entry in enumerate(plan.certificate.meshes)
        if entry["outcome"] in ("solved", "chosen")
        and entry.get("time_s")
        and entry.get("memory_bytes")
    ]


def _words(entry: dict[str, Any]) -> str:
    return f"{mesh_words(entry['mesh'])}, micro-batch {entry['micro_batch']}: {ms(entry['time_s'])}, {gib(entry['memory_bytes'])}"
