"""What the sections of a plan's page are made from."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.report.block_graph import BlockGraph
from autopar.report.timeline import Timeline
from autopar.text.numbers import Numbers


@dataclass(frozen=True, slots=True)
class PageParts:
    """The parts of a `Report` that its sections show. `numbers` looks up its data."""

    plan: Plan
    cluster: Cluster | None
    timeline: Timeline | None
    graph: BlockGraph | None
    command: str
    numbers: Numbers
