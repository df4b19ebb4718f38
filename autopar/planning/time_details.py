"""What the busiest device does in a step, op by op: compute, and which communication is not hidden."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel, AnnotatedOp, Strategy
from autopar.solve.costs.placement_cost import Choices
from autopar.text.layout_words import is_experts

DETAILS = ("forward", "backward", "recompute", "experts", "parameters", "inside")
"""Keys of `time_details`, in the order of a report."""


def time_details(
    model: AnnotatedModel, choices: Choices, stages: Sequence[Sequence[int]], ranks: int
) -> dict[str, float]:
    """Seconds of a step by part, on the device of the pipeline rank whose ops take the longest.
    Layout changes between ops are not among them. Parts without time are left out.

    Args:
        model: the annotated model.
        choices: the strategy of each op, by block class.
        stages: the segments of each stage.
        ranks: the number of pipeline ranks.

    Returns:
        By key of `DETAILS`: compute of forward, of backward and of recomputation, all-to-all of
        experts, gathers of parameters, and other communication inside ops.
    """
    of_class = [_parts(block, choice) for block, choice in zip(model.classes, choices, strict=True)]
    of_rank = []
    for rank in range(ranks):
        mine = [model.segments[s] for stage in stages[rank::ranks] for s in stage]
        of_rank.append({key: sum(of_class[index][key] for index in mine) for key in DETAILS})
    longest = max(of_rank, key=lambda parts: sum(parts.values()))
    return {key: model.num_microbatches * value for key, value in longest.items() if value > 0}


def _parts(block: AnnotatedBlock, choice: dict[str, str]) -> dict[str, float]:
    """Seconds of a micro-batch by part, in one segment of a class."""
    found = dict.fromkeys(DETAILS, 0.0)
    for op in block.ops:
        strategy = op.strategy(choice[op.name])
        comm_s = strategy.forward_comm_s + strategy.backward_comm_s
        found["forward"] += strategy.forward_s - strategy.forward_comm_s
        found["recompute"] += strategy.rerun_s
        found["backward"] += _backward_s(strategy)
        found[_communicates(op)] += comm_s
    return found


def _communicates(op: AnnotatedOp) -> str:
    """The key of the communication of an op."""
    if op.kind == "parameter":
        return "parameters"
    return "experts" if is_experts(op.name) else "inside"


def _backward_s(strategy: Strategy) -> float:
    return max(strategy.backward_s - strategy.backward_comm_s - strategy.rerun_s, 0.0)
