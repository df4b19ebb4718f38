"""What it costs to stay within what another framework can run, for the named models.

    python -m benchmarks.search.target_cost [--targets megatron torchtitan] [--cases llama3-8b/64 ...]
                                            [--time-limit 60] [--output FILE]

Each line has two plans at the prices of the target's software: the fastest within the target, and
the fastest without its limits. Each search ends at the time limit; `gap` is what is not proved then.
The cost is that of the restriction: how much longer the first plan takes. If the free search found
nothing faster in its time, the cost is 0.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from autopar import api
from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.models import parse_model
from autopar.request.pins import Pins
from autopar.request.plan_request import PlanRequest, choose_precision
from autopar.targets.job import ModelShape
from autopar.targets.model_shape import shape_of
from autopar.targets.registry import TARGETS, target_of
from autopar.text.plan_words import short_words
from autopar.text.units import ms
from benchmarks.fidelity.measured_steps import cpu_name, versions
from benchmarks.speed.planning import CASES, Asked

HEAD = f"{'':22s} {'target':12s} {'within':>10s} {'gap':>7s} {'free':>10s} {'gap':>7s} {'cost':>7s}  plans"


def plans_of(asked: Asked, name: str, time_limit_s: float) -> tuple[Plan, Plan]:
    """The fastest plan within a target and without its limits. Raises AutoparError if there is none."""
    spec, cluster = parse_model(asked.model), ClusterSpec.parse(asked.cluster)
    target, precision = target_of(name), choose_precision(cluster)
    software = target.software_for(cluster.device.generation)
    pin = Pins.of(asked.pin)
    batch = asked.global_batch
    free = PlanRequest(cluster, batch, pin, precision, False, spec.name, software=software)
    limits = target.restriction(shape_of(spec) or ModelShape(), asked.seq)
    traced = api.trace_spec(spec, asked.seq)
    plans = [
        api.plan_traced(traced, request, time_limit_s) for request in (free.within(limits), free)
    ]
    return plans[0], min(plans, key=lambda plan: plan.predicted.step_time_s)


def line(asked: Asked, name: str, time_limit_s: float) -> str:
    """A line on a named model within a target."""
    begin = f"{asked.name:22s} {name:12s}"
    try:
        within, free = plans_of(asked, name, time_limit_s)
    except AutoparError as error:
        return f"{begin} {str(error)[:120]}"
    cells = [
        f"{ms(plan.predicted.step_time_s):>10s} {100 * plan.certificate.gap:5.1f} %"
        for plan in (within, free)
    ]
    cost = within.predicted.step_time_s / free.predicted.step_time_s - 1
    plans = f"{short_words(within)} | {short_words(free)}"
    return f"{begin} {' '.join(cells)} {100 * cost:5.1f} %  {plans}"


def main(arguments: Sequence[str] | None = None) -> None:
    names = [asked.name for asked in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=["megatron", "torchtitan"], choices=TARGETS)
    parser.add_argument("--cases", nargs="*", default=names, choices=names, metavar="NAME")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds of each search")
    parser.add_argument("--output", help="write what is printed to a file as well")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    lines = [versions(), f"on {cpu_name()}; at most {args.time_limit:g} s of each search", "", HEAD]
    print("\n".join(lines), flush=True)
    for name in args.targets:
        for asked in (asked for asked in CASES if asked.name in args.cases):
            lines.append(line(asked, name, args.time_limit))
            print(lines[-1], flush=True)
            if args.output:
                Path(args.output).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
