"""The table of docs/internals/zero.md: ZeRO stage x accumulation, cell by cell: resident bytes, and
collectives of a step.  And mutants: a step that leaves out a collective, or a rank's part, is not exact."""

from __future__ import annotations

import pytest
import torch
from autopar_cost_models import static_bytes
from support.effort import tried
from support.exactness import case, reference, run_steps, update_error
from support.zero_table import COLLECTIVES, NAME, engine_of, observe, plan_of

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine


def test_every_cell_of_the_table(pool4):
    cells = [(stage, cut) for stage in range(4) for cut in tried((2,), (1, 2))]
    trained = [spec for spec in case(NAME).traced.parameters.values() if spec.trainable]
    for by_rank in pool4.run(observe, [plan_of(*cell).to_json() for cell in cells], timeout_s=300):
        for (stage, cut), (calls, held) in zip(cells, by_rank, strict=True):
            assert calls == {
                f"{kind} of 4": count for kind, count in COLLECTIVES[stage](cut).items()
            }, (stage, cut, calls)
            predicted = [
                static_bytes(torch.Size(spec.shape).numel(), "fp64", stage, 4) for spec in trained
            ]
            for what in ("parameters", "gradients", "optimizer"):
                assert held[what] == sum(getattr(p, what) for p in predicted), (
                    stage,
                    cut,
                    what,
                    held,
                )


# ------------------------------------------------------------------------------------------------------------------------- mutants


def forget_a_part(engine: Engine) -> None:
    """Rank 1's part of every matrix never reaches the others."""
    real = engine.parameters._gather

    def gather(names):
        ones = [engine.parameters.trained[name] for name in names]
        found = [
            whole.reshape(one.leaf.shape).clone()
            for one, whole in zip(ones, real(names).wait(), strict=True)
        ]
        for one, whole in zip(ones, found, strict=True):
            if whole.dim() == 2 and engine.rank != 1:
                whole.chunk(4, one.share.dim)[1].zero_()
        return Arrived(found)

    engine.parameters._gather = engine.parameters.gathering._gather = gather


class Arrived(list):
    """Tensors that need not be waited for."""

    def wait(self):
        return self


def skip_reduce_scatter(engine: Engine) -> None:
    """Each rank keeps its part of its own gradient."""
    gradients = engine.parameters.gradients
    gradients._scatter = lambda grads: Arrived(
        gradients.trained[name].share.part(grad, engine.axes).clone()
        for name, grad in grads.items()
    )


def skip_gather(engine: Engine) -> None:
    """Leaves keep what they were, but for this rank's own part."""
    engine.parameters.publish = lambda: None


def last_micro_batch_only(engine: Engine) -> None:
    def add(name, grad):
        engine.parameters.trained[name].total = grad

    engine.parameters.gradients._add = add


def turn_ranks(engine: Engine) -> None:
    """Every rank gets the sum of the gradient that another one owns."""
    gradients = engine.parameters.gradients
    real = gradients._scatter

    def turned(name, grad):
        share = gradients.trained[name].share
        return grad.roll(share.split("dp").size // 4, share.dim) if share.cuts else grad

    gradients._scatter = lambda grads: real({name: turned(name, g) for name, g in grads.items()})


def double_reduction(engine: Engine) -> None:
    """Parts are added up once more over dp, as if nothing had been."""
    holding = engine.parameters.holding
    holding.layouts_of_masters = lambda names: {name: holding.layouts[name] for name in names}


MUTANTS = {
    "reduce-scatter skipped": (skip_reduce_scatter, (1, 2, 3), 1, MeshShape(dp=4)),
    "gather skipped": (skip_gather, (1, 2), 1, MeshShape(dp=4)),
    "last micro-batch only": (last_micro_batch_only, (2, 3), 2, MeshShape(dp=4)),
    "ranks turned": (turn_ranks, (1, 2, 3), 1, MeshShape(dp=4)),
    "reduced twice": (double_reduction, (1, 2, 3), 1, MeshShape(dp=4)),
    "a part forgotten": (forget_a_part, (1, 2, 3), 1, MeshShape(dp=4)),
}


def train_mutant(rank: int, kind: str, text: str):
    engine = engine_of(Plan.from_json(text))
    MUTANTS[kind][0](engine)
    return run_steps(engine, case(NAME).batches)


@pytest.mark.parametrize("kind", MUTANTS)
@pytest.mark.slow
def test_mutants_are_caught(pool4, kind):
    _, stages, cut, mesh = MUTANTS[kind]
    for stage in stages:
        results = pool4.run(train_mutant, kind, plan_of(stage, cut, mesh).to_json())
        assert max(update_error(reference(NAME), state) for _, state in results) > 1e3, (
            kind,
            stage,
        )
