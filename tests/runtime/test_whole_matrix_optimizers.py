"""Optimizers that look at whole matrices, or at all of them: exact against one device, or refused by name with advice that is exact."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache

import pytest
import torch
from support.checkpoint_runs import case
from support.exactness import Reference, moved, setting, solved_plan, update_error
from support.half_precision import NEAR, error
from support.half_precision import batches as half_batches
from support.half_precision import model as half_model
from support.half_precision import traced as half_traced
from support.meshes import DP2, DP2TP2, DP4, EP2, ONE, PP2, TP2
from support.staged_runs import pipelined
from support.whole_matrix_optimizers import OPTIMIZERS
from torch import nn

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.rewrite.collectives.axes import AxisGroup
from autopar.runtime.engine import Engine
from autopar.runtime.state.holding import Cutting
from autopar.runtime.state.optimizer_trials import habits_of
from autopar.runtime.state.whole_matrices import WholeMatrices
from autopar.runtime.state.zero import Share

WHOLE = ("muon", "muon and adamw", "shampoo", "lamb", "lars", "lion", "hooked")


def plan_of(
    name: str,
    mesh: MeshShape,
    zero: int = 0,
    number: int = 1,
    offload: str = "none",
    shard: int = 0,
) -> Plan:
    found = case(name)
    if mesh.pp > 1:
        plan = pipelined(name, mesh, "1f1b", (2, 2), number)
    else:
        plan = solved_plan(found.traced, found.annotator, setting(mesh, number))
    return replace(plan, zero=zero, offload=offload, shard=shard)


@cache
def reference(name: str, optimizer: str, max_grad_norm: float | None = None) -> Reference:
    """Three steps of one device in eager mode."""
    model = copy.deepcopy(case(name).model)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    own, losses = OPTIMIZERS[optimizer]([p for p in model.parameters() if p.requires_grad]), []
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.7)
    for batch in case(name).batches:
        model.zero_grad()  # of all: some optimizers train matrices alone, and clipping counts every gradient
        loss = model(**batch)
        loss.backward()
        if max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
        own.step()
        schedule.step()
        losses.append(loss.item())
    return Reference(losses, before, {k: v.clone() for k, v in model.state_dict().items()})


def engine_of(name: str, optimizer: str, text: str, max_grad_norm: float | None = None) -> Engine:
    found = case(name)
    return Engine(
        found.model,
        found.traced,
        Plan.from_json(text),
        OPTIMIZERS[optimizer],
        max_grad_norm,
        None,
        "cpu",
    )


def train_under(
    rank: int, name: str, runs: list[tuple[str, str]], max_grad_norm: float | None = None
) -> list[tuple[list[float], dict]]:
    found = []
    for optimizer, text in runs:
        engine = engine_of(name, optimizer, text, max_grad_norm)
        schedule, losses = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.7), []
        for batch in case(name).batches:
            losses.append(float(engine.step(engine.local_batch(batch))))
            schedule.step()
        found.append((losses, engine.full_state_dict()))
    return found


def check(
    pool, name: str, runs: list[tuple[str, Plan]], max_grad_norm: float | None = None
) -> None:
    texts = [(optimizer, plan.to_json()) for optimizer, plan in runs]
    for by_rank in pool.run(train_under, name, texts, max_grad_norm, timeout_s=400):
        for (optimizer, plan), (losses, state) in zip(runs, by_rank, strict=True):
            expected = reference(name, optimizer, max_grad_norm)
            error = update_error(expected, state)
            assert error <= 1.0, (optimizer, str(plan.mesh), plan.zero, plan.offload, error)
            assert losses == pytest.approx(expected.losses, rel=1e-9)
            assert (
                moved(expected) if optimizer != "muon" else distance(expected)
            ) > 0.01  # Muon trains matrices alone


def distance(result: Reference) -> float:
    """How far training moved all tensors, relative to their norm."""
    names = [name for name, value in result.before.items() if value.is_floating_point()]
    change = sum((result.after[name] - result.before[name]).norm() ** 2 for name in names)
    return float((change / sum(result.before[name].norm() ** 2 for name in names)).sqrt())


CELLS = ((TP2, 0, 1), (DP2, 3, 2), (PP2, 0, 2), (DP2, 1, 2), (DP2, 2, 2), (DP2, 0, 1))


@pytest.mark.parametrize(("optimizer", "cells"), [
    ("muon", CELLS[:1]), ("shampoo", CELLS[1:2]), ("lamb", CELLS[2:3]), ("lars", CELLS[3:4]), ("lion", CELLS[4:5]), ("hooked", CELLS[:1]),
    *(pytest.param(optimizer, CELLS, marks=pytest.mark.slow) for optimizer in WHOLE),
])  # fmt: skip
def test_whole_matrices_are_exact(pool2, optimizer, cells):
    check(pool2, "gpt-tiny", [(optimizer, plan_of("gpt-tiny", *cell)) for cell in cells])


@pytest.mark.slow
def test_with_clipping_over_both_axes_and_in_groups(pool4):
    """Also offloaded, with groups of ranks that share out, and where a pipeline cuts what tp and ZeRO cut."""
    mixed = MeshShape(pp=2, tp=2)
    plans = [plan_of("gpt-tiny", DP2TP2, 3, 2), plan_of("gpt-tiny", DP2TP2, 1, 1, "optimizer"), plan_of("gpt-tiny", DP4, 2, 1, shard=2),
             plan_of("gpt-tiny", mixed, 0, 2), plan_of("gpt-tiny", MeshShape(cp=2, dp=2), 3)]  # fmt: skip
    check(pool4, "gpt-tiny", [("muon and adamw", plan) for plan in plans], 0.5)
    assert (
        update_error(
            reference("gpt-tiny", "muon and adamw"),
            reference("gpt-tiny", "muon and adamw", 0.5).after,
        )
        > 1e6
    )


@pytest.mark.slow
def test_batches_of_expert_matrices_are_gathered_over_ep(pool2):
    runs = [
        ("shampoo", plan_of("moe-tiny", EP2)),
        ("lamb", plan_of("moe-tiny", EP2, 3)),
        ("muon", plan_of("moe-tiny", TP2)),
    ]
    check(pool2, "moe-tiny", runs)


def test_fused_projections_and_tied_weights_are_whole_in_their_own_order(pool4):
    """tp shards three sections of one matrix, and 11 rows of another; ZeRO cuts what tp leaves."""
    cells = [(optimizer, plan_of("fused", *cell)) for optimizer, cell in
             (("shampoo", (DP2TP2, 3)), ("lamb", (MeshShape(tp=4), 0)), ("muon", (DP2TP2, 1)))]  # fmt: skip
    check(pool4, "fused", cells)
    assert any(
        len(cut.pattern.sections) > 1
        for cut in pool4.run(patterns, plan_of("fused", DP2TP2).to_json())[0]
    )


def patterns(rank: int, text: str) -> list:
    engine = engine_of("fused", "adamw", text)
    return [
        split
        for name in engine.parameters.trained
        for _, split in engine.parameters.holding.cuttings[name].splits
    ]


@pytest.mark.slow
def test_offloaded_masters(pool2):
    plans = [plan_of("llama-tiny", TP2, 0, 1, "optimizer"), plan_of("llama-tiny", DP2, 2, 2, "optimizer"),
             plan_of("llama-tiny", DP2, 3, 1, "parameters"), plan_of("llama-tiny", TP2, 0, 1, "parameters")]  # fmt: skip
    check(
        pool2,
        "llama-tiny",
        [("lamb", plan) for plan in plans] + [("adafactor", plan) for plan in plans[1:3]],
    )


def test_what_looks_at_all_parameters(pool2):
    """Every rank then updates all of them, which no stage of a pipeline has."""
    check(
        pool2,
        "gpt-tiny",
        [("prodigal", plan_of("gpt-tiny", *cell)) for cell in ((TP2, 0), (DP2, 3, 2), (DP2, 0))],
    )


REFUSED = {
    "prodigal": (
        PP2,
        0,
        r"Prodigal updates a parameter by what it knows of others, which are in other stages",
    ),
    "langevin": (
        TP2,
        0,
        r"Langevin draws random numbers, so that copies of a parameter would part",
    ),
    "gathers": (DP2, 1, r"Gathers talks to other ranks in its step"),
    "eager": (TP2, 0, r"Eager does not step on small matrices as a trial \(.*"),
}


@pytest.mark.parametrize("optimizer", REFUSED)
def test_what_cannot_be_exact_is_refused(pool2, optimizer):
    mesh, zero, message = REFUSED[optimizer]
    advice = r".*, and the plan \(.*\) parts the parameters of the model. Pin pp=1, tp=1, ep=1 and zero=0, under which every rank"
    if optimizer == "prodigal":  # tp and ZeRO may stay, as in `test_what_looks_at_all_parameters`
        advice = r" of the pipeline \(pp=2\). Pin pp=1, under which every rank updates all of them"
    with pytest.raises(AutoparError, match=message + advice):
        pool2.run(
            train_under, "gpt-tiny", [(optimizer, plan_of("gpt-tiny", mesh, zero, 2).to_json())]
        )


def test_the_advice_of_the_refusals_is_exact(pool2):
    check(
        pool2,
        "gpt-tiny",
        [(optimizer, plan_of("gpt-tiny", DP2)) for optimizer in ("prodigal", "gathers", "eager")],
    )
    one, other = pool2.run(
        train_under, "gpt-tiny", [("langevin", plan_of("gpt-tiny", DP2).to_json())]
    )
    assert one[0][0] == other[0][0] and all(
        torch.equal(value, other[0][1][name]) for name, value in one[0][1].items()
    )


# --------------------------------------------------------------------------------------------------------------- which is which


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_habits(optimizer):
    """And the trial changes neither the optimizer, nor its parameters, nor what is drawn next."""
    parameters = [
        nn.Parameter(torch.randn(shape, dtype=torch.float64))
        for shape in ((9, 7), (3, 8), (7,), (7,), (2, 5, 6))
    ]
    own, before = OPTIMIZERS[optimizer](parameters), copy.deepcopy(parameters)
    torch.manual_seed(5)
    habits = habits_of(own)
    drawn, _ = torch.rand(1), torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)) and all(map(torch.equal, parameters, before))
    assert not any(own.state.values()) and all(p.grad is None for p in parameters)
    assert habits.couples is (optimizer == "prodigal")
    words = {"langevin": "draws random", "eager": "does not step on small"}
    assert habits.obstacle.startswith(words.get(optimizer, "")) and bool(habits.obstacle) is (
        optimizer in words
    )


def test_owners_share_alike():
    wholes = WholeMatrices(
        {
            axis: AxisGroup(axis, size, simulate=True)
            for axis, size in {"dp": 2, "ep": 1, "cp": 1, "tp": 2}.items()
        }
    )
    sizes = {f"w{k}": Cutting((k + 3, 5), (k + 3, 5), (), Share(), {}) for k in range(40)}
    wholes.choose(sizes, everywhere=False)
    total = sum((k + 3) * 5 for k in range(40))
    assert wholes.most_elements() <= 1.05 * total / 4 and sum(map(wholes.owns, sizes)) == 10
    wholes.choose(sizes, everywhere=True)
    assert wholes.most_elements() == total and all(map(wholes.owns, sizes))


def held_by(rank: int, text: str) -> tuple[int, int, int]:
    """Elements of the masters and of the optimizer's state on this rank, and of the whole model."""
    engine = engine_of("gpt-tiny", "muon and adamw", text)
    engine.step(engine.local_batch(case("gpt-tiny").batches[0]))
    trained = [p for group in engine.optimizer.param_groups for p in group["params"]]
    state = [value for found in engine.optimizer.state.values() for value in found.values()]
    whole = sum(value.numel() for value in engine.full_state_dict().values())
    return sum(p.numel() for p in trained), sum(value.numel() for value in state), whole


