"""Diffusion transformers in plain PyTorch: DiT (Peebles and Xie, arXiv:2212.09748) and FLUX.1
(github.com/black-forest-labs/flux, model.py and modules/layers.py).

Both predict noise (or velocity) and return its mean squared error. Shape letters: b batch, s image
tokens, t text tokens, h hidden, n heads, d head dim, c channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import ModelSpec
from .common import Linear, check_fields, check_heads

TIME_CHANNELS = 256
"""Channels of the sine and cosine features of a time step, in both models."""


@dataclass(frozen=True, slots=True)
class DiTConfig:
    """Dimensions of a DiT: `size` x `size` latents with `channels` channels, in patches of `patch`
    x `patch`; `classes` labels and one for no label.
    """

    hidden: int
    layers: int
    heads: int
    patch: int = 2
    size: int = 32
    channels: int = 4
    classes: int = 1000

    def __post_init__(self) -> None:
        check_fields("dit", self, "hidden layers heads patch size channels classes")
        check_heads("dit", self.hidden, self.heads)

    def module(self) -> DiT:
        """A new `DiT` with these dimensions and random weights, on torch's default device."""
        return DiT(self)

    def inputs(self, batch: int) -> dict[str, tuple[int, ...] | int]:
        """By name of an input, its shape, or for integers of shape (batch,) their limit."""
        image = (batch, self.channels, self.size, self.size)
        return {"latents": image, "times": (batch,), "classes": self.classes, "noise": image}

    def shrunk(self) -> DiTConfig:
        """The same architecture with 2 layers of 8 heads of 16 channels, on latents of 8 x 8."""
        return replace(self, hidden=128, layers=min(self.layers, 2), heads=8, size=8, classes=10)


@dataclass(frozen=True, slots=True)
class FluxConfig:
    """Dimensions of a FLUX model: `double` blocks with a stream each for image and text, then
    `single` blocks with both in one. Images have `side` x `side` tokens of `channels` channels,
    texts `text` tokens of `text_width` channels and a summary of `summary` channels.
    """

    hidden: int = 3072
    double: int = 19
    single: int = 38
    heads: int = 24
    side: int = 64
    channels: int = 64
    text: int = 512
    text_width: int = 4096
    summary: int = 768
    guidance: bool = True

    def __post_init__(self) -> None:
        names = "hidden double single heads side channels text text_width summary"
        check_fields("flux", self, names)
        check_heads("flux", self.hidden, self.heads, even_head_dim=True)

    @property
    def layers(self) -> int:
        """Blocks of both kinds."""
        return self.double + self.single

    def module(self) -> Flux:
        """A new `Flux` with these dimensions and random weights, on torch's default device."""
        return Flux(self)

    def inputs(self, batch: int) -> dict[str, tuple[int, ...] | int]:
        """By name of an input, its shape."""
        image = (batch, self.side**2, self.channels)
        found: dict[str, tuple[int, ...] | int] = {
            "image": image,
            "text": (batch, self.text, self.text_width),
            "summary": (batch, self.summary),
            "times": (batch,),
            "velocity": image,
        }
        return found | ({"guidance": (batch,)} if self.guidance else {})

    def shrunk(self) -> FluxConfig:
        """The same architecture with one block of each kind, 8 heads of 16 channels, 16 image tokens
        and 8 text tokens.
        """
        small = {"hidden": 128, "double": 1, "single": 1, "heads": 8, "side": 4, "channels": 16}
        return replace(self, **small, text=8, text_width=64, summary=32)


def time_features(times: Tensor, channels: int = TIME_CHANNELS) -> Tensor:
    """Cosines and sines of time steps in [0, 1000]: (b,) -> (b, channels)."""
    half = channels // 2
    steps = torch.arange(half, device=times.device, dtype=torch.float32)
    angles = times.float().unsqueeze(1) * (10000.0 ** (-steps / half)).unsqueeze(0)
    return torch.cat((angles.cos(), angles.sin()), dim=1).to(times.dtype)


