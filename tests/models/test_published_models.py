"""Named models: parameters against published counts, sources, and what they build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from autopar.models import parse_model
from autopar.models.diffusion import DiffusionSpec, DiTConfig, FluxConfig
from autopar.models.hf import HFSpec
from autopar.models.published import ALIASES, PublishedModel, published_models
from autopar.text.units import count

MODELS = {name: model for name, model in published_models().items() if model.parameters}


def numel(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def parameters_of(model: PublishedModel) -> int:
    """The number of parameters of the whole model, counted as the publication does: those of a
    shallow one, and of the period before its last layer for every period that it lacks.
    """
    spec = parse_model(model.name)
    shallow = spec.shallow()
    built = shallow.build("meta")
    total = numel(built)
    if shallow.num_layers < spec.num_layers:
        layers = built.get_submodule(spec.layers_path)
        period = sum(map(numel, layers[-1 - spec.period : -1]))
        total += period * (spec.num_layers - shallow.num_layers) // spec.period
    if model.without_embeddings:
        total -= numel(built.embed) + numel(built.head)
    return total


@pytest.mark.parametrize("name", ["llama3.2-1b", "gemma2-2b", "moonlight-16b-a3b", "dit-b-2"])
def test_counts_from_a_period_are_those_of_the_whole_model(name):
    model = replace(MODELS[name], without_embeddings=False)
    assert parameters_of(model) == parse_model(name).num_parameters()


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_within_half_a_percent_of_the_published_count(name):
    model = MODELS[name]
    found = parameters_of(model)
    assert abs(found / model.parameters - 1) <= 0.005, (
        f"{count(found)} of {count(model.parameters)}"
    )
    assert model.source and model.layers


def test_there_are_models_of_every_family_that_people_name():
    assert len(MODELS) >= 100
    families = ("llama2", "llama3", "llama4", "qwen2.5", "qwen3", "qwen3.5", "deepseek-v2", "deepseek-v3", "gpt-oss", "gemma2", "gemma3",
                "mistral", "mixtral", "phi", "olmo", "granite", "nemotron", "glm", "kimi", "vit", "dit", "flux", "whisper",
                "bert")  # fmt: skip
    assert not [
        family for family in families if not any(name.startswith(family) for name in MODELS)
    ]


def test_aliases_name_the_same_model():
    assert parse_model("llama3.1-8b") == parse_model("llama3-8b") == parse_model("Llama3-8B")
    assert not ALIASES.keys() & published_models().keys()
    assert set(ALIASES.values()) <= published_models().keys()


def test_a_named_model_of_transformers_has_the_sequence_of_its_pre_training():
    spec = parse_model("qwen3-8b")
    assert (spec.max_seq, spec.num_layers, spec.name) == (4096, 36, "qwen3-8b")
    assert spec.config_dict["hidden_size"] == 4096


@pytest.mark.parametrize("config", [DiTConfig(96, 2, 4, size=8), FluxConfig().shrunk()])
def test_diffusion_transformers_train_on_cpu(config):
    torch.manual_seed(0)
    spec = DiffusionSpec.of("test", config)
    model = spec.build("cpu", torch.float64)
    inputs = {
        name: value.double() if value.is_floating_point() else value
        for name, value in spec.example_inputs(3, 1, "cpu").items()
    }
    loss = model(**inputs)
    loss.backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert loss.isfinite() and all(
        p.grad is not None and p.grad.abs().sum() > 0 for p in trained.values()
    )
    assert all(value.is_meta for value in spec.example_inputs(2, 1).values())


def test_a_target_is_read_in_the_order_of_the_patches():
    """A DiT whose output is the target itself has no loss: patches of both are in one order."""
    spec = DiffusionSpec.of("test", DiTConfig(96, 1, 4, size=8))
    model = spec.build("cpu", torch.float64)
    noise = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    patches = nn.functional.unfold(noise, 2, stride=2).transpose(1, 2)  # (b, s, c * p * p)
    patches = patches.view(2, 16, 4, 4).transpose(2, 3).reshape(2, 16, 16)  # channels last
    model.out.forward = lambda x: torch.cat((patches, torch.zeros_like(patches)), dim=2)
    inputs = spec.example_inputs(2, 1, "cpu")
    loss = model(inputs["latents"].double(), inputs["times"].double(), inputs["classes"], noise)
    assert loss.item() == 0.0


def test_models_of_speech_read_spectra():
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "max_source_positions": 16, "vocab_size": 99,
             "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}  # fmt: skip
    spec = HFSpec.from_dict("speech", {"model_type": "whisper", **sizes})
    inputs = spec.example_inputs(2, 12, "cpu")
    assert inputs["input_features"].shape == (2, 8, 32) and inputs["labels"].shape == (2, 12)
    loss = spec.build("cpu")(**inputs).loss
    loss.backward()
    assert loss.isfinite()
