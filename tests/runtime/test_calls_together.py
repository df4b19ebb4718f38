"""Ranks that disagree: other methods, other orders, other numbers of steps, other arguments, errors of one rank.  Each rank raises an
AutoparError within the time limit, and none waits for ever."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.updated_models import Updated, adamw, case, engine_of, go, plan_of, sgd
from torch import nn

import autopar
from autopar.errors import AutoparError
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.calls import check_calls

LIMIT_S = 10.0


def state_of(engine: Engine) -> Any:
    return engine.load_state_dict(case().model.state_dict())


def enter(engine: Engine) -> None:
    with engine.averaged():
        pass


METHODS: dict[str, Callable[[Engine, str], Any]] = {
    "step": lambda engine, _: go(engine, 1),
    "eval_step": lambda engine, _: engine.eval_step(engine.local_batch(case().batches[0])),
    "full_state_dict": lambda engine, _: engine.full_state_dict(),
    "save": lambda engine, path: engine.save(f"{path}/save"),
    "load": lambda engine, path: engine.load(f"{path}/save"),
    "export": lambda engine, path: engine.export(f"{path}/export"),
    "set": lambda engine, _: engine.set("scale", 2.0),
    "load_state_dict": lambda engine, _: state_of(engine),
    "freeze": lambda engine, _: engine.freeze("head"),
    "unfreeze": lambda engine, _: engine.unfreeze("head"),
    "gradient_norm": lambda engine, _: engine.gradient_norm(),
    "average": lambda engine, _: engine.average(0.9),
    "averaged": lambda engine, _: enter(engine),
    "full_optimizer_state_dict": lambda engine, _: engine.full_optimizer_state_dict(),
    "load_optimizer_state_dict": lambda engine, _: engine.load_optimizer_state_dict({"state": {}, "param_groups": []}),
}  # fmt: skip


def heard(function: Callable[[], Any]) -> str:
    try:
        function()
    except AutoparError as error:
        return str(error)
    return "no error"


def alone(rank: int, cells: list[str], path: str) -> dict[str, str]:
    """Rank 1 calls each method, while rank 0 goes on training."""
    found = {}
    for cell in cells:
        engine, _ = engine_of(cell, sgd)
        engine.average(0.9)
        go(engine, 1)
        for name, method in METHODS.items():
            if name != "step":
                own = method if rank else METHODS["step"]
                found[f"{cell} {name}"] = heard(lambda own=own, engine=engine: own(engine, path))
        go(engine, 1)  # nothing is left of it
    return found


@pytest.mark.parametrize(
    "cells", [["zero3", "pp2"], pytest.param(["dp2", "tp2", "zero1"], marks=pytest.mark.slow)]
)
def test_a_method_that_one_rank_calls_is_named(pool2, tmp_path, cells):
    ranks = pool2.run(alone, cells, str(tmp_path), timeout_s=120)
    for found in ranks:
        assert len(found) == len(cells) * (len(METHODS) - 1)
        for key, text in found.items():
            name = key.split()[1]
            words = f"rank 0 called step after 1 steps, rank 1 called {name} after 1 steps"
            assert words in text, (key, text)


def muon(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], 0.02)


def disagree(rank: int) -> dict[str, str]:
    found = {}
    engine, _ = engine_of("dp2", sgd)
    if rank == 1:  # skips a step
        engine.steps = 1
    found["steps"] = heard(lambda: go(engine, 1))
    engine.steps = 0
    engine.optimizer.param_groups[0]["lr"] = 0.1 * (rank + 1)
    found["rates"] = heard(lambda: go(engine, 1))
    engine.optimizer.param_groups[0]["lr"] = 0.1
    engine.optimizer.param_groups[0]["momentum"] -= 0.1 * rank
    found["momentum"] = heard(lambda: go(engine, 1))
    engine.optimizer.param_groups[0]["momentum"] = 0.9
    engine.max_grad_norm = 1.0 if rank else None
    found["later limit"] = heard(lambda: go(engine, 1))
    engine.max_grad_norm = None
    batch = {
        name: tensor[: 4 + rank] for name, tensor in engine.local_batch(case().batches[0]).items()
    }
    engine.sampler(range(16 + rank))
    found["sampler"] = heard(lambda: go(engine, 1))
    engine._samplers = ()
    found["dtype"] = heard(lambda: engine.step(
        {**batch, "x": batch["x"].float()} if rank else batch
    ))  # fmt: skip
    found["columns"] = heard(lambda: engine.step({**batch, "x": batch["x"][:, : 6 - rank]}))
    go(engine, 1)
    found["optimizer"] = heard(lambda: engine_of("dp2", sgd if rank else adamw))
    found["matrices"] = heard(lambda: engine_of("dp2", sgd if rank else muon))
    found["no optimizer"] = heard(lambda: engine_of("dp2", sgd if rank else lambda params: None))
    found["clip"] = heard(lambda: engine_of("dp2", sgd, clip=autopar.ClipNorm(1.0 + rank)))
    found["values"] = heard(lambda: engine.set("scale", 1.0 + rank))
    found["arguments"] = heard(lambda: engine.add_param_group("*" if rank else "head"))
    found["options"] = heard(lambda: engine_of("dp2", lambda p: torch.optim.SGD(p, 0.1 + rank)))
    found["limit"] = heard(lambda: engine_of("dp2", sgd, max_grad_norm=1.0 + rank))
    found["names"] = heard(lambda: engine.load_state_dict(
        {"scale": torch.tensor(1.0)} if rank else {"weights": torch.ones(4)}, strict=False
    ))  # fmt: skip
    found["frozen"] = heard(lambda: engine.freeze("layers.1" if rank else "head"))
    found["average"] = heard(lambda: engine.average(0.5 + 0.1 * rank))
    handle = engine.register_gradient_hook("head", lambda name, grad: None)
    if rank:
        handle.remove()
    found["hooks"] = heard(lambda: go(engine, 1))
    handle.remove()
    found["shapes"] = heard(lambda: engine.set("weights", torch.ones(4 + rank)))
    engine, own = engine_of("dp2", sgd)
    if rank:  # changes its model alone
        own.weights.mul_(2)
    found["model"] = heard(lambda: go(engine, 1))
    engine.forget_model()
    model, batch = Updated().double(), case().batches[0]
    if rank:
        model.layers = model.layers[:2]
    found["models"] = heard(lambda: autopar.parallelize(model, "cpu:2", batch, precision="fp64"))
    model = Updated().double()
    model.begin.requires_grad_(rank == 0)
    found["frozen model"] = heard(lambda: autopar.parallelize(model, "cpu:2", batch))
    model = Updated().double()
    if rank:
        model.head, model.weights = nn.Linear(8, 5).double(), torch.ones(5).double()
        batch = {**batch, "labels": torch.zeros(8, 5).double()}
    found["width"] = heard(lambda: autopar.parallelize(model, "cpu:2", batch))
    go(engine, 1)
    return found


def test_ranks_that_disagree_are_named(pool2):
    words = {
        "steps": "rank 0 called step after 0 steps, rank 1 called step after 1 steps",
        "rates": "ranks have different lr of parameter group 0: 0.1 on rank 0, 0.2 on rank 1",
        "momentum": "different momentum of parameter group 0: 0.9 on rank 0, 0.8 on rank 1",
        "later limit": "different max_grad_norm: None on rank 0, 1.0 on rank 1",
        "sampler": r"different samplers .*: \(\(16, True, True\),\) on rank 0, \(\(17, True, True\),\) on rank 1",
        "dtype": "different dtype of batch entry 'x': 'torch.float64' on rank 0, 'torch.float32' on rank 1",
        "columns": "has 5|shape",
        "optimizer": "different optimizers: 'AdamW' on rank 0, 'SGD' on rank 1",
        "matrices": "different optimizers: 'Muon' on rank 0, 'SGD' on rank 1",
        "no optimizer": "rank 0: the optimizer factory returned a NoneType",
        "clip": "different clip: .*limit 1.0.* on rank 0, .*limit 2.0",
        "values": "gave engine.set different arguments",
        "arguments": "head.weight is in a parameter group already",
        "options": "different lr of parameter group 0: 0.1 on rank 0, 1.1 on rank 1",
        "limit": "different max_grad_norm: 1.0 on rank 0, 2.0 on rank 1",
        "names": "gave engine.load_state_dict different arguments",
        "frozen": "ranks 0 and 1 gave engine.freeze different arguments",
        "average": "ranks 0 and 1 gave engine.average different arguments",
        "hooks": "different gradient hooks",
        "model": "weights was changed in the model",
        "shapes": r"has shape \(4,\), and the value \(5,\)",
        "models": "rank 1 has another model than rank 0: it has no tensor layers.2.up.weight",
        "frozen model": "rank 1 has another model than rank 0: begin.weight has requires_grad=False, and True on rank 0",
        "width": r"rank 1 has another model than rank 0: head.weight has shape \(5, 8\), and \(4, 8\)",
    }
    for found in pool2.run(disagree, timeout_s=120):
        for key, pattern in words.items():
            assert re.search(pattern, found[key]), (key, found[key])


def lonely(rank: int, cell: str, how: str, path: str) -> None:
    """Rank 1 stays away; rank 0 writes down what it hears, and after how long."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{path}/store", rank=rank, world_size=2,
        timeout=timedelta(seconds=LIMIT_S),
    )  # fmt: skip
    engine, _ = engine_of(cell, sgd)
    go(engine, 1)
    dist.barrier()
    if rank == 1:
        if how == "sleeps":
            time.sleep(4 * LIMIT_S)
        os._exit(0)  # its loader raised
    start = time.perf_counter()
    texts = [heard(lambda: go(engine, 1)), heard(engine.full_state_dict)]
    Path(path, "heard").write_text(json.dumps([texts, time.perf_counter() - start]))


