"""Networks of text from litgpt, x-transformers, transformers and peft, at small sizes.

Dropout is off: it draws other masks on one device than PyTorch does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.exactness.public_inputs import (
    CLASSES,
    SEQ,
    VOCAB,
    Batch,
    NextToken,
    Preference,
    PreferenceInTwoPasses,
    PublicModel,
    integers,
    packed,
    padded,
    pairs,
    tokens,
)

HIDDEN, LAYERS, HEADS = 32, 4, 4

# ----------------------------------------------------------------------------------------- litgpt

_LITGPT = {
    "pythia-14m": {},
    "Llama-3.2-1B": {"n_query_groups": 2},
    "Mistral-7B-v0.1": {"n_query_groups": 2},
    "Gemma-2-2b": {"n_query_groups": 2, "sliding_window_size": 6},
    "gemma-3-1b-it": {},
    "Qwen3-0.6B": {"n_query_groups": 2},
    "Qwen2.5-0.5B": {"n_query_groups": 2},
    "phi-2": {},
    "falcon-7b": {},
    "OLMo-1B-hf": {},
    "SmolLM2-135M": {"n_query_groups": 2},
    "stablelm-3b-4e1t": {},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "n_expert": 4},
    "Qwen3-30B-A3B": {"n_query_groups": 2, "n_expert": 4, "n_expert_per_token": 2},
}


def _litgpt(name: str, changes: dict[str, Any]) -> nn.Module:
    from litgpt.config import Config
    from litgpt.model import GPT

    config = Config.from_name(
        name,
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        head_size=HIDDEN // HEADS,
        intermediate_size=2 * HIDDEN,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
        block_size=SEQ,
        **changes,
    )
    return NextToken(GPT(config))


# --------------------------------------------------------------------------------- x-transformers

_X_DECODERS = {
    "plain": {},
    "rotary-rmsnorm-swiglu": {"rotary_pos_emb": True, "use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "alibi": {"alibi_pos_bias": True, "alibi_num_heads": HEADS // 2},
    "t5-bias": {"rel_pos_bias": True},
    "grouped-queries": {"attn_kv_heads": 2},
    "sandwich": {"sandwich_norm": True},
    "qk-norm": {"attn_qk_norm": True},
    "talking-heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True},
    "gated-values": {"attn_gate_values": True},
    "memory-keys": {"attn_num_mem_kv": 4},
}  # fmt: skip


def _x_decoder(changes: dict[str, Any]) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    layers = Decoder(
        dim=HIDDEN, depth=LAYERS, heads=HEADS, attn_dim_head=HIDDEN // HEADS, **changes
    )
    return NextToken(TransformerWrapper(num_tokens=VOCAB, max_seq_len=SEQ, attn_layers=layers))


# ----------------------------------------------------------------------------------- transformers

_TOKENS = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
_WIDTH = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
_LLAMA = {**_TOKENS, **_WIDTH, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64}
_LLAMA |= {"max_position_embeddings": 32, "attention_dropout": 0.0}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_GPT = {**_TOKENS, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32}
_GPT |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_BERT = {**_TOKENS, **_WIDTH, **_NO_DROPOUT, "intermediate_size": 64, "max_position_embeddings": 32}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_OF_BOTH = {**_TOKENS, "d_model": HIDDEN, "decoder_start_token_id": 0}
_BART = {**_OF_BOTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
         "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "max_position_embeddings": 32,
         "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "forced_eos_token_id": 1}  # fmt: skip
_T5 = {
    **_OF_BOTH,
    "d_kv": 8,
    "num_heads": HEADS,
    "d_ff": 64,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "dropout_rate": 0.0,
}

_DECODERS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 6},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma": _LLAMA,
    "gemma2": _LLAMA | {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "gemma3_text": _LLAMA | {"sliding_window": 6, "query_pre_attn_scalar": 8},
    "phi": _LLAMA | {"num_key_value_heads": 4, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "phi3": _LLAMA | {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "olmo2": _LLAMA,
    "granite": _LLAMA,
    "cohere": _LLAMA,
    "glm": _LLAMA,
    "starcoder2": _LLAMA | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "stablelm": _LLAMA | {"hidden_dropout": 0.0},
    "smollm3": _LLAMA,
    "gpt2": _GPT,
    "gptj": _GPT | {"rotary_dim": 4},
    "gpt_neox": _LLAMA | {"hidden_dropout": 0.0},
    "gpt_bigcode": _GPT,
    "opt": _TOKENS | _WIDTH | {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "max_position_embeddings": 32, "dropout": 0.0},
    "bloom": _TOKENS | {"hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "falcon": _TOKENS | _WIDTH | {"ffn_hidden_size": 64, "attention_dropout": 0.0, "alibi": False, "hidden_dropout": 0.0},
    "mamba": _TOKENS | {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 4},
    "mixtral": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "qwen2_moe": _LLAMA | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 32},
    "qwen3_moe": _LLAMA | _EXPERTS | {"num_experts": 4},
    "olmoe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "granitemoe": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "phimoe": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gpt_oss": _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32, "sliding_window": 6},
    "dbrx": _TOKENS | {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "max_seq_len": 32,
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2}},
    "deepseek_v3": _LLAMA | _EXPERTS | {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
                   "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
                   "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
}  # fmt: skip
_MASKED: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _BERT | {"max_position_embeddings": 40, "pad_token_id": 1},
    "electra": _BERT | {"embedding_size": HIDDEN},
    "albert": _BERT | {"embedding_size": 16},
    "distilbert": _TOKENS | {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 64, "dropout": 0.0,
                   "attention_dropout": 0.0, "max_position_embeddings": 32},
    "deberta-v2": _BERT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
    "esm": _BERT | {"position_embedding_type": "rotary", "token_dropout": True, "mask_token_id": 5},
    "modernbert": _BERT | {"global_attn_every_n_layers": 2, "local_attention": 6, "cls_token_id": 0, "sep_token_id": 1},
}  # fmt: skip
_BOTH: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "mt5": _T5,
    "bart": _BART,
    "mbart": _BART,
    "pegasus": _BART,
    "marian": _BART,
    "switch_transformers": _T5
    | {"num_experts": 4, "expert_capacity": 8, "router_jitter_noise": 0.0, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
}  # fmt: skip


def config_of(kind: str, values: dict[str, Any]) -> Any:
    """The configuration of transformers' model type `kind`, with these values."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **values)


