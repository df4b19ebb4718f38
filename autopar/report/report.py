"""The report on a plan. It prints as text and shows as HTML in a notebook. It is saved as a page, a
folder of SVG files, or a trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError
from autopar.explaining.plan_report import PlanFacts, plan_reply
from autopar.report.block_graph import BlockGraph
from autopar.report.chrome_trace import write_trace
from autopar.report.cluster_figure import axis_places
from autopar.report.page import Page, Section
from autopar.report.page_parts import PageParts
from autopar.report.sections import plan_sections
from autopar.report.svg import Svg
from autopar.report.timeline import Timeline
from autopar.report.waterfall import waterfall
from autopar.text.device_words import fullest_rank, misfit_chance
from autopar.text.measured import evidence
from autopar.text.numbers import Numbers
from autopar.text.plan_words import dollars_per_million_tokens


@dataclass(frozen=True)
class Report(PlanFacts):
    """What a plan is, why, and where its time and memory go.

    `print(report)` gives the text of `autopar explain`; a notebook shows the page.

    Attributes:
        timeline: its simulated step. None if it was made without the model; the page then has
            neither timeline nor memory over time.
        graph: the graph of its most frequent block, or None.
    """

    timeline: Timeline | None = None
    graph: BlockGraph | None = None

    def __str__(self) -> str:
        return str(plan_reply(self))

    def __contains__(self, text: str) -> bool:
        return text in str(self)

    def _repr_html_(self) -> str:
        return self.page.framed()

    @cached_property
    def data(self) -> dict[str, Any]:
        """All numbers of the page: the plan as `--json` has it, with `lints`, and `report` for what
        the page derives.
        """
        found = self.facts
        return found | {"report": found["report"] | derived(self)}

    def sections(self, numbers: Numbers) -> list[Section]:
        """The sections of its page; `numbers` looks up `data`."""
        parts = PageParts(self.plan, self.cluster, self.timeline, self.graph, self.command, numbers)
        return plan_sections(parts)

    @cached_property
    def page(self) -> Page:
        """The page."""
        return Page(
            f"{self.plan.model_name} on {self.plan.cluster_name}",
            self.data,
            self.sections(Numbers(self.data)),
            self.plan.cost_model_version,
            "explain",
        )

    def html(self) -> str:
        """The page: one HTML text that needs nothing else."""
        return self.page.html()

    def svgs(self) -> list[Svg]:
        """The figures of the page."""
        return self.page.figures

    def save(self, path: str | Path) -> None:
        """As `Page.save`."""
        self.page.save(path)

    def save_svgs(self, directory: str | Path) -> list[Path]:
        """As `Page.save_svgs`."""
        return self.page.save_svgs(directory)

    def save_trace(self, path: str | Path, every_rank: bool = False) -> int:
        """Write the simulated step as a Chrome trace, compressed if the name ends in .gz, with a
        process for each pipeline rank or for `every_rank`. Returns the number of events.

        Raises AutoparError if the report has no timeline or the trace cannot be written.
        """
        if self.timeline is None:
            raise AutoparError(
                "a trace needs the model: give it to autopar.explain, or run explain MODEL CLUSTER --trace"
            )
        return write_trace(path, self.timeline, self.plan, every_rank)


def derived(report: Report) -> dict[str, Any]:
    """The numbers of a page that are not in the plan, as plain data in SI units."""
    plan, cluster, timeline = report.plan, report.cluster, report.timeline
    found: dict[str, Any] = {
        "devices": plan.mesh.num_devices,
        "waterfall": [
            {
                "part": bar.part,
                "seconds": bar.seconds,
                "share": bar.seconds / plan.predicted.step_time_s,
            }
            for bar in waterfall(plan, timeline)
        ],
    }
    if cluster is not None:
        places = axis_places(plan, cluster)
        found["axes"] = [asdict(place) for place in places]
        peak, limit = fullest_rank(plan, cluster)
        found["full_share"] = peak / limit
        found["misfit_chance"] = misfit_chance(plan, cluster)
        found["dollars"] = dollars_per_million_tokens(plan, cluster)
        if known := evidence(plan, cluster.groups[0].device.name):
            found["accuracy"] = asdict(known)
    if timeline is not None:
        found |= _of_timeline(timeline)
    return found


def _of_timeline(timeline: Timeline) -> Mapping[str, Any]:
    ranks = []
    for rank, memory in enumerate(timeline.memory):
        seconds = timeline.seconds_by_kind(rank)
        peak = memory.peak
        ranks.append(
            {
                "seconds": seconds,
                "idle_share": seconds.get("idle", 0.0) / timeline.step_s,
                "peak_bytes": memory.peak_bytes,
                "predicted_bytes": memory.predicted_bytes,
                "limit_bytes": memory.limit_bytes,
                "peak_share": memory.peak_bytes / memory.limit_bytes,
                "peak_time_s": peak.time_s,
                "parts": asdict(memory.static)
                | {"kept": peak.kept_bytes, "transient": peak.transient_bytes},
            }
        )
    return {
        "step_time_s": timeline.step_s,
        "difference": timeline.step_s / timeline.predicted_s - 1,
        "busiest_rank": timeline.busiest,
        "folded_actions": timeline.folded,
        "ranks": ranks,
    }
