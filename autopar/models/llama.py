"""Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et
al. 2023, arXiv:2302.13971, 2307.09288).

It is numerically equal to transformers' LlamaForCausalLM with the same weights
(tests/models/test_llama_matches_hf.py). One exception is Llama 3.1's rescaling of rotary
frequencies for long contexts, which is left out: it changes no shape and no cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError, shown

from .common import (
    Embedding,
    Linear,
    causal_mask,
    check_fields,
    check_heads,
    check_positive,
    rotary_tables,
    rotate,
    shifted_loss,
)

_ACTIVATIONS = ("swiglu", "relu2")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of a Llama model; `kv_heads` < `heads` is grouped-query attention.

    `head_width=None` means a head dim of hidden / heads. With `window` > 0, a query sees at most
    that many keys, including itself, in layers 0, `window_every`, 2 `window_every`, and so on. In
    other layers it sees all. `activation="relu2"` is a feed-forward layer without a gate: squared
    ReLU between two products, as in Nemotron-4 (arXiv:2402.16819).
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    max_seq: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    head_width: int | None = None
    window: int = 0
    window_every: int = 1
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise AutoparError(
                f"llama: activation={shown(self.activation)} is not known; {', '.join(_ACTIVATIONS)} are."
            )
        check_fields("llama", self, "vocab hidden layers heads kv_heads ffn max_seq")
        check_attention_extras("llama", self.head_width, self.window, self.window_every)
        sizes = self.hidden, self.heads, self.kv_heads
        check_heads("llama", *sizes, even_head_dim=True, head_dim=self.head_width)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head: `head_width` if set, else hidden / heads."""
        return self.head_width or self.hidden // self.heads

    def module(self) -> Llama:
        """A new `Llama` with these dimensions and random weights, on torch's default device."""
        return Llama(self)


def check_attention_extras(
    model: str, head_width: int | None, window: int, window_every: int
) -> None:
    """Raise AutoparError unless `head_width` (if not None), `window` (if not 0) and `window_every`
    are integers >= 1. `model` begins the message.
    """
    if head_width is not None:
        check_positive(model, head_width=head_width)
    if window:
        check_positive(model, window=window)
    check_positive(model, window_every=window_every)


class Attention(nn.Module):
    """A module: causal grouped-query self-attention with rotary positions.

    `visible` (s, s), True where a query sees a key, replaces the causal mask.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or hidden // heads
        self.q_proj = Linear(hidden, heads * self.head_dim)
        self.k_proj = Linear(hidden, kv_heads * self.head_dim)
        self.v_proj = Linear(hidden, kv_heads * self.head_dim)
        self.o_proj = Linear(heads * self.head_dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Attention and its output projection: x (b, s, h) -> (b, s, h). cos and sin are rotary
        tables (s, d). `visible` (s, s) is True where a query sees a key; None is causal.
        """
        batch, seq, _ = x.shape
        projections = (
            (self.q_proj, self.heads),
            (self.k_proj, self.kv_heads),
            (self.v_proj, self.kv_heads),
        )
        q, k, v = (
            projection(x).view(batch, seq, heads, self.head_dim).transpose(1, 2)
            for projection, heads in projections
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.kv_heads < self.heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=grouped
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


class SwiGLU(nn.Module):
    """A module: a feed-forward layer with a SiLU gate, down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, ffn)
        self.up_proj = Linear(hidden, ffn)
        self.down_proj = Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """down(silu(gate(x)) * up(x)): (b, s, h) -> (b, s, h)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SquaredReLU(nn.Module):
    """A module: a feed-forward layer without a gate, with a squared ReLU: down(relu(up(x))^2)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.up_proj = Linear(hidden, ffn)
        self.down_proj = Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """down(relu(up(x))^2): (b, s, h) -> (b, s, h)."""
        return self.down_proj(F.relu(self.up_proj(x)).square())


class LlamaBlock(nn.Module):
    """A module: one Llama layer, attention and a feed-forward layer, each after a norm and with a
    residual.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.kv_heads, config.head_dim)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        mlp = SwiGLU if config.activation == "swiglu" else SquaredReLU
        self.mlp = mlp(config.hidden, config.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """x + attention(norm(x)), then x + mlp(norm(x)): (b, s, h) -> (b, s, h). cos and sin are
        rotary tables (s, d). `visible` (s, s) is True where a query sees a key; None is causal.
        """
        x = x + self.attention(self.attention_norm(x), cos, sin, visible)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """A module: a decoder-only Llama language model, with random weights."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = Linear(config.hidden, config.vocab)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """input_ids (b, s) int64 -> logits (b, s, v). With labels (b, s): the mean cross-entropy of
        each position against the next label, a scalar.
        """
        config, x = self.config, self.embed(input_ids)
        cos, sin = rotary_tables(input_ids.shape[1], config.head_dim, config.rope_theta, like=x)
        visible = causal_mask(x.shape[1], config.window, like=x) if config.window else None
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, visible if index % config.window_every == 0 else None)
        logits = self.head(self.norm(x))
        return logits if labels is None else shifted_loss(logits, labels)
