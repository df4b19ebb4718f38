"""The blocks of a placement as a row of units.

A *unit* is a block and the segments up to the next block; segments before the first block belong to
the first unit. Blocks of one *kind* cost the same in every recompute mode. A run of units is
therefore described by its number of blocks of each kind. Its recomputation is described by how many
of them run in which mode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from autopar.ir.annotated import AnnotatedModel
from autopar.solve.staging.recompute_options import RankWays, RecomputeOptions
from autopar.solve.staging.tied_parameters import TiedParameters

_Seconds = TypeVar("_Seconds")
_Number = TypeVar("_Number")


@dataclass(frozen=True, slots=True)
class BytePrice:
    """A price, in seconds, for a byte that a micro-batch keeps and for a static byte. `late` is the
    fraction of kept bytes that counts as bytes held while waiting for gradients of parameters;
    `late_by_ends` is the same for segments beside blocks.
    """

    kept_s: float
    static_s: float
    late: float = 0.0
    late_by_ends: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A lower bound: a run of units takes at least the sum of `least_s` over them, minus the
    `price` of its kept and static bytes. `least_s` are prefix sums over units. The seconds are
    those of a micro-batch, with its share of seconds once a step.
    """

    price: BytePrice
    least_s: list[float]


@dataclass(frozen=True, slots=True)
class Sums(Generic[_Seconds, _Number]):
    """Prefix sums over units, as arrays or lists, in the first mode unless stated otherwise.

    `work_s` (forward and backward), `step_s` and `least_kept` are each in the mode with the
    minimum, since a longer backward hides more of the work once a step. `static`, `kept` and
    `least_kept` are bytes. `beside` counts segments beside blocks; `late` is the extra bytes that
    these hold between two parts of a backward.
    """

    forward_s: _Seconds
    backward_s: _Seconds
    weight_s: _Seconds
    work_s: _Seconds
    step_s: _Seconds
    static: _Number
    kept: _Number
    least_kept: _Number
    late: _Number
    beside: _Number


@dataclass(frozen=True, slots=True)
class LastSegment:
    """Bytes of the model's last segment, whose backward ends before that of others begins.

    `freed` is what it keeps, `freed_parted` how much of that a split backward frees, `transient`
    its own peak, and `most_freed` an upper bound on `freed` over all placements.
    """

    freed: int = 0
    freed_parted: int = 0
    transient: int = 0
    most_freed: int = 0


