"""A Mixtral-like mixture of experts in plain PyTorch (Jiang et al. 2024, arXiv:2401.04088): a Llama
whose MLPs are top-k routed experts.

The experts are one op, `autopar::routed_experts`. Only the top k experts multiply a token, and no
token is dropped unless a capacity is set. An optional shared expert processes every token, and the
first layers may be dense (DeepSeekMoE, Dai et al. 2024, arXiv:2401.06066, section 3.2). Extra
modules may predict later tokens (DeepSeek-V3, arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import autopar_kernels.routed_experts  # noqa: F401 (registers the op)
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError

from .common import (
    INIT_STD,
    Embedding,
    Linear,
    causal_mask,
    check_fields,
    check_heads,
    rotary_tables,
    shifted_targets,
    token_loss,
)
from .llama import Attention, SwiGLU, check_attention_extras
from .mla import LatentAttention, MLADims


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """Dimensions of a mixture-of-experts model. `ffn` is the width of one expert; `router_aux_coef`
    scales the balance loss.

    `shared_ffn` is the width of the shared expert, 0 for none. With `capacity_factor` c > 0 each
    expert takes at most ceil(c * tokens * top_k / experts) choices, in token order; 0 means no
    limit. The first `first_dense` layers have a dense MLP of width `dense_ffn`. `expert_layers` says
    it for each layer, 1 with experts and 0 dense, and repeats: "01" is every second. `head_width`,
    `window` and `window_every` are as in LlamaConfig. `mla` replaces grouped-query attention;
    `kv_heads` must then equal `heads`. `mtp` modules in sequence predict the token after the next,
    and so on; their mean loss is weighted by `mtp_coef`.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    experts: int = 8
    top_k: int = 2
    max_seq: int = 4096
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    router_aux_coef: float = 0.01  # alpha of Fedus et al. 2021 (arXiv:2101.03961), section 2.2
    tie_embeddings: bool = False
    shared_ffn: int = 0
    capacity_factor: float = 0.0
    first_dense: int = 0
    expert_layers: str = ""
    dense_ffn: int = 0
    head_width: int | None = None
    window: int = 0
    window_every: int = 1
    mla: MLADims | None = None
    mtp: int = 0
    # lambda of DeepSeek-V3 for its first 10T tokens (arXiv:2412.19437, section 4.2)
    mtp_coef: float = 0.3

    def __post_init__(self) -> None:
        check_fields("moe", self, "vocab hidden layers heads kv_heads ffn experts top_k max_seq")
        check_attention_extras("moe", self.head_width, self.window, self.window_every)
        sizes = self.hidden, self.heads, self.kv_heads
        head_dim = self.mla.query_dim if self.mla else self.head_width
        check_heads("moe", *sizes, even_head_dim=self.mla is None, head_dim=head_dim)
        if self.mla is not None and self.kv_heads != self.heads:
            raise AutoparError(
                f"moe: latent attention has a key and value for each head: kv_heads={self.kv_heads} must be {self.heads}."
            )
        if not 0 <= self.first_dense < self.layers:
            raise AutoparError(
                f"moe: first_dense={self.first_dense} must be at least 0 and below layers={self.layers}."
            )
        if self.expert_layers and (self.first_dense or set(self.expert_layers) - {"0", "1"}):
            raise AutoparError(
                f"moe: expert_layers={self.expert_layers!r} must be of 0 and 1, such as '01', without first_dense"
            )
        if self.first_dense or self.dense_ffn or "0" in self.expert_layers:
            check_fields("moe", self, "dense_ffn")
        if self.top_k > self.experts:
            raise AutoparError(
                f"moe: top_k={self.top_k} exceeds experts={self.experts}; the largest that works is {self.experts}."
            )
        if self.router_aux_coef < 0:
            raise AutoparError(f"moe: router_aux_coef={self.router_aux_coef} must not be negative.")
        for name in ("shared_ffn", "mtp"):
            if getattr(self, name):
                check_fields("moe", self, name)
        if not 0 <= self.capacity_factor < float("inf"):
            raise AutoparError(
                f"moe: capacity_factor={self.capacity_factor} must be 0 (nothing is dropped) or a positive number."
            )

    def is_dense(self, layer: int) -> bool:
        """Whether the layer with this index has a dense MLP instead of experts."""
        if self.expert_layers:
            return self.expert_layers[layer % len(self.expert_layers)] == "0"
        return layer < self.first_dense

    @property
    def head_dim(self) -> int:
        """Channels of one head's query: those of `mla` if set, else `head_width`, else hidden /
        heads.
        """
        return self.mla.query_dim if self.mla else self.head_width or self.hidden // self.heads

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that carry rotary positions: with `mla` a part of the head, else all."""
        return self.mla.rotary_dim if self.mla else self.head_dim

    def module(self) -> MoE:
        """A new `MoE` with these dimensions and random weights, on torch's default device."""
        return MoE(self)


