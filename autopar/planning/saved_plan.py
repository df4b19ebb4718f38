"""Checks that a saved plan belongs to a model and cluster."""

from __future__ import annotations

from collections import Counter

from autopar.errors import AutoparError
from autopar.ir.cluster import Cluster
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.ops.work import tokens_per_row
from autopar.planning.pin_checks import check_fetched
from autopar.planning.plan_model import check_parts, check_segments
from autopar.text.plan_words import other_cluster
from autopar.trace.fusion.fused import fused


def check_plan(plan: Plan, traced: TracedModel, cluster: Cluster) -> None:
    """Raises AutoparError if `plan` was made for another model or cluster, does not cover the
    model, or contradicts itself.
    """
    check_parts(plan)
    if plan.offload == "parameters":
        check_fetched(plan.mesh.pp, plan.zero)
    if plan.model_hash != traced.model_hash:
        raise AutoparError(_other_model(plan, traced))
    if plan.cluster_hash != cluster.spec_hash():
        raise AutoparError(other_cluster(plan, cluster))
    each, dealt = plan.mesh.num_devices // plan.mesh.pp, Counter(plan.mesh.groups)
    sizes = [group.num_devices for group in cluster.groups]
    if len(sizes) > 1 and [dealt[number] * each for number in range(len(sizes))] != sizes:
        raise AutoparError(
            f"the plan's deal={plan.mesh.deal!r} of {each} devices a rank does not deal the groups of {cluster.name}: it was damaged; plan "
            "again"
        )
    if plan.mesh.num_devices != cluster.num_devices:
        raise AutoparError(
            f"the plan's mesh has {plan.mesh.num_devices} devices and {cluster.name} {cluster.num_devices}: it was damaged; plan again"
        )
    check_segments(plan, fused(traced, plan.fusion.mode))


def _other_model(plan: Plan, traced: TracedModel) -> str:
    """What differs between the model of a plan and another one, as text."""
    seq, own = plan.made_for.seq, tokens_per_row(traced)
    if seq and own != seq:
        return (
            f"the plan was made for {plan.model_name} on sequences of {seq} tokens, and this model reads {own}: ask with --seq {seq}, "
            "give example inputs of that length, or plan again"
        )
    return (
        f"the plan was made for {plan.model_name} with structure {plan.model_hash[:12]}; this model has structure "
        f"{traced.model_hash[:12]}: plan again"
    )
