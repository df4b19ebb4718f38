"""Models trained by `parallelize` on two ranks against eager PyTorch on one: the largest update-relative error over the tolerance."""

from __future__ import annotations

from collections.abc import Callable

import torch
from exactness import moved, run_steps, sgd, train, update_error
from torch import Tensor, nn

import autopar

PINS = {"dp=2": {"dp": 2, "tp": 1}, "tp=2": {"dp": 1, "tp": 2}, "two micro-batches": {"dp": 2, "tp": 1, "micro_batch": 2}}
ROWS, STEPS = 8, 3


def batches(width: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(ROWS, width, dtype=torch.float64, generator=generator)} for _ in range(STEPS)]


def eager(build: Callable[[], nn.Module], data: list[dict[str, Tensor]]):
    """What eager PyTorch makes of the model, on one device."""
    torch.manual_seed(0)
    result = train(build().double(), data)
    assert moved(result) > 1e-3, "training moves the weights"
    return result


def errors(rank: int, build: Callable[[], nn.Module], pins: list[str], data: list[dict[str, Tensor]]) -> list[float]:
    """On one rank: for each pin, the largest error over the tolerance of 1e-9; exact means at most 1."""
    result, found = eager(build, data), []
    for pin in pins:
        torch.manual_seed(0)
        model = build().double()
        engine = autopar.parallelize(model, "cpu:2", data[0], optimizer=sgd, pin=PINS[pin], precision="fp64")
        losses, state = run_steps(engine, data)
        assert all(abs(a - b) <= 1e-9 * abs(b) for a, b in zip(losses, result.losses, strict=True)), (pin, losses, result.losses)
        found.append(update_error(result, state))
    return found
