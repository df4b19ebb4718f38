"""Twenty steps of AdamW and of Adafactor under composed plans: loss curve and parameters of one
device, in fp64.

With a learning rate that warms up and decays, weight decay, and clipping by global norm.
`runtime_matrix.py --adamw` runs them. In gpt, the gradient of a key's bias is rounding alone, since
softmax ignores the bias. Adafactor divides this gradient by its size, and the updates of the rest
of the bias by the size of such updates. Even on one device, zeros in place of the rounding move
parameters by 1e-8. gpt therefore takes a larger eps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.api import plan as make_plan
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.launch import WorkerPool
from autopar.verify.verify import (
    Case,
    Setup,
    compare_training,
    free_network,
    make_case,
    relative_error,
)
from benchmarks.exactness.model_zoo import SEQ, ZooModel

STEPS, LIMIT, ROWS, LAYERS, PRECISION = 20, 0.5, 8, 4, "fp64"
WARM_UP = 4
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, weight_decay=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, 2e-2, weight_decay=0.1),
    "adafactor_eps": lambda parameters: torch.optim.Adafactor(
        parameters, 4e-2, eps=(1e-10, 1e-3), weight_decay=0.1
    ),
}


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the check: a model of the zoo, an optimizer of OPTIMIZERS, and the pins of its
    plan.
    """

    model: str
    optimizer: str
    pins: dict[str, Any]

    @property
    def text(self) -> str:
        return f"{self.model} {self.optimizer} " + " ".join(
            f"{name}={value}" for name, value in self.pins.items()
        )


PIPELINE = {"pp": 2, "dp": 2, "tp": 1}
RUNS = (
    Run("autopar-gpt", "adamw", PIPELINE | {"zero": 1, "schedule": "1f1b", "micro_batch": 1}),
    Run(
        "autopar-llama",
        "adamw",
        PIPELINE | {"zero": 2, "schedule": "zero_bubble", "micro_batch": 1},
    ),
    Run(
        "autopar-llama",
        "adamw",
        PIPELINE | {"zero": 3, "schedule": "interleaved_1f1b", "vpp": 2, "micro_batch": 2},
    ),
    Run("autopar-llama", "adamw", {"pp": 1, "dp": 2, "tp": 2, "zero": 1}),
    Run("autopar-moe", "adamw", {"pp": 1, "dp": 4, "tp": 1, "ep": 2, "zero": 0, "micro_batch": 2}),
    Run(
        "autopar-gpt",
        "adamw",
        {"pp": 2, "dp": 1, "tp": 2, "zero": 0, "schedule": "gpipe", "micro_batch": 2},
    ),
    Run("autopar-llama", "adafactor", PIPELINE | {"zero": 1, "schedule": "1f1b", "micro_batch": 1}),
    Run(
        "autopar-llama", "adafactor", PIPELINE | {"zero": 3, "schedule": "gpipe", "micro_batch": 2}
    ),
    Run(
        "autopar-gpt", "adafactor_eps", PIPELINE | {"zero": 1, "schedule": "1f1b", "micro_batch": 1}
    ),
)


@dataclass(frozen=True, slots=True)
class Found:
    """The errors of a run against one device.

    Attributes:
        error: the largest error of a parameter, relative to its update.
        tensor: the parameter that has it.
        loss_error: the largest relative error of a loss.
        clipped: steps in which one device clipped the gradients.
        losses: the losses of one device.
    """

    error: float
    tensor: str
    loss_error: float
    clipped: int
    losses: tuple[float, ...]


def rate(step: int) -> float:
    """The factor of the learning rate in a step, at most 1: linear warm-up, then a cosine to 0."""
    return (
        (step + 1) / WARM_UP
        if step < WARM_UP
        else 0.5 + 0.5 * math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP))
    )


def on_one_device(case: Case, optimizer: str) -> tuple[dict[str, Tensor], tuple[float, ...], int]:
    """Train a copy of the case's model in eager PyTorch. Returns (parameters by name, loss of each
    step, steps that clipped).
    """
    model: nn.Module = copy.deepcopy(case.model)
    trained = OPTIMIZERS[optimizer](model.parameters())
    schedule, losses, clipped = torch.optim.lr_scheduler.LambdaLR(trained, rate), [], 0
    for step in range(STEPS):
        trained.zero_grad()
        loss = model(**case.batches[step % len(case.batches)])
        loss.backward()
        clipped += bool(nn.utils.clip_grad_norm_(model.parameters(), LIMIT) > LIMIT)
        trained.step()
        schedule.step()
        losses.append(loss.item())
    return {name: p.detach() for name, p in model.named_parameters()}, tuple(losses), clipped


def on_a_rank(
    rank: int, setup: Setup, plan_text: str, optimizer: str, after: dict[str, Tensor]
) -> tuple[float, str, list[float]]:
    """Train a rank under a plan (JSON text). Returns (largest error relative to the update against
    `after`, the tensor that has it, loss of each step).
    """
    case = make_case(setup)
    engine = Engine(
        case.model,
        case.traced,
        Plan.from_json(plan_text),
        OPTIMIZERS[optimizer],
        LIMIT,
        None,
        "cpu",
    )
    schedule, losses = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, rate), []
    for step in range(STEPS):
        losses.append(
            float(engine.step(engine.local_batch(case.batches[step % len(case.batches)])))
        )
        schedule.step()
    return *compare_training(case.before, after, engine.full_state_dict(), PRECISION), losses


def run_optimizer(run: Run) -> Found:
    """Train on one device and under the plan, and compare."""
    setup = Setup(ZooModel.of(run.model, LAYERS).spec, PRECISION, 3, SEQ, ROWS)
    case, devices = make_case(setup), math.prod(run.pins[axis] for axis in ("pp", "dp", "tp"))
    plan = make_plan(case.model, free_network(devices), case.batches[0], ROWS, run.pins, precision=PRECISION,
                     traced=case.traced)  # fmt: skip
    after, losses, clipped = on_one_device(case, run.optimizer)
    with WorkerPool(devices) as pool:
        ranks = pool.run(on_a_rank, setup, plan.to_json(), run.optimizer, after)
    error, tensor, _ = max(ranks, key=lambda rank: rank[0])
    loss_error = max(
        relative_error(a, b) for _, _, found in ranks for a, b in zip(found, losses, strict=True)
    )
    return Found(error, tensor, loss_error, clipped, losses)
