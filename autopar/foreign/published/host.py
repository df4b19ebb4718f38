"""The host: a micro-batch takes the longer of the device's time and of the host's, which issues its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.annotate.annotator import annotator_of
from autopar.annotate.setting import Setting
from autopar.ir.annotated import AnnotatedBlock
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.planning.model_facts import as_planned
from autopar.recheck.plan_costs import plan_setting
from autopar.request.plan_request import PlanRequest


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """Seconds of one micro-batch in one segment, forward and backward: of the device and of the
    host.
    """

    device_s: float
    host_s: float


def waiting_s(plan: Plan, traced: TracedModel, request: PlanRequest) -> float:
    """Seconds of a step in which the devices of a plan wait for the host, besides its predicted
    time. `traced` is the captured model, and `request` says the cluster and the software.

    A pipeline rank's micro-batch takes the longer of both times, and the slowest rank sets the pace
    of all micro-batches and of the bubble. Updates of parameters are not counted. 0.0 on CPUs.
    """
    setting = plan_setting(plan, request, plan.recompute, 0)
    if setting.cluster.device.generation == "cpu":
        return 0.0
    times = _segment_times(plan, as_planned(traced, plan), setting)
    ranks = plan.mesh.pp
    stages: Sequence[Sequence[str]] = plan.stages or (tuple(times),)
    by_rank = [
        [times[name] for stage in stages[rank::ranks] for name in stage] for rank in range(ranks)
    ]
    device_s = [sum(one.device_s for one in own) for own in by_rank]
    paced_s = max(
        max(alone_s, sum(one.host_s for one in own))
        for alone_s, own in zip(device_s, by_rank, strict=True)
    )
    chunks = max(len(stages) // ranks, 1)
    turns = plan.num_microbatches + (ranks - 1) / chunks
    return turns * max(paced_s - max(device_s), 0.0)


def _segment_times(plan: Plan, traced: TracedModel, setting: Setting) -> dict[str, SegmentTime]:
    """The time of each segment, by its name."""
    model = annotator_of(traced).annotate(setting)
    priced = [entry for entry in plan.certificate.ledger if entry["part"] == "block"]
    found: dict[str, SegmentTime] = {}
    for block, own, entry in zip(plan.blocks, model.classes, priced, strict=True):
        device_s = entry["forward_s"] + entry["backward_s"]
        found |= dict.fromkeys(block.segments, SegmentTime(device_s, _host_s(own, setting)))
    return found


def _host_s(block: AnnotatedBlock, setting: Setting) -> float:
    """Seconds in which the host issues a micro-batch of a segment of the class."""
    strategies = [op.strategies[0] for op in block.ops]
    seconds = sum(s.forward_dispatch_s + s.backward_dispatch_s for s in strategies)
    slower = setting.software.network_slows_host if _between_nodes(setting) else 0.0
    return seconds * (1 + slower * setting.mesh.tp)


def _between_nodes(setting: Setting) -> bool:
    """Whether some ranks of one pipeline lie on different nodes."""
    mesh, topology = setting.mesh, setting.cluster.topology
    spans = mesh.pp * mesh.stride("pp")
    return mesh.pp > 1 and topology.nodes > 1 and topology.devices_per_node % spans != 0
