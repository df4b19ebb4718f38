"""Runs through the planner: one layer is what a layer adds, and every kind of recomputation is priced."""

from __future__ import annotations

import pytest
from autopar_cost_models import NODES
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.foreign.published.evaluate import cluster_of_run, evaluate
from autopar.foreign.published.report import assumed_of
from autopar.foreign.published.runs import read_runs

ONE = GPT | {"layers": "1", "gpus": "1", "tp": "1", "pp": "1", "dp": "1", "hidden": "1024", "ffn_hidden": "", "seq": "512",
             "global_batch_seqs": "2", "extra_opts": "one_layer_fwd+bwd_only;no_flash_attn", "recompute": "none"}  # fmt: skip


def predicted(tmp_path, row, **changes):
    (run,), problems = read_runs(write(tmp_path, row | changes))
    assert not problems, problems
    return evaluate(run)


@pytest.mark.slow
def test_a_layer_alone_has_no_embedding_head_or_update(tmp_path):
    alone = predicted(tmp_path, ONE)
    assert "step" not in alone.breakdown and sum(alone.breakdown.values()) == pytest.approx(
        alone.step_time_s
    )
    assert predicted(tmp_path, ONE, vocab="100000").step_time_s == pytest.approx(alone.step_time_s)
    rest = ONE | {"extra_opts": "no_flash_attn"}
    four, six = (predicted(tmp_path, rest, layers=layers) for layers in ("4", "6"))
    device_s = [
        found.step_time_s - found.breakdown["step"] - found.breakdown.get("host", 0.0)
        for found in (four, six)
    ]
    layers_s = device_s[1] - device_s[0]
    assert alone.step_time_s == pytest.approx(layers_s / 2)
    assert alone.peak_memory_bytes == pytest.approx(
        (six.peak_memory_bytes - four.peak_memory_bytes) / 2
    )
    selective, full = (
        predicted(tmp_path, ONE, recompute=kind).step_time_s for kind in ("selective", "full")
    )
    forward_s = alone.breakdown["forward"]
    assert alone.step_time_s < selective < full < alone.step_time_s + 1.1 * forward_s


def test_kinds_of_recomputation(tmp_path):
    row = LLAMA | {"layers": "4", "hidden": "1024", "ffn_hidden": "2816", "seq": "1024"}
    kinds = [
        ("none", ""),
        ("selective", "selective_AC=every-2-layers"),
        ("selective", "selective_AC=op"),
        ("full", ""),
    ]
    none, layers, op, full = (
        predicted(tmp_path, row, recompute=kind, extra_opts=options) for kind, options in kinds
    )
    assert (
        none.step_time_s < min(layers.step_time_s, op.step_time_s)
        and max(layers.step_time_s, op.step_time_s) < full.step_time_s
    )
    assert full.peak_memory_bytes < op.peak_memory_bytes < none.peak_memory_bytes


def test_experts_shared_out_over_tp_are_split_over_it(tmp_path):
    """ep=4 over dp=2 and tp=2: two groups of experts, each expert in two halves."""
    row = MOE | {"gpus": "4", "tp": "2", "dp": "2", "sp": "1", "zero_stage_or_fsdp": "1"}
    over_tp, over_dp = (predicted(tmp_path, row, ep=ep) for ep in ("4", "2"))
    assert over_tp == over_dp


@pytest.mark.slow
def test_predictors_of_later_tokens_are_priced(tmp_path):
    row = MOE | {"extra_opts": "experts=8;topk=2;moe_ffn=64;shared_experts=1", "hidden": "256"}
    plain, later = (
        predicted(tmp_path, row, extra_opts=row["extra_opts"] + more) for more in ("", ";mtp=1")
    )
    assert (
        later.step_time_s > plain.step_time_s and later.peak_memory_bytes > plain.peak_memory_bytes
    )


def test_a_new_layout_of_a_traced_model_builds_and_traces_nothing(tmp_path, monkeypatch):
    """Most of a first prediction is spent on the model; another layout of it takes milliseconds."""
    predicted(tmp_path, LLAMA)
    for name in (
        "autopar.api.capture",
        "autopar.models.base.NativeSpec.build",
        "autopar.annotate.class_facts.observe_saved",
    ):
        monkeypatch.setattr(name, None)
    layouts = [
        {"micro_batch": "1"},
        {"micro_batch": "4"},
        {"tp": "2", "dp": "8"},
        {"recompute": "full"},
        {"zero_stage_or_fsdp": "1"},
    ]
    times = {predicted(tmp_path, LLAMA, **layout).step_time_s for layout in layouts}
    assert len(times) == len(layouts)


