"""Prices of calls are those of the kernel models, called by hand on the shapes of one rank's shards."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from autopar_cost_models import (
    FittedConstants,
    all_gather_time_s,
    collective_time_s,
    memory_time_s,
    point_to_point_time_s,
)
from autopar_cost_models.attention import flash_attention_time_s, unfused_attention_time_s
from autopar_cost_models.matmul import (
    fp8_linear_time_s,
    grouped_matmul_time_s,
    shaped_matmul_time_s,
)
from autopar_cost_models.roofline import optimizer_time_s, overlapped_s

import autopar
from autopar.annotate.annotator import Annotator
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.errors import AutoparError
from autopar.ir.annotated import AnnotatedModel, Conversion, Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.ir.traced import TracedModel
from autopar.models import parse_model
from autopar.models.base import NativeSpec
from autopar.models.gpt import GPTConfig
from autopar.request.software import Joins, Software
from autopar.solve.costs.placement_cost import price_placement
from autopar.solve.integer_program.placement_solver import solve_placement

SEQ, HIDDEN, HEADS, KEY_HEADS, FFN, VOCAB = 4096, 4096, 32, 8, 14336, 128256
BLOCK = f"hidden={HIDDEN},heads={HEADS},kv_heads={KEY_HEADS},ffn={FFN},vocab={VOCAB}"
CLUSTER = ClusterSpec.parse("dgx-h100:1")
H100 = CLUSTER.device
MESHES = (MeshShape(dp=8), MeshShape(tp=8), MeshShape(dp=2, tp=4), MeshShape(cp=2, tp=4))


@cache
def traced_model(text: str, seq: int) -> TracedModel:
    spec = parse_model(text)
    return trace(spec.build("meta", torch.float32), spec.example_inputs(8, seq))


def annotator_of(text: str, seq: int) -> Annotator:
    return Annotator(traced_model(text, seq))


@pytest.fixture(scope="module")
def llama() -> Annotator:
    """Two blocks of Llama 3 8B."""
    return annotator_of(f"llama:layers=2,{BLOCK}", SEQ)


def annotated(
    annotator: Annotator, mesh: MeshShape = MESHES[0], rows: int = 1, zero: int = 0, **software
) -> AnnotatedModel:
    """By software that hides no transfer and runs no kernel of its own to add up gradients, unless `software` says otherwise."""
    plain = {"dp_overlap": False, "late_gradients": False, "fused_accumulation": True}
    return annotator.annotate(
        Setting(mesh, rows, 1, zero, "none", "bf16", CLUSTER, software=Software(**plain | software))
    )


def strategies(model: AnnotatedModel, op: str) -> dict[str, Strategy]:
    """The strategies of the op of this name, in the first class that has one."""
    return next(
        {s.name: s for s in found.strategies}
        for block in model.classes
        for found in block.ops
        if found.name == op
    )


def product_s(m: int, n: int, k: int) -> tuple[float, float]:
    """A linear layer of m rows: forward; the gradients of input and weight, the latter in fp32."""
    backward = shaped_matmul_time_s(m, k, n, H100, "bf16") + shaped_matmul_time_s(
        n, k, m, H100, "bf16", result_itemsize=4
    )
    return shaped_matmul_time_s(m, n, k, H100, "bf16"), backward


@pytest.mark.parametrize(
    ("mesh", "rows", "op", "strategy", "shape"),
    [
        (MeshShape(dp=8), 2, "q_proj", "R", (2 * SEQ, HIDDEN, HIDDEN)),
        (MeshShape(dp=2, tp=4), 1, "gate_proj", "R", (SEQ, FFN, HIDDEN)),
        (MeshShape(dp=2, tp=4), 1, "gate_proj", "o", (SEQ, FFN // 4, HIDDEN)),  # column-parallel
        (MeshShape(dp=2, tp=4), 1, "down_proj", "i", (SEQ, HIDDEN, FFN // 4)),  # row-parallel
        (MeshShape(dp=2, tp=4), 1, "gate_proj", "b1", (SEQ // 4, FFN, HIDDEN)),  # positions over tp
        (MeshShape(cp=2, tp=4), 1, "gate_proj", "o", (SEQ // 2, FFN // 4, HIDDEN)),
        (MeshShape(cp=8), 1, "o_proj", "R", (SEQ // 8, HIDDEN, HIDDEN)),
        (MeshShape(dp=8), 1, "head", "R", (SEQ, VOCAB, HIDDEN)),
    ],
    ids=str,
)  # fmt: skip
def test_products_are_priced_by_local_shapes(llama, mesh, rows, op, strategy, shape):
    found = strategies(annotated(llama, mesh, rows), op)[strategy]
    forward, backward = product_s(*shape)
    assert (found.forward_s, found.backward_s) == pytest.approx((forward, backward), rel=1e-12)
    m, n, k = shape
    assert found.backward_weight_s == pytest.approx(
        shaped_matmul_time_s(n, k, m, H100, "bf16", result_itemsize=4)
    )


def test_small_shards_run_at_a_lower_rate(llama):
    found = strategies(annotated(llama, MeshShape(tp=8)), "k_proj")
    assert found["o"].forward_s > 1.3 * found["R"].forward_s / 8


def test_a_second_reader_adds_its_gradient(llama):
    """attention_norm is read by three products: autograd adds up their gradients, two kernels that read two tensors and write one."""
    first, second = (strategies(annotated(llama), op)["R"] for op in ("q_proj", "k_proj"))
    assert first.backward_s == pytest.approx(product_s(SEQ, HIDDEN, HIDDEN)[1])
    added_s = memory_time_s(3 * 2 * SEQ * HIDDEN, H100)
    assert second.backward_s == pytest.approx(product_s(SEQ, HIDDEN // 4, HIDDEN)[1] + added_s)


@pytest.mark.parametrize(
    ("mesh", "heads", "key_heads"),
    [(MeshShape(dp=8), HEADS, KEY_HEADS), (MeshShape(tp=8), HEADS // 8, 1)],
)
@pytest.mark.parametrize("kernel", [None, "flash2", "cudnn"])
def test_attention_is_a_flash_kernel_on_local_heads(llama, mesh, heads, key_heads, kernel):
    found = strategies(
        annotated(llama, mesh, attention_kernel=kernel), "scaled_dot_product_attention"
    )["h" if mesh.tp > 1 else "R"]
    sizes = 1, heads, key_heads, SEQ, SEQ, HIDDEN // HEADS, H100
    expected = [
        flash_attention_time_s(*sizes, kernel=kernel or "flash3", backward=backward)
        for backward in (False, True)
    ]
    assert [found.forward_s, found.backward_s] == pytest.approx(expected)
    full = flash_attention_time_s(*sizes, kernel=kernel or "flash3", causal=False)
    # half, but for blocks on the diagonal and shorter rows
    assert 0.5 < found.forward_s / full < 0.56


def test_context_ranks_share_attention(llama):
    whole = (
        flash_attention_time_s(1, HEADS, KEY_HEADS, SEQ, SEQ, 128, H100, kernel="flash3")
        - H100.launch_s
    )
    model = llama.annotate(
        Setting(MeshShape(cp=4, dp=2), 1, 1, 0, "none", "bf16", CLUSTER, context_method="gather")
    )
    found = strategies(model, "scaled_dot_product_attention")["R"]
    # zigzag: nobody waits
    assert found.forward_s - found.forward_comm_s == pytest.approx(whole / 4 + H100.launch_s)
    model = llama.annotate(
        Setting(MeshShape(cp=4, dp=2), 1, 1, 0, "none", "bf16", CLUSTER, context_method="ring")
    )
    found = strategies(model, "scaled_dot_product_attention")["R"]
    assert found.forward_s - found.forward_comm_s == pytest.approx(whole / 4 + 4 * H100.launch_s)
    model = llama.annotate(
        Setting(MeshShape(cp=4, dp=2), 1, 1, 0, "none", "bf16", CLUSTER, context_method="ulysses")
    )
    found = strategies(model, "scaled_dot_product_attention")["R"]
    heads_s = flash_attention_time_s(
        1, HEADS // 4, KEY_HEADS // 4, SEQ, SEQ, 128, H100, kernel="flash3"
    )
    assert (
        found.forward_s - found.forward_comm_s == pytest.approx(heads_s)
        and found.forward_comm_s > 0
    )


def test_a_sliding_window_is_recognized():
    annotator = annotator_of(f"llama:layers=2,{BLOCK},window=512", SEQ)
    found = strategies(annotated(annotator), "scaled_dot_product_attention")["R"]
    assert found.forward_s == pytest.approx(
        flash_attention_time_s(
            1, HEADS, KEY_HEADS, SEQ, SEQ, 128, H100, kernel="flash3", window=512
        )
    )


def test_attention_with_dropout_runs_as_its_ops():
    class Block(torch.nn.Module):
        def forward(self, x, labels):
            q, k, v = x.unbind(1)
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
            return ((out - labels) ** 2).sum()

    batch = {
        "x": torch.zeros(8, 3, 4, 256, 64, device="meta"),
        "labels": torch.zeros(8, 4, 256, 64, device="meta"),
    }
    found = strategies(annotated(Annotator(trace(Block(), batch))), "scaled_dot_product_attention")[
        "R"
    ]
    assert found.forward_s == pytest.approx(
        unfused_attention_time_s(1, 4, 256, 256, 64, H100, fused_softmax=False, dropout=True)
    )


def test_convolutions_are_implicit_products():
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = torch.nn.Conv2d(64, 128, 3, padding=1, bias=False, device="meta")

        def forward(self, x, labels):
            return ((self.conv(self.conv.weight.sum() * x) - labels) ** 2).sum()

    batch = {
        "x": torch.zeros(8, 64, 28, 28, device="meta"),
        "labels": torch.zeros(8, 128, 28, 28, device="meta"),
    }
    model = annotated(Annotator(trace(Net(), batch)), MeshShape(dp=2, tp=4), 4)
    found = {
        s.name: s
        for b in model.classes
        for op in b.ops
        if "conv2d" in op.target
        for s in op.strategies
    }
    for name, n, k in (("R", 128, 64 * 9), ("o", 32, 64 * 9), ("i", 128, 16 * 9)):
        assert (found[name].forward_s, found[name].backward_s) == pytest.approx(
            product_s(4 * 28 * 28, n, k)
        )


def test_experts_multiply_evenly_routed_rows():
    """Mixtral-like experts: the grouped products are in the price, and sharding experts divides their weights but not the rows."""
    annotator = annotator_of(
        "moe:layers=2,hidden=1024,heads=8,ffn=4096,vocab=1000,experts=8,top_k=2", 1024
    )
    alone = next(iter(_experts(annotated(annotator)).values()))
    rows, products = [256] * 8, 0.0
    for n, k in ((8192, 1024), (1024, 4096)):
        products += grouped_matmul_time_s(rows, n, k, H100, "bf16")
    assert products < alone.forward_s < 3 * products
    spread = next(iter(_experts(annotated(annotator, MeshShape(dp=8, ep=8))).values()))
    # as many rows, an eighth of the weights to read
    assert spread.forward_s - spread.forward_comm_s < alone.forward_s
    assert spread.forward_comm_s > 0 and alone.forward_comm_s == 0


def _experts(model: AnnotatedModel) -> dict[str, Strategy]:
    return {
        s.name: s
        for b in model.classes
        for op in b.ops
        if "routed_experts" in op.target
        for s in op.strategies
    }


# ------------------------------------------------------------------------------------------------------------------- memory


def test_a_compiler_never_costs_more_and_leaves_products_alone(llama):
    """Forward op by op; backward class by class, since the gradient that leaves a chain is paid by the sum at its start, not by a norm."""
    for mesh in MESHES:
        eager, compiled = (annotated(llama, mesh, compiled=c) for c in (False, True))
        for before, after in zip(eager.classes, compiled.classes, strict=True):
            for a, b in zip(before.ops, after.ops, strict=True):
                for s, t in zip(a.strategies, b.strategies, strict=True):
                    assert t.forward_s <= s.forward_s, (mesh, a.name, s.name)
                    assert t.forward_dispatch_s <= s.forward_dispatch_s
                    if "linear" in a.target:
                        assert t.forward_s == s.forward_s
            totals = [
                sum(op.strategies[0].backward_s for op in block.ops) for block in (before, after)
            ]
            assert totals[1] <= totals[0]


def test_a_chain_moves_what_enters_and_leaves_it(llama):
    """silu(gate) * up: two kernels of 2 and 3 tensors; fused, the three tensors at its ends."""
    tensor = 2 * SEQ * FFN
    eager, compiled = (
        [strategies(annotated(llama, compiled=c), op)["R"] for op in ("silu", "mul_4")]
        for c in (False, True)
    )
    expected = memory_time_s(2 * tensor, H100) + memory_time_s(3 * tensor, H100)
    assert sum(s.forward_s for s in eager) == pytest.approx(expected)
    assert sum(s.forward_s for s in compiled) == pytest.approx(memory_time_s(3 * tensor, H100))
    expected = memory_time_s(3 * tensor, H100) + memory_time_s(5 * tensor, H100)
    assert sum(s.backward_s for s in eager) == pytest.approx(expected)
    assert sum(s.backward_s for s in compiled) == pytest.approx(memory_time_s(5 * tensor, H100))


def test_chains_end_at_products(llama):
    """The residual stream behind attention is read by a norm and, behind the products of the MLP, by a sum: it is written."""
    found = strategies(annotated(llama, compiled=True), "add_2")["R"]
    assert found.forward_s == pytest.approx(memory_time_s(3 * 2 * SEQ * HIDDEN, H100))


def test_norms_under_sequence_parallelism_touch_their_positions(llama):
    found = strategies(annotated(llama, MeshShape(tp=8)), "mlp_norm")
    shard, weight = 2 * SEQ * HIDDEN // 8, 2 * HIDDEN
    assert found["d1"].forward_s == pytest.approx(memory_time_s(2 * shard + weight, H100))


def test_an_embedding_reads_rows_and_fills_a_table(llama):
    found = strategies(annotated(llama), "embed")["R"]
    rows, indices, table = 2 * SEQ * HIDDEN, 8 * SEQ, 2 * VOCAB * HIDDEN
    assert found.forward_s == pytest.approx(memory_time_s(2 * rows + indices, H100))
    assert found.backward_s == pytest.approx(
        memory_time_s(table + 3 * rows + indices + 5 * table, H100)
    )  # + 2 + 4 + 4 bytes of 2


def test_the_optimizer_updates_what_a_rank_owns(llama):
    free = replace(H100, launch_s=0.0)
    for zero, numel in ((0, HIDDEN * FFN), (1, HIDDEN * FFN // 8)):
        found = strategies(annotated(llama, zero=zero), "mlp_gate_proj_weight")["R"]
        assert found.step_s - found.step_comm_s == pytest.approx(
            optimizer_time_s(numel, free, "bf16")
        )
    unfused = strategies(annotated(llama, fused_optimizer=False), "mlp_gate_proj_weight")["R"]
    assert unfused.step_s - unfused.step_comm_s == pytest.approx(
        optimizer_time_s(HIDDEN * FFN, free, "bf16", fused=False)
    )


# ---------------------------------------------------------------------------------------------------------------------- fp8


def test_fp8_pays_off_on_big_layers_alone(llama):
    bf16, fp8 = (
        strategies(annotated(llama, matmul_dtype=dtype), "gate_proj")["R"]
        for dtype in ("bf16", "fp8")
    )
    assert fp8.forward_s == pytest.approx(fp8_linear_time_s(SEQ, HIDDEN, FFN, H100))
    assert fp8.backward_s == pytest.approx(fp8_linear_time_s(SEQ, HIDDEN, FFN, H100, backward=True))
    assert fp8.forward_s < 0.8 * bf16.forward_s and fp8.backward_s < 0.8 * bf16.backward_s
    tiny = annotator_of("llama-tiny", 16)
    bf16, fp8 = (
        strategies(annotated(tiny, matmul_dtype=dtype), "gate_proj")["R"] for dtype in (None, "fp8")
    )
    assert fp8.forward_s > bf16.forward_s


def test_fp8_leaves_attention_embedding_and_head(llama):
    bf16, fp8, everywhere = (
        annotated(llama),
        annotated(llama, matmul_dtype="fp8"),
        annotated(llama, matmul_dtype="fp8", fp8_head=True),
    )
    for op in ("embed", "scaled_dot_product_attention", "head", "cross_entropy_loss", "mlp_norm"):
        assert strategies(fp8, op)["R"] == strategies(bf16, op)["R"]
    assert strategies(everywhere, "head")["R"].forward_s < strategies(bf16, "head")["R"].forward_s


# ---------------------------------------------------------------------------------------------------- communication and totals


def test_communication_is_told_apart(llama):
    model = annotated(llama, MeshShape(dp=2, tp=4), zero=3)
    weight = strategies(model, "mlp_gate_proj_weight")["S(0)"]
    block_bytes = (
        2
        * (
            3 * HIDDEN * FFN
            + 2 * HIDDEN * HIDDEN
            + 2 * HIDDEN * HIDDEN // HEADS * KEY_HEADS
            + 2 * HIDDEN
        )
        // 4
    )  # over tp
    gather_s = collective_time_s(
        "all_gather", block_bytes, 2, MeshShape(dp=2, tp=4).stride("dp"), CLUSTER.topology
    )
    assert (
        weight.forward_s
        == weight.forward_comm_s
        == pytest.approx(gather_s * (2 * HIDDEN * FFN // 4) / block_bytes)
    )
    block = next(b for b in model.classes if "down_proj" in b.values)
    found = {(str(a), str(b)): c for (a, b), c in block.values["down_proj"].conversions.items()}
    assert found["P", "R"].forward_comm_s == found["P", "R"].forward_s > 0
    local = found["R", "S(1)"]  # a slice forward, an all-gather of the gradient
    assert (
        local.forward_comm_s == 0 < local.forward_s
        and local.backward_comm_s == local.backward_s > 0
    )


@pytest.mark.parametrize(("cluster", "ahead"), [("cpu:2", False), ("dgx-h100:1", True)])
def test_what_zero_3_gathers_is_there_while_a_segment_runs(cluster, ahead):
    """By hand: its parameters in bf16, on GPUs those of the segment that comes next, and twice in fp32 the gradients of the one before,
    here less than a bucket; the root unit of FSDP has embedding and head, with their gradients, through all of backward."""
    block, vocab = 4 * 64 * 64 + 3 * 64 * 128 + 2 * 64, 512 * 64
    head, setting = (
        vocab + 64,
        Setting(MeshShape(dp=2), 1, 1, 3, "none", "bf16", ClusterSpec.parse(cluster)),
    )
    annotator = annotator_of("llama:layers=3,hidden=64,heads=4,kv_heads=4,ffn=128,vocab=512", 32)
    own, root = (
        annotator.annotate(setting),
        annotator.annotate(replace(setting, software=Software(root_unit=True))),
    )
    more = [
        a.workspace_bytes - b.workspace_bytes
        for a, b in zip(own.classes, root.classes, strict=True)
    ]
    assert more == [
        2 * vocab + 8 * block,
        2 * (block + ahead * max(block, vocab)) + 8 * max(block, head),
        2 * (head + ahead * block),
    ]
    assert root.fixed_bytes - own.fixed_bytes == 2 * 2 * (vocab + head) + (3 * 2 + 4) * block


def test_gathers_and_reductions_hide_behind_the_block(llama):
    """Each parameter has its share of what the block computes, by size: a gather beside a pass at stage 3, with the reduction in backward,
    since no rank keeps whole gradients; below, a reduction beside the last backward."""
    mesh = MeshShape(dp=8)
    for zero in (0, 1, 3):
        shown, hidden = (
            annotated(llama, mesh, zero=zero),
            annotated(llama, mesh, zero=zero, dp_overlap=True),
        )
        block = max(hidden.classes, key=lambda b: b.count)
        compute_s = [sum(op.strategies[0].forward_s for op in block.ops if op.kind == "op"),
                     sum(op.strategies[0].backward_s for op in block.ops if op.kind == "op")]  # fmt: skip
        numel = {
            op.name: math.prod(value)
            for op in block.ops
            if op.kind == "parameter"
            for value in [_shape_of(llama, op.name)]
        }
        for name, size in numel.items():
            before, after = strategies(shown, name)["R"], strategies(hidden, name)["R"]
            beside = [s * size / sum(numel.values()) for s in compute_s]

            def exposed(compute_s: float, transfer_s: float) -> float:
                return overlapped_s(compute_s, transfer_s) - compute_s

            assert after.forward_s == pytest.approx(exposed(beside[0], before.forward_s))
            assert after.backward_s == pytest.approx(exposed(beside[1], before.backward_s))
            if zero == 0:
                assert after.step_comm_s == pytest.approx(exposed(beside[1], before.step_comm_s))
            assert after.step_comm_s < before.step_comm_s or before.step_comm_s == 0
            assert (before.step_comm_s == 0) == (zero == 3) and (before.backward_s == 0) == (
                zero < 3
            )
            assert after.step_s - after.step_comm_s == pytest.approx(
                before.step_s - before.step_comm_s
            )


def _shape_of(annotator: Annotator, name: str) -> tuple[int, ...]:
    return next(
        tuple(n.meta["val"].shape)
        for block in annotator.traced.classes
        for n in block.graph.nodes
        if n.name == name
    )


def test_what_tp_sends_hides_behind_products(llama):
    """Gradients travel while those of weights are computed; with asynchronous tensor parallelism all travels beside its products."""
    mesh, found = MeshShape(dp=2, tp=4), {}
    for name, software in {
        "none": {},
        "late": {"late_gradients": True},
        "all": {"late_gradients": True, "tp_overlap": True},
    }.items():
        model = annotated(llama, mesh, **software)
        block = next(b for b in model.classes if "down_proj" in b.values)
        down = {(str(a), str(b)): c for (a, b), c in block.values["down_proj"].conversions.items()}
        norm = {(str(a), str(b)): c for (a, b), c in block.values["mlp_norm"].conversions.items()}
        found[name] = norm["S(1)", "R/P"], down["P", "S(1)"]
    gather, scatter = zip(*found.values(), strict=True)
    late_s = sum(
        min(s.backward_weight_s for s in op.strategies)
        for op in block.ops
        if "mlp_norm" in op.inputs
    )
    expected = overlapped_s(late_s, gather[0].backward_s) - late_s
    assert gather[0].forward_s == gather[1].forward_s > gather[2].forward_s
    assert gather[0].backward_s > gather[1].backward_s == pytest.approx(expected)
    # differences of nearly equal sums
    assert gather[2].backward_s <= gather[1].backward_s * (1 + 1e-12)
    assert (
        scatter[0] == scatter[1]
        and scatter[2].forward_s < scatter[0].forward_s
        and scatter[2].backward_s < scatter[0].backward_s
    )


def test_a_kernel_of_its_own_adds_up_gradients(llama):
    fused, apart = (
        strategies(annotated(llama, fused_accumulation=fused), "gate_proj")["R"]
        for fused in (True, False)
    )
    alone_s = shaped_matmul_time_s(FFN, HIDDEN, SEQ, H100, "bf16") + memory_time_s(
        (2 + 4 + 4) * FFN * HIDDEN, H100
    )
    assert (
        apart.forward_s == fused.forward_s
        and apart.backward_weight_s == pytest.approx(alone_s)
        and alone_s > fused.backward_weight_s
    )


def test_the_pin_of_sequence_parallelism_shards_matrices(llama):
    for pinned in (None, False, True):
        setting = Setting(
            MeshShape(dp=2, tp=4), 1, 1, 0, "none", "bf16", CLUSTER, sequence_parallel=pinned
        )
        model = llama.annotate(setting)
        whole = [
            name
            for name in ("mlp_gate_proj_weight", "mlp_norm_weight")
            if "R" in strategies(model, name)
        ]
        assert whole == (["mlp_gate_proj_weight"] * (pinned is None) + ["mlp_norm_weight"])


def test_parts_add_up(llama):
    model = annotated(llama, MeshShape(dp=2, tp=4))
    solution = solve_placement(model, None)
    priced = price_placement(model, solution.choices)
    assert sum(priced.time_parts.values()) == pytest.approx(priced.time_s)
    assert 0 < priced.communication_s < priced.time_s
    one = price_placement(
        annotated(llama, MeshShape(dp=8)),
        solve_placement(annotated(llama, MeshShape(dp=8)), None).choices,
    )
    model = annotated(llama, MeshShape(dp=8))
    expected = sum(
        b.count * s.step_comm_s for b in model.classes for op in b.ops for s in op.strategies[:1]
    )
    # data parallelism sends gradients once a step
    assert one.communication_s == pytest.approx(expected)
    assert one.issue_s < one.time_s and one.host_s == 0  # kernels of this size hide the host


def test_the_host_is_told_apart(llama):
    """It runs ahead of the device, so that its time is no part of an op's, but a bound of its own."""
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, dispatch_s=1e-3))
    software = Software(dp_overlap=False, late_gradients=False, fused_accumulation=True)
    slow = llama.annotate(Setting(MESHES[0], 1, 1, 0, "none", "bf16", cluster, software=software))
    found, usual = strategies(slow, "silu")["R"], strategies(annotated(llama), "silu")["R"]
    assert found.forward_dispatch_s == 1e-3 and found.forward_s == usual.forward_s


