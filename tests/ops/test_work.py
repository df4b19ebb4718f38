"""FLOPs of a model: gradients that are not computed do not count; what rows are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar import api
from autopar.ops.work import model_flops, unit_of_rows


class Net(nn.Module):
    """Two linear layers with a norm between them, and a mean as the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))).square().sum()


ROWS, FIRST, SECOND = 6, 2 * 8 * 16, 2 * 16 * 4


@pytest.mark.parametrize(
    ("frozen", "flops"),
    [
        ((), 2 * FIRST + 3 * SECOND),  # the input gets no gradient
        (("first",), FIRST + 3 * SECOND),
        (("first", "second"), FIRST + 2 * SECOND),  # only the norm trains
        (("second",), 2 * FIRST + 2 * SECOND),
    ],
)
def test_frozen_weights_get_no_gradients(frozen, flops):
    model = Net()
    for name in frozen:
        getattr(model, name).requires_grad_(False)
    traced = api.trace(model, {"x": torch.randn(2, 8)})
    assert model_flops(traced, ROWS) == ROWS * flops


@pytest.mark.parametrize(
    ("shape", "unit"), [((2, 8), "samples"), ((2, 3, 5, 8), "images"), ((2, 3, 8), "samples")]
)
def test_rows_of_numbers(shape, unit):
    assert unit_of_rows(api.trace(Net(), {"x": torch.randn(shape)})) == unit
