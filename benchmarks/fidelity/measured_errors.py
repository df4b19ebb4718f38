"""Writes `autopar/text/measured.yaml`: the errors of predicted step times by kind of plan, and the runs behind them.

    python -m benchmarks.fidelity.measured_errors FITTED.csv --unseen OTHER.csv

FITTED has the runs on which constants were fitted, OTHER runs on which none was. Reports print the
error of the kind of a plan, and the run that is most like it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from autopar.foreign.published.command import predict_files
from autopar.foreign.published.evaluate import evaluate
from autopar.foreign.published.machines import device_of
from autopar.foreign.published.score import Scored, mape, mean
from autopar.text.measured import ANY_LAYOUT, FILE, PLAN_KINDS, PublishedRun, plan_kind

HEAD = """\
# Errors of predicted step times against published runs, by kind of plan, and the runs.
# Written by python -m benchmarks.fidelity.measured_errors: see there. `error` is predicted / measured - 1.
# `fitted`: constants were fitted on this run.
"""


def run_of(result: Scored, fitted: bool) -> PublishedRun:
    """What reports say of a run."""
    run = result.run
    dims, by = run.shape, run.layout
    assert result.time_error is not None and run.measured.step_time_s is not None
    return PublishedRun(
        id=run.id,
        source=run.source,
        device=device_of(run.machine.gpu),
        devices=run.machine.gpus,
        experts=dims.experts,
        seq=run.seq,
        tp=by.tp,
        pp=by.pp,
        cp=by.cp,
        ep=by.ep,
        zero=by.zero,
        fp8=run.precision.matmul == "fp8",
        step_time_s=round(run.measured.step_time_s, 4),
        error=round(result.time_error, 4),
        fitted=fitted,
    )


def kinds(runs: Sequence[PublishedRun]) -> list[dict[str, Any]]:
    """A row for each kind and for all runs: number of runs, mean absolute error, bias, share within 10 %."""
    rows = []
    for kind in (*PLAN_KINDS, ANY_LAYOUT):
        errors = [run.error for run in runs if kind in (plan_kind(run), ANY_LAYOUT)]
        if errors:
            rows.append(
                {
                    "kind": kind,
                    "runs": len(errors),
                    "mean_error": round(mape(errors), 4),
                    "bias": round(mean(errors), 4),
                    "within_10": round(mean(abs(error) <= 0.1 for error in errors), 4),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fitted", nargs="+")
    parser.add_argument("--unseen", nargs="*", default=[])
    args = parser.parse_args()
    runs: list[PublishedRun] = []
    for paths, fitted in ((args.fitted, True), (args.unseen, False)):
        found = predict_files(paths, evaluate, lambda text: print(text, file=sys.stderr))
        runs += [
            run_of(result, fitted)
            for result in found.scored
            if result.time_error is not None and not result.run.one_layer
        ]
    data = {"kinds": kinds(runs), "runs": [run.as_data() for run in runs]}
    FILE.write_text(
        HEAD + yaml.safe_dump(data, sort_keys=False, width=200, default_flow_style=None)
    )
    print(f"{len(runs)} runs in {FILE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