def test_a_part_is_not_more_than_the_whole():
    with pytest.raises(ValueError, match=r"forward_comm_s=2.0 is a part of forward_s=1.0"):
        Strategy("R", (), (), forward_s=1.0, forward_comm_s=2.0)
    with pytest.raises(ValueError, match="backward_comm_s"):
        Conversion(1.0, 0.0, 0.0, 1.0)


def test_the_cpu_keeps_the_plain_roofline():
    cpu = ClusterSpec.parse("cpu:2")
    annotator = annotator_of("llama-tiny", 16)
    model = annotator.annotate(Setting(MeshShape(dp=2), 1, 1, 0, "none", "fp32", cpu))
    for block in model.classes:
        for op in block.ops:
            assert all(s.forward_dispatch_s == 0 for s in op.strategies)
    found = strategies(model, "gate_proj")["R"]
    width, hidden = _sizes(annotator)
    flops_s = 2 * 16 * width * hidden / cpu.device.achieved_flops("fp32")
    bytes_s = 4 * (16 * (width + hidden) + width * hidden) / cpu.device.achieved_bandwidth_Bps
    assert found.forward_s == pytest.approx(max(flops_s, bytes_s) + cpu.device.launch_s)


def _sizes(annotator: Annotator) -> tuple[int, int]:
    weights = {
        n.name: n.meta["val"].shape
        for b in annotator.traced.classes
        for n in b.graph.nodes
        if n.op == "get_attr"
    }
    return tuple(int(size) for size in weights["mlp_gate_proj_weight"])


