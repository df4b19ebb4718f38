"""`ModelSpec`, which describes a model before it is built, and the spec of the reference models in
this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

from .configs import NativeConfig
from .gpt import GPTConfig
from .mla import MLADims
from .moe import MoEConfig

SHRUNK_LAYERS = 2
SHRUNK_HEADS = 8
SHRUNK_HEAD_DIM = 16
SHRUNK_VOCAB = 512
SHRUNK_SEQ = 256
SHRUNK_EXPERTS = 4
SHRUNK_WINDOW = 8
_SHRUNK_TO = {
    "layers": SHRUNK_LAYERS,
    "max_seq": SHRUNK_SEQ,
    "window": SHRUNK_WINDOW,
    "first_dense": SHRUNK_LAYERS - 1,
    "mtp": 1,
}
SHRUNK_MLA = MLADims(query_rank=24, kv_rank=16, plain_dim=8, rotary_dim=8, value_dim=8)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A description of a model, from which the model can be built at any time on any device, with
    its published sizes.

    `max_seq` is the sequence length that the model was designed for. `vocab`, `max_seq` and
    `num_layers` are 0 if unknown, as for a `module:function`. Subclasses define how to build, feed
    and shrink their kind of model.
    """

    name: str
    vocab: int
    max_seq: int
    num_layers: int

    def _make(self) -> nn.Module:
        raise NotImplementedError

    def build(
        self, device: torch.device | str = "meta", dtype: torch.dtype | None = None
    ) -> nn.Module:
        """A new module in training mode, with floating-point parameters in `dtype` (None: fp32).

        On a device other than meta, its weights are random, from torch's current seed.
        """
        with torch.device(device):
            model = self._make()
        return (model if dtype is None else model.to(dtype=dtype)).train()

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """A dict with `input_ids` and `labels`: equal int64 tensors (batch, seq) that share no
        memory. They hold random tokens (seed 0), or only shapes on meta. Raises AutoparError for
        sizes below 1, or if the model has fewer learned positions than `seq`.
        """
        self._check_inputs(batch, seq)
        if torch.device(device).type == "meta":
            tokens = torch.empty(batch, seq, dtype=torch.int64, device="meta")
        else:
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(0, self.vocab, (batch, seq), generator=generator)
        return {"input_ids": tokens.to(device), "labels": tokens.clone().to(device)}

    def batch_dims(self) -> Mapping[str, int | None]:
        """By name of an example input, the dim that is the batch, where it is not dim 0 (None: the
        input has no rows). Here {}.
        """
        return {}

    def _check_inputs(self, batch: int, seq: int) -> None:
        if batch < 1 or seq < 1:
            raise AutoparError(f"{self.name}: batch={batch} and seq={seq} must be at least 1.")

    def shrunk(self) -> ModelSpec:
        """A spec of the same architecture without dropout, small enough to train a few steps on a
        CPU in seconds.
        """
        raise NotImplementedError

    def shallow(self) -> ModelSpec:
        """A spec of the same architecture with fewer layers, each kind of layer among them. The
        spec itself if it has no such (the default).

        More layers can be added `period` at a time, in the module list at `layers_path`.
        """
        return self

    @property
    def layers_path(self) -> str:
        """The dotted path, in the built model, of the module list that holds the layers; '' if
        unknown.
        """
        return ""

    @property
    def period(self) -> int:
        """The number of layers after which the structure of layers repeats; 1 if all are alike."""
        return 1

    def num_parameters(self) -> int:
        """Number of scalars in the parameters. Tied parameters count once."""
        return sum(parameter.numel() for parameter in self.build("meta").parameters())

    def model_flops_per_token(self, seq: int) -> float:
        """Model FLOPs of forward and backward per token of a sequence of `seq` tokens, the
        numerator of MFU: 6 N + 12 L H Q T.

        This is PaLM's convention (Chowdhery et al. 2022, arXiv:2204.02311, appendix B). It equals
        eq. 3 of Narayanan et al. 2021 (arXiv:2104.04473) without its recomputation. N is the number
        of weights that multiply a token: matrices of linear layers and of the language-model head
        (once more if tied), and top_k of the experts. Embedding look-ups, norms and biases do not
        count. The attention term (L layers, H heads of Q dims, T = `seq`) counts all T keys: it is
        *not* halved for causal masks. Recomputation, padding and experts that compute zeros are not
        model FLOPs.
        """
        layers, width = self._attention_size()
        weights = matmul_weights(self.build("meta"), self._expert_share()) + self._shared_weights()
        return 6.0 * weights + 12.0 * layers * width * seq

    def _attention_size(self) -> tuple[int, float]:
        """(number of layers with attention, heads * head dim), the L and H * Q of
        `model_flops_per_token`.
        """
        raise NotImplementedError

    def _expert_share(self) -> float:
        """The fraction of the routed experts that one token uses; 1.0 without experts."""
        return 1.0

    def _shared_weights(self) -> int:
        """Number of linear-layer weights that `model_flops_per_token` adds, because they multiply a
        token more than once. Here 0.
        """
        return 0


def matmul_weights(model: nn.Module, expert_share: float = 1.0) -> float:
    """Number of scalars in the weights of `model` that multiply each token: parameters with at
    least 2 dims that are neither embeddings nor biases. Those with 3 dims are stacked experts and
    count by `expert_share`.
    """
    total = 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and not name.endswith("bias"):
                total += parameter.numel() * (expert_share if parameter.dim() == 3 else 1.0)
    return total


