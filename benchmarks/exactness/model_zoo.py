"""Tiny models of every family of the matrix, as data: what `model_matrix.py` and the tests
parallelize.

Sizes are small, so that a cell takes seconds, and fit every mesh of four devices: 8 heads, 8
experts, a sequence of 16. Matrices are larger than the parameters that are rightly kept whole
(router gates, norms). Each family keeps its special properties. Examples are fewer key heads than
tp=4 (kv=2), windows shorter than the sequence, tied and untied heads, vocabularies that four do not
divide (99), and low-rank projections. Dropout is off, since it draws other numbers on shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.errors import AutoparError
from autopar.models import parse_model
from autopar.models.base import ModelSpec
from autopar.models.hf import HFSpec

SEQ, HIDDEN, LAYERS = 16, 64, 2
"""Sequence length, hidden size and layers of all models. Encoder and decoder have LAYERS layers
each, unless another depth is asked for.
"""

_WIDTH = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 8}
_TOKENS = {
    "vocab_size": 96,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_LLAMA = {**_WIDTH, **_TOKENS, "intermediate_size": 128, "num_key_value_heads": 2, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": False}
_BERT_LIKE = {
    "intermediate_size": 256,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_DEPTH = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers")
_BIGRAM = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}

CONFIGS: dict[str, dict[str, Any] | str] = {
    "llama": {"model_type": "llama", **_LLAMA},
    "mistral": {"model_type": "mistral", **_LLAMA, "num_key_value_heads": 4, "sliding_window": 6},
    "qwen3": {
        "model_type": "qwen3",
        **_LLAMA,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "model_type": "gemma2",
        **_LLAMA,
        "num_key_value_heads": 4,
        "sliding_window": 6,
        "query_pre_attn_scalar": 8,
        "attention_dropout": 0.0,
    },
    "phi3": {
        "model_type": "phi3",
        **_LLAMA,
        "num_key_value_heads": 4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 8,
        "n_positions": 32,
        "vocab_size": 99,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        **_BIGRAM,
    },
    "gpt_neox": {
        "model_type": "gpt_neox",
        **_WIDTH,
        **_TOKENS,
        "vocab_size": 99,
        "intermediate_size": 256,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "gpt_neo": {
        "model_type": "gpt_neo",
        "hidden_size": HIDDEN,
        "num_layers": LAYERS,
        "num_heads": 8,
        "vocab_size": 99,
        "window_size": 6,
        "max_position_embeddings": 32,
        "attention_types": [[["global", "local"], 1]],
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        **_BIGRAM,
    },
    "opt": {
        "model_type": "opt",
        **_WIDTH,
        **_TOKENS,
        "word_embed_proj_dim": HIDDEN,
        "ffn_dim": 256,
        "dropout": 0.0,
        "pad_token_id": 2,
    },
    "bloom": {
        "model_type": "bloom",
        "hidden_size": HIDDEN,
        "n_layer": LAYERS,
        "n_head": 8,
        "vocab_size": 96,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **_BIGRAM,
    },
    "falcon": {
        "model_type": "falcon",
        **_WIDTH,
        **_TOKENS,
        "num_kv_heads": 4,
        "new_decoder_architecture": True,
        "alibi": False,
        "ffn_hidden_size": 256,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "mixtral": {
        "model_type": "mixtral",
        **_LLAMA,
        **_EXPERTS,
        "intermediate_size": 32,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
    },
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **_LLAMA,
        **_EXPERTS,
        "num_key_value_heads": 4,
        "num_experts": 8,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **_WIDTH,
        **_TOKENS,
        "num_key_value_heads": 8,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        **_LLAMA,
        **_EXPERTS,
        "intermediate_size": 32,
        "num_key_value_heads": 4,
        "num_local_experts": 8,
        "sliding_window": 6,
    },
    "bert": {
        "model_type": "bert",
        **_WIDTH,
        **_BERT_LIKE,
        "vocab_size": 96,
        "max_position_embeddings": 32,
        "pad_token_id": 0,
    },
    "vit": {
        "model_type": "vit",
        **_WIDTH,
        **_BERT_LIKE,
        "image_size": 16,
        "patch_size": 4,
        "num_channels": 3,
        "num_labels": 96,
    },
    "t5": {
        "model_type": "t5",
        "d_model": HIDDEN,
        "d_kv": 8,
        "num_heads": 8,
        "d_ff": 256,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "vocab_size": 96,
        "relative_attention_num_buckets": 8,
        "dropout_rate": 0.0,
        "decoder_start_token_id": 0,
        "pad_token_id": 0,
        "eos_token_id": 1,
    },
    "mamba": {
        "model_type": "mamba",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "state_size": 8,
        "vocab_size": 96,
        **_BIGRAM,
    },
    "autopar-gpt": "gpt:layers=2,hidden=64,heads=8,vocab=99,seq=32",
    "autopar-llama": "llama:layers=2,hidden=64,heads=8,kv_heads=2,ffn=128,vocab=96,seq=32",
    "autopar-moe": "moe:layers=2,hidden=64,heads=8,kv_heads=4,ffn=32,vocab=96,seq=32,experts=8,top_k=2",
}
"""Name -> the contents of a config.json, or the text that `parse_model` reads."""

EXPERTS = {"mixtral", "qwen2_moe", "deepseek_v3", "gpt_oss", "autopar-moe"}
"""Models with routed experts, which may have a mesh with ep."""

SHORT = {"mamba": 8}
"""Sequence lengths other than SEQ: mamba's recurrence is unrolled, token by token, in the captured graph."""

NO_CONTEXT_PARALLELISM = {
    "mamba": "its recurrence runs over the sequence, token by token: there is no attention to distribute"
}
"""Models without cells for cp, and why."""

RATIO_EXEMPT = {
    "mamba": "it is a model for correctness: the recurrence is no attention and no matrix product that has a strategy"
}
"""Models that must be exact but may be replicated, and why."""


def deepened(config: dict[str, Any] | str, layers: int) -> dict[str, Any] | str:
    """A config of CONFIGS changed to `layers` layers. A model with encoder and decoder gets half of
    them on each side.
    """
    if isinstance(config, str):
        return config.replace(f"layers={LAYERS}", f"layers={layers}")
    sides = 2 if "num_decoder_layers" in config else 1
    return config | {key: layers // sides for key in config if key in _DEPTH}


@dataclass(frozen=True, slots=True)
class ZooModel:
    """One model of the matrix: its spec, its sequence length, and whether it routes tokens to experts."""

    name: str
    spec: ModelSpec
    seq: int
    experts: bool

    @classmethod
    def of(cls, name: str, layers: int = LAYERS) -> ZooModel:
        """The model called `name` in CONFIGS, `layers` deep (on both sides together, if it has two).  AutoparError for another name."""
        if name not in CONFIGS:
            raise AutoparError(f"no model {name!r} in the zoo; it has {', '.join(CONFIGS)}")
        config = CONFIGS[name]
        if layers != LAYERS:
            config = deepened(config, layers)
        spec = parse_model(config) if isinstance(config, str) else HFSpec.from_dict(name, config)
        return cls(name, spec, SHORT.get(name, SEQ), name in EXPERTS)

    def can_have(self, pins: dict[str, int]) -> bool:
        """Whether a mesh suits this model: ep needs experts, and cp needs attention."""
        return (self.experts or pins.get("ep", 1) == 1) and (
            self.name not in NO_CONTEXT_PARALLELISM or pins.get("cp", 1) == 1
        )