# ----------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compiled": 1}, "compiled=1 must be True or False"),
        ({"attention_kernel": "flash9"}, "attention_kernel='flash9' is not known"),
        ({"matmul_dtype": "fp4"}, "matmul_dtype='fp4' is not known"),
        ({"fp8_scaling": "none"}, "fp8_scaling='none' is not known"),
        ({"fitted": None}, "must be FittedConstants"),
    ],
)
def test_wrong_software_is_refused(given, message):
    with pytest.raises(AutoparError, match=message):
        Software(**given)


def test_software_must_fit_the_device():
    with pytest.raises(AutoparError, match="device a100-80g has no fp8 rate"):
        Software(matmul_dtype="fp8").check(ClusterSpec.parse("a100-80g:2").device, "bf16")
    with pytest.raises(
        AutoparError,
        match=r"'flash3' was not measured on a100-80g .ampere.; flash1, flash2, triton were",
    ):
        Software(attention_kernel="flash3").check(ClusterSpec.parse("a100-80g:2").device, "bf16")
    with pytest.raises(AutoparError, match="needs precision bf16; this is fp32"):
        Software(matmul_dtype="fp8").check(H100, "fp32")


def test_plans_are_for_a_software():
    spec = parse_model(f"llama:layers=2,{BLOCK}")
    model, inputs = spec.build("meta", torch.float32), spec.example_inputs(8, SEQ)
    traced = trace(model, inputs, precision="bf16")

    def planned(software: Software) -> autopar.Plan:
        pin = {"tp": 2, "micro_batch": 1, "zero": 0, "recompute": "none"}
        return autopar.plan(
            model, CLUSTER, inputs, global_batch=8, pin=pin, traced=traced, software=software
        )

    eager, fast = planned(Software()), planned(Software(compiled=True, matmul_dtype="fp8"))
    assert fast.predicted.step_time_s < eager.predicted.step_time_s
    assert eager.made_for.software == {}
    assert fast.made_for.software == {"compiled": True, "matmul_dtype": "fp8"}
    assert Software.from_data(fast.made_for.software) == Software(compiled=True, matmul_dtype="fp8")
    assert " torch.compile, fp8 linear layers\n" in f"{autopar.explain(fast)}\n"
    with pytest.raises(AutoparError, match="no fp8 rate"):
        autopar.plan(
            model,
            "dgx-a100-80g:1",
            inputs,
            global_batch=8,
            traced=traced,
            software=Software(matmul_dtype="fp8"),
        )


