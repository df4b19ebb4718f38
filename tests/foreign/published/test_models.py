"""The models of runs have the shapes of the published ones: parameter counts, against print and against the modules themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.published_rows import GPT, LLAMA, MOE, write

from autopar.foreign.published.evaluate import model_of, spec_of_run
from autopar.foreign.published.runs import read_runs
from autopar.models.moe import MoE
from autopar.models.shapes import config_of_shape

OPTIONS = [
    (GPT, ""),
    (GPT, "alibi"),
    (GPT, "parallel_block"),
    (GPT, "untied_emb"),
    (GPT, "alibi;no_flash_attn"),
    (LLAMA, ""),
    (LLAMA, "head_dim=24"),
    (LLAMA, "squared_relu"),
    (LLAMA, "tied_embeddings;sliding_window=7"),
    (MOE, ""),
    (MOE, "mla"),
    (MOE, "head_dim=24;sliding_window_alternate=9"),
]

# Printed parameter counts in 1e9 and where: the papers' tables or the model cards.
PUBLISHED = [
    (
        "gpt",
        96,
        12288,
        96,
        96,
        "",
        51200,
        2048,
        "",
        174.6,
    ),  # Narayanan et al. 2021 (arXiv:2104.04473), table 2
    ("gpt", 128, 25600, 160, 160, "", 51200, 2048, "", 1008.0),
    (
        "gpt",
        32,
        4096,
        32,
        32,
        "",
        50368,
        2048,
        "tied_embeddings",
        6.6589,
    ),  # llm-foundry's benchmarks
    (
        "gpt",
        70,
        14336,
        112,
        112,
        "",
        250880,
        2048,
        "alibi;tied_emb",
        176.2,
    ),  # BLOOM (arXiv:2211.05100)
    ("llama", 126, 16384, 128, 8, 53248, 128256, 8192, "", 405.85),
    (
        "moe",
        61,
        7168,
        128,
        128,
        18432,
        129280,
        4096,
        "mla;experts=256;topk=8;moe_ffn=2048;shared_experts=1;first_dense=3;mtp=1",
        671.0,
    ),
    (
        "moe",
        94,
        4096,
        64,
        4,
        12288,
        151936,
        4096,
        "experts=128;topk=8;moe_ffn=1536;head_dim=128",
        235.0,
    ),
    (
        "moe",
        36,
        2880,
        64,
        8,
        2880,
        201088,
        4096,
        "experts=128;topk=4;moe_ffn=2880;head_dim=64;sliding_window_alternate=128",
        116.8,
    ),
]


def one(tmp_path, row):
    runs, problems = read_runs(write(tmp_path, row))
    assert not problems, problems
    return runs[0]


@pytest.mark.parametrize(("row", "options"), OPTIONS)
def test_the_count_of_parameters_is_the_modules(tmp_path, row, options):
    changes = {"extra_opts": ";".join(filter(None, (row["extra_opts"], options)))} | (
        {"kv_heads": "4"} if options == "mla" else {}
    )
    run = one(tmp_path, row | changes)
    spec = spec_of_run(run)
    assert (
        replace(run.shape, vocab=run.software.padded_vocab).parameters(run.seq)
        == spec.num_parameters()
    )
    model = model_of(run)
    assert model.training and all(parameter.is_meta for parameter in model.parameters())
    assert model(**spec.example_inputs(2, run.seq)).shape == ()


@pytest.mark.parametrize(
    (
        "family",
        "layers",
        "hidden",
        "heads",
        "kv_heads",
        "ffn",
        "vocab",
        "seq",
        "options",
        "billions",
    ),
    PUBLISHED,
)
def test_published_sizes(
    tmp_path, family, layers, hidden, heads, kv_heads, ffn, vocab, seq, options, billions
):
    row = LLAMA | {
        "model_family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden": ffn,
    }
    run = one(
        tmp_path, row | {"vocab": vocab, "seq": seq, "extra_opts": options, "params_b": billions}
    )
    assert run.shape.parameters(run.seq) == pytest.approx(billions * 1e9, rel=0.01)


def test_depth_can_be_cut_and_a_routed_layer_remains(tmp_path):
    run = one(tmp_path, MOE | {"extra_opts": "experts=8;topk=2;moe_ffn=24;first_dense=3"})
    short = model_of(run, layers=2)
    assert isinstance(short, MoE) and [layer.dense for layer in short.layers] == [True, False]
    assert [layer.dense for layer in model_of(run, layers=1).layers] == [False]


def test_written_out_attention_drops_probabilities(tmp_path):
    old = model_of(one(tmp_path, GPT))
    assert not old.config.fused_attention and old.config.dropout == 0.1
    new = model_of(one(tmp_path, GPT | {"extra_opts": "flash_attn", "year": "2024"}))
    assert new.config.fused_attention and new.config.dropout == 0.0


def test_small_models_train(tmp_path):
    for row, options in OPTIONS:
        changes = {"extra_opts": ";".join(filter(None, (row["extra_opts"], options)))} | (
            {"kv_heads": "4"} if options == "mla" else {}
        )
        run = one(tmp_path, row | changes)
        torch.manual_seed(0)
        spec = spec_of_run(run, layers=2)
        model = spec.build("cpu")
        loss = model(**spec.example_inputs(2, 16, "cpu"))
        loss.backward()
        assert loss.isfinite() and all(
            p.grad is not None and p.grad.isfinite().all() for p in model.parameters()
        ), options


def test_gpt_windows_do_not_alternate(tmp_path):
    dims = replace(one(tmp_path, GPT).shape, window=4, window_every=2)
    with pytest.raises(Exception, match="same window in every layer"):
        config_of_shape(dims, 64)
