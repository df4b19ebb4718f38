"""Small modules as users write them, which no name of a model builds, for `saved_plans.py`.

Each function returns what `module:function` may return: (module, example inputs), and perhaps which
dim of an input is the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, WIDTH, CLASSES, TOKENS = 2, 32, 24, 12
Made = tuple[nn.Module, dict[str, Tensor]]


class Layers(nn.Module):
    """Residual linear layers and a classifier, with the loss of whole batches."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
            for _ in range(4)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.reduction = reduction

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(self.norm(x)), labels, reduction=self.reduction)


class Images(nn.Module):
    """Convolutions with batch norm, whose statistics are those of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(pixels)))
        x = F.relu(self.body(x)).mean((2, 3))
        return F.cross_entropy(self.head(x), labels)


class Frames(nn.Module):
    """An encoder that reads (frames, rows, width), and shares one table of positions among rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, frames: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        x = frames + positions
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean(0)), labels)


class Masked(nn.Module):
    """Attention over padded tokens, with tied weights and a frozen embedding of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(CLASSES, WIDTH)
        self.positions = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions.weight
        mask = attention_mask[:, None, None, :].bool()
        for qkv, out in zip(self.qkv, self.out, strict=True):
            q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in qkv(x).chunk(3, -1))
            found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + out(found.transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)


class Contrastive(nn.Module):
    """A loss that compares each row with all others, so that it is none of micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, images: Tensor, texts: Tensor) -> Tensor:
        left = F.normalize(self.left(images), dim=-1)
        right = F.normalize(self.right(texts), dim=-1)
        return F.cross_entropy(
            left @ right.T / 0.5, torch.arange(left.shape[0], device=left.device)
        )


def _rows() -> dict[str, Tensor]:
    return {"x": torch.randn(ROWS, WIDTH), "labels": torch.randint(0, CLASSES, (ROWS,))}


def layers() -> Made:
    """Residual layers."""
    return Layers(), _rows()


def summed() -> Made:
    """Residual layers whose loss is a sum over rows."""
    return Layers("sum"), _rows()


def of_half() -> Made:
    """Residual layers whose parameters are bf16."""
    inputs = _rows()
    return Layers().bfloat16(), inputs | {"x": inputs["x"].bfloat16()}


def of_double() -> Made:
    """Residual layers whose parameters are fp64."""
    inputs = _rows()
    return Layers().double(), inputs | {"x": inputs["x"].double()}


def dropping() -> Made:
    """Residual layers with dropout."""
    model = Layers()
    model.layers.append(nn.Dropout(0.1))
    return model, _rows()


def images() -> Made:
    """Convolutions with batch norm."""
    labels = torch.randint(0, CLASSES, (ROWS,))
    return Images(), {"pixels": torch.randn(ROWS, 3, 8, 8), "labels": labels}


def frames() -> tuple[nn.Module, dict[str, Tensor], dict[str, int | None]]:
    """An encoder whose rows are along dim 1 of one input, and which has an input without rows."""
    inputs = {
        "frames": torch.randn(6, ROWS, WIDTH),
        "positions": torch.randn(6, 1, WIDTH),
        "labels": torch.randint(0, CLASSES, (ROWS,)),
    }
    return Frames(), inputs, {"frames": 1, "positions": None, "labels": 0}


def masked() -> Made:
    """Attention over padded tokens."""
    tokens = torch.randint(0, CLASSES, (ROWS, TOKENS))
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[:, TOKENS - 3 :] = 0
    return Masked(), {"input_ids": tokens, "attention_mask": mask, "labels": tokens.clone()}


def contrastive() -> Made:
    """Two towers with a contrastive loss."""
    return Contrastive(), {"images": torch.randn(ROWS, WIDTH), "texts": torch.randn(ROWS, WIDTH)}


FUNCTIONS: tuple[Callable, ...] = (
    *(layers, summed, of_half, of_double, dropping, images, frames, masked, contrastive),
)
TEXTS = tuple(f"{__name__}:{function.__name__}" for function in FUNCTIONS)
"""The functions as MODEL texts."""