def shrunk_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """(heads, kv heads) of the shrunk model. Unchanged if `heads` is at most 8.

    Otherwise at most 8 heads, in the given ratio to kv heads if that leaves at least 2 of these, so
    that both can be sharded; else (8, 2). With 1 kv head, (8, 1).
    """
    if heads <= SHRUNK_HEADS:
        return heads, kv_heads
    ratio = heads // kv_heads
    if kv_heads == 1:
        return SHRUNK_HEADS, 1
    if 2 * ratio > SHRUNK_HEADS:
        return SHRUNK_HEADS, 2
    small_kv_heads = SHRUNK_HEADS // ratio
    return small_kv_heads * ratio, small_kv_heads


def shrunk_vocab(vocab: int) -> int:
    """The size of the vocabulary reduced to at most 512, with its remainder modulo 8 kept, so that
    an uneven vocabulary stays uneven.
    """
    return min(vocab, SHRUNK_VOCAB - -vocab % 8)


def shrunk_width(width: int, hidden: int, small_hidden: int) -> int:
    """The feed-forward width for `small_hidden` in the ratio of `width` to `hidden`: a multiple of
    8, at least 8 and at most 8 times `small_hidden`.
    """
    return max(8, min(round(width / hidden * small_hidden / 8), small_hidden) * 8)


@dataclass(frozen=True, slots=True)
class NativeSpec(ModelSpec):
    """The spec of a reference model of this package. Create it with `NativeSpec.of`."""

    config: NativeConfig

    @classmethod
    def of(cls, name: str, config: NativeConfig) -> NativeSpec:
        """The spec of a reference model with the dimensions of `config`."""
        return cls(name, config.vocab, config.max_seq, config.layers, config)

    def _make(self) -> nn.Module:
        return self.config.module()

    def _check_inputs(self, batch: int, seq: int) -> None:
        ModelSpec._check_inputs(self, batch, seq)
        learned = isinstance(self.config, GPTConfig) and self.config.positions == "learned"
        if learned and seq > self.max_seq:
            raise AutoparError(
                f"{self.name}: seq={seq} exceeds its {self.max_seq} learned positions; use seq <= {self.max_seq}."
            )

    def shallow(self) -> NativeSpec:
        """A spec with fewer layers, or the spec itself if it has no more than these. It has the
        first layers that differ from later ones, two periods and a last layer, plus what keeps the
        remainder modulo `period`.

        `trace/deepen.py` compares the two periods.
        """
        config = self.config
        # the first balance loss joins no other
        different = getattr(config, "first_dense", 0) + bool(getattr(config, "router_aux_coef", 0))
        layers = different + 2 * self.period + 1
        layers += (config.layers - layers) % self.period
        if layers >= config.layers:
            return self
        return NativeSpec.of(self.name, replace(config, layers=layers))

    @property
    def layers_path(self) -> str:
        """The path of the module list that holds the layers: 'blocks' for GPT, else 'layers'."""
        return "blocks" if isinstance(self.config, GPTConfig) else "layers"

    @property
    def period(self) -> int:
        """The number of layers after which their structure repeats: `window_every` of the config if
        some layers have an attention window, and the length of `expert_layers`; else 1.
        """
        windows = getattr(self.config, "window_every", 1) if self.config.window else 1
        return lcm(windows, len(getattr(self.config, "expert_layers", "")) or 1)

    def _attention_size(self) -> tuple[int, float]:
        config = self.config
        layers = config.layers + getattr(config, "mtp", 0)
        # PaLM's Q is the mean of the dims of keys and values
        if isinstance(config, MoEConfig) and config.mla is not None:
            return layers, config.heads * (config.mla.query_dim + config.mla.value_dim) / 2
        return layers, config.heads * config.head_dim

    def _expert_share(self) -> float:
        config = self.config
        return config.top_k / config.experts if isinstance(config, MoEConfig) else 1.0

    def _shared_weights(self) -> int:
        return getattr(self.config, "mtp", 0) * self.config.vocab * self.config.hidden  # the head

    def shrunk(self) -> ModelSpec:
        """A spec of the same architecture without dropout and with small dimensions, its name
        marked '(shrunk)': at most 2 layers, 8 heads of 16 channels, 512 tokens in the vocabulary.
        """
        config = self.config
        kv_heads = getattr(config, "kv_heads", config.heads)
        heads, small_kv_heads = shrunk_heads(config.heads, kv_heads)
        head_dim = min(config.head_dim, SHRUNK_HEAD_DIM)
        hidden = heads * head_dim
        changes: dict[str, Any] = {"hidden": hidden, "heads": heads}
        changes["vocab"] = shrunk_vocab(config.vocab)
        for name, most in _SHRUNK_TO.items():
            if hasattr(config, name):
                changes[name] = min(getattr(config, name), most)
        for name in ("ffn", "shared_ffn", "dense_ffn"):
            if width := getattr(config, name, 0):
                changes[name] = shrunk_width(width, config.hidden, hidden)
        if isinstance(config, GPTConfig):
            changes["dropout"] = 0.0
        else:
            changes["kv_heads"] = small_kv_heads
            changes["head_width"] = config.head_width and head_dim
        if isinstance(config, MoEConfig):
            changes["experts"] = min(config.experts, max(config.top_k, SHRUNK_EXPERTS))
            if config.mla is not None:
                rank = min(config.mla.query_rank, SHRUNK_MLA.query_rank)
                changes["mla"] = replace(SHRUNK_MLA, query_rank=rank)
        return NativeSpec.of(f"{self.name} (shrunk)", replace(config, **changes))
