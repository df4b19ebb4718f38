"""Shrinks a Hugging Face config: same architecture, small, without dropout. It handles the field
names of the common families.
"""

from __future__ import annotations

import copy
from math import ceil
from typing import Any

from . import base
from .base import SHRUNK_EXPERTS, SHRUNK_HEAD_DIM, SHRUNK_HEADS, SHRUNK_LAYERS

_HIDDEN = "hidden_size n_embd d_model dim word_embed_proj_dim embedding_size"
_HEADS = (
    "num_attention_heads n_head num_heads n_heads encoder_attention_heads decoder_attention_heads"
)
_KV_HEADS = "num_key_value_heads num_kv_heads"
_FFN = (
    "intermediate_size n_inner ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim hidden_dim "
    "ffn_hidden_size moe_intermediate_size shared_expert_intermediate_size d_inner"
)
_LAYERS = (
    "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_decoder_layers"
)
_POSITIONS = "max_position_embeddings n_positions n_ctx max_sequence_length"
_HEAD_DIM = "head_dim d_kv d_head"
# DeepSeek's latent attention
_LATENT = "qk_nope_head_dim qk_rope_head_dim v_head_dim q_lora_rank kv_lora_rank"
_OF_LAYERS = ("layer_types", "mlp_layer_types", "no_rope_layers", "layers_block_type")
"""Lists with an entry for each layer, whatever counts the layers."""
_EXPERTS = "num_local_experts num_experts n_routed_experts"
_VOCABULARIES = "vocab_size decoder_vocab_size vocab_size_per_layer_input"
_PICKED = "deepstack_visual_indexes intermediate_layers_indices out_indices"
"""Lists of the layers of a tower whose results are read."""
_WIDTH = SHRUNK_HEADS * SHRUNK_HEAD_DIM
_NOISE = ("dropout", "pdrop", "layerdrop", "drop_rate", "drop_path_rate", "jitter_noise")


