"""Time and memory of planning, over numbers of GPUs, numbers of layers, and named models.

    python benchmarks/speed/planning.py [--gpus 8 64 ...] [--layers 8 16 ...] [--family llama] [--cases llama3-8b/64 ...]
                                       [--fuse] [--time-limit 60] [--output FILE]

Each line is one plan in a fresh process. `process` is the wall time of that process, from its start
to its end. `plan` is trace and search together, without the start of Python and imports. RSS is the
peak of all its processes; gap is the certificate's.  A part whose list is empty (`--gpus` without a
number) is left out.

`--fuse` plans each named model with fuse=off and with fuse=all, one after the other, and prints both.
It gives wall time and processor time of planning: user seconds of the process and its helpers.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

GPUS = (8, 64, 512, 4096, 16384)
LAYERS = (8, 16, 32, 64, 128)
SIZES = {
    "llama": "llama:layers={layers},hidden=4096,heads=32,kv_heads=8,ffn=14336,vocab=128256,seq=4096",
    "gpt": "gpt:layers={layers},hidden=4096,heads=32,vocab=51200,seq=4096",
}
SEQ, ROWS_PER_GPU, LAYERS_OF_GPUS, GPUS_OF_LAYERS = 4096, 4, 32, 256
PER_NODE = 8
FEW, MANY = 64, 16384
"""The numbers of GPUs whose ratio is printed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One plan to make.

    Attributes:
        name: the name of its row.
        model, cluster: MODEL and CLUSTER as on the command line.
        global_batch: sequences of a step.
        seq: tokens of a sequence.
        pin: pins by name.
    """

    name: str
    model: str
    cluster: str
    global_batch: int
    seq: int
    pin: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Took:
    """What one plan took: seconds of the whole process, and of imports, trace and search in it, and
    peak bytes. `user_s` is the processor time of trace and search, helpers included. `plan` describes
    it, and `step_s` and `memory_bytes` are what it predicts.
    `candidates` counts the entries of its certificate. If there is no plan, `error` says why.
    """

    process_s: float
    import_s: float
    trace_s: float
    search_s: float
    peak_bytes: int
    plan: str = ""
    step_s: float = 0.0
    gap: float = 1.0
    candidates: int = 0
    error: str = ""
    memory_bytes: int = 0
    user_s: float = 0.0

    @property
    def plan_s(self) -> float:
        return self.trace_s + self.search_s


CASES = (
    Asked("llama3-8b/64", "llama3-8b", "dgx-h100:8", 512, 8192, {}),
    Asked("gpt3-175b/1024", "gpt3-175b", "dgx-a100-80g:128", 1536, 2048, {}),
    Asked("llama3-70b/512", "llama3-70b", "dgx-h100:64", 1024, 8192, {}),
    Asked("mixtral-8x7b/128", "mixtral-8x7b", "dgx-h100:16", 512, 4096, {}),
    Asked("llama3-405b/16384", "llama3-405b", "dgx-h100:2048", 2048, 8192, {}),
    # table 1 of Narayanan et al., SC 2021
    Asked("gpt-1t/3072", "gpt-1t", "dgx-a100-80g:384", 3072, 2048, {}),
    Asked(
        "128 layers, 64 stages",
        "gpt:layers=128,hidden=12288,heads=96,vocab=51200,seq=2048",
        "dgx-a100-80g:64",
        512,
        2048,
        {"pp": 64},
    ),
)


def of_gpus(family: str, gpus: int) -> Asked:
    model = SIZES[family].format(layers=LAYERS_OF_GPUS)
    return Asked(f"{gpus:,} GPUs", model, _cluster(gpus), ROWS_PER_GPU * gpus, SEQ, {})


def of_layers(family: str, layers: int) -> Asked:
    model = SIZES[family].format(layers=layers)
    return Asked(
        f"{layers} layers", model, _cluster(GPUS_OF_LAYERS), ROWS_PER_GPU * GPUS_OF_LAYERS, SEQ, {}
    )


def _cluster(gpus: int) -> str:
    return f"h100:{gpus}" if gpus < PER_NODE else f"dgx-h100:{gpus // PER_NODE}"


def plan_here(asked: Asked, time_limit_s: float, started_s: float) -> Took:
    """Make a plan in this process, which began to import at `started_s` of `time.perf_counter`.
    `process_s` of the result is 0; the parent fills it in.
    """
    from autopar import api
    from autopar.errors import AutoparError
    from autopar.ir.cluster import ClusterSpec
    from autopar.models import parse_model
    from autopar.request.pins import Pins
    from autopar.request.plan_request import PlanRequest, choose_precision
    from autopar.text.plan_words import short_words

    warnings.simplefilter("ignore")
    imported_s, imported_user_s = time.perf_counter(), _user_s()
    spec, cluster = parse_model(asked.model), ClusterSpec.parse(asked.cluster)
    traced = api.trace_spec(spec, asked.seq)
    traced_s = time.perf_counter()
    request = PlanRequest(
        cluster, asked.global_batch, Pins.of(asked.pin), choose_precision(cluster), spec.name
    )
    plan, error = None, ""
    try:
        plan = api.plan_traced(traced, request, time_limit_s)
    except AutoparError as found:
        error = str(found)
    took = (
        0.0,
        imported_s - started_s,
        traced_s - imported_s,
        time.perf_counter() - traced_s,
        _peak_bytes(),
    )
    if plan is None:
        return Took(*took, error=error)
    return Took(
        *took,
        short_words(plan),
        plan.predicted.step_time_s,
        plan.certificate.gap,
        len(plan.certificate.meshes),
        memory_bytes=max(plan.predicted.peak_memory_bytes),
        user_s=_user_s() - imported_user_s,
    )


def _user_s() -> float:
    """User seconds of this process and of the helpers of its searches that have ended."""
    whose = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(resource.getrusage(who).ru_utime for who in whose)


def _peak_bytes() -> int:
    """Peak bytes of this process and of the helpers of its searches. Each helper counts as much as
    the largest.
    """
    from autopar.solve.search.workers import processes_for_search

    own, helper = (
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    return 1024 * (own + helper * (processes_for_search() - 1))  # Linux counts KiB


def plan_afresh(asked: Asked, time_limit_s: float) -> Took:
    """Make a plan in a separate process. If that fails, `error` is the last line of its stderr."""
    start = time.perf_counter()
    command = [
        sys.executable,
        __file__,
        "--one",
        json.dumps(asdict(asked)),
        "--time-limit",
        str(time_limit_s),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    process_s = time.perf_counter() - start
    if done.returncode:
        return Took(
            process_s,
            0.0,
            0.0,
            0.0,
            0,
            error=(done.stderr.strip().splitlines() or ["no message"])[-1],
        )
    return Took(**json.loads(done.stdout.splitlines()[-1]) | {"process_s": process_s})


def line(asked: Asked, took: Took) -> str:
    if took.error:
        return f"{asked.name:22s} {took.process_s:8.1f} s  {took.error[:100]}"
    return (f"{asked.name:22s} {took.process_s:8.1f} s {took.plan_s:8.1f} s {took.trace_s:7.1f} s {took.peak_bytes / 2**20:7,.0f} MiB "
            f"{100 * max(took.gap, 0):6.2f} % {took.candidates:6d}  {took.plan}")  # fmt: skip


def of_both(asked: Asked, off: Took, on: Took) -> str:
    """A line on a plan without fusion and with it."""
    if off.error or on.error:
        return f"{asked.name:22s} {(off.error or on.error)[:100]}"
    numbers = [
        (off.plan_s, on.plan_s, " s", ".1f"),
        (off.user_s, on.user_s, " s", ".1f"),
        (1e3 * off.step_s, 1e3 * on.step_s, " ms", ",.1f"),
        (off.memory_bytes / 2**30, on.memory_bytes / 2**30, " GiB", ".1f"),
    ]
    cells = [f"{a:{form}} -> {b:{form}}{unit} {b / a:.3f}" for a, b, unit, form in numbers]
    plans = f"{off.plan} -> {'the same' if on.plan == off.plan else on.plan}"
    return (
        f"{asked.name:22s} {cells[0]:>24s} {cells[1]:>24s} {cells[2]:>34s} {cells[3]:>26s}  {plans}"
    )


def ratio(took: dict[int, Took]) -> str:
    """A text on how much longer planning for MANY GPUs takes than for FEW; empty unless both were
    planned.
    """
    if not {FEW, MANY} <= took.keys() or took[FEW].error or took[MANY].error:
        return ""
    whole, alone = took[MANY].process_s / took[FEW].process_s, took[MANY].plan_s / took[FEW].plan_s
    return f"{MANY:,} GPUs take {whole:.2f} times as long as {FEW} ({alone:.2f} times without start and imports)"


def both(cases: Sequence[Asked], time_limit_s: float, say: Callable[[str], None]) -> list[Took]:
    """Plan each case with fuse=off and with fuse=all, in separate processes. Passes one line of text
    for both to `say`, and returns all results.
    """
    say(
        f"\nfuse=off -> fuse=all\n{'':22s} {'plan':>24s} {'processor':>24s} {'step':>34s} {'memory':>26s}  chosen"
    )
    found = []
    for asked in cases:
        pair = [
            plan_afresh(replace(asked, pin=asked.pin | {"fuse": mode}), time_limit_s)
            for mode in ("off", "all")
        ]
        say(of_both(asked, *pair))
        found += pair
    if found and not any(one.error for one in found):
        (off_s, off_user_s), (on_s, on_user_s) = (
            (sum(one.plan_s for one in half), sum(one.user_s for one in half))
            for half in (found[::2], found[1::2])
        )
        say(
            f"together: {off_s:.1f} -> {on_s:.1f} s {on_s / off_s:.3f}, "
            f"processor {off_user_s:.1f} -> {on_user_s:.1f} s {on_user_s / off_user_s:.3f}"
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    started_s = time.perf_counter()
    names = [asked.name for asked in CASES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, nargs="*", default=GPUS)
    parser.add_argument("--layers", type=int, nargs="*", default=LAYERS)
    parser.add_argument(
        "--family", choices=SIZES, default="llama", help="of the models of --gpus and --layers"
    )
    parser.add_argument("--cases", nargs="*", default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument(
        "--time-limit", type=float, default=60.0, help="seconds to search for a plan (default 60)"
    )
    parser.add_argument("--fuse", action="store_true", help="plan named models also with fuse=all")
    parser.add_argument("--output", help="write what is printed to a file as well")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.one is not None:
        print(
            json.dumps(asdict(plan_here(Asked(**json.loads(args.one)), args.time_limit, started_s)))
        )
        return 0
    if unknown := set(args.cases) - set(names):
        parser.error(f"--cases: {', '.join(sorted(unknown))} is not known; {', '.join(names)} are")
    if odd := [gpus for gpus in args.gpus if gpus > PER_NODE and gpus % PER_NODE]:
        parser.error(f"--gpus: {odd[0]} GPUs are no whole nodes of {PER_NODE}")
    from benchmarks.fidelity.measured_steps import cpu_name, versions

    lines = [versions(), f"on {cpu_name()}; at most {args.time_limit:g} s of search"]
    print("\n".join(lines))

    def say(text: str) -> None:
        lines.append(text)
        print(text, flush=True)

    def part(title: str, asked: Sequence[Asked]) -> list[Took]:
        if asked:
            say(
                f"\n{title}\n{'':22s} {'process':>10s} {'plan':>10s} {'(trace)':>9s} {'RSS':>11s} {'gap':>8s} {'cand.':>6s}  chosen"
            )
        found = []
        for one in asked:
            found.append(plan_afresh(one, args.time_limit))
            say(line(one, found[-1]))
        return found

    of = f"{args.family}, {ROWS_PER_GPU} sequences of {SEQ} a GPU"
    took = part(
        f"{of}, {LAYERS_OF_GPUS} layers", [of_gpus(args.family, gpus) for gpus in args.gpus]
    )
    if words := ratio(dict(zip(args.gpus, took, strict=True))):
        say(words)
    took += part(
        f"{of}, {GPUS_OF_LAYERS} GPUs", [of_layers(args.family, layers) for layers in args.layers]
    )
    cases = [asked for asked in CASES if asked.name in args.cases]
    if args.fuse:
        took += both(cases, args.time_limit, say)
    else:
        took += part("named models", cases)
    if args.output:
        Path(args.output).write_text("\n".join(lines) + "\n")
    return int(any(one.error for one in took))


if __name__ == "__main__":
    sys.exit(main())
