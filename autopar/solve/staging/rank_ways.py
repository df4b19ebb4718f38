"""The ways in which the stages of a rank with several stages may recompute, and which of them
fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np
from autopar_cost_models import held_moments, late_moments

from autopar.solve.costs.pareto import undominated
from autopar.solve.costs.pipeline_cost import is_parted
from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.recompute_options import RankWays
from autopar.solve.staging.unit_row import UnitRow


def before_s(row: UnitRow, schedule: Schedule, runs: Sequence[tuple[int, int]]) -> np.ndarray:
    """For each rank, a lower bound on the seconds until it may start: a micro-batch's work in the
    units before its first stage. Under zero bubble, only its forwards.
    """
    parts = row.at.forward_s if schedule.splits_backward else row.at.work_s
    return np.array([parts[first] for first, _ in runs[: schedule.ranks]])


@dataclass(frozen=True, slots=True)
class RankChoice:
    """The chosen recomputation of a rank's stages: the way at index `place` of `ways`. `fits` says
    which of the ways fit in memory. `fitting` chooses the least recomputation that fits.
    """

    ways: RankWays
    fits: np.ndarray
    place: int

    @property
    def more_s(self) -> list[float]:
        """By stage of the rank, the seconds that recomputation adds to backward."""
        return self.ways.of_stages_s[self.place].tolist()

    @property
    def step_s(self) -> float:
        """Seconds once a step of the rank's stages, above their minimum over recompute modes."""
        return float(self.ways.step_s[self.place])

    @property
    def floor_s(self) -> list[float]:
        """By stage of the rank, the least extra seconds of backward over all ways that fit."""
        return self.ways.of_stages_s[self.fits].min(axis=0).tolist()

    def modes(self, stage: int) -> list[int]:
        """For each unit of the rank's stage number `stage`: the index of its recompute mode."""
        return self.ways.of_stages[stage].modes[self.place].tolist()

    def at(self, place: int) -> RankChoice:
        """The same rank with the way at index `place`."""
        return replace(self, place=int(place))

    def others(self) -> list[RankChoice]:
        """Choices that fit and take less time once a step than this one; only those that are
        Pareto-optimal in that and in the extra seconds of each stage.
        """
        step_s = self.ways.step_s
        quicker = np.flatnonzero(self.fits & (step_s < step_s[self.place]))
        if len(quicker) > 1:
            quicker = quicker[
                undominated(np.column_stack([self.ways.of_stages_s[quicker], step_s[quicker]]))
            ]
        return [self.at(place) for place in quicker.tolist()]

    def spread(self) -> np.ndarray:
        """Indices of the ways that fit and recompute less than this one in at least one stage."""
        of_stages_s = self.ways.of_stages_s
        return np.flatnonzero(self.fits & (of_stages_s < of_stages_s[self.place]).any(axis=1))


def _ways(row: UnitRow, runs: Sequence[tuple[int, int]], parted: tuple[bool, ...]) -> RankWays:
    """The `RankWays` to recompute in a rank whose stages are `runs`, cached: ranks with equal
    stages share them. `parted`: by stage, whether its backward is split.
    """
    ends = (
        (end == len(row), row.sent(first) if first else 0, row.sent(end)) for first, end in runs
    )
    of_runs = tuple(
        (tuple(row.sorts[first:end]), *at_ends)
        for (first, end), at_ends in zip(runs, ends, strict=True)
    )
    key = of_runs, parted, tuple(map(id, row.ties.borrowed(runs)))
    if key not in row.known_stages:
        row.known_stages[key] = _all_ways(row, runs, parted)
    return row.known_stages[key]


def _all_ways(row: UnitRow, runs: Sequence[tuple[int, int]], parted: Sequence[bool]) -> RankWays:
    longest = max(end - first for first, end in runs)
    ways = tuple(
        row.recompute.alike_ways(tuple(row.kind[first:end]), longest) for first, end in runs
    )
    more_s, work_s, step_s, lines = (
        sum(getattr(way, part) for way in ways) for part in ("more_s", "work_s", "step_s", "lines")
    )
    kept, late, moments = [], [], []
    for (first, end), way, two in zip(runs, ways, parted, strict=True):
        kept.append(row.at.kept[end] - row.at.kept[first] + row.sent(end) + way.more_kept)
        late.append((row.at.late[end] - row.at.late[first] + way.late) * two)
        moments.append(row.moment(first, end, way.parted if two else way.transient, late[-1], two))
    once_s = step_s / row.micro_batches
    return RankWays(
        of_stages=ways,
        of_stages_s=np.stack([way.more_s for way in ways], axis=1),
        more_s=more_s,
        step_s=step_s,
        each_s=row.with_more_s(runs, more_s + once_s, work_s + once_s),
        lines=lines,
        kept=np.array(kept),
        late=np.array(late),
        moments=np.array(moments),
        fixed_bytes=row.memory(runs) + row.passing(runs),
    )


