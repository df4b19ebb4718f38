"""Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023, arXiv:2302.13971, 2307.09288).

Numerically equal to transformers' LlamaForCausalLM with the same weights (tests/models/test_llama_matches_hf.py), except that
Llama 3.1's rescaling of long-context rotary frequencies is left out: it changes no shape and no cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from .common import (
    Embedding,
    Linear,
    causal_mask,
    check_heads,
    check_positive,
    rotary_tables,
    rotate,
    shifted_loss,
)


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Dimensions of a Llama model; `kv_heads` < `heads` is grouped-query attention.

    `head_width` of None makes heads of hidden / heads channels.  With `window` > 0 a query of layers 0, `window_every`, 2 `window_every`
    ... sees that many keys at most, itself included; other layers see all.
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

    def __post_init__(self) -> None:
        sizes = ("vocab", "hidden", "layers", "heads", "kv_heads", "ffn", "max_seq")
        check_positive("llama", **{key: getattr(self, key) for key in sizes})
        check_attention_extras("llama", self.head_width, self.window, self.window_every)
        check_heads(
            "llama",
            self.hidden,
            self.heads,
            self.kv_heads,
            even_head_dim=True,
            head_dim=self.head_width,
        )

    @property
    def head_dim(self) -> int:
        return self.head_width or self.hidden // self.heads

    def module(self) -> Llama:
        return Llama(self)


def check_attention_extras(
    model: str, head_width: int | None, window: int, window_every: int
) -> None:
    """Raise AutoparError unless a given head width, a given window and its period are integers >= 1."""
    if head_width is not None:
        check_positive(model, head_width=head_width)
    if window:
        check_positive(model, window=window)
    check_positive(model, window_every=window_every)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: (b, s, h) -> (b, s, h).

    `visible` (s, s), True where a query sees a key, takes the place of the causal mask.
    """

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim or hidden // heads
        self.q_proj = Linear(hidden, heads * self.head_dim)
        self.k_proj = Linear(hidden, kv_heads * self.head_dim)
        self.v_proj = Linear(hidden, kv_heads * self.head_dim)
        self.o_proj = Linear(heads * self.head_dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.kv_heads < self.heads
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None, enable_gqa=grouped
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, self.heads * self.head_dim))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): (b, s, h) -> (b, s, h)."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden, ffn)
        self.up_proj = Linear(hidden, ffn)
        self.down_proj = Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LlamaBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)); (b, s, h) -> (b, s, h)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config.hidden, config.heads, config.kv_heads, config.head_dim)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.mlp = SwiGLU(config.hidden, config.ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, visible)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Decoder-only language model: input_ids (b, s) int64 -> logits (b, s, v), or the mean loss (scalar) given labels (b, s)."""

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
        x = self.embed(input_ids)
        cos, sin = rotary_tables(
            input_ids.shape[1], self.config.head_dim, self.config.rope_theta, like=x
        )
        visible = (
            causal_mask(x.shape[1], self.config.window, like=x) if self.config.window else None
        )
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, visible if index % self.config.window_every == 0 else None)
        logits = self.head(self.norm(x))
        return logits if labels is None else shifted_loss(logits, labels)