def test_shards_may_travel_through_one_interface(llama):
    """Four nodes of eight: through one of eight interfaces a node, gathers and reductions of ZeRO-3 take up to eight times as long."""
    cluster, mesh = ClusterSpec.parse("dgx-a100-80g:32"), MeshShape(dp=32)

    def passes(zero: int, interfaces: int) -> tuple[float, float, float]:
        software = Software(dp_overlap=False, sharded_interfaces=interfaces)
        model = llama.annotate(
            Setting(mesh, 1, 1, zero, "none", "bf16", cluster, software=software)
        )
        found = strategies(model, "mlp_gate_proj_weight")["R"]
        return found.forward_comm_s, found.backward_comm_s, found.step_comm_s

    whole, one = passes(3, 0), passes(3, 1)
    assert (
        all(1.5 * a < b < 8.01 * a for a, b in zip(whole[:2], one[:2], strict=True))
        and whole[2] == one[2] == 0
    )
    assert passes(1, 0) == passes(1, 1)


@pytest.mark.parametrize(
    "first", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 3]
)
def test_prices_do_not_depend_on_which_stage_came_first(first):
    """One annotator prices many candidates: each as one that prices nothing else."""
    spec = parse_model(f"llama:layers=2,{BLOCK}")

    def priced(annotator: Annotator, zero: int) -> AnnotatedModel:
        return annotator.annotate(
            Setting(MeshShape(pp=2, dp=4), 1, 4, zero, "none", "bf16", CLUSTER, schedule="1f1b")
        )

    both = Annotator(trace(spec.build("meta", torch.float32), spec.example_inputs(8, 64)))
    priced(both, first)
    for zero in (0, 1, 3):
        alone = Annotator(both.traced)
        assert [block.ops for block in priced(both, zero).classes] == [
            block.ops for block in priced(alone, zero).classes
        ]


