"""Hugging Face models: built from a config.json, prepared for capture, and fed. transformers is
imported only when needed.

Capture needs attention as one `scaled_dot_product_attention(is_causal=True)` without an s x s mask.
Under torch.export transformers builds the mask, because it cannot look at values there.
`prepare_hf` therefore registers an attention function and a mask function of this package (through
transformers' AttentionInterface and AttentionMaskInterface). They recognize a plain causal mask by
its construction. Routed experts become one op (`hf_experts`).
"""

from __future__ import annotations

import difflib
import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, shown
from autopar.files import path_of, read_text, reason_of

from .base import ModelSpec
from .common import MOST_LAYERS, MOST_SIZE
from .hf_experts import prepare_experts
from .hf_rope import prepare_rope
from .hf_shrink import shrunk_config_dict
from .published import PublishedModel

ATTENTION_NAME, CACHED_NAME = "autopar_sdpa", "autopar_sdpa_cached"
UNPACKED_NAME = "autopar_sdpa_unpacked"
"""Names of our attention. The last two are for models whose users left the cache on, with
`position_ids` in the batch and without.
"""

IMAGE_SIZE = 224
"""Height and width of images, in pixels, for models without a size: ImageNet's crops (He et al.,
arXiv:1512.03385, section 3.4).
"""


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise AutoparError(
            "Hugging Face models (hf:path) need transformers, which is not installed: pip install transformers"
        ) from error
    return transformers


def _untyped(model: nn.Module) -> Any:
    """The same model object, typed Any, since type checkers do not know the attributes of
    transformers' classes.
    """
    return model


