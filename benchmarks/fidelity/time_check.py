"""The time check: predicted against measured step time of a fixed list of plans on CPU processes.

    python benchmarks/fidelity/time_check.py [--rounds 9] [--cluster cluster.yaml] [--output FILE]

Calibrates this machine as cpu:4 (or reads a calibration), plans one model under each line of
`PINS`, and runs every plan in fp32 through the engine on 4 gloo processes. Prints predicted and
measured seconds of a step, their ratio and Spearman's rank correlation. Plans take turns, so that
other work of the machine disturbs all of them. A step lasts as long as its slowest rank. A time is
the median of the rounds.  Exit code 1 if the correlation is below 0.8.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import warnings
from pathlib import Path

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.calibrate.cluster import calibrate
from autopar.foreign.published.score import spearman
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from benchmarks.fidelity.measured_steps import RANKS, SOFTWARE, cpu_name, measure, versions
from benchmarks.tasks import Task

MODEL, ROWS, SEQ = "llama:layers=4,hidden=256,heads=8,vocab=2048,seq=128", 16, 128
PINS = (
    {"tp": 1, "micro_batch": 1},
    {"tp": 1, "micro_batch": 4},
    {"tp": 1, "micro_batch": 1, "recompute": "full"},  # tp=1 has no sequence parallelism to turn on
    {"tp": 1, "micro_batch": 4, "recompute": "full"},
    *(
        {"tp": tp, "micro_batch": rows, "sequence_parallel": sp}
        for tp in (2, 4)
        for rows in (1, 4)
        for sp in (False, True)
    ),
)
LEAST = 0.8


def make_plans(cluster: ClusterSpec) -> list[Plan]:
    """One plan for each entry of `PINS`, in order, without recomputation and ZeRO unless pinned;
    the solver chooses the rest under the prices of `cluster`.
    """
    plan_under = Task(MODEL, cluster, ROWS, SEQ).planner(precision="fp32")
    return [plan_under({"recompute": "none", "zero": 0} | pin) for pin in PINS]


def report(plans: list[Plan], measured: list[float], breakdown: bool = False) -> str:
    """A text: a line for each plan, with predicted and measured seconds and their ratio, and the
    rank correlation. `breakdown` adds what each prediction consists of.
    """
    predicted = [plan.predicted.step_time_s for plan in plans]
    lines = [
        versions(),
        f"{RANKS} gloo processes on {cpu_name()}",
        f"{MODEL}: {ROWS} sequences of {SEQ} a step, {SOFTWARE}",
        "",
        f"{'plan':58s} {'predicted':>10s} {'measured':>10s} {'ratio':>6s}",
    ]
    for plan, pin, p, m in zip(plans, PINS, predicted, measured, strict=True):
        words = f"{plan.mesh} " + " ".join(
            f"{key}={value}" for key, value in pin.items() if key != "tp"
        )
        lines.append(f"{words:58s} {p:8.3f} s {m:8.3f} s {p / m:6.2f}")
        if breakdown:
            lines.append(
                "    "
                + ", ".join(
                    f"{part} {1e3 * seconds:.0f} ms"
                    for part, seconds in plan.predicted.breakdown.items()
                )
            )
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    lines += [
        "",
        f"Spearman {spearman(predicted, measured):.3f} (at least {LEAST}); median ratio {statistics.median(ratios):.2f}",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=9, help="steps of each plan after the warm-up (default 9)"
    )
    parser.add_argument(
        "--cluster", help="a calibrated cluster file of 4 devices, instead of calibrating now"
    )
    parser.add_argument(
        "--breakdown", action="store_true", help="print what each predicted time consists of"
    )
    parser.add_argument("--output", help="write the table to a file as well")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tell = functools.partial(print, file=sys.stderr)
    cluster = (
        ClusterSpec.parse(args.cluster) if args.cluster else calibrate(RANKS, "cpu", progress=tell)
    )
    if cluster.num_devices != RANKS:
        parser.error(
            f"--cluster {args.cluster} has {cluster.num_devices} devices; the plans are for {RANKS}"
        )
    plans = make_plans(cluster)
    measured = measure(Task(MODEL, cluster, ROWS, SEQ), plans, args.rounds)
    text = report(plans, measured, args.breakdown)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if spearman([plan.predicted.step_time_s for plan in plans], measured) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
