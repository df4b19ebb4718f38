"""The longest paths through stages that are added one after the other. They are lower bounds on a
step.

    GPipe          sum forward + (m - 1) max forward + sum backward + (m - 1) max backward       (exact)
    1F1B and zero  for each rank r: the first forward until it gets there, all that r computes, the last backward from there to rank 0
    bubble         for each rank r: the first forward to the last rank and backward to r (or to rank 0, and the next forward from there to
                   r), then all that r computes but what it did before, then the last backward to rank 0
                   for each rank r: the first forward to the last rank and back to r, all that r computes up to its last forward, then that
                   micro-batch to the last rank and back to rank 0
    1F1B           where messages take time it may be longer to go, instead of all that r computes, to and fro through r and the next one
                   or two ranks, or through the first ranks up to r

A path of 1F1B has whole backwards. A path of zero bubble contains some gradients of weights: those
of rank r before its last backward, and the last of rank 0. Alternatively it contains all of r's,
and then ends there, since other ranks may still be computing theirs. The shortest message is added
for each hop, and the longest work once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from math import inf
from typing import NamedTuple

import numpy as np

from autopar.solve.costs.schedule import Schedule
from autopar.solve.staging.stage_runs import Seconds, StageRun, StageRuns
from autopar.solve.staging.staged_time import kinds_of
from autopar.solve.staging.unit_row import UnitRow

_LONGEST_LOOP = 3
"""The most ranks in a loop of 1F1B that may begin anywhere. With 4, finding cuts takes three times
as long.
"""

_LOOPS = [(ranks, within) for ranks in range(2, _LONGEST_LOOP + 1) for within in range(1, ranks)]
"""Loops that are not closed yet: (number of ranks, how many of these are already present)."""


class PartialCut(NamedTuple):
    """A cut of the first units into the first stages, one stage a rank: the lengths of paths
    through them, in seconds. Fields may also be arrays, for many cuts.

    Attributes:
        work_s: all backward so far (GPipe: all work).
        reached_s: the longest path that turns at one of these ranks.
        turned_s: the longest path that turns at the last of these ranks, as far as these ranks are
            on it (GPipe: slowest forward).
        slowest_s: the longest path that turns at the last rank twice, as far as known (GPipe:
            slowest backward).
        step_s: the longest work once a step.
        least_s: like `reached_s`, through ranks with the least sum of that and of work once a step.
        left_s: like `turned_s`, for the same ranks.
        shift_s: how much longer the forwards so far are than these units would be on the last of
            the ranks.
        first_s: a micro-batch on the first rank.
        loops_s: for 1F1B, paths that loop through the last of these ranks and later ones, without
            the time of the later ones (`_LOOPS`).
    """

    work_s: Seconds
    reached_s: Seconds
    turned_s: Seconds
    slowest_s: Seconds
    step_s: Seconds
    least_s: Seconds
    left_s: Seconds
    shift_s: Seconds
    first_s: Seconds
    loops_s: Sequence[Seconds]

    def numbers(self) -> np.ndarray:
        """All fields as one array [field, cut]. Each loop of `loops_s` is a row of its own."""
        *fields, loops_s = self
        return np.stack(np.broadcast_arrays(*fields, *loops_s))


NO_CUT = PartialCut(
    work_s=0.0,
    reached_s=0.0,
    turned_s=-inf,
    slowest_s=0.0,
    step_s=0.0,
    least_s=0.0,
    left_s=-inf,
    shift_s=0.0,
    first_s=0.0,
    loops_s=[-inf] * len(_LOOPS),
)


def cut_of(numbers: np.ndarray) -> PartialCut:
    """The `PartialCut` (of many cuts) whose `numbers` are these."""
    fields = len(PartialCut._fields) - 1
    return PartialCut._make([*numbers[:fields], list(numbers[fields:])])


def extended(
    rows: Sequence[UnitRow],
    kinds: Sequence[UnitRow],
    schedule: Schedule,
    cut: PartialCut,
    run: StageRun | StageRuns,
) -> PartialCut:
    """`cut` with `run` as one more stage: the same paths through one more rank. `rows` are the
    units by rank, `kinds` the distinct ones among them. With arrays in `cut` or `run`, many cuts
    are extended at once.
    """
    row, before = rows[run.stage], rows[max(run.stage - 1, 0)]
    rank, parts, step_s = run.stage, schedule.splits_backward, np.maximum(cut.step_s, run.step_s)
    if not schedule.alternates:
        return _extended_gpipe(row, kinds, cut, run, step_s)
    shift_s = (
        cut.shift_s
        if before is row
        else cut.shift_s + before.before.forward_s[run.first] - row.before.forward_s[run.first]
    )
    forward_s = shift_s + row.before.forward_s[run.first]  # of stages before
    back_s = run.backward_s - run.weight_s if parts else run.backward_s
    reached_s, turned_s = _through(row, schedule, cut, run, forward_s)
    slowest_s, first_s, loops_s = _twice(row, schedule, cut, run, forward_s)
    least_s: Seconds = 0.0
    left_s: Seconds = -inf
    if row.lines:
        least_s, left_s = _least_through(row, kinds, schedule, cut, run, forward_s)
        left_s = np.maximum(cut.left_s + back_s, left_s)
    return PartialCut(
        work_s=cut.work_s + (back_s if rank else run.backward_s),
        reached_s=np.maximum(cut.reached_s, reached_s),
        turned_s=np.maximum(cut.turned_s + back_s, turned_s),
        slowest_s=slowest_s,
        step_s=step_s,
        least_s=least_s,
        left_s=left_s,
        shift_s=shift_s,
        first_s=first_s,
        loops_s=loops_s,
    )


def _extended_gpipe(
    row: UnitRow,
    kinds: Sequence[UnitRow],
    cut: PartialCut,
    run: StageRun | StageRuns,
    step_s: Seconds,
) -> PartialCut:
    least_s: Seconds = 0.0
    if row.lines:
        works_s = [kind.before.work_s for kind in kinds]
        later_s = reduce(np.minimum, [work_s[-1] - work_s[run.end] for work_s in works_s])
        least_s = np.maximum(cut.least_s, cut.work_s + later_s + row.micro_batches * run.least_s)
    return cut._replace(
        work_s=cut.work_s + run.total_s,
        turned_s=np.maximum(cut.turned_s, run.forward_s),
        slowest_s=np.maximum(cut.slowest_s, run.backward_s),
        step_s=step_s,
        least_s=least_s,
    )


def _ahead(row: UnitRow, schedule: Schedule, rank: int) -> int:
    """Number of forwards that a rank runs before its first backward."""
    return min(schedule.ranks - rank, row.micro_batches)


def _through(
    row: UnitRow,
    schedule: Schedule,
    cut: PartialCut,
    run: StageRun | StageRuns,
    forward_s: Seconds,
) -> tuple[Seconds, Seconds]:
    """(`reached_s`, `turned_s`) of the paths that turn at the rank of `run`, or pass it and turn at
    the next. `forward_s` is the seconds of a forward through the earlier stages.
    """
    micro, rank, last = row.micro_batches, run.stage, schedule.ranks - 1
    parts, ahead = schedule.splits_backward, _ahead(row, schedule, rank)
    weights = max(micro - 1 - rank, 0) if parts else micro  # before the last backward
    reached_s = (
        cut.work_s + forward_s + _worked_s(run, micro, micro, weights) + 2 * rank * row.hop_s
    )
    turned_s = cut.work_s + _worked_s(run, micro - ahead, micro, weights) + 2 * last * row.hop_s
    if parts:
        reached_s = np.maximum(reached_s, forward_s + micro * run.total_s + rank * row.hop_s)
        turned_s = np.maximum(
            turned_s, _worked_s(run, micro - ahead, micro, micro) + (2 * last - rank) * row.hop_s
        )
    if rank and micro > schedule.ranks:  # by rank 0
        left = micro - rank
        again_s = (
            _worked_s(run, micro - schedule.ranks, left, left - 2 if parts else left)
            + 2 * (last + rank) * row.hop_s
        )
        turned_s = np.maximum(turned_s, 2 * cut.work_s + forward_s + again_s)
    return reached_s, turned_s


def _least_through(
    row: UnitRow,
    kinds: Sequence[UnitRow],
    schedule: Schedule,
    cut: PartialCut,
    run: StageRun | StageRuns,
    forward_s: Seconds,
) -> tuple[Seconds, Seconds]:
    """(`least_s`, `left_s`) of `cut` with `run` as one more stage; `left_s` only for paths through
    its rank. `forward_s` is the seconds of a forward through the earlier stages.
    """
    through_s: Seconds = 0.0
    before_s: Seconds = 0.0
    if not schedule.splits_backward:
        through_s = reduce(np.minimum, [kind.before.work_s[run.first] for kind in kinds])
        before_s = cut.work_s
    ahead = _ahead(row, schedule, run.stage)
    least_s = np.maximum(before_s + forward_s, through_s) + row.micro_batches * run.least_s
    backward_s = row.before.backward_s
    # a backward takes so much at least, which all least times hold
    own_s = backward_s[run.end] - backward_s[run.first]
    left_s = before_s + (row.micro_batches - ahead) * run.least_s + ahead * own_s
    return np.maximum(cut.least_s, least_s), left_s


def _worked_s(run: StageRun | StageRuns, forwards: int, backwards: int, weights: int) -> Seconds:
    """Seconds that the stage `run` takes for `forwards` forwards, and `backwards` backwards of
    which `weights` include gradients of weights. It is a lower bound if forward and backward are
    longer together, or in any part except gradients of weights.
    """
    whole = min(forwards, weights)
    parts_s = (forwards - whole) * run.forward_s + (weights - whole) * run.backward_s
    return whole * run.total_s + parts_s + (backwards - weights) * (run.backward_s - run.weight_s)


def _twice(
    row: UnitRow, schedule: Schedule, cut: PartialCut, run: StageRun | StageRuns, forward_s: Seconds
) -> tuple[Seconds, Seconds, Sequence[Seconds]]:
    """(`slowest_s`, `first_s`, `loops_s`) of `cut` with `run` as one more stage. `forward_s` is the
    seconds of a forward through the earlier stages.

    Between the first backward of a rank and its last forward, the path follows its work. Under 1F1B
    the path may loop: a micro-batch goes on through some ranks and returns, once for as many
    micro-batches as there are ranks. Under zero bubble a loop is longer only if a message takes
    longer than gradients of weights.
    """
    micro, rank, last = row.micro_batches, run.stage, schedule.ranks - 1
    parts, first_s = schedule.splits_backward, cut.first_s if rank else run.total_s
    between = micro - 2 - last + rank  # micro-batches of this rank; the one before has one less
    if between < 0:
        return cut.slowest_s, 0.0 if parts else first_s, cut.loops_s
    ways_s = cut.work_s + forward_s + 2 * (2 * last - rank) * row.hop_s
    if parts:
        # the last backward of the first rank has its own after it
        weights = max(between + 1 - rank, 0) + (rank == 0)
        twice_s = ways_s + _worked_s(run, between + 2, between + 2, weights)
        return np.maximum(cut.slowest_s + _worked_s(run, 2, 2, 0), twice_s), 0.0, cut.loops_s
    twice_s = ways_s + 2 * run.total_s
    found = [cut.slowest_s + 2 * run.total_s, twice_s + between * run.total_s]
    loops_s: list[Seconds] = []
    if between > rank > 0:  # through all ranks so far
        whole_s = cut.work_s + run.backward_s + forward_s + run.forward_s
        times, rest = divmod(between - rank, rank + 1)
        found.append(
            (times + 2) * whole_s + rest * first_s + (4 * last + 2 * times * rank) * row.hop_s
        )
    known_s = dict(zip(_LOOPS, cut.loops_s, strict=True))
    for ranks, within in _LOOPS:
        times, rest = divmod(between - within + 1, ranks)
        if within == 1:
            loops_s.append(
                twice_s + (times + rest) * run.total_s + 2 * times * (ranks - 1) * row.hop_s
            )
        else:
            loops_s.append(known_s[ranks, within - 1] + (times + 2) * run.total_s)
        if within == ranks - 1:
            times = (between - within) // ranks
            found.append(known_s[ranks, within] + (times + 2) * run.total_s)
    return reduce(np.maximum, found), first_s, loops_s


def open_loops(
    cut: PartialCut, micro_batches: int, later: Sequence[tuple[float, float]]
) -> list[Seconds]:
    """The `loops_s` of cuts, with -inf for loops that cannot become the longest path. `later` has,
    for each later stage, the smallest and the largest seconds of a micro-batch.
    """
    between = micro_batches - 2 - len(later)  # as in `_twice`
    found: list[Seconds] = []
    for (ranks, within), loop_s in zip(_LOOPS, cut.loops_s, strict=True):
        missing = later[: ranks - within]
        if within + len(missing) < ranks:
            found.append(-inf)
            continue
        times = (between - within + 1) // ranks
        most_s = loop_s + (times + 2) * sum(most for _, most in missing)
        found.append(
            np.where(most_s > cut.slowest_s + 2 * sum(least for least, _ in missing), loop_s, -inf)
        )
    return found


def path_s(row: UnitRow, schedule: Schedule, cut: PartialCut) -> Seconds:
    """The seconds of the longest path through all stages, work once a step included. `cut` has all
    stages, and `row` is that of the last.
    """
    if not schedule.alternates:
        slowest_s = (row.micro_batches - 1) * (cut.turned_s + cut.slowest_s)
        return np.maximum(
            cut.work_s + slowest_s + 2 * (schedule.ranks - 1) * row.hop_s + cut.step_s, cut.least_s
        )
    whole_s = cut.shift_s + row.before.forward_s[-1]  # all forwards of a micro-batch
    paths_s = (
        np.maximum(np.maximum(cut.reached_s, whole_s + cut.turned_s), cut.slowest_s) + cut.step_s
    )
    return np.maximum(np.maximum(paths_s, cut.least_s), whole_s + cut.left_s)


def least_path_s(row: UnitRow, schedule: Schedule, cut: PartialCut) -> Seconds:
    """A lower bound on the longest path, whatever stages the remaining units form. `cut` has the
    first stages.
    """
    if not schedule.alternates:
        return path_s(row, schedule, cut)
    return np.maximum(np.maximum(cut.reached_s, cut.slowest_s) + cut.step_s, cut.least_s)


def least_step_s(rows: Sequence[UnitRow], schedule: Schedule, runs: Sequence[StageRun]) -> float:
    """The seconds of the longest path through these stages, one on each rank; a lower bound on the
    step without its constant part.
    """
    kinds = kinds_of(rows)
    cut = reduce(lambda cut, run: extended(rows, kinds, schedule, cut, run), runs, NO_CUT)
    return float(path_s(rows[-1], schedule, cut))
