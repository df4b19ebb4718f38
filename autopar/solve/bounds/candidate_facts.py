"""What bounds of one candidate are found from: its models, and the tables of their segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.bounds.cell import Cell, alone, together
from autopar.solve.costs.pipeline_cost import blocks_of, units_of
from autopar.solve.costs.recompute_mix import Models, hides
from autopar.solve.elimination.bucket_elimination import Tables
from autopar.solve.elimination.cost_tables import Stack
from autopar.solve.staging.unit_row import BytePrice

_TIMES = (1.0, 2.0, 4.0)
"""Prices of a byte that bounds look at, in times of the one that is best for all ranks together."""

_LATE, _TIMES_LATE = (0.5, 0.9), (1.0, 2.0)
"""Parts of the micro-batches that a rank holds which wait for gradients of parameters, and prices of a byte for those."""

FREE = BytePrice(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class OwnTables:
    """What segments cost, what their parameters do, and the segments as models of their own."""

    tables: Tables
    parameters: list[Stack]
    models: Models


@dataclass(frozen=True)
class CandidateFacts:
    """Of one candidate; `models` by recompute mode, `cell` what it shares with others.  `held`: how often ranks hold what forward keeps;
    `price`: seconds that a byte kept is likely to be worth.  `parts_backward`: whether some schedule does (`is_parted`)."""

    models: Models
    cell: Cell
    held: tuple[float, ...]
    price: float
    parts_backward: bool = False
    known_units: dict[tuple[int, ...], OwnTables] = field(default_factory=dict)
    known_singles: dict[tuple[int, bool], OwnTables] = field(default_factory=dict)

    @cached_property
    def first(self) -> AnnotatedModel:
        """The model in the mode that keeps most."""
        return next(iter(self.models.values()))

    @cached_property
    def hides(self) -> bool:
        """Whether recomputation may pay in a pipeline where memory does not ask for it."""
        return hides(self.models)

    @cached_property
    def layers(self) -> set[int]:
        """Classes of blocks."""
        return {self.first.segments[number] for number in blocks_of(self.first)}

    @cached_property
    def repeated(self) -> tuple[int, bool] | None:
        """What is asked of a block that reads another of its class, if blocks are all of one."""
        if len(self.layers) > 1:
            return None
        return next((key for key in self.cell.keys if key[0] in self.layers and key[1]), None)

    @cached_property
    def units(self) -> list[tuple[int, ...]]:
        """The segments of each unit that has several, each of another class."""
        return [
            tuple(of)
            for of in units_of(self.first)
            if 1 < len(of) == len({self.first.segments[n] for n in of})
        ]

    @cached_property
    def prices(self) -> list[BytePrice]:
        """For ranks that hold what is kept often, and for those that do so seldom; then for those that wait."""
        often, price = sorted({max(self.held), min(self.held)}), self.price
        if not price:
            return [FREE]
        found = [
            FREE,
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
        """Of the segments of a unit together."""
        if numbers not in self.known_units:
            tables = self.cell.unit(numbers)
            models = {mode: together(model, numbers) for mode, model in self.models.items()}
            self.known_units[numbers] = OwnTables(tables, tables.parameters(models), models)
        return self.known_units[numbers]

    def single(self, c: int, closed: bool) -> OwnTables:
        """Of one segment of a class."""
        if (c, closed) not in self.known_singles:
            tables = self.cell.single(c, closed)
            models = {mode: alone(model, c, closed) for mode, model in self.models.items()}
            self.known_singles[c, closed] = OwnTables(tables, tables.parameters(models), models)
        return self.known_singles[c, closed]