@dataclass(eq=False)
class UnitRow:
    """The units of a model under one placement. Units i to j (excluded) cost `before.x[j] -
    before.x[i]`.

    `blocks` are the segment indices of the units' blocks. By unit: `kind` (index of the block's
    kind), `transient` (peak bytes of segments beside the block), and `arriving` (bytes of the
    message into a stage that begins with the unit). `parts` has one array by unit for each cost.
    `last` has the bytes of the model's last segment, `recompute` the ways to recompute, `ties` the
    shared parameters.

    `is_bound`: the costs are lower bounds over many placements; `lines` then bound the runs of
    these (`family_bounds.py`). `known_least` and `known_stages` are caches.
    """

    model: AnnotatedModel
    modes: tuple[str, ...]
    blocks: Sequence[int]
    kind: Sequence[int]
    transient: Sequence[int]
    arriving: Sequence[int]
    before: Sums[np.ndarray, np.ndarray]
    parts: Sequence[np.ndarray]
    last: LastSegment
    recompute: RecomputeOptions
    ties: TiedParameters
    lines: Sequence[Line] = ()
    is_bound: bool = False
    known_least: dict[tuple, tuple[float, np.ndarray, float] | None] = field(default_factory=dict)
    known_stages: dict[tuple, RankWays] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.kind)

    @cached_property
    def micro_batches(self) -> int:
        """Number of micro-batches of a step."""
        return self.model.num_microbatches

    @cached_property
    def alike(self) -> bool:
        """Whether the blocks of all units have one class."""
        return len({self.model.segments[number] for number in self.blocks}) == 1

    @cached_property
    def at(self) -> Sums[list[float], list[int]]:
        """The prefix sums `before` with lists as fields instead of arrays, because reading one
        number is much faster from a list.
        """
        return Sums(
            **{part.name: getattr(self.before, part.name).tolist() for part in fields(Sums)}
        )

    @cached_property
    def counts(self) -> list[list[int]]:
        """Prefix sums over units, indexed [unit][kind]: the number of blocks of each kind before
        the unit.
        """
        return _counted(self.kind, len(self.recompute.kinds))

    @cached_property
    def sorts(self) -> list[int]:
        """For each unit, the number of its sort: units of one sort have equal costs, and numbers
        count up from 0.
        """
        sorts: dict[tuple, int] = {}
        units = zip(self.kind, self.transient, *(part.tolist() for part in self.parts), strict=True)
        return [sorts.setdefault(unit, len(sorts)) for unit in units]

    @cached_property
    def sorts_before(self) -> list[list[int]]:
        """Prefix sums over units, indexed [unit][sort]: the number of units of each sort before the
        unit.
        """
        return _counted(self.sorts, max(self.sorts) + 1)

    @cached_property
    def hop_s(self) -> float:
        """Seconds of the shortest message into any unit but the first; 0 without a pipeline."""
        setting = self.model.pipeline
        if setting is None:
            return 0.0
        each = [
            setting.hop_latency_s + size * setting.hop_s_per_byte if size else 0.0
            for size in self.arriving[1:]
        ]
        return min(each, default=0.0)

    @cached_property
    def least_moments(self) -> np.ndarray:
        """For each unit, a lower bound on the peak bytes of a whole backward: the larger of its
        block, in the mode that needs least, and the segments beside it.
        """
        return np.array(
            [
                max(min(self.recompute.kinds[kind].transient), beside)
                for kind, beside in zip(self.kind, self.transient, strict=True)
            ]
        )

    @cached_property
    def lines_least_s(self) -> np.ndarray:
        """The prefix sums of all lines, as an array [line, unit]."""
        return np.array([line.least_s for line in self.lines])

    def total_s(self, first: int, end: int) -> float:
        """A lower bound on the seconds of forward and backward of units `first` to `end` for a
        micro-batch: each in the recompute mode that is fastest.
        """
        return self.at.work_s[end] - self.at.work_s[first]

    def once_s(self, runs: Sequence[tuple[int, int]]) -> float:
        """Seconds once a step of a rank whose stages are `runs`, each (first, end) units: the
        minimum over recompute modes, and shared parameters that it reads without paying.
        """
        own_s = sum(self.at.step_s[end] - self.at.step_s[first] for first, end in runs)
        return own_s + sum(tie.step_s for tie in self.ties.borrowed(runs))

    def memory(self, runs: Sequence[tuple[int, int]]) -> int:
        """Static and fixed bytes of a rank whose stages are `runs`, each (first, end) units, with
        the shared parameters that it reads without paying. What blocks keep and transient bytes are
        not included.
        """
        own = sum(self.at.static[end] - self.at.static[first] for first, end in runs)
        ties = sum(tie.static_bytes for tie in self.ties.borrowed(runs))
        return own + ties + self.model.fixed_bytes

    def sent(self, end: int) -> int:
        """Bytes that a stage that ends before unit `end` has sent and that stay until its backward.
        0 for the last stage, or if the pipeline does not keep outputs.
        """
        keeps = self.model.pipeline is not None and self.model.pipeline.keeps_outputs
        return self.arriving[end] if keeps and end < len(self.kind) else 0

    def passing(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes of buffers for messages between ranks: twice the largest message into or out of a
        stage of a rank. 0 for one stage, or if the pipeline does not keep outputs until backward.
        `runs` has (first unit, end unit) of each stage of the rank.
        """
        if len(runs) == 1:
            return 0
        return 2 * max(max(self.sent(first) if first else 0, self.sent(end)) for first, end in runs)

    def moment(
        self, first: int, end: int, transient: np.ndarray, late: np.ndarray, parted: bool
    ) -> np.ndarray:
        """By option, peak bytes of the backward of units `first` to `end`, above what is held
        afterwards. `transient` is the peak of the blocks, `late` the bytes held at the end, both by
        option. `parted`: the backward is split.
        """
        ends, last = end == len(self.kind), self.last
        freed = (last.freed_parted if parted else last.freed) * ends
        return np.maximum(
            np.maximum(transient, max(self.transient[first:end])) - freed,
            np.maximum(last.transient * ends - late, 0),
        )

    def with_more_s(
        self, runs: Sequence[tuple[int, int]], more_s: np.ndarray, work_s: np.ndarray
    ) -> np.ndarray:
        """By way to recompute, a lower bound on the seconds of a micro-batch on a rank whose stages
        are `runs`, with its share of seconds once a step.

        Backward takes `more_s` above its minimum, and forward and backward together `work_s` above
        theirs. The minima of forward and of backward may come from two placements, so the larger
        sum counts.
        """
        parts_s = sum(
            of[end] - of[first]
            for first, end in runs
            for of in (self.at.forward_s, self.at.backward_s)
        )
        whole_s = sum(self.total_s(first, end) for first, end in runs)
        once_s = self.once_s(runs) / self.micro_batches
        return np.maximum(parts_s + more_s, whole_s + work_s) + once_s


def _counted(numbers: Sequence[int], count: int) -> list[list[int]]:
    """Prefix sums, indexed [unit][number]: how many earlier units have each number below
    `count`.
    """
    return [[0] * count, *np.cumsum(np.eye(count, dtype=int)[numbers], axis=0).tolist()]
