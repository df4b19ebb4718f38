"""Builds the model of a measured run on the meta device, from the reference models of
`autopar.models`.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from torch import nn

from autopar.errors import AutoparError
from autopar.foreign.published.run import Dims, Run
from autopar.models.base import NativeSpec
from autopar.models.configs import NativeConfig
from autopar.models.gpt import GPTConfig
from autopar.models.llama import LlamaConfig
from autopar.models.mla import MLADims
from autopar.models.moe import MoEConfig


def model_of(run: Run, layers: int | None = None) -> nn.Module:
    """The model of a run with its true shapes, on the meta device in training mode, with fp32
    parameters and the padded vocabulary.

    `layers` shortens it; at least one routed layer remains. A `one_layer` run is a model of one
    layer with embedding and head.
    """
    return spec_of_run(run, layers).build("meta")


def spec_of_run(run: Run, layers: int | None = None) -> NativeSpec:
    """The spec of the model of a run; `layers` as for `model_of`. It builds the model, makes
    example inputs, and counts parameters and model FLOPs.
    """
    vocab, software = run.software.padded_vocab, run.software
    config = run_config(run.dims, vocab, software.flash, software.dropout, layers)
    return NativeSpec.of(run.id, config)


def run_config(
    dims: Dims,
    vocab: int | None = None,
    flash: bool = True,
    dropout: float = 0.0,
    layers: int | None = None,
) -> NativeConfig:
    """The reference model's configuration; `vocab` and `layers` replace those of `dims`. Only gpt
    models have dropout, and attention as separate ops if not `flash`. Raises AutoparError for a gpt
    model with a window in some layers only.
    """
    layers = dims.layers if layers is None else layers
    common: dict[str, Any] = {
        "vocab": vocab or dims.vocab,
        "hidden": dims.hidden,
        "layers": layers,
        "heads": dims.heads,
        "max_seq": dims.seq,
        "window": dims.window,
        "tie_embeddings": dims.tied_embeddings,
    }
    if dims.family == "gpt":
        if dims.window_every > 1:
            raise AutoparError("gpt models have the same window in every layer")
        return GPTConfig(
            **common,
            ffn=dims.ffn,
            dropout=dropout,
            positions="none" if dims.positions == "rope" else dims.positions,
            parallel_block=dims.parallel_block,
            activation=dims.activation,
            fused_attention=flash,
        )
    attention: dict[str, Any] = {
        "kv_heads": dims.kv_heads,
        "head_width": None if dims.mla else dims.head_dim,
        "window_every": dims.window_every,
    }
    if dims.family == "llama":
        return LlamaConfig(**common, **attention, ffn=dims.ffn, activation=dims.activation)
    first_dense = min(dims.first_dense, layers - 1)
    return MoEConfig(
        **common,
        **attention,
        ffn=dims.moe_ffn,
        experts=dims.experts,
        top_k=dims.top_k,
        shared_ffn=dims.shared_experts * dims.moe_ffn,
        first_dense=first_dense,
        dense_ffn=dims.ffn if first_dense else 0,
        mla=MLADims(**asdict(dims.mla)) if dims.mla else None,
        mtp=dims.mtp,
        router_aux_coef=0.0,  # a few numbers a token, and its gathering of all layers would keep depths from being alike
    )
