"""Operands of the samples that op rules are held to."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class T:
    """An operand of a sample.

    `kind` says which values it has: normal, complex, positive, fraction (in (0, 1)), above_one, sorted, bool, true, `below` (whole numbers
    below `limit`),
    `distinct` (the same, none twice) or `labels` (the same, some -100).
    """

    shape: tuple
    kind: str = "normal"
    limit: int = 0
    grad: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return {
            "below": torch.int64,
            "distinct": torch.int64,
            "labels": torch.int64,
            "bool": torch.bool,
            "true": torch.bool,
            "complex": torch.complex128,
        }.get(self.kind, torch.float64)


def t(*shape, kind: str = "normal", limit: int = 0, grad: bool = True) -> T:
    return T(shape, kind, limit, grad)


def ids(limit: int, *shape) -> T:
    return T(shape, "below", limit)


def mask_(*shape) -> T:
    return T(shape, "bool")


def pos(*shape) -> T:
    return T(shape, "positive")


def call(target, *args, **kwargs):
    return target, args, kwargs


def values_of(x: T, generator: torch.Generator) -> torch.Tensor:
    """Random values for an operand whose shape is numbers."""
    if x.kind == "below":
        return torch.randint(0, x.limit, x.shape, generator=generator)
    if x.kind == "distinct":
        return torch.randperm(x.limit, generator=generator)[: x.shape[0]]
    if x.kind == "labels":
        labels = torch.randint(0, x.limit, x.shape, generator=generator)
        return torch.where(torch.rand(x.shape, generator=generator) < 0.3, -100, labels)
    if x.kind == "true":
        return torch.ones(x.shape, dtype=torch.bool)
    if x.kind == "bool":
        return torch.rand(x.shape, generator=generator) < 0.5
    if x.kind == "complex":
        return torch.randn(x.shape, generator=generator, dtype=torch.complex128)
    if x.kind in ("fraction", "above_one"):
        return torch.rand(x.shape, generator=generator, dtype=torch.float64) * 0.8 + (
            0.1 if x.kind == "fraction" else 1.1
        )
    value = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    if x.kind == "sorted":
        return value.sort().values
    return value.abs() + 0.2 if x.kind == "positive" else value
