"""Combinations of strategies for the oracle, without dominated ones: a row of layers with tp has
millions, and hundreds are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import add, le

from autopar.ir.annotated import AnnotatedModel, Conversion
from autopar.ir.sharding import AxisLayout
from benchmarks.search.exhaustive_oracle import (
    Cost,
    Placed,
    chosen_of,
    conversions_of,
    placements,
)


def lean_placements(models: Mapping[str, AnnotatedModel]) -> Iterator[Placed]:
    """As `placements`, without choices of a class that another one dominates in every mode. Both
    have the same layouts at the ends of the class, and wait alike between two parts of a backward.
    """
    base = next(iter(models.values()))
    is_row = set(base.segments[1:-1]) == {1} and len(base.classes) == len(base.edges) == 3
    if not is_row or base.ties or base.shared:
        yield from placements(models)  # only of a row of layers are both ends independent
        return
    sole = [Lone(models, index) for index in range(3)]
    for layer in sole[1].lean:
        firsts = sole[0].beside(sole[0].lean, layer, 0)
        lasts = sole[2].beside(sole[2].lean, layer, 2)
        for first, last in product(firsts, lasts):
            placed = Placed(models, [first.numbers, layer.numbers, last.numbers], {
                (mode, index): cost
                for index, way in enumerate((first, layer, last))
                for mode, cost in zip(models, way.costs, strict=True)
            })  # fmt: skip
            if placed.fits_together:
                yield placed


@dataclass(frozen=True, slots=True)
class Way:
    """A choice of strategies of one class.

    Attributes:
        numbers: by op, the number of its strategy.
        need, have: the layouts that the class reads and makes.
        costs: its cost in each recompute mode.
        size: what is not more in a way that dominates this one.
        alike: what is equal in a way that dominates this one.
    """

    numbers: tuple[int, ...]
    need: AxisLayout
    have: AxisLayout | None
    costs: tuple[Cost, ...]
    size: tuple[float, ...]
    alike: tuple[int, ...]


class Lone:
    """All choices of one class of a row of layers. `lean` has those that none dominates."""

    def __init__(self, models: Mapping[str, AnnotatedModel], index: int) -> None:
        self.base, self.index = next(iter(models.values())), index
        block, found = self.base.classes[index], list[Way]()
        placed = Placed.__new__(Placed)
        placed.models, placed.base, placed.modes = models, self.base, tuple(models)
        for numbers in product(*(range(len(op.strategies)) for op in block.ops)):
            chosen = chosen_of(block, numbers)
            if conversions_of(block, chosen) is None:
                continue
            placed.chosen = {
                (mode, index): chosen_of(model.classes[index], numbers)
                for mode, model in models.items()
            }
            costs = tuple(placed.class_cost(mode, index) for mode in models)
            late = tuple(placed.late(mode, index) for mode in models)
            static = sum(s.static_bytes for s in chosen.values())
            size = [x for cost in costs for x in self.sizes(cost, static)]
            alike = (*late, *(c.spared for c in costs)) if self.base.pipeline else ()
            need = chosen[block.inputs[0]].outputs[0]
            have = chosen[block.outputs[0]].inputs[0] if index < 2 else None
            found.append(Way(numbers, need, have, costs, tuple(size), alike))
        self.lean = undominated(found, lambda way: way.size)

    def sizes(self, cost: Cost, static: int) -> tuple[float, ...]:
        """What must not be more: seconds of a step, bytes held and transient ones. In a pipeline
        seconds and bytes of different kinds do not add up, and stay apart.
        """
        parts = (cost.forward_s, cost.backward_s - cost.weight_s, cost.weight_s)
        if self.base.pipeline:
            return (*parts, cost.step_s, cost.kept, cost.moment, static)
        step_s = self.base.num_microbatches * sum(parts) + cost.step_s
        return step_s, cost.kept + static, cost.moment

    def beside(self, ways: Sequence[Way], layer: Way, index: int) -> list[Way]:
        """Those of `ways` that none dominates beside a layer, whatever layout they have there."""
        edge = next(e for e in self.base.edges if {e.source, e.target} == {1, index})
        sizes: dict[tuple[int, ...], tuple[float, ...]] = {}
        for way in ways:
            pair = (way.have, layer.need) if index == 0 else (layer.have, way.need)
            change = Conversion(0.0, 0.0) if pair[0] == pair[1] else edge.conversions.get(pair)
            if change is not None:
                more = self.sizes(Cost(change.forward_s, change.backward_s), 0) * len(way.costs)
                sizes[way.numbers] = tuple(map(add, way.size, more))
        kept = [replace(way, need=None, have=None) for way in ways if way.numbers in sizes]
        return undominated(kept, lambda way: sizes[way.numbers])


def undominated(ways: Sequence[Way], size: Callable[[Way], tuple[float, ...]]) -> list[Way]:
    """The ways that no other one with the same ends dominates; of equal ones the first."""
    found = dict[tuple, list[Way]]()
    for way in sorted(ways, key=size):
        kept = found.setdefault((way.need, way.have, way.alike), [])
        if not any(all(map(le, size(other), size(way))) for other in kept):
            kept.append(way)
    return [way for kept in found.values() for way in kept]