def is_hf_model(model: nn.Module) -> bool:
    """Whether `model` is a transformers PreTrainedModel. Does not import transformers."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(model, modeling.PreTrainedModel)


def hf_models(model: nn.Module) -> list[nn.Module]:
    """The outermost transformers models in `model`, in module order: `model` alone if it is one; []
    if there is none. Never imports transformers.
    """
    if is_hf_model(model):
        return [model]
    return [found for child in model.children() for found in hf_models(child)]


def prepare_hf(model: nn.Module, inputs: Collection[str] | None = None) -> nn.Module:
    """Make the transformers models in a model ready for capture *in place*, and return the model.
    `inputs` are the names in the batch, if they are known.

    Sets `use_cache=False` on their configs. Where an architecture has SDPA behind transformers'
    AttentionInterface, it selects our attention and mask functions, unless an indexer chooses keys
    by the mask or forward computes with it. Others keep their own attention, which may build a mask
    in the graph: slower, never wrong. An attention chosen by the user, other than the default
    `sdpa`, is kept.

    Experts compute by `autopar::routed_experts` where it has their activation
    (`hf_experts.prepare_experts`). `position_ids` of one row for the whole batch are taken to be 0,
    1, 2, ... (no packed sequences), as are those the model makes itself. Rows per sample are
    honoured. Where the user left `use_cache` on, transformers ignores them: `position_ids` of the
    batch are then refused.

    Bloom's GELU, whose hand-written backward torch.export would drop, is left to autograd: the same
    derivative.
    """
    for outermost in hf_models(model):
        _prepare(outermost, inputs is None or any("position_ids" in name for name in inputs))
    return model


def _prepare(model: nn.Module, has_positions: bool) -> None:
    transformers, of_transformers = _transformers(), _untyped(model)
    configs = of_transformers.config, of_transformers.config.get_text_config()
    cached = any(getattr(config, "use_cache", False) for config in configs)
    name, mask = ATTENTION_NAME, _mask
    if cached and has_positions:
        name, mask = CACHED_NAME, _mask_of_cached
    elif cached:
        name, mask = UNPACKED_NAME, partial(_mask, peel=_without_packing)
    for module in map(_untyped, model.modules()):
        if is_hf_model(module):  # encoder and decoder of T5 hold copies of the config
            module.config.use_cache = module.config.get_text_config().use_cache = False
        elif type(module).__name__ == "BloomGelu":
            module.forward = transformers.models.bloom.modeling_bloom.bloom_gelu_forward
    by_sdpa = (
        of_transformers._supports_sdpa and of_transformers.config._attn_implementation == "sdpa"
    )
    # an indexer chooses keys by the mask, and needs one
    by_mask = any(module.endswith(".indexer") for module, _ in model.named_modules())
    kinds: set[type] = set(map(type, model.modules()))
    by_mask = by_mask or any(map(_asks_for_mask, kinds))
    if by_sdpa and not by_mask and of_transformers._can_set_attn_implementation():
        transformers.AttentionInterface.register(name, _attention)
        transformers.AttentionMaskInterface.register(name, mask)
        of_transformers.set_attn_implementation(name)
    prepare_experts(model)
    prepare_rope(model, has_positions)


@cache
def _asks_for_mask(kind: type) -> bool:
    """Whether the file of a class of transformers models, or of a class that it extends, asks for
    masks that are plain causal too (Doge adds them to its own). A mask function cannot tell: under
    tracing transformers always asks. True if there is no source.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    base = getattr(modeling, "PreTrainedModel", None)
    if base is None or not issubclass(kind, base) or kind is base:
        return False
    try:
        source = inspect.getsource(sys.modules[kind.__module__])
    except (OSError, TypeError, KeyError):
        return True
    return "allow_is_causal_skip" in source or any(map(_asks_for_mask, kind.__bases__))


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function for transformers: query (b, n, s, d), key and value (b, kv_heads, s, d)
    -> (result (b, s, n, d), None). It calls `scaled_dot_product_attention` with `dropout` and
    `scaling` (None: 1 / sqrt(d)). It is causal if there is no mask and `is_causal` holds (None: the
    module's attribute, True by default).

    With a position bias, a cache, a softcap, or another number of keys than queries, calls
    transformers' own function.
    """
    rare = any(kwargs.get(name) is not None for name in ("position_bias", "cache", "softcap"))
    if rare or query.shape[2] != key.shape[2]:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mixed = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=bool(causal) and attention_mask is None,
        enable_gqa=key.shape[1] < query.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None


def _mask(*args: Any, peel: Callable | None = None, **kwargs: Any) -> Tensor | None:
    """A mask function for transformers, with the arguments of its `sdpa_mask`. None if the mask is
    plain causal, so that `is_causal=True` suffices, or hides nothing. For that, no padding mask or
    offset may be given, and transformers must allow the skip.

    Otherwise transformers' sdpa mask, without its parts for packed sequences that `peel` takes off:
    by default those where rows share positions.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    function = kwargs.get("mask_function", causal_mask_function)
    without_packing = (peel or _peel_packing)(function)
    from_start = kwargs.get("q_offset", 0) == kwargs.get("kv_offset", 0) == 0
    if kwargs.get("attention_mask") is None and from_start:
        square = kwargs.get("q_length") == kwargs.get("kv_length")
        may_skip = kwargs.get("allow_is_causal_skip", True) or without_packing is not function
        if square and may_skip and _is_causal(without_packing, kwargs["kv_length"]):
            return None
        both_ways = _name(function) == "bidirectional_mask_function"
        if kwargs.get("allow_is_bidirectional_skip", False) and both_ways:
            return None
    kwargs["mask_function"] = without_packing
    if all(part.__module__.startswith("transformers.") for part in _parts(without_packing)):
        kwargs["use_vmap"] = False  # all of them are made of indexing, and export has no vmap
    return sdpa_mask(*args, **kwargs)


def _mask_of_cached(*args: Any, **kwargs: Any) -> Tensor | None:
    """`_mask` for a model whose user left `use_cache` on. Raises AutoparError if the mask function
    separates packed sequences by rows' own positions.
    """
    function = kwargs.get("mask_function")
    if function is not None and any(map(_packs, _parts(_peel_packing(function)))):
        raise AutoparError(
            "position_ids of each row: transformers keeps packed sequences apart only without a cache, and use_cache is on. "
            "Set model.config.use_cache = False, as autopar does to train, so that eager training computes the same"
        )
    return _mask(*args, **kwargs)


def _packs(function: Callable) -> bool:
    return _name(function) == _PACKED


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", "").split(".")[0]


def _closure(function: Callable) -> dict[str, Any]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
    if code is None or cells is None:
        return {}
    return {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}


def _peel_packing(function: Callable) -> Callable:
    """A mask function of transformers without the parts for packed sequences, which it adds under
    tracing. The function itself if it has none, or if rows have positions of their own.
    """
    numbering = [part for part in _parts(function) if _name(part) == _REMAPPED]
    positions = [_closure(part)["position_ids"] for part in numbering]
    # expanded over the batch, not given per sample
    shared = positions and all(rows.stride(0) == 0 for rows in positions)
    return _without_packing(function) if shared else function


_JOINED, _PACKED, _REMAPPED = (
    ("and_masks", "or_masks"),
    "packed_sequence_mask_function",
    "remap_positions_for_packed_sequence",
)
"""Names of transformers' mask functions: those that combine others, that separate packed sequences,
and that number positions within each sequence.
"""


def _parts(function: Callable) -> Iterator[Callable]:
    """Yields a mask function of transformers, then, if it combines others (and, or), all of those,
    recursively.
    """
    yield function
    for part in _closure(function).get("mask_functions", ()) if _name(function) in _JOINED else ():
        yield from _parts(part)


def _without_packing(function: Callable) -> Callable:
    from transformers import masking_utils

    if _name(function) == _REMAPPED:
        return _closure(function)["mask_function"]
    if _name(function) not in _JOINED:
        return function
    joined = _closure(function)["mask_functions"]
    parts = [_without_packing(part) for part in joined if _name(part) != _PACKED]
    return parts[0] if len(parts) == 1 else getattr(masking_utils, _name(function))(*parts)


def _is_causal(function: Callable, kv_length: int) -> bool:
    """Whether a mask function of transformers is the causal one, or combines by "and" only causal
    ones and windows of at least `kv_length` keys.
    """
    if _name(function) == "and_masks":
        parts = _closure(function).get("mask_functions", ())
        return bool(parts) and all(
            _is_causal(part, kv_length) or _is_wide_window(part, kv_length) for part in parts
        )
    return _name(function) == "causal_mask_function"


def _is_wide_window(function: Callable, kv_length: int) -> bool:
    return (
        _name(function) == "sliding_window_overlay"
        and _closure(function).get("sliding_window", 0) >= kv_length
    )


def hf_example_inputs(
    model: nn.Module, batch: int, seq: int, device: torch.device | str = "meta"
) -> dict[str, Tensor]:
    """A dict of example inputs of a transformers model, by its config: random tokens, pixels or
    spectra (seed 0), or only shapes on meta.

    Text models get `input_ids` (batch, seq) and `labels`. Labels are a copy of input_ids for
    language models, and (batch,) for sequence classifiers. Image classifiers get `pixel_values`
    (batch, channels, height, width), of `IMAGE_SIZE` where the config has no size, and `labels`
    (batch,). Models of speech get `input_features`
    (batch, mel bins, frames) and `labels` (batch, seq). Raises AutoparError for other models.
    """
    kind, main, config = type(model).__name__, model.main_input_name, _untyped(model).config
    is_meta = torch.device(device).type == "meta"
    generator = torch.Generator().manual_seed(0)

    def integers(limit: int, *shape: int) -> Tensor:
        if is_meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(0, limit, shape, generator=generator).to(device)

    def numbers(shape: tuple[int, ...]) -> Tensor:
        if is_meta:
            return torch.empty(shape, device="meta")
        return torch.randn(shape, generator=generator).to(device)

    of_tokens = (
        *("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration"),
        *("MTModel", "GenerationDecoder"),
    )
    if main == "input_ids" and kind.endswith((*of_tokens, "ForSequenceClassification")):
        ids = integers(config.get_text_config().vocab_size, batch, seq)
        each = kind.endswith(of_tokens)
        return {
            "input_ids": ids,
            "labels": ids.clone() if each else integers(config.num_labels, batch),
        }
    if main == "input_features" and config.is_encoder_decoder:
        # the encoder halves the frames, to as many as it has positions
        shape = (batch, config.num_mel_bins, 2 * config.max_source_positions)
        return {"input_features": numbers(shape), "labels": integers(config.vocab_size, batch, seq)}
    if main == "pixel_values" and kind.endswith("ForImageClassification"):
        # ResNets take images of any size, and their configuration has none
        size = getattr(config, "image_size", IMAGE_SIZE)
        size = size if isinstance(size, (tuple, list)) else (size, size)
        pixels = numbers((batch, config.num_channels, *size))
        return {"pixel_values": pixels, "labels": integers(config.num_labels, batch)}
    raise AutoparError(
        f"Cannot make example inputs for {kind} (main input '{main}'); pass example_inputs={{name: tensor, ...}}."
    )


@dataclass(frozen=True, slots=True)
class HFSpec(ModelSpec):
    """A spec of a transformers language model or image classifier, built from `config_dict`, the
    contents of a config.json.

    Pretrained weights are not loaded. The model keeps the dropout of its config; `shrunk` sets it
    to 0.
    """

    config_dict: dict[str, Any] = field(hash=False)
    repeats: int = 0
    """The number of layers after which their structure repeats; 0 if this is not known."""
    different: int = 0
    """The number of first layers that differ from those that repeat."""

    @classmethod
    def of_published(cls, model: PublishedModel) -> HFSpec:
        """The spec of a named model that transformers builds. Raises AutoparError like
        `from_dict`.
        """
        spec = cls.from_dict(model.name, {"model_type": model.kind} | dict(model.dims))
        return replace(spec, max_seq=model.seq, repeats=model.repeats, different=model.different)

    @classmethod
    def of(cls, path: str) -> HFSpec:
        """The spec of a config.json; `path` is the file or its directory. Raises AutoparError if it
        cannot be read or is no transformers config. Nothing is downloaded.
        """
        return cls.from_dict(f"hf:{path}", _read_config(path))

    @classmethod
    def of_json(cls, text: str) -> HFSpec:
        """The spec of the text of a config.json, named by its kind of model. Raises AutoparError as
        `of`.
        """
        found = _parsed_config(text, "hf:{...}", "the text")
        return cls.from_dict(found["model_type"], found)

    @classmethod
    def from_dict(cls, name: str, config_dict: dict[str, Any]) -> HFSpec:
        """The spec called `name` of a config.json's contents, which must have 'model_type'. Sizes
        that the config does not have, or has as -1 (no limit), are 0. Raises AutoparError if transformers rejects the config,
        or has no language model or image classifier for it.
        """
        text = _text_config(_config(name, config_dict))
        sizes = {}
        for field_name, attributes in _SIZES.items():
            values = [getattr(text, attribute, None) for attribute in attributes]
            known = (value for value in values if isinstance(value, int) and value > 0)
            sizes[field_name] = next(known, 0)
        return cls(name=name, config_dict=config_dict, **sizes)

    def shallow(self) -> HFSpec:
        """A spec with the first layers that differ, two periods and one more layer, plus what keeps
        the remainder modulo the period. The spec itself if it has no more, or if it is not known
        what repeats.
        """
        key = next((key for key in ("num_hidden_layers", "n_layer") if key in self.config_dict), "")
        layers = self.different + 2 * self.period + 1
        layers += (self.num_layers - layers) % self.period
        if not self.repeats or not key or layers >= self.num_layers:
            return self
        return replace(self, num_layers=layers, config_dict={**self.config_dict, key: layers})

    @property
    def layers_path(self) -> str:
        """The path of the first module list that has as many modules as the model has layers; '' if
        there is none.
        """
        shallow = self.shallow()
        return next(
            (
                path
                for path, module in shallow.build("meta").named_modules()
                if isinstance(module, nn.ModuleList) and len(module) == shallow.num_layers
            ),
            "",
        )

    @property
    def period(self) -> int:
        """The number of layers after which the structure of layers repeats; 1 if all are alike."""
        return self.repeats or 1

    def _make(self) -> nn.Module:
        config = _config(self.name, self.config_dict)
        config.use_cache = False
        try:
            auto_class = getattr(_transformers(), _auto_class(config) or "")
            return prepare_hf(auto_class.from_config(config, dtype=torch.float32))
        except Exception as error:  # a config can make any line of transformers or torch fail
            reason = " ".join(str(error).split())
            raise AutoparError(
                f"{self.name}: transformers cannot build it: {type(error).__name__}: {reason}"
            ) from error

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """Example inputs by name (see `hf_example_inputs`): tokens or pixels, and labels."""
        self._check_inputs(batch, seq)
        return hf_example_inputs(self.build("meta"), batch, seq, device)

    def shrunk(self) -> ModelSpec:
        """A spec of the same architecture, its name marked '(shrunk)': at most 2 layers, 8 heads
        and 512 tokens in the vocabulary, without dropout.
        """
        small = shrunk_config_dict(_config(self.name, self.config_dict).to_dict())
        return HFSpec.from_dict(f"{self.name} (shrunk)", small)

    def _attention_size(self) -> tuple[int, int]:
        text = _text_config(_config(self.name, self.config_dict))
        heads = text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        return self.num_layers, heads * head_dim

    def _expert_share(self) -> float:
        text = _text_config(_config(self.name, self.config_dict))
        names = ("num_local_experts", "num_experts", "n_routed_experts")
        experts = next((getattr(text, name) for name in names if getattr(text, name, None)), 1)
        return (getattr(text, "num_experts_per_tok", None) or 1) / experts


_SIZES = {
    "vocab": ("vocab_size",),
    "max_seq": ("max_position_embeddings", "n_positions"),
    "num_layers": ("num_hidden_layers",),
}


def _read_config(path: str) -> dict[str, Any]:
    if not path:
        raise AutoparError(
            "hf: no file is named; give a config.json or the directory that holds it (nothing is downloaded)."
        )
    try:
        file = path_of(path, "config").expanduser()
        file = file / "config.json" if file.is_dir() else file
        missing = not file.is_file()
    except (OSError, RuntimeError) as error:  # too long a name; no home of such a user
        raise AutoparError(
            f"hf:{path}: {reason_of(error)}; give a config.json or the directory that holds it"
        ) from None
    if missing:
        raise AutoparError(
            f"hf:{path}: no file {file}; give a config.json or the directory that holds it (nothing is downloaded)."
        )
    return _parsed_config(read_text(file, "config"), f"hf:{path}", str(file))


def _parsed_config(text: str, model: str, where: str) -> dict[str, Any]:
    """The contents of a config.json with this text, which is from `where`, of a `model`. Raises
    AutoparError if it is none.
    """
    try:
        contents = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AutoparError(f"{model}: {where} is not valid JSON: {error}") from error
    if not isinstance(contents, dict) or not isinstance(contents.get("model_type"), str):
        raise AutoparError(
            f'{model}: {where} has no "model_type" (such as "llama"), so it is not a transformers config.'
        )
    return contents


def _config(name: str, config_dict: dict[str, Any]) -> Any:
    transformers = _transformers()
    known, model_type = transformers.CONFIG_MAPPING, config_dict["model_type"]
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known.keys(), n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise AutoparError(
            f"{name}: transformers {transformers.__version__} has no model_type '{model_type}'{hint}"
        )
    try:
        config = known[model_type].from_dict(dict(config_dict))
    except Exception as error:  # strict configs raise their own validation types
        raise AutoparError(
            f"{name}: transformers rejects the config: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    _check_sizes(name, _text_config(config))
    if _auto_class(config) is None:
        remedy = "pass the model itself to autopar.plan with example_inputs."
        raise AutoparError(
            f"{name}: model_type '{model_type}' is no model of language, of speech to text, or of images to classes; {remedy}"
        )
    return config


def _text_config(config: Any) -> Any:
    """The config of a model's text part: of its decoder, if an encoder has one too."""
    try:
        return config.get_text_config()
    except ValueError:  # transformers finds several
        return config.get_text_config(decoder=True)


def _check_sizes(name: str, config: Any) -> None:
    """Raise AutoparError if a size in the config is not a whole number from 1 to `MOST_SIZE`
    (layers: `MOST_LAYERS`). Sizes that are missing, or lists for each layer, are not checked.
    """
    names = "hidden_size num_attention_heads num_key_value_heads intermediate_size vocab_size"
    for size in (*names.split(), "num_hidden_layers"):
        value = getattr(config, size, None)
        most = MOST_LAYERS if size == "num_hidden_layers" else MOST_SIZE
        # not a size of this model, or one for each layer
        if value is None or isinstance(value, list | tuple):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise AutoparError(
                f"{name}: {size}={shown(value)} must be a whole number from 1 to {most:,}"
            )


def _auto_class(config: Any) -> str | None:
    """The name of transformers' auto class that can build `config`, or None.

    Language models come first, in an order that the config suggests (decoder, encoder and decoder,
    encoder), then image classifiers. A config with mel bins is one of speech to text.
    """
    order = ["AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"]
    if getattr(config, "is_encoder_decoder", False):
        order = ["AutoModelForSeq2SeqLM", "AutoModelForCausalLM", "AutoModelForMaskedLM"]
    elif not getattr(config, "is_decoder", True):
        order = ["AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSeq2SeqLM"]
    if getattr(config, "num_mel_bins", None):
        order = ["AutoModelForSpeechSeq2Seq"]
    order.append("AutoModelForImageClassification")
    known = (n for n in order if type(config) in getattr(_transformers(), n)._model_mapping)
    return next(known, None)
