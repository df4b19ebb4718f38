"""The independent time check: predicted against measured step time of a fixed list of plans on CPU processes.

    python benchmarks/time_check.py [--rounds 9] [--cluster cluster.yaml] [--output FILE]

Calibrates this machine as cpu:4 (or reads a calibration), plans one model under each line of `PINS`, runs every plan in fp32 through the
engine on 4 gloo processes, and prints predicted and measured seconds of a step, their ratio and Spearman's rank correlation.  Plans take
turns, so that what else the machine does disturbs all of them; a step lasts as long as its slowest rank; a time is the median of the
rounds.  Exit code 1 if the correlation is below 0.8.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from autopar import __version__, api
from autopar.calibrate.cluster import calibrate
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.predict.score import spearman
from autopar.runtime.engine import Engine
from autopar.runtime.launch import WorkerPool

MODEL, ROWS, SEQ, RANKS = "llama:layers=4,hidden=256,heads=8,vocab=2048,seq=128", 16, 128, 4
PINS = (
    {"tp": 1, "micro_batch": 1},
    {"tp": 1, "micro_batch": 4},
    {"tp": 1, "micro_batch": 1, "recompute": "full"},  # tp=1 has no sequence parallelism to turn on
    {"tp": 1, "micro_batch": 4, "recompute": "full"},
    *({"tp": tp, "micro_batch": rows, "sequence_parallel": sp} for tp in (2, 4) for rows in (1, 4) for sp in (False, True)),
)
LEAST = 0.8

_engines: list[Engine] = []  # of this rank, one a plan
_batch: dict[str, torch.Tensor] = {}


def make_plans(cluster: ClusterSpec) -> list[Plan]:
    """One plan for each line of `PINS`; all but the pins is the solver's choice under the prices of `cluster`."""
    spec = parse_model(MODEL)
    model, inputs = spec.build("meta"), spec.example_inputs(ROWS, SEQ)
    traced = api.trace(model, inputs, precision="fp32")
    free = {"recompute": "none", "zero": 0}
    return [api.plan(model, cluster, inputs, ROWS, free | pin, precision="fp32", runnable=True, traced=traced) for pin in PINS]


def build(rank: int, plans: list[str]) -> None:
    """The engines of this rank."""
    warnings.simplefilter("ignore")
    spec = parse_model(MODEL)
    _batch.update(spec.example_inputs(ROWS, SEQ, "cpu"))
    torch.manual_seed(0)
    model = spec.build("cpu")
    traced = api.trace(model, _batch, precision="fp32")
    for text in plans:
        _engines.append(Engine(model, traced, Plan.from_json(text), _optimizer, None, None, "cpu"))


def _optimizer(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, fused=True)


def step(rank: int, index: int) -> float:
    """Seconds of one step of plan `index` on this rank, from when all ranks are ready."""
    engine = _engines[index]
    batch = engine.local_batch(_batch)
    dist.barrier()
    start = time.perf_counter()
    engine.step(batch)
    return time.perf_counter() - start


def measure(plans: list[Plan], rounds: int) -> list[float]:
    """Seconds of a step of each plan: the median of the rounds."""
    with WorkerPool(RANKS) as pool:
        pool.run(build, [plan.to_json() for plan in plans], timeout_s=900)
        seconds: list[list[float]] = [[] for _ in plans]
        for turn in range(rounds + 1):
            for index in range(len(plans)):
                took_s = max(pool.run(step, index))
                if turn:  # the first is the warm-up
                    seconds[index].append(took_s)
            print(f"round {turn} of {rounds}", file=sys.stderr)
    return [statistics.median(found) for found in seconds]


def cpu_name() -> str:
    """The CPU's model, as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def report(plans: list[Plan], measured: list[float], breakdown: bool = False) -> str:
    """The table and its scores as text."""
    predicted = [plan.predicted.step_time_s for plan in plans]
    lines = [
        f"autopar {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {datetime.date.today()}",
        f"{RANKS} gloo processes on {cpu_name()}",
        f"{MODEL}: {ROWS} sequences of {SEQ} a step, fp32, fused AdamW",
        "",
        f"{'plan':58s} {'predicted':>10s} {'measured':>10s} {'ratio':>6s}",
    ]
    for plan, pin, p, m in zip(plans, PINS, predicted, measured, strict=True):
        words = f"{plan.mesh} " + " ".join(f"{key}={value}" for key, value in pin.items() if key != "tp")
        lines.append(f"{words:58s} {p:8.3f} s {m:8.3f} s {p / m:6.2f}")
        if breakdown:
            lines.append("    " + ", ".join(f"{part} {1e3 * seconds:.0f} ms" for part, seconds in plan.predicted.breakdown.items()))
    ratios = [p / m for p, m in zip(predicted, measured, strict=True)]
    lines += ["", f"Spearman {spearman(predicted, measured):.3f} (at least {LEAST}); median ratio {statistics.median(ratios):.2f}"]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="steps of each plan after the warm-up (default 9)")
    parser.add_argument("--cluster", help="a calibrated cluster file of 4 devices, instead of calibrating now")
    parser.add_argument("--breakdown", action="store_true", help="print what each predicted time consists of")
    parser.add_argument("--output", help="write the table to a file as well")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds} must be at least 1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    tell = functools.partial(print, file=sys.stderr)
    cluster = ClusterSpec.parse(args.cluster) if args.cluster else calibrate(RANKS, "cpu", progress=tell)
    if cluster.num_devices != RANKS:
        parser.error(f"--cluster {args.cluster} has {cluster.num_devices} devices; the plans are for {RANKS}")
    plans = make_plans(cluster)
    measured = measure(plans, args.rounds)
    text = report(plans, measured, args.breakdown)
    print(text)
    if args.output:
        Path(args.output).write_text(text + "\n")
    return 0 if spearman([plan.predicted.step_time_s for plan in plans], measured) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
