"""Averages of weights, weights that an optimizer's mode moves, and whole states of plain torch optimizers: exact against one device."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support.effort import tried
from support.exactness import Reference, update_error
from support.updated_models import (
    CELLS,
    PAIRS,
    STEPS,
    adamw,
    case,
    eager,
    eager_by_closure,
    engine_of,
    go,
    plan_of,
    sgd,
)
from support.wrapping_optimizers import SAM, Lookahead, ScheduleFree
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autopar.errors import AutoparError

AVERAGES: dict[str, tuple[dict, Callable[[torch.nn.Module], AveragedModel]]] = {
    "ema": ({"decay": 0.6}, lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.6))),
    "swa": ({"decay": None}, AveragedModel),
    "warm": ({"decay": lambda n: n / (n + 2)},
             lambda model: AveragedModel(model, avg_fn=lambda a, p, n: a * (int(n) / (int(n) + 2)) + p * (2 / (int(n) + 2)))),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def plans() -> None:
    """Made here, so that ranks which are forked from now on have them."""
    for cell in CELLS:
        plan_of(cell)


@cache
def averaged_eagerly(name: str) -> tuple[Reference, list[float], Reference]:
    """Weights and averages of one device, and the losses of both on the first batch."""
    model = copy.deepcopy(case().model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    average, optimizer = AVERAGES[name][1](model), adamw(model.parameters())
    for batch in case().batches[:STEPS]:
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        average.update_parameters(model)
    batch = case().batches[0]
    losses = [float(average.module(**batch).detach()), float(model(**batch).detach())]
    found = [Reference([], before, dict(one.state_dict())) for one in (model, average.module)]
    return found[0], losses, found[1]


def average(rank: int, items: list[tuple[str, str]], directory: str) -> list[tuple]:
    found = []
    for name, cell in items:
        engine, _ = engine_of(cell, adamw)
        engine.average(**AVERAGES[name][0])
        go(engine, 2)
        engine.save(f"{directory}/{name}-{cell}")
        engine, _ = engine_of(cell, adamw)  # another run goes on
        engine.average(**AVERAGES[name][0])
        engine.load(f"{directory}/{name}-{cell}")
        go(engine, 1, 2)
        batch = engine.local_batch(case().batches[0])
        with engine.averaged():
            inside = engine.full_state_dict(), float(engine.eval_step(batch))
            for method in (lambda e=engine, b=batch: e.step(b), lambda e=engine: e.save(directory)):
                with pytest.raises(AutoparError, match="leave its block before"):
                    method()
        found.append((inside, engine.full_state_dict(), float(engine.eval_step(batch))))
    return found


def check_averages(ranks: list, items: list[tuple[str, str]]) -> None:
    for by_rank in ranks:
        for (name, cell), ((averages, loss), weights, own_loss) in zip(items, by_rank, strict=True):
            of_weights, losses, of_averages = averaged_eagerly(name)
            assert update_error(of_weights, weights) <= 1.0, (name, cell)
            assert update_error(of_averages, averages) <= 1.0, (name, cell)
            assert [loss, own_loss] == pytest.approx(losses, rel=1e-9)


def test_averages(pool2, tmp_path):
    items = [("ema", "zero3"), ("swa", "pp2")]
    check_averages(pool2.run(average, items, str(tmp_path), timeout_s=200), items)


@pytest.mark.slow
def test_averages_in_all_cells(pool2, tmp_path):
    items = [(name, cell) for name in AVERAGES for cell in PAIRS]
    check_averages(pool2.run(average, items, str(tmp_path), timeout_s=400), items)
    one = [(name, "one") for name in AVERAGES]
    check_averages([average(0, one, str(tmp_path))], one)


def test_averages_of_a_checkpoint(tmp_path, capsys):
    engine, _ = engine_of("one", sgd)
    go(engine, 1)
    engine.save(tmp_path / "without")
    engine.average(0.5)
    with pytest.raises(AutoparError, match="has no averages"):
        engine.load(tmp_path / "without")
    go(engine, 1)
    engine.save(tmp_path / "with")
    other, _ = engine_of("one", sgd)
    other.load(tmp_path / "with")
    assert "averages of the weights, which are left out" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------ modes of optimizers


def schedule_free_eagerly() -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(case().model)
    optimizer, losses = ScheduleFree(model.parameters()), []
    for batch in case().batches[:STEPS]:
        optimizer.train()
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        optimizer.eval()
        losses.append(model(**batch).item())
    return losses, case().model.state_dict(), model.state_dict()


def schedule_free(rank: int, cells: list[str]) -> list[tuple[list[float], dict]]:
    found = []
    for cell in cells:
        engine, _ = engine_of(cell, ScheduleFree)
        losses = []
        for batch in case().batches[:STEPS]:
            batch = engine.local_batch(batch)
            engine.optimizer.train()
            losses.append(float(engine.step(batch)))
            engine.optimizer.eval()
            losses.append(float(engine.eval_step(batch)))
        found.append((losses, engine.full_state_dict()))
    return found


@pytest.mark.parametrize(
    "cells", [["zero1", "tp2"], pytest.param(list(PAIRS), marks=pytest.mark.slow)]
)
def test_schedule_free_modes(pool2, cells):
    losses, before, after = schedule_free_eagerly()
    for by_rank in pool2.run(schedule_free, cells, timeout_s=200):
        for own_losses, state in by_rank:
            assert own_losses == pytest.approx(losses, rel=1e-9)
            assert update_error(Reference([], before, after), state) <= 1.0


def write_masters(rank: int, cells: list[str]) -> list[float]:
    """What the user writes into the optimizer's parameters is what the next forward reads."""
    found = []
    for cell in cells:
        engine, _ = engine_of(cell, sgd)
        with torch.no_grad():
            for group in engine.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.5)
        found.append(float(engine.eval_step(engine.local_batch(case().batches[0]))))
    return found


