"""What annotation prices is what a program does: expert and context parallelism, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from autopar_cost_models import Traffic, collective_time_s, point_to_point_time_s
from autopar_cost_models.constants import BUCKET_BYTES

from autopar.annotate.annotator import Annotator
from autopar.annotate.context_method import ContextAttention, context_extra_s
from autopar.annotate.setting import Setting
from autopar.api import trace
from autopar.ir.annotated import Strategy
from autopar.ir.cluster import ClusterSpec
from autopar.ir.mesh import MeshShape
from autopar.models import parse_model

ROWS, SEQ, TOP_K, HIDDEN, WIDTH, EXPERTS = (
    2,
    16,
    2,
    32,
    24,
    4,
)  # a micro-batch of one rank of moe-tiny
CLUSTER = ClusterSpec.parse("cpu:8")


@pytest.fixture(scope="module")
def annotator() -> Annotator:
    spec = parse_model("moe-tiny")
    return Annotator(trace(spec.build("meta", torch.float32), spec.example_inputs(8, SEQ)))


def experts(annotator: Annotator, mesh: MeshShape) -> dict[str, Strategy]:
    """The strategies of the routed experts on tp."""
    model = annotator.annotate(Setting(mesh, ROWS, 1, 0, "none", "fp32", CLUSTER))
    return {
        s.name: s
        for block in model.classes
        for op in block.ops
        if "routed_experts" in op.target
        for s in op.strategies
    }


def test_expert_parallelism_pays_its_exchanges(annotator):
    local = ROWS * SEQ * TOP_K * HIDDEN * 4
    rows_s = collective_time_s("all_to_all", 4 * local, 4, 1, CLUSTER.topology)
    counts_s = collective_time_s("all_to_all", 4 * EXPERTS * 8, 4, 1, CLUSTER.topology)
    alone, spread = (experts(annotator, MeshShape(dp=4, ep=ep))["R"] for ep in (1, 4))
    # and fewer weights are read
    assert spread.forward_s - alone.forward_s == pytest.approx(counts_s + 2 * rows_s, rel=0.05)
    assert spread.backward_s - alone.backward_s == pytest.approx(2 * rows_s, rel=0.05)


def test_rows_of_experts_are_kept_whole_where_their_width_is_sharded(annotator):
    found = experts(annotator, MeshShape(dp=2, tp=2))
    whole, halved = (
        next(s.size_bytes for s in found[name].saved if s.key.endswith(":own"))
        for name in ("R", "f")
    )
    rows = 2 * ROWS * SEQ * TOP_K * HIDDEN * 4  # before the first product and after the second
    assert halved == rows + (whole - rows) / 2


def test_parameters_of_experts_are_divided_by_ep(annotator):
    def static(mesh: MeshShape) -> int:
        model = annotator.annotate(Setting(mesh, ROWS, 1, 0, "none", "fp32", CLUSTER))
        sizes = {
            op.target: op.strategies[0].static_bytes
            for b in model.classes
            for op in b.ops
            if op.kind == "parameter"
        }
        return next(size for name, size in sizes.items() if "experts" in name or "up" in name)

    assert static(MeshShape(dp=4)) == 4 * static(MeshShape(dp=4, ep=4))


def test_gradients_wait_for_the_latency_of_their_bucket_alone(annotator):
    model = annotator.annotate(Setting(MeshShape(dp=4), ROWS, 1, 0, "none", "fp32", CLUSTER))
    found = [
        (b.count, op.strategies[0]) for b in model.classes for op in b.ops if op.kind == "parameter"
    ]
    # of parameter, gradient and two moments
    gradient_bytes = sum(count * s.static_bytes for count, s in found) / 4
    bucket_s = collective_time_s("all_reduce", BUCKET_BYTES, 4, 1, CLUSTER.topology)
    assert sum(count * s.step_comm_s for count, s in found) == pytest.approx(
        bucket_s * gradient_bytes / BUCKET_BYTES
    )


def test_the_ring_sends_gradients_in_fp32_and_ulysses_copies_of_key_heads():
    mesh, topology = MeshShape(cp=2), CLUSTER.topology
    half = ContextAttention(
        4096, 1024, 1024, 4096, 0.0, 0.0, causal=True, zigzag=True, gradient_bytes=4096
    )
    hop_s, back_s, home_s = (
        point_to_point_time_s(size / 2, 2, 1, topology) for size in (2048, 2048 + 4096, 4096)
    )
    assert context_extra_s("ring", half, mesh, CLUSTER, gathers=True) == pytest.approx(
        (hop_s, back_s + home_s)
    )
    copied = replace(half, key_copies=2)
    expected = sum(
        collective_time_s("all_to_all", size, 2, 1, topology) for size in (4096, 2048, 2048, 4096)
    )
    assert context_extra_s("ulysses", copied, mesh, CLUSTER, gathers=True) == pytest.approx(
        (expected, expected)
    )


# ------------------------------------------------------------------------------------------------------------------ where ranks lie

NODES = ClusterSpec.make(
    "cpu", nodes=2, devices_per_node=4, intra_bandwidth_Bps=1e11, inter_bandwidth_Bps=1e8
)
"""Two nodes of four, a slow link between them."""


def test_gradients_over_axes_that_lie_apart_are_reduced_over_each(annotator):
    """The axes dp and cp are one group where they are neighbours, and two where pp lies between them."""

    def reduction_s(order: str) -> float:
        model = annotator.annotate(
            Setting(
                MeshShape(pp=2, dp=2, cp=2, order=order),
                ROWS,
                2,
                0,
                "none",
                "fp32",
                NODES,
                schedule="1f1b",
            )
        )
        found = [
            (b.count, op.strategies[0])
            for b in model.classes
            for op in b.ops
            if op.kind == "parameter"
        ]
        return (
            sum(count * s.step_comm_s for count, s in found)
            / sum(count * s.static_bytes / 4 for count, s in found)
            * BUCKET_BYTES
        )

    one, apart, together = ([(4, 1)], [(2, 4), (2, 1)], [(4, 2)])  # (ranks, from one to the next)
    for order, levels in (("", one), ("dp-pp-cp", apart), ("dp-cp-pp", together)):
        expected = sum(
            collective_time_s("all_reduce", BUCKET_BYTES, *level, NODES.topology)
            for level in levels
        )
        assert reduction_s(order) == pytest.approx(expected), order


@pytest.mark.parametrize(("pp", "senders"), [(2, 4), (4, 2), (8, 1)])
def test_messages_share_interfaces_with_ranks_that_leave_the_node(annotator, pp, senders):
    """Of the ranks of a pipeline on one node, one sends to the next node."""
    topology = replace(NODES.topology, nics_per_node=1)
    mesh = MeshShape(pp=pp, dp=8 // pp)
    model = annotator.annotate(
        Setting(
            mesh, ROWS, 2, 0, "none", "fp32", replace(NODES, topology=topology), schedule="1f1b"
        )
    )
    size, stride, traffic = 2**24, mesh.stride("pp"), Traffic(concurrent_groups=senders)
    priced_s = model.pipeline.hop_latency_s + size * model.pipeline.hop_s_per_byte
    assert priced_s == pytest.approx(
        point_to_point_time_s(size, pp, stride, topology, traffic), rel=1e-3
    )


@pytest.mark.parametrize("name", ["moe-tiny", "llama-tiny"])
def test_every_axis_is_priced_where_it_lies(annotator, name):
    """With tp outside pp, its groups reach over both nodes, and messages stay inside one; also where meshes share what their ops cost,
    which those of the experts do not."""
    if name != "moe-tiny":
        spec = parse_model(name)
        annotator = Annotator(trace(spec.build("meta", torch.float32), spec.example_inputs(8, SEQ)))
    for order, tp_apart, pp_apart in (
        ("", 1, 4),
        ("dp-pp-tp", 1, 2),
        ("dp-tp-pp", 2, 1),
        ("tp-dp-pp", 4, 1),
    ):
        model = annotator.annotate(
            Setting(
                MeshShape(pp=2, dp=2, tp=2, order=order),
                ROWS,
                2,
                0,
                "none",
                "fp32",
                NODES,
                schedule="1f1b",
            )
        )
        block = next(b for b in model.classes if b.count > 1)
        summed = [
            (v, c)
            for v in block.values.values()
            for (a, b), c in v.conversions.items()
            if (str(a), str(b)) == ("P", "R")
        ]
        value, conversion = summed[0]
        travels_s = collective_time_s("all_reduce", value.size_bytes, 2, tp_apart, NODES.topology)
        assert conversion.forward_comm_s == pytest.approx(travels_s), order
        assert model.pipeline.hop_latency_s == pytest.approx(
            point_to_point_time_s(0, 2, pp_apart, NODES.topology)
        ), order
