"""Inputs whose rows are not along dim 0, and inputs without rows that are as long as the batch."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from support.exactness import run_steps, sgd, train, update_error
from torch import Tensor, nn

import autopar
from autopar.api import trace, trace_spec
from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.rows import row_dims

ROWS, STEPS = 4, 4
DIMS = {"frames": 1, "places": None}


class Recurrent(nn.Module):
    """Frames are (steps, rows, width), as torch.nn.LSTM has them; places, one a step, belong to no row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, frames: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        state = torch.zeros_like(frames[0])
        for frame, place in zip(frames, self.embed(places), strict=True):
            state = torch.tanh(self.inner(state) + frame + place)
        return F.cross_entropy(self.head(state), labels)


class Reversed(Recurrent):
    """The loss adds up what each row has, and places that it takes for those of rows."""

    def forward(self, frames: Tensor, labels: Tensor, places: Tensor) -> Tensor:
        state = torch.tanh(self.inner(frames.mean(0)))
        return F.cross_entropy(self.head(state), labels) + self.embed(places).square().mean()


def model_of(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "frames": torch.randn(STEPS, ROWS, 4, generator=generator, dtype=torch.float64),
            "labels": torch.randint(5, (ROWS,), generator=generator),
            "places": torch.arange(STEPS),
        }
        for _ in range(2)
    ]


def trained(rank: int, devices: int, kind: type[nn.Module], dims: dict | None, pin: dict) -> float:
    """The update error over its tolerance; every rank cuts its rows out of the whole batch."""
    reference = train(model_of(kind), batches())
    engine = autopar.parallelize(
        model_of(kind),
        f"cpu:{devices}",
        batches()[0],
        sgd,
        pin=pin,
        batch_dims=dims,
        global_batch=ROWS,
    )
    losses, state = run_steps(engine, batches())
    assert losses == pytest.approx(reference.losses, rel=1e-11)
    return update_error(reference, state)


@pytest.mark.parametrize("kind", [Recurrent, Reversed])
def test_rows_along_another_dim_are_exact_in_micro_batches(kind):
    assert trained(0, 1, kind, DIMS, {"micro_batch": 2}) <= 1


def test_rows_along_another_dim_are_exact_over_two_ranks(pool2):
    for pin in ({"dp": 2, "micro_batch": 1}, {"tp": 2, "micro_batch": 2}):
        assert max(pool2.run(trained, 2, Recurrent, DIMS, pin)) <= 1


def test_what_is_taken_for_rows_by_chance_is_exact_or_refused_by_name(pool2):
    dims = {"frames": 1}  # places has as many entries as the batch has rows
    with pytest.raises(
        AutoparError, match=r"zip\(frames, self.embed\(places\).*say so by its name, as batch_dims="
    ):
        trace(Recurrent(), batches()[0], batch_dims=dims)
    assert trained(0, 1, Reversed, dims, {"micro_batch": 2}) <= 1
    assert max(pool2.run(trained, 2, Reversed, dims, {"dp": 2, "micro_batch": 1})) <= 1


def test_a_batch_of_other_rows_is_refused_by_name():
    engine = autopar.parallelize(Reversed(), "cpu:1", batches()[0], sgd, batch_dims={"frames": 1})
    batch = batches()[0]
    batch["frames"], batch["labels"] = batch["frames"][:, :2], batch["labels"][:2]
    with pytest.raises(AutoparError, match=r"frames 2, labels 2, places 4; .*batch_dims"):
        engine.step(batch)


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ({"frame": 1}, "names 'frame', and the batch has frames, labels, places"),
        ({"frames": 3}, "no dim of 'frames', which has 3"),
        ({"frames": "1"}, "no dim of 'frames'"),
        ({"frames": 2, "labels": 0, "places": 0}, None),
        ({"frames": 0, "labels": 0, "places": None}, None),
        (dict.fromkeys(("frames", "labels", "places")), "has no rows as batch_dims says"),
    ],
)
def test_dims_that_do_not_fit_are_refused(dims, words):
    tensors = batches()[0]
    if words is None:
        assert row_dims(tensors, dims) == dims
        return
    with pytest.raises(AutoparError, match=words):
        row_dims(tensors, dims)
    tensors["labels"] = tensors["labels"][:3]
    with pytest.raises(AutoparError, match="dim 0 of 'labels' is the batch, and it has 3 rows"):
        row_dims(tensors, {"frames": 1, "labels": 0})


def build() -> tuple[nn.Module, dict[str, Tensor], dict[str, int | None]]:
    return Recurrent(), batches()[0], DIMS


def test_a_function_for_the_command_line_says_where_rows_are(monkeypatch):
    monkeypatch.setitem(sys.modules, "recurrent", sys.modules[__name__])
    spec = parse_model("recurrent:build")
    inputs = spec.example_inputs(6, 1, "cpu")
    assert inputs["frames"].shape == (STEPS, 6, 4) and len(inputs["places"]) == STEPS
    traced = trace_spec(spec, 1)
    assert traced.row_dims == {"frames": 1} and len(traced.input_vals[2]) == STEPS
