"""The planner's choice against plans of others (`rival_plans`): predicted, or measured on CPUs.

    python benchmarks/search/compare_plans.py [--cases llama3-8b/64 ...] [--random 4] [--time-limit 60] [--output FILE]
    python benchmarks/search/compare_plans.py --cpu [--cluster cluster.yaml] [--rounds 15] [--output FILE]

The first prints for each case step time, memory, and how much longer a step of each rival takes
than one of the chosen plan. Plans that do not fit are listed with the reason.  Exit code 1 if a
rival is predicted to be faster.  The second plans small models for this machine (calibrated now, or
`--cluster`), and measures every plan that the engine runs. The chosen plan is measured twice under
two names, which shows the noise.  Exit code 1 if the chosen plan of some model takes over 5 %
longer than the best that was tried.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from autopar.calibrate.cluster import calibrate
from autopar.ir.cluster import ClusterSpec
from autopar.request.pins import pin_text
from autopar.text.plan_words import short_words
from autopar.text.units import gib, ms
from benchmarks.fidelity.measured_steps import RANKS, SOFTWARE, cpu_name, measure, versions
from benchmarks.search.rival_plans import Rival, rivals
from benchmarks.tasks import Task

CASES = {
    "llama3-8b/64": Task("llama3-8b", "dgx-h100:8", 512, 8192),
    "gpt3-175b/1024": Task("gpt3-175b", "dgx-a100-80g:128", 1536, 2048),
    "llama3-70b/512": Task("llama3-70b", "dgx-h100:64", 1024, 8192),
    "mixtral-8x7b/128": Task("mixtral-8x7b", "dgx-h100:16", 512, 4096),
    "small": Task("llama:layers=4,hidden=1024,heads=8,vocab=32000,seq=1024", "h100:4", 32, 1024),
}
"""Tasks by name; `small` is for the tests of this file."""
CPU_MODELS = (
    ("llama:layers=4,hidden=256,heads=8,vocab=2048,seq=128", 16, 128),
    ("gpt:layers=4,hidden=384,heads=6,vocab=1024,seq=64", 16, 64),
    ("moe:layers=2,hidden=256,heads=8,vocab=1024,experts=4,top_k=2,seq=128", 16, 128),
)
AGAIN = "chosen again"
MOST = 0.05
"""How much longer than the best a measured step of the chosen plan may be, as a share."""
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Compared:
    """A task with its rivals, the chosen plan first. `measured_s` has measured seconds of a step by
    rival's name; it is empty if nothing was run.
    """

    task: Task
    rivals: tuple[Rival, ...]
    measured_s: dict[str, float]

    @property
    def faster(self) -> list[Rival]:
        """Rivals that are predicted to be faster than the chosen plan."""
        chosen_s = self.rivals[0].plan.predicted.step_time_s
        return [
            r
            for r in self.rivals
            if r.plan is not None and r.plan.predicted.step_time_s < chosen_s * (1 - ROUNDING)
        ]

    @property
    def measured_best(self) -> str:
        """The name of the plan with the shortest measured step; the chosen plan counts with the
        mean of its two measurements.
        """
        return min((name for name in self.measured_s if name != AGAIN), key=self.mean_s)

    @property
    def measured_regret(self) -> float:
        """How much longer a measured step of the chosen plan is than that of the best plan, as a
        share.
        """
        return self.mean_s("chosen") / self.mean_s(self.measured_best) - 1

    def mean_s(self, name: str) -> float:
        """Measured seconds of a step of a plan; of the chosen plan, the mean of its two
        measurements.
        """
        return (
            (self.measured_s[name] + self.measured_s[AGAIN]) / 2
            if name == "chosen"
            else self.measured_s[name]
        )

    @property
    def noise(self) -> float:
        """The difference between the two measurements of the chosen plan, as a share of
        the first.
        """
        return abs(self.measured_s[AGAIN] / self.measured_s["chosen"] - 1)


def predicted(task: Task, count: int, seed: int, time_limit_s: float) -> Compared:
    return Compared(
        task, tuple(rivals(task.planner(time_limit_s), task.cluster_spec, False, count, seed)), {}
    )


def measured(task: Task, count: int, seed: int, rounds: int) -> Compared:
    """Plan a task and its rivals (`count` random ones, drawn from `seed`), and measure on CPUs.
    Each rival that the engine runs is measured once, the chosen plan twice, over `rounds` steps.
    """
    found = tuple(rivals(task.planner(precision="fp32"), task.cluster_spec, True, count, seed))
    run = [r for r in found if r.plan is not None and not r.same_as]
    run.insert(1 + len(run) // 2, replace(found[0], name=AGAIN))
    return Compared(
        task,
        found,
        dict(zip([r.name for r in run], measure(task, [r.plan for r in run], rounds), strict=True)),
    )


def table(compared: Compared) -> str:
    """A text: a line for each rival of one task, the fastest prediction first, then the impossible
    ones with their reasons, then the verdict.
    """
    chosen_s = compared.rivals[0].plan.predicted.step_time_s
    rows = sorted(
        (r for r in compared.rivals if r.plan is not None),
        key=lambda r: r.plan.predicted.step_time_s,
    )
    lines = [
        str(compared.task),
        f"{'':14s} {'plan':56s} {'step':>12s} {'regret':>8s} {'memory':>10s}",
    ]
    lines[-1] += f" {'measured':>9s} {'regret':>8s}" if compared.measured_s else ""
    for rival in rows:
        step_s, peak = rival.plan.predicted.step_time_s, max(rival.plan.predicted.peak_memory_bytes)
        line = f"{rival.name:14s} {short_words(rival.plan):56s} {ms(step_s):>12s} {100 * (step_s / chosen_s - 1):+6.1f} % {gib(peak):>10s}"
        if rival.same_as:
            line += f"  the same as {rival.same_as}"
        elif compared.measured_s:
            line += _measured_words(compared, rival.name)
        lines.append(line)
        if rival is compared.rivals[0] and compared.measured_s:
            lines.append(f"{AGAIN:104s}" + _measured_words(compared, AGAIN))
    lines += [
        f"{r.name:14s} {pin_text(r.pin)}: {r.reason}" for r in compared.rivals if r.plan is None
    ]
    return "\n".join([*lines, _verdict(compared)])


def _measured_words(compared: Compared, name: str) -> str:
    seconds = compared.measured_s[name]
    return f" {seconds:7.3f} s {100 * (seconds / compared.mean_s('chosen') - 1):+6.1f} %"


def _verdict(compared: Compared) -> str:
    if compared.measured_s:
        regret, noise, count = (
            100 * compared.measured_regret,
            100 * compared.noise,
            len(compared.measured_s) - 1,
        )
        return (f"the chosen plan's measured step is {regret:.1f} % above the best of {count} plans ({compared.measured_best}); "
                f"two measurements of it differ by {noise:.1f} %")  # fmt: skip
    fits = sum(r.plan is not None for r in compared.rivals)
    names = ", ".join(r.name for r in compared.faster)
    return (
        f"FASTER THAN THE CHOSEN PLAN: {names}"
        if names
        else f"the chosen plan is the fastest of {fits} that fit"
    )


def summary(found: Sequence[Compared]) -> str:
    """One line of text that sums up all tasks, which were all measured or all only predicted."""
    if found[0].measured_s:
        worst = max(compared.measured_regret for compared in found)
        noise = max(compared.noise for compared in found)
        return (f"over {len(found)} models the chosen plan's measured step is within {100 * worst:.1f} % of the best of all plans tried "
                f"(at most {100 * MOST:g} %); noise up to {100 * noise:.1f} %")  # fmt: skip
    return f"{sum(not compared.faster for compared in found)} of {len(found)} chosen plans are the fastest of those tried"


def fails(compared: Compared) -> bool:
    return compared.measured_regret > MOST if compared.measured_s else bool(compared.faster)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "small"]
    )
    parser.add_argument("--random", type=int, default=4, help="random plans that fit (default 4)")
    parser.add_argument("--seed", type=int, default=0, help="of the random plans")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=60.0,
        help="seconds to search for each plan (default 60)",
    )
    parser.add_argument(
        "--cpu",
        action="store_true",
        help="plan small models for 4 CPU processes, run and measure them",
    )
    parser.add_argument(
        "--cluster",
        help="with --cpu: a calibrated cluster file of 4 devices, instead of calibrating now",
    )
    parser.add_argument(
        "--models", type=int, default=len(CPU_MODELS), help="with --cpu: how many models"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=15,
        help="with --cpu: steps of each plan after the warm-up (default 15)",
    )
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines, found = [versions(), f"on {cpu_name()}"], []
    if args.cpu:
        tell = functools.partial(print, file=sys.stderr)
        cluster = (
            ClusterSpec.parse(args.cluster)
            if args.cluster
            else calibrate(RANKS, "cpu", progress=tell)
        )
        lines[-1] = f"{RANKS} gloo processes {lines[-1]}; {SOFTWARE}"
        tasks = [Task(model, cluster, rows, seq) for model, rows, seq in CPU_MODELS[: args.models]]
    else:
        tasks = [CASES[name] for name in args.cases]
    print("\n".join(lines))
    for task in tasks:
        found.append(measured(task, args.random, args.seed, args.rounds) if args.cpu
                     else predicted(task, args.random, args.seed, args.time_limit))  # fmt: skip
        lines.append("\n" + table(found[-1]))
        print(lines[-1], flush=True)
    lines.append("\n" + summary(found))
    print(lines[-1])
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return int(any(map(fails, found)))


if __name__ == "__main__":
    sys.exit(main())
