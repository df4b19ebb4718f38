"""Checkpoints: saved under one plan and loaded under another, training goes on as if nothing had happened."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.checkpoint_runs import OPTIMIZERS, agree, case, load_and_go_on, save_after_two
from support.exactness import random_plan, setting, solved_plan, token_batches
from torch.utils.data import DataLoader, Dataset

from autopar.api import parallelize
from autopar.ir.mesh import MeshShape

ONE, TP4, TP2DP2, DP4, TP2, DP2 = (
    MeshShape(),
    MeshShape(tp=4),
    MeshShape(dp=2, tp=2),
    MeshShape(dp=4),
    MeshShape(tp=2),
    MeshShape(dp=2),
)
UNEVEN = "llama:layers=2,hidden=32,heads=4,kv_heads=2,vocab=250,ffn=56,seq=64"
"""A vocabulary that 4 ranks share as 63, 63, 63, 61."""


@cache
def plan_text(name: str, mesh: MeshShape, seed: int | None = None) -> str:
    found, where = case(name), setting(mesh)
    plan = (
        solved_plan(found.traced, found.annotator, where)
        if seed is None
        else random_plan(found.traced, found.annotator, where, seed)
    )
    return plan.to_json()


@pytest.mark.parametrize(
    "name, optimizer, source, targets",
    [
        ("fused", "grouped", TP4, (TP4, TP2DP2)),
        pytest.param("hf-gpt2", "grouped", TP4, (TP2DP2, DP4), marks=pytest.mark.slow),
        pytest.param("hf-gpt2", "sgd", TP2DP2, (TP4, DP4), marks=pytest.mark.slow),
        pytest.param(
            "moe-tiny",
            "sgd",
            MeshShape(dp=4, ep=2),
            (MeshShape(dp=2, tp=2, ep=2), TP4),
            marks=pytest.mark.slow,
        ),
        pytest.param(UNEVEN, "adamw", TP4, (TP4, DP4, TP2DP2), marks=pytest.mark.slow),
    ],
)
def test_loads_under_another_plan(pool4, pool2, tmp_path, name, optimizer, source, targets):
    assert "1:1:1" in plan_text(name, TP4) or name in (UNEVEN, "moe-tiny"), (
        "fused projections are sharded in sections"
    )
    saved = pool4.run(save_after_two, name, plan_text(name, source), optimizer, str(tmp_path))[0]
    for target in targets:
        agree(
            saved,
            pool4.run(load_and_go_on, name, plan_text(name, target), optimizer, str(tmp_path)),
        )
    agree(saved, pool2.run(load_and_go_on, name, plan_text(name, TP2), optimizer, str(tmp_path)))
    agree(saved, [load_and_go_on(0, name, plan_text(name, ONE), optimizer, str(tmp_path))])


# ------------------------------------------------------------------------------------------------------- fewer devices, planned again


class Rows(Dataset):
    """Token rows with uneven numbers of valid targets."""

    def __init__(self) -> None:
        self.batch = token_batches(96, rows=40, steps=1)[0]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: tensor[index] for name, tensor in self.batch.items()}


def train_on(rank: int, directory: str, resume: bool) -> tuple[str, list[float], dict, dict]:
    """Plan for as many devices as there are and train to step 8, five steps an epoch, saving after step 4 or going on from there."""
    found = case("llama-tiny")
    engine = parallelize(
        found.model,
        f"cpu:{dist.get_world_size()}",
        found.batches[0],
        OPTIMIZERS["adamw"],
        global_batch=8,
        precision="fp64",
    )
    losses, before = [], engine.full_state_dict()
    if resume:
        assert engine.load(directory) == 4
    while engine.steps < 8:
        for batch in DataLoader(Rows(), batch_sampler=engine.sampler(Rows())):
            losses.append(float(engine.step(batch)))
            if engine.steps == 4:
                engine.save(directory, asynchronous=True)
            if engine.steps == 8:
                break
    engine.save(Path(directory, "last")).wait()  # and with it the one before
    return str(engine.plan.mesh), losses, before, engine.full_state_dict()


@pytest.mark.slow
def test_fewer_devices_go_on_under_a_new_plan(pool4, pool2, tmp_path):
    four, losses, before, after = pool4.run(train_on, str(tmp_path), False)[0]
    for two, rest, _, state in pool2.run(train_on, str(tmp_path), True):
        assert two != four
        assert rest == pytest.approx(losses[4:], rel=1e-11)
        for name, tensor in after.items():
            assert (state[name] - tensor).norm() <= 1e-9 * (tensor - before[name]).norm() + 1e-12, (
                name
            )
