"""Hybrid sharding: groups of data-parallel ranks share out what ZeRO does, each for itself.  Exact against one device, the table of
resident bytes and collectives within groups, checkpoints; and mutants that must be caught."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import pytest
from autopar_cost_models import static_bytes
from support.checkpoint_runs import agree, load_and_go_on, save_after_two
from support.effort import tried
from support.exactness import case, reference, run_steps, setting, solved_plan, train, update_error
from support.half_precision import NEAR, error, traced
from support.half_precision import reference as half_reference
from support.half_precision import run as run_half
from support.staged_runs import pipelined
from support.zero_runs import check, check_odd, odd_plans, plans_for
from support.zero_table import COLLECTIVES, engine_of, observe, plan_of

from autopar.ir.mesh import COPIES, MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.ranks.launch import WorkerPool

DP4, CP2DP2, EP2 = MeshShape(dp=4), MeshShape(dp=2, cp=2), MeshShape(dp=4, ep=2)
DP4TP2, CP2DP4, DP8 = MeshShape(dp=4, tp=2), MeshShape(dp=4, cp=2), MeshShape(dp=8)


def grouped(plans: list[Plan], shard: int) -> list[Plan]:
    return [replace(plan, shard=shard) for plan in plans]


def cells_of(name: str, cells, recompute: str = "none") -> list[Plan]:
    """Plans of (mesh, shard, ZeRO stage, micro-batches)."""
    return [
        plan
        for mesh, shard, zero, cut in cells
        for plan in grouped(plans_for(name, (mesh,), (zero,), (cut,), recompute), shard)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "cells"), [
    ("llama-tiny", ((DP4, 2, 1, 2), (DP4, 2, 2, 1), (DP4, 2, 3, 2), (CP2DP2, 2, 3, 1))),
    ("moe-tiny", ((EP2, 2, 1, 1), (EP2, 2, 3, 1))),  # experts, which two ranks hold, are not shared out
])  # fmt: skip
def test_groups_are_exact(pool4, name, cells):
    plans = cells_of(name, cells)
    check(
        pool4,
        reference(name),
        name,
        [*plans, *(replace(plan, offload="optimizer") for plan in plans[::2])],
    )


def test_groups_are_exact_with_clipping(pool4):
    found = case("gpt-tiny")
    result = train(found.model, found.batches, max_grad_norm=0.05)
    assert update_error(result, reference("gpt-tiny").after) > 1e6, "the limit must bite"
    check(
        pool4,
        result,
        "gpt-tiny",
        cells_of("gpt-tiny", ((DP4, 2, 1, 2), *tried((), ((DP4, 2, 2, 2), (CP2DP2, 2, 1, 1))))),
        0.05,
    )
    check(pool4, result, "gpt-tiny", cells_of("gpt-tiny", ((DP4, 2, 3, 2),), "full"), 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_odd_parameters_and_optimizers(pool4, optimizer):
    check_odd(pool4, optimizer, grouped(odd_plans((DP4, CP2DP2)), 2))


@pytest.mark.slow
def test_gathering_ahead(pool4):
    """What GPUs do: the next segment travels inside the group while one computes."""
    check_odd(
        pool4,
        "sgd",
        grouped(odd_plans((DP4,), (3,)) + odd_plans((DP4,), (3,), recompute="full"), 2),
        ahead=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(pool4, precision):
    solved = solved_plan(*traced(precision), setting(DP4, 2))
    texts = [replace(solved, zero=zero, shard=2, precision=precision).to_json() for zero in (1, 3)]
    for losses, state, _ in pool4.run(run_half, texts)[0]:
        assert error(half_reference(precision, 2), state) <= NEAR[precision]
        assert losses == pytest.approx(half_reference(precision, 2).losses, rel=3e-3)


@pytest.mark.slow
def test_groups_on_eight_ranks():
    """With tp, in pipelines, over dp and cp together, and with ranks numbered otherwise."""
    found, staged = case("gpt-tiny"), MeshShape(pp=2, dp=4)
    plans = cells_of("gpt-tiny", (
        (DP4TP2, 2, 1, 1), (DP4TP2, 2, 3, 2), (CP2DP4, 2, 1, 1), (CP2DP4, 4, 3, 2), (DP8, 4, 2, 1), (DP8, 2, 3, 1),
        (MeshShape(dp=4, tp=2, order="tp-dp"), 2, 3, 1),
    ))  # fmt: skip
    schedules = (
        (1, "1f1b", (2, 2)),
        (3, "1f1b", (1, 3)),
        (2, "interleaved_1f1b", (1, 1, 1, 1)),
        (1, "zero_bubble", (2, 2)),
    )
    plans += [
        replace(pipelined("gpt-tiny", staged, how, cuts, 2), zero=zero, shard=2)
        for zero, how, cuts in schedules
    ]
    result = train(found.model, found.batches, max_grad_norm=0.05)
    with WorkerPool(8) as pool:
        check(pool, result, "gpt-tiny", plans, 0.05)


def test_every_cell_of_the_table_within_groups(pool4):
    """What is divided by the ranks of a group, and the one all-reduce between groups, of parts."""
    cells = tried([(3, 2)], [(1, 1), (2, 2), (3, 2)])
    trained = [spec for spec in case("llama-tiny").traced.parameters.values() if spec.trainable]
    texts = [replace(plan_of(*cell), shard=2).to_json() for cell in cells]
    for by_rank in pool4.run(observe, texts, timeout_s=300):
        for (stage, cut), (calls, held) in zip(cells, by_rank, strict=True):
            assert calls == {
                f"{kind} of 2": count for kind, count in COLLECTIVES[stage](cut).items()
            } | {"all_reduce of 2": 1}
            predicted = [static_bytes(prod(spec.shape), "fp64", stage, 2) for spec in trained]
            for what in ("parameters", "gradients", "optimizer"):
                assert held[what] == sum(getattr(p, what) for p in predicted), (
                    stage,
                    cut,
                    what,
                    held,
                )


def alone(name: str, zero: int, mesh: MeshShape, shard: int = 0) -> str:
    found = case(name)
    return replace(
        solved_plan(found.traced, found.annotator, setting(mesh)), zero=zero, shard=shard
    ).to_json()


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer", "back"), [("adamw", False), *(pytest.param(name, True)
                                                                 for name in ("adamw", "adafactor"))])  # fmt: skip
def test_checkpoints(pool4, tmp_path, optimizer, back):
    """What groups save another plan and one process load, and back."""
    hybrid, other, one = (
        alone("llama-tiny", 3, DP4, 2),
        alone("llama-tiny", 1, MeshShape(dp=2, tp=2)),
        alone("llama-tiny", 0, MeshShape()),
    )
    arguments = optimizer, str(tmp_path)
    saved = pool4.run(save_after_two, "llama-tiny", other if back else hybrid, *arguments)[0]
    for text in (hybrid, alone("llama-tiny", 1, DP4, 2)) if back else (other,):
        agree(saved, pool4.run(load_and_go_on, "llama-tiny", text, *arguments))
    if not back:
        agree(saved, [load_and_go_on(0, "llama-tiny", one, *arguments)])


# ------------------------------------------------------------------------------------------------------------------------- mutants


def forget_the_groups(engine: Engine) -> None:
    """Gradients are not added up from group to group."""
    holding = engine.parameters.holding
    real = holding.layouts_of_masters
    holding.layouts_of_masters = lambda names: {
        name: {axis: layout for axis, layout in own.items() if axis != COPIES}
        for name, own in real(names).items()
    }


def add_up_over_all(engine: Engine) -> None:
    """Parts that differ are added up: those of all ranks."""
    engine.parameters.holding.axes[COPIES] = engine.axes["dp"]


def cross_the_groups(engine: Engine) -> None:
    """Wholes are put together from ranks that hold the same part."""
    real, own, holding = engine.parameters._gather, engine.parameters, engine.parameters.holding

    def gather(names):
        axes, holding.axes = holding.axes, holding.axes | {"dp": holding.axes[COPIES]}
        try:
            return real(names)
        finally:
            holding.axes = axes

    own._gather = own.gathering._gather = gather


MUTANTS = {
    "groups forgotten": (forget_the_groups, (1, 2, 3)),
    "all added up": (add_up_over_all, (1, 2, 3)),
    "groups crossed": (cross_the_groups, (1, 3)),
}


def train_mutant(rank: int, kind: str, text: str):
    engine = engine_of(Plan.from_json(text))
    MUTANTS[kind][0](engine)
    return run_steps(engine, case("llama-tiny").batches)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind == "groups forgotten" else pytest.mark.slow)
        for kind in MUTANTS
    ],
)
def test_mutants_are_caught(pool4, kind):
    for stage in MUTANTS[kind][1]:
        results = pool4.run(train_mutant, kind, replace(plan_of(stage, 1), shard=2).to_json())
        assert max(update_error(reference("llama-tiny"), state) for _, state in results) > 1e3, (
            kind,
            stage,
        )
