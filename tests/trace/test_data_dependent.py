"""Forwards that read the values of tensors into Python are refused at once, in one paragraph that names the line."""

from __future__ import annotations

import functools
import time

import pytest
import torch
from support.eager_runs import PINS, WHOLE, batches, errors, paragraph
from support.effort import every
from torch import Tensor, nn

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.planning.notes import notes


class Model(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.inner, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x)).square().sum()


def halved_until_small(y):
    while y.abs().sum() > 1:
        y = y / 2
    return y


NUMBERS = {
    "item": lambda y: y * y.sum().item(),
    "int": lambda y: y * int(y.sum()),
    "float": lambda y: y * float(y.sum()),
    "if": lambda y: y if y.sum() > 0 else -y,
    "while": halved_until_small,
    "range": lambda y: next(y for _ in range(int(y[0, 0]))),
    "index": lambda y: y[:, int(y[0, 0])],
    "slice": lambda y: y[:, : y[0, 0].long()],
    "in": lambda y: y if 3.0 in y else -y,
    "allclose": lambda y: y if torch.allclose(y, -y) else -y,
    "equal": lambda y: y if y.equal(-y) else -y,
    "tolist": lambda y: y * sum(y.sum(1).tolist()),
    "tolist of rows": lambda y: y * sum(map(sum, y.tolist())),
    "split": lambda y: y.split(y[:, 0].long().tolist())[0],
    "torch._assert": lambda y: torch._assert((y > 0).all(), "positive") or y,
}
SHAPES = {
    "nonzero": lambda y: y[y.sum(1).nonzero()[:, 0]].cumsum(0),
    "unique": lambda y: y * torch.unique(y.detach()).sum(),
    "where": lambda y: y * torch.where(y > 0)[0].sum(),
    "mask": lambda y: y[y > 0].softmax(0),
    "slice of a mask": lambda y: y[y > 0][:3],
    "masked_select": lambda y: y.masked_select(y > 0),
    "repeat_interleave": lambda y: torch.repeat_interleave(y, y[:, 0].long(), 0),
    "bincount": lambda y: y * torch.bincount(y[:, 0].long()).sum(),
}
ROWS = {
    "loop": lambda y: sum(row for row in y),
    "unbind": lambda y: y.unbind()[0],
    "unbind by keyword": lambda y: torch.unbind(input=y)[0],
}
ARRAYS = {
    "numpy": lambda y: y * y.detach().numpy().sum(),
    "asarray": lambda y: y * torch.as_tensor(y.detach().__array__()).sum(),
}
KINDS = {
    "reads": NUMBERS,
    "shape depends on data": SHAPES,
    "batch size as a Python number": ROWS,
    "leaves PyTorch": ARRAYS,
}
REFUSED = {
    name: (function, text) for text, cases in KINDS.items() for name, function in cases.items()
}


@pytest.mark.parametrize("name", every(2, REFUSED))
def test_they_are_refused_by_line(name, capfd):
    function, text = REFUSED[name]
    start = time.perf_counter()
    with pytest.raises(AutoparError, match=text) as refused:
        trace(Model(function), {"x": torch.ones(4, 6)})
    assert "test_data_dependent.py:" in paragraph(refused.value)
    assert time.perf_counter() - start < 10
    said = capfd.readouterr()
    assert "def forward" not in said.out + said.err and "torch/fx" not in said.err, (
        "torch's graph is not printed"
    )


class WithTable(Model):
    """A model with an input that may have rows, or may have as many positions."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return super().forward(x + sum(table))


def test_the_advice_about_inputs_without_rows_names_those_of_the_model():
    inputs = {"x": torch.ones(4, 6), "table": torch.ones(4)}
    with pytest.raises(
        AutoparError, match=r"If 'x' or 'table' has no .*batch_dims=\{'table': None\}"
    ):
        trace(WithTable(lambda y: y), inputs)
    assert trace(WithTable(lambda y: y), inputs, batch_dims={"table": None})
    with pytest.raises(AutoparError, match=r"a loop over its rows$"):
        trace(Model(lambda y: sum(y)), {"x": torch.ones(4, 6)})


def test_a_long_tolist_is_refused_at_once():
    start = time.perf_counter()
    with pytest.raises(AutoparError, match=r"by \.tolist\(\)"):
        trace(
            Model(lambda y: y * sum(y[0].tolist()) * sum(y.expand(2048, 4, 6)[:, 0, 0].tolist())),
            {"x": torch.ones(4, 6)},
        )
    assert time.perf_counter() - start < 10


def test_numbers_that_are_known_at_capture_are_no_hindrance():
    traced = trace(
        Model(lambda y: y * y.shape[0] / y.shape[1] if torch.tensor(True) else -y),
        {"x": torch.ones(4, 6)},
    )
    assert not traced.notes


def test_printed_tensors_are_noted(capfd):
    def talkative(y):
        print("sum", y.sum())
        return y * len(f"{y.mean()} {y.std():.3f}") * 0 + y

    (note, *_more) = notes(trace(Model(talkative), {"x": torch.ones(4, 6)}))
    assert (
        "prints a tensor (test_data_dependent.py:" in note
        and "sum tensor(shape=()" in capfd.readouterr().out
    )


# ------------------------------------------------------------------------------------------------------------------ the advice

ADVICE = {
    "torch.where instead of if": lambda y: torch.where(y.sum(1, keepdim=True) > 0, y, -y),
    "a tensor instead of item": lambda y: y * y.mean(1, keepdim=True),
    "a mask instead of indexing": lambda y: y * (y > 0),
    "x.shape[0] of a batch": lambda y: y / y.shape[0],
}


def build(name: str) -> nn.Module:
    return Model(ADVICE[name])


@pytest.mark.parametrize("name", every(6, ADVICE))
def test_the_advice_is_exact(pool2, name):
    for found in pool2.run(errors, functools.partial(build, name), [*PINS], batches()):
        assert max(found) <= 1, found


def of_sizes() -> nn.Module:
    """Rows that are mixed, and numbers of rows: their root, their maximum with 1 in `linspace`."""
    return Model(
        lambda y: (
            y.softmax(0)
            * torch.linspace(1, 2, y.shape[0], dtype=y.dtype)[:, None]
            / y.shape[0] ** 0.5
        )
    )


def test_roots_and_maxima_of_the_batch_size_are_computed(pool2):
    for found in pool2.run(errors, of_sizes, [*WHOLE], batches()):
        assert max(found) <= 1, found


# ------------------------------------------------------------------------------------------------------------------ graphs of their own

GRAPHS = {
    "cond": lambda y: torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)),
    "cond in a sum": lambda y: y + torch.cond(y.mean() > 1, lambda t: t * 2, lambda t: t - 1, (y,)),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_of_their_own_are_refused_by_line(name):
    with pytest.raises(AutoparError, match=r"torch\.where in the place of torch\.cond") as refused:
        trace(Model(GRAPHS[name]), {"x": torch.ones(4, 6)})
    assert "test_data_dependent.py:" in paragraph(refused.value)
