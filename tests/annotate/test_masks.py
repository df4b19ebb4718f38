"""Masks that are joined with themselves again and again: each part is looked at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.annotate.attention_masks import windows
from autopar.api import trace

JOINED = 40  # 2^40 paths lead from the mask to its comparison


class Masked(nn.Module):
    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.linear = window, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        mask = places[None, :] <= places[:, None]
        if self.window is not None:
            mask = mask & (places[None, :] > places[:, None] - self.window)
        for _ in range(JOINED):
            mask = mask & mask
        q = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


def test_the_window_of_a_mask_that_many_paths_lead_to():
    for window in (None, 3):
        assert list(windows(trace(Masked(window), {"x": torch.zeros(2, 6, 8)})).values()) == [
            window
        ]


class Padded(Masked):
    """The same mask, which also hides what fills a batch up, or adds to scores and hides nothing."""

    def __init__(self, window: int | None, adds: bool = False) -> None:
        super().__init__(window)
        self.adds = adds

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        mask = places[None, :] <= places[:, None]
        if self.window is not None:
            mask = mask & (places[None, :] > places[:, None] - self.window)
        mask = mask * kept[:, None, None].to(x.dtype) if self.adds else mask & kept[:, None, None]
        q = self.linear(x)[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).square().mean()


def test_padding_leaves_a_mask_its_window():
    batch = {"x": torch.zeros(2, 6, 8), "kept": torch.ones(2, 6, dtype=torch.bool)}
    for window in (None, 3):
        assert list(windows(trace(Padded(window), batch)).values()) == [window]
    assert not windows(trace(Padded(None, adds=True), batch))
