"""Which devices the pipeline ranks of a plan have, in a cluster of one or several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.plan import Plan


def groups_by_rank(plan: Plan, cluster: Cluster) -> tuple[ClusterSpec, ...]:
    """The group of devices of each pipeline rank."""
    return tuple(cluster.groups[group] for group in plan.mesh.groups)


def fullest_rank(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """(bytes used, bytes of device memory) of the pipeline rank with the highest share of memory
    used.
    """
    if len(cluster.groups) == 1:
        return max(plan.predicted.peak_memory_bytes, default=0), cluster.device.memory_bytes
    ranks = zip(plan.predicted.peak_memory_bytes, groups_by_rank(plan, cluster), strict=True)
    return max(
        ((held, group.device.memory_bytes) for held, group in ranks),
        key=lambda pair: pair[0] / pair[1],
    )


def kinds(names: Sequence[str]) -> str:
    """Runs of equal names with counts: `2 h100, 3 a100-80g`."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(names))
