"""Small models written as functions of tensors, traced as one block class, for tests of the fusion pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from autopar.api import trace
from autopar.ir.calls import op_name
from autopar.ir.traced import TracedModel
from autopar.trace.fusion.fused import fused

WIDTH = 6


class Written(nn.Module):
    """forward is `compute(x, w, v)` between two layers: x (rows, 3, width) comes from one, vectors w and v (width,) are parameters."""

    def __init__(self, compute: Callable[..., Tensor], width: int = WIDTH) -> None:
        super().__init__()
        self.compute = compute
        self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.w, self.v = (nn.Parameter(torch.randn(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.compute(self.into(x), self.w, self.v)).float().square().mean()


def traced(compute: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> TracedModel:
    """The model of a function, in a dtype."""
    torch.manual_seed(0)
    model = Written(compute).to(dtype)
    return trace(model, {"x": torch.randn(2, 3, WIDTH, dtype=dtype)})


def fused_from(
    compute: Callable[..., Tensor], dtype: torch.dtype = torch.float32, mode: str = "norms"
) -> TracedModel:
    """The model of a function after the pass."""
    return fused(traced(compute, dtype), mode)


def calls(model: TracedModel) -> list[str]:
    """The ops of all classes, in order."""
    return [op_name(n) for c in model.classes for n in c.graph.nodes if op_name(n)]
