"""engine.metrics against counts made without it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.exactness import case, engine_for, setting, solved_plan

import autopar
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.rewrite.collectives.ranges import named

LIMIT = 0.05


def metrics_of_steps(rank: int, text: str) -> list:
    engine = engine_for("llama-tiny", Plan.from_json(text), LIMIT)
    return [
        (float(engine.step(engine.local_batch(batch))), engine.metrics)
        for batch in case("llama-tiny").batches
    ]


def test_loss_tokens_targets_and_norm_are_those_of_the_whole_batch(pool2):
    found = case("llama-tiny")
    plan = solved_plan(found.traced, found.annotator, setting(MeshShape(dp=2), 2))
    batch = found.batches[0]
    loss = found.model(**batch)
    norm = torch.stack(
        [g.norm() for g in torch.autograd.grad(loss, list(found.model.parameters()))]
    ).norm()
    loss = loss.detach()
    for steps in pool2.run(metrics_of_steps, plan.to_json()):
        for number, ((value, one), given) in enumerate(
            zip(steps, found.batches, strict=True), start=1
        ):
            assert (one.step, one.loss, one.tokens) == (number, value, given["input_ids"].numel())
            # the model shifts labels
            assert one.targets == int((given["labels"][:, 1:] != -100).sum())
            assert (
                one.tokens_per_s == pytest.approx(one.tokens / one.step_time_s)
                and one.step_time_s > 0
            )
        assert steps[0][1].loss == pytest.approx(float(loss), rel=1e-12)
        assert steps[0][1].gradient_norm == pytest.approx(float(norm), rel=1e-12) and norm > LIMIT


def test_flops_memory_and_predictions():
    spec, rows, seq = parse_model("llama-tiny"), 8, 32
    batch = spec.example_inputs(rows, seq, "cpu")
    engine = autopar.parallelize(spec.build("cpu"), "cpu:1", batch)
    with pytest.raises(autopar.AutoparError, match="none has run"):
        print(engine.metrics)
    layers, width = spec._attention_size()
    # ours halves causal attention
    per_token = spec.model_flops_per_token(seq) - 6.0 * layers * width * seq
    rate = ClusterSpec.parse("cpu:1").device.flops["fp32"]
    for given in (rows, rows // 2):
        engine.step({name: tensor[:given] for name, tensor in batch.items()})
        one = engine.metrics
        assert one.tokens == given * seq and one.gradient_norm is None
        assert one.mfu == pytest.approx(per_token * one.tokens_per_s / rate, rel=1e-3)
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmHWM:")[1].split()[0]) * 1024
    assert one.peak_memory_bytes == pytest.approx(resident, rel=0.02)
    assert one.predicted_step_time_s == engine.plan.predicted.step_time_s
    assert (one.predicted_peak_memory_bytes,) == engine.plan.predicted.peak_memory_bytes
    assert (
        f"step   2   loss {one.loss:.4f}   " in str(one)
        and "tokens/s" in str(one)
        and "\n" not in str(one)
    )


def test_without_a_profiler_a_range_is_nothing():
    assert named("a", 1) is named("b")
