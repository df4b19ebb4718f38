"""Pipelines, ZeRO, recompute, clipping, precision and checkpoints together, against one device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.checkpoint_runs import agree, load_and_go_on, save_after_two
from support.effort import tried
from support.exactness import case, engine_for, run_steps, setting, solved_plan, train, update_error
from support.half_precision import NEAR, batches, error, model, sgd, traced
from support.half_precision import reference as half_reference
from support.half_precision import run as run_half
from support.staged_runs import pipelined, staged
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine

DP, ONES, LIMIT = MeshShape(pp=2, dp=2), (1, 1, 1, 1), 0.05
MIXED = ("none", "op", "selective", "full")
CELLS = [  # ZeRO, schedule, segments of each stage, micro-batches, recompute of segments in turn; gpt-tiny's table of tokens is tied
    (1, "1f1b", (2, 2), 2, MIXED),
    (2, "interleaved_1f1b", ONES, 2, MIXED),
    (3, "1f1b", (1, 3), 4, MIXED),
    (1, "zero_bubble", (2, 2), 4, ("selective", "full")),
    (3, "zero_bubble", (1, 3), 2, ("full", "none")),
]


def plan_of(zero: int, *how, name: str = "gpt-tiny") -> Plan:
    return replace(pipelined(name, DP, *how), zero=zero)


def clipped(
    rank: int, texts: list[str]
) -> list[tuple[list[float], dict[str, Tensor], list[float]]]:
    found = []
    for text in texts:
        engine = engine_for("gpt-tiny", Plan.from_json(text), LIMIT)
        losses, state = run_steps(engine, case("gpt-tiny").batches)
        found.append(
            (
                losses,
                state,
                [float(engine.eval_step(engine.local_batch(b))) for b in case("gpt-tiny").batches],
            )
        )
    return found


def test_zero_in_pipelines_is_exact(pool4):
    found = case("gpt-tiny")
    expected = train(found.model, found.batches, max_grad_norm=LIMIT)
    cells = tried(CELLS[::2], CELLS)
    for by_rank in pool4.run(clipped, [plan_of(*cell).to_json() for cell in cells], timeout_s=300):
        for cell, (losses, state, evaluated) in zip(cells, by_rank, strict=True):
            assert update_error(expected, state) <= 1.0, (cell, update_error(expected, state))
            assert losses == pytest.approx(
                expected.losses, abs=1e-9
            ) and evaluated == pytest.approx(by_rank[0][2], abs=1e-9)


@pytest.mark.slow
def test_every_recompute_mode_gathers_under_zero3(pool4):
    found = case("gpt-tiny")
    whole = replace(solved_plan(found.traced, found.annotator, setting(MeshShape(dp=4), 2)), zero=3)
    plan = staged(whole, found.traced, "none", (4,), MIXED[1:])
    expected = train(found.model, found.batches, max_grad_norm=LIMIT)
    for by_rank in pool4.run(clipped, [plan.to_json()]):
        assert update_error(expected, by_rank[0][1]) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_half_precision_in_a_pipeline(pool4, precision):
    solved = replace(solved_plan(*traced(precision), setting(DP, 2)), zero=2, precision=precision)
    plans = [
        staged(solved, traced(precision)[0], schedule, (2, 2), ("none", "full"))
        for schedule in ("1f1b", "zero_bubble")
    ]
    for by_plan in pool4.run(run_half, [plan.to_json() for plan in plans]):
        for losses, state, dtypes in by_plan:
            assert len(dtypes) == 1 and {v.dtype for v in state.values()} == {torch.float32}
            assert error(half_reference(precision, 2), state) <= NEAR[precision]
            assert losses == pytest.approx(half_reference(precision, 2).losses, rel=3e-3)


def test_what_zero_bubble_cannot_do_is_refused():
    with pytest.raises(AutoparError, match="under zero_bubble"):
        engine_for("gpt-tiny", plan_of(1, "zero_bubble", (2, 2), 4, ("op",)))


# --------------------------------------------------------------------------------------------------------------------- checkpoints


def alone(name: str, zero: int, mesh: MeshShape) -> str:
    """A plan without a pipeline."""
    found = case(name)
    return replace(solved_plan(found.traced, found.annotator, setting(mesh)), zero=zero).to_json()


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        pytest.param("gpt-tiny", "grouped", marks=pytest.mark.slow),
        pytest.param("gpt-tiny", "sgd", marks=pytest.mark.slow),
        # gpt's key biases have no gradient but rounding, by whose size Adafactor would divide it
        pytest.param("llama-tiny", "adafactor", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_zero_and_pipelines(pool4, tmp_path, name, optimizer):
    """What a pipeline under ZeRO saves, one process, other ZeRO stages and another pipeline load; and back."""
    pipeline, other = (plan_of(*CELLS[k], name=name).to_json() for k in (0, 2))
    one, shared = alone(name, 0, MeshShape()), alone(name, 3, MeshShape(dp=2, tp=2))

    def passes_on(source: str, targets: tuple[str, ...]) -> None:
        """What `source` saves the targets load, each under its own processes, and go on as it does."""
        at = str(tmp_path / f"from{len(list(tmp_path.iterdir()))}")

        def run(function, text: str) -> list[tuple]:
            arguments = name, text, optimizer, at
            return [function(0, *arguments)] if text == one else pool4.run(function, *arguments)

        saved = run(save_after_two, source)[0]
        for text in targets:
            agree(saved, run(load_and_go_on, text))

    passes_on(pipeline, (shared, one))
    if optimizer != "grouped":
        passes_on(pipeline, (other, pipeline))
        passes_on(shared, (pipeline,))
    passes_on(one, (other,))


def half_engine(text: str) -> Engine:
    return Engine(model(), traced("fp16")[0], Plan.from_json(text), sgd, None, None, "cpu")


def save_and_load_half(rank: int, source: str, target: str, directory: str) -> tuple:
    """(scale, good steps), masters and the loss of the next step, of the engine that saved and of the one that loaded."""
    found = []
    for text in (source, target):
        engine = half_engine(text)
        if text == source:
            engine.loss_scale.scale = 2.0**9
            engine.step(engine.local_batch(batches()[0]))
            engine.save(directory).wait()
        else:
            engine.load(directory)
        scale = engine.loss_scale.scale, engine.loss_scale.good_steps
        found.append(
            (scale, engine.full_state_dict(), float(engine.step(engine.local_batch(batches()[1]))))
        )
    return tuple(found)


@pytest.mark.slow
def test_checkpoints_of_half_precision(pool4, tmp_path):
    def half(mesh: MeshShape, zero: int) -> Plan:
        return replace(solved_plan(*traced("fp16"), setting(mesh, 2)), zero=zero, precision="fp16")

    source = staged(half(DP, 2), traced("fp16")[0], "1f1b", (2, 2))
    for saved, loaded in pool4.run(
        save_and_load_half, source.to_json(), half(MeshShape(dp=4), 3).to_json(), str(tmp_path)
    ):
        assert saved[0] == loaded[0] == (2.0**9, 1)
        assert all(
            v.dtype == torch.float32 and torch.equal(loaded[1][k], v) for k, v in saved[1].items()
        )
        assert loaded[2] == pytest.approx(saved[2], rel=3e-3)
