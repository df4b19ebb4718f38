"""Names of models in other spellings: the model itself, or suggestions; never another size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.names import REPOSITORIES, model_named, model_note, near_models
from autopar.models.published import ALIASES, published_models

WRITTEN = {
    "Qwen/Qwen3-235B-A22B": "qwen3-235b-a22b",
    "Qwen/Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen3-Next-80B-A3B-Thinking": "qwen3-next-80b-a3b",
    "Qwen/Qwen2.5-7B-Instruct": "qwen2.5-7b",
    "qwen2_5_7b": "qwen2.5-7b",
    "Meta-Llama-3-8B": "llama3-8b",
    "meta-llama/Llama-3.1-70B-Instruct": "llama3-70b",
    "meta-llama/Meta-Llama-3.1-405B-Instruct-FP8": "llama3-405b",
    "meta-llama/Llama-2-7b-chat-hf": "llama2-7b",
    "LLaMA3_8B": "llama3-8b",
    "llama3:8b": "llama3-8b",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "llama4-scout",
    "mistralai/Mistral-7B-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.1": "mistral-7b",
    "mistralai/Mistral-7B-Instruct-v0.2": "mistral-7b-v0.2",
    "mistralai/Mistral-7B-v0.3": "mistral-7b-v0.3",
    "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3",
    "mistralai/Mixtral-8x7B-v0.1": "mixtral-8x7b",
    "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
    "mistralai/Mistral-Nemo-Base-2407": "mistral-nemo-12b",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3-0324": "deepseek-v3",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "allenai/OLMo-2-1124-7B": "olmo2-7b",
    "google/gemma-2-27b-it": "gemma2-27b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "google-bert/bert-base-uncased": "bert-base",
    "DiT-XL/2": "dit-xl-2",
    "resnet50": "resnet-50",
    "bigscience/bloom": "bloom-176b",
    "openai-community/gpt2": "gpt2-small",
}
REFUSED = {
    "deepseek-ai/DeepSeek-R1-Distill-Llama-70B": "deepseek-r1",
    "DeepSeek-R1-0528-Qwen3-8B": "deepseek-r1",
    "Qwen3": "qwen3-8b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "qwen3-06b": "qwen3-0.6b",
    "Qwen2-7B": "qwen2.5-7b",
    "llama3": "llama3-70b",
    "llama-7b": "llama2-7b",
    "llama-3.8b": "llama3-8b",
    "Mistral-7B-Instruct-v0.4": "mistral-7b",
    "Mistral-Small-Instruct-2409": "mistral-small-24b",
    "whisper-large-v2": "whisper-large-v3",
    "bloom-560m": "bloom-176b",
}
KNOWN = {name: name for name in published_models()} | ALIASES | REPOSITORIES


@pytest.mark.parametrize("text", WRITTEN)
def test_names_of_repositories_are_found(text):
    assert model_named(text) == WRITTEN[text]
    assert model_note(text).endswith(f"is taken as {WRITTEN[text]}")


@pytest.mark.parametrize("text", REFUSED)
def test_what_may_be_another_model_has_suggestions(text):
    assert model_named(text) is None and REFUSED[text] in near_models(text)
    assert all(model_named(name) for name in near_models(text))
    with pytest.raises(AutoparError, match="did you mean"):
        parse_model(text)


def test_other_names_are_of_models():
    assert set(REPOSITORIES.values()) <= set(published_models())
    assert not set(REPOSITORIES) & set(published_models())


def test_functions_and_files_are_not_names():
    with pytest.raises(AutoparError, match="Cannot import module 'gpt2'"):
        parse_model("gpt2:xl")
    with pytest.raises(AutoparError, match="is built in: qwen3-8b"):
        parse_model("hf:Qwen/Qwen3-8B")


@st.composite
def spellings(draw):
    """(name, a text with all of its letters and digits, in their order)."""
    name = draw(st.sampled_from(list(KNOWN)))
    parts = name.split("-")
    text = parts[0] + "".join(draw(st.sampled_from(["-", "_", " ", ""])) + p for p in parts[1:])
    if draw(st.booleans()):
        text = text.replace(".", draw(st.sampled_from("_-")))
    text = draw(st.sampled_from([str.lower, str.upper, str.title]))(text)
    before = draw(st.sampled_from(["", "some-org/", "Meta-"]))
    return name, before + text + draw(st.sampled_from(["", "-hf", "-Instruct", "_chat", "-v0.1"]))


@given(spellings())
def test_a_spelling_is_the_model_or_none(spelling):
    name, text = spelling
    assert model_named(text) in (None, KNOWN[name]), text
    assert all(model_named(other) for other in near_models(text))


@given(st.sampled_from(list(KNOWN)), st.sampled_from(["{}-hf", "org/{}", "ORG/{}-Instruct"]))
def test_an_organization_and_an_ending_change_nothing(name, form):
    assert model_named(form.format(name)) == KNOWN[name]
