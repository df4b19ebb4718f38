"""A sketch: a lower bound over all stagings of all placements of a cell, before a candidate is
annotated.

Each unit of the row (a block and the segments beside it, `unit_row.py`) takes the minimum of each
of its segments separately. The minima are for forward, for forward and backward together, and for
these with kept bytes at a price. Take a rank whose units add up to L seconds at a price u. It holds
what they keep h times in `room` bytes. It takes at least L - u x room / h seconds per micro-batch,
in any modes of its blocks. It starts when the first micro-batch has passed the ranks before it.

With one stage per rank, the best cut is found rank by rank; with several stages, the best deal is
taken. Unlike the bound by totals, this considers whole blocks, waiting and memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np

from autopar.solve.costs.pipeline_cost import hosts_time_s
from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.interleaved import ends_of, sums_of_ranks

_ROUNDING = 1e-9
"""Relative slack for sums in another order."""

_WAITING_OF_ZERO_BUBBLE = 1 / 3
"""The fraction of a pipeline's ramp that ranks wait for under zero bubble, approximately (Qi et al.
2023, arXiv:2401.10241): forward + gradients of inputs - gradients of weights, three parts of
about equal length.
"""


@dataclass(frozen=True, slots=True)
class Sketch:
    """Lower bounds over the units of a model (blocks with their neighbours), as prefix sums: one
    entry more than units. `forward_s` and `work_s` (forward and backward) are seconds per
    micro-batch. `lines_s` has a row for each of `prices`: `work_s` plus what blocks keep, at that
    price in seconds per byte. `once_s` is seconds once a step. `issue_s` is what the host takes to
    issue a micro-batch.
    """

    forward_s: np.ndarray
    work_s: np.ndarray
    once_s: np.ndarray
    lines_s: np.ndarray
    prices: np.ndarray
    issue_s: np.ndarray

    @staticmethod
    def of_units(
        forward_s: Sequence[float], work_s: Sequence[float], issue_s: Sequence[float] = ()
    ) -> Sketch:
        """A sketch of units with these seconds per micro-batch, without prices and parameters. By
        default the host issues at once.
        """
        none = np.zeros((0, len(work_s) + 1))
        return Sketch(
            forward_s=prefix_sums(forward_s),
            work_s=prefix_sums(work_s),
            once_s=none.sum(axis=0),
            lines_s=none,
            prices=np.zeros(0),
            issue_s=prefix_sums(issue_s or [0.0] * len(work_s)),
        )

    def with_parameters(
        self,
        forward_s: Sequence[float],
        work_s: Sequence[float],
        once_s: Sequence[float],
        issue_s: Sequence[float],
    ) -> Sketch:
        """This sketch with lower bounds for the parameters of each unit: `forward_s`, `work_s` and
        `issue_s` are added, `once_s` replaces seconds once a step.
        """
        more_s = prefix_sums(work_s)
        return replace(
            self,
            forward_s=self.forward_s + prefix_sums(forward_s),
            work_s=self.work_s + more_s,
            once_s=prefix_sums(once_s),
            lines_s=self.lines_s + more_s,
            issue_s=self.issue_s + prefix_sums(issue_s),
        )

    @property
    def units(self) -> int:
        """Number of units: blocks with their neighbours."""
        return len(self.work_s) - 1

    def bound_s(
        self,
        schedule: Schedule,
        micro_batches: int,
        held: Sequence[float] = (),
        room_bytes: float = np.inf,
        static: np.ndarray | None = None,
    ) -> float:
        """A lower bound on the seconds of a step; infinite if nothing fits.

        Args:
            schedule: the pipeline schedule.
            micro_batches: number of micro-batches of a step.
            held: for each rank, a lower bound on how many micro-batches' kept bytes it holds; by default 1 each.
            room_bytes: bytes of a rank for kept and static bytes; infinite by default.
            static: prefix sums of lower bounds on the static bytes of units; by default 0.
        """
        found_s = self._device_s(schedule, micro_batches, held, room_bytes, static)
        # blocks that are dealt evenly give no host more than this
        most_s = self.issue_s[-1] / schedule.ranks + np.diff(self.issue_s).max(initial=0.0)
        if found_s >= (micro_batches + schedule.ranks) * most_s + self.once_s[-1]:
            return found_s
        return max(found_s, self._hosts_s(schedule, micro_batches) * (1 - _ROUNDING))

    def _hosts_s(self, schedule: Schedule, micro_batches: int) -> float:
        """A lower bound on the seconds of a step by what hosts issue, over all cuts or deals."""
        none = np.zeros(self.units + 1)
        hosts = replace(self, work_s=self.issue_s, once_s=none)
        ones = np.ones(schedule.ranks)
        slowest_s = hosts._least_s(schedule, 1, ones, np.inf, none, none)
        total_s, once_s = self.issue_s[-1], self.once_s[-1] / schedule.ranks
        return float(
            hosts_time_s(slowest_s, total_s, micro_batches, schedule.stages_per_rank) + once_s
        )

    def _device_s(
        self,
        schedule: Schedule,
        micro_batches: int,
        held: Sequence[float] = (),
        room_bytes: float = np.inf,
        static: np.ndarray | None = None,
    ) -> float:
        """`bound_s` if the host issues at once."""
        held = held or (1.0,) * schedule.ranks
        static = np.zeros(self.units + 1) if static is None else static
        waits_s = self.forward_s if schedule.splits_backward else self.work_s
        held_by = np.array(held, float)
        least_s = self._least_s(schedule, micro_batches, held_by, room_bytes, static, waits_s)
        return least_s * (1 - _ROUNDING)

    def _least_s(self, schedule: Schedule, *asked: Any) -> float:
        """The bound in seconds over all cuts, or over all deals; arguments as for `_of_cuts_s`."""
        is_free = schedule.stages_per_rank == 1 and not schedule.sizes
        return float((self._of_cuts_s if is_free else self._of_deals_s)(schedule, *asked))

    def _taken_s(
        self, line_s: np.ndarray, work_s: np.ndarray, room: np.ndarray, held: np.ndarray | float
    ) -> np.ndarray:
        """Lower bounds on ranks' seconds per micro-batch. `line_s` (first axis: price) and `work_s`
        are sums over the units of each rank, which has `room` bytes and holds `held` times what
        they keep. Infinite where the room is negative.
        """
        prices = self.prices.reshape(-1, *(1 for _ in work_s.shape))
        took_s = np.maximum(work_s, (line_s - prices * (room / held)).max(axis=0, initial=0.0))
        return np.where(room < 0, np.inf, took_s)

    def _of_cuts_s(
        self,
        schedule: Schedule,
        micro_batches: int,
        held: np.ndarray,
        room_bytes: float,
        static: np.ndarray,
        waits_s: np.ndarray,
    ) -> float:
        """The bound in seconds over all cuts, with one stage per rank. Dynamic programming over
        ranks and the number of units so far minimizes the longest time of a rank including its
        waiting. Infinite if no cut fits. `static` (bytes) and `waits_s` (the seconds that later
        ranks wait) are prefix sums over units; the rest is as in `bound_s`.
        """
        work_s, once_s = _between(self.work_s), _between(self.once_s)
        limits = (
            (_between(self.lines_s), work_s, room_bytes - _between(static))
            if room_bytes < np.inf
            else None
        )
        later = np.tri(self.units + 1, k=-1, dtype=bool).T  # a rank has a unit at least

        @cache
        def ended_s(of_rank: float) -> np.ndarray:
            own_s = work_s if limits is None else self._taken_s(*limits, of_rank)
            return np.where(later, waits_s[:, None] + micro_batches * own_s + once_s, np.inf)

        ends_s = np.where(np.arange(self.units + 1) == 0, 0.0, np.inf)
        for of_rank in held.tolist():
            ends_s = np.minimum.reduce(np.maximum(ends_s[:, None], ended_s(of_rank)))
        return ends_s[-1]

    def _of_deals_s(
        self,
        schedule: Schedule,
        micro_batches: int,
        held: np.ndarray,
        room_bytes: float,
        static: np.ndarray,
        waits_s: np.ndarray,
    ) -> float:
        """The bound in seconds over all deals (`deals_of`), with several stages per rank or with
        fixed sizes.
        Infinite if no deal fits or there are too few units. Arguments as in `_of_cuts_s`.
        """
        ends = ends_of(schedule, self.units)
        if not len(ends):
            return np.inf
        of_ranks = partial(sums_of_ranks, schedule, ends)
        took_s = of_ranks(self.work_s)
        if room_bytes < np.inf:
            took_s = self._taken_s(
                of_ranks(self.lines_s), took_s, room_bytes - of_ranks(static), held
            )
        step_s = (waits_s[ends[:, : schedule.ranks]] + micro_batches * took_s).max(axis=1)
        return (step_s + of_ranks(self.once_s).max(axis=1)).min()

    def likely_s(
        self,
        schedule: Schedule,
        micro_batches: int,
        held: Sequence[float],
        room_bytes: float,
        static_bytes: int,
    ) -> float:
        """An estimate, not a bound, of step seconds if all ranks have equal work: the time of the
        rank that can keep least. `held` is by rank, `room_bytes` of one rank, `static_bytes` over
        all ranks.
        """
        ranks, held_most = schedule.ranks, max(held)
        room, each_s = (
            (room_bytes - static_bytes / ranks) / held_most,
            float(self.work_s[-1]) / ranks,
        )
        if room < np.inf:
            lines = zip(self.prices.tolist(), self.lines_s[:, -1].tolist(), strict=True)
            each_s = max([each_s, *(line_s / ranks - price * room for price, line_s in lines)])
        each_s = max(each_s, float(self.issue_s[-1]) / ranks)
        waiting = (
            (ranks - 1)
            / schedule.stages_per_rank
            * (_WAITING_OF_ZERO_BUBBLE if schedule.splits_backward else 1.0)
        )
        return (micro_batches + waiting) * each_s + float(self.once_s[-1]) / ranks


def prefix_sums(of_units: Sequence[float]) -> np.ndarray:
    """Prefix sums: entry i is the sum of the first i values; one entry more than values."""
    return np.array([0.0, *np.cumsum(of_units)])


def _between(sums: np.ndarray) -> np.ndarray:
    """From prefix sums, an array whose last two axes are [i, j]: the sum of units i to j
    (excluded).
    """
    return sums[..., None, :] - sums[..., :, None]