SHARING = [
    MeshShape(dp=8, tp=2),
    MeshShape(pp=2, dp=4, tp=2),
    MeshShape(dp=8, tp=2, ep=2),
    MeshShape(dp=4, cp=2, tp=2),
]


@pytest.mark.parametrize(
    ("recompute", "mesh", "model"),
    [
        pytest.param(
            *(recompute, mesh, model),
            marks=pytest.mark.slow if (first + second) % 3 or first else (),
            id=f"{recompute}-{mesh}-{model}",
        )
        for first, recompute in enumerate(["none", "selective", "full"])
        for second, mesh in enumerate(SHARING)
        for model in (f"llama:layers=2,{BLOCK}", "moe-tiny")
    ],
)
def test_what_meshes_share_costs_what_it_costs_over_each_by_itself(model, mesh, recompute):
    """Calls are priced over a smaller dp where it shards rows; what travels over dp (means of a router's loss) follows the mesh."""
    traced = traced_model(model, 64)
    shared, alone = Annotator(traced), Annotator(traced)
    alone._alike = lambda setting: replace(setting.mesh, pp=1)
    setting = Setting(
        mesh,
        2,
        4,
        1,
        recompute,
        "bf16",
        ClusterSpec.parse("dgx-h100:4"),
        schedule="1f1b" if mesh.pp > 1 else "none",
    )
    assert shared.alike(setting) != alone.alike(setting)
    found, expected = shared.annotate(setting), alone.annotate(setting)
    assert found == expected
    sending = [op for block in found.classes for op in block.ops if op.over_dp]
    assert bool(sending) == ("moe" in model) and all(
        s.forward_comm_s > 0 for op in sending for s in op.strategies
    )
    farther = shared.annotate(replace(setting, mesh=replace(mesh, dp=2 * mesh.dp)))
    assert all(
        there.forward_comm_s > here.forward_comm_s for block, other in zip(found.classes, farther.classes, strict=True)
        for op, moved in zip(block.ops, other.ops, strict=True) if op.over_dp
        for here, there in zip(op.strategies, moved.strategies, strict=True)
    )  # fmt: skip


