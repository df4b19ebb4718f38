"""Random requests: Python and the command line give one plan, and its file alone answers and runs.

    python -m benchmarks.exactness.saved_plans --requests 300 --seed 0 --output outcomes.jsonl

Each request (`drawn_requests.py`) is asked of `autopar.plan` and of `autopar explain`. All that both
save and print must be equal, to the digit. A refusal must have the same words.

Then the file of the plan is explained, audited, replayed, compared with itself and exported, without
anything said again; a share of the files in a fresh process. What is said of the file must be what
was said when the plan was made.

Commands of this process share the captures of a request. Fresh processes, and those that run a plan,
capture the model themselves.

A plan for CPU processes is run from its file (`file_runs.py`). Gradients, parameters and losses are
compared with those of one device.

`--output` gets a line of JSON for each request. Exit code 1 if anything disagrees.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import autopar
from autopar import api
from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.planning import planner
from autopar.verify.verify import widened
from benchmarks.exactness.drawn_requests import Draw, Request
from benchmarks.exactness.file_answers import (
    Outcome,
    asked_about,
    command,
    crash_of,
    error_of,
    file_alone,
    made_again,
)
from benchmarks.exactness.file_runs import run_file
from benchmarks.snapshot import differences

LONGEST_S = 100
"""Seconds after which a request is given up, and not counted."""
CLUSTER_FILE = """
name: our lab
device: {name: our GPU, flops: {bf16: 312TFLOPS, fp16: 312TFLOPS, fp32: 19.5e12}, memory_bytes: 40GiB, memory_bandwidth_Bps: 1.5TB/s}
nodes: 2
devices_per_node: 2
intra_bandwidth_Bps: 250GB/s
intra_latency_s: 3.0e-6
inter_bandwidth_Bps: 100Gb/s
inter_latency_s: 8.0e-6
price_per_device_hour: 1.9
headroom: 0.1
host: {memory_bytes: 128GiB, memory_bandwidth_Bps: 50GB/s, link_bandwidth_Bps: 25GB/s}
"""


@contextmanager
def shared_captures() -> Iterator[None]:
    """A context in which equal models and batches are captured once."""
    captures: dict[Any, Any] = {}
    original = api.trace

    def trace(model: nn.Module, inputs: Mapping[str, Tensor], *args: Any, **named: Any) -> Any:
        state = [*model.named_parameters(), *model.named_buffers(), *inputs.items()]
        tensors = [(name, tuple(t.shape), t.dtype, t.requires_grad) for name, t in state]
        key = repr((type(model), tensors, args, sorted(named.items())))
        if key not in captures:
            captures[key] = original(model, inputs, *args, **named)
        return captures[key]

    api.trace = trace
    try:
        yield
    finally:
        api.trace = original


# ------------------------------------------------------------------------------------------------------------ the two doors


def both_doors(asked: Request, outcome: Outcome, folder: Path) -> Plan | None:
    """The plan of the request, saved as `command.json` by the command; None if it is refused."""
    path, page = folder / "command.json", folder / "page.html"
    mine: Plan | str
    try:
        mine = asked.planned()
    except AutoparError as error:
        mine = " ".join(str(error).split())
    done = command(
        "explain",
        *asked.words,
        "--save",
        str(path),
        "--json",
        "--html",
        str(page),
        "--audit",
        "--replay",
    )
    if crash := crash_of(done):
        outcome.found("traceback of explain", crash)
    elif done.exit_code == 1:
        outcome.found("explain --audit --replay disagrees", done.stdout[-600:])
    theirs = Plan.load(str(path)) if path.exists() else error_of(done)
    if isinstance(mine, str) or isinstance(theirs, str):
        outcome.kind, outcome.words = "refused", mine if isinstance(mine, str) else str(theirs)
        if not (isinstance(mine, str) and isinstance(theirs, str)):
            who = "Python" if isinstance(mine, str) else "the command"
            outcome.found(f"only {who} refuses", outcome.words)
        elif _cause(mine) != _cause(theirs):
            outcome.found("refusals differ", f"Python: {mine}", f"command: {theirs}")
        return None
    outcome.kind, outcome.plan = "planned", short(theirs)
    found = list(differences(*(facts(plan, asked) for plan in (theirs, mine))))
    if found:
        outcome.found("plans differ, command -> Python", *found)
    try:
        printed = json.loads(done.stdout)
    except ValueError:
        outcome.found("explain --json prints no JSON", done.stdout[:200])
        return theirs
    given = {name: asked.arguments[name] for name in ("model", "example_inputs", "batch_dims")}
    if mine.precision == "fp64":  # the casts of an fp32 model are widened here
        given["model"] = given["model"].double()
    said = json.loads(json.dumps(autopar.explain(mine, **given).data))
    for name, data in (("command", printed), ("python", said)):
        (folder / f"{name}-made.json").write_text(json.dumps(data))
    found = list(differences(without(printed, asked), without(said, asked)))
    if found:
        outcome.found("reports differ, command -> Python", *found)
    mine.save(str(folder / "python.json"))
    outcome.checked.append("doors")
    return theirs


def _cause(words: str) -> str:
    """A refusal without what would fit instead, which commands look for among shorter sequences too,
    as long as time allows.
    """
    return re.split(r" (?:It fits|Nothing fits|Nothing that)\b", words)[0]


def short(plan: Plan) -> str:
    from autopar.text.plan_words import short_words

    return f"{short_words(plan)} {plan.precision}"


def facts(plan: Plan, asked: Request) -> dict[str, Any]:
    """All that a plan says, besides how its model is called, the time of its search, and notes that
    only one door can make.
    """
    data = json.loads(plan.to_json())
    return without(data, asked)


def without(data: Mapping[str, Any], asked: Request) -> dict[str, Any]:
    """The data of a plan or a report without what may differ between the doors."""
    data = {key: value for key, value in data.items() if key not in ("model_name", "digest")}
    for name in ("objective", "training", "audit", "replay"):  # which commands add
        data.pop(name, None)
    notes = data.get("notes", [])
    data["notes"] = [note for note in notes if not note.startswith(("the model ", "target "))]
    if "tokens_per_s" in asked.options:  # which Python says as a deadline
        data.pop("notes")
    elif "price" in asked.options:  # with which Python gives a cluster, and no text
        data["notes"] = [note for note in data["notes"] if not note.startswith("cluster ")]
    made_for = dict(data.get("made_for", {}))
    made_for.pop("model", None)
    certificate = dict(data.get("certificate", {}))
    certificate.pop("solve_time_s", None)
    if asked.options.get("runners_up") is False:
        certificate.pop("runners_up", None)
        certificate.pop("meshes", None)
        certificate.pop("unlimited_s", None)
    report = dict(data.get("report", {}))
    report.pop("command", None)
    return data | {"made_for": made_for, "certificate": certificate, "report": report}


# --------------------------------------------------------------------------------------------------------------- the command


def run_request(asked: Request, outcome: Outcome, draw: Draw) -> None:
    """All checks of one request; an exception is a disagreement."""
    precision = asked.options.get("precision") or ""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with widened(precision if asked.runs else ""), shared_captures():
                plan = both_doors(asked, outcome, folder)
                if plan is None:
                    return
                if draw.maybe(0.1):
                    asked_about(asked, outcome, str(folder / "command.json"))
                by_python = folder / "python.json"
                chosen = by_python if draw.maybe(0.3) and by_python.exists() else folder / "command.json"  # fmt: skip
                file_alone(asked, outcome, chosen, draw.maybe(0.12))
                if draw.maybe(0.2):
                    made = json.loads((folder / "command-made.json").read_text())
                    made_again(outcome, plan, made, folder)
            if asked.runs:
                run = run_file(asked.spec, asked.tokens, chosen)
                outcome.ran, outcome.error = run.status, run.error
                if run.status not in ("exact", "not for the engine"):
                    outcome.found(f"a run is {run.status}", run.words, run.error)
        except _TooLong:
            outcome.kind = "given up"
        except Exception:
            outcome.kind = outcome.kind or "failed"
            outcome.found("an exception", traceback.format_exc()[-1500:])


class _TooLong(BaseException):
    """A request takes longer than `LONGEST_S`."""


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """A context that raises `_TooLong` after `seconds`."""

    def end(*_: object) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5)  # again, if somebody catches it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def summary(outcomes: list[Outcome]) -> str:
    """Counts of outcomes, of what was checked, and of the classes of disagreements."""
    kinds, ran = (Counter(getattr(o, name) for o in outcomes) for name in ("kind", "ran"))
    checked = Counter(name for o in outcomes for name in set(o.checked))
    classes = Counter(kind for o in outcomes for kind, _ in o.findings)
    lines = [f"{len(outcomes)} requests: " + ", ".join(f"{n} {kind}" for kind, n in kinds.items())]
    lines += [", ".join(f"{n} {kind}" for kind, n in checked.most_common())]
    lines += ["runs: " + ", ".join(f"{n} {kind}" for kind, n in ran.items() if kind)]
    lines += [f"{n:4} {kind}" for kind, n in classes.most_common()]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="the number of the first request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=float, default=0.5, help="the share for CPU processes")
    parser.add_argument("--output", type=Path, help="a file, to which lines are added")
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    planner.processes_for_search = lambda: 1  # so that a search opens the same candidates again
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "lab.yaml")
        file.write_text(CLUSTER_FILE)
        for number in range(args.first, args.first + args.requests):
            draw = Draw(f"{args.seed}-{number}", args.runs, str(file))
            asked, start = draw.request(), time.perf_counter()
            outcome = Outcome(number, args.seed, asked.line, repr(dict(asked.options)))
            with at_most(LONGEST_S):
                run_request(asked, outcome, draw)
            outcome.time_s = time.perf_counter() - start
            outcomes.append(outcome)
            if args.output:
                with args.output.open("a") as stream:
                    stream.write(json.dumps(asdict(outcome)) + "\n")
            ran = outcome.ran and f"{outcome.ran}, {outcome.error:.1e}"
            print(number, outcome.kind, outcome.plan, ran, f"{outcome.time_s:.1f} s", flush=True)
            for kind, words in outcome.findings:
                print(f"   {kind}: {words}", flush=True)
    print(summary(outcomes))
    return int(any(outcome.findings for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
