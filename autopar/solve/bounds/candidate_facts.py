"""The data from which bounds of one candidate are computed: its models, and the cost tables of its
segments.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.cell import Cell, alone, joined_segments
from autopar.solve.costs.pipeline_cost import blocks_of, units_of
from autopar.solve.costs.recompute_mix import Models, hides
from autopar.solve.elimination.bucket_elimination import Tables
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.staging.unit_row import BytePrice

_TIMES = (1.0, 2.0, 4.0)
"""Prices of a byte at which bounds are evaluated, relative to the price that is best for all ranks
together.
"""

_LATE, _TIMES_LATE = (0.5, 0.9), (1.0, 2.0)
"""Fractions of a rank's micro-batches that wait for gradients of parameters, and relative prices of
a byte for these cases.
"""

NO_BYTE_PRICE = BytePrice(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OwnTables:
    """Cost tables of some segments (`tables`, shared by a cell), those of their parameters in one
    candidate, and these segments as a separate model for each recompute mode.
    """

    tables: Tables
    parameters: list[Stack]
    models: Models


@dataclass(frozen=True)
class CandidateFacts:
    """What bounds of one candidate are computed from. The `known_` fields are caches.

    `models` has its model for each recompute mode. `cell` is what it shares with candidates that
    differ only in dp, pp and ZeRO. `held` is the number of micro-batches whose kept bytes a rank
    holds, by rank. `price` is the estimated value of a kept byte in seconds. `parts_backward`:
    whether some schedule runs backward in two parts (`is_parted`).
    """

    models: Models
    cell: Cell
    held: tuple[float, ...]
    price: float
    parts_backward: bool = False
    known_units: dict[tuple[int, ...], OwnTables] = field(default_factory=dict)
    known_singles: dict[tuple[int, bool], OwnTables] = field(default_factory=dict)

    @cached_property
    def first(self) -> AnnotatedModel:
        """The model in the recompute mode that keeps most."""
        return next(iter(self.models.values()))

    @cached_property
    def hides(self) -> bool:
        """Whether recomputation can speed up a pipeline even if memory does not require it (see
        `recompute_mix.hides`).
        """
        return hides(self.models)

    @cached_property
    def layers(self) -> set[int]:
        """The indices of the classes that blocks have."""
        return {self.first.segments[number] for number in blocks_of(self.first)}

    @cached_property
    def repeated(self) -> tuple[int, bool] | None:
        """If all blocks have one class: (that class, True), provided one of them reads another
        block. Otherwise None.
        """
        if len(self.layers) > 1:
            return None
        return next((key for key in self.cell.keys if key[0] in self.layers and key[1]), None)

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """For each unit (a block and its neighbours) with several segments, all of different
        classes: the indices of these segments.
        """
        return [
            tuple(of)
            for of in units_of(self.first)
            if 1 < len(of) == len({self.first.segments[n] for n in of})
        ]

    @cached_property
    def prices(self) -> list[BytePrice]:
        """The prices of a byte at which bounds are evaluated: 0, then several multiples of `price`
        for ranks that hold kept bytes for many micro-batches and for few. If a backward runs in two
        parts, also prices for ranks with waiting micro-batches. Only 0 if `price` is 0.
        """
        often, price = sorted({max(self.held), min(self.held)}), self.price
        if not price:
            return [NO_BYTE_PRICE]
        found = [
            NO_BYTE_PRICE,
            *(BytePrice(times * price, times * price / held) for times in _TIMES for held in often),
        ]
        setting = self.first.pipeline
        if not self.parts_backward or setting is None:
            return found
        waiting = [(times * price, late) for times in _TIMES_LATE for late in _LATE]
        by_ends = 1 - 1 / setting.ranks
        return found + [
            BytePrice(kept_s, kept_s / often[-1], late, by_ends) for kept_s, late in waiting
        ]

    def unit(self, numbers: tuple[int, ...]) -> OwnTables:
        """The `OwnTables` of the segments with these indices together, including conversions
        between them. Cached.
        """
        if numbers not in self.known_units:
            tables = self.cell.unit(numbers)
            models = {mode: joined_segments(model, numbers) for mode, model in self.models.items()}
            self.known_units[numbers] = OwnTables(tables, tables.parameters(models), models)
        return self.known_units[numbers]

    def single(self, c: int, closed: bool) -> OwnTables:
        """The `OwnTables` of one segment of class `c`. `closed`: it reads another segment of its
        class. Cached.
        """
        if (c, closed) not in self.known_singles:
            tables = self.cell.single(c, closed)
            models = {mode: alone(model, c, closed) for mode, model in self.models.items()}
            self.known_singles[c, closed] = OwnTables(tables, tables.parameters(models), models)
        return self.known_singles[c, closed]
