"""What a candidate fixes, as annotation sees it."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import AxisChoice


@dataclass(frozen=True, slots=True)
class Setting:
    """What a candidate fixes: mesh, sequences per micro-batch and rank, micro-batches, ZeRO stage, recompute, precision, cluster."""

    mesh: MeshShape
    micro_batch: int
    num_microbatches: int
    zero: int
    recompute: str
    precision: str
    cluster: ClusterSpec
    context_method: str | None = None  # of all attention under context parallelism; None: the cheapest of each
    stages_per_rank: int = 1  # of a pipeline
    schedule: str = "none"
    sequence_parallel: bool | None = None  # whether tp shards positions between the matrix products of a block; None: as the solver finds


AxisChoices = list[dict[str, dict[str, AxisChoice]]]
"""For each class and op the choices on the axes that propagation decides."""