def test_sharding_within_groups_is_priced(tmp_path):
    """Fewer ranks hold more each; 16 are all of them, and a node has eight."""
    kinds = ("fsdp2", "hsdp(shard=16)", "hsdp", "hsdp(shard=8)", "hsdp(shard=2)")
    whole, same, node, eight, pair = (
        predicted(tmp_path, LLAMA, zero_stage_or_fsdp=kind) for kind in kinds
    )
    assert (same, eight) == (whole, node)
    assert len({whole.step_time_s, node.step_time_s, pair.step_time_s}) == 3
    assert whole.peak_memory_bytes < node.peak_memory_bytes < pair.peak_memory_bytes


def networks(tmp_path, *rows):
    """The topology of the cluster of each row."""
    runs, problems = read_runs(write(tmp_path, *rows))
    assert not problems
    return [cluster_of_run(run).topology for run in runs]


def test_no_line_rate_decides_the_kind_of_network(tmp_path):
    """Of every device with a home: interfaces, latency and efficiency stay, and the rate is the row's.
    The rates are those of the catalogue's nodes, and their neighbours.
    """
    rates = sorted(
        {
            round(node.inter.bandwidth_Bps * node.topology(1).nics / node.devices_per_node * 8e-9)
            for node in NODES.values()
        }
    )
    rates = [rate for near in rates for rate in (near - 1, near, near + 1)]
    for gpu in ("A100-80G-SXM", "A100-40G-SXM", "H100-80G-SXM", "H200", "V100-32G", "MI250X"):
        rows = [GPT | {"id": f"{n}", "gpu": gpu, "nic_gbps_per_gpu": str(n)} for n in rates]
        found = networks(tmp_path, *rows)
        assert len({(t.nics, t.inter.efficiency, t.inter.latency_s) for t in found}) == 1, gpu
        per_gpu = [t.inter.bandwidth_Bps * t.nics / t.devices_per_node for t in found]
        assert per_gpu == pytest.approx([rate * 1e9 / 8 for rate in rates]), gpu


def test_prices_rise_evenly_with_the_time_of_the_network(tmp_path):
    rates = (49, 50, 51)
    first, middle, last = (
        predicted(tmp_path, LLAMA, gpu="A100-80G-SXM", nic_gbps_per_gpu=str(rate)).step_time_s
        for rate in rates
    )
    assert first >= middle >= last and first - middle < 2 * (middle - last) + 1e-3


def test_the_network_of_a_system_is_that_of_a_row_that_names_it(tmp_path):
    """By the column `system`, or by the notes; for another node the name changes nothing."""
    base = GPT | {"gpu": "A100-80G-SXM", "nic_gbps_per_gpu": "50", "system": "", "notes": ""}
    named = {
        "column": {"system": "jeanzay-a100"},
        "words": {"system": "Jean Zay"},
        "notes": {"notes": "Jean Zay A100-80GB nodes (8 GPU)"},
        "other": {"gpu": "H100-80G-SXM", "system": "Jean Zay"},
        "none": {},
    }
    rows = [base | {"id": name} | cells for name, cells in named.items()]
    *omnipath, other, plain = networks(tmp_path, *rows)
    jeanzay = NODES["jeanzay-a100"].topology(1)
    for topology in omnipath:
        assert (topology.nics, topology.inter.bandwidth_Bps) == (4, 12.5e9)
        assert topology.inter.efficiency == jeanzay.inter.efficiency
    assert other.nics == plain.nics == 8 and plain.inter.bandwidth_Bps == 6.25e9
    assert plain.inter.efficiency == NODES["dgx-a100-80g"].topology(1).inter.efficiency
    assert other.inter.efficiency == NODES["dgx-h100"].topology(1).inter.efficiency
    texts = [[str(of) for of in assumed_of(run)] for run in read_runs(write(tmp_path, *rows))[0]]
    said = [next(text for text in of if text.startswith("network")) for of in texts]
    assert all("jeanzay-a100, at 50 Gbit/s a GPU (the row names" in text for text in said[:3])
    assert "has other nodes" in said[3] and "no system is named" in said[4]


def test_a_system_outside_the_catalogue_is_refused_with_names(tmp_path):
    row = GPT | {"id": "a", "gpu": "A100-80G-SXM", "system": "dgx-a100"}
    _, (problem,) = read_runs(write(tmp_path, row))
    assert "did you mean dgx-a100-40g or dgx-a100-80g" in problem.reason
