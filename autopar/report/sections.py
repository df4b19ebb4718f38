"""The sections of a plan's page, in order, as plain data."""

from __future__ import annotations

from collections.abc import Callable

from autopar.explaining.assumptions import ASSUMPTION_COLUMNS, assumption_rows
from autopar.explaining.certificate import advice_on_gap, not_proved_words, proof_words
from autopar.explaining.gains import gain_words, home_words
from autopar.explaining.plan_report import choice_rows
from autopar.explaining.run_lines import run_lines, run_words
from autopar.ir.mesh import mesh_words
from autopar.report.cluster_figure import cluster_figure
from autopar.report.page import Section, Table
from autopar.report.page_parts import PageParts
from autopar.report.search_sections import candidates, certificate, pareto_section, runners_up
from autopar.report.step_sections import block, memory, steps, where_it_goes
from autopar.report.waterfall import CLOSED_FORM, IDEAL, waterfall
from autopar.text.device_words import risk_words
from autopar.text.numbers import Number, Words
from autopar.text.plan_words import layout_words, staleness
from autopar.text.units import PROVED, gap_words


def plan_sections(parts: PageParts) -> list[Section]:
    """All sections for which the report has data."""
    makers: tuple[Callable[[PageParts], Section | None], ...] = (
        verdict,
        choices,
        run_it,
        placement,
        steps,
        memory,
        where_it_goes,
        block,
        certificate,
        runners_up,
        candidates,
        pareto_section,
        lints,
        assumptions_section,
    )
    return [section for make in makers if (section := make(parts)) is not None]


def choices(parts: PageParts) -> Section:
    """The choices of the plan, one by one."""
    rows = list(choice_rows(parts.plan, parts.cluster))
    return Section("plan", "The plan", "", tables=(Table(("", ""), rows),))


def verdict(parts: PageParts) -> Section:
    """The plan in a sentence, what is proved, and how far such predictions were off."""
    n, plan = parts.numbers, parts.plan
    gap = n.number("certificate.gap", gap_words)
    doubt = not_proved_words(plan)
    risk = risk_words(plan, parts.cluster)
    lead: list[str | Number] = [f"{words} " for words in (risk, doubt) if words]
    lead += [
        f"{layout_words(plan)}: a step of ", n.count("global_batch"), " sequences takes ",
        n.ms("predicted.step_time_s"), ", ", n.count("predicted.tokens_per_s"),
        f" {plan.made_for.rows} a second, at ", n.percent("predicted.mfu"), " of the devices' peak rate. ",
    ]  # fmt: skip
    if parts.cluster is not None:
        lead += [
            "The fullest device needs ",
            n.percent("report.full_share"),
            " of its memory",
        ]
        if n.value("report")["misfit_chance"] is not None:
            lead += [", with a chance of ", n.percent("report.misfit_chance"), " not to fit"]
        lead.append(". ")
    rest = ", and nothing is proved about the others" if plan.certificate.bound_s <= 0 else ""
    rest += f"; {advice_on_gap(plan)}" if plan.certificate.gap > PROVED else ""
    lead += [f"The plan is {proof_words(plan)} (gap ", gap, f"){rest}. ", *_sure(parts)]
    items: list[Words] = [_bound_by(parts)]
    if n.value("report.gains"):
        items.append(["The cheapest gain, with all choices as they are: ", *gain_words(n, 0), "."])
    items.append(home_words(n))
    if n.value("report").get("dollars") is not None:
        items.append([f"A million {plan.made_for.rows} cost $", n.count("report.dollars"), "."])
    if note := staleness(plan):
        items.append(f"This plan was {note}.")
    return Section("verdict", "Verdict", lead, items=[item for item in items if item])


def _sure(parts: PageParts) -> list[str | Number]:
    """How far predictions like this one were off, and the nearest published run, if known."""
    n = parts.numbers
    known = n.value("report").get("accuracy")
    if known is None:
        return ["No published run tells how good such predictions are."]
    return [
        "Over ", n.count("report.accuracy.error.runs"), " published runs with ",
        known["error"]["kind"], ", such predictions of the step time were off by ",
        n.percent("report.accuracy.error.mean_error"), " in the mean. The nearest, ",
        known["nearest"]["id"], " on ", n.count("report.accuracy.nearest.devices"),
        f" {known['nearest']['device']}, was off by ", n.percent("report.accuracy.nearest.error"), ".",
    ]  # fmt: skip


def _bound_by(parts: PageParts) -> Words:
    """What takes most of the step, beyond the ideal compute, as a sentence."""
    bars = waterfall(parts.plan, parts.timeline)
    others = [k for k, bar in enumerate(bars) if bar.part not in (IDEAL, CLOSED_FORM)]
    if not others:
        return ""
    most = max(others, key=lambda k: bars[k].seconds)
    ideal = [k for k, bar in enumerate(bars) if bar.part == IDEAL]
    share = parts.numbers.percent
    words: list[str | Number] = []
    if ideal:
        words += [
            "Ideal compute takes ",
            share(f"report.waterfall.{ideal[0]}.share"),
            " of the step. ",
        ]
    return [
        *words, f"The largest part besides is {bars[most].part}, with ",
        share(f"report.waterfall.{most}.share"), ".",
    ]  # fmt: skip


def run_it(parts: PageParts) -> Section:
    """What to copy to get and run this plan."""
    code = run_lines(parts.plan, parts.command)
    return Section("run", "Run it", run_words(parts.plan, parts.command), code=code)


def placement(parts: PageParts) -> Section | None:
    """The cluster with the plan's ranks."""
    if parts.cluster is None:
        return None
    n, mesh = parts.numbers, parts.plan.mesh
    lead: list[str | Number] = [
        "The mesh has ", n.count("report.devices"), " ranks: ", mesh_words(mesh.as_dict()),
        ". Above the nodes stand line rates of a device. The rate of an axis is what training reaches of"
        " the slowest link that it crosses: the share under Assumptions, divided among the ranks that send at once.",
    ]  # fmt: skip
    if mesh.ep > 1:
        lead.append(
            f" Of the {mesh.dp} ranks of dp, groups of ep={mesh.ep} share out the experts; the row of dp counts these groups."
        )
    if mesh.pp > 1:
        lead.append(" Tiles of one colour are on one pipeline rank (pp).")
    return Section("cluster", "The cluster", lead, cluster_figure(parts.plan, parts.cluster, n))


def lints(parts: PageParts) -> Section:
    """Warnings and notes."""
    found = [
        [f"{finding['lint']}: {finding['text']}. {finding['remedy']}."]
        for finding in parts.numbers.value("lints")
    ]
    items = [*found, *parts.plan.notes]
    lead = "What may be changed, with what it would take." if found else "No lint has a warning."
    return Section("lints", "Lints and notes", lead, items=items)


def assumptions_section(parts: PageParts) -> Section:
    """What predictions rest on, with sources."""
    rows = assumption_rows(parts.numbers)
    lead = "What the predictions rest on. Rates are figures of data sheets times what training reaches of them."
    table = Table(ASSUMPTION_COLUMNS, rows[:8], (1,), rows[8:])
    return Section("assumptions", "Assumptions", lead, tables=(table,) if rows else ())