def test_gradients_travel_as_a_recipe_holds_them(llama):
    """16-bit gradients in half the time of fp32; the copies in 16 and 32 bits of DeepSpeed's BF16_Optimizer as fp32."""

    def reduction(recipe: str | None) -> float:
        found = strategies(
            annotated(llama, MeshShape(dp=8), state_recipe=recipe), "mlp_gate_proj_weight"
        )["R"]
        return found.step_comm_s

    whole = reduction(None)
    assert (
        reduction("deepspeed_fp16")
        == reduction("bf16_gradients")
        == pytest.approx(whole / 2, rel=0.05)
    )
    assert reduction("fsdp") == reduction("deepspeed_bf16") == whole


def test_a_pipeline_gathers_sharded_parameters_once_a_step(llama):
    """As its memory says: torch's pipelines keep what FSDP gathered; without a pipeline every pass gathers."""

    def gathers(mesh: MeshShape) -> tuple[float, float, float]:
        software = Software(dp_overlap=False)
        schedule = "1f1b" if mesh.pp > 1 else "none"
        model = llama.annotate(
            Setting(mesh, 1, 4, 3, "none", "bf16", CLUSTER, schedule=schedule, software=software)
        )
        found = strategies(model, "mlp_gate_proj_weight")["R"]
        return found.forward_comm_s, found.backward_comm_s, found.step_comm_s

    forward, backward, step = gathers(MeshShape(pp=2, dp=4))
    assert forward == backward == 0 < step
    forward, backward, step = gathers(MeshShape(dp=4, tp=2))
    assert forward > 0 and backward > forward and step == 0


