"""The costs of a placement as tables over the few choices that each cost depends on.

A choice is the strategy of an op or the recompute mode of a class of layers, if there is more than
one option. Further choices represent only what others see of an op's strategy. Each kind of table
is weighted by its own fields of a question (`Question`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, product
from math import inf, prod
from operator import attrgetter

import numpy as np

from autopar.ir.annotated import (
    AnnotatedBlock,
    AnnotatedModel,
    BoundaryEdge,
    Conversion,
    Saved,
    Strategy,
)
from autopar.ir.sharding import AxisLayout
from autopar.ir.stop import check_time
from autopar.solve.costs.pipeline_cost import blocks_of
from autopar.solve.costs.placement_cost import input_bytes
from autopar.solve.costs.recompute_mix import Models

LARGEST = 400_000
"""The largest number of entries of a table; larger ones are split."""
MOST_CHOICES = 48
"""The most choices of a table when it is made. numpy's arrays have at most 64 dims."""

Scope = tuple[int, ...]
"""The choices that a table depends on; in ascending order, except for tables made by
elimination.
"""

WAYS = ("forward", "backward")
_BESIDES = ("weight", "step", "static")
_HELD = (*WAYS, *_BESIDES)
# what `_HELD` counts
_parts_of = attrgetter("forward_s", "backward_s", "backward_weight_s", "step_s", "static_bytes")


@dataclass(frozen=True)
class CostTable:
    """A cost table. `entries` has an axis of parts, then one for each choice of `scope`. `counts`
    names the fields of `Question` that weight the parts.
    """

    scope: Scope
    entries: np.ndarray
    counts: tuple[str, ...]


class Stack:
    """Tables whose parts have the same `counts`, with their entries concatenated, so that they are
    weighted together. Entries that are infinite (forbidden) stay so under any weights.
    """

    def __init__(self, tables: Sequence[CostTable]) -> None:
        self.counts = tables[0].counts
        self.scopes = [table.scope for table in tables]
        self._shapes = [table.entries.shape[1:] for table in tables]
        self._ends = np.cumsum([prod(shape) for shape in self._shapes]).tolist()
        self._entries = np.concatenate(
            [table.entries.reshape(len(self.counts), -1) for table in tables], axis=1
        ).T.copy()
        barred = np.isinf(self._entries).any(axis=1)
        self._barred = np.flatnonzero(barred)
        self._entries[barred] = 0.0

    def asked(self, weights: np.ndarray) -> Iterator[np.ndarray]:
        """The entries of each table, one array after the other, weighted by `weights` [question,
        part]. Axes are the table's choices, then questions.
        """
        found = self._entries @ weights.T
        found[self._barred] = np.inf
        start = 0
        for end, shape in zip(self._ends, self._shapes, strict=True):
            yield found[start:end].reshape(*shape, -1)
            start = end

    def counted(self, name: str, places: Mapping[int, np.ndarray]) -> np.ndarray:
        """The total of part `name` over all tables, by question. `places` maps a choice to its
        values by question; others have value 0.
        """
        own, start, total = self._entries[:, self.counts.index(name)], 0, np.zeros(1)
        for scope, end, shape in zip(self.scopes, self._ends, self._shapes, strict=True):
            place: np.ndarray | int = 0
            for v, size in zip(scope, shape, strict=True):
                place = place * size + places.get(v, 0)
            total = total + own[start + place]
            start = end
        return total


def _stacked(tables: Sequence[CostTable]) -> list[Stack]:
    """The tables grouped by `counts`, one stack for each group."""
    kinds: dict[tuple[str, ...], list[CostTable]] = defaultdict(list)
    for table in tables:
        kinds[table.counts].append(table)
    return [Stack(of) for of in kinds.values()]


@dataclass(frozen=True, slots=True)
class _View:
    """A choice that stands for an op's strategy as others see it. `strategies` has, for each value
    of the choice, one strategy that looks so. `variable` is -1 if there is only one value.
    """

    variable: int
    strategies: Sequence[int]


