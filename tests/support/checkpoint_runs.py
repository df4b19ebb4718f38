"""Training that saves a checkpoint, or loads one and goes on, and what the two must agree on."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from support import exactness
from support.exactness import Case, token_batches
from torch import Tensor, nn

from autopar.annotate.annotator import Annotator
from autopar.api import trace
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine


class Fused(nn.Module):
    """Queries, keys and values fused, so that tp shards three sections; a tied vocabulary that 4 ranks share as 3, 3, 3, 2."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(11, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (
            part.unflatten(-1, (4, 4)).transpose(1, 2) for part in self.qkv(x).split(16, dim=-1)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@cache
def case(name: str) -> Case:
    if name != "fused":
        return exactness.case(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Fused().double()
    batches = token_batches(11)
    traced = trace(model, batches[0])
    return Case(name, model, batches, traced, Annotator(traced))


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def grouped(parameters) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2]},
    ]
    return torch.optim.AdamW(groups, 1e-2, weight_decay=0.0)


OPTIMIZERS["grouped"] = grouped


def engine_for(name: str, text: str, optimizer: str) -> Engine:
    found = case(name)
    return Engine(
        found.model, found.traced, Plan.from_json(text), OPTIMIZERS[optimizer], None, None, "cpu"
    )


def batches_of(name: str) -> list:
    return token_batches(int(case(name).batches[0]["input_ids"].max()) + 1, steps=4)


def go(engine: Engine, batches: list) -> list[float]:
    return [float(engine.step(engine.local_batch(batch))) for batch in batches]


def save_after_two(rank: int, name: str, text: str, optimizer: str, directory: str) -> tuple:
    """Two steps, a checkpoint, two more steps."""
    engine = engine_for(name, text, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    go(engine, batches_of(name)[:2])
    scheduler.step()
    path = engine.save(directory, extra={"scheduler": scheduler}).wait()
    before = engine.full_state_dict()
    return str(path), before, go(engine, batches_of(name)[2:]), engine.full_state_dict()


def load_and_go_on(rank: int, name: str, text: str, optimizer: str, directory: str) -> tuple:
    engine = engine_for(name, text, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    assert engine.load(directory, extra={"scheduler": scheduler}) == engine.steps == 2
    assert scheduler.last_epoch == 1
    before = engine.full_state_dict()
    return before, go(engine, batches_of(name)[2:]), engine.full_state_dict()


def agree(saved: tuple, loaded: list[tuple]) -> None:
    _, before, losses, after = saved
    for rank_before, rank_losses, rank_after in loaded:
        assert set(rank_before) == set(before)
        assert all(torch.equal(rank_before[k], v) for k, v in before.items())
        assert rank_losses == pytest.approx(losses, rel=1e-11)
        for name, tensor in after.items():
            assert (rank_after[name] - tensor).norm() <= 1e-9 * (
                tensor - before[name]
            ).norm() + 1e-12, name
