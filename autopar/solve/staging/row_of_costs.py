"""Builds rows of units from segment costs, of one placement or of lower bounds over many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.costs.pipeline_cost import blocks_of, freed_bytes, messages_bytes, segment_costs
from autopar.solve.costs.placement_cost import Choices, SegmentCost
from autopar.solve.costs.recompute_mix import Models
from autopar.solve.staging.recompute_options import BlockKind, RecomputeOptions
from autopar.solve.staging.tied_parameters import TiedParameters, tied_parameters
from autopar.solve.staging.unit_row import BytePrice, LastSegment, Line, Sums, UnitRow


def row_of_placement(models: Models, choices: Choices) -> UnitRow:
    """The units of a model (blocks, and what a pipeline cuts between) with their costs under the
    placement `choices`, as a `UnitRow`. `models` has the model for each recompute mode.
    """
    base = next(iter(models.values()))
    costs = [segment_costs(model, choices) for model in models.values()]
    ties = []
    for (number, name), *_ in (shared.paying for shared in base.shared):
        c = base.segments[number]
        payers = [
            next(op for op in model.classes[c].ops if op.name == name).strategy(choices[c][name])
            for model in models.values()
        ]
        # in whichever mode the one runs that pays
        ties.append((payers[0].static_bytes, min(payer.step_s for payer in payers)))
    segments, arriving = _Segments(models, costs), messages_bytes(base, choices)
    return _row(segments, arriving=arriving, ties=ties, last=_last_segment(segments))


def row_of_costs(
    models: Models,
    costs: Sequence[Sequence[SegmentCost]],
    *,
    arriving: Sequence[int] | None = None,
    ties: Sequence[tuple[int, float]] = (),
    freed: int | None = None,
    work_s: Sequence[Sequence[float]] | None = None,
    lines: Sequence[tuple[BytePrice, Sequence[Sequence[float]]]] = (),
    most_freed: int = 0,
) -> UnitRow:
    """A `UnitRow` whose costs are lower bounds, from `costs[mode][segment]`.

    Args:
        models: the model for each recompute mode.
        costs: the costs of segments, indexed [mode][segment].
        arriving: bytes of the message into each segment; default 0.
        ties: (bytes, seconds once a step) of each shared parameter of the model; default none.
        freed: bytes that the last segment frees; default what it keeps.
        work_s: seconds of forward and backward together, by mode and segment, if they exceed the
            sum of both minima.
        lines: prices of a byte, each with lower bounds in seconds by mode and segment.
        most_freed: an upper bound on what the last segment keeps in these placements.
    """
    segments = _Segments(models, costs, work_s or (), [by_mode for _, by_mode in lines])
    of_lines = [segments.by_unit(np.min(by_mode, axis=0)) for _, by_mode in lines]
    return _row(
        segments,
        arriving=arriving or [0] * len(costs[0]),
        ties=ties,
        last=_last_segment(segments, freed, most_freed),
        lines=[(price, least_s) for (price, _), least_s in zip(lines, of_lines, strict=True)],
        is_bound=True,
    )


def in_first(costs: Sequence[Sequence[SegmentCost]], modes: int) -> list[list[SegmentCost]]:
    """`costs[mode][segment]` of the first `modes` recompute modes only. If these are not all modes,
    seconds once a step become the minimum over all of them, since segments may recompute to hide
    them.
    """
    if modes == len(costs):
        return list(map(list, costs))
    once_s = np.min([[cost.step_s for cost in of] for of in costs], axis=0).tolist()
    return [
        [replace(cost, step_s=step_s) for cost, step_s in zip(of, once_s, strict=True)]
        for of in costs[:modes]
    ]


@dataclass(frozen=True)
class _Segments:
    """Costs of segments before they are summed by unit. `costs`, `work_s` (forward and backward
    together) and each of `lines` are indexed [mode][segment].
    """

    models: Models
    costs: Sequence[Sequence[SegmentCost]]
    given_work_s: Sequence[Sequence[float]] = ()
    lines: Sequence[Sequence[Sequence[float]]] = ()

    @cached_property
    def base(self) -> AnnotatedModel:
        return next(iter(self.models.values()))

    @cached_property
    def blocks(self) -> list[int]:
        return blocks_of(self.base)

    @cached_property
    def firsts(self) -> list[int]:
        """The index of the first segment of each unit (a block and the segments up to the next
        one).
        """
        return [0, *self.blocks[1:]]

    @cached_property
    def last(self) -> int:
        """The index of the model's last segment if no other segment has its class, otherwise -1."""
        base = self.base
        is_alone = base.last is not None and base.segments[-1] == base.last
        return len(base.segments) - 1 if is_alone else -1

    @cached_property
    def work_s(self) -> Sequence[Sequence[float]]:
        return self.given_work_s or [
            [cost.forward_s + cost.backward_s for cost in of] for of in self.costs
        ]

    @cached_property
    def sort_of(self) -> list[tuple]:
        """For each segment, a key that is equal for segments with equal costs, work and lines in
        all modes. Most segments share one.
        """
        values = np.array([of for by_mode in (self.work_s, *self.lines) for of in by_mode]).T.copy()
        return [
            (*(id(c[s]) for c in self.costs), values[s].tobytes())
            for s in range(len(self.base.segments))
        ]

    @cached_property
    def numbers(self) -> tuple[np.ndarray, list[int]]:
        """(an array with the number of each segment's sort, the index of one segment of each sort).
        Segments of one sort have equal costs.
        """
        number_of: dict[tuple, int] = {}
        numbers = np.array([number_of.setdefault(sort, len(number_of)) for sort in self.sort_of])
        return numbers, [self.sort_of.index(sort) for sort in number_of]

    def least(self, part: str, modes: int = 1) -> np.ndarray:
        """For each segment, the minimum over the first `modes` recompute modes of field `part` of
        its `SegmentCost`.
        """
        numbers, one_of = self.numbers
        of = self.costs[:modes]
        return np.array([min(getattr(c[s], part) for c in of) for s in one_of])[numbers]

    def by_unit(self, of_segments: np.ndarray) -> np.ndarray:
        """The sums over the segments of each unit, one for each unit."""
        return np.add.reduceat(of_segments, self.firsts)


