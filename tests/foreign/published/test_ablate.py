"""Ablation: a mechanism that is switched off changes what it should and nothing else."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.published import ablate as module
from autopar.foreign.published.ablate import GENERATIONS, MECHANISMS, Mechanism, ablate
from autopar.foreign.published.evaluate import case_of, evaluate
from autopar.foreign.published.fit import FREE_CONSTANTS
from autopar.foreign.published.fit_report import ablation_reply
from autopar.foreign.published.runs import read_runs

BY_NAME = {mechanism.name: mechanism for mechanism in MECHANISMS}
FP8 = LLAMA | {
    "id": "fp8",
    "gpu": "H100-80G-SXM",
    "dtype": "fp8",
    "extra_opts": "fp8_rowwise",
    "compile": "1",
}
NEMO = {"framework": "nemo", "year": "2024", "sp": "1", "recompute": "selective", "extra_opts": ""}
PADDED = GPT | NEMO | {"id": "padded", "vocab": "50257"}
DEEPSPEED = GPT | {
    "id": "deepspeed",
    "framework": "megatron-deepspeed",
    "tp": "1",
    "pp": "1",
    "dp": "16",
    "zero_stage_or_fsdp": "3",
}
PIPES = GPT | {"id": "pipes", "framework": "megatron-deepspeed"}
EXPERTS = MOE | {
    "id": "experts",
    "framework": "megatron-core",
    "year": "2026",
    "gpu": "GB200-NVL72",
}
ROUTED = EXPERTS | {"id": "routed", "gpu": "H100-80G-SXM"}
MANY = ROUTED | {
    "id": "many",
    "framework": "megatron-bridge",
    "year": "2025",
    "extra_opts": "experts=256;topk=2;moe_ffn=24",
}
BIASED = ROUTED | {"id": "biased", "extra_opts": "experts=8;topk=2;moe_ffn=24;expert_bias"}
GROK = MOE | {
    "id": "grok",
    "framework": "nemo",
    "gpu": "H100-80G-SXM",
    "notes": "capacity factor 1.0, grouped GEMM off",
}
NEMO_FP8 = LLAMA | {
    "id": "nemo-fp8",
    "framework": "nemo",
    "year": "2025",
    "gpu": "H100-80G-SXM",
    "dtype": "fp8",
    "tp": "2",
    "dp": "8",
    "zero_stage_or_fsdp": "1",
}
NANOTRON = LLAMA | {
    "id": "nanotron",
    "framework": "nanotron",
    "gpu": "H100-80G-SXM",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "zero_stage_or_fsdp": "1",
    "mem_gib_per_gpu": "1",
}
MOSAIC = LLAMA | {
    "id": "mosaic",
    "framework": "llm-foundry",
    "gpu": "H100-PCIe-80G",
    "extra_opts": "sliding_window=8",
}

TOUCHES = {  # the values that differ, of any of these runs
    "recomputation": {"run.layout.recompute"},
    "partial recomputation": {"run.layout.recompute"},
    "early stop of recomputation": {"software.early_stop"},
    "pipeline bubble": set(),
    "scattered messages": {"software.scatters_messages"},
    "work once a step": set(),
    "late weight gradients": {"software.late_gradients"},
    "overlap over tp": {"software.tp_overlap"},
    "overlap over dp": {"software.dp_overlap"},
    "overlap contention": {"software.fitted.overlap_slowdown"},
    "nodes": {"cluster.topology.devices_per_node", "cluster.topology.nodes", "cluster.topology.nics_per_node"},
    "one interface for ZeRO-3": {"software.sharded_interfaces"},
    "link efficiency": {"software.fitted.intra_efficiency", "software.fitted.inter_efficiency", "cluster.topology.intra.efficiency",
                        "cluster.topology.inter.efficiency"},
    "kernel launches": {"software.fitted.launch_s", "cluster.device.launch_s"},
    "host": {"software.issue_s"},
    "routing on the host": {"software.routing_operations"},
    "CUDA graphs": {"software.cuda_graphs"},
    "dispatch once": {"software.dispatch"},
    "memory traffic": {"cluster.device.memory_bandwidth_Bps"},
    "compiler fusion": {"software.compiled"},
    "kernels by hand": {"software.fused_kernels"},
    "joined products": {"software.joins_products"},
    "composite norms": {"software.composite_norms"},
    "optimizer op by op": {"software.fused_optimizer"},
    "fused accumulation": {"software.fused_accumulation"},
    "accumulation kernels": {"software.fused_accumulation"},
    "tiles and waves": {"cluster.device.compute_units"},
    "stalled hosts": {"software.network_slows_host"},
    "efficiency by generation": {*(f"software.fitted.{name}" for name in GENERATIONS), "cluster.device.matmul_efficiency",
                                 "cluster.device.dtype_efficiency"},
    "power limit": {"software.fitted.power_exponent", "cluster.device.flops", "cluster.device.efficiency"},
    "attention kernel": {"software.attention_kernel"},
    "attention written out": {"run.software.flash"},
    "sliding windows": {"run.shape.window", "run.shape.window_every"},
    "fp8": {"software.matmul_dtype"},
    "fp8 gathers": {"software.fp8_gathers"},
    "fp8 scaling": {"software.fp8_scaling"},
    "head outside fp8": {"software.fp8_head"},
    "vocabulary padding": {"run.software.padded_vocab"},
    "DeepSpeed's passes": {"software.deepspeed_passes"},
    "dropout": {"run.software.dropout"},
    "dispatch beside compute": {"software.dispatch_overlap"},
    "sorting by expert": {"software.sorts_by_expert"},
    "permutation by operations": {"software.permutes_by_op"},
    "experts one by one": {"software.sequential_experts"},
    "biases of experts": {"software.expert_bias"},
    "clamps of experts": {"software.clamps_experts"},
    "recomputed activations": {"software.recomputes_activation"},
    "gather again": {"software.gathers_again"},
    "loss kernels": {"software.loss_kernel"},
    "state of frameworks": {"software.state_recipe"},
    "inputs kept in fp8": {"software.keeps_fp8"},
    "fp8 copies of weights": {"software.fp8_weight_copies"},
    "freed stage outputs": {"software.keeps_stage_outputs"},
    "framework buffers": {"software.workspace_bytes"},
    "root unit": {"software.root_unit"},
    "live parameters": {"software.live_parameters"},
    "fragmentation": {"software.fitted.fragmentation"},
    "CUDA context": {"software.fitted.reserved_bytes", "cluster.device.reserved_bytes"},
    "options that save memory": set(),
}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    found, problems = read_runs(
        write(
            tmp_path_factory.mktemp("runs"),
            GPT,
            LLAMA,
            MOE,
            FP8,
            PADDED,
            DEEPSPEED,
            PIPES,
            MOSAIC,
            EXPERTS,
            ROUTED,
            MANY,
            BIASED,
            GROK,
            NEMO_FP8,
            NANOTRON,
        )
    )
    assert not problems, problems
    return {run.id: run for run in found}


def differences(a, b, name: str = "") -> set[str]:
    """Dotted names of the fields in which two values differ."""
    if is_dataclass(a) and type(a) is type(b):
        pairs = ((f.name, getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
        return {
            found
            for field, x, y in pairs
            for found in differences(x, y, f"{name}.{field}".lstrip("."))
        }
    return set() if a == b else {name}


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
def test_a_mechanism_is_switched_off_by_its_own_values(runs, mechanism):
    found = set().union(*(differences(case_of(run), mechanism.off(run)) for run in runs.values()))
    allowed = TOUCHES[mechanism.name]
    assert found <= allowed and (found or not allowed), (found, allowed)


@pytest.mark.slow
def test_what_no_value_touches_is_not_priced_again(runs, monkeypatch):
    monkeypatch.setattr(module, "settle", None)
    whole = evaluate(runs["llama"])
    for name in (
        "recomputation",
        "pipeline bubble",
        "fp8",
        "sliding windows",
        "vocabulary padding",
        "compiler fusion",
    ):
        assert BY_NAME[name].predict(runs["llama"], whole) == whole, name


def test_a_pipeline_without_its_bubble_and_a_step_without_recomputation(runs):
    run = runs["gpt"]
    whole = evaluate(run)
    assert whole.breakdown["bubble"] > 0
    assert (
        BY_NAME["pipeline bubble"].predict(run, whole).step_time_s
        == whole.step_time_s - whole.breakdown["bubble"]
    )
    kept = evaluate(replace(run, layout=replace(run.layout, recompute="none")))
    assert BY_NAME["recomputation"].predict(run, whole) == kept
    assert kept.step_time_s < whole.step_time_s
    assert (
        BY_NAME["overlap over dp"].predict(runs["llama"], evaluate(runs["llama"])).step_time_s
        >= evaluate(runs["llama"]).step_time_s
    )


def test_mape_with_and_without(runs):
    """Runs that were measured as they are predicted have no error but where a mechanism is missing."""
    exact = []
    for run in (runs["gpt"], runs["llama"]):
        exact.append(
            replace(run, measured=replace(run.measured, step_time_s=evaluate(run).step_time_s))
        )

    def refuse(case):
        raise AutoparError("no")

    found = ablate(
        exact, (BY_NAME["pipeline bubble"], BY_NAME["fp8"], Mechanism("moon", "none", case=refuse))
    )
    assert found.errors == pytest.approx(
        {"gpt": 0.0, "llama": 0.0}
    ) and found.refitted == pytest.approx({"gpt": 0.0, "llama": 0.0})
    bubble, fp8, moon = found.without
    parts = evaluate(exact[0])
    assert bubble.changed == ("gpt",) and not bubble.refused
    assert bubble.errors == pytest.approx(
        {"gpt": -parts.breakdown["bubble"] / parts.step_time_s, "llama": 0.0}
    )
    assert bubble.mape(changed=True) == pytest.approx(2 * bubble.mape()) and abs(
        bubble.refitted["gpt"]
    ) < abs(bubble.errors["gpt"])
    assert (
        not fp8.changed
        and fp8.mape() == pytest.approx(0.0)
        and moon.refused == ("gpt", "llama")
        and not moon.changed
    )

    data = json.loads(ablation_reply(found).json())
    assert [each["mechanism"] for each in data["without"]] == ["pipeline bubble", "fp8", "moon"]
    assert data["without"][0]["changed"] == ["gpt"] and data["mape"] == pytest.approx(0.0)
    console = Console(width=200, record=True, force_terminal=False)
    console.print(ablation_reply(found))
    text = console.export_text()
    assert "ranks never wait" in text and "2 refused" in text and "approximation" in text


def test_a_mechanism_that_holds_memory(runs):
    """A run whose memory was measured as it is predicted has no error but where buffers are missing."""
    run = runs["nanotron"]
    whole = evaluate(run)
    size_bytes = whole.memory_bytes("reserved", first_rank=True)
    exact = replace(run, measured=replace(run.measured, memory_bytes=size_bytes))
    found = ablate([exact], (BY_NAME["framework buffers"], BY_NAME["pipeline bubble"]))
    assert found.memory_errors == pytest.approx({"nanotron": 0.0})
    buffers, bubble = found.without
    held = case_of(run).software.workspace_bytes
    assert buffers.memory_errors == pytest.approx({"nanotron": -held / size_bytes})
    assert buffers.memory_changed == ("nanotron",) and not buffers.changed
    assert bubble.memory_errors == found.memory_errors and not bubble.memory_changed
    assert json.loads(ablation_reply(found).json())["without"][0]["memory_changed"] == ["nanotron"]
    console = Console(width=200, record=True, force_terminal=False)
    console.print(ablation_reply(found))
    assert "Memory of 1 runs without one mechanism" in console.export_text()


def test_a_fit_cannot_bring_a_mechanism_back():
    table = np.arange(2.0 * len(FREE_CONSTANTS)).reshape(2, -1)
    place = FREE_CONSTANTS.index
    launches = BY_NAME["kernel launches"].slopes(table)
    others = np.arange(len(FREE_CONSTANTS)) != place("launch_s")
    assert not launches[:, ~others].any() and (launches[:, others] == table[:, others]).all()
    one = BY_NAME["efficiency by generation"].slopes(table)
    first, *others = map(place, GENERATIONS)
    assert (one[:, first] == table[:, [first, *others]].sum(1)).all() and not one[:, others].any()


@pytest.mark.slow
def test_the_command_line(tmp_path):
    path = write(tmp_path, GPT, LLAMA | {"config_complete": "0"})
    result = CliRunner().invoke(cli, ["predict", str(path), "--ablate", "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert set(data["errors"]) == {"gpt"} and len(data["without"]) == len(MECHANISMS)
    assert CliRunner().invoke(cli, ["predict", str(path), "--ablate", "--loso"]).exit_code == 2
