"""The shape of a model, and the reference model of a shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.ir.model_shape import ModelShape
from autopar.models.base import ModelSpec, NativeSpec
from autopar.models.configs import NativeConfig
from autopar.models.gpt import GPTConfig
from autopar.models.hf import HFSpec
from autopar.models.llama import LlamaConfig
from autopar.models.mla import MLADims
from autopar.models.moe import MoEConfig


def shape_of_module(model: nn.Module) -> ModelShape:
    """The dimensions of a module that has a configuration; all 0 for another one."""
    config = getattr(model, "config", None)
    if isinstance(config, GPTConfig | LlamaConfig | MoEConfig):
        return _of_native(config)
    data = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    return _of_config(data) or ModelShape()


def shape_of_spec(spec: ModelSpec) -> ModelShape | None:
    """The dimensions of the model that a spec builds; None if the spec does not say them."""
    if isinstance(spec, NativeSpec):
        return _of_native(spec.config)
    if isinstance(spec, HFSpec):
        return _of_config(spec.config_dict)
    return None


def spec_of_shape(name: str, shape: ModelShape, seq: int) -> NativeSpec:
    """The spec of a reference model with these dimensions, for sequences of `seq` tokens. Raises
    AutoparError if the shape lacks any, or if no reference model has them.
    """
    return NativeSpec.of(name, config_of_shape(shape.complete(), seq))


def config_of_shape(
    shape: ModelShape,
    seq: int,
    vocab: int | None = None,
    flash: bool = True,
    dropout: float = 0.0,
    layers: int | None = None,
) -> NativeConfig:
    """The configuration of the reference model with these dimensions, all of which are known.
    `vocab` and `layers` replace those of the shape. Only gpt models have dropout, and attention as
    separate ops if not `flash`. Raises AutoparError for a gpt model with a window in some layers
    only.
    """
    layers = shape.layers if layers is None else layers
    common: dict[str, Any] = {
        "vocab": vocab or shape.vocab,
        "hidden": shape.hidden,
        "layers": layers,
        "heads": shape.heads,
        "max_seq": seq,
        "window": shape.window,
        "tie_embeddings": shape.tied,
    }
    if shape.family == "gpt":
        if shape.window_every > 1:
            raise AutoparError("gpt models have the same window in every layer")
        return GPTConfig(
            **common,
            ffn=shape.ffn,
            dropout=dropout,
            positions="none" if shape.positions == "rope" else shape.positions,
            parallel_block=shape.parallel_block,
            activation=shape.activation,
            fused_attention=flash,
        )
    attention: dict[str, Any] = {
        "kv_heads": shape.kv_heads,
        "head_width": None if shape.latent else shape.head_dim,
        "window_every": shape.window_every,
    }
    if shape.family == "llama":
        return LlamaConfig(**common, **attention, ffn=shape.ffn, activation=shape.activation)
    dense = min(shape.first_dense or _dense_layers(shape), layers - 1)
    return MoEConfig(
        **common,
        **attention,
        ffn=shape.moe_ffn,
        experts=shape.experts,
        top_k=shape.top_k,
        # a shared expert is as wide as a routed one
        shared_ffn=-(-shape.shared_ffn // shape.moe_ffn) * shape.moe_ffn,
        first_dense=0 if shape.expert_layers else dense,
        expert_layers=shape.expert_layers,
        dense_ffn=shape.ffn if dense else 0,
        mla=MLADims(*shape.latent) if shape.latent else None,
        mtp=shape.mtp,
        router_aux_coef=0.0,  # a few numbers a token, and its gathering of all layers would keep depths from being alike
    )


def _dense_layers(shape: ModelShape) -> int:
    """How many layers have no experts, where they alternate with others; one fewer if all have none."""
    whole = (shape.expert_layers * shape.layers)[: shape.layers]
    return min(whole.count("0"), max(shape.layers - 1, 0))


def _of_native(config: NativeConfig) -> ModelShape:
    moe = config if isinstance(config, MoEConfig) else None
    gpt = config if isinstance(config, GPTConfig) else None
    latent = moe.mla if moe else None
    return ModelShape(
        layers=config.layers,
        hidden=config.hidden,
        heads=config.heads,
        kv_heads=getattr(config, "kv_heads", config.heads),
        head_dim=config.head_dim,
        ffn=(moe.dense_ffn or moe.ffn) if moe else (config.ffn or 4 * config.hidden),
        vocab=config.vocab,
        experts=moe.experts if moe else 0,
        top_k=moe.top_k if moe else 0,
        moe_ffn=moe.ffn if moe else 0,
        shared_ffn=moe.shared_ffn if moe else 0,
        first_dense=moe.first_dense if moe else 0,
        expert_layers=moe.expert_layers if moe else "",
        mtp=moe.mtp if moe else 0,
        gated=gpt is None and getattr(config, "activation", "swiglu") == "swiglu",
        tied=config.tie_embeddings,
        positions=gpt.positions if gpt else "rope",
        latent=(
            latent.query_rank,
            latent.kv_rank,
            latent.plain_dim,
            latent.rotary_dim,
            latent.value_dim,
        )
        if latent
        else (),
    )


def _expert_layers(number: Callable[..., int], layers: int) -> str:
    """Which layers have experts, as `ModelShape.expert_layers`; '' if all have. `number(name)` is a
    field of a Hugging Face config with `layers` layers, 0 without it.
    """
    step = number("interleave_moe_layer_step", "decoder_sparse_step")  # Llama 4; Qwen
    period, offset = number("expert_layer_period"), number("expert_layer_offset")  # Jamba
    if step > 1:
        period, offset = step, step - 1
    if period <= 1:
        return ""
    return "".join("1" if layer == offset else "0" for layer in range(min(period, layers)))


def _of_config(config: Mapping[str, Any]) -> ModelShape | None:
    """The dimensions in a Hugging Face config, or None if it lacks any that all models have."""
    inner = config.get("text_config", config)

    def number(*names: str) -> int:
        return next((int(inner[n]) for n in names if isinstance(inner.get(n), int)), 0)

    layers, hidden = number("num_hidden_layers", "n_layer"), number("hidden_size", "n_embd")
    heads, vocab = number("num_attention_heads", "n_head"), number("vocab_size")
    if not (layers and hidden and heads and vocab):
        return None
    experts = number("num_local_experts", "num_experts", "n_routed_experts")
    width = number("moe_intermediate_size")
    ffn = number("intermediate_size", "n_inner") or 4 * hidden
    gated = str(inner.get("hidden_act", "gelu")) in ("silu", "swiglu", "gelu_pytorch_tanh")
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads") or heads,
        head_dim=number("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        experts=experts,
        top_k=number("num_experts_per_tok") if experts else 0,
        moe_ffn=(width or ffn) if experts else 0,
        shared_ffn=number("shared_expert_intermediate_size") or number("n_shared_experts") * width,
        first_dense=number("first_k_dense_replace"),
        expert_layers=_expert_layers(number, layers) if experts else "",
        gated=gated,
        tied=bool(inner.get("tie_word_embeddings", False)),
        positions="rope" if gated else "learned",
    )
