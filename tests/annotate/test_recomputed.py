"""Selective recomputation: which ops run again, what they stop keeping, and what that costs."""

from __future__ import annotations

import pytest
from support.effort import every

from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import plan as make_plan
from autopar.api import trace
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models.base import NativeSpec
from autopar.models.gpt import GPTConfig
from autopar.ops.recomputed import attention_core
from autopar.solve.costs.placement_cost import saved_bytes

ROWS, SEQ, HIDDEN, HEADS = 2, 256, 128, 8


def traced_of(fused: bool, dropout: float = 0.0):
    spec = NativeSpec.of(
        "gpt", GPTConfig(512, HIDDEN, 3, HEADS, max_seq=SEQ, fused_attention=fused, dropout=dropout)
    )
    return trace(spec.build("meta"), spec.example_inputs(ROWS, SEQ), None, "bf16")


def block_of(traced, recompute: str, tp: int = 1):
    setting = Setting(MeshShape(tp=tp), ROWS, 1, 0, recompute, "bf16", ClusterSpec.parse("h100:8"))
    model = Annotator(traced).annotate(setting)
    return model, next(block for block in model.classes if block.count > 1)


@pytest.mark.parametrize("fused", every(2, [False, True]))
def test_the_core_is_attention_and_nothing_else(fused):
    traced = traced_of(fused)
    graphs = {block.name: attention_core(block.graph) for block in traced.classes}
    (core,) = [found for found in graphs.values() if found]
    graph = next(block.graph for block in traced.classes if attention_core(block.graph))
    targets = {str(node.target) for node in graph.nodes if node.name in core}
    if fused:
        assert targets == {"aten.scaled_dot_product_attention.default"}
    else:
        assert (
            any("softmax" in target for target in targets)
            and sum("matmul" in t or "bmm" in t for t in targets) >= 1
        )
        assert not any(
            "linear" in target or "norm" in target or "gelu" in target for target in targets
        )


def test_written_out_attention_keeps_five_as2b_less():
    """Korthikanti et al. 2023, equation 1 and table 2: 5 a s^2 b bytes of a layer are scores, softmax and dropout of 16-bit numbers, of
    which a layer without dropout in attention keeps the probabilities, 2 a s^2 b."""
    traced = traced_of(False)
    scores = HEADS * SEQ * SEQ * ROWS
    (whole, plain), (again, selective) = block_of(traced, "none"), block_of(traced, "selective")
    kept = [saved_bytes([op.strategies[0] for op in block.ops]) for block in (plain, selective)]
    assert kept[0] - kept[1] >= 2 * scores
    assert again.fixed_bytes - whole.fixed_bytes == kept[0] - kept[1], (
        "the core of one layer is there while backward runs it again"
    )
    times = [
        (
            sum(op.strategies[0].forward_s for op in b.ops),
            sum(op.strategies[0].backward_s for op in b.ops),
        )
        for b in (plain, selective)
    ]
    core = attention_core(next(c.graph for c in traced.classes if c.name == plain.name))
    rerun_s = sum(op.strategies[0].forward_s for op in plain.ops if op.name in core)
    assert (
        times[1][0] == times[0][0]
        and times[1][1] == pytest.approx(times[0][1] + rerun_s)
        and rerun_s > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("tp", every(2, [4, 1]))
def test_every_strategy_keeps_less_and_takes_longer(tp):
    traced = traced_of(False, dropout=0.1)
    (_, plain), (_, selective) = block_of(traced, "none", tp), block_of(traced, "selective", tp)
    less = 0
    for before, after in zip(plain.ops, selective.ops, strict=True):
        for one, other in zip(before.strategies, after.strategies, strict=True):
            assert (
                saved_bytes([other]) <= saved_bytes([one])
                and other.backward_s >= one.backward_s
                and other.forward_s == one.forward_s
            )
            less += saved_bytes([other]) < saved_bytes([one])
    assert less


@pytest.mark.slow
def test_a_pinned_plan_lies_between_none_and_full():
    spec = NativeSpec.of("gpt", GPTConfig(512, 1024, 4, 16, max_seq=2048, fused_attention=False))
    example = spec.example_inputs(2, 2048)
    traced = trace(spec.build("meta"), example, None, "bf16")

    def planned(recompute: str):
        pin = {"tp": 1, "dp": 8, "micro_batch": 2, "zero": 0, "recompute": recompute}
        return make_plan(spec.build("meta"), "h100:8", example, 16, pin, traced=traced)

    none, selective, full = (
        planned(recompute).predicted for recompute in ("none", "selective", "full")
    )
    assert none.step_time_s < selective.step_time_s < full.step_time_s
    assert full.peak_memory_bytes < selective.peak_memory_bytes < none.peak_memory_bytes
    assert planned("selective").recompute == "selective"
