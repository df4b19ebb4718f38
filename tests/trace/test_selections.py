"""Boolean indexing as arithmetic with a mask: the same values and gradients, whichever rows are selected."""

from __future__ import annotations

import pytest
import torch
from support.effort import every
from support.spelled_graphs import assert_computes_the_same
from torch import Tensor, nn

MASKS = {
    "some": lambda x: x > 0,
    "none": lambda x: x > 100,
    "all": lambda x: x < 100,
    "whole rows": lambda x: (x.sum((1, 2), keepdim=True) > 0).expand_as(x),
}


def written(x: Tensor, mask: Tensor) -> Tensor:
    out = x * 1
    out[mask] = x[mask].exp() * 0.1
    return out


def filled(x: Tensor, mask: Tensor) -> Tensor:
    out = x * 1
    out[mask] = 0.25
    return out


def added(x: Tensor, mask: Tensor) -> Tensor:
    row, _, channel = torch.where(mask)
    first = torch.zeros(x.shape[0], 4, dtype=x.dtype)
    return first.index_put((row, channel), x[mask].sin(), accumulate=True)


def rows_of_pairs(x: Tensor, mask: Tensor) -> Tensor:
    row, place = (mask.sum(-1) > 1).nonzero().unbind(1)
    return x.index_put((row, place), x[row, place].cumsum(-1), accumulate=True)


def middle(x: Tensor, mask: Tensor) -> Tensor:
    place = mask[0, :, 0].nonzero().squeeze(-1)
    return x.index_copy(1, place, x[:, place].softmax(-1) * x[:, place, :1])


FUNCTIONS = {
    "written": written,
    "filled": filled,
    "added": added,
    "rows of pairs": rows_of_pairs,
    "a dim that is no batch": middle,
    "singular elsewhere": lambda x, mask: x[mask & (x > 0)].log().sum() + (x * mask),
    "sums of a dim": lambda x, mask: x[mask[..., 0]].sum(0) * x.square().sum(),
    "outer dims": lambda x, mask: (
        x[mask[..., 0]].unsqueeze(1).expand(-1, 2, 4).flatten(1).sum() * x
    ),
}


class Model(nn.Module):
    def __init__(self, function, mask) -> None:
        super().__init__()
        self.function, self.mask = function, mask

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.mask(x)).sin().sum()


@pytest.mark.parametrize("mask", every(len(MASKS), MASKS))
@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients_are_the_same(name, mask):
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_computes_the_same(Model(FUNCTIONS[name], MASKS[mask]), x)


@pytest.mark.parametrize("mask", ["some", "all"])
def test_means(mask):
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    both = lambda x, mask: x[mask].mean() * x + x[mask[..., 0]].mean()  # noqa: E731
    assert_computes_the_same(Model(both, MASKS[mask]), x)
