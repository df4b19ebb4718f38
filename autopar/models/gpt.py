"""GPT-2/GPT-3 in plain PyTorch (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165):
pre-norm, learned positions, GELU.

Options give related models: ALiBi or no positions (BLOOM), attention and MLP in parallel (GPT-J),
sliding windows, and squared ReLU (So et al. 2021, arXiv:2109.08668). Attention can also run
unfused, as before fused kernels: scores and probabilities are then written to memory.

The fused qkv weight has rows in the order (n, 3, d), as in Megatron-LM, so that a shard of whole
heads is contiguous. Hugging Face's GPT-2 has (3, n, d).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError, shown

from .common import (
    INIT_STD,
    Embedding,
    Linear,
    alibi_bias,
    causal_mask,
    check_fields,
    check_heads,
    shifted_loss,
)

_POSITIONS = ("learned", "alibi", "none")
_ACTIVATIONS = ("gelu", "relu2")


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Dimensions of a GPT model. `ffn=None` means 4 * hidden; `max_seq` is the number of learned
    positions.

    `positions` is one of `_POSITIONS`, `activation` one of `_ACTIVATIONS`. With `window` > 0 a query
    sees at most that many keys, including itself. A `parallel_block` is x + attention(norm(x)) +
    mlp(norm(x)), with one norm. `fused_attention=False` computes attention as two products and a
    softmax.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int | None = None
    max_seq: int = 2048
    dropout: float = 0.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True
    positions: str = "learned"
    parallel_block: bool = False
    window: int = 0
    activation: str = "gelu"
    fused_attention: bool = True

    def __post_init__(self) -> None:
        if self.ffn is None:
            object.__setattr__(self, "ffn", 4 * self.hidden)
        check_fields("gpt", self, "vocab hidden layers heads ffn max_seq")
        check_heads("gpt", self.hidden, self.heads)
        if not 0.0 <= self.dropout < 1.0:
            raise AutoparError(f"gpt: dropout={self.dropout} must be at least 0 and below 1.")
        for name, known in (("positions", _POSITIONS), ("activation", _ACTIVATIONS)):
            if getattr(self, name) not in known:
                raise AutoparError(
                    f"gpt: {name}={shown(getattr(self, name))} is not known; {', '.join(known)} are."
                )
        if self.window:
            check_fields("gpt", self, "window")

    @property
    def masked(self) -> bool:
        """Whether attention needs an explicit mask: with ALiBi, a window, or unfused attention. The
        fused op has the plain causal mask built in.
        """
        return self.positions == "alibi" or self.window > 0 or not self.fused_attention

    @property
    def head_dim(self) -> int:
        """Channels of one attention head: hidden / heads."""
        return self.hidden // self.heads

    def module(self) -> GPT:
        """A new `GPT` with these dimensions and random weights, on torch's default device."""
        return GPT(self)


def _dropout(probability: float) -> nn.Module:
    # no dropout op in the graph unless asked for
    return nn.Dropout(probability) if probability else nn.Identity()


def _residual(config: GPTConfig, width: int) -> Linear:
    """A new linear layer from `width` to hidden channels with bias, whose result is added to the
    residual stream. The std of its weights is `INIT_STD` / sqrt(2 * layers).
    """
    return Linear(width, config.hidden, bias=True, std=INIT_STD / sqrt(2 * config.layers))