class CostTables:
    """The cost tables of a model. `models` has the model for each recompute mode, the one that
    keeps most first.

    `sizes` has the number of values of each choice. `op_of` and `mode_of` give the choice of an
    op's strategy and of a class's mode (-1: only one value). `seen` maps a choice that stands for
    an op's strategy to (the op's choice, what is seen of each strategy). `is_exact`: no table was
    split.

    `with_late`: also count bytes that stay between two parts of a backward. `ways_alone`: count
    only seconds of forward and backward.
    """

    def __init__(self, models: Models, with_late: bool = False, ways_alone: bool = False) -> None:
        self.with_late, self.ways_alone = with_late, ways_alone
        self.modes, self.models = tuple(models), list(models.values())
        self.base: AnnotatedModel = self.models[0]
        self.sizes: list[int] = []
        self.tables: list[CostTable] = []
        self.seen: dict[int, tuple[int, np.ndarray]] = {}
        self.is_exact = True
        self.layers = (
            {self.base.segments[number] for number in blocks_of(self.base)}
            if self.base.segments
            else set()
        )
        several = len(models) > 1
        self.mode_of = {
            c: self._choice(len(models))
            for c in range(len(self.base.classes))
            if several and c in self.layers
        }
        self.op_of = {
            (c, o): self._choice(len(op.strategies))
            for c, block in enumerate(self.base.classes)
            for o, op in enumerate(block.ops)
        }
        for c in range(len(self.base.classes)):
            check_time()
            self._add_class(c)
        for edge in self.base.edges:
            self._add_edge(edge)
        for group in self.base.ties:
            self._add_tie(group)
        self.stacks = _stacked(self.tables)

    def parameters(self, models: Models) -> list[Stack]:
        """Cost tables, as stacks, of the parameters and of calls whose cost depends on dp, in
        `models` (by recompute mode). These must have the same classes as this one's models; its own
        tables leave these costs out.
        """
        found, base = [], next(iter(models.values()))
        for c, block in enumerate(base.classes):
            own = [model.classes[c] for model in (models.values() if c in self.mode_of else [base])]
            for o, op in enumerate(block.ops):
                if op.follows_dp:
                    entries = _entries([b.ops[o].strategies for b in own])
                    found += self._by_mode(c, block.count * entries, [self.op_of[c, o]], _HELD)
        return _stacked(found)

    def _choice(self, size: int) -> int:
        """Adds a choice with `size` values and returns its number. Returns -1, and adds none, if
        there is only one value.
        """
        if size == 1:
            return -1
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _blocks(self, c: int) -> list[AnnotatedBlock]:
        """Class `c` in each of its recompute modes; only in the first if it has no choice of
        modes.
        """
        return [
            model.classes[c] for model in (self.models if c in self.mode_of else self.models[:1])
        ]

    def _table(
        self, variables: Sequence[int], entries: np.ndarray, counts: tuple[str, ...]
    ) -> CostTable:
        """A table over the choices `variables`, in any order; its scope is sorted. `entries` has an
        axis of parts, then one for each of them. A variable -1 is no choice and its axis is
        dropped; a repeated one becomes one axis.
        """
        places = sorted(range(len(variables)), key=lambda place: variables[place])
        entries = entries.transpose(0, *(place + 1 for place in places))
        scope = tuple(variables[place] for place in places)
        while -1 in scope:
            place = scope.index(-1)
            entries, scope = entries.take(0, axis=place + 1), scope[:place] + scope[place + 1 :]
        for place in range(len(scope) - 1, 0, -1):  # a choice that is there twice
            if scope[place] == scope[place - 1]:
                entries = np.moveaxis(np.diagonal(entries, axis1=place, axis2=place + 1), -1, place)
                scope = scope[:place] + scope[place + 1 :]
        return CostTable(scope, entries, counts)

    def _by_mode(
        self, c: int, entries: np.ndarray, variables: list[int], counts: tuple[str, ...]
    ) -> list[CostTable]:
        """A list with the table of class `c`, with its recompute mode as an additional choice; []
        if all entries are zero. `entries` is indexed [part, mode, variables...]. If they are equal
        for all modes, the mode is left out.
        """
        if not entries.any():
            return []
        if entries.shape[1] > 1 and bool(np.all(entries == entries[:, :1])):
            entries = entries[:, :1]
        return [
            self._table(
                [self.mode_of[c] if entries.shape[1] > 1 else -1, *variables], entries, counts
            )
        ]

    def _add_class(self, c: int) -> None:
        blocks = self._blocks(c)
        self._add_ops(c, blocks)
        base = blocks[0]
        readers: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for o, op in enumerate(base.ops):
            for slot, value in enumerate(op.inputs):
                readers[value].append((o, slot))
        kept, late = (
            [_kept(block) for block in blocks if not self.ways_alone],
            [_late(block) for block in blocks if self.with_late],
        )
        views = self._views(c, base, readers, [*kept, *late])
        whose = "" if c in self.layers and c != self.base.last else "_by_ends"
        self._add_bytes(c, base.count, kept, views, f"kept{whose}")
        self._add_bytes(c, base.count, late, views, f"late{whose}")
        maker = {
            value: (o, slot)
            for o, op in enumerate(base.ops)
            for slot, value in enumerate(op.outputs)
        }
        for value, reading in readers.items():
            o, slot = maker[value]
            have = [s.outputs[slot] for s in base.ops[o].strategies]
            looks = [views.get((r, value), self._itself(c, r)) for r, _ in reading]
            needs = [
                [base.ops[r].strategies[n].inputs[place] for n in look.strategies]
                for (r, place), look in zip(reading, looks, strict=True)
            ]
            conversions = [block.values[value].conversions for block in blocks]
            self._add_link(
                c,
                base.count,
                have,
                needs,
                conversions,
                [self.op_of[c, o], *(look.variable for look in looks)],
            )

    def _itself(self, c: int, o: int) -> _View:
        return _View(self.op_of[c, o], range(len(self.base.classes[c].ops[o].strategies)))

    def _views(
        self,
        c: int,
        base: AnnotatedBlock,
        readers: dict[str, list[tuple[int, int]]],
        kept: list[dict[str, dict[int, np.ndarray]]],
    ) -> dict[tuple[int, str], _View]:
        """For each (op, value) of class `c` that others read or save: a smaller choice for what
        they see of the op's strategy. Left out where all strategies look different.

        Adds these choices, with tables that tie them to the op's own choice. `base` is the class in
        the first mode. `readers` maps a value to (op, slot) of those that read it. `kept` has, by
        mode, tensor -> op -> bytes by strategy.
        """
        found = {}
        for (o, value), parts in _seen_by_others(base, readers, kept).items():
            kinds: dict[tuple, int] = {}
            kind = np.array(
                [kinds.setdefault(parts_of, len(kinds)) for parts_of in zip(*parts, strict=True)]
            )
            if len(kinds) == len(kind):
                continue
            choice = self._choice(len(kinds))
            if choice >= 0:
                self.seen[choice] = self.op_of[c, o], kind
                allowed = kind[:, None] == np.arange(len(kinds))
                self.tables.append(self._table([self.op_of[c, o], choice], _where(allowed), WAYS))
            found[o, value] = _View(choice, [int(np.argmax(kind == k)) for k in range(len(kinds))])
        return found

    def _add_ops(self, c: int, blocks: list[AnnotatedBlock]) -> None:
        """Adds tables of the costs that each op of class `c` has by itself. Ops that follow dp are
        left out (see `parameters`).
        """
        for o, op in enumerate(blocks[0].ops):
            if not op.follows_dp:
                entries = blocks[0].count * _entries([block.ops[o].strategies for block in blocks])
                self.tables += self._by_mode(c, entries[: len(WAYS)], [self.op_of[c, o]], WAYS)
                if not self.ways_alone:
                    self.tables += self._by_mode(
                        c, entries[len(WAYS) :], [self.op_of[c, o]], _BESIDES
                    )

    def _add_bytes(
        self,
        c: int,
        count: int,
        kept: list[dict[str, dict[int, np.ndarray]]],
        views: dict[tuple[int, str], _View],
        counted: str,
    ) -> None:
        """Adds tables of the bytes in `kept` (by mode: tensor -> op -> bytes by strategy) for
        `count` segments. A tensor counts once, at its largest size among the chosen strategies.
        `counted` is the field of `Question` that weights them. `views` are those of `_views`.
        """
        by_scope: dict[tuple[int, ...], np.ndarray] = {}
        for mode, of_mode in enumerate(kept):
            for key, by_op in of_mode.items():
                looks = {
                    o: views.get((o, Saved(key, 0).value), self._itself(c, o))
                    for o in sorted(by_op)
                }
                sizes = {
                    look.variable if look.variable >= 0 else -1 - o: by_op[o][list(look.strategies)]
                    for o, look in looks.items()
                }
                sizes = _without_fixed(sizes)
                parts = [tuple(sizes)]
                # no tensor is smaller than the mean of the sizes that ops save
                if (
                    prod(map(len, sizes.values())) * len(kept) > LARGEST
                    or len(sizes) > MOST_CHOICES
                ):
                    self.is_exact, parts = False, [(variable,) for variable in sizes]
                for scope in parts:
                    shape = tuple(len(sizes[variable]) for variable in scope)
                    largest = np.zeros(shape)
                    for axis, variable in enumerate(scope):
                        largest = np.maximum(
                            largest,
                            sizes[variable].reshape(
                                [-1 if a == axis else 1 for a in range(len(scope))]
                            ),
                        )
                    entries = by_scope.setdefault(scope, np.zeros((len(kept), *shape)))
                    entries[mode] += largest * count / len(parts)
        for scope, entries in by_scope.items():
            self.tables += self._by_mode(
                c, entries[None], [max(variable, -1) for variable in scope], (counted,)
            )

    def _add_edge(self, edge: BoundaryEdge) -> None:
        """Adds the seconds of layout changes along an edge between two classes."""
        source, target = self.base.classes[edge.source], self.base.classes[edge.target]
        o = _place(source, source.outputs[edge.source_output])
        r = _place(target, target.inputs[edge.target_input])
        have = [s.inputs[0] for s in source.ops[o].strategies]
        needs = [[s.outputs[0] for s in target.ops[r].strategies]]
        self._add_link(
            -1,
            edge.count,
            have,
            needs,
            [edge.conversions],
            [self.op_of[edge.source, o], self.op_of[edge.target, r]],
        )

    def _add_link(
        self,
        c: int,
        count: int,
        have: list[AxisLayout],
        needs: list[list[AxisLayout]],
        conversions: list[dict[tuple[AxisLayout, AxisLayout], Conversion]],
        variables: list[int],
    ) -> None:
        """Adds a table with the seconds of converting a value from its producer's layout to those
        that its readers need; each needed layout is paid once. Adds nothing if no strategy needs a
        conversion, and several tables if one would be too large.

        `have` are layouts by strategy of the producer, `needs` by reader and its strategy.
        `conversions` are by recompute mode of class `c` (-1: an edge between classes). `variables`
        are the choices of the producer and each reader. All seconds are times `count`.
        """
        link = _link_of(tuple(have), tuple(map(tuple, needs)))
        if link.is_free:
            return
        if all(of is conversions[0] for of in conversions):
            conversions = conversions[:1]
        prices = np.array([link.prices(of) for of in conversions])  # mode, pair, way
        if len(prices) > 1 and bool(np.all(prices == prices[:1])):
            prices = prices[:1]
        prices = count * prices if count else np.where(np.isinf(prices), np.inf, 0.0)
        prices = prices.transpose(2, 0, 1).reshape(len(WAYS), len(prices), len(link.made), -1)[
            :, :, link.rows
        ]
        mode = self.mode_of[c] if prices.shape[1] > 1 else -1
        # all readers together pay at least the mean of what each pays
        if (
            prod([prices.shape[1], len(have), *map(len, needs)]) > LARGEST
            or len(needs) > MOST_CHOICES
        ):
            self.is_exact = False
            for place, variable in zip(link.places, variables[1:], strict=True):
                self.tables.append(
                    self._table(
                        [mode, variables[0], variable], prices[:, :, :, place] / len(needs), WAYS
                    )
                )
            return
        if len(needs) == 1:
            total = prices[..., link.places[0]]
        else:  # each layout is paid for once
            total = np.zeros((*prices.shape[:3], *map(len, needs)))
            for number, needed in enumerate(link.needed):
                total += np.where(
                    needed,
                    prices[:, :, :, number].reshape(*prices.shape[:3], *[1] * len(needs)),
                    0.0,
                )
        if total.any():
            self.tables.append(self._table([mode, *variables], total, WAYS))

    def _add_tie(self, group: tuple[tuple[int, str], ...]) -> None:
        """Adds tables that forbid different placements of the parameters in `group`, which are one
        tensor.
        """
        (c, name), *others = group
        first = _place(self.base.classes[c], name)
        placed = [s.outputs[0].value for s in self.base.classes[c].ops[first].strategies]
        for index, other in others:
            o = _place(self.base.classes[index], other)
            elsewhere = [s.outputs[0].value for s in self.base.classes[index].ops[o].strategies]
            same = np.array([[a == b for b in elsewhere] for a in placed])
            self.tables.append(
                self._table([self.op_of[c, first], self.op_of[index, o]], _where(same), WAYS)
            )


