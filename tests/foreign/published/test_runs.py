"""Reading: what the columns say, what fills in for what they do not, and that every wrong row is named."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.errors import AutoparError
from autopar.foreign.published.defaults import DEFAULTS
from autopar.foreign.published.machines import (
    device_of,
    memory_bytes_of,
    nic_Bps_of,
    nvlink_domain_of,
)
from autopar.foreign.published.options import (
    layouts_out_of_memory,
    read_dtype,
    read_memory_kind,
    read_options,
    read_sharding,
)
from autopar.foreign.published.run import Run
from autopar.foreign.published.runs import REQUIRED_COLUMNS, out_of_memory_layouts, read_runs
from autopar.ir.model_shape import V3_LATENT


@pytest.fixture
def read(tmp_path):
    """The one run of a row, or the reason why there is none."""

    def one(row: dict, **changes: str) -> Run | str:
        runs, problems = read_runs(write(tmp_path, row | changes))
        assert len(runs) + len(problems) == 1
        return runs[0] if runs else problems[0].reason

    return one


def test_a_row_becomes_a_run(read):
    run = read(GPT)
    assert (run.id, run.source, run.global_batch, run.num_microbatches, run.complete) == (
        "gpt",
        "here",
        64,
        8,
        True,
    )
    assert (run.shape.layers, run.shape.head_dim, run.shape.positions, run.shape.tied) == (
        4,
        16,
        "learned",
        True,
    )
    assert (
        run.machine.gpus,
        run.machine.nvlink_domain,
        run.machine.nic_Bps,
        run.machine.memory_bytes,
    ) == (16, 8, 25e9, 80 * 2**30)
    by = run.layout
    assert (
        by.tp,
        by.pp,
        by.vpp,
        by.dp,
        by.zero,
        run.software.sharding,
        by.recompute,
        by.schedule,
    ) == (
        2,
        2,
        1,
        4,
        0,
        "none",
        "full",
        "1f1b",
    )
    assert (
        run.precision.matmul,
        run.precision.grads,
        run.software.flash,
        run.software.dropout,
    ) == ("fp16", "fp32", False, 0.1)
    assert (
        run.measured.step_time_s == 1.5
        and not run.measured.has_memory
        and not run.measured.out_of_memory
    )


def test_defaults_are_recorded_where_they_matter(read):
    assert {"vpp", "grads", "dropout", "schedule"} <= set(read(GPT).defaulted)
    assert not {"micro_batch", "dp", "kv_heads", "flash", "recipe", "recompute"} & set(
        read(GPT).defaulted
    )
    blank = read(
        GPT,
        micro_batch="",
        dp="",
        kv_heads="",
        ffn_hidden="",
        gpus_per_node="",
        nic_gbps_per_gpu="",
        year="",
        framework="",
    )
    assert {
        "micro_batch",
        "dp",
        "kv_heads",
        "ffn",
        "gpus_per_node",
        "nic_Bps",
        "year",
        "framework",
    } <= set(blank.defaulted)
    assert (
        blank.layout.dp,
        blank.layout.micro_batch,
        blank.shape.ffn,
        blank.machine.gpus_per_node,
    ) == (4, 1, 256, 8)


def test_every_default_is_documented_once():
    names = [default.field for default in DEFAULTS]
    assert len(set(names)) == len(names) and all(
        default.rule and default.reason for default in DEFAULTS
    )


def test_defaults_follow_framework_and_year(read):
    new = read(
        GPT,
        extra_opts="",
        year="2025",
        framework="megatron-core",
        zero_stage_or_fsdp="",
        recompute="",
        sp="",
        dtype="bf16",
        vpp="2",
        layers="4",
    )
    assert (
        new.layout.zero,
        new.software.sharding,
        new.layout.recompute,
        new.layout.sequence_parallel,
    ) == (
        1,
        "dist_optimizer",
        "none",
        True,
    )
    assert (
        new.software.flash,
        new.software.dropout,
        new.software.tp_overlap,
        new.software.pp_overlap,
    ) == (True, 0.0, True, True)
    assert new.layout.schedule == "interleaved_1f1b" and new.software.padded_vocab == 1024
    old = read(GPT, recompute="", zero_stage_or_fsdp="")
    assert (old.layout.recompute, old.layout.zero, old.software.flash) == ("full", 0, False)
    assert read(GPT, framework="deepspeed", zero_stage_or_fsdp="3").software.sharding == "zero"
    assert read(LLAMA, recompute="selective").layout.recompute == "op"
    assert read(GPT, recompute="selective").layout.recompute == "selective"


def test_stages_may_count_the_embedding_as_a_layer(read):
    assert read(GPT, layers="6", gpus="32", pp="4").software.embedding_as_layer
    assert not read(GPT, layers="8", gpus="32", pp="4").software.embedding_as_layer
    assert not read(GPT, layers="7", gpus="32", pp="4").software.embedding_as_layer


def test_tied_embeddings_by_family_or_by_size(read):
    assert read(GPT).shape.tied and not read(LLAMA).shape.tied
    untied = read(GPT, vocab="50000")
    size = untied.shape.parameters(untied.seq) + 50_000 * 64
    assert not read(GPT, vocab="50000", params_b=str(size / 1e9)).shape.tied
    assert read(GPT, vocab="50000", params_b=str(size / 1e9), extra_opts="tied_emb").shape.tied


def test_mixture_of_experts_and_latent_attention(read):
    dims = read(MOE).shape
    assert (
        dims.experts,
        dims.top_k,
        dims.moe_ffn,
        dims.shared_ffn,
        dims.first_dense,
        dims.ffn,
    ) == (8, 2, 24, 24, 1, 96)
    latent = read(MOE, kv_heads="4", extra_opts=MOE["extra_opts"] + ";mla;mtp=1").shape
    assert latent.latent == V3_LATENT and latent.head_dim == 192 and latent.mtp == 1
    assert "lacks experts and topk" in read(MOE, ep="1", extra_opts="")
    assert "ep=16 does not divide 8 experts" in read(MOE, ep="16")


def test_options(read):
    run = read(
        GPT,
        extra_opts="parallel_block;sliding_window_attn;tp/pp/dp_overlap;lamb;;quantum_leap;Alibi",
        notes="squared-ReLU",
    )
    assert (
        run.shape.parallel_block
        and run.shape.window == 8
        and run.shape.positions == "alibi"
        and run.shape.activation == "relu2"
    )
    assert (
        run.software.optimizer == "lamb"
        and run.software.tp_overlap
        and run.software.pp_overlap
        and run.software.dp_overlap
    )
    assert run.ignored == ("quantum_leap",) and "window" in run.defaulted
    stated, ignored = read_options(
        "sliding_window_alternate=128;precision=FP8-MX;schedule=Interleaved1F1B;head_dim=64;flash_attn(triton)"
    )
    assert stated == {
        "window": 128,
        "window_every": 2,
        "recipe": "mx",
        "schedule": "interleaved_1f1b",
        "head_dim": 64,
        "flash": True,
        "attention_kernel": "triton",
    }
    assert ignored == ()
    assert read_options("selective_AC=every-2-layers")[0] == {"selective": "every-2"}
    assert read_options("experts=many;precision=FP9;schedule=?")[1] == (
        "experts=many",
        "precision=FP9",
        "schedule=?",
    )
    assert read(LLAMA, extra_opts="selective_AC=op", recompute="selective").layout.recompute == "op"
    assert read(GPT, pp="1", dp="8", extra_opts="one_layer_fwd+bwd_only", layers="1").one_layer


@pytest.mark.parametrize(
    ("text", "zero", "sharding", "group"),
    [
        ("0", 0, "none", None),
        ("2", 2, None, None),
        ("3 (FSDP FULL_SHARD)", 3, "fsdp", None),
        ("fsdp2", 3, "fsdp", None),
        ("fsdp(megatron)", 3, "fsdp", None),
        ("hsdp", 3, "hsdp", None),
        ("hsdp(shard=8)", 3, "hsdp", 8),
        ("fsdp(hybrid, 4)", 3, "hsdp", None),
        ("2 (FSDP without reshard after fwd)", 2, "fsdp", None),
        ("1 (dist optimizer default)", 1, "dist_optimizer", None),
        ("hsdp(2x8)", 3, "hsdp", 8),
        ("hsdp(replicate=2, shard=4)", 3, "hsdp", 4),
        ("ddp", 0, "none", None),
        ("3.0", 3, None, None),
        ("zero-2", 2, None, None),
    ],
)
def test_sharding(text, zero, sharding, group):
    stated = read_sharding(text)
    assert (stated["zero"], stated.get("sharding"), stated.get("shard_group")) == (
        zero,
        sharding,
        group,
    )


@pytest.mark.parametrize(
    ("cells", "ignored"),
    [
        (
            {"zero_stage_or_fsdp": "1 (dist optimizer, 4 instances)"},
            "zero_stage_or_fsdp: instances",
        ),
        ({"zero_stage_or_fsdp": "fsdp2 (offloaded)"}, "zero_stage_or_fsdp: offloaded"),
        ({"recompute": "selective (mla_up_proj)"}, "recompute: mla_up_proj"),
        ({"dtype": "fp8 attention"}, "dtype: attention"),
        ({"extra_opts": "cpu_offloading_num_layers=8"}, "cpu_offloading_num_layers=8"),
        ({"extra_opts": "muon"}, "muon"),
    ],
)
def test_what_a_column_says_besides_is_listed(read, cells, ignored):
    run = read(LLAMA, **cells)
    assert run.ignored == (ignored,) and not run.complete
    assert not read(LLAMA, zero_stage_or_fsdp="1 (dist optimizer, NeMo default; memory)").ignored


def test_sharding_within_a_node(read):
    assert read(LLAMA, zero_stage_or_fsdp="hsdp").layout.shard_on(16) == 8
    assert read(LLAMA, zero_stage_or_fsdp="hsdp(shard=4)").layout.shard_on(16) == 4
    assert "does not divide dp x cp = 16" in read(LLAMA, zero_stage_or_fsdp="hsdp(shard=5)")


def test_memory_units_and_kinds(read):
    reserved = read(GPT, mem_gib_per_gpu="10", mem_kind="peak reserved (torchtitan log)").measured
    assert (reserved.memory_bytes, reserved.memory_scope, reserved.has_memory) == (
        10 * 2**30,
        "reserved",
        True,
    )
    device = read(GPT, mem_gib_per_gpu="10", mem_kind="GB nvidia-smi, whole device").measured
    assert (device.memory_bytes, device.memory_scope) == (10e9, "device")
    assert not read(
        GPT, mem_gib_per_gpu="10", mem_kind="params+opt+act, DIGITISED, analytic not measured"
    ).measured.has_memory
    assert read_memory_kind("GiB allocated") == ("allocated", 2.0**30)


def test_time_from_throughput(read):
    run = read(GPT, step_time_s="", tokens_per_s_per_gpu="64")
    assert run.measured.step_time_s == pytest.approx(64 * 32 / (64 * 16))


def test_layouts_out_of_memory_in_notes(tmp_path):
    notes = (
        "noisy; OOM also published here for TP4 PP2 DP2 mb1/mb2, TP1 PP1 DP16 mb1, TP9 PP9 DP9 mb1"
    )
    assert layouts_out_of_memory(notes) == [(4, 2, 2, 1), (4, 2, 2, 2), (1, 1, 16, 1), (9, 9, 9, 1)]
    assert layouts_out_of_memory("TP4 PP2 DP2 mb1 ran") == []
    runs, _ = read_runs(
        write(tmp_path, GPT | {"notes": notes}, GPT | {"id": "again", "notes": notes})
    )
    found = out_of_memory_layouts(runs)
    layouts = [(by.tp, by.pp, by.dp, by.micro_batch) for by in (run.layout for run in found)]
    assert layouts == [(4, 2, 2, 1), (4, 2, 2, 2), (1, 1, 16, 1)]
    assert all(run.measured.out_of_memory and run.measured.step_time_s is None for run in found)
    assert not any(run.measured.out_of_memory for run in runs)
    runs, _ = read_runs(write(tmp_path, GPT | {"step_time_s": "", "notes": "OOM"}))
    assert runs[0].measured.out_of_memory


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layers": "four"}, "layers='four' is not a number"),
        ({"layers": "4.5"}, "layers='4.5' must be a whole number"),
        ({"hidden": "-64"}, "must be a finite number > 0"),
        ({"step_time_s": "nan"}, "step_time_s='nan' must be a finite number > 0"),
        ({"heads": "5", "kv_heads": "5"}, "heads=5 does not divide hidden=64"),
        ({"kv_heads": "3"}, "kv_heads=3 does not divide heads=4"),
        ({"dp": "8"}, "tp=2 x pp=2 x cp=1 x dp=8 = 32 ranks, but there are 16 GPUs"),
        ({"dp": "", "gpus": "18"}, "= 4 ranks, but there are 18 GPUs"),
        ({"global_batch_seqs": "65"}, "global batch 65 is no multiple of dp=4 x micro_batch=2 = 8"),
        ({"tp": "8", "dp": "1", "heads": "4"}, "tp=8 does not divide 4 attention heads"),
        (
            {"tp": "", "global_batch_seqs": ""},
            "unpublished, without a default: tp, global_batch_seqs",
        ),
        ({"model_family": "mamba"}, "model_family='mamba' is not known"),
        ({"dtype": "int3"}, "dtype='int3' is not known"),
        ({"recompute": "sometimes"}, "recompute='sometimes' is not known"),
        ({"zero_stage_or_fsdp": "7"}, "zero_stage_or_fsdp='7' is not known"),
        ({"sp": "maybe"}, "sp='maybe' is neither 0 nor 1"),
        ({"pp": "1", "dp": "8", "vpp": "2"}, "vpp=2 without a pipeline"),
        ({"pp": "8", "tp": "1", "dp": "2", "vpp": "3"}, "more stages than 4 layers"),
    ],
)
def test_wrong_rows_are_named(read, changes, reason):
    assert reason in read(GPT, **changes)


def test_files_that_are_none(tmp_path):
    with pytest.raises(AutoparError, match="does not exist"):
        read_runs(tmp_path / "missing.csv")
    with pytest.raises(AutoparError, match="cannot read"):
        read_runs(tmp_path)
    path = tmp_path / "runs.csv"
    for content, message in [
        (b"", "it is empty"),
        (b"a,b\n1,2\n", "lacks the columns id, model_family"),
        (b"\x00\x01id,\x00", "NUL bytes"),
        (b"\xff\xfe\x80", "cannot read"),
        (b'id,"tp\n1,2', "not a CSV"),
    ]:
        path.write_bytes(content)
        with pytest.raises(AutoparError, match=message):
            read_runs(path)


def test_rows_that_repeat_or_overflow(tmp_path):
    path = write(tmp_path, GPT, GPT, LLAMA | {"config_complete": "0"})
    path.write_text(path.read_text() + ",".join(["x"] * (len(GPT) + 2)) + "\n\n")
    runs, problems = read_runs(path)
    assert [run.id for run in runs] == ["gpt", "llama"] and not runs[1].complete
    assert "given twice" in problems[0].reason and "2 more cells" in problems[1].reason


def test_unknown_columns_and_missing_optional_columns(tmp_path):
    required = {key: GPT[key] for key in REQUIRED_COLUMNS}
    runs, problems = read_runs(write(tmp_path, required | {"weather": "rain"}))
    assert not problems and runs[0].layout.dp == 4 and runs[0].complete


@pytest.mark.parametrize(
    ("text", "device", "gbps"),
    [
        ("RTX 4090 24GB", "rtx4090", 10),
        ("NVIDIA GeForce RTX 3090", "rtx3090", 10),
        ("L40S", "l40s", 10),
        ("Tesla V100-SXM2-32GB", "v100-32g", 100),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80g", 200),
        ("AMD Instinct MI300X", "mi300x", 400),
    ],
)
def test_gpus_are_found_by_names_of_their_makers(text, device, gbps):
    """A single card has Ethernet, unless its model is known to have more."""
    assert device_of(text) == device and nic_Bps_of(text) == pytest.approx(gbps * 1e9 / 8)


def test_names_of_gpus():
    assert (
        memory_bytes_of("H100-80G-SXM") == 81559 * 2**20
        and memory_bytes_of("A100-40G-SXM") == 40960 * 2**20
    )
    assert (
        memory_bytes_of("GB200-NVL72") == 189471 * 2**20
        and memory_bytes_of("NVIDIA H200") == 143771 * 2**20
    )
    assert (
        memory_bytes_of("MI300X-192GB") == int(192 * 2**30 * 0.99)
        and memory_bytes_of("abacus") is None
    )
    assert nvlink_domain_of("GB300-NVL72", 4) == 72 and nvlink_domain_of("H100", 8) == 8


@given(
    st.dictionaries(
        st.sampled_from(sorted(GPT)), st.text(max_size=12) | st.integers(-3, 300).map(str)
    )
)
def test_no_cell_is_a_traceback(tmp_path_factory, changes):
    try:
        runs, problems = read_runs(write(tmp_path_factory.mktemp("cells"), MOE | changes))
    except AutoparError:
        return  # the file as a whole, such as a NUL byte
    assert len(runs) + len(problems) <= 1


@given(st.text(max_size=30))
def test_no_option_is_a_traceback(text):
    read_options(text)
    for reader in (read_sharding, read_dtype):
        with contextlib.suppress(AutoparError):
            reader(text)
    (
        read_memory_kind(text),
        layouts_out_of_memory(text),
        memory_bytes_of(text),
        nvlink_domain_of(text, 8),
    )
