"""Hugging Face models: build, capture without masks, same numbers as before preparation, shrink."""

import json
import subprocess
import sys

import pytest
import torch
from support.effort import every, slow_but
from torch.export import Dim, export

from autopar.api import trace
from autopar.errors import AutoparError
from autopar.models import hf_example_inputs, parse_model, prepare_hf
from autopar.models.hf import IMAGE_SIZE, HFSpec

transformers = pytest.importorskip("transformers")

SDPA = torch.ops.aten.scaled_dot_product_attention.default
LLAMA = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 127,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 6}
# As published, so that shrinking has something to do; `layer_types` and friends come from the config classes.
FAMILIES = {
    "llama": {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
              "vocab_size": 128256, "bos_token_id": 128000, "eos_token_id": [128001, 128008], "torch_dtype": "bfloat16",
              "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                      "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "gpt2": {"model_type": "gpt2"},
    "mistral": {"model_type": "mistral"},
    "mixtral": {"model_type": "mixtral"},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "qwen3_moe": {"model_type": "qwen3_moe"},
    "qwen2_moe": {"model_type": "qwen2_moe"},
    "deepseek_v3": {"model_type": "deepseek_v3"},
    "gpt_oss": {"model_type": "gpt_oss"},
    "gemma2": {"model_type": "gemma2"},
    "opt": {"model_type": "opt"},
    "gpt_neo": {"model_type": "gpt_neo"},
    "gpt_neox": {"model_type": "gpt_neox"},
    "gptj": {"model_type": "gptj"},
    "bloom": {"model_type": "bloom", "n_layer": 30, "hidden_size": 4096, "n_head": 32},
    "falcon": {"model_type": "falcon"},
    "phi": {"model_type": "phi"},
    "phi3": {"model_type": "phi3"},
    "t5": {"model_type": "t5", "decoder_start_token_id": 0},
    "bart": {"model_type": "bart"},
    "bert": {"model_type": "bert"},
    "roberta": {"model_type": "roberta"},
    "doge": {"model_type": "doge"},
}  # fmt: skip

COMPARED = ("qwen3_moe", "bart")
"""Experts, and an encoder; the rest are slow."""


def capture(model, inputs):
    return export(
        model, (), inputs, dynamic_shapes={name: {0: Dim.DYNAMIC} for name in inputs}, strict=False
    )


def stray_masks(graph, seq):
    return [n for n in graph.nodes if hasattr(n.meta.get("val"), "shape") and n.meta["val"].dtype == torch.bool and n.meta["val"].dim() >= 2
            and tuple(n.meta["val"].shape[-2:]) == (seq, seq)]  # fmt: skip


@pytest.mark.parametrize(
    "config", every(3, [MISTRAL, GPT2, LLAMA]), ids=["mistral", "gpt2", "llama"]
)
def test_exports_on_meta_without_masks(config):
    spec = HFSpec.from_dict("test", config)
    program = capture(spec.build("meta"), spec.example_inputs(3, 16))
    attention = [n for n in program.graph.nodes if n.target == SDPA]
    assert len(attention) == 2
    assert all(len(n.args) < 4 or n.args[3] is None for n in attention) and all(
        n.args[5] for n in attention
    )
    assert not stray_masks(program.graph, 16)
    assert isinstance(
        next(n for n in program.graph.nodes if n.name == "input_ids").meta["val"].shape[0],
        torch.SymInt,
    )


def test_a_window_shorter_than_the_sequence_keeps_its_mask():
    model = HFSpec.from_dict("test", WINDOW).build("cpu", torch.float64)
    program = capture(model, hf_example_inputs(model, 3, 16, "cpu"))
    attention = [n for n in program.graph.nodes if n.target == SDPA]
    assert all(n.args[3] is not None for n in attention)
    other = hf_example_inputs(model, 5, 16, "cpu")
    torch.testing.assert_close(program.module()(**other).loss, model(**other).loss)


@pytest.mark.parametrize(
    "config", [LLAMA, {**GPT2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}, WINDOW]
)
def test_preparing_changes_no_number(config):
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(**config)
    plain = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager"
    ).double()
    prepared = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config)
    ).double()
    prepared.load_state_dict(plain.state_dict())
    assert prepare_hf(prepared) is prepared and prepared.config.use_cache is False
    inputs = hf_example_inputs(prepared, 3, 16, "cpu")
    torch.testing.assert_close(
        prepared(**inputs).logits, plain(**inputs).logits, rtol=1e-6, atol=1e-7
    )
    padded = {**inputs, "attention_mask": torch.ones(3, 16, dtype=torch.int64)}
    padded["attention_mask"][1, 13:] = (
        0  # no row is masked as a whole by padding and window: transformers' eager attention is nan there
    )
    torch.testing.assert_close(
        prepared(**padded).logits[1, :13], plain(**padded).logits[1, :13], rtol=1e-6, atol=1e-7
    )


