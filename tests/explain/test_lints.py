"""Lints: each finds what it is for, with numbers, and leaves a plan without it alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.explain_tasks import Task, task, words_of
from torch import nn

from autopar import api
from autopar.explaining.lints import BUBBLE, FILLED, LintFinding, lint
from autopar.explaining.plan_report import PlanFacts, plan_reply
from autopar.ir.cluster import ClusterSpec
from autopar.request.software import Software

ODD = "gpt:layers=4,hidden=960,heads=12,vocab=50257,tied=true,seq=128"
"""GPT-2's vocabulary, which no degree divides; eight ranks do not divide 12 heads; embedding and head are one parameter."""


def odd() -> Task:
    return task(ODD, "h100:8", 64, 128)


def deep() -> Task:
    """Four layers, for pipelines."""
    return task("llama:layers=4,hidden=32,heads=4,vocab=128", "h100:8", 16, 32)


def named(findings: list[LintFinding], name: str) -> list[LintFinding]:
    return [finding for finding in findings if finding.lint == name]


def found(t: Task, pin: dict, name: str) -> list[LintFinding]:
    return named(lint(t.plan(pin), t.cluster, t.traced), name)


class Weighted(nn.Module):
    """Two linear layers after a constant of forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

    def forward(self, x):
        x = x * torch.tensor([1.0, 2.0, 3.0, 4.0])
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.pow(2).mean()


def test_constants_of_forward_are_no_tied_weights():
    model, batch, cluster = Weighted(), {"x": torch.ones(4, 4)}, ClusterSpec.parse("h100:2")
    traced = api.trace(model, batch, precision="bf16")
    plan = api.plan(model, cluster, batch, 8, pin={"pp": 2}, traced=traced)
    assert not named(lint(plan, cluster, traced), "tied weights")


def test_tensor_parallelism_across_nodes():
    t = task(cluster="dgx-h100:2", batch=64)
    assert not found(t, {"tp": 4}, "tensor parallelism across nodes")
    two = t.cluster.with_devices(4)
    small = replace(t.cluster, topology=replace(two.topology, nodes=2, devices_per_node=2))
    plan = t.plan({"tp": 4, "dp": 1}, small)
    (finding,) = named(lint(plan, small, t.traced), "tensor parallelism across nodes")
    assert (
        finding.numbers["nodes"] == 2
        and finding.numbers["inter_Bps"] < finding.numbers["intra_Bps"]
    )
    sent_s = sum(plan.predicted.breakdown.get(part, 0.0) for part in ("conversion", "edge"))
    assert (
        finding.numbers["communication_s"] == sent_s
        and "spans 2 nodes of 2" in finding.text
        and "divisor of 2" in finding.remedy
    )


def test_uneven_vocabulary_names_the_padding():
    plan = odd().plan({"tp": 4})
    assert any(
        "v" in axes["tp"].strategy
        for block in plan.blocks
        for op, axes in block.ops.items()
        if "cross_entropy" in op
    )
    (finding,) = named(lint(plan, odd().cluster, odd().traced), "uneven shards")
    assert (
        finding.numbers == {"size": 50257, "ranks": 4, "largest": 12565, "padded": 50260}
        and "Pad 50257 to 50260" in finding.remedy
    )
    assert not found(odd(), {"tp": 1}, "uneven shards")


def test_tied_weights_across_stages():
    (finding,) = found(odd(), {"pp": 2, "tp": 1, "micro_batch": 1}, "tied weights")
    assert (
        finding.numbers == {"parameters": 50257 * 960, "ranks": 2}
        and "pipeline ranks 0, 1" in finding.text
    )
    assert not found(odd(), {"pp": 1, "tp": 1}, "tied weights")
    # nothing is tied
    assert not found(deep(), {"pp": 2, "tp": 1, "micro_batch": 1}, "tied weights")


def test_a_bubble_says_how_many_micro_batches_fill_it():
    t, pin = deep(), {"pp": 4, "dp": 2, "tp": 1, "micro_batch": 2, "schedule": "1f1b"}
    plan = t.plan(pin)
    (finding,) = named(lint(plan, t.cluster, t.traced), "bubble")
    share = plan.predicted.breakdown["bubble"] / plan.predicted.step_time_s
    assert share > BUBBLE and finding.numbers["num_microbatches"] == 4
    enough = int(finding.numbers["enough_microbatches"])
    ways = f"a global batch of {enough * 4}, a smaller micro_batch or less dp"
    assert finding.remedy.endswith(f": {ways}; or less pp")
    more = t.plan(pin, batch=enough * 4)
    assert more.num_microbatches == enough
    assert more.predicted.breakdown["bubble"] / more.predicted.step_time_s == pytest.approx(
        BUBBLE, abs=0.02
    )
    assert not named(lint(t.plan(), t.cluster, t.traced), "bubble")
    # what a plan cannot have is no remedy
    longer = tuple(stage * 2 for stage in plan.stages)
    least = replace(plan, micro_batch=1, mesh=replace(plan.mesh, dp=1), stages=longer)
    (finding,) = named(lint(least, t.cluster), "bubble")
    assert finding.remedy.endswith(
        f": a global batch of {enough}; or more stages a rank (vpp), or less pp"
    )


@pytest.mark.parametrize(("share", "expected"), [(0.96, 0), (0.975, 1), (1.0, 1)])
def test_memory_within_three_percent(share, expected):
    t = task()
    peak = int(share * t.cluster.device.memory_bytes)
    plan = replace(
        t.plan(), predicted=replace(t.plan().predicted, peak_memory_bytes=(peak // 2, peak))
    )
    findings = named(lint(plan, t.cluster), "memory")
    assert len(findings) == expected and all(
        finding.numbers["peak_bytes"] == peak for finding in findings
    )


def test_a_small_micro_batch_is_one_whose_products_are_slow():
    t = task("llama:layers=1,hidden=2048,heads=16,vocab=2048", "h100:1", 128, 128)
    (finding,) = named(lint(t.plan({"micro_batch": 1}), t.cluster, t.traced), "small micro-batch")
    enough = int(finding.numbers["enough"])
    assert (
        1 < enough <= 128
        and finding.numbers["flops_per_s"] < FILLED * finding.numbers["large_flops_per_s"]
    )
    assert not found(t, {"micro_batch": enough}, "small micro-batch")
    (half,) = found(t, {"micro_batch": enough // 2}, "small micro-batch")
    assert (
        half.numbers["enough"] == enough
        and half.numbers["large_flops_per_s"] == finding.numbers["large_flops_per_s"]
    )
    assert f"micro_batch={enough} reaches" in finding.remedy


def test_a_host_that_issues_kernels_too_slowly():
    t = task("gpt:layers=12,hidden=1024,heads=16,vocab=50304,seq=1024", "h200:1", 16, 1024, True)
    (finding,) = found(t, {"micro_batch": 1, "recompute": "none"}, "host-bound")
    assert finding.numbers["waiting_s"] > 0.1 * finding.numbers["step_s"]
    assert "compile=True" in finding.remedy
    assert not found(t, {"micro_batch": 16, "recompute": "none"}, "host-bound")
    assert not found(task("gpt-tiny", "cpu:1", 16, 64), {"micro_batch": 1}, "host-bound")


def test_the_host_is_that_of_the_software():
    t = task("gpt:layers=12,hidden=1024,heads=16,vocab=50304,seq=1024", "h200:1", 16, 1024, True)
    pin = {"micro_batch": 1, "recompute": "none"}
    (usual,) = found(t, pin, "host-bound")

    def bound(**software: Any) -> list[LintFinding]:
        plan = api.plan(
            t.model,
            t.cluster,
            t.inputs,
            t.batch,
            pin=pin,
            traced=t.traced,
            software=Software(**software),
        )
        return named(lint(plan, t.cluster, t.traced), "host-bound")

    each_s = t.cluster.device.issue_s
    (slow,), (slower,) = bound(issue_s=2 * each_s), bound(issue_s=3 * each_s)
    once_s = slower.numbers["waiting_s"] - slow.numbers["waiting_s"]
    assert once_s == pytest.approx(slow.numbers["waiting_s"] - usual.numbers["waiting_s"])
    (compiled,) = bound(compiled=True, issue_s=2 * each_s)
    assert compiled.numbers["waiting_s"] < slow.numbers["waiting_s"], "some kernels are joined"
    assert "CUDA graphs" in compiled.remedy
    assert not bound(cuda_graphs="all")


def test_a_small_micro_batch_that_cannot_grow_says_what_must():
    t = task()
    (finding,) = named(lint(t.plan({"dp": 8}), t.cluster, t.traced), "small micro-batch")
    assert "has 2 sequences a step" in finding.remedy


def test_findings_are_shown_and_a_plan_without_model_has_those_of_the_plan():
    t = deep()
    plan = t.plan({"pp": 4, "dp": 2, "tp": 1, "micro_batch": 2, "schedule": "1f1b"})
    alone, whole = lint(plan, t.cluster), lint(plan, t.cluster, t.traced)
    assert [f.lint for f in alone] == ["bubble"] and {f.lint for f in whole} >= {
        "bubble",
        "small micro-batch",
    }
    shown = words_of(plan_reply(PlanFacts(plan, t.cluster, whole)))
    assert (
        "Lints" in shown
        and "the pipeline idles" in shown
        and "Lints" not in words_of(plan_reply(PlanFacts(plan)))
    )


def test_attention_whose_heads_tp_does_not_divide():
    t = odd()
    (finding,) = found(t, {"tp": 8}, "indivisible heads")
    assert (
        finding.numbers == {"heads": 12, "tp": 8, "segments": 4}
        and "does not divide the 12 heads" in finding.text
    )
    assert not found(t, {"tp": 4}, "indivisible heads")
