"""Recompute: segments that do not keep their activations, as the plan says for each."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from autopar.ir.plan import Plan
from autopar.rewrite.program import Program
from autopar.rewrite.root import module_name


class Recomputed(nn.Module):
    """Runs a segment without keeping its activations; backward runs its forward again.

    `changing`: buffers that forward changes.  The second run reads the values that the first one read.
    """

    def __init__(self, body: GraphModule, changing: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.body, self.changing = body, changing

    def forward(self, *inputs: torch.Tensor) -> Any:
        if not self.changing:
            return checkpoint(self.body, *inputs, use_reentrant=False)
        values = {name: self.body._buffers[name] for name in self.changing}
        return checkpoint(lambda *given: functional_call(self.body, values, given), *inputs, use_reentrant=False)


def segment_of(module: nn.Module) -> GraphModule:
    """The segment itself, whether recomputed or not."""
    return module.body if isinstance(module, Recomputed) else module


def wrap_recomputed(program: Program, plan: Plan) -> None:
    """Put recomputed segments in the place of those that the plan recomputes."""
    for block in plan.blocks:
        if block.recompute == "none":
            continue
        for name in map(module_name, block.segments):
            body = getattr(program.module, name, None)
            if body is None:  # of another rank's stage
                continue
            changing = tuple(p.attribute for p in program.parameters if p.module == name and p.spec.name in program.updates)
            wrapped = Recomputed(body, changing)
            setattr(program.module, name, wrapped)
            for stage in program.stages:
                if hasattr(stage.module, name):
                    setattr(stage.module, name, wrapped)
