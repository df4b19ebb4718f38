"""The interface of an engine that checkpoints use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch

from autopar.ir.plan import Plan
from autopar.runtime.state.pieces import Held


class CheckpointSource(Protocol):
    """The attributes and methods of an engine that checkpoints read or set."""

    plan: Plan
    optimizer: torch.optim.Optimizer
    device: torch.device
    steps: int
    seed: int
    loss_scale: Any
    parameters: Any
    averages: Any

    def check_numbers(self) -> None:
        """Raise AutoparError, on every rank, if a buffer has another value than forward has read."""

    def held(self) -> Mapping[str, Held]:
        """This rank's parts of parameters (masters if trained) and persistent buffers, by name."""

    def saved_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of the parameters and persistent buffers that a checkpoint of this engine
        contains, by name. Tied ones have their first name. Tensors without elements are left out.
        """
