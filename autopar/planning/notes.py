"""The notes of a plan about the model."""

from __future__ import annotations

from collections import Counter

from autopar.ir.calls import is_attention
from autopar.ir.traced import TracedModel, per_model
from autopar.ops.experts import ROUTED_EXPERTS
from autopar.ops.random import draws_otherwise, drops
from autopar.ops.rules import op_dims
from autopar.ops.values import ops
from autopar.planning.model_facts import calls_of


@per_model(16)
def notes(traced: TracedModel, mean: bool = False) -> tuple[str, ...]:
    """Notes for the user on this model, one sentence each: remarks of the capture, ops without a
    rule, and what is not exact. `mean`: the user allows micro-batches whose losses do not add up.
    Cached for each model.
    """
    found = list(traced.notes)
    ruleless: dict[str, int] = {}
    explicit, random = 0, set()
    counts = Counter(segment.class_index for segment in traced.segments)
    for index, block in enumerate(traced.classes):
        for node in ops(block.graph):
            if op_dims(node) is None:
                ruleless[str(node.target)] = ruleless.get(str(node.target), 0) + counts[index]
            if is_attention(node):
                explicit += counts[index] * drops(node)
            if draws_otherwise(node):
                random.add(str(node.target))
    if ruleless:
        found.append(
            "ops without a rule run replicated: "
            + ", ".join(f"{name} x{count}" for name, count in sorted(ruleless.items()))
        )
    if explicit:
        found.append(
            f"attention that drops probabilities x{explicit} runs unfused: exact, but it keeps batch x heads x queries x keys "
            "probabilities for backward; a model without dropout inside attention needs far less memory"
        )
    norms = [name for name in traced.updates if name.endswith("running_var")]
    others = [
        name
        for name in traced.updates
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))
    ]
    if others:
        found.append(
            f"forward changes {', '.join(others)}: after every micro-batch of training; eval_step leaves them"
        )
    if norms:
        found.append(
            f"batch norm (and instance norm with running statistics) x{len(norms)} takes statistics over one "
            "micro-batch of all data-parallel ranks: equal to one device that runs "
            "the same micro-batches, not to one that runs the whole batch at once"
        )
    if random:
        found.append(
            f"{', '.join(sorted(random))} draw other random numbers than one device would: equal in distribution, not exactly"
        )
    capacity = {
        call.arg("capacity_factor")
        for call in calls_of(traced, ROUTED_EXPERTS)
        if call.arg("capacity_factor")
    }
    if capacity:
        found.append(
            f"experts have a capacity factor of {', '.join(map(str, sorted(capacity)))}: choices beyond it are dropped, counted over each "
            "rank's tokens of a micro-batch, so that losses differ from one device's"
        )
    return (*found, *split_notes(traced, mean))


def split_notes(traced: TracedModel, mean: bool) -> tuple[str, ...]:
    """Notes on quantities that are computed for each micro-batch instead of the whole batch. If
    micro-batch losses do not add up, a note says why the batch is not split, or with `mean` that
    they are averaged. () if neither applies.
    """
    split, found = traced.split, []
    if not split.joins:
        what = (
            "micro-batch losses are averaged, as allow_micro_batch_mean=True says, though"
            if mean
            else "the batch is not split, since"
        )
        found.append(f"{what} {split.reason}")
    if split.by_convention:
        found.append(
            f"{' and '.join(split.by_convention)} are those of each micro-batch, as is the field's convention"
        )
    return tuple(found)