def test_a_norm_of_many_kernels(llama):
    """Op by op in fp32 a root-mean-square norm moves the bytes of autograd's own formulas; a compiler fuses them all the same."""

    def norm(**software) -> Strategy:
        model = annotated(llama, MeshShape(dp=1), **software)
        return next(
            op.strategies[0]
            for block in model.classes
            for op in block.ops
            if "rms_norm" in op.target
        )

    one, many = norm(), norm(composite_norms=True)
    elements, more_s = (
        SEQ * HIDDEN,
        6 * H100.launch_s,
    )  # bytes an element: counted over the operations that torch ran on 2**20 of them
    assert many.forward_s - more_s == pytest.approx(memory_time_s(36 * elements, H100))
    assert many.backward_s - more_s == pytest.approx(memory_time_s(92 * elements, H100))
    assert 5 * one.forward_s < many.forward_s and 5 * one.backward_s < many.backward_s
    assert norm(compiled=True) == norm(compiled=True, composite_norms=True)


def test_kernels_by_hand_join_what_frameworks_join(llama):
    """Activations as a compiler does; a norm is one of its own, so that the sum before it is written and read."""
    tensor, stream = 2 * SEQ * FFN, 2 * SEQ * HIDDEN
    by_hand = annotated(llama, fused_kernels=True)
    assert sum(strategies(by_hand, op)["R"].forward_s for op in ("silu", "mul_4")) == pytest.approx(
        memory_time_s(3 * tensor, H100)
    )
    norm = strategies(by_hand, "mlp_norm")["R"]
    assert norm.forward_s == pytest.approx(memory_time_s(2 * stream + 2 * HIDDEN, H100))
    assert strategies(annotated(llama, compiled=True), "mlp_norm")["R"].forward_s < norm.forward_s


