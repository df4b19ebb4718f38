"""Models trained by `parallelize` on two ranks against eager PyTorch on one: the largest update-relative error over the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from support.captures import captured_once
from support.exactness import moved, run_steps, sgd, train_in_place, update_error
from torch import Tensor, nn

import autopar

WHOLE = {
    "dp=2": {"dp": 2, "tp": 1},
    "tp=2": {"dp": 1, "tp": 2},
    "pp=2 of the whole batch": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 8},
}
"""Pins under which each rank's rows are one micro-batch."""
PARTS = {
    "two micro-batches": {"dp": 2, "tp": 1, "micro_batch": 2},
    "pp=2": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4},
}
PINS = WHOLE | PARTS
ROWS, STEPS = 8, 3


class Behind(nn.Module):
    """A model behind two layers, so that it has what the stages of a pipeline need."""

    def __init__(self, model: nn.Module, width: int) -> None:
        super().__init__()
        self.layers, self.model = (
            nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(2)),
            model,
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.model(x)


def batches(width: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(ROWS, width, dtype=torch.float64, generator=generator)}
        for _ in range(STEPS)
    ]


def paragraph(error: Exception) -> str:
    """The message of a refusal, which is one paragraph that a user reads to its end."""
    message = str(error)
    assert "\n" not in message and len(message) <= 700, (len(message), message)
    return message


@captured_once()
def errors(
    rank: int, build: Callable[[], nn.Module], pins: list[str], data: list[dict[str, Tensor]]
) -> list[float]:
    """On one rank: for each pin, the largest error over the tolerance of 1e-9; exact means at most 1.  Under pp the model is `Behind`
    layers."""
    found = []
    for pin in pins:

        def made(pin=pin) -> nn.Module:
            torch.manual_seed(0)
            return (
                Behind(build(), data[0]["x"].shape[1]) if "pp" in PINS[pin] else build()
            ).double()

        result = train_in_place(made(), data)
        assert moved(result) > 1e-3, "training moves the weights"
        engine = autopar.parallelize(
            made(), "cpu:2", data[0], optimizer=sgd, pin=PINS[pin], precision="fp64"
        )
        losses, state = run_steps(engine, data)
        assert all(
            abs(a - b) <= 1e-9 * abs(b) for a, b in zip(losses, result.losses, strict=True)
        ), (pin, losses, result.losses)
        found.append(update_error(result, state))
    return found
