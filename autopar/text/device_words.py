"""Which devices the pipeline ranks of a plan have, in a cluster of one or several kinds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from autopar_cost_models.memory_error import FIT_CHANCE, fit_chance, is_sure

from autopar.ir.cluster import Cluster, ClusterSpec
from autopar.ir.cluster_parts import ASSUMED_AS
from autopar.ir.plan import Plan
from autopar.text.units import gib, percent


def groups_by_rank(plan: Plan, cluster: Cluster) -> tuple[ClusterSpec, ...]:
    """For each pipeline rank of the plan, the group of devices that it is on."""
    return tuple(cluster.groups[group] for group in plan.mesh.groups)


def fullest_rank(plan: Plan, cluster: Cluster) -> tuple[int, int]:
    """(peak bytes, bytes of device memory) of the pipeline rank that uses the largest fraction of
    its memory.
    """
    if len(cluster.groups) == 1:
        return max(plan.predicted.peak_memory_bytes, default=0), cluster.device.memory_bytes
    ranks = zip(plan.predicted.peak_memory_bytes, groups_by_rank(plan, cluster), strict=True)
    return max(
        ((held, group.device.memory_bytes) for held, group in ranks),
        key=lambda pair: pair[0] / pair[1],
    )


def assumed_words(cluster: Cluster) -> str:
    """Which devices' efficiencies are assumed for devices of the user's own, as text; '' if none
    are.
    """
    found = (group.device for group in cluster.groups if ASSUMED_AS in group.device.source)
    return "; ".join(
        f"assumed for {device.name}: those of {device.source.rpartition(' ')[2]}, its nearest relative; "
        "measure with autopar calibrate, or state matmul_efficiency and bandwidth_efficiency"
        for device in found
    )


def misfit_chance(plan: Plan, cluster: Cluster) -> float | None:
    """The chance that the plan does not fit its devices, by the measured error of predicted memory
    (`memory_error.fit_chance`). None on CPUs, where no error was measured.
    """
    if cluster.device_type == "cpu":
        return None
    return 1 - fit_chance(*fullest_rank(plan, cluster))


def risk_words(plan: Plan, cluster: Cluster | None) -> str:
    """The first line of an answer whose plan has a chance to fit below `FIT_CHANCE`: the chance, the
    memory, and what to do. '' for others, on CPUs, and if the cluster is unknown (None).
    """
    chance = None if cluster is None else misfit_chance(plan, cluster)
    if cluster is None or chance is None or not (advice := misfit_advice(plan, chance)):
        return ""
    peak, capacity = fullest_rank(plan, cluster)
    held = f"{gib(peak)} of {gib(capacity)} on the fullest device"
    return f"Risk: a chance of {percent(chance)} that the plan does not fit ({held}); {advice}."


def misfit_advice(plan: Plan, chance: float) -> str:
    """What lowers the chance not to fit, as text; '' if the plan is sure to fit (`is_sure`)."""
    if is_sure(1 - chance):
        return ""
    pins = ["recompute=full"] * (plan.recompute != "full")
    pins += ["a smaller micro_batch"] * (plan.micro_batch > 1)
    less = f"; a pin of {' or '.join(pins)} takes less memory" if pins else ""
    return f"--fit {FIT_CHANCE:g} finds a plan with at most {percent(1 - FIT_CHANCE)}{less}"


def kinds(names: Sequence[str]) -> str:
    """Runs of equal names with their counts, as text: `2 h100, 3 a100-80g`."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(names))