def _seen_by_others(
    base: AnnotatedBlock,
    readers: dict[str, list[tuple[int, int]]],
    kept: list[dict[str, dict[int, np.ndarray]]],
) -> dict[tuple[int, str], list[list]]:
    """For each (op, value) that several ops read or save: lists with one entry for each strategy of
    the op. Each list is what is seen of them, a layout or bytes. Arguments as in
    `CostTables._views`.
    """
    seen: dict[tuple[int, str], list[list]] = defaultdict(list)
    sizes_of = [
        ((o, Saved(key, 0).value), len(sizes) > 1, sizes[o])
        for of_mode in kept
        for key, sizes in of_mode.items()
        for o in sizes
    ]
    for place, by_several, sizes in sizes_of:
        if by_several:
            seen[place].append(sizes.tolist())
    for value, reading in readers.items():
        for o, slot in reading:
            if len(reading) > 1 or (o, value) in seen:
                seen[o, value].append([s.inputs[slot] for s in base.ops[o].strategies])
    for (
        place,
        by_several,
        sizes,
    ) in sizes_of:  # what an op alone saves of such a value must be seen too
        if not by_several and place in seen:
            seen[place].append(sizes.tolist())
    return seen


def _entries(of_modes: Sequence[Sequence[Strategy]]) -> np.ndarray:
    """The costs named in `_HELD`, as an array [part, mode, strategy]. `of_modes` has the strategies
    of an op in each recompute mode.
    """
    by_mode = np.array([list(map(_parts_of, strategies)) for strategies in of_modes], dtype=float)
    return by_mode.transpose(2, 0, 1)


