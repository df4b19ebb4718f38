"""Scores of predictions, computed from (run, prediction) pairs.

An error is predicted / measured - 1. A score that cannot be computed (no pairs, a constant ranking)
is NaN.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, log, nan, sqrt
from statistics import median

from autopar_cost_models import DEVICES
from autopar_cost_models.memory_error import FIT_CHANCE

from autopar.foreign.published.chances import (
    LEAST_CHANCE,
    OutcomeFit,
    Reliability,
    Spread,
    fitted_outcomes,
    reliability,
    run_fit_chance,
    separation,
    spread_of,
)
from autopar.foreign.published.machines import device_of
from autopar.foreign.published.run import Run, RunPrediction
from autopar.ir.model_shape import ModelShape
from autopar.request.framework_names import framework_of

WORST = 10
CLEAR_DIFFERENCE = 0.10
"""Two runs count as ordered if their measured times differ by more than this fraction of the
faster. Repeats of one run differ by 2-5 %.
"""
UNDER = 0.10
"""A memory prediction that is lower than the measurement by more than this fraction is reported."""
FAR_UNDER = 0.15
"""A memory prediction that is lower by more than this fraction is far too low."""
LARGE_GROUP = 20
"""Runs that a group has at least, of which the order is reported by itself."""
BATCH_TOLERANCE = 0.05
"""Runs are compared, by the time of one sequence, if their global batches differ by at most this
fraction. An example is 2,016 and 2,048, split over 6 and 8 ranks.
"""


@dataclass(frozen=True, slots=True)
class Scored:
    """A run with its prediction."""

    run: Run
    prediction: RunPrediction

    @property
    def time_error(self) -> float | None:
        """The signed relative error of the step time; None if it was not measured."""
        return prediction_error(self.prediction.step_time_s, self.run.measured.step_time_s)

    @property
    def memory_error(self) -> float | None:
        """The signed relative error of the peak memory, of the bytes that the measurement counts;
        None if it was not measured, as an analytic figure is not.
        """
        measured = self.run.measured
        size_bytes = measured.memory_bytes if measured.has_memory else None
        return prediction_error(
            self.prediction.memory_bytes(measured.memory_scope, measured.memory_of_first_rank),
            size_bytes,
        )

    @property
    def fits(self) -> bool | None:
        """Whether the predicted memory fits the GPU; None if its memory is unknown."""
        capacity = self.run.machine.memory_bytes
        return None if capacity is None else self.prediction.peak_memory_bytes <= capacity

    @property
    def fit_chance(self) -> float | None:
        """The chance that the run fits its GPU; None if its memory is unknown."""
        return run_fit_chance(self.run, self.prediction)

    @property
    def rejected(self) -> bool | None:
        """Whether the chance to fit is below `LEAST_CHANCE`; None if the GPU's memory is unknown."""
        chance = self.fit_chance
        return None if chance is None else chance < LEAST_CHANCE


