"""The sections of a plan's page, in order, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.explaining.plan_report import (
    MORE_TIME,
    is_prediction,
    outcome_counts,
    runnable_words,
)
from autopar.explaining.runners_up import why
from autopar.ir.cluster import Cluster
from autopar.ir.mesh import mesh_words
from autopar.ir.plan import Plan
from autopar.ir.plan_fields import Certificate
from autopar.report.assumptions import Assumption
from autopar.report.block_graph import BlockGraph, block_figure
from autopar.report.chrome_trace import folded_words
from autopar.report.cluster_figure import cluster_figure
from autopar.report.memory_figure import drawn_ranks, memory_figure
from autopar.report.numbers import Number, Numbers
from autopar.report.page import Section, Table, Words
from autopar.report.pareto_figure import candidates, front, pareto_figure
from autopar.report.timeline import Timeline
from autopar.report.timeline_figure import shown_rows, timeline_figure
from autopar.report.waterfall import CLOSED_FORM, IDEAL, waterfall, waterfall_figure
from autopar.text.plan_words import choice_words, layout_words, sharing_words, staleness
from autopar.text.units import PROVED, gap_words, percent

_SHOWN, _MOST_LOST = 6, 40
_PROOFS = {
    "feasible": "the best found in the time limit",
    "optimal": "proved optimal within the search space",
}
"""The status of a certificate in words."""


@dataclass(frozen=True, slots=True)
class PlanPage:
    """Makes the sections of a page from the parts of a `Report`. `numbers` looks up its data."""

    plan: Plan
    cluster: Cluster | None
    timeline: Timeline | None
    graph: BlockGraph | None
    command: str
    numbers: Numbers

    def sections(self) -> list[Section]:
        """All sections for which the report has data."""
        makers: tuple[Callable[[], Section | None], ...] = (
            self.verdict,
            self.run_it,
            self.placement,
            self.steps,
            self.memory,
            self.where_it_goes,
            self.block,
            self.runners_up,
            self.candidates,
            self.pareto,
            self.lints,
            self.assumptions,
        )
        return [section for maker in makers if (section := maker()) is not None]

    def verdict(self) -> Section:
        """The plan in a sentence, what is proved, and how far such predictions were off."""
        n, plan = self.numbers, self.plan
        proof = _proof(plan.certificate)
        gap = n.number("certificate.gap", gap_words)
        lead: list[str | Number] = [
            f"{layout_words(plan)}: a step of ", n.count("global_batch"), " sequences takes ",
            n.ms("predicted.step_time_s"), ", ", n.count("predicted.tokens_per_s"),
            " tokens a second, at ", n.percent("predicted.mfu"), " of the devices' peak rate. ",
        ]  # fmt: skip
        if self.cluster is not None:
            lead += [
                "The fullest device needs ",
                n.percent("report.full_share"),
                " of its memory",
            ]
            if n.value("report")["misfit_chance"] is not None:
                lead += [", with a chance of ", n.percent("report.misfit_chance"), " not to fit"]
            lead.append(". ")
        rest = ", and nothing is proved about the others" if plan.certificate.bound_s <= 0 else ""
        rest += f"; {MORE_TIME}" if plan.certificate.gap > PROVED else ""
        lead += [f"The plan is {proof} (gap ", gap, f"){rest}. ", *self._sure()]
        items: list[Words] = [self._bound_by(), *_gains(n)[:1]]
        if note := staleness(plan):
            items.append(f"This plan was {note}.")
        return Section("verdict", "Verdict", lead, items=[item for item in items if item])

    def _sure(self) -> list[str | Number]:
        """How far predictions like this one were off, and the nearest published run, if known."""
        n = self.numbers
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

    def _bound_by(self) -> Words:
        """What takes most of the step, beyond the ideal compute, as a sentence."""
        bars = waterfall(self.plan, self.timeline)
        others = [k for k, bar in enumerate(bars) if bar.part not in (IDEAL, CLOSED_FORM)]
        if not others:
            return ""
        most = max(others, key=lambda k: bars[k].seconds)
        ideal = [k for k, bar in enumerate(bars) if bar.part == IDEAL]
        share = self.numbers.percent
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

    def run_it(self) -> Section:
        """What to copy to get and run this plan."""
        plan, words = self.plan, ""
        if self.command:
            words = (
                f"The {'first ' * is_prediction(plan)}command makes this plan again and saves it. "
            )
        if plan.runnable:
            words += runnable_words(plan)
        else:
            words += (
                "The other lines run it." if self.command else "These lines run the saved plan."
            )
        return Section("run", "Run it", words, code="\n\n".join(_code(plan, self.command)))

    def placement(self) -> Section | None:
        """The cluster with the plan's ranks."""
        if self.cluster is None:
            return None
        n, mesh = self.numbers, self.plan.mesh
        lead: list[str | Number] = [
            "The mesh has ", n.count("report.devices"), " ranks: ", mesh_words(mesh.as_dict()),
            ". A rate is what one device has on the slowest link that its axis crosses.",
        ]  # fmt: skip
        if mesh.ep > 1:
            lead.append(
                f" Of the {mesh.dp} ranks of dp, groups of ep={mesh.ep} share out the experts; the row of dp counts these groups."
            )
        if mesh.pp > 1:
            lead.append(" Tiles of one colour are on one pipeline rank (pp).")
        return Section("cluster", "The cluster", lead, cluster_figure(self.plan, self.cluster, n))

    def steps(self) -> Section | None:
        """The timeline of the pipeline."""
        if (timeline := self.timeline) is None:
            return None
        n = self.numbers
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

    def memory(self) -> Section | None:
        """Memory over time, or its parts without a timeline."""
        n, timeline = self.numbers, self.timeline
        if timeline is None:
            rows = [
                (name, n.gib(f"predicted.memory.{name}")) for name in self.plan.predicted.memory
            ]
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
            (self._peaks(timeline),),
            note=note,
        )

    def _peaks(self, timeline: Timeline) -> Table:
        """The parts of each rank's peak."""
        n = self.numbers
        rows: list[list[Words]] = []
        parts = ("parameters", "gradients", "optimizer", "fixed", "kept", "transient")
        for rank in range(timeline.ranks):
            at = f"report.ranks.{rank}"
            row: list[Words] = [n.gib(f"{at}.parts.{part}") for part in parts]
            rows.append(
                [str(rank), *row, n.gib(f"{at}.peak_bytes"), n.gib(f"{at}.predicted_bytes")]
            )
        return Table(("rank", *parts, "peak", "the plan's"), rows[:4], tuple(range(1, 9)), rows[4:])

    def where_it_goes(self) -> Section:
        """The waterfall from ideal compute to the step."""
        bars = waterfall(self.plan, self.timeline)
        of = (
            f"of pipeline rank {self.timeline.busiest}, the busiest"
            if self.timeline and self.timeline.ranks > 1
            else "of a device"
        )
        lead = f"The step {of}, from what the model's FLOPs would take at the datasheet's peak rate to the predicted time."
        note = (
            "Communication counts where compute does not hide it."
            if self.timeline
            else "From the plan's own breakdown; with the model, communication is listed by axis."
        )
        return Section(
            "waterfall",
            "Where the step goes",
            lead,
            waterfall_figure(bars, self.numbers),
            items=_gains(self.numbers),
            note=note,
        )

    def block(self) -> Section | None:
        """The graph of a block."""
        if self.graph is None:
            return None
        graph = self.graph
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

    def runners_up(self) -> Section | None:
        """The best plan of each other family of layouts, with what it loses and where."""
        rows = _runners_up(self.plan, self.numbers)
        if not rows:
            return None
        columns = ("family", "best plan", "step time", "longer", "memory", "why")
        lead = "The best plan of each other family of layouts."
        return Section("runners-up", "Runners-up", lead, tables=(Table(columns, rows, (2, 3, 4)),))

    def candidates(self) -> Section:
        """The candidates of the search, each with why it lost."""
        meshes = self.plan.certificate.meshes
        order = sorted(
            lost(meshes),
            key=lambda number: (meshes[number]["outcome"] != "solved", _least_s(meshes[number])),
        )
        rows = [_candidate(self.plan, number, self.numbers) for number in order[:_MOST_LOST]]
        counts = outcome_counts(self.plan.certificate)
        said = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        lead: list[str | Number] = [
            f"{len(meshes):,} candidates were considered ({said}). ",
            "The search took ",
            self.numbers.number("certificate.solve_time_s", lambda s: f"{s:.3g} s"),
            ".",
        ]
        columns = (
            "mesh",
            "micro-batch",
            "schedule",
            "ZeRO",
            "recompute",
            "step time",
            "why it lost",
        )
        table = Table(columns, rows[:_SHOWN], (5,), rows[_SHOWN:])
        return Section("candidates", "Candidates", lead, tables=(table,) if rows else ())

    def pareto(self) -> Section | None:
        """Time against memory of all solved candidates and runners-up."""
        spots = candidates(self.plan, self.numbers)
        if len(front(spots)) < 2:
            return None
        lead = (
            "Time and memory of the best placement of each solved candidate. No other one is at least as good in both as those on the line."
            " All use every device, so that cost grows with time."
        )
        figure = pareto_figure("Time against memory of candidates", spots, "step time")
        return Section("pareto", "Time against memory", lead, figure)

    def lints(self) -> Section:
        """Warnings and notes."""
        found = [
            [f"{finding['lint']}: {finding['text']}. {finding['remedy']}."]
            for finding in self.numbers.value("lints")
        ]
        items = [*found, *self.plan.notes]
        lead = (
            "What may be changed, with what it would take." if found else "No lint has a warning."
        )
        return Section("lints", "Lints and notes", lead, items=items)

    def assumptions(self) -> Section:
        """What predictions rest on, with sources."""
        n = self.numbers
        rows = []
        for place, of in enumerate(n.value("report").get("assumptions", ())):
            value = n.number(f"report.assumptions.{place}.value", Assumption(**of).words)
            rows.append((of["what"], value, of["source"]))
        lead = "What the predictions rest on. Rates are figures of data sheets times what training reaches of them."
        table = Table(("what", "value", "source"), rows[:8], (1,), rows[8:])
        return Section(
            "assumptions",
            "Assumptions",
            lead,
            tables=(table,) if rows else (),
            note=f"Search space: {self.plan.certificate.space}.",
        )


