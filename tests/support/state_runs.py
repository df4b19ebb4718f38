"""Models whose forward changes buffers and frozen parameters, trained under a plan and by eager PyTorch with the same micro-batches."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from support.exactness import Reference, run_steps, update_error
from torch import Tensor, nn

import autopar

ROWS, WIDTH, STEPS = 8, 6, 3
PINS = {
    "one device": {},
    "two micro-batches": {"micro_batch": 4},
    "dp=2": {"dp": 2, "tp": 1},
    "dp=2, two micro-batches": {"dp": 2, "tp": 1, "micro_batch": 2},
    "tp=2": {"dp": 1, "tp": 2},
    "ZeRO 3": {"dp": 2, "tp": 1, "zero": 3},
    "recomputation": {"dp": 2, "tp": 1, "recompute": "full"},
    "pp=2": {"pp": 2, "dp": 1, "tp": 1, "micro_batch": 4},
}
"""Pins, by what they show. The first two are for one device."""

Change = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""`change(model, x, y)` is a part of forward. It changes state and returns y or more."""


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


class Stateful(nn.Module):
    """Two layers, a layer `child` with a buffer `kept`, a frozen `teacher`, buffers `center` and `other`, then `change`, and a head."""

    def __init__(self, change: Change, setup: Callable[[nn.Module], object] | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)
        )
        self.child, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.teacher.requires_grad_(False)
        self.double()  # before buffers are tied, which a cast would undo
        ramp = torch.linspace(0.1, 1, WIDTH, dtype=torch.float64)
        self.register_buffer("center", ramp)
        self.register_buffer("other", ramp + 1)
        self.child.register_buffer("kept", ramp * 2)
        if setup is not None:
            setup(self)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        return self.head(self.change(self, x, self.child(y))).square().mean()


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        {"x": torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator)}
        for _ in range(STEPS)
    ]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = build().double()
    torch.set_rng_state(state)
    return model


def eager(model: nn.Module, dp: int = 1, number: int = 1) -> Reference:
    """Three steps of eager PyTorch, in place. Micro-batch m is the union of the ranks' m-th micro-batches."""
    before = {k: v.clone() for k, v in model.state_dict().items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = sgd(trained), []
    rows = torch.arange(ROWS).view(dp, number, -1).transpose(0, 1).flatten(1)
    for batch in batches():
        optimizer.zero_grad()
        total = 0.0
        for chosen in rows:
            loss = model(**{k: v[chosen] for k, v in batch.items()}) / number
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        losses.append(total)
    return Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()})


def engine(model: nn.Module, pin: dict, devices: int) -> autopar.Engine:
    return autopar.parallelize(
        model,
        f"cpu:{devices}",
        batches()[0],
        optimizer=sgd,
        pin=pin,
        precision="fp64",
        allow_micro_batch_mean=True,
    )


def micro_batches(pin: dict) -> tuple[int, int]:
    """(data-parallel ranks, micro-batches) under a pin."""
    dp = pin.get("dp", 1)
    return dp, ROWS // dp // pin.get("micro_batch", ROWS // dp)


def error(model: nn.Module, pin: dict, devices: int, result: Reference | None = None) -> float:
    """The largest update-relative error of a parameter, a buffer or the loss over the tolerance of 1e-9; exact means at most 1. `result`
    is that of eager PyTorch; by default it is computed here."""
    dp, number = micro_batches(pin)
    result = eager(copy.deepcopy(model), dp, number) if result is None else result
    pin = pin | {"micro_batch": ROWS // dp // number}
    losses, state = run_steps(engine(model, pin, devices), batches())
    assert set(state) == set(result.after)
    pairs = zip(losses, result.losses, strict=True)
    of_losses = max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs) / 1e-9
    whole = {k: v for k, v in result.after.items() if not v.is_floating_point()}
    assert all(torch.equal(state[k], v) for k, v in whole.items())
    return max(update_error(result, state), of_losses)
