"""The price of a head that is one op with its loss: the products and passes that it runs, chunk by chunk, and the bytes that it keeps."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from autopar_cost_models import all_gather_time_s, memory_time_s
from autopar_cost_models.constants import OWN_OP_ISSUES
from autopar_cost_models.matmul import shaped_matmul_time_s
from autopar_kernels import linear_losses
from torch.distributed._tools.mem_tracker import MemTracker

from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.ir.annotated import AnnotatedModel, Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models import parse_model
from autopar.ops.work import model_flops
from autopar.request.software import Software
from autopar.trace.fusion.fused import fused
from benchmarks.fidelity.kept_bytes import MOST, measure

SEQ, HIDDEN, VOCAB, CHUNK = 5000, 1024, 32768, linear_losses.CHUNK
DGX = ClusterSpec.parse("dgx-h100:1")
H100 = replace(DGX.device, dispatch_s=24e-6)
CLUSTER = replace(DGX, device=H100)
NAME = "linear_cross_entropy"


@cache
def annotator(mode: str) -> Annotator:
    spec = parse_model(f"llama:layers=1,hidden={HIDDEN},heads=8,vocab={VOCAB},seq={SEQ}")
    traced = trace(spec.build("meta", torch.float32), spec.example_inputs(8, SEQ))
    return Annotator(fused(traced, mode))


@cache
def annotated(mode: str, mesh: MeshShape) -> AnnotatedModel:
    return annotator(mode).annotate(Setting(mesh, 1, 1, 0, "none", "bf16", CLUSTER))


def strategies(mode: str, mesh: MeshShape, name: str) -> dict[str, Strategy]:
    return next(
        {s.name: s for s in op.strategies}
        for block in annotated(mode, mesh).classes
        for op in block.ops
        if op.name == name
    )


def by_hand_s(classes: int) -> tuple[float, float]:
    """Forward and backward of all tokens, from what `linear_losses` runs for each chunk."""
    numel, parts = classes * HIDDEN, [CHUNK, CHUNK, SEQ - 2 * CHUNK]
    forward = memory_time_s(28 * SEQ, H100)
    # in fp32: all chunks but the first are added; then it is rounded, and added to the gradient
    backward = 2 * memory_time_s(12 * numel, H100) + memory_time_s(6 * numel, H100)
    backward += memory_time_s((2 + 2 * 4) * numel, H100)
    for rows in parts:
        logits_s = shaped_matmul_time_s(rows, classes, HIDDEN, H100, "bf16")
        forward += logits_s + memory_time_s(2 * rows * classes, H100)
        backward += logits_s + memory_time_s(2 * 2 * rows * classes, H100)
        backward += shaped_matmul_time_s(rows, HIDDEN, classes, H100, "bf16")
        backward += shaped_matmul_time_s(classes, HIDDEN, rows, H100, "bf16", result_itemsize=4)
    return forward, backward


@pytest.mark.parametrize(
    ("mesh", "name", "classes"),
    [
        (MeshShape(dp=8), "R", VOCAB),
        (MeshShape(dp=2, tp=4), "v", VOCAB // 4),
    ],
    ids=str,
)
def test_a_head_with_its_loss_is_four_products_in_chunks(mesh, name, classes):
    found = strategies("head", mesh, NAME)[name]
    forward, backward = by_hand_s(classes)
    sent = 0.0
    if mesh.tp > 1:  # three numbers of each token from each rank
        sent = all_gather_time_s(3 * 4 * SEQ * 4, 4, 1, CLUSTER.topology)
    assert found.forward_comm_s == pytest.approx(sent)
    assert found.forward_s == pytest.approx(forward + sent, rel=1e-12)
    assert found.backward_s == pytest.approx(backward, rel=1e-12)
    # gradients of hidden and of the head come chunk by chunk: none waits for the other
    assert found.backward_weight_s == 0.0
    # two kernels a chunk, one for all losses; four a chunk, two sums, one rounding, one addition
    assert found.forward_dispatch_s == (OWN_OP_ISSUES + 7) * H100.issue_s
    assert found.backward_dispatch_s == (OWN_OP_ISSUES + 16) * H100.issue_s


@pytest.mark.parametrize("mesh", [MeshShape(dp=8), MeshShape(dp=2, tp=4)], ids=str)
def test_no_logits_are_kept(mesh):
    """Hidden states, which the product keeps too, and three numbers of each token."""
    name = "v" if mesh.tp > 1 else "R"
    head, loss = strategies("all", mesh, "head"), strategies("all", mesh, "cross_entropy_loss")
    (hidden,) = (saved.size_bytes for saved in head["o" if mesh.tp > 1 else "R"].saved)
    logits = max(saved.size_bytes for saved in loss[name].saved)
    kept = sorted(saved.size_bytes for saved in strategies("head", mesh, NAME)[name].saved)
    held = 1 + Software().fitted.fragmentation
    assert kept[-1] == hidden == pytest.approx(held * 2 * SEQ * HIDDEN, rel=1e-6)
    # the targets are kept too
    assert sum(kept[:-1]) == pytest.approx(held * (3 * 4 + 8) * SEQ, rel=1e-4)
    assert logits == pytest.approx(held * 2 * SEQ * VOCAB / mesh.tp, rel=1e-6)


def test_hidden_states_may_be_sharded_by_tokens_but_not_by_width():
    found = strategies("head", MeshShape(dp=2, tp=4), NAME)
    assert {"R", "v"} < set(found)
    # in all of them the width of hidden states and of the head is whole
    assert all(s.inputs[0].dim != 1 for s in found.values() if s.inputs[0].is_shard)
    assert all(s.inputs[1].dim != 1 for s in found.values() if s.inputs[1].is_shard)
    by_classes = found["v"]
    assert [str(x) for x in by_classes.inputs] == ["R/P", "S(0)", "R"]
    assert [str(x) for x in by_classes.outputs] == ["R"]


def test_the_work_of_a_model_does_not_depend_on_fusion():
    modes = [model_flops(annotator(mode).traced, 8) for mode in ("all", "head")]
    assert modes[0] == modes[1]


@pytest.mark.parametrize(("tokens", "chunk"), [(24, 32), (64, 16)])
def test_bytes_of_a_chunk_are_those_that_memtracker_sees(tokens, chunk):
    """One and several chunks, in fp32: logits and their gradient, beside one or two gradients of the head."""
    classes, width = 96, 40
    hidden, weight = torch.randn(tokens, width), torch.randn(classes, width)
    target = torch.randint(0, classes, (tokens,))
    statistics = torch.ops.autopar.linear_cross_entropy_local(
        hidden, weight, target, None, 0, False, None, chunk
    )
    tracker = MemTracker()
    tracker.track_external(hidden, weight, target, statistics)
    with tracker:
        linear_losses._gradient(
            *(torch.ones(tokens), hidden, weight, target, None, statistics),
            *(0, classes, -100, 0.0, 0.0, None, chunk, [True, True]),
        )
    peak, before = (
        sum(of_device["Total"] for of_device in tracker.get_tracker_snapshot(when).values())
        for when in ("peak", "current")
    )
    rows, numel = min(chunk, tokens), classes * width
    logits, several = 4 * rows * classes, tokens > chunk
    needed = max(2 * logits + 4 * numel * several, logits + 4 * numel * (1 + several))
    found = peak - before - 4 * tokens * width  # the gradient of hidden
    assert found == pytest.approx(needed, abs=4 * tokens * 8)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tp"), [("llama", 1), ("gpt", 2), ("gemma2", 4)])
def test_kept_bytes_are_those_that_memtracker_sees(model, tp):
    """Peaks are not compared: MemTracker sees a fused op as one call, and no chunk inside."""
    row, whole = measure(model, tp, "head"), measure(model, tp, "all")
    assert abs(row.off()[0]) < MOST and row.kept[1] < whole.kept[1]
