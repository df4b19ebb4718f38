"""State that the optimizer's factory put into the optimizer, such as by `load_state_dict`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

if TYPE_CHECKING:
    from autopar.runtime.state.parameters import Parameters


def shard_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter], parameters: Parameters
) -> None:
    """Cut whole tensors in the state of sharded parameters as these are. `trained` has what the
    factory was given, by name. Raises AutoparError for a tensor of another shape.
    """
    for name, parameter in trained.items():
        spec = getattr(parameter, "_spec", None)
        if spec is None or parameter not in optimizer.state:
            continue
        state = optimizer.state[parameter]
        for key, value in state.items():
            if not isinstance(value, Tensor) or not value.dim() or hasattr(value, "_spec"):
                continue
            if value.shape != parameter.shape:
                raise AutoparError(
                    f"the factory put a state {key} of shape {tuple(value.shape)} into the optimizer for {name}, of which ranks hold "
                    "parts. Load the state with engine.load_optimizer_state_dict after parallelize"
                )
            from torch.distributed.tensor import DTensor

            part = parameters.holding.cuttings[name].part(value, parameters.holding.axes)
            state[key] = DTensor.from_local(
                part.clone(memory_format=torch.contiguous_format),
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
