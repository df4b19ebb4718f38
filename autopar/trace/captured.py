"""The result of capture."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopar.ir.traced import ParameterSpec


@dataclass(frozen=True, slots=True)
class Captured:
    """A flat ATen graph with the names of its tensors.

    `inputs` names the user's tensors, and `input_nodes` their placeholders in the same order.
    `attributes` maps the placeholder of a parameter, buffer or constant to its name in `parameters`
    or `constants`. The graph returns the loss and then the new values of the buffers `updates`,
    which forward changes in place. `notes` tell the user what was captured differently from how it
    is written.
    """

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    input_nodes: tuple[str, ...]
    attributes: dict[str, str]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, torch.Tensor]
    updates: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
