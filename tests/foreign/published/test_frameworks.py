"""What follows from frameworks: which rule applies to which row, and that planning takes the fields."""

from __future__ import annotations

from dataclasses import replace

import pytest
from autopar_cost_models import DEVICES, memory_time_s
from support.published_rows import GPT, MOE, write

from autopar.annotate.kernels import kernels_of
from autopar.foreign.published.evaluate import case_of, evaluate, price_run, stages_of_run
from autopar.foreign.published.frameworks import (
    bias_operations,
    offloaded,
    offloads_where_tight,
    run_job,
)
from autopar.foreign.published.report import GIB
from autopar.foreign.published.run import RunPrediction
from autopar.foreign.published.runs import read_runs
from autopar.foreign.published.score import Scored
from autopar.request.frameworks import (
    LIVE_PARAMETERS,
    NETWORK_SLOWS_HOST,
    REDUCE_BUCKET_BYTES,
    fields_of,
)
from autopar.request.software import Software

STATED = (
    "attention_kernel",
    "dp_overlap",
    "early_stop",
    "fused_accumulation",
    "fused_softmax",
    "issue_s",
    "late_gradients",
    "tp_overlap",
)
"""Fields that a row may state, whose defaults test_runs.py has, and the time of the host."""
MEGATRON = {
    "fused_kernels": True,
    "joins_products": True,
    "gathers_again": True,
    "loss_kernel": "in_place",
}
CASES = [
    ({"framework": "torchtitan", "zero_stage_or_fsdp": "fsdp2", "dtype": "bf16", "year": 2024},
     {"state_recipe": "fsdp", "composite_norms": True, "root_unit": True, "frozen": "sharded in fp32"}),
    ({"framework": "torch-fsdp (llm-foundry)", "zero_stage_or_fsdp": "3 (FSDP FULL_SHARD)", "dtype": "bf16", "year": 2023},
     {"state_recipe": "fsdp", "loss_kernel": "fused", "fused_optimizer": False, "root_unit": True,
      "frozen": "sharded in fp32"}),
    ({"framework": "megatron", "zero_stage_or_fsdp": "1", "dtype": "bf16", "year": 2023}, MEGATRON | {"keeps_stage_outputs": False}),
    ({"framework": "nemo", "zero_stage_or_fsdp": "1", "dtype": "fp8", "year": 2024},
     MEGATRON | {"keeps_stage_outputs": False, "keeps_fp8": True, "fp8_weight_copies": True, "fp8_gathers": True,
      "state_recipe": "bf16_gradients"}),
    ({"framework": "megatron-deepspeed", "zero_stage_or_fsdp": "1", "dtype": "bf16", "year": 2022, "pp": 2},
     MEGATRON | {"state_recipe": "deepspeed_bf16", "deepspeed_passes": True,
      "scatters_messages": True}),
    ({"framework": "megatron-deepspeed", "zero_stage_or_fsdp": "1", "dtype": "fp16", "year": 2022, "pp": 2},
     MEGATRON | {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "deepspeed_passes": True,
      "scatters_messages": True}),
    ({"framework": "deepspeed", "zero_stage_or_fsdp": "3", "dtype": "fp16", "year": 2021},
     {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "live_parameters": LIVE_PARAMETERS,
      "sharded_interfaces": 1, "scatters_messages": True, "frozen": "sharded"}),
    ({"framework": "deepspeed", "zero_stage_or_fsdp": "3", "dtype": "fp16", "year": 2023},
     {"state_recipe": "deepspeed_fp16", "workspace_bytes": REDUCE_BUCKET_BYTES, "live_parameters": LIVE_PARAMETERS,
      "scatters_messages": True, "frozen": "sharded"}),
    ({"framework": "nanotron", "zero_stage_or_fsdp": "0", "dtype": "bf16", "year": 2025},
     {"loss_kernel": "beside", "state_recipe": "copied_gradients", "joins_products": True,
      "network_slows_host": NETWORK_SLOWS_HOST}),
    ({"framework": "nanotron", "zero_stage_or_fsdp": "1", "dtype": "bf16", "year": 2025, "pp": 2},
     {"loss_kernel": "beside", "gathers_again": True, "state_recipe": "copied_gradients", "joins_products": True,
      "network_slows_host": NETWORK_SLOWS_HOST}),
]  # fmt: skip