def test_a_softmax_by_hand_takes_scale_and_mask_but_no_dropout():
    spec = NativeSpec.of(
        "gpt", GPTConfig(96, 64, 2, 4, max_seq=32, fused_attention=False, dropout=0.1)
    )
    annotator = Annotator(trace(spec.build("meta", torch.float32), spec.example_inputs(8, 32)))
    index, graph = next(
        (i, b.graph)
        for i, b in enumerate(annotator.traced.classes)
        if any("softmax" in n.name for n in b.graph.nodes)
    )
    shares = {joins: annotator.facts.classes[index].shares(joins) for joins in get_args(Joins)}
    first = {
        str(n.target).split(".")[1]: n.name
        for n in reversed(list(graph.nodes))
        if n.op == "call_function"
    }
    scale, mask, softmax = (first[word] for word in ("mul", "masked_fill", "softmax"))
    drop = next(iter(next(n for n in graph.nodes if n.name == softmax).users)).name
    for joins, found in shares.items():
        by_hand, alone = joins != "compiler", joins == "by hand, softmax alone"
        assert found[scale].writes == (False,) and found[mask].writes == (alone,)
        assert found[softmax].writes == (by_hand,) and found[drop].reads[0] == by_hand


@pytest.mark.parametrize(("recompute", "passes"), [("none", 2), ("full", 3)])
def test_a_framework_may_add_to_every_pass_over_a_layer(llama, recompute, passes):
    """Two layers, four micro-batches: so many passes over each; the ends of the model are left alone."""

    def seconds(slower: bool) -> float:
        software = Software(deepspeed_passes=slower, fitted=FittedConstants(deepspeed_pass_s=0.5))
        model = llama.annotate(
            Setting(MeshShape(dp=1), 1, 4, 0, recompute, "bf16", CLUSTER, software=software)
        )
        return price_placement(
            model, [{op.name: op.strategies[0].name for op in block.ops} for block in model.classes]
        ).time_s

    assert seconds(True) - seconds(False) == pytest.approx(0.5 * passes * 2 * 4)


def test_messages_that_all_ranks_hold_are_sent_in_parts(llama):
    """Over four nodes of eight, tp=8: an eighth through the network and a gather inside the node, against the whole through the network."""
    cluster, mesh, size = ClusterSpec.parse("dgx-a100-80g:32"), MeshShape(pp=4, tp=8), 2**24

    def hop(sequence_parallel: bool, scatters: bool) -> float:
        setting = Setting(mesh, 1, 4, 0, "none", "bf16", cluster, stages_per_rank=1, schedule="1f1b", sequence_parallel=sequence_parallel,
                          software=Software(scatters_messages=scatters))  # fmt: skip
        pipeline = llama.annotate(setting).pipeline
        return pipeline.hop_latency_s + size * pipeline.hop_s_per_byte

    inside = all_gather_time_s(size, 8, 1, cluster.topology)
    assert hop(False, True) == pytest.approx(
        point_to_point_time_s(size / 8, 4, 8, cluster.topology) + inside, rel=0.15
    )
    assert hop(False, True) < hop(False, False) / 3
    assert hop(True, True) == hop(True, False) == hop(False, False)


def test_what_products_in_fp8_read_is_gathered_in_fp8(llama):
    """The norm before the MLP is read by two products, and gathered in half the bytes; so is the gradient of the projection down, which is
    a product; the residual stream, which is neither, is gathered whole, and reductions stay in bf16."""
    mesh = MeshShape(dp=2, tp=4)

    def changes(value: str, **software) -> dict[tuple[str, str], Conversion]:
        model = annotated(llama, mesh, **{"matmul_dtype": "fp8"} | software)
        block = next(b for b in model.classes if "down_proj" in b.values)
        return {(str(a), str(b)): c for (a, b), c in block.values[value].conversions.items()}

    (norm, whole), (down, wide), (stream, same) = (
        (changes(value, fp8_gathers=True), changes(value))
        for value in ("mlp_norm", "down_proj", "add_2")
    )
    assert 0.4 < norm["S(1)", "R/P"].forward_s / whole["S(1)", "R/P"].forward_s < 0.8
    assert norm["S(1)", "R/P"].backward_s == whole["S(1)", "R/P"].backward_s
    assert (
        down["P", "S(1)"].forward_s == wide["P", "S(1)"].forward_s
        and down["P", "S(1)"].backward_s < wide["P", "S(1)"].backward_s
    )
    assert stream == same and changes("mlp_norm", fp8_gathers=True, matmul_dtype=None) == changes(
        "mlp_norm", matmul_dtype=None
    )
