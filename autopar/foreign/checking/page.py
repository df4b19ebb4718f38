"""The page of an answer to a job: what is refused, what would be better, and the job as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar_cost_models import COST_MODEL_VERSION

from autopar.foreign.checking.check import Answer
from autopar.foreign.checking.report import (
    TITLES,
    alone_words,
    answer_gap_words,
    answer_proof_words,
    change_table,
    check_data,
    fit_words,
    job_layout_words,
    own_words,
    rank_table,
)
from autopar.ir.cluster import plain_data
from autopar.report.explained import full_report
from autopar.report.page import Page, Section
from autopar.report.report import Report
from autopar.text.numbers import Number, Numbers, Words
from autopar.text.plan_words import short_words

_OF_THE_PLAN = ("cluster", "timeline", "memory", "waterfall", "block", "assumptions")
"""The sections of a plan's page that a job's page has too."""


def check_page(answer: Answer) -> Page:
    """The page of an answer. Its data are those of `check_data`, and under 'plan' those of a report
    on the job's own layout.
    """
    report = _report(answer)
    data = check_data(answer) | {"plan": report.data if report else None}
    n = Numbers(data)
    sections = [_verdict(answer, n), *_findings(answer)]
    if not answer.withheld:
        sections += [_better(answer, n), *_changes(answer, n)]
    if report is not None:
        sections.append(_ranks(answer, n))
        of_plan = report.sections(Numbers(data, "plan"))
        sections += [section for section in of_plan if section.key in _OF_THE_PLAN]
    title = f"A job of {answer.target.title} on {answer.cluster.name}"
    return Page(title, data, sections, COST_MODEL_VERSION, "check")


def _report(answer: Answer) -> Report | None:
    """The report on the job's own layout, on devices as they are; None if it has no price."""
    setting = answer.setting
    if answer.plan is None or setting is None:
        return None
    plan, cluster = setting.plan_of(setting.job.layout), setting.cluster
    made_for = replace(plan.made_for, cluster=plain_data(cluster))
    here = replace(plan, cluster_hash=cluster.spec_hash(), made_for=made_for)
    return full_report(here, setting.traced, setting.request_of(setting.job.layout, cluster))


def _verdict(answer: Answer, n: Numbers) -> Section:
    """Whether the job starts, fits, and how long a step is."""
    job, gpus = answer.job, answer.cluster.num_devices
    lead: list[str | Number] = [f"{job_layout_words(job.layout, gpus)}. "]
    if answer.refused:
        lead.append(f"{answer.target.title} refuses it at start. ")
    if answer.withheld:
        return _no_verdict(answer, n, lead)
    if answer.plan is None:
        return Section("verdict", "Verdict", [*lead, f"No prediction: {answer.why_not}."])
    lead += [
        f"It {fit_words(answer)}: ", "the fullest device needs ",
        n.most_gib("predicted.peak_memory_bytes"), " of ",
        n.gib("memory_bytes"),
    ]  # fmt: skip
    if answer.chance is not None:
        lead += [", with a chance of ", n.percent("chance"), " to fit"]
    lead += [
        ". A step takes ", n.ms("predicted.step_time_s"), ", ",
        n.count("predicted.tokens_per_s"), " tokens a second, at ",
        n.percent("predicted.mfu"), " of the devices' peak rate.",
    ]  # fmt: skip
    if "host" in answer.plan.predicted.breakdown:
        lead += [
            " In ", n.ms("predicted.breakdown.host"), " of it devices wait for the host: "
            "larger micro-batches, CUDA graphs or torch.compile shorten that.",
        ]  # fmt: skip
    if answer.measured_s is not None:
        lead += [" Measured: ", n.ms("measured_s"), "."]
    items: list[Words] = [f"Of the gap: {words}."] if (words := answer_gap_words(answer)) else []
    if answer.job.unpriced:
        items.append(f"Options without a price: {', '.join(answer.job.unpriced)}.")
    return Section("verdict", "Verdict", lead, items=items)


def _no_verdict(answer: Answer, n: Numbers, lead: list[str | Number]) -> Section:
    """That no verdict is given and why, with the price of what can be priced."""
    lead = [*lead, "No verdict is given. "]
    if answer.plan is not None:
        lead += [
            f"{alone_words(answer).capitalize()}: ", n.most_gib("predicted.peak_memory_bytes"), " of ",
            n.gib("memory_bytes"), " on the fullest device, ", n.ms("predicted.step_time_s"), " a step.",
        ]  # fmt: skip
    items: list[Words] = [f"{reason}." for reason in answer.withheld]
    return Section("verdict", "Verdict", lead, items=items)


def _findings(answer: Answer) -> Iterator[Section]:
    """A section for each kind of findings."""
    for kind, title in TITLES.items():
        found = [finding for finding in answer.findings if finding.kind == kind]
        if found:
            items = [str(finding) for finding in found]
            yield Section(f"findings-{kind}", title, "", items=items)


def _better(answer: Answer, n: Numbers) -> Section:
    """The best plan within the framework, and the options to change."""
    best, own, title = answer.best, answer.plan, "Best plan within this framework"
    lead: list[str | Number] = []
    if best is None:
        return Section("better", title, [f"None: {answer.why_no_best}."])
    if best is own:
        why = answer.why_no_best or "no faster one was found"
        lead += ["The job's own layout, ", n.ms("best.step_time_s"), f": {why}."]
    else:
        lead += [f"{short_words(best)}: a step takes ", n.ms("best.step_time_s")]
        lead.append(f"{own_words(answer)}.")
    note = f"{answer_proof_words(answer)}." if answer.bound_s else ""
    changed = "\n".join(map(str, answer.differences))
    return Section("better", title, lead, code=changed, note=note.capitalize())


def _changes(answer: Answer, n: Numbers) -> Iterator[Section]:
    """The single changes with which the job fits."""
    if answer.plan is None or answer.is_sure:
        return
    lead = "Each of these alone makes it fit." if answer.changes else "None of those tried."
    tables = (change_table(answer, n),) if answer.changes else ()
    yield Section("changes", "Single changes that fit", lead, tables=tables)


def _ranks(answer: Answer, n: Numbers) -> Section:
    """Layers and memory of each pipeline rank."""
    table = rank_table(answer, n)
    table.rows, table.folded = table.rows[:8], table.rows[8:]
    return Section("ranks", "Ranks of the pipeline", "What each rank holds.", tables=(table,))
