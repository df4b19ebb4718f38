"""Losses that divide or weigh by what their whole batch holds, on several ranks and in micro-batches, against one device."""

from __future__ import annotations

import traceback

import pytest
import torch
import torch.nn.functional as F
from support.effort import every, examples
from support.exactness import run_steps, sgd, train, update_error
from torch import Tensor, nn

import autopar

ROWS, SEQ, VOCAB = 8, 6, 8


def each(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


LOSSES = {
    "labels": lambda m, o, y, k: F.cross_entropy(o.flatten(0, 1), y.flatten(), ignore_index=0, weight=m.weights),
    "two masks": lambda m, o, y, k: (each(o, y) * k).mean() / k.mean() + 0.1 * (o.square().sum(-1) * (y > 3)).sum() / (y > 3).sum(),
    "class weights": lambda m, o, y, k: (each(o, y) * m.weights[y]).sum() / m.weights[y].sum().clamp(min=1),
    "frequencies": lambda m, o, y, k: (each(o, y) / F.one_hot(y, VOCAB).sum((0, 1)).clamp(min=1)[y]).sum(),
    "rows": lambda m, o, y, k: (each(o, y).mean(1) * torch.softmax(k.sum(1), 0)).sum() + 0.1 * o.square().mean(),
    "places": lambda m, o, y, k: (each(o, y).sum(1) * torch.arange(y.shape[0]) / y.shape[0]).sum() / (y.shape[0] + 1),
    "penalty": lambda m, o, y, k: (each(o, y) * k).sum() / torch.maximum(k.sum(), k.new_ones(())) + 0.01 * m.head.weight.square().sum(),
    "above the mean": lambda m, o, y, k: (each(o, y) * (k > k.mean())).sum() / (k > k.mean()).sum() + 0.5,
}  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.embed, self.head = name, nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.register_buffer("weights", torch.linspace(0.3, 2, VOCAB))

    def forward(self, ids: Tensor, labels: Tensor, kept: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return LOSSES[self.name](self, self.head(x), labels, kept)


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    return Model(name).double()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(2):
        ids, labels = (torch.randint(VOCAB, (ROWS, SEQ), generator=generator) for _ in range(2))
        kept = torch.rand(ROWS, SEQ, generator=generator, dtype=torch.float64)
        found.append(
            {
                "ids": ids,
                "labels": labels,
                "kept": kept * (kept > torch.linspace(0.1, 0.9, ROWS)[:, None]),
            }
        )
    return found


def errors(rank: int, devices: int, pins: list[dict], step: int = 1) -> dict[str, float | str]:
    """The update error over its tolerance of each `step`-th loss under each pin, or the traceback."""
    found: dict[str, float | str] = {}
    for name in [*LOSSES][::step]:
        reference = train(model_of(name), batches())
        for pin in pins:
            try:
                engine = autopar.parallelize(
                    model_of(name), f"cpu:{devices}", batches()[0], sgd, pin=pin, precision="fp64"
                )
                losses, state = run_steps(engine, batches())
                found[f"{name} {pin}"] = update_error(reference, state)
                assert losses == pytest.approx(reference.losses, rel=1e-11), (name, pin)
            except Exception:
                found[f"{name} {pin}"] = traceback.format_exc()
    return found


def check(results: list[dict[str, float | str]]) -> None:
    for result in results:
        for name, error in result.items():
            assert isinstance(error, float) and error <= 1, f"{name}: {error}"


@pytest.mark.parametrize(
    "pin", every(2, [{"dp": 2, "micro_batch": 2}, {"pp": 2, "micro_batch": 4}])
)
def test_two_ranks_divide_and_weigh_as_one_device_does(pool2, pin):
    check(pool2.run(errors, 2, [pin], examples(4, 1)))


@pytest.mark.slow
def test_four_ranks_divide_and_weigh_as_one_device_does(pool4):
    check(pool4.run(errors, 4, [{"dp": 2, "tp": 2, "micro_batch": 1}]))


@pytest.mark.slow
def test_four_ranks_divide_and_weigh_under_every_axis(pool4):
    pins = [
        {"dp": 4, "zero": 3, "micro_batch": 1},
        {"dp": 2, "pp": 2, "micro_batch": 2},
        {"cp": 2, "dp": 2, "micro_batch": 2},
    ]
    check(pool4.run(errors, 4, [*pins, {"tp": 2, "pp": 2, "micro_batch": 4}]))