def shrunk_config_dict(config: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config's dict, and of the text configs in it, for a small model. It has at most 2
    layers, 8 heads of 16 channels and 512 tokens in the vocabulary, fewer experts, and no dropout.
    Towers for images and sound have at most 2 layers, unless results of certain layers are read.
    """
    config = copy.deepcopy(config)
    texts = [value for key, value in config.items() if key.endswith("text_config")]
    for part in [config, *(text for text in texts if isinstance(text, dict))]:
        _shrink(part)
    parts = [value for key, value in config.items() if key.endswith("_config")]
    for tower in parts:
        if isinstance(tower, dict) and tower not in texts and not _lists(tower, _PICKED):
            _limit(tower, f"{_LAYERS} num_blocks", SHRUNK_LAYERS)
    return config


def _ints(config: dict[str, Any], names: str) -> list[str]:
    """Those of `names` (separated by spaces) whose value in the config is an int."""
    return [name for name in names.split() if type(config.get(name)) is int]


def _lists(config: dict[str, Any], names: str) -> list[str]:
    """Those of `names` (separated by spaces) whose value in the config is a list, as of an integer
    for each layer.
    """
    return [name for name in names.split() if isinstance(config.get(name), list)]


def _limit(config: dict[str, Any], names: str, most: int) -> None:
    for name in _ints(config, names):
        config[name] = min(config[name], most)


def _shrink(config: dict[str, Any]) -> None:
    _silence(config)
    _shrink_layers(config)
    _shrink_vocab(config)
    _limit(config, _POSITIONS, base.SHRUNK_SEQ)
    _shrink_experts(config)
    hidden_names, head_names = _ints(config, _HIDDEN), _ints(config, _HEADS)
    if hidden_names and head_names:
        _shrink_width(config, hidden_names, head_names)
    elif _ints(config, "attention_hidden_size"):  # RWKV: no heads
        _limit(config, f"{_HIDDEN} attention_hidden_size", _WIDTH)
        _limit(config, _FFN, 4 * _WIDTH)


def _shrink_experts(config: dict[str, Any]) -> None:
    """Reduce the number of experts in the config, in place, to 4 or the top k, whichever is more.
    At most one layer stays dense. With group-limited routing (DeepSeek-V3: a token's experts must
    be in its best `topk_group` of `n_group` groups), at most two groups are kept, with enough
    experts for the top k.
    """
    chosen = config.get("num_experts_per_tok") or 1
    groups, best = config.get("n_group") or 1, config.get("topk_group") or 1
    small_groups = min(groups, 2)
    small_best = max(1, best * small_groups // groups)
    experts = max(chosen, SHRUNK_EXPERTS)
    if groups > 1:
        least = max(ceil(chosen / small_best), ceil(SHRUNK_EXPERTS / small_groups))
        experts = small_groups * max(2, least)
        config["n_group"], config["topk_group"] = small_groups, small_best
    for name in _ints(config, _EXPERTS):
        config[name] = min(config[name], experts) if groups == 1 else experts
    _limit(config, "first_k_dense_replace", 1)  # one dense layer, then experts


def _shrink_width(config: dict[str, Any], hidden_names: list[str], head_names: list[str]) -> None:
    hidden, heads = config[hidden_names[0]], config[head_names[0]]
    kv_names = _ints(config, _KV_HEADS)
    kv_heads = config[kv_names[0]] if kv_names else heads
    small_heads, small_kv_heads = base.shrunk_heads(heads, kv_heads)
    head_dim = min(hidden // heads, SHRUNK_HEAD_DIM)
    small_hidden = small_heads * head_dim
    for name in _ints(config, _FFN):
        config[name] = base.shrunk_width(config[name], hidden, small_hidden)
    for name in _lists(config, _FFN):
        config[name] = [base.shrunk_width(width, hidden, small_hidden) for width in config[name]]
    for name in _lists(config, "num_attention_heads_per_layer"):
        config[name] = [small_heads] * len(config[name])
    config.update(dict.fromkeys(hidden_names, small_hidden))
    config.update(dict.fromkeys(head_names, small_heads))
    config.update(dict.fromkeys(kv_names, small_kv_heads))
    config.update(dict.fromkeys(_ints(config, _HEAD_DIM), head_dim))
    _limit(config, f"{_LATENT} rotary_dim", head_dim)
    # multi-head latent attention: the rotary part is what is rotated
    if "qk_rope_head_dim" in config and _ints(config, "head_dim"):
        config["head_dim"] = config["qk_rope_head_dim"]
    if _ints(config, "qk_head_dim"):
        config["qk_head_dim"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    # Mamba 2: the heads share the expanded width
    if len(_ints(config, "expand head_dim")) == 2:
        config["head_dim"] = small_hidden * config["expand"] // small_heads
    if len(_ints(config, "mamba_expand mamba_n_heads mamba_d_head")) == 3:
        config["mamba_n_heads"] = small_heads
        config["mamba_d_head"] = small_hidden * config["mamba_expand"] // small_heads
    _reset_rope(config)


def _shrink_layers(config: dict[str, Any]) -> None:
    layers = [config[name] for name in _ints(config, _LAYERS)][:1]
    _limit(config, _LAYERS, SHRUNK_LAYERS)
    _limit(config, "num_kv_shared_layers", 0)
    for name, value in config.items():
        if (isinstance(value, list) and [len(value)] == layers) or (name in _OF_LAYERS and value):
            config[name] = value[:SHRUNK_LAYERS]
    if isinstance(by_layer := config.get("per_layer_config"), dict):
        kept = {key: value for key, value in by_layer.items() if int(key) < SHRUNK_LAYERS}
        config["per_layer_config"] = kept
    # GPT-Neo: [[kinds, repeats], ...], and its expansion
    if isinstance(config.get("attention_types"), list):
        groups = config["attention_types"]
        kinds = [kind for pattern, repeats in groups for kind in pattern * repeats][:SHRUNK_LAYERS]
        config["attention_types"], config["attention_layers"] = [[kinds, 1]], kinds


def _shrink_vocab(config: dict[str, Any]) -> None:
    if not _ints(config, "vocab_size"):
        return
    vocab = base.shrunk_vocab(config["vocab_size"])
    config |= dict.fromkeys(_ints(config, _VOCABULARIES), vocab)
    for name in [name for name in config if name.endswith("_token_id")]:
        if isinstance(value := config[name], int):
            config[name] = min(value, vocab - 1)
        elif isinstance(value, list):
            config[name] = [min(token, vocab - 1) for token in value]


def _silence(config: dict[str, Any]) -> None:
    for name, value in config.items():
        if any(word in name for word in _NOISE) and type(value) in (int, float):
            config[name] = 0.0


def _reset_rope(config: dict[str, Any]) -> None:
    """Replace rotary settings that have a list of factors, one per channel of a head, by the
    default ones with the same theta, in place. The shrunk head has other channels.
    """
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.get(name)
        if isinstance(rope, dict) and any(isinstance(value, list) for value in rope.values()):
            theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
            config[name] = {"rope_type": "default", "rope_theta": theta}