def _row(
    of: _Segments,
    *,
    arriving: Sequence[int],
    ties: Sequence[tuple[int, float]],
    last: LastSegment,
    lines: Sequence[tuple[BytePrice, np.ndarray]] = (),
    is_bound: bool = False,
) -> UnitRow:
    """A `UnitRow` from segment costs. `arriving` has the bytes of the message into each segment.
    `ties` has (bytes, seconds once a step) of each shared parameter. `last` has the bytes of the
    model's last segment. `lines` has prices, each with lower bounds by unit. `is_bound`: all costs
    are lower bounds.
    """
    kinds, kind = _kinds(of)
    parts = _parts(of)
    return UnitRow(
        model=of.base,
        modes=tuple(of.models),
        blocks=of.blocks,
        kind=kind,
        transient=_transients(of),
        arriving=[arriving[first] for first in of.firsts],
        before=Sums(*map(_before, parts)),
        parts=[*parts, *(least_s for _, least_s in lines)],
        last=last,
        recompute=RecomputeOptions(kinds, len(of.models), of.base.num_microbatches),
        ties=tied_parameters(of.base, ties, of.firsts) if ties else TiedParameters(),
        lines=[Line(price, _before(least_s).tolist()) for price, least_s in lines],
        is_bound=is_bound,
    )