class Experts(nn.Module):
    """A module: the weights of SwiGLU experts, stacked into one tensor for gate and up and one for
    down.
    """

    def __init__(self, experts: int, hidden: int, ffn: int, capacity_factor: float = 0.0) -> None:
        super().__init__()
        self.capacity_factor = float(capacity_factor)
        # gate's rows, then up's
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * ffn, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, ffn))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill all weights from N(0, INIT_STD), in place."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.normal_(weight, std=INIT_STD)

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """For each token of x (t, h), the sum of its k experts' results, weighted: (t, h). `index`
        (t, k) has the chosen experts and `weights` (t, k) their routing weights. Choices beyond an
        expert's capacity add nothing.
        """
        return torch.ops.autopar.routed_experts(
            x,
            index,
            weights,
            up=self.gate_up_proj,
            up_bias=None,
            down=self.down_proj,
            down_bias=None,
            activation="gated:silu",
            transposed=False,
            capacity_factor=self.capacity_factor,
        )


class RoutedMLP(nn.Module):
    """A module: a top-k router, experts, and the shared expert if there is one.

    The weights of the chosen experts are renormalized to sum to 1 (Mixtral, section 2.1). The
    balance loss is Switch Transformer's eq. 4 extended to k choices: e * sum_i f_i * P_i. f_i is
    expert i's share of all choices, and P_i its mean router probability. It is 1 at perfect
    balance. It runs over all tokens of the batch and is not linear in the batch.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = Linear(config.hidden, config.experts)
        self.experts = Experts(config.experts, config.hidden, config.ffn, config.capacity_factor)
        self.shared = SwiGLU(config.hidden, config.shared_ffn) if config.shared_ffn else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(b, s, h) -> (result (b, s, h), balance loss (scalar))."""
        batch, seq, hidden = x.shape
        tokens = x.reshape(batch * seq, hidden)
        logits = self.router(tokens)
        if logits.dtype in (torch.float16, torch.bfloat16):
            logits = logits.float()
        probabilities = logits.softmax(dim=1)
        chosen, index = probabilities.topk(self.top_k, dim=1)
        chosen = chosen / chosen.sum(dim=1, keepdim=True)
        share = torch.zeros_like(probabilities).scatter(1, index, 1.0 / self.top_k).mean(dim=0)
        balance = probabilities.shape[1] * (share * probabilities.mean(dim=0)).sum()
        mixed = self.experts(tokens, index, chosen.to(tokens.dtype)).view(batch, seq, hidden)
        return (mixed if self.shared is None else mixed + self.shared(x)), balance


