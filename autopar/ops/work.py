"""The work of a batch: its tokens, and the FLOPs of the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from autopar.ir.traced import TracedModel, per_model
from autopar.ops.dims import OpDims, at_batch, is_symbolic, operands
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


def unit_of_rows(traced: TracedModel) -> str:
    """What `tokens_per_row` counts: 'tokens', 'images' for models of pixels (an input with rows,
    channels, height and width), otherwise 'samples'.
    """
    if tokens_per_row(traced) > 1:
        return "tokens"
    pixels = any(val.dim() == 4 and val.is_floating_point() for val in traced.input_vals)
    tokens = any(val.dim() == 2 and not val.is_floating_point() for val in traced.input_vals)
    return "images" if pixels else "tokens" if tokens else "samples"


def model_flops(traced: TracedModel, rows: int) -> float:
    """FLOPs of forward and backward of one step without recomputation, for a batch of `rows` rows.
    They are the matrix products of the forward, and as many again for each factor with a gradient.
    Frozen weights, and what is before the first trained one, get none. Causal attention counts
    half. Otherwise this is PaLM's convention (Chowdhery et al. 2022, appendix B).
    """
    return sum(count * at_batch(flops, rows) for flops, count in _products(traced))


@per_model(16)
def _products(traced: TracedModel) -> list[tuple[Any, int]]:
    """(FLOPs of one call with its backward, symbolic in the batch; number of segments that run it)
    of each op of each block class that multiplies matrices.
    """
    counts = Counter(segment.class_index for segment in traced.segments)
    return [
        (dims.total_flops() * (1 + _gradients(node, dims)), counts[index])
        for index, block in enumerate(traced.classes)
        for node in ops(block.graph)
        if (dims := op_dims(node)) is not None and dims.contraction
    ]


def _gradients(node: Node, dims: OpDims) -> int:
    """How many products of its size the backward of a call has: one for the first factor, and one
    for the others, if they get gradients.
    """
    grads = [
        bool(each.meta.get("grad"))
        for place, each in enumerate(operands(node))
        if place not in dims.additive
    ]
    return sum((any(grads[:1]), any(grads[1:])))