def _parts(of: _Segments) -> list[np.ndarray]:
    """The costs of each unit: one array by unit for each field of `Sums`, in their order."""
    modes = len(of.costs)
    is_beside = np.ones(len(of.base.segments), dtype=int)
    is_beside[of.blocks] = 0
    return list(
        map(
            of.by_unit,
            (
                of.least("forward_s"),
                of.least("backward_s"),
                of.least("weight_s"),
                np.min(of.work_s, axis=0),
                of.least("step_s", modes),
                of.least("static_bytes"),
                of.least("kept_bytes"),
                of.least("kept_bytes", modes),
                np.maximum(of.least("late_bytes"), 0) * is_beside,
                is_beside,
            ),
        )
    )


def _before(of_units: np.ndarray) -> np.ndarray:
    """Prefix sums: entry i is the sum over the first i units."""
    return np.concatenate([[0], np.cumsum(of_units)])


def _last_segment(of: _Segments, freed: int | None = None, most_freed: int = 0) -> LastSegment:
    """The bytes of the model's last segment (`LastSegment`); all 0 but `most_freed` if its class
    has other segments. `freed` overrides what it frees, by default what it keeps.
    """
    if of.last < 0:
        return LastSegment(most_freed=most_freed)
    cost = of.costs[0][of.last]
    kept = cost.kept_bytes if freed is None else freed
    parted = min(freed_bytes(cost, True), kept) if freed is None else kept
    return LastSegment(kept, parted, cost.transient_bytes, max(most_freed, kept))


def _kinds(of: _Segments) -> tuple[list[BlockKind], list[int]]:
    """(the kinds of blocks, for each unit the index of its block's kind)."""
    kinds: dict[BlockKind, int] = {}
    known: dict[tuple, int] = {}  # most blocks are the same ones
    found = []
    for block in of.blocks:
        key = block == of.last, of.sort_of[block]
        if key not in known:
            known[key] = kinds.setdefault(_kind(of, block), len(kinds))
        found.append(known[key])
    return list(kinds), found


def _kind(of: _Segments, block: int) -> BlockKind:
    """The costs (a `BlockKind`), by recompute mode, of the segment with index `block`. If it is the
    model's last segment, all modes cost what the first does, and its peak counts as 0.
    """
    is_last, own, base = block == of.last, of.costs[0][block], of.base
    modes = [own if is_last else by_mode[block] for by_mode in of.costs]
    joint_s, *of_lines = (
        (0.0,) * len(modes) if is_last else _above_least([mode[block] for mode in by_mode])
        for by_mode in (of.work_s, *of.lines)
    )
    # buffers of what a mode makes again
    again = [model.fixed_bytes - base.fixed_bytes for model in of.models.values()]
    return BlockKind(
        more_s=tuple(max(c.backward_s - own.backward_s, 0.0) for c in modes),
        work_s=joint_s,
        step_s=_above_least([c.step_s for c in modes]),
        lines=tuple(of_lines),
        more_kept=tuple(c.kept_bytes - own.kept_bytes for c in modes),
        transient=tuple(
            (c.transient_bytes + more) * (not is_last) for c, more in zip(modes, again, strict=True)
        ),
        parted=tuple(
            (c.parted_transient_bytes + more) * (not is_last)
            for c, more in zip(modes, again, strict=True)
        ),
        late=tuple(max(c.late_bytes, 0) for c in modes),
    )


def _transients(of: _Segments) -> list[int]:
    """For each unit, peak bytes of the backward of its segments other than its block and the
    model's last segment; 0 if there are none.
    """
    own, ends, found = of.costs[0], [*of.blocks[1:], len(of.base.segments)], []
    for first, end, block in zip(of.firsts, ends, of.blocks, strict=True):
        beside: Iterable[int] = (
            (own[s].transient_bytes for s in range(first, end) if s not in (block, of.last))
            if end - first > 1
            else ()
        )
        found.append(max(beside, default=0))
    return found


def _above_least(by_mode: Sequence[float]) -> tuple[float, ...]:
    least = min(by_mode)
    return tuple(seconds - least for seconds in by_mode)