def _kept(block: AnnotatedBlock) -> dict[str, dict[int, np.ndarray]]:
    """For each tensor that a segment keeps until its backward: op index -> array of bytes by
    strategy. For a recomputed class, the tensors are its inputs.
    """
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    if block.recompute:
        for name in block.inputs:
            o = _place(block, name)
            found[f"{name}:input"][o] = np.array(
                [input_bytes(block, name, s.outputs[0]) for s in block.ops[o].strategies]
            )
        return found
    return _by_key([[strategy.saved for strategy in op.strategies] for op in block.ops])


def _late(block: AnnotatedBlock) -> dict[str, dict[int, np.ndarray]]:
    """For each tensor that a segment holds between two parts of a backward: op index -> array of
    bytes by strategy.
    """
    return _by_key([[strategy.late for strategy in op.strategies] for op in block.ops])


def _by_key(of_ops: Sequence[Sequence[Sequence[Saved]]]) -> dict[str, dict[int, np.ndarray]]:
    found: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for o, of_strategies in enumerate(of_ops):
        for n, tensors in enumerate(of_strategies):
            for saved in tensors:
                if o not in found[saved.key]:
                    found[saved.key][o] = np.zeros(len(of_strategies))
                found[saved.key][o][n] = max(found[saved.key][o][n], saved.size_bytes)
    return found