def test_written_masters_are_read(pool2):
    model = copy.deepcopy(case().model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    expected = float(model(**case().batches[0]))
    for found in pool2.run(write_masters, ["zero1", "pp2"], timeout_s=100):
        assert found == pytest.approx([expected] * 2, rel=1e-9)


# ------------------------------------------------------------------------------------------------------- states of optimizers


def grouped(named_parameters: Any) -> torch.optim.Optimizer:
    named = list(named_parameters)
    biases = [(n, p) for n, p in named if n.endswith("bias")]
    others = [(n, p) for n, p in named if not n.endswith("bias")]
    return torch.optim.AdamW([{"params": biases, "lr": 0.01}, {"params": others}], 0.02)


OPTIMIZERS: dict[str, tuple[Callable, bool]] = {
    "adamw": (adamw, False),
    "sgd": (sgd, False),
    "adafactor": (lambda params: torch.optim.Adafactor(params, 0.02), False),
    "rprop": (lambda params: torch.optim.Rprop(params, 0.001), False),
    "muon": (lambda params: torch.optim.Muon([p for p in params if p.dim() == 2], 0.02), False),
    "groups": (grouped, True),
    "amsgrad": (lambda params: torch.optim.Adam(params, 0.02, amsgrad=True, foreach=False), False),
    "new": (lambda params: torch.optim.SGD(params, 0.02), False),
}


@cache
def plain(name: str, steps: int = STEPS) -> tuple[dict, dict, dict]:
    """(weights and state of the optimizer after one step, weights after `steps`, state then) on one device."""
    factory, named = OPTIMIZERS[name]
    model = copy.deepcopy(case().model)
    optimizer = factory(list(model.named_parameters()) if named else list(model.parameters()))
    for step, batch in enumerate(case().batches[:steps]):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
        if step == 0:
            first = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    return first, model.state_dict(), optimizer.state_dict()


def go_on(rank: int, items: list[tuple[str, str]]) -> list[tuple[dict, dict]]:
    found = []
    for name, cell in items:
        (weights, state), _, _ = plain(name)
        engine, _ = engine_of(cell, OPTIMIZERS[name][0])
        engine.load_state_dict(weights)
        engine.load_optimizer_state_dict(state)
        go(engine, STEPS - 1, 1)
        found.append((engine.full_state_dict(), engine.full_optimizer_state_dict()))
    return found


def check_states(ranks: list, items: list[tuple[str, str]]) -> None:
    for by_rank in ranks:
        for (name, cell), (weights, state) in zip(items, by_rank, strict=True):
            _, expected, own = plain(name)
            reference = Reference([], case().model.state_dict(), expected)
            assert update_error(reference, weights) <= 1.0, (name, cell)
            assert state["state"].keys() == own["state"].keys(), (name, cell)
            for number, found in own["state"].items():
                assert found.keys() == state["state"][number].keys()
                for key, value in found.items():
                    if isinstance(value, Tensor):
                        torch.testing.assert_close(
                            state["state"][number][key], value, rtol=1e-9, atol=1e-12
                        )
            for group, other in zip(own["param_groups"], state["param_groups"], strict=True):
                assert group["params"] == other["params"] and group["lr"] == other["lr"]
            copied = copy.deepcopy(case().model)  # and a plain optimizer takes it
            factory, named = OPTIMIZERS[name]
            given = copied.named_parameters() if named else copied.parameters()
            factory(list(given)).load_state_dict(state)


def test_states_of_plain_optimizers(pool2):
    items = [("adamw", "zero3"), ("groups", "pp2"), ("muon", "tp2"), ("adafactor", "zero1"), ("new", "pp2")]  # fmt: skip
    items = tried(items[:4], items)
    check_states(pool2.run(go_on, items, timeout_s=200), items)


@pytest.mark.slow
def test_states_of_plain_optimizers_in_all_cells(pool2):
    items = [(name, cell) for name in OPTIMIZERS for cell in PAIRS]
    check_states(pool2.run(go_on, items, timeout_s=400), items)
    one = [(name, "one") for name in OPTIMIZERS]
    check_states([go_on(0, one)], one)


def load_directly(rank: int, cells: list[str]) -> list[str]:
    found = []
    for cell in cells:
        (weights, state), _, _ = plain("adamw")
        engine, _ = engine_of(cell, adamw)
        engine.load_state_dict(weights)
        try:
            engine.optimizer.load_state_dict(copy.deepcopy(state))
            go(engine, STEPS - 1, 1)
            reference = Reference([], case().model.state_dict(), plain("adamw")[1])
            assert update_error(reference, engine.full_state_dict()) <= 1.0
            found.append("exact")
        except AutoparError as error:
            found.append(str(error))
        go(engine, 1)
        engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # its own always fits
        go(engine, 1)
    return found


def test_the_optimizers_own_method_takes_what_fits(pool2):
    for found in pool2.run(load_directly, ["zero3", "pp2", "tp2", "dp2"], timeout_s=200):
        assert all(
            "engine.load_optimizer_state_dict takes one of whole tensors" in text
            for text in found[:3]
        )
        assert found[3] == "exact"


STATES: dict[str, tuple[Callable[[dict], Any], str]] = {
    "nothing": (lambda state: 3, "has 'state' and 'param_groups'"),
    "groups": (lambda state: {**state, "param_groups": state["param_groups"] * 2}, "make the same groups"),
    "shapes": (lambda state: {**state, "state": {
        number: {**found, "exp_avg": torch.zeros(5, 7)} for number, found in state["state"].items()
    }}, r"exp_avg of begin.weight has shape \(5, 7\), and must have \(8, 6\)"),
    "keys": (lambda state: {**state, "state": {number: {"momentum_buffer": found["exp_avg"]}
                                               for number, found in state["state"].items()}}, "momentum_buffer"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states_that_do_not_fit(name):
    change, words = STATES[name]
    engine, _ = engine_of("one", adamw)
    with pytest.raises(AutoparError, match=words):
        engine.load_optimizer_state_dict(change(plain("adamw")[0][1]))
    go(engine, 1)


# ------------------------------------------------------------------------------------------- checkpoints of wrapping optimizers


class Remembering(torch.optim.SGD):
    """Clips to the median of the last norms, which it keeps in attributes."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, momentum=0.9)
        self.norms: Any = deque(maxlen=3)
        self._mean, self.table = None, {"count": 0, "means": [torch.zeros(2)]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in trained]).norm()
        self.norms.append(float(norm))
        self.table["count"] += 1
        self.table["means"][0] += norm.cpu()
        self._mean = norm if self._mean is None else 0.9 * self._mean + 0.1 * norm
        scale = sorted(self.norms)[0] / norm / self.table["count"] * self._mean
        for p in trained:
            p.grad.mul_(scale / self.table["means"][0][0])
        super().step()


WRAPPING: dict[str, Callable] = {
    "remembering": Remembering,
    "lookahead": lambda params: Lookahead(adamw(params), k=2),
    "sam": lambda params: SAM(params, torch.optim.SGD, 0.1, lr=0.05, momentum=0.9),
    "lbfgs": lambda params: torch.optim.LBFGS(params, 0.2, max_iter=3),
    "names": grouped,
}


def resumed(rank: int, items: list[tuple[str, str, str]], directory: str) -> list[dict]:
    """Three steps in one cell, a checkpoint, and two more steps in another cell."""
    found = []
    for name, cell, other_cell in items:
        engine, _ = engine_of(cell, named_factory if name == "names" else WRAPPING[name])
        go(engine, 3)
        engine.save(f"{directory}/{name}-{cell}")
        if name in ("lookahead", "sam"):
            with pytest.raises(AutoparError, match="holds another optimizer"):
                engine.full_optimizer_state_dict()
        other, _ = engine_of(other_cell, named_factory if name == "names" else WRAPPING[name])
        assert other.load(f"{directory}/{name}-{cell}") == 3
        go(other, 2, 3)
        found.append(other.full_state_dict())
    return found


def named_factory(named_parameters: Any) -> torch.optim.Optimizer:
    return grouped(named_parameters)


@cache
def uninterrupted(name: str) -> Reference:
    """Five steps of plain torch on one device."""
    if name in ("sam", "lbfgs"):
        return eager_by_closure(WRAPPING[name], first=name == "sam", steps=5)
    return eager(WRAPPING[name], named=name == "names", steps=5)


def check_resumed(ranks: list, items: list[tuple[str, str, str]]) -> None:
    for by_rank in ranks:
        for (name, *cells), state in zip(items, by_rank, strict=True):
            error = update_error(uninterrupted(name), state)
            assert error <= 1.0, (name, cells, error)


def test_wrapping_optimizers_go_on_after_a_checkpoint(pool2, tmp_path):
    items = [
        ("lookahead", "zero3", "pp2"),
        ("sam", "tp2", "zero3"),
        ("lbfgs", "dp2", "tp2"),
        ("names", "pp2", "zero1"),
        ("remembering", "tp2", "dp2"),
    ]
    items = tried(items[:3], items)
    check_resumed(pool2.run(resumed, items, str(tmp_path), timeout_s=200), items)


@pytest.mark.slow
def test_wrapping_optimizers_go_on_in_all_cells(pool2, tmp_path):
    items = [
        (name, cell, PAIRS[(place + 2) % len(PAIRS)])
        for name in WRAPPING
        for place, cell in enumerate(PAIRS)
    ]
    items = [
        (name, *cells) for name, *cells in items if "pp2" not in cells or name in ("lookahead", "names")
    ]  # fmt: skip
    check_resumed(pool2.run(resumed, items, str(tmp_path), timeout_s=400), items)
    one = [(name, "one", "one") for name in WRAPPING]
    check_resumed([resumed(0, one, str(tmp_path))], one)
