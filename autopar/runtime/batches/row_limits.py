"""Rescales rows of embedding tables before forward, which `max_norm` asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.traced import RowLimit
from autopar.rewrite.collectives.patterns import Split, pick
from autopar.rewrite.collectives.primitives import apply_primitive
from autopar.runtime.batches.step_values import evaluate_values
from autopar.runtime.state.parameters import Parameters

_LEAST = 1e-7
"""What torch.embedding_renorm_ adds to a norm before it divides by it."""


class RowLimits:
    """The embedding tables of a model whose rows each step rescales before forward."""

    def __init__(self, limits: Sequence[RowLimit], parameters: Parameters) -> None:
        self.limits, self.parameters = limits, parameters
        self.device = parameters.holding.device

    @torch.no_grad()
    def apply(self, inputs: Sequence[Mapping[str, Tensor]], rows: int) -> None:
        """Rescale the rows that a batch reads. `inputs` are the graph's inputs of each micro-batch
        of this rank, `rows` those of one micro-batch. Every rank must call it.
        """
        for limit in self.limits:
            read = torch.zeros(limit.rows, dtype=torch.int32, device=self.device)
            for given in inputs:
                (ids,) = evaluate_values(limit.ids, {"input": given}, rows, self.device)
                read[ids.reshape(-1)] = 1
            if dist.is_initialized() and dist.get_world_size() > 1:
                dist.all_reduce(read, dist.ReduceOp.MAX)
            if limit.name in self.parameters.leaves:
                self._rescale(limit, read > 0)

    def _rescale(self, limit: RowLimit, read: Tensor) -> None:
        """Rescale this rank's part of the rows that `read` (rows,) marks, in place."""
        if limit.name in self.parameters.wholes:
            raise AutoparError(
                f"the embedding table {limit.name!r} has max_norm, and the optimizer updates it whole on one rank: train it by an "
                "optimizer that updates element by element, such as torch.optim.SGD or AdamW"
            )
        table = self.parameters.whole(limit.name)
        norms = torch.linalg.vector_norm(table, limit.norm_type, dim=1)
        for group, split in self.parameters.holding.cuttings[limit.name].splits:
            if split.dim == 0:
                read = pick(read, split, group.size, group.index)
            else:  # columns: the norm of the norms of all ranks' parts
                parts = apply_primitive("all_gather", norms[None], group, Split(0, group.size))
                norms = torch.linalg.vector_norm(parts, limit.norm_type, dim=0)
        factors = (limit.max_norm / (norms + _LEAST)).masked_fill(
            ~read | (norms <= limit.max_norm), 1.0
        )
        self.parameters.rescale(limit.name, factors[:, None].expand_as(table))