class _Embed(nn.Module):
    """A module: two linear layers with SiLU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.in_layer, self.out_layer = Linear(width, hidden, True), Linear(hidden, hidden, True)

    def forward(self, x: Tensor) -> Tensor:
        """(b, width) -> (b, h)."""
        return self.out_layer(F.silu(self.in_layer(x)))


class _Modulation(nn.Module):
    """A module: `parts` vectors (b, 1, h) from a condition."""

    def __init__(self, hidden: int, parts: int) -> None:
        super().__init__()
        self.parts, self.lin = parts, Linear(hidden, parts * hidden, True)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """(b, h) -> `parts` tensors (b, 1, h)."""
        return self.lin(F.silu(condition)).unsqueeze(1).chunk(self.parts, dim=2)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """The layer norm of x (b, s, h) without weights, scaled by 1 + `scale` and shifted."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + scale) + shift


def _heads(x: Tensor, heads: int) -> Tensor:
    """(b, s, h) -> (b, n, s, d)."""
    batch, seq, hidden = x.shape
    return x.view(batch, seq, heads, hidden // heads).transpose(1, 2)


def _joined(x: Tensor) -> Tensor:
    """(b, n, s, d) -> (b, s, h)."""
    batch, heads, seq, width = x.shape
    return x.transpose(1, 2).reshape(batch, seq, heads * width)


class _MLP(nn.Sequential):
    """A module: h -> 4 h -> h with GELU."""

    def __init__(self, hidden: int) -> None:
        super().__init__(
            Linear(hidden, 4 * hidden, True), nn.GELU("tanh"), Linear(4 * hidden, hidden, True)
        )


class DiTBlock(nn.Module):
    """A module: attention and MLP, both modulated by the condition (adaLN-Zero)."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden, config.heads
        self.modulation = _Modulation(hidden, 6)
        self.q, self.k, self.v, self.proj = (Linear(hidden, hidden, True) for _ in range(4))
        self.mlp = _MLP(hidden)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x (b, s, h), condition (b, h) -> (b, s, h)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = self.modulation(condition)
        y = _modulated(x, shift, scale)
        q, k, v = (_heads(part(y), self.heads) for part in (self.q, self.k, self.v))
        x = x + gate * self.proj(_joined(F.scaled_dot_product_attention(q, k, v)))
        return x + mlp_gate * self.mlp(_modulated(x, mlp_shift, mlp_scale))


class DiT(nn.Module):
    """A module: a DiT that predicts noise and its variance. Only the noise enters the loss."""

    def __init__(self, config: DiTConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        self.patches = nn.Conv2d(config.channels, hidden, config.patch, stride=config.patch)
        tokens = (config.size // config.patch) ** 2
        self.positions = nn.Parameter(torch.zeros(1, tokens, hidden), requires_grad=False)
        self.times = _Embed(TIME_CHANNELS, hidden)
        self.classes = nn.Embedding(config.classes + 1, hidden)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.layers))
        self.modulation = _Modulation(hidden, 2)
        self.out = Linear(hidden, config.patch**2 * 2 * config.channels, True)

    def forward(
        self, latents: Tensor, times: Tensor, classes: Tensor, noise: Tensor | None = None
    ) -> Tensor:
        """latents (b, c, size, size), times (b,), classes (b,) -> patches (b, s, p * p * 2 c). With
        noise (b, c, size, size): the mean squared error, a scalar.
        """
        config = self.config
        x = self.patches(latents).flatten(2).transpose(1, 2) + self.positions
        condition = self.times(time_features(times)) + self.classes(classes)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)
        found = self.out(_modulated(x, shift, scale))
        if noise is None:
            return found
        side, patch, channels = config.size // config.patch, config.patch, config.channels
        wanted = noise.view(-1, channels, side, patch, side, patch).permute(0, 2, 4, 3, 5, 1)
        wanted = wanted.reshape(-1, side * side, patch * patch * channels)
        predicted = found[:, :, : patch * patch * channels]
        return F.mse_loss(predicted, wanted)


class _Stream(nn.Module):
    """A module: the weights of one stream of a double block."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden, config.heads
        self.modulation = _Modulation(hidden, 6)
        self.q, self.k, self.v, self.proj = (Linear(hidden, hidden, True) for _ in range(4))
        self.q_norm, self.k_norm = (nn.RMSNorm(hidden // config.heads, eps=1e-6) for _ in range(2))
        self.mlp = _MLP(hidden)

    def heads_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (b, n, s, d) of x (b, s, h)."""
        q, k, v = (_heads(part(x), self.heads) for part in (self.q, self.k, self.v))
        return self.q_norm(q), self.k_norm(k), v


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (b, n, s, d) with rotary positions from tables (s, d)."""
    first, second = x.chunk(2, dim=3)
    return x * cos + torch.cat((-second, first), dim=3) * sin


class DoubleBlock(nn.Module):
    """A module: joint attention of an image and a text stream, then an MLP for each."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.text_tokens = config.text
        self.image, self.text = _Stream(config), _Stream(config)

    def forward(
        self, image: Tensor, text: Tensor, condition: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """image (b, s, h), text (b, t, h), condition (b, h), tables (t + s, d) -> image, text."""
        image_parts, text_parts = (
            self.image.modulation(condition),
            self.text.modulation(condition),
        )
        of_text = self.text.heads_of(_modulated(text, *text_parts[:2]))
        of_image = self.image.heads_of(_modulated(image, *image_parts[:2]))
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(of_text, of_image, strict=True))
        mixed = _joined(
            F.scaled_dot_product_attention(_rotated(q, cos, sin), _rotated(k, cos, sin), v)
        )
        found = []
        for x, stream, parts, own in (
            (image, self.image, image_parts, mixed[:, self.text_tokens :]),
            (text, self.text, text_parts, mixed[:, : self.text_tokens]),
        ):
            y = x + parts[2] * stream.proj(own)
            found.append(y + parts[5] * stream.mlp(_modulated(y, parts[3], parts[4])))
        return found[0], found[1]


class SingleBlock(nn.Module):
    """A module: attention and MLP in parallel on text and image tokens in one row."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        hidden, self.heads = config.hidden, config.heads
        self.modulation = _Modulation(hidden, 3)
        self.q, self.k, self.v = (Linear(hidden, hidden, True) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(hidden // config.heads, eps=1e-6) for _ in range(2))
        self.up, self.proj = Linear(hidden, 4 * hidden, True), Linear(hidden, hidden, True)
        self.down = Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, condition: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (b, t + s, h), condition (b, h), tables (t + s, d) -> (b, t + s, h)."""
        shift, scale, gate = self.modulation(condition)
        y = _modulated(x, shift, scale)
        q, k, v = (_heads(part(y), self.heads) for part in (self.q, self.k, self.v))
        q, k = _rotated(self.q_norm(q), cos, sin), _rotated(self.k_norm(k), cos, sin)
        mixed = self.proj(_joined(F.scaled_dot_product_attention(q, k, v)))
        return x + gate * (mixed + self.down(F.gelu(self.up(y), approximate="tanh")))


class Flux(nn.Module):
    """A module: FLUX.1, which predicts the velocity from noise to image."""

    def __init__(self, config: FluxConfig) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden
        self.image_in = Linear(config.channels, hidden, True)
        self.text_in = Linear(config.text_width, hidden, True)
        self.times, self.summary = _Embed(TIME_CHANNELS, hidden), _Embed(config.summary, hidden)
        self.guidance = _Embed(TIME_CHANNELS, hidden) if config.guidance else None
        self.double_blocks = nn.ModuleList(DoubleBlock(config) for _ in range(config.double))
        self.single_blocks = nn.ModuleList(SingleBlock(config) for _ in range(config.single))
        self.modulation = _Modulation(hidden, 2)
        self.out = Linear(hidden, config.channels, True)

    def forward(
        self,
        image: Tensor,
        text: Tensor,
        summary: Tensor,
        times: Tensor,
        velocity: Tensor | None = None,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """image (b, s, c), text (b, t, text width), summary (b, summary), times (b,), guidance (b,)
        -> velocity (b, s, c). With velocity (b, s, c): the mean squared error, a scalar.
        """
        condition = self.times(time_features(1000 * times)) + self.summary(summary)
        if self.guidance is not None and guidance is not None:
            condition = condition + self.guidance(time_features(1000 * guidance))
        cos, sin = self._tables(image)
        x, y = self.image_in(image), self.text_in(text)
        for double in self.double_blocks:
            x, y = double(x, y, condition, cos, sin)
        x = torch.cat((y, x), dim=1)
        for single in self.single_blocks:
            x = single(x, condition, cos, sin)
        shift, scale = self.modulation(condition)
        found = self.out(_modulated(x[:, self.config.text :], shift, scale))
        return found if velocity is None else F.mse_loss(found, velocity)

    def _tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (t + s, d) of the rotary angles. Text tokens have position 0. Image tokens have
        their row and column, each on 7/16 of the channels.
        """
        config, dtype = self.config, torch.float32
        half = config.hidden // config.heads // 2
        widths = (half - 2 * (7 * half // 16), 7 * half // 16, 7 * half // 16)
        place = torch.arange(config.side, dtype=dtype, device=like.device)
        rows = place.repeat_interleave(config.side)
        angles = []
        for width, positions in zip(
            widths, (0 * rows, rows, place.repeat(config.side)), strict=True
        ):
            steps = torch.arange(width, dtype=dtype, device=like.device) / max(width, 1)
            angles.append(positions.unsqueeze(1) * (10000.0**-steps).unsqueeze(0))
        of_image = torch.cat(angles, dim=1)
        of_text = torch.zeros(config.text, half, dtype=dtype, device=like.device)
        both = torch.cat((of_text, of_image), dim=0)
        both = torch.cat((both, both), dim=1)
        return both.cos().to(like.dtype), both.sin().to(like.dtype)


@dataclass(frozen=True, slots=True)
class DiffusionSpec(ModelSpec):
    """The spec of a diffusion transformer of this package. Create it with `DiffusionSpec.of`."""

    config: DiTConfig | FluxConfig

    @classmethod
    def of(cls, name: str, config: DiTConfig | FluxConfig) -> DiffusionSpec:
        """The spec of a model with the dimensions of `config`. Its rows are images."""
        return cls(name, 0, 1, config.layers, config)

    def _make(self) -> nn.Module:
        return self.config.module()

    def example_inputs(
        self, batch: int, seq: int, device: torch.device | str = "meta"
    ) -> dict[str, Tensor]:
        """Random latents, conditions and targets by name (seed 0), or only shapes on meta. The
        resolution decides the tokens, so `seq` only has to be at least 1.
        """
        self._check_inputs(batch, seq)
        is_meta, found = torch.device(device).type == "meta", {}
        generator = torch.Generator().manual_seed(0)
        for name, shape in self.config.inputs(batch).items():
            if isinstance(shape, int):
                limit, shape = shape, (batch,)
                whole = torch.randint(0, limit, shape, generator=generator)
                found[name] = (
                    torch.empty(shape, dtype=torch.int64, device="meta") if is_meta else whole
                )
            else:
                drawn = torch.empty(shape, device="meta")
                found[name] = drawn if is_meta else torch.randn(shape, generator=generator)
        return {name: value.to(device) for name, value in found.items()}

    def shallow(self) -> DiffusionSpec:
        """A DiT with four blocks, from which deeper ones follow. Other models themselves."""
        if not isinstance(self.config, DiTConfig) or self.num_layers <= 4:
            return self
        return DiffusionSpec.of(self.name, replace(self.config, layers=4))

    @property
    def layers_path(self) -> str:
        """The path of the module list of a DiT's blocks; '' for others."""
        return "blocks" if isinstance(self.config, DiTConfig) else ""

    def shrunk(self) -> DiffusionSpec:
        """A spec of the same architecture, small enough to train a few steps on a CPU in seconds."""
        return DiffusionSpec.of(f"{self.name} (shrunk)", self.config.shrunk())

    def _attention_size(self) -> tuple[int, float]:
        return self.config.layers, self.config.hidden
