"""What it costs to stay within what another framework can run, for the named models, and how the plan
compares with a published recipe.

    python -m benchmarks.search.target_cost [--targets megatron torchtitan] [--cases llama3-8b/64 ...]
                                            [--time-limit 60] [--output FILE]

Each line has two plans at the prices of the target's software: the fastest within the target, and
the fastest without its limits. Each search ends at the time limit; `gap` is what is not proved then.
`cost` is that of the restriction: how much longer the first plan takes. If the free search found
nothing faster in its time, the cost is 0.

`recipe` is the step of a layout that was published for the model and the target, at the same prices
on the same devices and batch. `plan` is how much longer the plan within the target takes, with a
minus sign if it is faster. A recipe does not fit if it leaves less memory free than plans do by
default. The exit code is 1 if a plan takes over 2 % longer than a recipe that fits.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.cli.session import Asked as Request
from autopar.cli.session import Planner
from autopar.errors import AutoparError
from autopar.foreign.frameworks.registry import TARGETS
from autopar.foreign.limits.frameworks import limits_of
from autopar.foreign.pinned import unlimited
from autopar.foreign.writers.export import exported_job
from autopar.ir.layout import Layout
from autopar.ir.plan import Plan
from autopar.request.pins import layout_pins
from autopar.text.device_words import fullest_rank
from autopar.text.plan_words import short_words
from autopar.text.units import gib, ms
from benchmarks.fidelity.measured_steps import cpu_name, versions
from benchmarks.speed.planning import CASES, Asked

MOST_SLOWER = 0.02
"""How much longer a plan may take than a recipe that fits: the tolerance for simpler plans."""

HEAD = f"{'':22s} {'target':12s} {'within':>10s} {'gap':>7s} {'free':>10s} {'gap':>7s} {'cost':>7s} {'recipe':>10s} {'plan':>8s}  plans"

_DGXC = "NVIDIA/dgxc-benchmarking 24.11.1"
_TITAN = "torchtitan"
_DEEP = (7, *(8 for _ in range(14)), 7)
"""Llama 3 405B: one layer fewer on the first and the last of 16 ranks."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A layout that was published for a model. `source` says where, and on what else it ran."""

    layout: Layout
    source: str


RECIPES = {
    ("llama3-8b/64", "megatron"): Recipe(
        Layout(cp=2, zero=1), f"{_DGXC}, llama3.1-8b on 64 H100"),
    ("llama3-8b/64", "torchtitan"): Recipe(
        Layout(zero=3, recompute="op"), f"{_TITAN}, docs/performance.md, Llama 3 8B on 64 A100, selective"),
    ("gpt3-175b/1024", "megatron"): Recipe(
        Layout(tp=8, pp=8, vpp=6, zero=1, recompute="selective", schedule="interleaved_1f1b", sequence_parallel=True),
        "MegaScale, arXiv:2402.15627, table 2, 175B on 1,024 A100"),
    ("llama3-70b/512", "megatron"): Recipe(
        Layout(tp=4, pp=4, cp=2, vpp=5, zero=1, schedule="interleaved_1f1b", sequence_parallel=True),
        f"{_DGXC}, llama3.1-70b on 512 H100"),
    ("llama3-70b/512", "torchtitan"): Recipe(
        Layout(tp=8, zero=3, micro_batch=16, recompute="full", sequence_parallel=True),
        f"{_TITAN}, benchmarks/llama3_h100_202412_torchtitan.md, 70B on 256 H100"),
    ("mixtral-8x7b/128", "megatron"): Recipe(
        Layout(pp=4, vpp=8, ep=8, zero=1, schedule="interleaved_1f1b"),
        "NVIDIA/NeMo nemo/collections/llm/recipes/mixtral_8x7b.py, pretrain_recipe"),
    ("llama3-405b/16384", "megatron"): Recipe(
        Layout(tp=8, pp=16, zero=1, stages=_DEEP, schedule="1f1b", sequence_parallel=True),
        "Llama 3, arXiv:2407.21783, table 4, 16,384 H100"),
    ("llama3-405b/16384", "torchtitan"): Recipe(
        Layout(tp=8, pp=8, vpp=2, zero=2, stages=_DEEP, recompute="full", schedule="interleaved_1f1b", sequence_parallel=True),
        f"{_TITAN}, benchmarks/llama3_h100_202412_torchtitan.md, 405B on 512 H100"),
    ("gpt-1t/3072", "megatron"): Recipe(
        Layout(tp=8, pp=64, recompute="full", schedule="1f1b"),
        "Narayanan et al., arXiv:2104.04473, table 1, 1T on 3,072 A100"),
}  # fmt: skip
"""By the names of the case and the target. Data-parallel ranks are what the devices leave."""


