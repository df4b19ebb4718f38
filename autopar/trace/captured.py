"""The result of capture."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.ir.traced import ParameterSpec


@dataclass(frozen=True, slots=True)
class Captured:
    """A model and its loss as one flat ATen graph, with what its placeholders stand for.

    `inputs` names the user's tensors, `input_nodes` their placeholders in that order; `attributes`
    maps the placeholder of a parameter, buffer or constant to its name in `parameters` or
    `constants`.  The graph returns the loss and then the new values of the buffers `updates`, which
    forward changes in place.  `notes` says what was captured in another way than it is written.
    `row_dims`: the dim of rows in the user's tensors, where that is not 0; in the graph it is.
    `together`: how many consecutive rows of the user's are one row of the graph, in its dim 1.
    `plain`: Python values of the example batch by flat name.
    """

    graph: torch.fx.Graph
    inputs: tuple[str, ...]
    input_nodes: tuple[str, ...]
    attributes: dict[str, str]
    parameters: dict[str, ParameterSpec]
    constants: dict[str, torch.Tensor]
    updates: tuple[str, ...] = ()
    row_dims: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    together: int = 1
    plain: dict[str, Any] = field(default_factory=dict)
