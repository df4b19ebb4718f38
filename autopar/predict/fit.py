"""Fits of the constants of `autopar_cost_models.fitted` on measured runs, with all of them or without one source at a time.

Near the constants in use, step times are nearly products of powers of them.  So one table of sensitivities, d log(time) / d log(constant),
made by pricing every run once more for each constant, serves all fits: each is a linear problem, solved for the least absolute error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np
from autopar_cost_models import FITTED, FittedConstants

from autopar.errors import AutoparError
from autopar.predict.run import Run, RunPrediction
from autopar.predict.score import mape, mean

FREE = (
    "ampere_efficiency", "hopper_efficiency", "blackwell_efficiency", "fp8_efficiency", "attention_efficiency", "hbm_efficiency",
    "tile_s", "launch_s", "intra_efficiency", "inter_efficiency", "overlap_slowdown", "deepspeed_pass_s",
)  # fmt: skip
"""The constants that step times tell about."""

STEP = 0.05
"""By which share a constant is changed to see what a run makes of it."""
PRIOR = 0.3
"""Spread of a constant's logarithm around the value in use: ties a constant that few runs tell about."""
NO_RUN = "no run has a measured step time and can be predicted"
NOISE = 0.04
"""Repeats of one run differ by 2-5 %; errors below it count as squares."""


@dataclass(frozen=True, slots=True)
class Sensitivities:
    """`errors` (runs): log(predicted / measured) with the constants in use; `slopes` (runs, constants): what it gains per unit of a
    constant's logarithm."""

    runs: tuple[Run, ...]
    errors: np.ndarray
    slopes: np.ndarray

    def fit(self, chosen: np.ndarray) -> np.ndarray:
        """Changes of the constants' logarithms that bring the absolute errors of the `chosen` runs to a minimum."""
        errors, slopes, change = self.errors[chosen], self.slopes[chosen], np.zeros(len(FREE))
        for _ in range(100):
            weights = 1 / np.maximum(np.abs(errors + slopes @ change), NOISE)
            left = slopes.T @ (weights[:, None] * slopes) + np.eye(len(FREE)) / PRIOR**2
            change = np.linalg.solve(left, -slopes.T @ (weights * errors))
        return change

    def errors_after(self, change: np.ndarray) -> dict[str, float]:
        """Relative error of the step time of each run once the constants have changed."""
        errors = np.exp(self.errors + self.slopes @ change) - 1
        return dict(zip((run.id for run in self.runs), map(float, errors), strict=True))


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants fitted on all runs; errors with them; and errors of each source with constants fitted on all others."""

    constants: FittedConstants
    errors: dict[str, float]  # run -> relative error
    left_out: dict[str, dict[str, float]]  # source -> run -> relative error
    constants_without: dict[str, FittedConstants]

    @property
    def mape(self) -> float:
        """Mean absolute relative error over all runs."""
        return mape(self.errors.values())

    @property
    def bias(self) -> float:
        """Mean relative error over all runs."""
        return mean(self.errors.values())

    @property
    def left_out_mape(self) -> float:
        """Over all runs, each predicted by constants that have not seen its source."""
        return mape(error for errors in self.left_out.values() for error in errors.values())


def sensitivities(
    runs: Sequence[Run],
    evaluate: Callable[[Run, FittedConstants], RunPrediction],
    tell: Callable[[str], None] = lambda text: None,
) -> Sensitivities:
    """Price every run that has a measured step time and can be priced, with each constant changed in turn."""
    found, errors, slopes = [], [], []
    for run in runs:
        if not run.measured.step_time_s:
            continue
        tell(f"pricing {run.id} with {len(FREE)} constants changed in turn")
        try:
            base = log(evaluate(run, FITTED).step_time_s)
            scaled = [log(evaluate(run, _scaled(name, 1 + STEP)).step_time_s) for name in FREE]
        except AutoparError:
            continue
        found.append(run)
        slopes.append([(time - base) / log(1 + STEP) for time in scaled])
        errors.append(base - log(run.measured.step_time_s))
    if not found:
        raise AutoparError(f"{NO_RUN}: there is nothing to fit on")
    return Sensitivities(tuple(found), np.array(errors), np.array(slopes))


def fit(table: Sensitivities) -> Fit:
    """Fit on all runs, and on all runs but those of each source."""
    sources = np.array([run.source for run in table.runs])
    whole = table.fit(np.ones(len(sources), bool))
    left_out, without = {}, {}
    for source in dict.fromkeys(sources):
        change = table.fit(sources != source)
        own = {run.id for run in table.runs if run.source == source}
        left_out[source] = {run: e for run, e in table.errors_after(change).items() if run in own}
        without[source] = _changed(change)
    return Fit(_changed(whole), table.errors_after(whole), left_out, without)


def _scaled(name: str, factor: float) -> FittedConstants:
    return replace(FITTED, **{name: getattr(FITTED, name) * factor})


def _changed(change: np.ndarray) -> FittedConstants:
    factors = dict(zip(FREE, map(exp, change), strict=True))
    return replace(FITTED, **{name: getattr(FITTED, name) * by for name, by in factors.items()})