def planner_of(asked: Asked, name: str, time_limit_s: float) -> Planner:
    """The planner of a named model within a target, at the prices of its software."""
    request = Request(
        model=asked.model,
        cluster=asked.cluster,
        global_batch=asked.global_batch,
        seq=asked.seq,
        time_limit=time_limit_s,
        target=name,
    )
    planner = Planner(request, lambda text: None)
    software = limits_of(name).software_for(planner.cluster.one_kind.device.generation)
    planner.request = replace(planner.request, software=software)
    return planner


def recipe_plan(planner: Planner, layout: Layout) -> Plan:
    """The plan with a layout, on devices with unlimited memory."""
    cluster = planner.cluster.one_kind
    layers = planner.spec.num_layers
    pins = layout_pins(
        replace(layout, global_batch=planner.request.global_batch), cluster.num_devices, layers
    )
    return planner.plan(pins, cluster=unlimited(cluster), within_target=False)


@dataclass(frozen=True, slots=True)
class Row:
    """The plans of a named model for a target, and the published recipe, None if there is none.
    `recipe_bytes` is what it needs, `room_bytes` what a plan may take.
    """

    asked: Asked
    target: str
    within: Plan
    free: Plan
    recipe: Plan | None
    recipe_bytes: float
    room_bytes: float

    @property
    def fits(self) -> bool:
        """Whether the recipe leaves as much memory free as a plan."""
        return self.recipe_bytes <= self.room_bytes

    @property
    def slower(self) -> float:
        """How much longer the plan takes than the recipe, relative; 0 without one."""
        return _slower(self.within, self.recipe) if self.recipe else 0.0

    @property
    def wrong(self) -> bool:
        """Whether the plan is slower than a recipe that fits, by more than the tolerance."""
        return self.recipe is not None and self.fits and self.slower > MOST_SLOWER

    def __str__(self) -> str:
        cells = [
            f"{ms(plan.predicted.step_time_s):>10s} {100 * plan.certificate.gap:5.1f} %"
            for plan in (self.within, self.free)
        ]
        cost = f"{100 * _slower(self.within, self.free):5.1f} %"
        recipe = f"{'-':>10s} {'-':>8s}"
        words = f"{short_words(self.within)} | {short_words(self.free)}"
        if self.recipe:
            recipe = f"{ms(self.recipe.predicted.step_time_s):>10s} {100 * self.slower:+6.1f} %"
            words += f" | {short_words(self.recipe)}"
        if not self.fits:
            words += f", which needs {gib(self.recipe_bytes)} of {gib(self.room_bytes)}"
        return f"{self.asked.name:22s} {self.target:12s} {' '.join(cells)} {cost} {recipe}  {words}"


def _slower(plan: Plan, other: Plan) -> float:
    return plan.predicted.step_time_s / other.predicted.step_time_s - 1


def row(asked: Asked, name: str, time_limit_s: float) -> Row:
    """The row of a named model for a target. Raises AutoparError if there is no plan, or if the
    target cannot say it.
    """
    planner = planner_of(asked, name, time_limit_s)
    within = planner.plan(asked.pin)
    exported_job(within, name, asked.model)  # it can be said
    plans = [within, planner.plan(asked.pin, within_target=False)]
    published = RECIPES.get((asked.name, name))
    recipe = recipe_plan(planner, published.layout) if published else None
    cluster = planner.cluster.one_kind
    peak = fullest_rank(recipe, cluster)[0] if recipe else 0.0
    free = min(plans, key=lambda plan: plan.predicted.step_time_s)
    return Row(asked, name, within, free, recipe, peak, cluster.room_bytes)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [asked.name for asked in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=["megatron", "torchtitan"], choices=TARGETS)
    parser.add_argument("--cases", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    lines, wrong = list[str](), list[str]()

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)
        if args.output:
            Path(args.output).write_text("\n".join(lines) + "\n")

    say(f"{versions()}\non {cpu_name()}; at most {args.time_limit:g} s of each search\n\n{HEAD}")
    for name in args.targets:
        for asked in (asked for asked in CASES if asked.name in args.cases):
            try:
                found = row(asked, name, args.time_limit)
            except AutoparError as error:
                say(f"{asked.name:22s} {name:12s} {str(error)[:200]}")
                continue
            say(str(found))
            wrong += [f"{asked.name}, {name}"] if found.wrong else []
    say("\nRecipes")
    for (case, name), recipe in RECIPES.items():
        if case in args.cases and name in args.targets:
            say(f"  {case}, {name}: {recipe.source}")
    slower = ", ".join(wrong) or "none"
    say(f"plans over {100 * MOST_SLOWER:g} % slower than a recipe that fits: {slower}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
