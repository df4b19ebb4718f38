"""Training under ZeRO stages against one device, of usual models and of one with odd parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support.exactness import (
    Reference,
    case,
    engine_for,
    run_steps,
    setting,
    sgd,
    solved_plan,
    token_batches,
    update_error,
)
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine


def plans_for(
    name: str, meshes: tuple[MeshShape, ...], zeros=(1, 2, 3), cuts=(1, 2), recompute: str = "none"
) -> list[Plan]:
    found = case(name)
    plans = []
    for mesh in meshes:
        for cut in cuts:
            solved = solved_plan(found.traced, found.annotator, setting(mesh, cut, recompute))
            plans += [replace(solved, zero=zero) for zero in zeros]
    return plans


def trained(
    rank: int, name: str, texts: list[str], max_grad_norm: float | None = None
) -> list[tuple[list[float], dict[str, Tensor]]]:
    return [
        run_steps(engine_for(name, Plan.from_json(text), max_grad_norm), case(name).batches)
        for text in texts
    ]


def check(pool, result, name: str, plans: list[Plan], max_grad_norm: float | None = None) -> None:
    for by_rank in pool.run(
        trained, name, [plan.to_json() for plan in plans], max_grad_norm, timeout_s=300
    ):
        for plan, (losses, state) in zip(plans, by_rank, strict=True):
            error = update_error(result, state)
            assert error <= 1.0, (
                f"zero={plan.zero} {plan.mesh} x{plan.num_microbatches}: update error {error:g} times the tolerance"
            )
            assert losses == pytest.approx(result.losses, abs=1e-9, rel=1e-9)


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a scalar, tied, frozen, unused and shared parameters, a buffer, and a block whose result is a
    view of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 10)
        self.start = nn.Parameter(torch.randn(1, 1, 10))
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))
        self.blocks[1].down.weight = self.blocks[0].down.weight
        self.head = nn.Linear(10, 9, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(3, 3)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 10))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.shift
        for block in self.blocks:
            x = block(x + self.start.expand(x.shape[0], 1, 10))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class OddBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 7), nn.Linear(7, 10, bias=False)
        self.gain, self.small, self.fixed = (
            nn.Parameter(torch.randn(size)) for size in ((), (3, 1), (10,))
        )
        self.fixed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return (
            x + self.down(torch.tanh(self.up(x * self.fixed))) * self.gain + self.small.pow(2).sum()
        )


def odd() -> nn.Module:
    torch.manual_seed(2)
    return Odd().double()


@cache
def traced_odd():
    traced = trace(odd(), token_batches(9)[0])
    return traced, Annotator(traced)


def odd_plans(meshes, zeros=(1, 2, 3), cut: int = 2, recompute: str = "none") -> list[Plan]:
    traced, annotator = traced_odd()
    solved = [solved_plan(traced, annotator, setting(mesh, cut, recompute)) for mesh in meshes]
    return [replace(plan, zero=zero) for plan in solved for zero in zeros]


def by_ndim(make):
    """Parameter groups as in many training scripts: no weight decay for vectors."""

    def factory(params):
        params = list(params)
        return make(
            [
                {"params": [p for p in params if p.dim() >= 2]},
                {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
            ]
        )

    return factory


OPTIMIZERS = {
    "sgd": sgd,
    "adamw": by_ndim(lambda groups: torch.optim.AdamW(groups, 0.02, weight_decay=0.3)),
    "adam": lambda params: torch.optim.Adam(params, 0.02, amsgrad=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, 0.02),
}


def train_odd(rank: int, optimizer: str, texts: list[str], ahead: bool = False) -> list:
    traced, found = traced_odd()[0], []
    for text in texts:
        engine = Engine(
            odd(), traced, Plan.from_json(text), OPTIMIZERS[optimizer], None, None, "cpu"
        )
        engine.parameters.gathering.ahead |= ahead
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7)
        losses = []
        for batch in token_batches(9):
            losses.append(float(engine.step(engine.local_batch(batch))))
            schedule.step()
        found.append(
            (
                losses,
                [float(engine.eval_step(engine.local_batch(b))) for b in token_batches(9)],
                engine.full_state_dict(),
            )
        )
    return found


def reference_odd(optimizer: str):
    """(losses, losses of evaluation afterwards, Reference) of one device in eager mode."""
    model, losses = odd(), []
    before = {k: v.clone() for k, v in model.state_dict().items()}
    own = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad])
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.7)
    for batch in token_batches(9):
        own.zero_grad()
        loss = model(**batch)
        loss.backward()
        own.step()
        schedule.step()
        losses.append(loss.item())
    evaluated = [model(**batch).item() for batch in token_batches(9)]
    return (
        losses,
        evaluated,
        Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()}),
    )


def check_odd(pool, optimizer: str, plans: list[Plan], ahead: bool = False) -> None:
    losses, evaluated, result = reference_odd(optimizer)
    for by_rank in pool.run(
        train_odd, optimizer, [plan.to_json() for plan in plans], ahead, timeout_s=300
    ):
        for plan, (own_losses, own_evaluated, state) in zip(plans, by_rank, strict=True):
            assert update_error(result, state) <= 1.0, (
                optimizer,
                plan.zero,
                str(plan.mesh),
                update_error(result, state),
            )
            assert own_losses == pytest.approx(losses, rel=1e-9) and own_evaluated == pytest.approx(
                evaluated, rel=1e-9
            )
