"""Fits of constants: what was put in comes out, and a source that is left out is not seen."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from autopar_cost_models import FITTED

from autopar.errors import AutoparError
from autopar.foreign.published.fit import FREE_CONSTANTS, fit_constants, sensitivities
from autopar.foreign.published.fit_report import fits_reply

PLACE = {name: place for place, name in enumerate(FREE_CONSTANTS)}


def made_up(powers: np.ndarray, truth, sources: list[str], noise: float = 0.0):
    """Runs whose time is a product of powers of the constants, measured with `truth`."""
    generator = np.random.default_rng(0)

    def time_s(number: int, constants) -> float:
        values = np.array(
            [getattr(constants, name) / getattr(FITTED, name) for name in FREE_CONSTANTS]
        )
        return float(np.prod(values ** powers[number]))

    measured = [
        SimpleNamespace(step_time_s=time_s(n, truth) * np.exp(noise * generator.normal()))
        for n in range(len(sources))
    ]
    runs = [
        SimpleNamespace(id=f"run{n}", source=source, measured=measured[n])
        for n, source in enumerate(sources)
    ]
    return runs, lambda run, constants: SimpleNamespace(
        step_time_s=time_s(int(run.id[3:]), constants)
    )


def test_constants_come_out_as_they_were_put_in():
    generator = np.random.default_rng(1)
    powers = -generator.uniform(0, 1, (120, len(FREE_CONSTANTS)))
    truth = replace(
        FITTED,
        hopper_efficiency=FITTED.hopper_efficiency * 0.9,
        hbm_efficiency=FITTED.hbm_efficiency * 1.1,
    )
    runs, evaluate = made_up(powers, truth, ["a", "b", "c"] * 40)
    found = fit_constants(sensitivities(runs, evaluate))
    for name in FREE_CONSTANTS:
        assert getattr(found.constants, name) == pytest.approx(getattr(truth, name), rel=0.01), name
    assert found.mape < 0.01 and found.left_out_mape < 0.02
    assert set(found.left_out) == {"a", "b", "c"} and all(
        len(errors) == 40 for errors in found.left_out.values()
    )


def test_a_source_that_is_left_out_is_not_seen():
    """All runs of source b are twice as slow as any constant explains: without it the constants stay, and it is wrong by half."""
    powers = np.zeros((40, len(FREE_CONSTANTS)))
    powers[:, PLACE["hopper_efficiency"]] = -1
    runs, evaluate = made_up(powers, FITTED, ["a"] * 30 + ["b"] * 10)
    for run in runs[30:]:
        run.measured.step_time_s *= 2
    found = fit_constants(sensitivities(runs, evaluate))
    assert found.constants_without["b"].hopper_efficiency == pytest.approx(
        FITTED.hopper_efficiency, rel=1e-6
    )
    assert [e for e in found.left_out["b"].values()] == pytest.approx([-0.5] * 10)
    assert all(e > 0.3 for e in found.left_out["a"].values())
    families = dict.fromkeys(found.errors, "gpt")
    assert "left_out_mape" in fits_reply([found], families).json()
    assert [part["by"] for part in json.loads(fits_reply([found, found], families).json())] == [
        "source",
        "source",
    ]


def test_what_is_not_measured_or_not_predicted_is_left_aside():
    runs, evaluate = made_up(np.zeros((3, len(FREE_CONSTANTS))), FITTED, ["a"] * 3)
    runs[0].measured.step_time_s = None

    def sometimes(run, constants):
        if run.id == "run1":
            raise AutoparError("no")
        return evaluate(run, constants)

    assert [run.id for run in sensitivities(runs, sometimes).runs] == ["run2"]
    with pytest.raises(AutoparError, match="nothing to fit on"):
        sensitivities(runs[:2], sometimes)
