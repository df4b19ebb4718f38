"""Draws the figures of the documentation: reports of plans, and the committed results.

python -m benchmarks.figures                 # all, into docs/figures
python -m benchmarks.figures --results-only  # without planning
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log10
from pathlib import Path

from autopar.report.svg import Svg

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
PLANS = (
    (
        ("llama3-8b", "dgx-h100:2", 64),
        "pp=4,tp=2,schedule=1f1b,micro_batch=1",
        "report",
        ("timeline", "memory", "waterfall", "cluster", "block"),
    ),
    (
        ("llama3-405b", "dgx-h100:64", 1024),
        "pp=16,tp=8,schedule=1f1b,micro_batch=1",
        "tutorial",
        ("timeline", "memory", "cluster"),
    ),
)
"""Plans to draw: (model, cluster, sequences of a step), pins, prefix of the files, and figures."""


@dataclass(frozen=True)
class Point:
    """A predicted and a measured time of one run, in seconds, and where they were measured."""

    predicted_s: float
    measured_s: float
    where: str


# ------------------------------------------------------------------------------------------------------- what results say


def planning_rows(text: str) -> list[tuple[str, float, float]]:
    """(row, seconds of the process, seconds of planning) of the table of planning speed."""
    found = re.findall(r"^(\S.*?)  +([\d.]+) s +([\d.]+) s +[\d.]+ s ", text, re.M)
    return [(name.strip(), float(process), float(plan)) for name, process, plan in found]


def fidelity_points(texts: dict[str, str]) -> list[Point]:
    """The runs of the tables of predicted and measured times, by where they were measured."""
    found = []
    for where, text in texts.items():
        for line in text.splitlines():
            both = re.search(r" ([\d.]+) (ms|s) +([\d.]+) (ms|s) +[\d.]+(?: |$)", line)
            if both:
                scale = {"ms": 1e-3, "s": 1.0}
                predicted, measured = (float(both[k]) * scale[both[k + 1]] for k in (1, 3))
                found.append(Point(predicted, measured, where))
    return found


def exactness_cells(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """(network, outcome under each mesh) of the table of public models."""
    rows = re.findall(
        r"^(\S.*?)  +(exact|refused|\S+)  +(exact|refused|\S+)  +(exact|refused|\S+)(?:  |$)",
        text,
        re.M,
    )
    return [(name.strip(), tuple(cells)) for name, *cells in rows if "=" not in cells[0]]


def plan_rows(text: str) -> list[tuple[str, list[tuple[str, float]]]]:
    """For each model of the comparison of plans: its title, and (plan, regret as a fraction)."""
    found: list[tuple[str, list[tuple[str, float]]]] = []
    for line in text.splitlines():
        if re.match(r"\S+ on \S+: ", line):
            found.append((line, []))
        elif found and (row := re.match(r"(\S.*?)  .* ms +([+-][\d.]+) %", line)):
            found[-1][1].append((row[1], float(row[2]) / 100))
    return found


# ---------------------------------------------------------------------------------------------------------------- drawings


def bars(name: str, title: str, rows: Sequence[tuple[str, float, str]]) -> Svg:
    """Horizontal bars: (words, value, text of the value)."""
    figure = Svg(name, title, 760, 24.0 * len(rows) + 40)
    most = max(value for _, value, _ in rows) or 1.0
    figure.text(0, 16, title, "strong")
    for row, (words, value, text) in enumerate(rows):
        y = 28 + 24 * row
        figure.text(232, y + 14, words, "ink", "end")
        figure.rect(240, y + 2, max(value / most * 420, 1.5), 16, "c-backward")
        figure.text(246 + value / most * 420, y + 14, text, "soft")
    return figure


def scatter(name: str, title: str, points: Sequence[Point]) -> Svg:
    """Measured against predicted times, both logarithmic, with the line on which they are equal."""
    figure = Svg(name, title, 620, 480)
    left, top, wide, high = 66.0, 34.0, 530.0, 380.0
    values = [v for p in points for v in (p.predicted_s, p.measured_s)]
    low, most = log10(min(values)) - 0.1, log10(max(values)) + 0.1

    def at(predicted_s: float, measured_s: float) -> tuple[float, float]:
        x, y = ((log10(v) - low) / (most - low) for v in (predicted_s, measured_s))
        return left + x * wide, top + (1 - y) * high

    figure.text(0, 16, title, "strong")
    figure.line(left, top + high, left + wide, top + high)
    figure.line(left, top, left, top + high)
    for power in range(-4, 3):
        if low <= power <= most:
            x, y = at(10.0**power, 10.0**power)
            label = f"{10.0**power:g} s" if power >= 0 else f"{10.0 ** (power + 3):g} ms"
            figure.text(x, top + high + 16, label, "soft", "middle")
            figure.text(left - 6, y + 4, label, "soft", "end")
    figure.line(*at(10**low, 10**low), *at(10**most, 10**most), "flow")
    figure.text(left + wide / 2, top + high + 34, "predicted", "soft", "middle")
    figure.text(left + 6, top + 12, "measured", "soft")
    kinds = list(dict.fromkeys(point.where for point in points))
    classes = ("c-backward", "c-tp", "c-dp", "c-optimizer")
    for point in points:
        x, y = at(point.predicted_s, point.measured_s)
        figure.rect(x - 4, y - 4, 8, 8, classes[kinds.index(point.where)], point.where)
    figure.height = (
        figure.legend(left, top + high + 46, [(classes[k], kind) for k, kind in enumerate(kinds)])
        + 4
    )
    return figure


def matrix(
    name: str, title: str, rows: Sequence[tuple[str, tuple[str, ...]]], columns: Sequence[str]
) -> Svg:
    """A grid of outcomes: filled where exact, striped where refused, empty otherwise."""
    half = -(-len(rows) // 2)
    figure = Svg(name, title, 860, 15.0 * half + 76)
    figure.text(0, 16, title, "strong")
    classes = {"exact": "c-dp", "refused": "c-recompute"}
    for number, (words, cells) in enumerate(rows):
        x, y = (430.0 * (number // half), 42 + 15.0 * (number % half))
        figure.text(x + 262, y + 10, words[:40], "small", "end")
        for place, cell in enumerate(cells):
            figure.rect(
                x + 270 + 46 * place,
                y,
                42,
                12,
                classes.get(cell, "bad"),
                f"{words}, {columns[place]}: {cell}",
            )
    for x in (0.0, 430.0):
        for place, column in enumerate(columns):
            figure.text(x + 291 + 46 * place, 36, column, "small", "middle")
    figure.height = figure.legend(
        0, 48 + 15.0 * half, [("c-dp", "exact"), ("c-recompute", "refused"), ("bad", "neither")]
    )
    return figure


def result_figures() -> list[Svg]:
    """The figures of the committed results."""
    read: Callable[[str], str] = lambda name: (RESULTS / name).read_text()  # noqa: E731
    speed = [
        (words, plan, f"{plan:g} s") for words, _, plan in planning_rows(read("planning_speed.txt"))
    ]
    points = fidelity_points(
        {
            "one H200": read("gpu_check_h200.txt"),
            "4 CPU processes": read("time_check.txt"),
        }
    )
    found = [
        bars("planning-speed", "Seconds of planning", speed),
        scatter("fidelity", "Steps of autopar's engine, predicted and measured", points),
        matrix(
            "exactness",
            "Networks of public packages",
            exactness_cells(read("public_models.txt")),
            ("dp=2", "tp=2", "pp=2"),
        ),
    ]
    for number, (title, rows) in enumerate(plan_rows(read("compare_plans.txt")), 1):
        words = [(plan, regret, f"{100 * regret:+.1f} %") for plan, regret in rows]
        found.append(bars(f"plans-{number}", f"Step time above the chosen plan's: {title}", words))
    return found


def plan_figures(
    task: tuple[str, str, int], pins: str, prefix: str, names: Sequence[str]
) -> list[Svg]:
    """The figures `names` of the report on a plan, under names that begin with `prefix`."""
    from autopar.cli.session import Asked, Planner
    from autopar.request.pins import parse_pins

    model, cluster, batch = task
    planner = Planner(Asked(model=model, cluster=cluster, global_batch=batch), lambda text: None)
    pin = parse_pins(pins)
    plan = planner.plan(pin)
    report = planner.report(plan, pin)
    found = {figure.name: figure for figure in report.svgs()}
    for figure in found.values():
        figure.name = f"{prefix}-{figure.name}"
    return [found[name] for name in names if name in found]


def main() -> None:
    """Writes the figures into docs/figures, and prints their names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results-only", action="store_true")
    only = parser.parse_args().results_only
    figures = result_figures()
    for wanted in () if only else PLANS:
        figures += plan_figures(*wanted)
    FIGURES.mkdir(exist_ok=True)
    for figure in figures:
        path = FIGURES / f"{figure.name}.svg"
        path.write_text(figure.standalone())
        print(path.relative_to(FIGURES.parents[1]))


if __name__ == "__main__":
    main()
