"""Optimizers over sharded parameters.

Those that treat every element alone (SGD, Adam, AdamW ...) run on shards as they are.  Others take norms or means of a tensor (Adafactor's
row and column statistics): on DTensors these are sums over ranks, which torch 2.13 leaves pending and then refuses to change in place.
`Summed` adds them up at once.

What needs more than gradients (a closure), or ops that torch has for whole tensors alone, is refused by name.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autopar.errors import AutoparError

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


def check_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise AutoparError for what is no optimizer, and for one whose step needs a closure."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise AutoparError(f"the optimizer factory returned a {type(optimizer).__name__}, not a torch.optim.Optimizer: pass, for example, "
                           "lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)")  # fmt: skip
    parameters = inspect.signature(optimizer.step).parameters.values()
    if needed := [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        raise AutoparError(f"{type(optimizer).__name__}.step needs {needed[0]}: it runs the model several times a step, which the engine "
                           "does once; use an optimizer that steps on gradients alone, such as AdamW")  # fmt: skip


def step(optimizer: torch.optim.Optimizer) -> None:
    """A step, right on DTensors too.  Raises AutoparError if torch lacks an op of it there."""
    try:
        with contextlib.nullcontext() if type(optimizer) in ELEMENTWISE else Summed():
            optimizer.step()
    except RuntimeError as error:  # NotImplementedError is one
        if "got mixed torch.Tensor and DTensor" in str(error):
            raise AutoparError(f"{type(optimizer).__name__} steps with tensors of its own beside the parameters, which are sharded: have "
                               "it make them like the parameters (torch.zeros_like), or use another optimizer") from error  # fmt: skip
        if "sharding strategy" not in str(error):
            raise
        kind, op = type(optimizer).__name__, next((word for word in str(error).split() if word.startswith("aten.")), "an op")
        raise AutoparError(f"{kind} steps by {op}, which torch {torch.__version__} has for whole parameters alone, and these are sharded: "
                           f"use {kind} without fused=True, or another optimizer") from error  # fmt: skip
