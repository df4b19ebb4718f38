"""ZeRO 0 to 3 against one device, in fp64: models, meshes, micro-batches, clipping, optimizers; and mutants that must be caught."""

from __future__ import annotations

import pytest
import torch
from support.effort import tried
from support.exactness import (
    case,
    reference,
    train,
    update_error,
)
from support.zero_runs import (
    OPTIMIZERS,
    check,
    check_odd,
    odd_plans,
    plans_for,
    reference_odd,
    train_odd,
)

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.state.holding import Holding

DP4, TP2DP2, EP2, CP2DP2 = (
    MeshShape(dp=4),
    MeshShape(dp=2, tp=2),
    MeshShape(dp=4, ep=2),
    MeshShape(dp=2, cp=2),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-tiny", "gpt-tiny", "moe-tiny"])
def test_every_stage_on_every_mesh(pool4, name):
    meshes = (DP4, TP2DP2) + ((EP2,) if name == "moe-tiny" else (CP2DP2,))
    cuts = (1,) if name == "moe-tiny" else (1, 2)  # the balance loss is not linear in the batch
    check(pool4, reference(name), name, plans_for(name, meshes, cuts=cuts))


@pytest.mark.parametrize(("name", "cells"), [
    ("llama-tiny", ((CP2DP2, 2, 1), (TP2DP2, 3, 2), *tried((), ((TP2DP2, 1, 2),)))),
    pytest.param("gpt-tiny", ((DP4, 1, 1), (TP2DP2, 2, 2), (DP4, 3, 2)), marks=pytest.mark.slow),
    ("moe-tiny", ((EP2, 3, 1),)),
])  # fmt: skip
def test_every_stage_is_exact(pool4, name, cells):
    check(
        pool4,
        reference(name),
        name,
        [plan for mesh, zero, cut in cells for plan in plans_for(name, (mesh,), (zero,), (cut,))],
    )


@pytest.mark.slow  # test_composed.py clips too
def test_clipping(pool4):
    found = case("gpt-tiny")
    result = train(found.model, found.batches, max_grad_norm=0.05)
    assert update_error(result, reference("gpt-tiny").after) > 1e6, "the limit must bite"
    check(
        pool4, result, "gpt-tiny", plans_for("gpt-tiny", (TP2DP2,), zeros=(1, 3), cuts=(2,)), 0.05
    )


@pytest.mark.slow  # test_composed.py has every mode
def test_recompute(pool4):
    check(
        pool4,
        reference("llama-tiny"),
        "llama-tiny",
        plans_for("llama-tiny", (TP2DP2,), (2, 3), (2,), recompute="full"),
    )


# ------------------------------------------------------------------------------------------------------- parameters that are not alike


@pytest.mark.parametrize(
    ("optimizer", "mesh", "zeros"),
    [
        ("adamw", TP2DP2, tried((3,), (1, 3))),
        ("adam", DP4, (2,)),
        pytest.param("adafactor", TP2DP2, (3,), marks=pytest.mark.slow),
    ],
)
def test_odd_parameters_and_optimizers(pool4, optimizer, mesh, zeros):
    check_odd(pool4, optimizer, odd_plans((mesh,), zeros))


def fused_step(rank: int, text: str) -> None:
    found = case("llama-tiny")
    engine = Engine(
        found.model,
        found.traced,
        Plan.from_json(text),
        lambda p: torch.optim.SGD(p, 0.1, fused=True),
        None,
        None,
        "cpu",
    )
    engine.step(engine.local_batch(found.batches[0]))


def test_a_fused_step_runs_on_shards(pool2):
    """torch lacks the op for DTensors: the optimizer gets local tensors."""
    pool2.run(fused_step, plans_for("llama-tiny", (MeshShape(tp=2),), (0,), (1,))[0].to_json())


class Needing(torch.optim.SGD):
    def step(self, *, grads):
        raise AssertionError


FACTORIES = {
    "a list, not a torch.optim.Optimizer": list,
    "a NoneType, not a torch.optim.Optimizer": lambda p: None,
    "Needing.step needs grads": lambda p: Needing(p, 0.1),
}


def refused_step(rank: int, text: str, words: str) -> None:
    found = case("llama-tiny")
    engine = Engine(
        found.model, found.traced, Plan.from_json(text), FACTORIES[words], None, None, "cpu"
    )
    engine.step(engine.local_batch(found.batches[0]))


@pytest.mark.parametrize("words", FACTORIES)
def test_factories_of_no_use_are_refused(pool2, words):
    with pytest.raises(AutoparError, match=words):
        pool2.run(
            refused_step,
            plans_for("llama-tiny", (MeshShape(tp=2),), (0,), (1,))[0].to_json(),
            words,
        )


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_odd_parameters_in_every_stage(pool4, optimizer):
    check_odd(pool4, optimizer, odd_plans((DP4, TP2DP2, CP2DP2)))
    check_odd(pool4, optimizer, odd_plans((DP4, TP2DP2), recompute="full"))


def test_gathering_ahead_with_recompute(pool4):
    """What GPUs do: the next segment travels while one computes."""
    check_odd(
        pool4,
        "sgd",
        odd_plans((DP4,), zeros=(3,)) + odd_plans((DP4,), zeros=(3,), cut=1, recompute="full"),
        ahead=True,
    )


def train_once_a_step(rank: int, texts: list[str]) -> list:
    """As in a pipeline: parameters are gathered, and gradients reduced, once a step."""
    by_pass, Holding.by_pass = Holding.by_pass, False
    try:
        return train_odd(rank, "sgd", texts)
    finally:
        Holding.by_pass = by_pass


def test_sending_once_a_step(pool4):
    losses, evaluated, result = reference_odd("sgd")
    for by_rank in pool4.run(
        train_once_a_step, [plan.to_json() for plan in odd_plans((DP4,), zeros=(2, 3))]
    ):
        for own_losses, own_evaluated, state in by_rank:
            assert update_error(result, state) <= 1.0
            assert own_losses == pytest.approx(losses, rel=1e-9) and own_evaluated == pytest.approx(
                evaluated, rel=1e-9
            )
