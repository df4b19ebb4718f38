"""Training on batches that are filled up to a longer length, against batches as they are."""

from __future__ import annotations

from functools import cache

from support.exactness import (
    case,
    sgd,
)
from torch import Tensor

from autopar.api import trace
from autopar.ir.plan import Plan
from autopar.ir.traced import TracedModel
from autopar.runtime.engine import Engine

SHORT = (4, 8)
"""Lengths of programs besides that of the cases, 12: multiples of 4, so that zigzag shards of cp=2 are even."""


@cache
def shorter(name: str) -> tuple[TracedModel, ...]:
    found = case(name)
    return tuple(
        trace(found.model, {key: value[:, :length] for key, value in found.batches[0].items()})
        for length in SHORT
    )


def padding_engine(name: str, plan: Plan, compile: bool | dict = False) -> Engine:
    found = case(name)
    return Engine(
        found.model, found.traced, plan, sgd, None, None, "cpu", 0, shorter(name), compile
    )


def batches_of(name: str, lengths: tuple[int, ...]) -> list[dict[str, Tensor]]:
    return [
        {key: value[:, :length] for key, value in batch.items()}
        for batch, length in zip(case(name).batches, lengths, strict=True)
    ]
