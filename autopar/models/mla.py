"""Multi-head latent attention of DeepSeek-V2 and V3 in plain PyTorch (arXiv:2405.04434, section 2.1; arXiv:2412.19437, section 2.1.1)."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError

from .common import Linear, check_positive, rotate


@dataclass(frozen=True, slots=True)
class MLADims:
    """Sizes of latent attention. The defaults are DeepSeek-V3's (arXiv:2412.19437, section 4.2).

    Queries come from a latent of `query_rank` channels, or with 0 from the input itself; keys and values come from one of `kv_rank`.
    A head's query and key have `plain_dim` channels without positions and `rotary_dim` with
    positions. Its value has `value_dim` channels.
    """

    query_rank: int = 1536
    kv_rank: int = 512
    plain_dim: int = 128
    rotary_dim: int = 64
    value_dim: int = 128

    def __post_init__(self) -> None:
        sizes = asdict(self)
        if self.query_rank == 0:
            del sizes["query_rank"]
        check_positive("latent attention", **sizes)
        if self.rotary_dim % 2:
            raise AutoparError(
                f"latent attention: rotary_dim={self.rotary_dim} must be even; use {self.rotary_dim + 1}."
            )

    @property
    def query_dim(self) -> int:
        """Channels of one head's query, and of one head's key."""
        return self.plain_dim + self.rotary_dim


class LatentAttention(nn.Module):
    """A module: causal self-attention whose keys and values are projected from a small vector
    (latent) of each token.

    The rotary part of the key is one head that all query heads share.
    """

    def __init__(self, hidden: int, heads: int, dims: MLADims, norm_eps: float) -> None:
        super().__init__()
        self.heads, self.dims = heads, dims
        if dims.query_rank:
            self.q_down = Linear(hidden, dims.query_rank)
            self.q_norm = nn.RMSNorm(dims.query_rank, eps=norm_eps)
        self.q_up = Linear(dims.query_rank or hidden, heads * dims.query_dim)
        self.kv_down = Linear(hidden, dims.kv_rank)
        self.k_rotary = Linear(hidden, dims.rotary_dim)
        self.kv_norm = nn.RMSNorm(dims.kv_rank, eps=norm_eps)
        self.k_up = Linear(dims.kv_rank, heads * dims.plain_dim)
        self.v_up = Linear(dims.kv_rank, heads * dims.value_dim)
        self.o_proj = Linear(heads * dims.value_dim, hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None) -> Tensor:
        """Attention and its output projection: x (b, s, h) -> (b, s, h). cos and sin are rotary
        tables (s, rotary_dim). `visible` (s, s) is True where a query sees a key; None is causal.
        """
        batch, seq, _ = x.shape
        dims, heads = self.dims, self.heads
        source = self.q_norm(self.q_down(x)) if dims.query_rank else x
        q = self.q_up(source)
        q = q.view(batch, seq, heads, dims.query_dim).transpose(1, 2)
        latent = self.kv_norm(self.kv_down(x))
        k_plain = self.k_up(latent).view(batch, seq, heads, dims.plain_dim).transpose(1, 2)
        v = self.v_up(latent).view(batch, seq, heads, dims.value_dim).transpose(1, 2)
        k_rotary = rotate(self.k_rotary(x).unsqueeze(1), cos, sin)
        k_rotary = k_rotary.expand(batch, heads, seq, dims.rotary_dim)
        q_plain, q_rotary = q.split((dims.plain_dim, dims.rotary_dim), dim=3)
        q = torch.cat((q_plain, rotate(q_rotary, cos, sin)), dim=3)
        k = torch.cat((k_plain, k_rotary), dim=3)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, is_causal=visible is None
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, heads * dims.value_dim))
