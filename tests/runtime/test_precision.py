"""Half precision against one process of the same recipe: bf16 leaves, fp32 master weights and sums; fp16 with a dynamic loss scale."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from support.effort import every, tried
from support.half_precision import NEAR, batches, error, model, plan_of, reference, run, sgd, traced
from torch import Tensor, nn

from autopar.api import parallelize, trace
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.runtime.engine import Engine
from autopar.runtime.state.precision import PRECISION_DTYPES, LossScale

DP4, TP2DP2, PP2DP2, ONE = (
    MeshShape(dp=4),
    MeshShape(dp=2, tp=2),
    MeshShape(pp=2, dp=2),
    MeshShape(),
)


@pytest.mark.parametrize(
    ("precision", "cells"),
    [
        (
            "bf16",
            (
                *tried((), ((TP2DP2, 0, 1), (DP4, 1, 2))),
                (TP2DP2, 3, 2),
                (PP2DP2, 3, 2),
            ),
        ),
        pytest.param("fp16", ((TP2DP2, 2, 2),), marks=pytest.mark.slow),
    ],
)
def test_near_one_process_of_the_same_recipe(pool4, precision, cells):
    plans = [plan_of(precision, *cell) for cell in cells]
    for by_rank in pool4.run(run, [plan.to_json() for plan in plans], timeout_s=300):
        for plan, (losses, state, dtypes) in zip(plans, by_rank, strict=True):
            expected = reference(precision, plan.num_microbatches)
            assert dtypes == {PRECISION_DTYPES[precision]} and {
                v.dtype for v in state.values()
            } == {torch.float32}
            assert error(expected, state) <= NEAR[precision], (plan.zero, str(plan.mesh))
            assert losses == pytest.approx(expected.losses, rel=3e-3)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_process(precision):
    [(losses, state, _)] = run(0, [plan_of(precision, ONE).to_json()])
    assert error(reference(precision), state) <= 1e-6 and losses == pytest.approx(
        reference(precision).losses, rel=3e-3
    )


class Angles(nn.Module):
    """A loss of angles of up to 8,191 radians by frequencies that bf16 rounds; `read`: how forward reads them."""

    def __init__(self, read) -> None:
        super().__init__()
        self.read, self.weight = read, nn.Parameter(torch.ones(8, dtype=torch.float32))
        self.register_buffer("frequencies", 500_000.0 ** (-torch.arange(8) / 8))

    def forward(self, positions: Tensor) -> Tensor:
        with torch.no_grad():
            angles = self.read(self.frequencies)[None] * positions[:, :1].float()
        return (angles.cos().float() * self.weight.float()).mean()


@pytest.mark.parametrize(
    "read",
    [
        Tensor.float,
        Tensor.double,
        lambda f: f[None, :, None].float()[0, :, 0],
        lambda f: f[None].expand(2, -1)[1].float(),
        lambda f: torch.cat([part.float() for part in f.chunk(2)]),
        lambda f: torch.cat([part.double() for part in f[None].unbind()]),
    ],
)
def test_a_buffer_that_forward_casts_back_is_never_rounded(read):
    """As the rotary frequencies of transformers: rounded, they turn later positions by radians."""
    model, positions = Angles(read), torch.full((4, 2), 8191)
    engine = parallelize(
        model, "cpu:1", {"positions": positions}, sgd, global_batch=4, precision="bf16"
    )
    expected, rounded = model(positions), copy.deepcopy(model).to(torch.bfloat16)(positions)
    assert abs(rounded - expected) > 0.05
    assert engine.step({"positions": positions}).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("read", [
    lambda f: f, lambda f: (f * 1).float(), lambda f: f.half().float(), lambda f: f.long().float(), lambda f: f.view(torch.int16).float(),
    lambda f: torch.cat([f.chunk(2)[0], f.chunk(2)[1].float()]), lambda f: f.sort()[0].float(), lambda f: f.float() + f.new_zeros(8) * f,
])  # fmt: skip
def test_other_buffers_are_cast(read):
    found = trace(Angles(read), {"positions": torch.full((4, 2), 8191)}, None, "bf16")
    assert not found.parameters["frequencies"].keeps_dtype


class Positions(nn.Module):
    """Adds a table to each 8 tokens; one that is repeated once is a view, so that only batches of 8 cast it back before all else."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(11, 4), nn.Linear(4, 11)
        self.register_buffer("table", torch.rand(8, 4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        places = self.table.repeat(tokens.shape[1] // 8, 1).float() @ torch.eye(
            4, device=tokens.device
        )
        logits = self.linear((self.embed(tokens) + places).to(self.linear.weight.dtype))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_batches_of_all_lengths_read_a_buffer_in_one_dtype():
    tokens = torch.randint(11, (2, 16))
    engine = parallelize(
        Positions(),
        "cpu:1",
        {"tokens": tokens, "labels": tokens},
        sgd,
        precision="bf16",
        buckets=[8, 16],
    )
    for length in (16, 8):
        assert torch.isfinite(
            engine.step({"tokens": tokens[:, :length], "labels": tokens[:, :length]})
        )


def small_steps(rank: int, text: str) -> tuple[float, float]:
    """How far 8 steps move the masters, of what 8 times the first step would; which share of a matrix in bf16 sees the first."""
    plan = Plan.from_json(text)
    engine = Engine(
        model(),
        traced(plan.precision)[0],
        plan,
        lambda p: torch.optim.SGD(p, 1e-5),
        None,
        None,
        "cpu",
    )
    batch = engine.local_batch(batches()[0])
    name = next(n for n, v in engine.full_state_dict().items() if "layers" in n and v.dim() == 2)
    before, leaf = engine.full_state_dict()[name].clone(), engine._leaves[name].clone()
    engine.step(batch)
    first, seen = (
        (engine.full_state_dict()[name] - before).norm(),
        (engine._leaves[name] != leaf).float().mean(),
    )
    for _ in range(7):
        engine.step(batch)
    return float((engine.full_state_dict()[name] - before).norm() / first / 8), float(seen)


def test_masters_keep_steps_that_bf16_would_round_away(pool2):
    for share, seen in pool2.run(small_steps, plan_of("bf16", MeshShape(dp=2), 1).to_json()):
        assert share == pytest.approx(1.0, abs=0.05)
        assert seen < 0.1


def overflow(rank: int, text: str) -> tuple[list[float], list[bool]]:
    """Scales after each step, and whether it left the parameters alone: one that overflows everywhere, one in which a single rank's
    gradient is infinite, and one that goes well."""
    engine = Engine(model(), traced("fp16")[0], Plan.from_json(text), sgd, 1.0, None, "cpu")
    batch, scales, skipped, reduce = (
        engine.local_batch(batches()[0]),
        [],
        [],
        engine.reduce_gradients,
    )

    def broken() -> None:
        reduce()
        if rank == 1:
            next(iter(engine._gradients().values())).view(-1)[0] = torch.inf

    for scale, reduction in ((2.0**40, reduce), (2.0**8, broken), (2.0**8, reduce)):
        before = engine.full_state_dict()
        engine.loss_scale.scale, engine.reduce_gradients = scale, reduction
        engine.step(batch)
        scales.append(engine.loss_scale.scale)
        skipped.append(all(torch.equal(before[k], v) for k, v in engine.full_state_dict().items()))
    assert all(bool(v.isfinite().all()) for v in engine.full_state_dict().values())
    return scales, skipped


@pytest.mark.parametrize("zero", every(2, [2, 0]))
def test_fp16_skips_a_step_on_every_rank_alike(pool2, zero):
    for scales, skipped in pool2.run(overflow, plan_of("fp16", MeshShape(dp=2), zero).to_json()):
        assert scales == [2.0**39, 2.0**7, 2.0**8] and skipped == [True, True, False]


def test_the_scale_doubles_after_2000_good_steps():
    scale = LossScale.of("fp16")
    assert (scale.scale, LossScale.of("bf16").scale) == (2.0**16, 1.0)
    for step in range(2000):
        assert scale.scale == 2.0**16, step
        grads = {"w": torch.full((2,), 2.0**16)}
        assert scale.unscale(grads, (), torch.device("cpu")) and grads["w"].tolist() == [1.0, 1.0]
    assert scale.scale == 2.0**17
    assert (
        not scale.unscale({"w": torch.tensor([float("nan")])}, (), torch.device("cpu"))
        and scale.scale == 2.0**16
    )


def test_an_engine_that_nobody_holds_is_freed():
    engine = Engine(model(), traced("bf16")[0], plan_of("bf16", ONE), sgd, None, None, "cpu")
    engine.step(engine.local_batch(batches()[0]))
    held = [weakref.ref(engine), *map(weakref.ref, engine.parameters.leaves.values())]
    assert len(held) > 1 and all(of() is not None for of in held)
    del engine
    gc.collect()
    assert not [of() for of in held if of() is not None]