class MoEBlock(nn.Module):
    """A module: one layer, attention and then routed experts; a dense MLP instead if `dense`."""

    def __init__(self, config: MoEConfig, dense: bool = False) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        sizes, mla = (config.hidden, config.heads), config.mla
        self.attention: nn.Module = (
            Attention(*sizes, config.kv_heads, config.head_dim)
            if mla is None
            else LatentAttention(*sizes, mla, config.norm_eps)
        )
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.dense = dense
        self.mlp = SwiGLU(config.hidden, config.dense_ffn) if dense else RoutedMLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x + attention(norm(x)), then x + mlp(norm(x)): (b, s, h) -> ((b, s, h), balance loss
        (scalar, or None if dense)). cos and sin are rotary tables; `visible` (s, s) is True where a
        query sees a key; None is causal.
        """
        x = x + self.attention(self.attention_norm(x), cos, sin, visible)
        found = self.mlp(self.mlp_norm(x))
        mixed, balance = (found, None) if self.dense else found
        return x + mixed, balance


class LaterToken(nn.Module):
    """One module of multi-token prediction (DeepSeek-V3, section 2.2, equations 21-23). It predicts
    one token later than `x` does.

    It normalizes two inputs and projects them to one: the previous module's state at the previous
    position, and the embedding of the token that `x` predicts. One layer follows. Positions are
    those of the embedded token, so its prediction has the targets of the main model. The first
    position has zeros as the previous state.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.state_norm, self.token_norm, self.norm = (
            nn.RMSNorm(config.hidden, eps=config.norm_eps) for _ in range(3)
        )
        self.proj = Linear(2 * config.hidden, config.hidden)
        self.layer = MoEBlock(config)

    def forward(
        self, x: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor, visible: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """x (previous module's state) and embedded (tokens), (b, s, h) each -> (new state (b, s,
        h), balance loss (scalar)). cos and sin are rotary tables; `visible` (s, s) is True where a
        query sees a key; None is causal.
        """
        earlier = F.pad(x, (0, 0, 1, 0))[:, :-1]
        both = torch.cat((self.state_norm(earlier), self.token_norm(embedded)), dim=2)
        return self.layer(self.proj(both), cos, sin, visible)


class MoE(nn.Module):
    """A module: a language model with routed experts, with random weights.

    The loss is the mean cross-entropy, plus `mtp_coef` times the mean cross-entropy of the modules
    that predict later tokens, plus `router_aux_coef` times the sum of the layers' balance losses.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(
            MoEBlock(config, dense=config.is_dense(index)) for index in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.head = Linear(config.hidden, config.vocab)
        self.later = nn.ModuleList(LaterToken(config) for _ in range(config.mtp))
        if config.tie_embeddings:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """input_ids (b, s) int64 -> logits (b, s, v). With labels (b, s): the loss of the class's
        docstring, a scalar, where each position predicts the next label.
        """
        config = self.config
        x, balance = self.body(self.embed(input_ids))
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        targets = shifted_targets(labels)
        loss = token_loss(logits, targets)
        for module in self.later:
            assert isinstance(module, LaterToken)
            embedded = self.embed(input_ids)
            x, more = module(x, embedded, *self._positions(embedded))
            balance = balance + more
            later = token_loss(self.head(module.norm(x)), targets)
            loss = loss + later * (config.mtp_coef / config.mtp)
        return loss + config.router_aux_coef * balance if config.router_aux_coef else loss

    def body(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Run all layers on embedded tokens: (b, s, h) -> ((b, s, h), sum of the balance losses).
        The sum is 0.0 if no layer has one. No final norm.
        """
        cos, sin, visible = self._positions(x)
        balance: Tensor | float = 0.0
        for index, layer in enumerate(self.layers):
            sees = visible if index % self.config.window_every == 0 else None
            x, layer_balance = layer(x, cos, sin, sees)
            balance = balance if layer_balance is None else balance + layer_balance
        return x, balance

    def _positions(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """(cos, sin, mask): rotary tables (s, rotary dim) for the sequence of x (b, s, h), and the
        mask (s, s) for layers with a window. The mask is None without windows.
        """
        config, seq = self.config, x.shape[1]
        tables = rotary_tables(seq, config.rotary_dim, config.rope_theta, like=x)
        return *tables, causal_mask(seq, config.window, like=x) if config.window else None
