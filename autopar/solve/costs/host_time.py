"""The time of the host, which issues the kernels of a rank in eager mode."""

from __future__ import annotations

from collections.abc import Mapping
from math import fsum

from autopar.ir.annotated import AnnotatedBlock, AnnotatedModel
from autopar.solve.costs.pipeline_cost import Choices, Stages


def host_s(model: AnnotatedModel, choices: Choices, stages: Stages, ranks: int) -> float:
    """Seconds that the host of the busiest rank needs to issue the kernels of a step. Rank r of
    `ranks` has stages r, r + `ranks`, and so on. 0.0 on CPUs.
    """
    of_classes = [
        _issued_s(block, choice) for block, choice in zip(model.classes, choices, strict=True)
    ]
    of_ranks = (
        fsum(of_classes[model.segments[s]] for stage in stages[rank::ranks] for s in stage)
        for rank in range(ranks)
    )
    return model.num_microbatches * max(of_ranks)


def _issued_s(block: AnnotatedBlock, choice: Mapping[str, str]) -> float:
    """Seconds for one segment of a class and one micro-batch; recomputation issues forward again."""
    strategies = [op.strategy(choice[op.name]) for op in block.ops]
    forward = fsum(s.forward_dispatch_s for s in strategies)
    return (1 + block.recompute) * forward + fsum(s.backward_dispatch_s for s in strategies)
