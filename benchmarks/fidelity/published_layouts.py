"""The planner's free choice against layouts of published runs, both as the cost model predicts.

    python benchmarks/fidelity/published_layouts.py RUNS.csv [--limit N] [--time-limit 60] [--tolerance 0.0001] [--output FILE]

The file has the columns of `autopar predict`. Every layout in it is priced as `autopar predict`
prices it. The same model, batch, cluster and software are then planned without pins, once for rows
that differ in their layouts alone. The GPUs have the memory of the run, or what the row's layout is
predicted to need if that is more (`!`). So the planner could have chosen the row's layout.  Prints
a line a row, then those of which the free choice is predicted to be slower; exit code 1 if there
are any.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.errors import AutoparError
from autopar.foreign.published.evaluate import case_of, plan_freely, price_run, spec_of_run
from autopar.foreign.published.run import Run, RunPrediction
from autopar.foreign.published.runs import read_runs
from autopar.ir.plan import Plan
from autopar.text.plan_words import short_words
from autopar.text.units import ms
from benchmarks.fidelity.measured_steps import cpu_name, versions

ROOM = 1.001
"""Memory for the free choice, relative to what the pinned layout needs: solvers round bytes up."""


@dataclass(frozen=True, slots=True)
class Row:
    """A published run, the prediction `pinned` for its layout, and the plan `free` that the planner
    chooses itself. If one is missing (None), `reason` says why. `roomier`: planned for more memory
    than the devices have, since the run's layout is predicted to need it. `took_s`: seconds for all
    this.
    """

    run: Run
    pinned: RunPrediction | None
    free: Plan | None
    took_s: float
    roomier: bool = False
    reason: str = ""

    @property
    def slower(self) -> float | None:
        """How much slower the free choice is predicted to be, as a share; negative if it is faster.
        None if there is no free plan.
        """
        return (
            None
            if self.free is None
            else self.free.predicted.step_time_s / self.pinned.step_time_s - 1
        )


def compared(run: Run, time_limit_s: float, planned: dict[tuple, Plan]) -> Row:
    """Price the layout of a run, and plan its task freely, for at most `time_limit_s` seconds.
    If the layout needs more memory than the devices have, the free plan gets as much. `planned`
    caches plans by task, since some runs differ only in their layouts. An error becomes the row's
    `reason`.
    """
    start, pinned = time.perf_counter(), None
    try:
        case = case_of(run)
        pinned = price_run(case)
        if run.one_layer:
            raise AutoparError("it timed one layer alone, for which nothing can be planned")
        memory_bytes = max(case.cluster.device.memory_bytes, ceil(ROOM * pinned.peak_memory_bytes))
        task = (
            replace(spec_of_run(run), name=""),
            run.seq,
            run.global_batch,
            case.cluster,
            case.software,
            memory_bytes,
        )
        if task not in planned:
            planned[task] = plan_freely(case, memory_bytes, time_limit_s)
        free = planned[task]
    except AutoparError as error:
        return Row(run, pinned, None, time.perf_counter() - start, reason=str(error))
    return Row(
        run,
        pinned,
        free,
        time.perf_counter() - start,
        memory_bytes > case.cluster.device.memory_bytes,
    )


def layout(run: Run) -> str:
    """The layout of a run as text, such as `pp=12 dp=4 tp=8 x2 mb=1 ZeRO-1 full`."""
    by = run.layout
    degrees = {"pp": by.pp, "dp": by.dp, "ep": by.ep, "cp": by.cp, "tp": by.tp}
    words = [f"{axis}={size}" for axis, size in degrees.items() if size > 1] or ["1 device"]
    words += [f"x{by.vpp}"] if by.vpp > 1 else []
    words += [f"mb={by.micro_batch}"] + ([f"ZeRO-{by.zero}"] if by.zero else [])
    return " ".join(words + ([by.recompute] if by.recompute != "none" else []))


def line(row: Row) -> str:
    text = f"{row.run.id[:34]:34s} {layout(row.run):38s}"
    if row.free is None:
        return f"{text} {row.reason[:80]}"
    mark = "!" if row.roomier else " "
    return (f"{text} {ms(row.pinned.step_time_s):>12s} {ms(row.free.predicted.step_time_s):>12s} {100 * row.slower:+8.2f} %{mark} "
            f"{100 * max(row.free.certificate.gap, 0):5.1f} % {row.took_s:6.1f} s  {short_words(row.free)}")  # fmt: skip


def verdict(rows: Sequence[Row], tolerance: float) -> list[str]:
    """Lines of text: how many rows were planned freely and how many of these are slower by more
    than `tolerance`, then each slower one, worst first.
    """
    free = [row for row in rows if row.free is not None]
    slower = sorted((row for row in free if row.slower > tolerance), key=lambda row: -row.slower)
    words = f"{len(free)} of {len(rows)} runs were planned freely; the free choice is predicted to be slower in {len(slower)}"
    return [
        words,
        *(
            f"SLOWER by {100 * r.slower:.2f} %: {r.run.id}, {layout(r.run)}; free: {short_words(r.free)}"
            for r in slower
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", metavar="RUNS.csv")
    parser.add_argument("--limit", type=int, help="only the first N runs")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        help="seconds to search for each plan (default 60)",
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=1e-4,
        help="share by which the free choice may be slower (default 0.0001)",
    )
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    runs, problems = read_runs(args.runs)
    lines = [versions(), f"on {cpu_name()}; at most {args.time_limit:g} s of search", ""]
    lines.append(
        f"{'run':34s} {'its layout':38s} {'predicted':>12s} {'free choice':>12s} {'slower by':>10s} {'gap':>8s} {'took':>7s}"
    )
    print("\n".join(lines))
    rows, planned = [], {}
    for run in runs[: args.limit]:
        rows.append(compared(run, args.time_limit, planned))
        lines.append(line(rows[-1]))
        print(lines[-1], flush=True)
    more = [
        "",
        *verdict(rows, args.tolerance),
        f"{len(problems)} rows of the file could not be read as runs",
    ]
    print("\n".join(more))
    if args.output:
        Path(args.output).write_text("\n".join([*lines, *more]) + "\n")
    return int(any(row.slower is not None and row.slower > args.tolerance for row in rows))


if __name__ == "__main__":
    sys.exit(main())
