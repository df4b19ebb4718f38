"""The chance that a layout fits its GPU, and how true such chances are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import erf, exp, log, nan, sqrt

from autopar_cost_models import memory_error

from autopar.foreign.published.run import Run, RunPrediction

LEAST_CHANCE = 0.1
"""A layout is rejected if its chance to fit is below this."""

BINS = (0.0, 0.1, 0.3, 0.7, 0.9, 0.95, 1.0)
"""Ends of the intervals of chances in a reliability table."""


def run_fit_chance(
    run: Run, prediction: RunPrediction, spread: float = memory_error.SPREAD
) -> float | None:
    """The chance that the run fits its GPU (`memory_error.fit_chance`) with this spread of memory.
    None if the memory of the GPU is unknown.
    """
    if run.machine.memory_bytes is None:
        return None
    return memory_error.fit_chance(prediction.peak_memory_bytes, run.machine.memory_bytes, spread)


def separation(ran: Sequence[float], failed: Sequence[float]) -> float:
    """The area under the ROC curve: the share of pairs (a layout that ran, one that failed) in
    which the one that ran had the higher chance. Ties count half. NaN without pairs.
    """
    if not ran or not failed:
        return nan
    return sum((a > b) + (a == b) / 2 for a in ran for b in failed) / len(ran) / len(failed)


@dataclass(frozen=True, slots=True)
class Reliability:
    """Layouts whose chance lies between `low` and `high`: how many there are, their mean chance,
    and the share that ran.
    """

    low: float
    high: float
    count: int
    chance: float
    ran: float


def reliability(chances: Iterable[tuple[float, bool]]) -> tuple[Reliability, ...]:
    """The reliability table of (chance, whether the layout ran), without empty intervals."""
    pairs, found = list(chances), []
    for low, high in pairwise(BINS):
        inside = [p for p in pairs if low <= p[0] < high or (high == BINS[-1] == p[0])]
        if inside:
            count = len(inside)
            mean = sum(chance for chance, _ in inside) / count
            found.append(Reliability(low, high, count, mean, sum(ran for _, ran in inside) / count))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Spread:
    """Chances to fit with a spread of memory that is fitted on `count` measured runs. `name` says on
    which; `separation` and `reliability` are of all layouts.
    """

    name: str
    count: int
    spread: float
    separation: float
    reliability: tuple[Reliability, ...]


def fitted_spread(errors: Iterable[float]) -> float:
    """The root mean square of log(measured / predicted), of relative errors of memory. Raises
    ValueError for no errors.
    """
    logs = [log(1 + error) for error in errors]
    if not logs:
        raise ValueError("no error of memory: there is nothing to fit a spread on")
    return sqrt(sum(x * x for x in logs) / len(logs))


@dataclass(frozen=True, slots=True)
class OutcomeFit:
    """The spread of memory at which it is most likely that of `count` layouts those ran that did.
    `crashed` is the fraction of layouts that fail at any size, for other reasons than memory.
    """

    count: int
    spread: float
    crashed: float


_SPREADS = tuple(s / 100 for s in range(2, 41))
_CRASHED = tuple(c / 100 for c in range(26))
"""Values that `fitted_outcomes` tries."""


def fitted_outcomes(layouts: Iterable[tuple[float, bool]]) -> OutcomeFit | None:
    """The maximum likelihood of outcomes, from pairs (log(memory of the GPU / predicted memory),
    whether the layout ran): it runs with the chance (1 - crashed) Phi(log ratio / spread). None if
    no layout failed or none ran, since a spread then has no measure.
    """
    pairs = list(layouts)
    if len({ran for _, ran in pairs}) < 2:
        return None

    def likelihood(spread: float, crashed: float) -> float:
        total = 0.0
        for room, ran in pairs:
            chance = (1 - crashed) * (1 + erf(room / spread / sqrt(2))) / 2
            total += log(max(chance if ran else 1 - chance, exp(-50)))
        return total

    _, spread, crashed = max((likelihood(s, c), s, c) for s in _SPREADS for c in _CRASHED)
    return OutcomeFit(len(pairs), spread, crashed)


def spread_of(
    name: str, errors: Sequence[float], layouts: Iterable[tuple[Run, RunPrediction, bool]]
) -> Spread:
    """How true chances are, on `layouts` as (run, prediction, whether it ran), with the spread that
    relative errors of memory have.
    """
    spread = fitted_spread(errors)
    judged = [
        (chance, ran)
        for run, prediction, ran in layouts
        if (chance := run_fit_chance(run, prediction, spread)) is not None
    ]
    parted = [[chance for chance, ran in judged if ran == kind] for kind in (True, False)]
    return Spread(name, len(errors), spread, separation(*parted), reliability(judged))
