"""Batches for generated losses: rows whose masks, labels and lengths have different counts."""

from __future__ import annotations

import torch
from support.loss_writer import HIDDEN, OUTPUTS, VOCAB
from torch import Tensor

KINDS = (
    "ids",
    "labels",
    "padded labels",
    "ignored labels",
    "row labels",
    "ignored row labels",
    "bool mask",
    "int mask",
    "float mask",
    "row mask",
    "lengths",
    "domains",
    "features",
    "targets",
    "row targets",
    "row floats",
    "token floats",
    "soft labels",
    "row soft labels",
)


def sample_batch(
    inputs: dict[str, str], rows: int, seq: int, zero_rows: bool, seed: int
) -> dict[str, Tensor]:
    """Random tensors, one for each kind in `inputs`.  With `zero_rows`, a mask may keep nothing of a row."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _tensor(kind, rows, seq, zero_rows, generator) for name, kind in inputs.items()}


def _tensor(kind: str, rows: int, seq: int, zero_rows: bool, generator: torch.Generator) -> Tensor:
    def integers(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator)

    def floats(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=torch.float64)

    def positive(*sizes: int) -> Tensor:
        return 0.3 + 2 * torch.rand(sizes, generator=generator, dtype=torch.float64)

    keep = _uneven(rows, seq, zero_rows, generator)
    some = _some(rows, generator)
    match kind:
        case "ids":
            return integers(0, VOCAB, rows, seq)
        case "labels":
            return integers(0, VOCAB, rows, seq)
        case "padded labels":
            return torch.where(keep, integers(1, VOCAB, rows, seq), 0)
        case "ignored labels":
            return torch.where(keep, integers(0, VOCAB, rows, seq), -100)
        case "row labels":
            return integers(0, VOCAB, rows)
        case "ignored row labels":
            return torch.where(some, integers(0, VOCAB, rows), -100)
        case "bool mask":
            return keep
        case "int mask":
            return keep.long()
        case "float mask":
            return keep.double()
        case "row mask":
            return some
        case "lengths":
            return keep.sum(1)
        case "domains":
            return torch.where(some, integers(1, 3, rows), 0)
        case "features":
            return floats(rows, seq, HIDDEN)
        case "targets":
            return floats(rows, seq, OUTPUTS)
        case "row targets":
            return floats(rows, OUTPUTS)
        case "row floats":
            return positive(rows)
        case "token floats":
            return positive(rows, seq)
        case "soft labels":
            return torch.softmax(floats(rows, seq, VOCAB), -1)
        case "row soft labels":
            return torch.softmax(floats(rows, VOCAB), -1)
    raise ValueError(f"no batch tensor of kind {kind!r}")


def _uneven(rows: int, seq: int, zero_rows: bool, generator: torch.Generator) -> Tensor:
    """[rows, seq] booleans; each row keeps its own number of positions, most of them its last."""
    counts = 1 + torch.arange(rows) * seq // rows
    counts = counts[torch.randperm(rows, generator=generator)]
    if zero_rows:
        counts[int(torch.randint(rows, (1,), generator=generator))] = 0
    keep = torch.arange(seq) >= seq - counts[:, None]
    order = torch.randperm(seq, generator=generator)
    return keep if torch.rand((), generator=generator) < 0.5 else keep[:, order]


def _some(rows: int, generator: torch.Generator) -> Tensor:
    """[rows] booleans: most, not all, true."""
    order = torch.randperm(rows, generator=generator)
    return order >= rows // 4
