"""Every mistake in a MODEL argument is an AutoparError that says what is wrong and what works."""

import builtins
import json
import re

import pytest

from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.models.moe import MoEConfig

BASE = "layers=2,hidden=64,heads=4,vocab=128"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("llama3-8B", ["Unknown model 'llama3-8B'", "did you mean llama3-8b"]),
        ("nothing-like-it-at-all", ["known are", "gpt2-small"]),
        ("", ["Unknown model ''"]),
        ("llma:layers=2", ["family 'llma'", "did you mean 'llama'"]),
        (
            "gpt:layers=2,hidden=100,heads=7,vocab=10",
            ["heads=7 does not divide hidden=100", "5 and 10"],
        ),
        (
            "llama:layers=2,hidden=96,heads=7,vocab=10",
            ["heads=7 does not divide hidden=96", "6 and 8"],
        ),
        ("llama:layers=2,hidden=36,heads=12,vocab=10", ["head_dim=3", "9 and 18"]),
        ("llama:layers=2,hidden=35,heads=5,vocab=10", ["head_dim=7", "even hidden size"]),
        (f"llama:{BASE},kv_heads=3", ["kv_heads=3 does not divide heads=4", "2 and 4"]),
        (f"gpt:{BASE},kv_heads=2", ["no kv_heads", "llama: has"]),
        (
            f"gpt:{BASE},hiden=3",
            ["unknown key 'hiden'", "layers, hidden, heads, vocab", "Did you mean hidden"],
        ),
        (f"gpt:{BASE},experts=3", ["unknown key 'experts'"]),
        ("gpt:layers=two,hidden=64,heads=4,vocab=128", ["layers='two' is not an integer"]),
        ("gpt:layers=2.5,hidden=64,heads=4,vocab=128", ["layers='2.5' is not an integer"]),
        ("gpt:layers=0,hidden=64,heads=4,vocab=128", ["layers=0 must be at least 1"]),
        ("gpt:layers=2,hidden=64,heads=-4,vocab=128", ["heads=-4 must be at least 1"]),
        (
            "gpt:layers=2,layers=3,hidden=64,heads=4,vocab=128",
            ["layers is given twice, as 2 and 3"],
        ),
        ("gpt:layers=2,hidden=64", ["missing heads, vocab"]),
        ("gpt:", ["missing layers, hidden, heads, vocab"]),
        ("gpt:layers", ["'layers' is not key=value"]),
        (f"moe:{BASE},experts=4,top_k=5", ["top_k=5 exceeds experts=4"]),
        (":build", ["not module:function"]),
        ("module:", ["not module:function"]),
        ("no_such_module_xyz:build", ["Cannot import module 'no_such_module_xyz'"]),
        ("json:no_such_function", ["has no function 'no_such_function'", "dumps"]),
        ("json:__name__", ["is a str, not a function"]),
    ],
)
def test_bad_text(text, parts):
    with pytest.raises(AutoparError) as caught:
        parse_model(text)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (lambda: GPTConfig(vocab=8, hidden=8, layers=1, heads=2, dropout=1.0), "dropout=1.0"),
        (
            lambda: GPTConfig(vocab=8, hidden=8, layers=True, heads=2),
            "layers=True is not an integer",
        ),
        (lambda: LlamaConfig(8, 8.0, 1, 2, 2, 8), "hidden=8.0 is not an integer"),
        (lambda: MoEConfig(8, 8, 1, 2, 2, 8, router_aux_coef=-1.0), "router_aux_coef=-1.0"),
        (lambda: MoEConfig(8, 8, 1, 2, 2, 8, shared_ffn=-1), "shared_ffn=-1"),
        (lambda: MoEConfig(8, 8, 1, 2, 2, 8, capacity_factor=-0.5), "capacity_factor=-0.5"),
    ],
)
def test_configs_validate_themselves(make, part):
    with pytest.raises(AutoparError, match=re.escape(part)):
        make()


@pytest.mark.parametrize(
    ("function", "part"),
    [
        ("wrong", "it returned a int"),
        ("wrong_inputs", "it returned a int"),
        ("raises", "KeyError: 'secret'"),
        ("needs", "callable without arguments"),
    ],
)
def test_bad_functions(user_module, function, part):
    with pytest.raises(AutoparError, match=re.escape(part)):
        parse_model(f"{user_module}:{function}").build()


def test_a_function_without_inputs_and_a_module_that_fails(user_module):
    with pytest.raises(AutoparError, match="returns no example inputs"):
        parse_model(f"{user_module}:plain").example_inputs(2, 4)
    with pytest.raises(AutoparError, match="is a int, not a function"):
        parse_model(f"{user_module}:constant")
    with pytest.raises(AutoparError, match="ZeroDivisionError"):
        parse_model("autopar_broken_module:build")


def test_bad_inputs():
    with pytest.raises(AutoparError, match="seq=65 exceeds its 64 learned positions"):
        parse_model("gpt-tiny").example_inputs(1, 65)
    with pytest.raises(AutoparError, match="batch=0"):
        parse_model("llama-tiny").example_inputs(0, 8)
    with pytest.raises(AutoparError, match="sequence length 65 exceeds the 64"):
        parse_model("gpt-tiny").build()(
            parse_model("llama-tiny").example_inputs(1, 65)["input_ids"]
        )


@pytest.mark.parametrize(
    ("contents", "part"),
    [
        ("{not json", "is not valid JSON"),
        ("[1, 2]", 'has no "model_type"'),
        ('{"hidden_size": 3}', 'has no "model_type"'),
        ('{"model_type": "llamma"}', "no model_type 'llamma'; did you mean llama"),
        (
            '{"model_type": "wav2vec2"}',
            "'wav2vec2' is no model of language, of speech to text, or of images to classes",
        ),
        ('{"model_type": "llama", "hidden_size": "big"}', "transformers rejects the config"),
        (
            '{"model_type": "llama", "hidden_size": 30, "num_attention_heads": 4}',
            "transformers rejects the config",
        ),
    ],
)
def test_bad_hf_configs(tmp_path, contents, part):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(contents)
    for path in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(AutoparError, match=re.escape(part)):
            parse_model(f"hf:{path}")


def test_missing_hf_files(tmp_path):
    for path in (tmp_path, tmp_path / "other.json", ""):
        with pytest.raises(AutoparError, match="no file"):
            parse_model(f"hf:{path}")


def test_without_transformers(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(AutoparError, match="pip install transformers"):
        parse_model(f"hf:{tmp_path}")