def prediction_error(predicted: float, measured: float | None) -> float | None:
    """Predicted / measured - 1; None unless both are finite and measured is positive."""
    if measured is None or not isfinite(measured) or measured <= 0 or not isfinite(predicted):
        return None
    return predicted / measured - 1


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; NaN for no values."""
    found = list(values)
    return sum(found) / len(found) if found else nan


def mape(errors: Iterable[float]) -> float:
    """The mean absolute relative error; NaN for no values."""
    return mean(abs(error) for error in errors)


def median_error(errors: Iterable[float]) -> float:
    """The median absolute relative error; NaN for no values."""
    found = [abs(error) for error in errors]
    return median(found) if found else nan


# ---------------------------------------------------------------------------------------------------------------------- ranking


def ranks(values: Sequence[float]) -> list[float]:
    """1-based ranks. Equal values get the mean of their ranks."""
    order = sorted(values)
    return [(bisect_left(order, value) + bisect_right(order, value) + 1) / 2 for value in values]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation: Pearson's correlation of the ranks, with ties averaged. NaN for
    fewer than two values, for constant values, or if one is not finite. Raises ValueError if the
    lengths differ.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} values cannot be compared with {len(second)}")
    if len(first) < 2 or not all(map(isfinite, [*first, *second])):
        return nan
    a, b = ranks(first), ranks(second)
    middle = (len(a) + 1) / 2
    spread_a, spread_b = (sum((x - middle) ** 2 for x in side) for side in (a, b))
    if not spread_a or not spread_b:
        return nan
    together = sum((x - middle) * (y - middle) for x, y in zip(a, b, strict=True))
    return max(-1.0, min(1.0, together / sqrt(spread_a * spread_b)))


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """The loss from choosing by prediction: measured value of the choice with the least prediction
    / least measured value - 1. NaN for no values.

    If predictions tie, the choice with the largest measured value counts.
    """
    if not predicted:
        return nan
    least = min(predicted)
    chosen = max(m for p, m in zip(predicted, measured, strict=True) if p == least)
    return chosen / min(measured) - 1


def ordered_pairs(
    predicted: Sequence[float], measured: Sequence[float], difference: float = CLEAR_DIFFERENCE
) -> tuple[int, int]:
    """(pairs in the right order, all pairs) among pairs whose measured values differ by more than
    `difference` of the smaller.

    A tie in prediction counts as wrong.
    """
    right = total = 0
    for i, j in combinations(range(len(measured)), 2):
        if max(measured[i], measured[j]) > (1 + difference) * min(measured[i], measured[j]):
            total += 1
            right += (predicted[i] - predicted[j]) * (measured[i] - measured[j]) > 0
    return right, total


@dataclass(frozen=True, slots=True)
class Group:
    """The scores of runs with the same model, cluster, framework and dtype and nearly the same
    global batch, which differ in layout.

    `regret` uses the time of one sequence. `pairs` counts pairs that differ clearly; `pairs_right`
    counts those predicted in the right order.
    """

    name: str
    ids: tuple[str, ...]
    spearman: float
    regret: float
    pairs_right: int
    pairs: int


def comparable(results: Iterable[Scored]) -> list[list[Scored]]:
    """Runs with a measured time, in groups of at least two that have the same model, GPUs, framework
    and dtype of linear layers, and nearly the same global batch. These are in order of appearance,
    then by global batch.
    """
    bins: dict[Hashable, list[Scored]] = {}
    for result in results:
        run = result.run
        if result.time_error is not None:
            framework = framework_of(run.software.framework)
            key = (run.shape, run.seq, run.one_layer, run.machine, run.precision.matmul, framework)
            bins.setdefault(key, []).append(result)
    groups: list[list[Scored]] = []
    for members in bins.values():
        current: list[Scored] = []
        for result in sorted(members, key=lambda r: r.run.global_batch):
            least = current[0].run.global_batch if current else 0
            if result.run.global_batch > (1 + BATCH_TOLERANCE) * least:
                current = []
                groups.append(current)
            current.append(result)
    return [group for group in groups if len(group) > 1]


def rank_group(group: Sequence[Scored]) -> Group:
    """The scores of one group from `comparable`."""
    predicted = [r.prediction.step_time_s / r.run.global_batch for r in group]
    measured = [(r.run.measured.step_time_s or nan) / r.run.global_batch for r in group]
    run, dims = group[0].run, group[0].run.shape
    batches = sorted({r.run.global_batch for r in group})
    name = (
        f"{dims.family} {dims.layers}x{dims.hidden}, {dims.heads} heads, seq {run.seq}, {run.precision.matmul}, "
        f"{run.machine.gpus} {run.machine.gpu}, batch {'-'.join(map(str, sorted({batches[0], batches[-1]})))}"
    )
    right, pairs = ordered_pairs(predicted, measured)
    return Group(
        name=name,
        ids=tuple(r.run.id for r in group),
        spearman=spearman(predicted, measured),
        regret=regret(predicted, measured),
        pairs_right=right,
        pairs=pairs,
    )


# ----------------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True, slots=True)
class TimeScore:
    """Scores of step times, over `count` runs: `median` is that of absolute errors, and `bias` the
    mean signed error. `within_10` is the fraction of errors of at most 10 %, `worst` the largest
    errors as (id, error).
    """

    count: int
    mape: float
    median: float
    bias: float
    within_10: float
    worst: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class RankScore:
    """Scores of the order of layouts: means over groups (`regret_worst`: the maximum), and pairs
    over all groups.
    """

    groups: tuple[Group, ...]
    spearman: float
    regret: float
    regret_worst: float
    pairs_right: int
    pairs: int

    @property
    def large(self) -> tuple[Group, ...]:
        """The groups of at least `LARGE_GROUP` runs."""
        return tuple(group for group in self.groups if len(group.ids) >= LARGE_GROUP)


@dataclass(frozen=True, slots=True)
class MemoryScore:
    """Scores of peak memory. `count` runs have a measured memory, over which `mape`, `median` and
    `bias` are.

    `under` are runs predicted more than 10 % below the measurement, `far_under` more than 15 %. `rejected` are runs that ran
    but have a chance to fit below `LEAST_CHANCE`, out of `judged` runs with known GPU memory. `rejected_unprinted`
    counts rejected runs whose recomputation is not printed, and taken as none. `accepted` are
    layouts that ran out of memory but have a higher chance, out of `out_of_memory` with known GPU
    memory. `separation` and `reliability` judge the chances to fit (`chances.py`). `sure` layouts have at least the
    chance `FIT_CHANCE`, of which `sure_ran` ran. `unsure` are layouts that ran and have a lower chance. The recomputation of
    `unprinted` layouts that ran is not printed, `unsure_unprinted` of them among `unsure`. `outcomes` is the spread by which
    layouts ran, of frameworks of which some failed. `spreads` judge chances with other spreads of memory: fitted on these runs,
    and without each framework of which layouts failed.
    """

    count: int
    mape: float
    median: float
    bias: float
    under: tuple[str, ...]
    far_under: tuple[str, ...]
    rejected: tuple[str, ...]
    rejected_unprinted: int
    judged: int
    accepted: tuple[str, ...]
    out_of_memory: int
    separation: float
    reliability: tuple[Reliability, ...]
    sure: int
    sure_ran: int
    unsure: tuple[str, ...]
    unsure_unprinted: int
    unprinted: int
    outcomes: OutcomeFit | None
    spreads: tuple[Spread, ...]


@dataclass(frozen=True, slots=True)
class Scores:
    """All scores of a set of runs."""

    time: TimeScore
    rank: RankScore
    memory: MemoryScore


def score_times(results: Iterable[Scored], worst: int = WORST) -> TimeScore:
    """The scores of predicted step times, over all results whose step time was measured. The
    `worst` largest errors are listed. Without a measured one, means are NaN.
    """
    errors = [(r.run.id, r.time_error) for r in results if r.time_error is not None]
    values = [error for _, error in errors]
    ordered = tuple(sorted(errors, key=lambda item: -abs(item[1]))[:worst])
    within_10 = mean(abs(v) <= 0.1 for v in values)
    return TimeScore(
        len(values), mape(values), median_error(values), mean(values), within_10, ordered
    )


def score_ranks(results: Iterable[Scored]) -> RankScore:
    """The scores of how well predictions order layouts of one model on one cluster, over all groups
    of `comparable`.
    """
    groups = tuple(map(rank_group, comparable(results)))
    regrets = [group.regret for group in groups]
    return RankScore(
        groups=groups,
        spearman=mean(group.spearman for group in groups if isfinite(group.spearman)),
        regret=mean(regrets),
        regret_worst=max(regrets, default=nan),
        pairs_right=sum(group.pairs_right for group in groups),
        pairs=sum(group.pairs for group in groups),
    )


def score_memory(results: Iterable[Scored], out_of_memory: Iterable[Scored] = ()) -> MemoryScore:
    """The scores of measured memory, and of predictions whether layouts fit. `out_of_memory` are
    layouts that are known not to fit.
    """
    everything = [*results, *out_of_memory]
    ran = [r for r in everything if not r.run.measured.out_of_memory]
    failed = [r for r in everything if r.run.measured.out_of_memory and r.fits is not None]
    errors = [(r.run.id, r.memory_error) for r in ran if r.memory_error is not None]
    values = [error for _, error in errors]
    judged = [
        (r.fit_chance, ok)
        for rs, ok in ((ran, True), (failed, False))
        for r in rs
        if r.fit_chance is not None
    ]
    unsure = [r for r in ran if r.fit_chance is not None and r.fit_chance < FIT_CHANCE]
    return MemoryScore(
        count=len(values),
        mape=mape(values),
        median=median_error(values),
        bias=mean(values),
        under=tuple(name for name, error in errors if error < -UNDER),
        far_under=tuple(name for name, error in errors if error < -FAR_UNDER),
        rejected=tuple(r.run.id for r in ran if r.rejected),
        rejected_unprinted=sum(bool(r.rejected) and "recompute" in r.run.defaulted for r in ran),
        judged=sum(r.fits is not None for r in ran),
        accepted=tuple(r.run.id for r in failed if not r.rejected),
        out_of_memory=len(failed),
        separation=separation([c for c, ok in judged if ok], [c for c, ok in judged if not ok]),
        reliability=reliability(judged),
        sure=sum(chance >= FIT_CHANCE for chance, _ in judged),
        sure_ran=sum(chance >= FIT_CHANCE and ok for chance, ok in judged),
        unsure=tuple(r.run.id for r in unsure),
        unsure_unprinted=sum("recompute" in r.run.defaulted for r in unsure),
        unprinted=sum(r.fits is not None and "recompute" in r.run.defaulted for r in ran),
        outcomes=_outcomes(ran, failed),
        spreads=_spreads(ran, failed),
    )


def _outcomes(ran: Sequence[Scored], failed: Sequence[Scored]) -> OutcomeFit | None:
    """The spread by which layouts ran, of the frameworks of which layouts failed: of others only
    what ran is published.
    """
    frameworks = {framework_of(r.run.software.framework) for r in failed}
    return fitted_outcomes(
        (log(memory / r.prediction.peak_memory_bytes), ok)
        for rs, ok in ((ran, True), (failed, False))
        for r in rs
        if framework_of(r.run.software.framework) in frameworks
        and (memory := r.run.machine.memory_bytes) is not None
    )


def _spreads(ran: Sequence[Scored], failed: Sequence[Scored]) -> tuple[Spread, ...]:
    """Chances with spreads that are fitted on the measured runs: on all, and without those of each
    framework of which layouts failed. None without such layouts.
    """
    frameworks = dict.fromkeys(framework_of(r.run.software.framework) for r in failed)
    found = []
    for left_out in (None, *frameworks) if frameworks else ():
        errors = [
            r.memory_error
            for r in ran
            if r.memory_error is not None and framework_of(r.run.software.framework) != left_out
        ]
        pairs = [(r.run, r.prediction, ok) for rs, ok in ((ran, True), (failed, False)) for r in rs]
        name = "all runs" if left_out is None else f"without {left_out}"
        if errors:
            found.append(spread_of(name, errors, pairs))
    return tuple(found)


def score(results: Sequence[Scored], out_of_memory: Sequence[Scored] = ()) -> Scores:
    """All scores of `results`. `out_of_memory` are layouts known to have failed, which count only
    for memory.
    """
    return Scores(score_times(results), score_ranks(results), score_memory(results, out_of_memory))


# ------------------------------------------------------------------------------------------------------------------- selections

SELECTIONS: dict[str, Callable[[Run], bool]] = {
    "tp or pp > 1": lambda run: run.layout.tp * run.layout.pp > 1,
    "FSDP or ZeRO-3": lambda run: run.layout.zero == 3,
    "fp8 dense": lambda run: run.precision.matmul == "fp8" and not run.shape.experts,
    "MoE": lambda run: run.shape.experts > 0,
    "one layer": lambda run: run.one_layer,
    "pipeline sweep (ALiBi, ZeRO-1, pp > 1)": lambda run: (
        run.shape.positions == "alibi" and run.layout.zero == 1 and run.layout.pp > 1
    ),
}
"""Named sets of runs, each with its condition. The last is BigScience's sweep of layouts of a 176B
model.
"""


def model_name(dims: ModelShape) -> str:
    """The model of a run by its widths. Depth and sequence do not count, so a model and its shorter
    proxies are one.
    """
    width = dims.moe_ffn or dims.ffn
    experts = f", {dims.experts} experts" if dims.experts else ""
    return f"{dims.family} {dims.hidden} x {width}, {dims.heads} heads{experts}"


GROUPINGS: dict[str, Callable[[Run], str]] = {
    "source": lambda run: run.source or "(none)",
    "gpu": lambda run: run.machine.gpu,
    "dtype": lambda run: run.precision.matmul,
    "framework": lambda run: framework_of(run.software.framework),
    "generation": lambda run: DEVICES[device_of(run.machine.gpu)].generation,
    "model": lambda run: model_name(run.shape),
    "family": lambda run: "experts" if run.shape.experts else run.shape.family,
    "tp": lambda run: f"tp = {run.layout.tp}",
}


def select(results: Iterable[Scored], selection: str) -> list[Scored]:
    """The results whose run belongs to a named selection."""
    return [result for result in results if SELECTIONS[selection](result.run)]


def grouped(results: Iterable[Scored], by: str) -> dict[str, list[Scored]]:
    """The results by the text that a function of `GROUPINGS` gives for their run, such as its
    source; groups in order of appearance.
    """
    found: dict[str, list[Scored]] = {}
    for result in results:
        found.setdefault(GROUPINGS[by](result.run), []).append(result)
    return found
