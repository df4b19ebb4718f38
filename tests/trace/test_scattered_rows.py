"""masked_scatter as a gather within each row: the same values and gradients, and a check of the numbers of places."""

from __future__ import annotations

import pytest
import torch
from support.spelled_graphs import assert_computes_the_same
from torch import Tensor, nn

from autopar.ir.calls import op_name

B, S, H, K = 5, 6, 4, 2


def tokens(x: Tensor) -> Tensor:
    """K marked places in every row, in another order."""
    return x[..., 0].argsort(1).argsort(1) < K


FORMS = {
    "dims that broadcast": lambda x, f: x.masked_scatter(tokens(x).unsqueeze(-1), f),
    "expanded": lambda x, f: x.masked_scatter(tokens(x).unsqueeze(-1).expand_as(x), f),
    "features of all rows in one dim": lambda x, f: x.masked_scatter(
        tokens(x).unsqueeze(-1), f.flatten(0, 1)
    ),
    "elements": lambda x, f: x.masked_scatter(x.argsort(-1).argsort(-1) < 2, x.sin()[..., :2]),
    "a place a row": lambda x, f: x[..., 0].masked_scatter(x[..., 1].argsort(1).argsort(1) < 1, f[:, 0, 0]),
}  # fmt: skip


def deep_stack(x: Tensor, f: Tensor) -> Tensor:
    """Features are added to the marked rows, as DeepStack of Qwen3-VL does."""
    marked, x = tokens(x), x.clone()
    x[marked, :] = x[marked, :] + f.flatten(0, 1)
    return x


def gated(x: Tensor, f: Tensor) -> Tensor:
    """Marked rows, scaled by features that come first."""
    marked = tokens(x)
    return x.index_put((marked,), f.flatten(0, 1).sigmoid() * x[marked])


FORMS |= {"deep stack": deep_stack, "gated": gated}


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, x[:, :K].cos()).sin().sum()


def example() -> Tensor:
    return torch.randn(B, S, H, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_are_the_same(form):
    graph = assert_computes_the_same(Model(FORMS[form]), example())
    names = set(map(op_name, graph.nodes))
    assert "autopar::row_places" in names and "aten::masked_scatter" not in names


def test_sources_without_rows_and_with_a_value_for_each_place_stay():
    for function in (
        lambda x, f: x.masked_scatter(x > 0, x.cos()),
        lambda x, f: x.masked_scatter(x > 0, torch.ones(1000, dtype=x.dtype)),
    ):
        assert_computes_the_same(Model(function), example())


@pytest.mark.parametrize("marked", [[1, 2, 2], [3, 2, 1], [2, 2, 3], [0, 0, 0]])
def test_other_numbers_of_places_are_refused(marked):
    mask = torch.arange(4) < torch.tensor(marked).unsqueeze(1)
    with pytest.raises(ValueError, match="features of 2 tokens a row"):
        torch.ops.autopar.row_places(mask, 2)