@pytest.mark.parametrize(("cells", "expected"), CASES)
def test_what_a_framework_holds(tmp_path, cells, expected):
    gpus = 8
    row = {
        key: str(value) for key, value in (GPT | {"gpus": gpus, "tp": 1, "pp": 1} | cells).items()
    }
    row["dp"] = str(gpus // int(row["pp"]))
    runs, problems = read_runs(write(tmp_path, row))
    assert not problems
    found = fields_of(run_job(runs[0]))
    assert {name: value for name, value in found.items() if name not in STATED} == expected
    Software(matmul_dtype="fp8" if cells["dtype"] == "fp8" else None, **expected)


OSS = MOE | {
    "framework": "megatron-bridge",
    "year": "2026",
    "extra_opts": "experts=8;topk=2;moe_ffn=24;head_dim=64;sliding_window_alternate=8",
}


@pytest.mark.parametrize(
    ("gpu", "graphs"),
    [("GB300-NVL72", "but experts"), ("B300-SXM", "but experts"), ("GB200-NVL72", None), ("H100-80G-SXM", None)],
)  # fmt: skip
def test_recipes_for_experts_with_biases_take_the_plain_dispatcher(tmp_path, gpu, graphs):
    """Two of eight experts are on each of four ranks, with six operations each."""
    (run,), problems = read_runs(write(tmp_path, OSS | {"gpu": gpu}))
    assert not problems and run.shape.expert_bias and bias_operations(run) == 12
    found = fields_of(run_job(run))
    assert (found["expert_bias"], found.get("dispatch"), found.get("cuda_graphs")) == (
        True,
        None,
        graphs,
    )
    assert case_of(run).software.routing_operations == found["routing_operations"] + 12
    plain = replace(run, shape=replace(run.shape, expert_bias=False))
    dispatch = fields_of(run_job(plain)).get("dispatch")
    assert dispatch == ("once" if gpu.startswith("H100") else None)


PLAIN = Software(fused_kernels=True)
FURTHER = [  # bytes per (choices x hidden), in elements, and kernels: forward, then backward; 8 experts, gated, width = hidden / 4
    ({"sorts_by_expert": True}, (4.0, 2), (4.0, 2)),
    ({"sequential_experts": True}, (2.0, 1), (2.0, 1)),
    ({"expert_bias": True}, (6.0, 17), (8.0, 33)),
    ({"clamps_experts": True}, (2.0, 3), (2.5, 3)),
    ({"recomputes_activation": True}, (0.0, 0), (0.75, 1)),
    ({"recomputes_activation": True, "clamps_experts": True}, (2.0, 3), (2.5 + 2.75, 3 + 4)),
]


@pytest.mark.parametrize(("fields", "forward", "backward"), FURTHER)
def test_kernels_around_experts(fields, forward, backward):
    device = DEVICES["h100"]
    tokens, choices, hidden = 4096, 8192, 512
    sizes = (tokens, choices, hidden, 8, hidden // 2, hidden // 4)
    found, plain = (
        kernels_of(device, "bf16", of).experts(*sizes) for of in (replace(PLAIN, **fields), PLAIN)
    )
    for more_s, (moved, kernels) in (
        (found.forward_s - plain.forward_s, forward),
        (found.backward_s - plain.backward_s, backward),
    ):
        # each chain pays its first launch in `memory_time_s`
        expected = memory_time_s(2 * choices * hidden * moved, device) if kernels else 0.0
        chains = sum(name != "recomputes_activation" for name in fields) or 1
        launches = max(kernels - chains, 0) * device.launch_s
        assert more_s == pytest.approx(expected + launches, abs=1.1 * device.launch_s)
    assert found.forward_kernels - plain.forward_kernels == forward[1]
    assert found.backward_kernels - plain.backward_kernels == backward[1]
    one = (tokens, choices, hidden, 1, hidden // 2, hidden // 4)
    if {"sorts_by_expert", "sequential_experts"} & set(fields):
        alone, bare = (
            kernels_of(device, "bf16", of).experts(*one) for of in (replace(PLAIN, **fields), PLAIN)
        )
        assert alone == bare  # one expert has nothing to sort or join


def test_permutation_by_operations_moves_more():
    """Rows are put back, weighted and summed by kernels of their own, and so are their gradients."""
    device, sizes = DEVICES["h100"], (4096, 8192, 512, 8, 256, 128)
    apart, plain = (
        kernels_of(device, "bf16", replace(PLAIN, permutes_by_op=on)).experts(*sizes)
        for on in (True, False)
    )
    rows, result = 2 * 8192 * 512, 2 * 4096 * 512
    two_s, three_s, fused_s = (
        memory_time_s(size, device) for size in (2 * rows, 3 * rows, rows + result)
    )
    assert apart.forward_s - plain.forward_s == pytest.approx(2 * two_s)
    assert apart.backward_s - plain.backward_s == pytest.approx(2 * three_s - fused_s + two_s)
    assert apart.forward_kernels - plain.forward_kernels == 2


@pytest.mark.parametrize(
    ("cells", "sorts"),
    [
        ({}, True),
        ({"gpu": "H100-80G-SXM"}, None),  # DeepEP
        ({"gpu": "GB200-NVL72"}, None),  # HybridEP
        ({"gpu": "GB200-NVL72", "notes": "token drop"}, True),
        ({"framework": "nemo-automodel"}, None),
        ({"framework": "nemo", "year": "2023"}, None),
    ],
)
def test_all_to_all_sorts_by_expert(tmp_path, cells, sorts):
    row = MOE | {"framework": "megatron-bridge", "year": "2026", "gpu": "B200-180G-SXM"} | cells
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems and fields_of(run_job(run)).get("sorts_by_expert") == sorts


def test_notes_say_that_experts_run_one_by_one(tmp_path):
    row = MOE | {"framework": "nemo", "year": "2024", "notes": "grouped GEMM off, alltoall"}
    (run,), problems = read_runs(write(tmp_path, row))
    found = fields_of(run_job(run))
    assert not problems and found["sequential_experts"] and found["permutes_by_op"]


NANOTRON = {"framework": "nanotron", "model_family": "llama", "layers": "16", "hidden": "2048", "heads": "32", "kv_heads": "32",
            "ffn_hidden": "8192", "vocab": "131072", "seq": "4096", "gpu": "H100-80G-SXM", "tp": "1", "dtype": "bf16", "micro_batch": "1",
            "global_batch_seqs": "64", "zero_stage_or_fsdp": "1", "year": "2025", "extra_opts": "tied_embeddings"}  # fmt: skip


@pytest.mark.parametrize(("pp", "sizes"), [(2, "10-6"), (4, "5-5-5-1"), (8, "3-2-3-2-3-2-1-0")])
def test_nanotron_cuts_by_the_cost_of_products(tmp_path, pp, sizes):
    """The head costs as much as 4 of the 16 layers."""
    row = GPT | NANOTRON | {"gpus": "8", "pp": str(pp), "dp": str(8 // pp)}
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems and "-".join(map(str, stages_of_run(run))) == sizes


def test_nanotron_prints_what_torch_allocates(tmp_path):
    row = GPT | NANOTRON | {"gpus": "1", "pp": "1", "dp": "1", "mem_gib_per_gpu": "30"}
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems and run.measured.memory_scope == "reserved"
    prediction = RunPrediction(1.0, 32.0 * GIB, outside_bytes=2.0 * GIB)
    assert Scored(run, prediction).memory_error == 0.0


def test_a_layout_that_does_not_fit_gathers_again(tmp_path):
    """With tp=8 and no pipeline, the gathered inputs of one micro-batch take most of the memory."""
    row = (
        GPT
        | NANOTRON
        | {
            "gpus": "8",
            "pp": "1",
            "dp": "1",
            "tp": "8",
            "micro_batch": "128",
            "layers": "32",
            "global_batch_seqs": "128",
            "sp": "1",
        }
    )
    (run,), problems = read_runs(write(tmp_path, row))
    case = case_of(run)
    assert not problems and not case.software.gathers_again
    assert price_run(case).peak_memory_bytes > run.machine.memory_bytes
    again = price_run(replace(case, software=replace(case.software, gathers_again=True)))
    assert evaluate(run) == again and again.peak_memory_bytes < price_run(case).peak_memory_bytes


def test_nanotron_gathers_in_buffers_of_its_own(tmp_path):
    row = GPT | NANOTRON | {"gpus": "8", "pp": "1", "dp": "1", "tp": "8", "micro_batch": "2"}
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems
    assert case_of(run).software.workspace_bytes == 2 * 2 * (2 * 4096 * 2048)
    assert (
        case_of(replace(run, layout=replace(run.layout, tp=1, dp=8))).software.workspace_bytes == 0
    )


def test_nanotron_prints_the_memory_of_the_first_rank(tmp_path):
    row = GPT | NANOTRON | {"gpus": "8", "pp": "2", "dp": "4", "mem_gib_per_gpu": "30"}
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems and run.measured.memory_of_first_rank
    prediction = RunPrediction(
        1.0, 50.0 * GIB, outside_bytes=2.0 * GIB, first_rank_bytes=32.0 * GIB
    )
    assert Scored(run, prediction).memory_error == 0.0


def test_fsdp_of_nvidia_moves_activations_to_the_host(tmp_path):
    """As few layers as let it fit: half a layer over, so one goes; and at most all but two."""
    row = GPT | {"framework": "nemo", "zero_stage_or_fsdp": "fsdp(megatron)", "year": "2025", "tp": "1", "pp": "1", "dp": "16",
                 "dtype": "bf16", "extra_opts": "", "recompute": "none"}  # fmt: skip
    (run,), problems = read_runs(write(tmp_path, row))
    assert not problems and offloads_where_tight(run)
    capacity = run.machine.memory_bytes
    kept = 0.4 * capacity  # of 4 layers
    found = offloaded(run, RunPrediction(1.0, 1.05 * capacity, kept_bytes=kept))
    assert found.peak_memory_bytes == pytest.approx(0.95 * capacity)
    found = offloaded(run, RunPrediction(1.0, 2.0 * capacity, kept_bytes=kept))
    assert found.peak_memory_bytes == pytest.approx(1.8 * capacity)
    fits = RunPrediction(1.0, 0.5 * capacity, kept_bytes=kept)
    assert offloaded(run, fits) is fits
