"""Fits the constants of `autopar_cost_models.fitted` on measured runs: on all runs, and without one
source or model at a time.

Near the constants in use, step times are nearly products of powers of them. One table of
sensitivities, d log(time) / d log(constant), therefore serves all fits. It is computed by pricing
every run once more for each constant. Each fit is then a linear problem with the least absolute
error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from autopar_cost_models import FITTED, FittedConstants

from autopar.errors import AutoparError
from autopar.foreign.published.run import Run, RunPrediction
from autopar.foreign.published.score import GROUPINGS, mape, mean
from autopar.garbage import seldom_collected

FREE_CONSTANTS = (
    "ampere_efficiency", "hopper_efficiency", "blackwell_efficiency", "fp8_efficiency", "attention_efficiency", "hbm_efficiency",
    "launch_s", "intra_efficiency", "inter_efficiency", "overlap_slowdown", "deepspeed_pass_s",
)  # fmt: skip
"""The constants that affect step times, and are fitted."""

STEP = 0.05
"""The fraction by which a constant is changed to measure its effect on a run."""
PRIOR = 0.3
"""Prior spread of a constant's logarithm around the value in use. It bounds constants that only few
runs determine.
"""
NO_RUN = "no run has a measured step time and can be predicted"
_NOISE = 0.04
"""Errors of log time below this count as squares, since repeats of one run differ by 2-5 %."""


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """How errors of step time depend on the constants in `FREE_CONSTANTS`. `errors`, by run: log(predicted /
    measured) with the constants in use. `slopes`, by (run, constant): the change of that per unit
    of the constant's logarithm.
    """

    runs: tuple[Run, ...]
    errors: np.ndarray
    slopes: np.ndarray

    def fit(self, chosen: np.ndarray) -> np.ndarray:
        """The changes of the constants' logarithms, in the order of `FREE_CONSTANTS`, that minimize the
        absolute errors of the runs in the mask `chosen`. Errors below `_NOISE` count as squares, and
        the prior (`PRIOR`) keeps changes small.
        """
        errors, slopes, change = (
            self.errors[chosen],
            self.slopes[chosen],
            np.zeros(len(FREE_CONSTANTS)),
        )
        for _ in range(100):
            weights = 1 / np.maximum(np.abs(errors + slopes @ change), _NOISE)
            left = slopes.T @ (weights[:, None] * slopes) + np.eye(len(FREE_CONSTANTS)) / PRIOR**2
            change = np.linalg.solve(left, -slopes.T @ (weights * errors))
        return change

    def errors_after(self, change: np.ndarray) -> dict[str, float]:
        """By run id, the relative error of the step time after this change of the constants'
        logarithms.
        """
        errors = np.exp(self.errors + self.slopes @ change) - 1
        return dict(zip((run.id for run in self.runs), map(float, errors), strict=True))


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants fitted on all runs, with the errors by run. `by` says what runs are grouped by.
    `left_out` has the errors of each group's runs with constants fitted on all other groups
    (`constants_without`).
    """

    constants: FittedConstants
    errors: dict[str, float]  # run -> relative error
    left_out: dict[str, dict[str, float]]  # group -> run -> relative error
    constants_without: dict[str, FittedConstants]
    by: str = "source"

    @property
    def mape(self) -> float:
        """The mean absolute relative error over all runs."""
        return mape(self.errors.values())

    @property
    def bias(self) -> float:
        """The mean relative error over all runs."""
        return mean(self.errors.values())

    @property
    def left_out_mape(self) -> float:
        """The mean absolute relative error over all runs, each predicted with constants fitted
        without its group.
        """
        return mape(error for errors in self.left_out.values() for error in errors.values())


@seldom_collected()
def sensitivities(
    runs: Sequence[Run],
    evaluate: Callable[[Run, FittedConstants], RunPrediction],
    tell: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """The sensitivities of every run that has a measured step time and can be priced. Each run is
    priced again by `evaluate` with each constant changed in turn. Raises AutoparError if there is
    no such run.
    """
    found, errors, slopes = [], [], []
    for run in runs:
        if not run.measured.step_time_s:
            continue
        tell(f"pricing {run.id} with {len(FREE_CONSTANTS)} constants changed in turn")
        try:
            base = log(evaluate(run, FITTED).step_time_s)
            scaled = [
                log(evaluate(run, _scaled(name, 1 + STEP)).step_time_s) for name in FREE_CONSTANTS
            ]
        except AutoparError:
            continue
        found.append(run)
        slopes.append([(time - base) / log(1 + STEP) for time in scaled])
        errors.append(base - log(run.measured.step_time_s))
    if not found:
        raise AutoparError(f"{NO_RUN}: there is nothing to fit on")
    return Sensitivities(tuple(found), np.array(errors), np.array(slopes))


def fit_constants(table: Sensitivities, by: str = "source") -> Fit:
    """The fit on all runs, and on all runs except those of each group by a key of
    `score.GROUPINGS`.
    """
    names = np.array([GROUPINGS[by](run) for run in table.runs])
    whole = table.fit(np.ones(len(names), bool))
    left_out, without = {}, {}
    for group in map(str, dict.fromkeys(names)):
        change = table.fit(names != group)
        own = {run.id for run, name in zip(table.runs, names, strict=True) if name == group}
        left_out[group] = {run: e for run, e in table.errors_after(change).items() if run in own}
        without[group] = _changed(change)
    return Fit(_changed(whole), table.errors_after(whole), left_out, without, by)


def _scaled(name: str, factor: float) -> FittedConstants:
    return replace(FITTED, **{name: getattr(FITTED, name) * factor})


def _changed(change: np.ndarray) -> FittedConstants:
    factors = dict(zip(FREE_CONSTANTS, map(exp, change), strict=True))
    return replace(FITTED, **{name: getattr(FITTED, name) * by for name, by in factors.items()})
