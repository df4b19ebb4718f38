"""The blocks of a placement as a row of units.

A *unit* is a block and what stands between it and the next; what comes before the first block is of the first unit.  Blocks of one *kind*
cost the same in every recompute mode, so that a run of units is told by how many blocks of each kind it has, and what it costs to recompute
some of them by how many run in which mode, never by which.
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

Seconds = TypeVar("Seconds")
Number = TypeVar("Number")


@dataclass(frozen=True, slots=True)
class BytePrice:
    """Seconds for a byte that a micro-batch keeps and for a static one.  `late`: so much of what a micro-batch keeps is counted as what it
    holds while it waits for gradients of parameters; `late_by_ends`: of what segments beside blocks keep."""

    kept_s: float
    static_s: float
    late: float = 0.0
    late_by_ends: float = 0.0


@dataclass(frozen=True, slots=True)
class Line:
    """A run takes no less than its units add up to in `least_s` (sums before each unit), less the `price` of each byte that it keeps for a
    micro-batch and of each that is static: seconds of a micro-batch, and its share of those once a step."""

    price: BytePrice
    least_s: list[float]


@dataclass(frozen=True, slots=True)
class Sums(Generic[Seconds, Number]):
    """Sums over the units before each, as arrays or as lists; in the first mode where nothing else is said.

    `work_s` (forward and backward), `step_s` and `least_kept` are in the mode where each is least: a longer backward hides more of what is
    done once a step.  `static`, `kept` and `least_kept` are bytes.  `beside` counts segments beside blocks, and `late` is what these hold
    more between two parts of a backward.
    """

    forward_s: Seconds
    backward_s: Seconds
    weight_s: Seconds
    work_s: Seconds
    step_s: Seconds
    static: Number
    kept: Number
    least_kept: Number
    late: Number
    beside: Number


@dataclass(frozen=True, slots=True)
class LastSegment:
    """Bytes of the model's last segment, if its backward is over before that of others begins: what it keeps (`freed`), what of it is gone
    where backward has two parts (`freed_parted`), what it needs for a moment itself, and what placements keep of it at most."""

    freed: int = 0
    freed_parted: int = 0
    transient: int = 0
    most_freed: int = 0


@dataclass(eq=False)
class UnitRow:
    """The units of a model under one placement: units i..j cost `before.x[j] - before.x[i]`.

    `blocks` are segments, `kind` and `transient` (bytes that segments beside the block need for a moment) are by unit, `arriving` are bytes
    of the message into a stage that begins with a unit.  `parts` are all that units cost, each by unit.  `is_bound`: units have what no
    placement of many goes below; `lines` bound what runs of these take (`family_bounds.py`).
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
        """Of a step."""
        return self.model.num_microbatches

    @cached_property
    def alike(self) -> bool:
        """Whether all blocks are of one class."""
        return len({self.model.segments[number] for number in self.blocks}) == 1

    @cached_property
    def at(self) -> Sums[list[float], list[int]]:
        """The sums as lists, of which one number is read far quicker than of an array."""
        return Sums(
            **{part.name: getattr(self.before, part.name).tolist() for part in fields(Sums)}
        )

    @cached_property
    def counts(self) -> list[list[int]]:
        """Of the units before each: how many blocks there are of each kind."""
        return _counted(self.kind, len(self.recompute.kinds))

    @cached_property
    def sorts(self) -> list[int]:
        """Of each unit the number of its sort: those of one sort are alike in all that they cost."""
        sorts: dict[tuple, int] = {}
        units = zip(self.kind, self.transient, *(part.tolist() for part in self.parts), strict=True)
        return [sorts.setdefault(unit, len(sorts)) for unit in units]

    @cached_property
    def sorts_before(self) -> list[list[int]]:
        """Of the units before each: how many there are of each sort."""
        return _counted(self.sorts, max(self.sorts) + 1)

    @cached_property
    def hop_s(self) -> float:
        """Seconds of the shortest message between stages."""
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
        """By unit: bytes that backward needs for a moment at least, in one part."""
        return np.array(
            [
                max(min(self.recompute.kinds[kind].transient), beside)
                for kind, beside in zip(self.kind, self.transient, strict=True)
            ]
        )

    @cached_property
    def lines_least_s(self) -> np.ndarray:
        """What lines add up to, by line and the units before each."""
        return np.array([line.least_s for line in self.lines])

    def total_s(self, first: int, end: int) -> float:
        """Seconds of forward and backward of a run at least, a micro-batch."""
        return self.at.work_s[end] - self.at.work_s[first]

    def once_s(self, runs: Sequence[tuple[int, int]]) -> float:
        """Seconds once a step of a rank with these runs."""
        own_s = sum(self.at.step_s[end] - self.at.step_s[first] for first, end in runs)
        return own_s + sum(tie.step_s for tie in self.ties.borrowed(runs))

    def memory(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes of a rank with these runs besides what blocks keep and need for a moment: static, and what nothing changes."""
        own = sum(self.at.static[end] - self.at.static[first] for first, end in runs)
        ties = sum(tie.static_bytes for tie in self.ties.borrowed(runs))
        return own + ties + self.model.fixed_bytes

    def sent(self, end: int) -> int:
        """Bytes of what a stage has sent that stay until its backward."""
        keeps = self.model.pipeline is not None and self.model.pipeline.keeps_outputs
        return self.arriving[end] if keeps and end < len(self.kind) else 0

    def passing(self, runs: Sequence[tuple[int, int]]) -> int:
        """Bytes of messages on their way to and from a rank with these stages, beside those that its micro-batches keep."""
        if len(runs) == 1:
            return 0
        return 2 * max(max(self.sent(first) if first else 0, self.sent(end)) for first, end in runs)

    def moment(
        self, first: int, end: int, transient: np.ndarray, late: np.ndarray, parted: bool
    ) -> np.ndarray:
        """Bytes of the fullest moment of backward, in two parts or in one, of a run whose blocks need `transient` and that holds `late`
        more in the end."""
        ends, last = end == len(self.kind), self.last
        freed = (last.freed_parted if parted else last.freed) * ends
        return np.maximum(
            np.maximum(transient, max(self.transient[first:end])) - freed,
            np.maximum(last.transient * ends - late, 0),
        )

    def with_more_s(
        self, runs: Sequence[tuple[int, int]], more_s: np.ndarray, work_s: np.ndarray
    ) -> np.ndarray:
        """Seconds of a micro-batch of the runs of a rank, with its share of those once a step, at least, if backward takes so many more
        than the least, and forward and backward together: least forward and least backward may be of two placements."""
        parts_s = sum(
            of[end] - of[first]
            for first, end in runs
            for of in (self.at.forward_s, self.at.backward_s)
        )
        whole_s = sum(self.total_s(first, end) for first, end in runs)
        once_s = self.once_s(runs) / self.micro_batches
        return np.maximum(parts_s + more_s, whole_s + work_s) + once_s


def _counted(numbers: Sequence[int], count: int) -> list[list[int]]:
    """Of the units before each: how many have each of `count` numbers."""
    return [[0] * count, *np.cumsum(np.eye(count, dtype=int)[numbers], axis=0).tolist()]