def test_each_rank_holds_its_share(pool2):
    ranks = pool2.run(held_by, plan_of("gpt-tiny", DP2, 3).to_json())
    whole = ranks[0][2]
    assert (
        sum(masters for masters, _, _ in ranks) <= whole
        and max(masters for masters, _, _ in ranks) < 0.65 * whole
    )
    assert all(state <= 1.5 * masters for masters, state, _ in ranks)


# -------------------------------------------------------------------------------------------------------- precision, checkpoints


def half_steps(rank: int, texts: list[str]) -> list[tuple[list[float], dict]]:
    found = []
    for text in texts:
        plan = Plan.from_json(text)
        engine = Engine(
            half_model(),
            half_traced(plan.precision)[0],
            plan,
            OPTIMIZERS["lamb"],
            None,
            None,
            "cpu",
        )
        losses = [float(engine.step(engine.local_batch(batch))) for batch in half_batches()]
        found.append((losses, engine.full_state_dict()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_master_weights_of_half_precision(pool2, precision):
    """The masters of the owners are fp32: near one process of the same recipe, which updates whole masters."""
    solved = {
        mesh: replace(solved_plan(*half_traced(precision), setting(mesh)), precision=precision)
        for mesh in (ONE, TP2, DP2)
    }
    [(losses, expected)] = half_steps(0, [solved[ONE].to_json()])
    before = half_model().state_dict()
    for by_rank in pool2.run(
        half_steps, [solved[TP2].to_json(), replace(solved[DP2], zero=3).to_json()]
    ):
        for own_losses, state in by_rank:
            assert {value.dtype for value in state.values()} == {torch.float32}
            assert own_losses == pytest.approx(losses, rel=3e-3)
            assert error(Reference(losses, before, expected), state) <= NEAR[precision]


def saved(rank: int, optimizer: str, text: str, directory: str) -> tuple[str, dict]:
    engine, batches = engine_of("gpt-tiny", optimizer, text), case("gpt-tiny").batches
    engine.step(engine.local_batch(batches[0]))
    path = engine.save(directory).wait()
    for batch in batches[1:]:
        engine.step(engine.local_batch(batch))
    return str(path), engine.full_state_dict()


def loaded(rank: int, optimizer: str, text: str, directory: str) -> dict:
    engine = engine_of("gpt-tiny", optimizer, text)
    assert engine.load(directory) == 1
    for batch in case("gpt-tiny").batches[1:]:
        engine.step(engine.local_batch(batch))
    return engine.full_state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "source", "targets"), [
    ("muon", (TP2, 0), [(DP2, 3), (DP2, 0)]),
    ("shampoo", (DP2, 3), [(TP2, 0), (PP2, 0, 2)]),
    pytest.param("prodigal", (DP2, 0), [(TP2, 0), (DP2, 2)], marks=pytest.mark.slow),
])  # fmt: skip
def test_checkpoints_load_under_other_plans(pool2, tmp_path, optimizer, source, targets):
    """State of the shape of no parameter (Shampoo's) too, on two processes and on one."""
    first = pool2.run(saved, optimizer, plan_of("gpt-tiny", *source).to_json(), str(tmp_path))
    before, expected = case("gpt-tiny").model.state_dict(), first[0][1]
    found = [
        pool2.run(loaded, optimizer, plan_of("gpt-tiny", *cell).to_json(), str(tmp_path))[1]
        for cell in targets
    ]
    found.append(loaded(0, optimizer, plan_of("gpt-tiny", ONE).to_json(), str(tmp_path)))
    for state in found:
        assert update_error(Reference([], before, expected), state) <= 1.0