def fitting(
    row: UnitRow,
    schedule: Schedule,
    runs: Sequence[tuple[int, int]],
    capacity: float,
    lines_s: np.ndarray,
    upper_bound_s: float,
) -> tuple[list[RankChoice], np.ndarray] | None:
    """(for each rank the least recomputation that fits, as a `RankChoice`, by rank a lower bound in
    seconds). None if no way fits on some rank.

    `runs` has the (first, end) units of each stage of the pipeline. A bound holds for a micro-batch
    on one rank, over all ways that fit, and includes the share of seconds once a step.

    `lines_s` are lower bounds of the row, by rank and line. With them, ways are excluded with which
    a step takes at least `upper_bound_s`. If all are excluded, the rank's bound is infinite.
    """
    ranks = schedule.ranks
    alike: dict[
        tuple[int, bool], tuple[RankWays, bool, list[int]]
    ] = {}  # whose stages have the same ways
    for rank in range(ranks):
        parted = tuple(is_parted(schedule.name, stage) for stage in range(rank, len(runs), ranks))
        ways, frees = _ways(row, runs[rank::ranks], parted), rank == ranks - 1 and not parted[-1]
        alike.setdefault((id(ways), frees), (ways, frees, []))[-1].append(rank)
    found: dict[int, RankChoice] = {}
    each_s, waits_s = np.full(ranks, inf), before_s(row, schedule, runs)
    for ways, frees, mine in alike.values():
        needed = ways.fixed_bytes + _fullest(ways, schedule, row.micro_batches, mine, frees)
        fits = needed <= capacity
        if not fits.any(axis=1).all():
            return None
        took_s = np.broadcast_to(ways.each_s, fits.shape)
        if row.lines:
            took_s = np.maximum(took_s, (lines_s[mine][:, None] + ways.lines).max(axis=2))
            fits &= waits_s[mine][:, None] + row.micro_batches * took_s < upper_bound_s
        each_s[mine] = np.where(fits, took_s, inf).min(axis=1)
        places = np.where(fits, ways.more_s, inf).argmin(axis=1)
        for rank, of_rank, place in zip(mine, fits, places, strict=True):
            found[rank] = RankChoice(ways, of_rank, int(place))
    return [found[rank] for rank in range(ranks)], each_s


def _fullest(
    ways: RankWays, schedule: Schedule, micro_batches: int, mine: list[int], frees: bool
) -> np.ndarray:
    """Peak bytes without `ways.fixed_bytes`, as an array [rank of `mine`, way]. `frees`: the rank
    has the pipeline's last stage, and the backward of that stage is whole.
    """
    shape = schedule.name, schedule.ranks, schedule.stages_per_rank, micro_batches
    held = _held_stack(*shape)[mine]
    most = (held @ ways.kept).max(axis=1)
    if frees and len(ways.kept) > 1:  # as in `pipeline_cost.fullest_of`, for all ways at once
        others = (held[..., :-1] @ ways.kept[:-1]).max(axis=1) + np.max(ways.moments[:-1], axis=0)
        return np.maximum(most + ways.moments[-1], others)
    late = late_moments(*shape)
    return most + [
        np.max(
            [np.array(counts) @ ways.late + ways.moments[chunk] for counts, chunk in late[rank]],
            axis=0,
        )
        for rank in mine
    ]


@lru_cache(maxsize=4096)
def _held_stack(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> np.ndarray:
    """`held_moments` as one array by rank, moment and stage. Ranks with fewer moments repeat their
    first one.
    """
    moments = held_moments(name, ranks, stages_per_rank, micro_batches)
    most = max(map(len, moments))
    return np.array([[*of, *of[:1] * (most - len(of))] for of in moments])