def _hugging_face(auto: str, kind: str, values: dict[str, Any]) -> nn.Module:
    import transformers

    return getattr(transformers, auto).from_config(config_of(kind, values))


def _classified(rows: int) -> Batch:
    batch = padded(rows)
    return batch | {"labels": integers(CLASSES, rows)}


def _spans(rows: int) -> Batch:
    batch = padded(rows)
    del batch["labels"]
    starts = integers(SEQ // 4, rows)
    return batch | {"start_positions": starts, "end_positions": starts + integers(3, rows, seed=1)}


def _ordered(rows: int) -> Batch:
    return padded(rows) | {"sentence_order_label": integers(2, rows, seed=1)}


# ------------------------------------------------------------------------- low rank, preferences

_LORA = {
    "llama": ["q_proj", "v_proj"],
    "qwen3": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "gemma2": ["q_proj", "v_proj", "down_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "phi3": ["qkv_proj", "o_proj"],
    "gpt_neox": ["query_key_value"],
}


def _loha(kind: str, targets: list[str]) -> nn.Module:
    from peft import LoHaConfig, get_peft_model

    model = _hugging_face("AutoModelForCausalLM", kind, _DECODERS[kind])
    return get_peft_model(
        model, LoHaConfig(r=4, alpha=8, target_modules=targets, init_weights=False)
    )


def _lora(kind: str, targets: list[str], **options: Any) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    model = _hugging_face("AutoModelForCausalLM", kind, _DECODERS[kind])
    options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "init_lora_weights": False} | options
    fan_in_fan_out = kind == "gpt2"
    return get_peft_model(
        model,
        LoraConfig(
            target_modules=targets, fan_in_fan_out=fan_in_fan_out, task_type="CAUSAL_LM", **options
        ),
    )


def _preference(loss: type[Preference], kind: str) -> nn.Module:
    policy = _hugging_face("AutoModelForCausalLM", kind, _DECODERS[kind])
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.9)
    return loss(policy, reference)


def _text_models() -> dict[str, PublicModel]:
    found: dict[str, PublicModel] = {}

    def add(
        name: str, inputs: Callable[[int], Batch], build: Callable[..., nn.Module], *args: Any
    ) -> None:
        found[name] = PublicModel(partial(build, *args), inputs)

    for name, values in _LITGPT.items():
        add(f"litgpt {name}", tokens, _litgpt, name, values)
    for name, values in _X_DECODERS.items():
        add(f"x-transformers {name}", tokens, _x_decoder, values)
    for name, values in _DECODERS.items():
        add(f"transformers {name}", tokens if name == "mamba" else padded, _hugging_face, "AutoModelForCausalLM", name, values)  # fmt: skip
    for name in ("llama", "qwen3", "gemma2"):
        values = _DECODERS[name] | {"use_cache": False}
        add(f"transformers {name} packed", packed, _hugging_face, "AutoModelForCausalLM", name, values)  # fmt: skip
    add(
        "transformers llama packed with a cache",
        packed,
        _hugging_face,
        "AutoModelForCausalLM",
        "llama",
        _LLAMA,
    )
    for name, values in _MASKED.items():
        add(f"transformers {name}", padded, _hugging_face, "AutoModelForMaskedLM", name, values)
    for name in ("bert", "llama"):
        values = (_MASKED | _DECODERS)[name] | {"num_labels": CLASSES}
        add(f"transformers {name} classifier", _classified, _hugging_face, "AutoModelForSequenceClassification", name, values)  # fmt: skip
    for name, values in _BOTH.items():
        add(f"transformers {name}", padded, _hugging_face, "AutoModelForSeq2SeqLM", name, values)
    for task, auto, name, inputs in (
        ("pre-training", "AutoModelForPreTraining", "albert", _ordered),
        ("questions", "AutoModelForQuestionAnswering", "bart", _spans),
    ):
        values = (_MASKED | _BOTH)[name] | {"classifier_dropout_prob": 0.0}
        add(f"transformers {name} {task}", inputs, _hugging_face, auto, name, values)
    for name, targets in _LORA.items():
        add(f"peft LoRA {name}", padded, _lora, name, targets)
    found["peft DoRA llama"] = PublicModel(
        partial(_lora, "llama", ["q_proj", "v_proj"], use_dora=True), padded
    )
    add("peft LoHa llama", padded, _loha, "llama", ["q_proj", "v_proj", "up_proj"])
    for name in ("llama", "qwen3", "gpt2"):
        add(f"DPO {name}", pairs, _preference, Preference, name)
    add("DPO llama in two passes", pairs, _preference, PreferenceInTwoPasses, "llama")
    return found


TEXT_MODELS = _text_models()
"""Name -> model; the first word is the package, or the method of training."""