def _where(allowed: np.ndarray) -> np.ndarray:
    """An array of (forward, backward) seconds: 0 where `allowed`, infinite elsewhere."""
    return np.repeat(np.where(allowed, 0.0, np.inf)[None], 2, axis=0)


@dataclass(frozen=True)
class _Link:
    """Which layouts a value's producer makes and its readers need. It is shared by all values whose
    producer and readers have the same strategies.

    `made` and `wanted` are the distinct layouts. `rows` and `places` give the index of the layout
    for each strategy, of the producer and of each reader. `pairs` lists all (made, wanted)
    combinations.
    """

    made: tuple[AxisLayout, ...]
    wanted: tuple[AxisLayout, ...]
    rows: np.ndarray
    places: tuple[np.ndarray, ...]

    @cached_property
    def pairs(self) -> tuple[tuple[AxisLayout, AxisLayout], ...]:
        return tuple(product(self.made, self.wanted))

    @cached_property
    def needed(self) -> list[np.ndarray]:
        """For each wanted layout, a boolean array with one axis for each reader's strategies:
        whether some reader needs that layout.
        """
        return [
            np.logical_or.reduce(np.meshgrid(*(at == n for at in self.places), indexing="ij"))
            for n in range(len(self.wanted))
        ]

    @property
    def is_free(self) -> bool:
        """Whether the producer makes one layout in all its strategies, and all readers need that
        same one.
        """
        return len(self.pairs) == 1 and self.pairs[0][0] is self.pairs[0][1]

    def prices(
        self, conversions: dict[tuple[AxisLayout, AxisLayout], Conversion]
    ) -> list[tuple[float, float]]:
        """Seconds (forward, backward) of each of `pairs`: 0 for equal layouts, infinite for an
        impossible conversion.
        """
        found = []
        for pair in self.pairs:
            conversion = conversions.get(pair)
            if pair[0] is pair[1]:
                found.append((0.0, 0.0))
            else:
                found.append(
                    (inf, inf)
                    if conversion is None
                    else (conversion.forward_s, conversion.backward_s)
                )
        return found


@lru_cache(maxsize=4096)
def _link_of(have: tuple[AxisLayout, ...], needs: tuple[tuple[AxisLayout, ...], ...]) -> _Link:
    """The `_Link` that says which layouts meet: `have` (the producer's layout by strategy) and
    `needs` (for each reader, its layout by strategy). Cached.
    """
    made, wanted = tuple(dict.fromkeys(have)), tuple(dict.fromkeys(chain.from_iterable(needs)))
    places = tuple(np.array([wanted.index(layout) for layout in need]) for need in needs)
    return _Link(made, wanted, np.array([made.index(layout) for layout in have]), places)


def _without_fixed(sizes: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Bytes by choice, of which the largest counts: `sizes` with one choice for all those that have
    one value.
    """
    fixed = [variable for variable, values in sizes.items() if len(values) == 1]
    if len(fixed) < 2:
        return sizes
    largest = np.max([sizes[variable] for variable in fixed], axis=0)
    return {v: values for v, values in sizes.items() if len(values) > 1} | {fixed[0]: largest}


def _place(block: AnnotatedBlock, name: str) -> int:
    return next(o for o, op in enumerate(block.ops) if op.name == name)
