"""Every plan is exact, not only good ones: any strategy for any op, any layout on any boundary, against one device.

On dp, ep and cp the random choice is autopar's own space too (sharded, partial, replicated), wider than what propagation picks.
Every change of layout of a plan is one that the annotation prices (`check_conversions`), so that the solver could have chosen it.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from support.effort import slow_but, tried
from support.exactness import (
    MODELS,
    case,
    gathering_again,
    moved,
    random_plan,
    reference,
    setting,
    train_under,
)

from autopar.annotate.annotator import Annotator
from autopar.ir.mesh import MeshShape
from autopar.trace.fusion.fused import fused

MESHES = (MeshShape(tp=4), MeshShape(dp=2, tp=2), MeshShape(dp=4), MeshShape(cp=2, tp=2))
EXPERT_MESHES = (MeshShape(dp=4, ep=2), MeshShape(dp=2, ep=2, tp=2))
SEEDS = range(1)
FEW = (
    ("llama-tiny", MESHES[1]),
    ("gpt-tiny", MESHES[3]),
)
"""What runs without --runslow: each mesh once."""
MORE_SEEDS = range(100, 115)


@pytest.mark.parametrize("name", MODELS)
def test_training_moves_the_parameters(name):
    assert moved(reference(name)) >= 0.01


def check(
    pool, name: str, mesh: MeshShape, seeds, changed=lambda plan: plan, fuse: str = "off"
) -> None:
    found = case(name)
    traced, annotator = found.traced, found.annotator
    if fuse != "off":
        traced = fused(traced, fuse)
        annotator = Annotator(traced)
    plans = [changed(random_plan(traced, annotator, setting(mesh), seed)) for seed in seeds]
    plans = [replace(plan, fusion=traced.fusion) for plan in plans]
    results = pool.run(
        train_under, name, [plan.to_json() for plan in plans], timeout_s=60 + 30 * len(plans)
    )
    for seed, by_rank in zip(seeds, zip(*results, strict=True), strict=True):
        for rank, result in enumerate(by_rank):
            assert not isinstance(result, str), (
                f"{name} on {mesh}, seed {seed}, rank {rank}: {result}"
            )
            error, loss_error = result
            assert error <= 1.0, (
                f"{name} on {mesh}, seed {seed}, rank {rank}: update error {error:g} times the tolerance"
            )
            assert loss_error <= 1e-9, (
                f"{name} on {mesh}, seed {seed}, rank {rank}: losses differ by {loss_error:g}"
            )


@pytest.mark.parametrize(("name", "mesh"), [
    pytest.param(name, mesh, id=f"{name}-{mesh}", marks=() if (name, mesh) in FEW else pytest.mark.slow)
    for name, mesh in product(MODELS, MESHES)
])  # fmt: skip
def test_random_plans_are_exact(pool4, name, mesh):
    check(pool4, name, mesh, SEEDS)


@pytest.mark.parametrize(("name", "mesh"), [
    pytest.param(name, mesh, id=f"{name}-{mesh}", marks=pytest.mark.slow if (name, mesh.tp) != ("gpt-tiny", 4) else ())
    for name, mesh in product(MODELS, [mesh for mesh in MESHES if mesh.tp > 1])
])  # fmt: skip
def test_random_plans_that_gather_again_are_exact(pool4, name, mesh):
    check(pool4, name, mesh, range(200, tried(201, 202)), gathering_again)


@pytest.mark.parametrize("mesh", slow_but(EXPERT_MESHES[1:], EXPERT_MESHES), ids=str)
def test_random_plans_of_experts_are_exact(pool4, mesh):
    check(pool4, "moe-tiny", mesh, SEEDS)


@pytest.mark.parametrize("mesh", slow_but([], MESHES), ids=str)
@pytest.mark.parametrize("name", slow_but(["gpt-tiny"], ["gpt-tiny", "llama-tiny"]))
def test_random_plans_of_fused_models_are_exact(pool4, name, mesh):
    """A head that is one op with its loss, over any axis and in any layout."""
    check(pool4, name, mesh, range(300, tried(301, 303)), fuse="head")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_many_random_plans_are_exact(pool4, name, mesh):
    check(pool4, name, mesh, MORE_SEEDS)
