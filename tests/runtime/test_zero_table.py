"""ARCHITECTURE.md's table of ZeRO stage x accumulation, cell by cell: resident bytes, and collectives of a step.  And mutants: a step that
leaves out a collective, or a rank's part, is not exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from autopar_cost_models import static_bytes
from support.exactness import case, reference, run_steps, setting, solved_plan, update_error

from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.state import gradients, zero

NAME, SEGMENTS = "llama-tiny", 4  # prologue, two layers, epilogue
COLLECTIVES = {  # of a step of k micro-batches, where all gradients fit one bucket
    0: lambda k: {"all_reduce": 1},
    1: lambda k: {"reduce_scatter": 1, "all_gather": 1},
    2: lambda k: {"reduce_scatter": k, "all_gather": 1},
    3: lambda k: {"reduce_scatter": SEGMENTS * k, "all_gather": (2 * SEGMENTS - 1) * k},
}


def plan_of(stage: int, cut: int, mesh: MeshShape = MeshShape(dp=4)) -> Plan:  # noqa: B008 (frozen)
    found = case(NAME)
    return replace(solved_plan(found.traced, found.annotator, setting(mesh, cut)), zero=stage)


def engine_of(
    plan: Plan, optimizer=lambda params: torch.optim.SGD(params, 0.5, momentum=0.9)
) -> Engine:
    return Engine(case(NAME).model, case(NAME).traced, plan, optimizer, None, None, "cpu")


def storage_bytes(tensors) -> int:
    """Bytes of the storages of tensors, each once."""
    return sum({s._cdata: s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def observe(rank: int, texts: list[str]) -> list[tuple[Counter, dict[str, int]]]:
    found = []
    for text in texts:
        engine, calls, held = (
            engine_of(Plan.from_json(text), lambda p: torch.optim.Adam(p, 0.01)),
            Counter(),
            {},
        )
        batch = engine.local_batch(case(NAME).batches[0])
        engine.step(batch)  # the optimizer makes its state
        update = engine._update

        def measured(engine=engine, held=held, update=update):
            held["gradients"] = storage_bytes(engine._gradients().values())
            held["parameters"] = storage_bytes(
                [t for p in engine.parameters.trained.values() for t in (p.leaf, p.own)]
            )
            states = [
                s
                for state in engine.optimizer.state.values()
                for key, s in state.items()
                if key != "step"
            ]
            held["optimizer"] = storage_bytes(local(s) for s in states)
            update()

        engine._update = measured
        with counted(calls):
            engine.step(batch)
        found.append((calls, held))
    return found


class counted:  # noqa: N801 (a block)
    """Counts the collectives that move parameters and gradients, by kind and ranks: `all_reduce of 4`."""

    def __init__(self, calls: Counter) -> None:
        self.calls, self.real = calls, (zero.start_primitive, gradients.sum_in_place)

    def __enter__(self):
        def started(kind, tensor, group, *splits):
            self.calls[f"{kind} of {group.size}"] += 1
            return self.real[0](kind, tensor, group, *splits)

        def added_up(tensor, group):
            self.calls[f"all_reduce of {group.size}"] += 1
            return self.real[1](tensor, group)

        zero.start_primitive, gradients.sum_in_place = started, added_up

    def __exit__(self, *_):
        zero.start_primitive, gradients.sum_in_place = self.real


def test_every_cell_of_the_table(pool4):
    cells = [(stage, cut) for stage in range(4) for cut in (1, 2)]
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
    shares = engine.parameters._shares
    engine.parameters._scatter = lambda names, grads: Arrived(
        shares[name].part(grad, engine.axes).clone()
        for name, grad in zip(names, grads, strict=True)
    )


def skip_gather(engine: Engine) -> None:
    """Leaves keep what they were, but for this rank's own part."""
    engine.parameters.publish = lambda: None


def last_micro_batch_only(engine: Engine) -> None:
    def add(name, grad):
        engine.parameters.trained[name].total = grad

    engine.parameters._add = add


def turn_ranks(engine: Engine) -> None:
    """Every rank gets the sum of the gradient that another one owns."""
    real, shares = engine.parameters._scatter, engine.parameters._shares

    def scatter(names, grads):
        own = [shares[name] for name in names]
        return real(
            names,
            [
                g.roll(s.split("dp").size // 4, s.dim) if s.cuts else g
                for g, s in zip(grads, own, strict=True)
            ],
        )

    engine.parameters._scatter = scatter


def double_reduction(engine: Engine) -> None:
    """Parts are added up once more over dp, as if nothing had been."""
    engine.parameters.effective_layouts = lambda layouts: layouts


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
