"""Twenty steps of AdamW and Adafactor under composed plans (benchmarks/exactness/optimizer_runs.py): one here, all with --runslow."""

from __future__ import annotations

import pytest

from benchmarks.exactness import runtime_matrix
from benchmarks.exactness.optimizer_runs import RUNS, STEPS, Found, run_optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "run",
    [RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in RUNS[1:])],
    ids=lambda run: run.text,
)
def test_loss_curve_and_parameters_are_those_of_one_device(run):
    found = run_optimizer(run)
    assert found.error <= 1e-9 and found.loss_error <= 1e-9, found
    assert (
        len(found.losses) == STEPS
        and found.losses[-1] < found.losses[0] - 0.2
        and found.clipped > STEPS / 2
    )


def test_the_command(monkeypatch, capsys):
    found = {RUNS[0].text: Found(1e-12, "w", 1e-13, 20, (2.0, 1.0))}
    monkeypatch.setattr(
        runtime_matrix,
        "run_optimizer",
        lambda run: found.get(run.text, Found(1e-12, "w", 0.0, 3, (2.0, 1.0))),
    )
    assert runtime_matrix.main(["--adamw"]) == 0
    found[RUNS[0].text] = Found(1e-12, "w", 1e-8, 20, (2.0, 1.0))
    assert runtime_matrix.main(["--adamw"]) == 1
    assert (
        f"{RUNS[0].text}: failed; parameters 1.0e-12 (w), 2 losses 1.0e-08"
        in capsys.readouterr().out
    )
