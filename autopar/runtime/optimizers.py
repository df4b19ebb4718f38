"""Optimizers over sharded parameters.

Those that treat every element alone (SGD, Adam, AdamW ...) run on shards as they are.  Others take norms or means of a tensor (Adafactor's
row and column statistics): on DTensors these are sums over ranks, which torch 2.13 leaves pending and then refuses to change in place.
`Summed` adds them up at once.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

ELEMENTWISE = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.Adamax,
    torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip


class Summed(TorchFunctionMode):
    """Within the block, a DTensor result that is a pending sum over some axes is added up."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = function(*args, **(kwargs or {}))
        placements = getattr(result, "placements", ())
        if any(placement.is_partial() for placement in placements):
            from torch.distributed.tensor import Replicate

            return result.redistribute(placements=[Replicate() if placement.is_partial() else placement for placement in placements])
        return result


def summing(optimizer: torch.optim.Optimizer) -> contextlib.AbstractContextManager:
    """A block in which this optimizer steps rightly on DTensors."""
    return contextlib.nullcontext() if type(optimizer) in ELEMENTWISE else Summed()
