"""Pages of the commands compare, why-not and sweep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autopar.explaining.compare import Entry, Impossible, compare_data
from autopar.explaining.sweep import Row, Sweep, pareto, sweep_data, sweep_lines
from autopar.explaining.why_not import WhyNot, why_not_data, why_not_lines
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.report.bars_figure import StepBar, bars_figure
from autopar.report.numbers import Numbers
from autopar.report.page import Page, Section, Table, Words
from autopar.report.pareto_figure import Spot, front, pareto_figure
from autopar.text.plan_words import MEMORY_WORDS, TIME_WORDS, layout_words, short_words
from autopar.text.units import percent


def compare_page(entries: Sequence[Entry | Impossible], cluster: Cluster) -> Page:
    """Plans side by side: their steps as bars by part, then a table."""
    data = compare_data(entries, cluster)
    n = Numbers(data)
    planned = [(k, entry) for k, entry in enumerate(entries) if isinstance(entry, Entry)]
    best = planned[0][1].plan
    bars = [_bar(_named(entry), entry.plan, n, f"{k}.plan") for k, entry in planned]
    has_price = data[0]["dollars_per_million_tokens"] is not None
    lead: list[Words] = [
        f"The best plan is {layout_words(best)}: a step takes ", n.ms(f"{planned[0][0]}.plan.predicted.step_time_s"), ".",
    ]  # fmt: skip
    rows: list[list[Words]] = []
    for k, entry in planned:
        cost = [n.count(f"{k}.dollars_per_million_tokens")] if has_price else []
        rows.append([entry.name, short_words(entry.plan), n.number(f"{k}.ratio", _times), *_figures(n, f"{k}.plan", entry.plan), *cost])  # fmt: skip
    columns = ("name", "plan", "of the best", *_FIGURES, *(["$ per million tokens"] * has_price))
    table = Table(columns, rows, tuple(range(2, len(columns))))
    items = [
        f"{entry.name} is not possible: {entry.reason}."
        if isinstance(entry, Impossible)
        else f"{entry.name} is to be read with care: {entry.note}."
        for entry in entries
        if isinstance(entry, Impossible) or entry.note
    ]
    sections = [
        Section("plans", "Plans side by side", lead, bars_figure(bars), (table,), items=items)
    ]
    title = f"Plans of {best.model_name} on {best.cluster_name}"
    return Page(title, data, sections, best.cost_model_version, "compare")


def why_not_page(answer: WhyNot) -> Page:
    """Why a choice was not made: sentences, both steps as bars, and their parts in tables."""
    data, chosen = why_not_data(answer), answer.chosen
    n = Numbers(data)
    plans = {"chosen": chosen} | ({"pinned": answer.pinned} if answer.pinned is not None else {})
    if answer.same:
        del plans["pinned"]
    bars = [_bar(f"{name}: {layout_words(plan)}", plan, n, name) for name, plan in plans.items()]
    tables = list(_parts(n)) if len(plans) == 2 else []
    first, *others = why_not_lines(answer)
    sections = [
        Section("answer", "Answer", first, bars_figure(bars), tuple(tables), items=others),
    ]
    if answer.least is not None:
        sections.append(_least(answer, n))
    from autopar.request.pins import pin_text

    title = f"{chosen.model_name} on {chosen.cluster_name}: why not {pin_text(answer.pin)}?"
    return Page(title, data, sections, chosen.cost_model_version, "why-not")
