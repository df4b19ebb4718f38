"""Parses the MODEL argument of the command line to a `ModelSpec`."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from torch import nn

from autopar.errors import AutoparError, shown

from .base import ModelSpec, NativeSpec
from .configs import CONFIGS, FAMILY_CONFIGS, NativeConfig
from .diffusion import DiffusionSpec, DiTConfig, FluxConfig
from .function import FunctionSpec
from .hf import HFSpec, is_hf_model
from .names import model_named, near_models
from .published import PublishedModel, published_models

__all__ = ["ModelSpec", "NativeSpec", "parse_model"]


def _fields(text: str) -> dict[str, str]:
    """A dict from words separated by spaces: `key=field` gives key -> field, and `key` gives key ->
    key. Keys are those of MODEL texts, and fields those of configs.
    """
    pairs = (word.partition("=") for word in text.split())
    return {key: field or key for key, _, field in pairs}


_COMMON_KEYS = _fields("layers hidden heads vocab ffn seq=max_seq window tied=tie_embeddings")
_GPT_KEYS = _COMMON_KEYS | _fields("positions parallel_block")
_LLAMA_KEYS = _COMMON_KEYS | _fields("kv_heads head_dim=head_width window_every")
_MOE_KEYS = _LLAMA_KEYS | _fields("experts top_k shared_ffn first_dense dense_ffn mtp")
_TEXTS = ("positions",)
_SWITCHES = ("tied", "parallel_block")
_SWITCH_VALUES = {"true": True, "false": False, "1": True, "0": False}
_KEYS = {"gpt": _GPT_KEYS, "llama": _LLAMA_KEYS, "moe": _MOE_KEYS}
_REQUIRED = ("layers", "hidden", "heads", "vocab")


def parse_model(text: str) -> ModelSpec:
    """The spec of the model that `text` names.

    Raises AutoparError if the text has none of these forms, or what it names cannot be read:

    - A named model: `llama3-8b`. `autopar models` lists them. Other spellings of a name are
      read too if they can mean no other model: `meta-llama/Meta-Llama-3-8B-Instruct`.
    - Dimensions: `gpt:layers=96,hidden=12288,heads=96,vocab=51200`. Families are gpt, llama and
      moe. Optional keys are ffn, seq, window, tied=true|false; for gpt positions=learned|alibi|none
      and parallel_block; for the others kv_heads, head_dim and window_every; for moe experts,
      top_k, shared_ffn, first_dense, dense_ffn and mtp.
    - A Hugging Face config: `hf:path`, where path is a config.json or its directory, or the JSON text itself.
    - A user's function: `module:function`.
    """
    if not isinstance(text, str):
        raise AutoparError(f"a model is named by a text such as 'llama3-8b', not by {shown(text)}")
    text = text.strip()
    head, colon, rest = text.partition(":")
    is_form = head == "hf" or head in _KEYS or rest.isidentifier()  # `gpt2:xl` is a function
    if not is_form and (name := model_named(text)) is not None:
        return _spec_of(published_models()[name])
    if not colon:
        raise AutoparError(_unknown_name(text))
    if head in _KEYS:
        return NativeSpec.of(text, _parse_dimensions(head, rest))
    if head == "hf":
        return HFSpec.of_json(rest) if rest.startswith("{") else _of_folder(rest)
    if "=" in rest:
        near = difflib.get_close_matches(head, _KEYS, n=1, cutoff=0.3)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise AutoparError(
            f"Unknown model family '{head}'; the families are {', '.join(_KEYS)}{hint}"
        )
    return FunctionSpec.of(text)


def text_of_model(model: nn.Module) -> str:
    """The text by which `parse_model` builds such a model, whatever its weights and dtype: a named
    model, dimensions, or a Hugging Face config. '' if there is none.

    The text comes from the config of the model. It counts only if the model that it builds on meta
    has the same type, and parameters of the same names, shapes and `requires_grad`.
    """
    if not (text := _text_of_config(model)):
        return ""
    try:
        built = parse_model(text).build("meta")
    except AutoparError:
        return ""
    is_alike = type(built) is type(model) and _parameters(built) == _parameters(model)
    return text if is_alike else ""


def _parameters(model: nn.Module) -> dict[str, tuple[tuple[int, ...], bool]]:
    """The shape of each parameter, and whether it requires a gradient, by name."""
    return {
        name: (tuple(parameter.shape), parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }


def _text_of_config(model: nn.Module) -> str:
    """The text of the config that a model carries; '' without one that texts say."""
    config: Any = getattr(model, "config", None)
    if is_hf_model(model):
        data = {"model_type": config.model_type} | config.to_diff_dict()
        return f"hf:{json.dumps(data, sort_keys=True, default=str)}"
    for family, make in FAMILY_CONFIGS.items():
        if type(config) is make:
            named = (name for name, known in CONFIGS.items() if known == config)
            return next(named, "") or _dimensions(family, config)
    for published in published_models().values():
        kind = DIFFUSION.get(published.kind)
        if kind is not None and type(config) is kind and kind(**published.dims) == config:
            return published.name
    return ""


def _dimensions(family: str, config: NativeConfig) -> str:
    """The text of the dimensions of a config; '' if it has others than texts say."""
    values = {key: getattr(config, field) for key, field in _KEYS[family].items()}
    given = {key: value for key, value in values.items() if value is False or value}
    said = ",".join(f"{key}={value}" for key, value in given.items())
    return f"{family}:{said}" if _parse_dimensions(family, said) == config else ""


DIFFUSION: dict[str, type[DiTConfig] | type[FluxConfig]] = {"dit": DiTConfig, "flux": FluxConfig}
"""The configurations of diffusion transformers, by the name of their family."""


def _spec_of(model: PublishedModel) -> ModelSpec:
    if model.is_hf:
        return HFSpec.of_published(model)
    if model.kind in DIFFUSION:
        return DiffusionSpec.of(model.name, DIFFUSION[model.kind](**model.dims))
    return NativeSpec.of(model.name, CONFIGS[model.name])


def _of_folder(path: str) -> ModelSpec:
    """The spec of the config.json at `path`. Raises AutoparError if there is no such path and a
    named model is meant.
    """
    name = model_named(path)
    if name is not None and not Path(path).expanduser().exists():
        raise AutoparError(
            f"hf:{path} is no file or folder here (nothing is downloaded); the model of that name is built in: {name}"
        )
    return HFSpec.of(path)


def _unknown_name(text: str) -> str:
    near = near_models(text)
    known = f"did you mean {' or '.join(near)}?" if near else "`autopar models` lists the names."
    return (
        f"Unknown model '{text}': {known} Other forms are gpt:layers=..,hidden=..,heads=..,vocab=.. (also llama:, moe:), "
        "hf:path/to/config.json, and module:function."
    )


def _parse_dimensions(family: str, text: str) -> NativeConfig:
    make, keys = FAMILY_CONFIGS[family], _KEYS[family]
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise AutoparError(
                f"{family}: '{item}' is not key=value; an example is {family}:layers=2,hidden=64,heads=4,vocab=256."
            )
        if key not in keys:
            raise AutoparError(_unknown_key(family, key, keys))
        if key in given:
            raise AutoparError(f"{family}: {key} is given twice, as {given[key]} and {value}.")
        given[key] = _value(family, key, value)
    if missing := [key for key in _REQUIRED if key not in given]:
        raise AutoparError(
            f"{family}: missing {', '.join(missing)}; {', '.join(_REQUIRED)} are required."
        )
    if "kv_heads" in keys:
        given.setdefault("kv_heads", given["heads"])
    if family != "gpt":
        given.setdefault("ffn", _swiglu_width(given["hidden"]))
    return make(**{keys[key]: value for key, value in given.items()})


def _value(family: str, key: str, text: str) -> int | str | bool:
    if key in _TEXTS:
        return text
    if key in _SWITCHES:
        if text.lower() not in _SWITCH_VALUES:
            raise AutoparError(f"{family}: {key}={shown(text)} must be true or false.")
        return _SWITCH_VALUES[text.lower()]
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        raise AutoparError(f"{family}: {key}={shown(text)} is not an integer.") from None
    if number < 1:
        raise AutoparError(f"{family}: {key}={number} must be at least 1.")
    return number


def _unknown_key(family: str, key: str, keys: dict[str, str]) -> str:
    if family == "gpt" and key == "kv_heads":
        return "gpt: there is no kv_heads: its fused qkv projection has one key and value per head; llama: has grouped-query attention."
    near = difflib.get_close_matches(key, keys, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{family}: unknown key '{key}'; the keys are {', '.join(keys)}.{hint}"


def _swiglu_width(hidden: int) -> int:
    """Two thirds of 4 * hidden, rounded up to a multiple of 256 (Touvron et al. 2023, arXiv:2302.13971, section 2.2 and its code)."""
    return -(-(8 * hidden // 3) // 256) * 256