def lost(meshes: Sequence[dict]) -> list[int]:
    """The indices of candidates that are not the chosen one and of which more is known than that
    time ran out. Each mesh with its choices is listed once, as its best.
    """
    best: dict[tuple, int] = {}
    for number, entry in enumerate(meshes):
        if entry["outcome"] in ("chosen", "unexplored") or _least_s(entry) == float("inf"):
            continue
        key = (
            *entry["mesh"].values(),
            entry["zero"],
            entry.get("shard", 0),
            entry["recompute"],
            entry["schedule"],
        )
        if key not in best or _least_s(entry) < _least_s(meshes[best[key]]):
            best[key] = number
    return list(best.values())


def _least_s(entry: dict) -> float:
    """Seconds of the candidate's best placement, or the bound on them; infinite if none fits."""
    found = entry.get("time_s") if entry["outcome"] == "solved" else entry.get("bound_s")
    return float("inf") if found is None else found


def why_lost(plan: Plan, entry: dict) -> str:
    """Why a candidate is not the plan, as a phrase."""
    slower = _least_s(entry) / plan.predicted.step_time_s - 1
    if entry["outcome"] == "solved":
        return (
            f"{gap_words(slower)} slower" if slower > 5e-4 else "as fast; the other was found first"
        )
    if entry["outcome"] == "pruned":
        if slower <= 0:
            return f"none of its placements is more than {gap_words(-slower)} faster"
        return f"none of its placements is less than {gap_words(slower)} slower"
    return entry["reason"]


