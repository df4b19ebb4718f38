"""Pages of the commands compare, why-not and sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from autopar_cost_models import COST_MODEL_VERSION

from autopar.explaining.certificate import not_proved_words
from autopar.explaining.compare import (
    ComparedPlan,
    Impossible,
    compare_data,
    first_name,
    known_words,
)
from autopar.explaining.sweep import Sweep, SweepRow, doubt_words, sweep_data, sweep_lines
from autopar.explaining.why_not import WhyNot, why_not_data, why_not_lines
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.report.bars_figure import StepBar, bars_figure
from autopar.report.page import Page, Section, Table
from autopar.report.pareto_figure import Spot, pareto_figure
from autopar.request.pins import pin_text
from autopar.text.numbers import Number, Numbers, Words
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, layout_words, short_words


def compare_page(entries: Sequence[ComparedPlan | Impossible], cluster: Cluster) -> Page:
    """Plans side by side: their steps as bars by part, and a table."""
    data = compare_data(entries, cluster)
    n = Numbers(data)
    planned = [(k, entry) for k, entry in enumerate(entries) if isinstance(entry, ComparedPlan)]
    first, best = planned[0][0], planned[0][1].plan
    priced = data[first]["dollars_per_million_tokens"] is not None
    bars, rows = list[StepBar](), list[list[Words]]()
    for k, entry in planned:
        plan, at = entry.plan, f"{k}.plan"
        bars.append(_bar(f"{entry.name}: {layout_words(plan)}", plan, n, at))
        row: list[Words] = [
            entry.name,
            short_words(plan),
            n.number(f"{k}.ratio", lambda r: f"{r:.3f} x"),
        ]
        cost = [n.count(f"{k}.dollars_per_million_tokens")] if priced else []
        rows.append([*row, *_merits(n, at), *cost])
    heads = (
        "name",
        "plan",
        f"of the {first_name(best)}",
        *_MERITS,
        *(["$ per million tokens"] * priced),
    )
    doubt = not_proved_words(best)
    lead: list[str | Number] = [
        f"{doubt} " * bool(doubt),
        f"{first_name(best).capitalize()}: {layout_words(best)}. A step takes ",
        n.ms(f"{first}.plan.predicted.step_time_s"),
        ". Bars are steps by part.",
    ]
    care = [words for words in (known_words(best),) if words and not doubt]
    care += [
        f"{entry.name} is not possible: {entry.reason}."
        if isinstance(entry, Impossible)
        else f"{entry.name} is to be read with care: {entry.note}."
        for entry in entries
        if isinstance(entry, Impossible) or entry.note
    ]
    table = Table(heads, rows, tuple(range(2, len(heads))))
    plans = Section("plans", "Plans side by side", lead, bars_figure(bars), (table,), items=care)
    title = f"Plans of {best.model_name} on {best.cluster_name}"
    return Page(title, data, [plans], best.cost_model_version, "compare")


def why_not_page(answer: WhyNot) -> Page:
    """Why a choice was not made: in sentences, as bars of both steps, and part by part."""
    data, chosen = why_not_data(answer), answer.chosen
    n, plans = Numbers(data), {"chosen": chosen}
    if answer.pinned is not None and not answer.same:
        plans["pinned"] = answer.pinned
    bars = [_bar(f"{name}: {layout_words(plan)}", plan, n, name) for name, plan in plans.items()]
    doubt = not_proved_words(chosen)
    lead = " ".join([*([doubt] if doubt else []), *why_not_lines(answer)])
    tables = _beside(n) if len(plans) == 2 else ()
    sections = [Section("answer", "Answer", lead, bars_figure(bars), tuple(tables))]
    if answer.least is not None:
        sections.append(_least(n, answer.least))
    title = f"{chosen.model_name} on {chosen.cluster_name}: why not {pin_text(answer.pin)}?"
    return Page(title, data, sections, chosen.cost_model_version, "why-not")


def sweep_page(found: Sweep, model: str, cluster: Cluster) -> Page:
    """The points of a sweep: step time against cost, and a table."""
    data = sweep_data(found)
    n, price = Numbers(data), cluster.price_per_device_hour
    cost = "device_hours_per_million_tokens" if price is None else "dollars_per_million_tokens"
    unit = "device-hours per million tokens" if price is None else "$ per million tokens"
    spots, rows = list[Spot](), list[list[Words]]()
    for k, row in enumerate(found.rows):
        if not isinstance(row, SweepRow):
            continue
        at = f"rows.{k}"
        best = "yes" if data["rows"][k]["pareto"] else ""
        step, dear = n.ms(f"{at}.plan.predicted.step_time_s"), n.count(f"{at}.{cost}")
        spots.append(Spot(str(row.point), step, dear))
        per_device = n.count(f"{at}.tokens_per_s_per_device"), n.percent(f"{at}.efficiency")
        merits = _merits(n, f"{at}.plan")
        rows.append([str(row.point), short_words(row.plan), *merits, *per_device, dear, best])
    heads = ("point", "plan", *_MERITS, "tokens/s a device", "of the first", unit, "Pareto-optimal")
    figure = pareto_figure(f"Step time and {unit}", spots, "step time") if spots else None
    doubt = doubt_words(found)
    lead = (
        f"{doubt} " * bool(doubt)
        + f"Each point is a plan: its step time to the right, {unit} upwards. No plan beats those on the line in both."
    )
    table = Table(heads, rows, tuple(range(2, len(heads) - 1)))
    points = Section("points", "Points", lead, figure, (table,), items=sweep_lines(found))
    title = f"{model} on {cluster.name}"
    return Page(title, data, [points], COST_MODEL_VERSION, "sweep")


_MERITS = ("step", "tokens/s", "MFU", "fullest device")


def _merits(n: Numbers, at: str) -> list[Any]:
    """The numbers of a plan whose data are under the path `at`, as columns `_MERITS`."""
    return [
        n.ms(f"{at}.predicted.step_time_s"),
        n.count(f"{at}.predicted.tokens_per_s"),
        n.percent(f"{at}.predicted.mfu"),
        n.most_gib(f"{at}.predicted.peak_memory_bytes"),
    ]


def _bar(name: str, plan: Plan, n: Numbers, at: str) -> StepBar:
    return StepBar(name, plan.predicted.breakdown, n.ms(f"{at}.predicted.step_time_s"))


def _beside(n: Numbers) -> Iterator[Table]:
    """Seconds, and bytes of the fullest device, by part in the chosen and in the pinned plan."""
    for key, words, shown in (("time_s", TIME_WORDS, n.ms), ("memory_bytes", MEMORY_WORDS, n.gib)):
        rows = [
            (words.get(part, part), shown(f"{key}.{part}.chosen"), shown(f"{key}.{part}.pinned"))
            for part, sizes in n.value(key).items()
            if any(sizes.values())
        ]
        yield Table(("time" if key == "time_s" else "memory", "chosen", "pinned"), rows, (1, 2))


def _least(n: Numbers, plan: Plan) -> Section:
    at = "least_memory.plan.predicted.memory"
    rows = [(MEMORY_WORDS.get(part, part), n.gib(f"{at}.{part}")) for part in plan.predicted.memory]
    lead: list[str | Number] = [
        f"{layout_words(plan)} needs the least memory under the pins. A device has ",
        n.gib("least_memory.capacity_bytes"),
        ".",
    ]
    return Section("least", "Least memory", lead, tables=(Table(("part", "size"), rows, (1,)),))