class GPTAttention(nn.Module):
    """A module: causal multi-head self-attention with one fused projection to queries, keys and
    values.

    `visible` (s, s) is True where a query sees a key. `bias` (n, 1, s) is added to the scores;
    fused attention adds it only if `visible` is given. Unfused attention is causal only by
    `visible`.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = config.heads, config.head_dim, config.dropout
        self.fused = config.fused_attention
        self.qkv = Linear(config.hidden, 3 * config.hidden, bias=True)
        self.proj = _residual(config, config.hidden)
        self.score_dropout = _dropout(0.0 if self.fused else config.dropout)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Attention and its output projection: x (batch, seq, hidden) -> the same shape.

        `visible` (seq, seq) is True where a query sees a key. If it is None, fused attention is
        causal and ignores `bias`; unfused attention masks nothing. `bias` (heads, 1, seq) is added
        to the scores.
        """
        batch, seq, hidden = x.shape
        qkv = self.qkv(x).view(batch, seq, self.heads, 3, self.head_dim)
        q, k, v = (qkv.select(3, index).transpose(1, 2) for index in range(3))
        if not self.fused:
            mixed = self._written_out(q, k, v, visible, bias)
        else:
            mask = visible
            if visible is not None and bias is not None:
                mask = bias.masked_fill(~visible, float("-inf"))
            dropout_p = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, dropout_p=dropout_p
            )
        return self.proj(mixed.transpose(1, 2).reshape(batch, seq, hidden))

    def _written_out(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        if bias is not None:
            scores = scores + bias
        if visible is not None:
            scores = scores.masked_fill(~visible, float("-inf"))
        return torch.matmul(self.score_dropout(scores.softmax(dim=3)), v)


class GPTMLP(nn.Module):
    """The feed-forward layer: GELU in GPT-2's tanh form, or squared ReLU, between two linear
    layers.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.squared_relu = config.activation == "relu2"
        width = config.ffn or 4 * config.hidden
        self.up, self.down = Linear(config.hidden, width, bias=True), _residual(config, width)

    def forward(self, x: Tensor) -> Tensor:
        """down(activation(up(x))): (b, s, h) -> (b, s, h)."""
        x = self.up(x)
        return self.down(F.relu(x).square() if self.squared_relu else F.gelu(x, approximate="tanh"))


class GPTBlock(nn.Module):
    """One layer: x + attention(norm(x)), then x + mlp(norm(x)). A parallel block adds both for the
    same norm(x).
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attention = GPTAttention(config)
        self.attention_dropout = _dropout(config.dropout)
        self.mlp_norm = None
        if not config.parallel_block:
            self.mlp_norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = GPTMLP(config)
        self.mlp_dropout = _dropout(config.dropout)

    def forward(
        self, x: Tensor, visible: Tensor | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """x (batch, seq, hidden) -> the same shape. `visible` and `bias` are those of
        `GPTAttention.forward`: where a query sees a key (seq, seq), and what is added to the
        attention scores (heads, 1, seq).
        """
        normed = self.attention_norm(x)
        x = x + self.attention_dropout(self.attention(normed, visible, bias))
        normed = normed if self.mlp_norm is None else self.mlp_norm(x)
        return x + self.mlp_dropout(self.mlp(normed))


class GPT(nn.Module):
    """A module: a decoder-only GPT language model, with random weights."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden)
        learned = config.positions == "learned"
        self.positions = Embedding(config.max_seq, config.hidden) if learned else None
        self.dropout = _dropout(config.dropout)
        self.blocks = nn.ModuleList(GPTBlock(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.head = Linear(config.hidden, config.vocab)
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """input_ids (b, s) int64 -> logits (b, s, v). With labels (b, s): the mean cross-entropy of
        each position against the next label, a scalar. Raises AutoparError if s exceeds the learned
        positions.
        """
        config, seq = self.config, input_ids.shape[1]
        if self.positions is not None and seq > config.max_seq:
            raise AutoparError(
                f"gpt: sequence length {seq} exceeds the {config.max_seq} learned positions; set max_seq={seq} (seq={seq} in text)."
            )
        x = self.embed(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(seq, device=input_ids.device))
        x = self.dropout(x)
        visible = causal_mask(seq, config.window, like=x) if config.masked else None
        bias = alibi_bias(config.heads, seq, like=x) if config.positions == "alibi" else None
        for block in self.blocks:
            x = block(x, visible, bias)
        logits = self.head(self.norm(x))
        return logits if labels is None else shifted_loss(logits, labels)
