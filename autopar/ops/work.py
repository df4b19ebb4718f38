"""The work of a batch: its tokens, and the FLOPs of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from autopar.ir.traced import TracedModel, per_model
from autopar.ops.dims import at_batch, is_symbolic
from autopar.ops.rules import op_dims
from autopar.ops.values import ops


def positions(vals: Iterable[torch.Tensor], together: int = 1) -> int:
    """Positions per sequence: the size of dim 1 of the first integer tensor with at least 2 dims,
    of which dim 1 does not depend on the batch. 1 if there is none. Inputs of which `together`
    sequences are one row have these in dim 1; the positions of all of them count.
    """
    if together > 1:
        return together * positions(val.flatten(0, 1) for val in vals if val.dim() > 1)
    for val in vals:
        if val.dim() >= 2 and not val.is_floating_point() and not is_symbolic(val.shape[1]):
            return int(val.shape[1])
    return 1


def tokens_per_row(traced: TracedModel) -> int:
    """Positions per sequence of a traced model, by `positions` of its inputs; 1 without tokens."""
    return positions(traced.input_vals, traced.together)


def model_flops(traced: TracedModel, rows: int) -> float:
    """FLOPs of forward and backward of one step without recomputation, for a batch of `rows` rows.
    This is three times the matrix products of the forward. Causal attention counts half, unlike
    in PaLM's convention (Chowdhery et al. 2022, appendix B), which is otherwise the same.
    """
    return 3.0 * sum(count * at_batch(flops, rows) for flops, count in _products(traced))


@per_model(16)
def _products(traced: TracedModel) -> list[tuple[Any, int]]:
    """(FLOPs of one call, symbolic in the batch; number of segments that run it) of each op of each
    block class that multiplies matrices.
    """
    counts = Counter(segment.class_index for segment in traced.segments)
    dims = [
        (op_dims(node), counts[index])
        for index, block in enumerate(traced.classes)
        for node in ops(block.graph)
    ]
    return [
        (own.total_flops(), count) for own, count in dims if own is not None and own.contraction
    ]
