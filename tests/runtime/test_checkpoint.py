"""Checkpoints: saved under one plan and loaded under another, training goes on as if nothing had happened."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from exactness import case, random_plan, setting, solved_plan, token_batches

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

ONE, TP4, TP2DP2, DP4, TP2, DP2 = MeshShape(), MeshShape(tp=4), MeshShape(dp=2, tp=2), MeshShape(dp=4), MeshShape(tp=2), MeshShape(dp=2)
UNEVEN = "llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=250,ffn=56,seq=64"
"""A vocabulary that 4 ranks share as 63, 63, 63, 61; that of hf-gpt2, tied, is 26, 26, 26, 23."""

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.5, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


def grouped(parameters) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    parameters = list(parameters)
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}, {"params": [p for p in parameters if p.dim() < 2]}]
    return torch.optim.AdamW(groups, 1e-2, weight_decay=0.0)


OPTIMIZERS["grouped"] = grouped


@cache
def plan_text(name: str, mesh: MeshShape, seed: int | None = None) -> str:
    found, where = case(name), setting(mesh)
    plan = solved_plan(found.traced, found.annotator, where) if seed is None else random_plan(found.traced, found.annotator, where, seed)
    return plan.to_json()


def engine_for(name: str, text: str, optimizer: str) -> Engine:
    found = case(name)
    return Engine(found.model, found.traced, Plan.from_json(text), OPTIMIZERS[optimizer], None, None, "cpu")


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
            assert (rank_after[name] - tensor).norm() <= 1e-9 * (tensor - before[name]).norm() + 1e-12, name


@pytest.mark.parametrize(
    "name, optimizer, source, targets",
    [
        ("hf-gpt2", "grouped", TP4, (TP2DP2,)),
        pytest.param("hf-gpt2", "sgd", TP2DP2, (TP4, DP4), marks=pytest.mark.slow),
        pytest.param(UNEVEN, "adamw", TP4, (TP4, DP4, TP2DP2), marks=pytest.mark.slow),
    ],
)
def test_loads_under_another_plan(pool4, pool2, tmp_path, name, optimizer, source, targets):
    assert ("1:1:1" in plan_text(name, TP4)) == (name == "hf-gpt2"), "queries, keys and values are fused there, and sharded in sections"
    saved = pool4.run(save_after_two, name, plan_text(name, source), optimizer, str(tmp_path))[0]
    for target in targets:
        agree(saved, pool4.run(load_and_go_on, name, plan_text(name, target), optimizer, str(tmp_path)))
    agree(saved, pool2.run(load_and_go_on, name, plan_text(name, TP2), optimizer, str(tmp_path)))
    agree(saved, [load_and_go_on(0, name, plan_text(name, ONE), optimizer, str(tmp_path))])
