"""The sections of a page on the simulated step: its timeline, its memory, where it goes, and a block."""

from __future__ import annotations

from autopar.explaining.gains import gain_words
from autopar.report.block_graph import block_figure
from autopar.report.chrome_trace import folded_words
from autopar.report.memory_figure import drawn_ranks, memory_figure
from autopar.report.page import Section, Table
from autopar.report.page_parts import PageParts
from autopar.report.timeline import Timeline
from autopar.report.timeline_figure import shown_rows, timeline_figure
from autopar.report.waterfall import waterfall, waterfall_figure
from autopar.text.numbers import Number, Numbers, Words


def steps(parts: PageParts) -> Section | None:
    """The timeline of the pipeline."""
    if (timeline := parts.timeline) is None:
        return None
    n = parts.numbers
    lead: list[str | Number] = [
        "One step as simulated, in real durations: ", n.count("num_microbatches"),
        " micro-batches of ", n.count("micro_batch"),
        f" sequences on each data-parallel rank, schedule {timeline.schedule}. The busiest rank is idle for "
        if timeline.ranks > 1
        else " sequences on each data-parallel rank. ",
    ]  # fmt: skip
    if timeline.ranks > 1:
        lead += [n.percent(f"report.ranks.{timeline.busiest}.idle_share"), " of the step. "]
    lead += ["The simulation takes ", n.ms("report.step_time_s"), ", the closed form of the plan ",
             n.ms("predicted.step_time_s"), "."]  # fmt: skip
    note = "Inside a pass, work of one kind is drawn together; the trace has the true order."
    if words := folded_words(timeline):
        note += f" Left out in the middle: {words}."
    if len(rows := shown_rows(timeline.ranks)) < timeline.ranks:
        note += f" {len(rows)} of {timeline.ranks} pipeline ranks are drawn."
    return Section("timeline", "Timeline", lead, timeline_figure(timeline, n), note=note)


def memory(parts: PageParts) -> Section | None:
    """Memory over time, or its parts without a timeline."""
    n, timeline = parts.numbers, parts.timeline
    if timeline is None:
        rows = [(name, n.gib(f"predicted.memory.{name}")) for name in parts.plan.predicted.memory]
        words = "Parts of the memory of the fullest device at its peak."
        return Section("memory", "Memory", words, tables=(Table(("part", "size"), rows, (1,)),))
    lead: list[str | Number] = [
        "What a device holds during the step; the triangle marks its peak. "
    ]
    rank = timeline.fullest
    if timeline.ranks > 1:
        lead.append(f"Rank {rank} of the pipeline is fullest: ")
    lead += [n.gib(f"report.ranks.{rank}.peak_bytes"), " of ", n.gib(f"report.ranks.{rank}.limit_bytes"),
             ", first at ", n.ms(f"report.ranks.{rank}.peak_time_s"), "."]  # fmt: skip
    note = "A pass counts what it keeps from its start on, as the plan does."
    if any(m.peak_bytes != m.predicted_bytes for m in timeline.memory):
        note += (
            " Where a rank has several stages, the plan adds peaks that the simulation reaches at different"
            " times, and so predicts more."
        )
    if len(ranks := drawn_ranks(timeline)) < timeline.ranks:
        note += f" {len(ranks)} of {timeline.ranks} pipeline ranks are drawn."
    return Section(
        "memory",
        "Memory over time",
        lead,
        memory_figure(timeline, n),
        (_peaks(timeline, n),),
        note=note,
    )


def _peaks(timeline: Timeline, n: Numbers) -> Table:
    """The parts of each rank's peak."""
    rows: list[list[Words]] = []
    names = ("parameters", "gradients", "optimizer", "fixed", "kept", "transient")
    for rank in range(timeline.ranks):
        at = f"report.ranks.{rank}"
        row: list[Words] = [n.gib(f"{at}.parts.{part}") for part in names]
        rows.append([str(rank), *row, n.gib(f"{at}.peak_bytes"), n.gib(f"{at}.predicted_bytes")])
    return Table(("rank", *names, "peak", "the plan's"), rows[:4], tuple(range(1, 9)), rows[4:])


def where_it_goes(parts: PageParts) -> Section:
    """The waterfall from ideal compute to the step."""
    bars = waterfall(parts.plan, parts.timeline)
    of = (
        f"of pipeline rank {parts.timeline.busiest}, the busiest"
        if parts.timeline and parts.timeline.ranks > 1
        else "of a device"
    )
    lead = f"The step {of}, from what the model's FLOPs would take at the datasheet's peak rate to the predicted time."
    note = (
        "Communication counts where compute does not hide it."
        if parts.timeline
        else "From the plan's own breakdown; with the model, communication is listed by axis."
    )
    n = parts.numbers
    gains = [[*gain_words(n, place), "."] for place in range(len(n.value("report.gains")))]
    if gains:
        note += " The list has what other software saves, each change alone and with all choices as they are."
    figure = waterfall_figure(bars, n)
    return Section("waterfall", "Where the step goes", lead, figure, items=gains, note=note)


def block(parts: PageParts) -> Section | None:
    """The graph of a block."""
    if parts.graph is None:
        return None
    graph = parts.graph
    alike = f"{graph.count} alike" if graph.count > 1 else "one"
    again = "" if graph.recompute == "none" else f", recomputed: {graph.recompute}"
    lead = (
        f"The block that the model has most of ({graph.name}, {alike}{again}), with how each op runs over each axis and"
        " the layout of its result. Collectives of forward stand on the edges."
    )
    note = (
        "R: replicated; S(d): sharded along dim d; P: partial sums; R/P: replicated, with partial gradients. "
        "Ops without a choice worth showing are left out."
    )
    return Section("block", "A block", lead, block_figure(graph), note=note)
