"""Batches for generated losses: rows whose masks, labels and lengths have different counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from support.loss_writer import HIDDEN, OUTPUTS, VOCAB
from torch import Tensor


def sample_batch(
    inputs: dict[str, str], rows: int, seq: int, zero_rows: bool, seed: int
) -> dict[str, Tensor]:
    """Random tensors, one for each kind in `inputs`.  With `zero_rows`, a mask may keep nothing of a row."""
    generator = torch.Generator().manual_seed(seed)
    return {name: _tensor(kind, rows, seq, zero_rows, generator) for name, kind in inputs.items()}


@dataclass(frozen=True)
class _Draw:
    """Random tensors of one batch."""

    rows: int
    seq: int
    generator: torch.Generator
    keep: Tensor  # [rows, seq] booleans
    some: Tensor  # [rows] booleans

    def integers(self, low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=self.generator)

    def floats(self, *sizes: int) -> Tensor:
        return torch.randn(sizes, generator=self.generator, dtype=torch.float64)

    def positive(self, *sizes: int) -> Tensor:
        return 0.3 + 2 * torch.rand(sizes, generator=self.generator, dtype=torch.float64)


KINDS: dict[str, Callable[[_Draw], Tensor]] = {
    "ids": lambda d: d.integers(0, VOCAB, d.rows, d.seq),
    "labels": lambda d: d.integers(0, VOCAB, d.rows, d.seq),
    "padded labels": lambda d: torch.where(d.keep, d.integers(1, VOCAB, d.rows, d.seq), 0),
    "ignored labels": lambda d: torch.where(d.keep, d.integers(0, VOCAB, d.rows, d.seq), -100),
    "row labels": lambda d: d.integers(0, VOCAB, d.rows),
    "ignored row labels": lambda d: torch.where(d.some, d.integers(0, VOCAB, d.rows), -100),
    "bool mask": lambda d: d.keep,
    "int mask": lambda d: d.keep.long(),
    "float mask": lambda d: d.keep.double(),
    "row mask": lambda d: d.some,
    "lengths": lambda d: d.keep.sum(1),
    "domains": lambda d: torch.where(d.some, d.integers(1, 3, d.rows), 0),
    "features": lambda d: d.floats(d.rows, d.seq, HIDDEN),
    "targets": lambda d: d.floats(d.rows, d.seq, OUTPUTS),
    "row targets": lambda d: d.floats(d.rows, OUTPUTS),
    "row floats": lambda d: d.positive(d.rows),
    "token floats": lambda d: d.positive(d.rows, d.seq),
    "soft labels": lambda d: torch.softmax(d.floats(d.rows, d.seq, VOCAB), -1),
    "row soft labels": lambda d: torch.softmax(d.floats(d.rows, VOCAB), -1),
}


def _tensor(kind: str, rows: int, seq: int, zero_rows: bool, generator: torch.Generator) -> Tensor:
    keep = _uneven(rows, seq, zero_rows, generator)
    return KINDS[kind](_Draw(rows, seq, generator, keep, _some(rows, generator)))


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