@pytest.mark.parametrize(
    ("cell", "how"),
    [("pp2", "ends"), *(pytest.param(cell, how, marks=pytest.mark.slow)
                        for cell in ("pp2", "dp2", "tp2", "zero3") for how in ("ends", "sleeps"))],
)  # fmt: skip
def test_a_rank_that_stays_away_is_noticed(tmp_path, cell, how):
    plan_of(cell)
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=lonely, args=(rank, cell, how, str(tmp_path))) for rank in range(2)
    ]
    for process in processes:
        process.start()
    processes[0].join(6 * LIMIT_S)
    processes[1].kill()
    processes[0].kill()
    texts, took_s = json.loads((tmp_path / "heard").read_text())
    assert all(text.startswith("rank 0 lost the other ranks in ") for text in texts), texts
    assert took_s < 3 * LIMIT_S


def test_calls_are_compared():
    check_calls([(1, 0, 3), (0, 0, 3)])
    with pytest.raises(
        AutoparError, match="ranks 0, 2 called step after 3 steps, rank 1 called save"
    ):
        check_calls([(1, 4, 3), (0, 0, 3), (2, 0, 3)])
    many = [(rank, 0, rank) for rank in range(6)]
    with pytest.raises(AutoparError, match="and 2 more"):
        check_calls(copy.copy(many))