def test_packed_positions_of_each_sample_are_honoured():
    torch.manual_seed(0)
    model = HFSpec.from_dict("test", LLAMA).build("cpu", torch.float64)
    inputs = hf_example_inputs(model, 2, 16, "cpu")
    inputs["position_ids"] = torch.tensor([[*range(16)], [*range(9), *range(7)]])
    program = capture(model, inputs)
    alone = model(input_ids=inputs["input_ids"][1:, 9:]).logits
    torch.testing.assert_close(
        program.module()(**inputs).logits[1:, 9:], alone, rtol=1e-5, atol=1e-6
    )


def test_packed_positions_are_refused_where_eager_ignores_them():
    settings = transformers.AutoConfig.for_model(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(settings)
    inputs = hf_example_inputs(model, 2, 16, "cpu")
    packed = inputs | {"position_ids": torch.tensor([[*range(16)], [*range(9), *range(7)]])}
    with pytest.raises(AutoparError, match=r"Set model\.config\.use_cache = False"):
        trace(model, packed)
    trace(model, packed | {"attention_mask": torch.ones(2, 16, dtype=torch.int64)})
    model.config.use_cache = False
    trace(model, packed)


@pytest.mark.slow
def test_rows_of_positions_that_a_model_makes_itself_are_no_packing():
    config = transformers.WhisperConfig(
        **{"vocab_size": 20, "d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
           "decoder_attention_heads": 2, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_mel_bins": 4, "max_source_positions": 8,
           "max_target_positions": 8, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    labels = torch.arange(12).view(2, 6)
    traced = trace(model, {"input_features": torch.randn(2, 4, 16), "labels": labels})
    names = [str(node.target) for block in traced.classes for node in block.graph.nodes]
    assert not any("cumsum" in name for name in names)


def test_a_users_choice_of_attention_is_kept():
    settings = transformers.AutoConfig.for_model(**LLAMA)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")
    assert prepare_hf(model).config._attn_implementation == "eager"


@pytest.mark.parametrize("family", slow_but(["t5"], FAMILIES))
def test_shrunken_families_train_on_cpu_and_export(family, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES[family]))
    spec = parse_model(f"hf:{tmp_path}")
    assert spec.vocab > 512 and spec.num_layers > 2
    small = spec.shrunk()
    assert small.vocab <= 512 and small.num_layers == 2 and small.num_parameters() < 5e6
    torch.manual_seed(0)
    model = small.build("cpu")
    inputs = small.example_inputs(2, 16, "cpu")
    first, second = model(**inputs).loss, model(**inputs).loss
    assert first == second and first.isfinite()  # dropout is off in training mode
    first.backward()
    assert not [m for m in model.modules() if isinstance(m, torch.nn.Dropout) and m.p]
    assert all(node.is_meta for node in small.build("meta").parameters()) and capture(
        small.build("meta"), small.example_inputs(2, 16)
    )


@pytest.mark.parametrize("family", slow_but(COMPARED, FAMILIES))
def test_captured_families_compute_what_the_unprepared_model_does(family):
    small = HFSpec.from_dict("test", FAMILIES[family]).shrunk()
    torch.manual_seed(0)
    prepared = small.build("cpu")
    with torch.no_grad():
        for parameter in prepared.parameters():
            parameter.mul_(3)  # attention far from uniform
    plain = type(prepared)(type(prepared.config).from_dict(small.config_dict))
    assert plain.config._attn_implementation in ("sdpa", "eager")
    plain.load_state_dict(prepared.state_dict())
    program = capture(prepared, small.example_inputs(2, 24, "cpu"))
    inputs = small.example_inputs(3, 24, "cpu")
    inputs["labels"][1, 9:] = -100
    got, expected = program.module(check_guards=False)(**inputs), plain.train()(**inputs)
    torch.testing.assert_close(got.loss, expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-3, atol=1e-4)


def test_parameters_and_flops_agree_with_our_llama():
    ours, theirs = (
        parse_model("llama3-8b"),
        HFSpec.from_dict("test", {**FAMILIES["llama"], "num_hidden_layers": 32}),
    )
    assert theirs.num_parameters() == ours.num_parameters() == 8_030_261_248
    assert theirs.model_flops_per_token(8192) == ours.model_flops_per_token(8192)
    mixtral = HFSpec.from_dict("test", {"model_type": "mixtral"})
    assert mixtral.num_parameters() == 46_702_792_704
    assert mixtral.model_flops_per_token(4096) == parse_model("mixtral-8x7b").model_flops_per_token(
        4096
    )


def test_example_inputs_of_other_models():
    bert = transformers.AutoConfig.for_model(
        "bert", hidden_size=32, num_attention_heads=2, intermediate_size=32, num_hidden_layers=1
    )
    inputs = hf_example_inputs(
        transformers.AutoModelForSequenceClassification.from_config(bert), 3, 8
    )
    assert inputs["input_ids"].shape == (3, 8) and inputs["labels"].shape == (3,)
    vit = transformers.AutoConfig.for_model(
        "vit", hidden_size=32, num_attention_heads=2, intermediate_size=32, num_hidden_layers=1
    )
    inputs = hf_example_inputs(
        transformers.AutoModelForImageClassification.from_config(vit), 3, 8, "cpu"
    )
    assert inputs["pixel_values"].shape == (3, 3, 224, 224) and inputs["labels"].max() < 2
    with pytest.raises(AutoparError, match="Cannot make example inputs for BertModel"):
        hf_example_inputs(transformers.AutoModel.from_config(bert), 3, 8)


def test_transformers_is_imported_only_for_hugging_face_models():
    code = "import sys; from autopar.models import parse_model; parse_model('llama3-8b').build(); assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


FURTHER = {
    "bloom": {"model_type": "bloom"},
    "deepseek_v3": {"model_type": "deepseek_v3"},
    "mamba2": {"model_type": "mamba2"},
    "xlnet": {"model_type": "xlnet"},
}


@pytest.mark.parametrize("family", slow_but(["bloom"], FURTHER))
def test_further_families_shrink_and_trace(family):
    from autopar.api import trace

    spec = HFSpec.from_dict(family, FURTHER[family]).shrunk()
    assert len(trace(spec.build("meta"), spec.example_inputs(2, 16)).segments) == 4


def test_a_model_without_a_limit_of_positions_has_no_longest_sequence():
    """transformers says -1 for it."""
    assert HFSpec.from_dict("xlnet", {"model_type": "xlnet"}).max_seq == 0


@pytest.mark.parametrize("kind", ["gemma4_text", "rwkv", "moss_transcribe_diarize"])
def test_no_part_of_a_model_stays_large(kind):
    """A second vocabulary, layers without heads, and a tower for sound."""
    model = HFSpec.from_dict(kind, {"model_type": kind}).shrunk().build("meta")
    assert sum(parameter.numel() for parameter in model.parameters()) < 5e7


def test_image_classifiers_are_built_from_a_config():
    config = {"model_type": "vit", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
              "image_size": 8, "patch_size": 4, "num_labels": 5}  # fmt: skip
    spec = HFSpec.from_dict("vit", config)
    inputs = spec.example_inputs(3, 1, "cpu")
    assert {name: tuple(tensor.shape) for name, tensor in inputs.items()} == {
        "pixel_values": (3, 3, 8, 8),
        "labels": (3,),
    }
    model = spec.build("cpu")
    assert type(model).__name__ == "ViTForImageClassification" and model(**inputs).logits.shape == (
        3,
        5,
    )


def test_images_without_a_size_are_those_of_imagenet():
    spec = parse_model("resnet-50")
    pixels = spec.example_inputs(2, 1)["pixel_values"]
    assert pixels.shape == (2, 3, IMAGE_SIZE, IMAGE_SIZE)


def test_blooms_gelu_has_the_gradient_of_its_own_backward():
    """Its backward is written down with constants of ten digits; autograd's is compared with it."""
    from transformers.models.bloom.modeling_bloom import BloomGelu, GeLUFunction

    config = {"model_type": "bloom", "hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 50}
    prepared = next(
        m
        for m in HFSpec.from_dict("bloom", config).build("cpu").modules()
        if isinstance(m, BloomGelu)
    )
    x = torch.linspace(-4, 4, 101, dtype=torch.float64, requires_grad=True)
    gradients = [
        torch.autograd.grad(function(x).sum(), x)[0] for function in (prepared, GeLUFunction.apply)
    ]
    assert torch.equal(prepared(x), GeLUFunction.apply(x))
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "name", ["bamba", "gemma3n_text", "gemma4_text", "laguna", "zamba", "marian", "glm_moe_dsa"]
)
def test_what_configurations_say_of_each_layer_shrinks_with_them(name):
    """Lists and dicts by layer, heads of Mamba, a second vocabulary, and masks that an indexer reads."""
    small = HFSpec.from_dict(name, {"model_type": name}).shrunk()
    loss = small.build("cpu")(**small.example_inputs(2, 16, "cpu")).loss
    assert small.num_layers == 2 and loss.isfinite()
