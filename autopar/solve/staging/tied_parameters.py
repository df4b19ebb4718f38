"""Shared parameters in a row of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

import numpy as np

from autopar.ir.annotated import AnnotatedModel


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several segments share, or several such parameters with the same readers
    together. A rank that reads it without a segment that pays for it is charged `static_bytes`, and
    `step_s` once a step. `paid` and `read` are prefix sums over units: the number of segments that
    pay for it, and of others that read it.
    """

    static_bytes: int
    step_s: float
    paid: Sequence[int]
    read: Sequence[int]

    def is_borrowed(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Whether a rank reads it without paying. `runs` has the (first, end) units of its stages."""
        paid, read = self.paid, self.read
        return any(read[first] < read[end] for first, end in runs) and not any(
            paid[first] < paid[end] for first, end in runs
        )


@dataclass(frozen=True)
class TiedParameters:
    """The shared parameters of a row of units: `every` lists them."""

    every: Sequence[TiedParameter] = ()

    def borrowed(self, runs: Sequence[tuple[int, int]]) -> list[TiedParameter]:
        """The shared parameters that a rank reads but none of its segments pays for (as
        `pipeline_cost.borrowed`). `runs` has the (first, end) units of the rank's stages.
        """
        return [tie for tie in self.every if tie.is_borrowed(runs)]


def tied_parameters(
    model: AnnotatedModel, costs: Sequence[tuple[int, float]], firsts: Sequence[int]
) -> TiedParameters:
    """The shared parameters of a row whose units begin with segments `firsts`. Those with the same
    paying and reading segments are combined into one. `costs` has (bytes, seconds once a step) of
    each shared parameter of the model.
    """
    together: dict[tuple[tuple[int, ...], ...], list[tuple[int, float]]] = {}
    for cost, shared in zip(costs, model.shared, strict=True):
        holders = tuple(
            tuple(sorted({number for number, _ in of})) for of in (shared.paying, shared.reading)
        )
        together.setdefault(holders, []).append(cost)

    def before(numbers: Sequence[int]) -> list[int]:
        counted = np.isin(np.arange(len(model.segments)), numbers).astype(int)
        return [0, *np.cumsum(np.add.reduceat(counted, firsts)).tolist()]

    return TiedParameters(
        [
            TiedParameter(
                sum(size for size, _ in of),
                fsum(step_s for _, step_s in of),
                before(paying),
                before(reading),
            )
            for (paying, reading), of in together.items()
        ]
    )
