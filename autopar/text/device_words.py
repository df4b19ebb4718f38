"""What the devices of a plan are: of each rank of its pipeline, where they are of several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.plan import Plan


def groups_by_rank(plan: Plan, cluster: Cluster) -> tuple[ClusterSpec, ...]:
    """The group of devices of each rank of the pipeline."""
    return tuple(cluster.groups[group] for group in plan.mesh.groups)


def fullest_rank(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """(bytes that it holds, bytes that its device has) of the rank that fills its devices most."""
    if len(cluster.groups) == 1:
        return max(plan.predicted.peak_memory_bytes, default=0), cluster.device.memory_bytes
    ranks = zip(plan.predicted.peak_memory_bytes, groups_by_rank(plan, cluster), strict=True)
    return max(
        ((held, group.device.memory_bytes) for held, group in ranks),
        key=lambda pair: pair[0] / pair[1],
    )


def kinds(names: Sequence[str]) -> str:
    """`2 h100, 3 a100-80g`: how many of each in a row."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(names))
