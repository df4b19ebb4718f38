"""Named configurations against published sizes; parsing, shrinking, FLOPs."""

import pytest
import torch

from autopar.models import CONFIGS, parse_model
from autopar.models.base import shrunk_heads, shrunk_vocab

PUBLISHED = {
    "gpt2-small": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_parameter_counts_are_the_published_ones(name, count):
    assert parse_model(name).num_parameters() == count


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 174.6), ("gpt-1t", 1008.0)])
def test_megatron_models_match_table_1(name, billions):
    assert round(parse_model(name).num_parameters() / 1e9, 1) == billions


def test_llama_small_is_about_ten_million_bytes_model():
    spec = parse_model("llama-small")
    assert 8e6 < spec.num_parameters() < 12e6 and spec.vocab == 256


@pytest.mark.parametrize("name", ["gpt3-175b", "gpt-1t"])
def test_model_flops_equal_megatrons_formula_without_recompute(name):
    spec, config = parse_model(name), CONFIGS[name]
    h, layers, v, s = config.hidden, config.layers, config.vocab, 2048
    per_sequence = 72 * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
    assert spec.model_flops_per_token(s) == pytest.approx(per_sequence / s, rel=1e-12)


def test_model_flops_of_experts_count_the_top_k():
    config = CONFIGS["mixtral-8x7b"]
    h, f = config.hidden, config.ffn
    kv = h // config.heads * config.kv_heads
    weights = config.layers * (2 * h * h + 2 * h * kv + 8 * h + 2 * 3 * h * f) + config.vocab * h
    assert (
        parse_model("mixtral-8x7b").model_flops_per_token(4096) == 6 * weights + 12 * 32 * h * 4096
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_shrunken_models_train_on_cpu(name):
    spec = parse_model(name).shrunk()
    torch.manual_seed(0)
    model = spec.build("cpu", torch.float64)
    assert (
        spec.num_layers == 2
        and spec.vocab <= 512
        and spec.config.hidden <= 256
        and spec.config.heads <= 8
    )
    assert type(spec.config) is type(CONFIGS[name]) and spec.num_parameters() < 2e6
    loss = model(**spec.example_inputs(2, 16, "cpu"))
    loss.backward()
    assert loss.isfinite() and all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters()
    )


def test_shrunken_heads_keep_their_ratio_where_two_kv_heads_remain():
    assert shrunk_heads(32, 8) == (8, 2)
    assert shrunk_heads(32, 32) == (8, 8)
    assert shrunk_heads(64, 8) == (8, 2)  # ratio 8 would leave one kv head, which cannot be sharded
    assert shrunk_heads(71, 1) == (8, 1)
    assert shrunk_heads(10, 5) == (8, 4)
    assert shrunk_heads(36, 12) == (6, 2)
    assert shrunk_heads(4, 2) == (4, 2)


def test_shrunken_vocabulary_keeps_its_remainder():
    assert [shrunk_vocab(v) for v in (128256, 50257, 127, 512, 513)] == [512, 505, 127, 512, 505]


def test_dimensions_make_the_same_model_as_the_name():
    text = "gpt:layers=96,hidden=12288,heads=96,vocab=51200"
    assert parse_model(text).config == CONFIGS["gpt3-175b"]
    text = "llama:layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128_256, seq=8192"
    assert (
        parse_model(text).num_parameters() == PUBLISHED["llama3-8b"]
        and parse_model(text).max_seq == 8192
    )
    assert (
        parse_model("llama:layers=32,hidden=4096,heads=32,vocab=32000").num_parameters()
        == PUBLISHED["llama2-7b"]
    )
    text = "moe:layers=2,hidden=64,heads=4,kv_heads=2,vocab=100,ffn=96,experts=6,top_k=3"
    assert (parse_model(text).config.experts, parse_model(text).config.top_k) == (6, 3)
    plain, shared = parse_model(text), parse_model(f"{text},shared_ffn=40")
    assert shared.num_parameters() - plain.num_parameters() == 2 * 3 * 64 * 40
    assert shared.model_flops_per_token(16) - plain.model_flops_per_token(16) == 6 * 2 * 3 * 64 * 40
    assert shared.shrunk().config.shared_ffn == 40


def test_example_inputs_are_distinct_and_in_the_vocabulary():
    inputs = parse_model("llama-tiny").example_inputs(3, 9, "cpu")
    assert (
        inputs["input_ids"] is not inputs["labels"]
        and inputs["input_ids"].data_ptr() != inputs["labels"].data_ptr()
    )
    assert all(
        value.dtype == torch.int64 and value.shape == (3, 9) and value.max() < 128
        for value in inputs.values()
    )
    assert all(value.is_meta for value in parse_model("llama-tiny").example_inputs(3, 9).values())


def test_function_models(user_module):
    spec = parse_model(f"{user_module}:with_inputs")
    assert (
        spec.num_parameters() == 20
        and spec.build("cpu", torch.float64).weight.dtype == torch.float64
    )
    inputs = spec.example_inputs(6, 1, "cpu")["input"]
    assert inputs[:, 0].tolist() == [0.0, 3.0, 6.0, 9.0, 0.0, 3.0]
    assert spec.example_inputs(6, 1)["input"].is_meta and spec.shrunk() is spec
    # one row of three elements
    assert spec.model_flops_per_token(1) == pytest.approx(3 * 2 * 3 * 5 / 3)
