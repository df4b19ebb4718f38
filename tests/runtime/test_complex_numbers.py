"""Models that compute with complex numbers train as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.effort import every
from support.trained_stacks import WIDTH, Stack, assert_exact
from torch import Tensor, nn

HEADS, CHANNELS = 2, 6


def rotations(positions: int) -> Tensor:
    angles = torch.outer(torch.arange(positions).double(), 0.5 ** torch.arange(3).double())
    return torch.polar(torch.ones_like(angles), angles)


class Rotary(nn.Module):
    """Attention with rotary embeddings, from a buffer of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("turns", rotations(20), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3 * HEADS, CHANNELS)).chunk(3, 2)
        turns = self.turns[: x.shape[1]].view(1, x.shape[1], 1, 3)
        q, k = (self._turned(each, turns).transpose(1, 2) for each in (q, k))
        return self.out(F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True)
                        .transpose(1, 2).flatten(2))  # fmt: skip

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(numbers * turns).flatten(3)


class Recurrence(nn.Module):
    """A diagonal linear recurrence with complex rates, by powers."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.into = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.arange(x.shape[1], dtype=x.dtype)
        rate = -self.decay.exp() + 1j * self.turn
        away = steps[:, None] - steps
        powers = torch.exp(rate * away.clamp(min=0)[..., None]) * (away >= 0)[..., None]
        states = torch.einsum("tsd,bsd->btd", powers, self.into(x).to(powers.dtype))
        return states.real + (states * states.conj()).real + 0.1 * states.abs()


class LongConvolution(nn.Module):
    """A convolution as long as the sequence, by Fourier transforms."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.gate = nn.Parameter(torch.randn(WIDTH, 12) / 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        spectrum = torch.fft.rfft(x.transpose(1, 2), n=2 * length)
        spectrum = spectrum * torch.fft.rfft(self.kernel, n=2 * length)
        found = torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2)
        return found * self.gate(x).sigmoid() + torch.fft.fft2(x).real


def rotary() -> nn.Module:
    return Stack(Rotary)


def recurrence() -> nn.Module:
    return Stack(Recurrence)


def long_convolution() -> nn.Module:
    return Stack(LongConvolution)


@pytest.mark.parametrize("maker", every(3, [rotary, recurrence, long_convolution]))
def test_they_train_as_on_one_device(pool2, maker):
    assert_exact(pool2, maker)