def _runners_up(plan: Plan, n: Numbers) -> list[list[Words]]:
    """A row for each runner-up of a plan."""
    own_s, rows = plan.predicted.step_time_s, list[list[Words]]()
    for k, entry in enumerate(plan.certificate.runners_up):
        at = f"certificate.runners_up.{k}"
        if entry["time_s"] is None:
            rows.append([entry["family"], "none fits", "", "", "", ""])
            continue
        longer = n.number(f"{at}.time_s", lambda s: f"{100 * (s / own_s - 1):+.1f} %")
        rows.append([
            entry["family"], choice_words(entry), n.ms(f"{at}.time_s"), longer,
            n.gib(f"{at}.memory_bytes"), why(plan, entry),
        ])  # fmt: skip
    return rows


def _candidate(plan: Plan, number: int, n: Numbers) -> list[Words]:
    """The row of the candidate at index `number` of a certificate's meshes."""
    entry, at = plan.certificate.meshes[number], f"certificate.meshes.{number}"
    step: Words = ""
    if entry["outcome"] == "solved":
        step = n.ms(f"{at}.time_s")
    elif entry.get("bound_s"):
        step = ["at least ", n.ms(f"{at}.bound_s")]
    return [
        mesh_words(entry["mesh"]),
        n.count(f"{at}.micro_batch"),
        entry["schedule"],
        sharing_words(entry["zero"], entry.get("shard", 0)),
        entry["recompute"],
        step,
        why_lost(plan, entry),
    ]


def _proof(proof: Certificate) -> str:
    """What a certificate proves of its plan, as the end of a sentence."""
    words = _PROOFS.get(proof.status, proof.status)
    if proof.objective_s <= (1 + PROVED) * proof.fastest_s:
        return words
    return f"the simplest within {percent(proof.tolerance)} of what is {words}"


def _gains(n: Numbers) -> list[Words]:
    """What other software would save, a sentence for each change, the least effort first."""
    found: list[Words] = []
    for place, gain in enumerate(n.value("report.gains")):
        begin = "Or" if place else "The cheapest gain"
        at = f"report.gains.{place}"
        found.append(
            [
                f"{begin}, with all choices as they are: {gain['change']}. A step then takes ",
                n.ms(f"{at}.step_time_s"), ", ", n.percent(f"{at}.saved"), " less.",
            ]
        )  # fmt: skip
    return found


def _code(plan: Plan, command: str) -> list[str]:
    """Commands and lines that make such a plan and run it."""
    parts = [f"{command} \\\n    --save plan.json"] if command else []
    if command and is_prediction(plan):
        parts[0] = f"# this plan again\n{command} \\\n    --save predicted.json"
        parts.append(f"# a plan to train with\n{command} --runnable \\\n    --save plan.json")
    if not plan.runnable or is_prediction(plan):
        parts.append(
            "# in the training script, on every rank under torchrun\n"
            'plan = autopar.Plan.load("plan.json")\n'
            f'engine = autopar.parallelize(model, "{plan.cluster_name}", batch, plan=plan)'
        )
    return parts
