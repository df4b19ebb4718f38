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
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from torch import Tensor, nn

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import autopar
from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.writers.export import export
from autopar.ir.plan import Plan
from autopar.planning import planner
from autopar.request.framework_names import TARGET_NAMES
from autopar.verify.verify import relative_error, widened
from benchmarks.exactness import own_modules
from benchmarks.exactness.drawn_requests import Draw, Request
from benchmarks.exactness.file_runs import run_file
from benchmarks.snapshot import differences

MOST_LINES = 6
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
_AGAIN = (
    "mesh",
    "micro_batch",
    "schedule",
    "zero",
    "offload",
    "precision",
    "made_for.software",
    "predicted.step_time_s",
)
"""Fields of a plan that the command which a report prints must give again."""
_RESTS_ON_MODEL = ("lints", "objective", "outside")
"""What a report says only if it has the model or was just made."""


@dataclass
class Outcome:
    """What a request showed. `kind`: 'planned', 'refused' or 'failed'; `asked` has the words of the
    command. `findings` are (class, words) of what disagreed. `ran`: '' if its plan was not run,
    'exact', 'refused' or 'wrong'; `error` is the largest error, relative to the update.
    """

    number: int
    seed: int
    asked: str
    python: str
    kind: str = ""
    words: str = ""
    plan: str = ""
    ran: str = ""
    error: float = 0.0
    findings: list[tuple[str, str]] = field(default_factory=list)
    checked: list[str] = field(default_factory=list)
    time_s: float = 0.0

    def found(self, kind: str, *lines: object) -> None:
        """Adds a disagreement of a class."""
        self.findings.append((kind, " | ".join(str(line)[:600] for line in lines[:MOST_LINES])))


def command(*words: str) -> Result:
    """What a command does, in this process."""
    return CliRunner().invoke(cli, list(words))


def crash_of(done: Result) -> str:
    """The traceback of a command that raised anything but its exit; '' if none."""
    error = done.exception
    if error is None or isinstance(error, SystemExit):
        return ""
    return "".join(traceback.format_exception(error))[-1500:]


def error_of(done: Result) -> str:
    return " ".join(done.output.rpartition("Error: ")[2].split())


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
    done = command("explain", *asked.words, "--save", str(path), "--json", "--html", str(page))
    if crash := crash_of(done):
        outcome.found("traceback of explain", crash)
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
    data.pop("objective", None)
    data.pop("training", None)
    notes = data.get("notes", [])
    data["notes"] = [note for note in notes if not note.startswith(("the model ", "target "))]
    if "tokens_per_s" in asked.options:  # which Python says as a deadline
        data.pop("notes")
    made_for = dict(data.get("made_for", {}))
    made_for.pop("model", None)
    certificate = dict(data.get("certificate", {}))
    certificate.pop("solve_time_s", None)
    if asked.options.get("runners_up") is False:
        certificate.pop("runners_up", None)
        certificate.pop("meshes", None)
    report = dict(data.get("report", {}))
    report.pop("command", None)
    return data | {"made_for": made_for, "certificate": certificate, "report": report}


# ------------------------------------------------------------------------------------------------------- the file of a plan


def file_alone(asked: Request, outcome: Outcome, path: Path, fresh: bool) -> None:
    """Asks all that can be asked of a plan file alone. `fresh`: in a fresh process too."""
    plan, text = Plan.load(str(path)), str(path)
    if json.loads(plan.to_json()) != json.loads(path.read_text()):
        outcome.found("a loaded plan saves otherwise")
    made = json.loads(path.with_name(f"{path.stem}-made.json").read_text())
    told = _json_of(outcome, "explain", "--plan", text, *_again(asked), "--json")
    if told is not None:
        for line in differences_of_common(made, told):
            outcome.found("explain --plan says otherwise", line)
        new = {lint["text"] for lint in told.get("lints", [])}
        new -= {lint["text"] for lint in made.get("lints", [])}
        if new:
            outcome.found("explain --plan has other lints", *new)
        is_trained = "tokens" in asked.options and path.stem == "command"
        if is_trained and told.get("training") != made.get("training"):
            outcome.found("training differs", told.get("training"), made.get("training"))
    for words in (
        ("explain", "--plan", text, "--layers", "--verbose", "--fusion"),
        ("explain", "--plan", text, "--html", f"{text}.html"),
    ):
        done = command(*words)
        if done.exit_code:
            outcome.found(f"{' '.join(words[::3])} fails", crash_of(done) or error_of(done))
    named = plan.made_for.model
    if not named and asked.model not in own_modules.TEXTS:
        outcome.found(f"the file of {path.stem} has no model text", plan.model_name)
    for check in ("audit", "replay"):
        told = _json_of(outcome, check, text, *([] if named else [asked.model]), "--json")
        if told is not None:
            outcome.checked.append(check)
    done = command("diff", text, text, "--json")
    if done.exit_code or json.loads(done.stdout) != []:
        outcome.found("diff with itself", crash_of(done) or done.output)
    _exports(outcome, plan, text)
    if fresh:
        _fresh(outcome, text, told is not None and named and asked.options.get("precision"))


def _again(asked: Request) -> list[str]:
    """Options of reports, which are no part of a plan."""
    names = {"price": "--price", "tokens": "--tokens"}
    return [
        word
        for name, flag in names.items()
        if name in asked.options
        for word in (flag, str(asked.options[name]))
    ]


def _json_of(outcome: Outcome, *words: str) -> Any:
    """The JSON that a command prints; None, and a disagreement, if it fails."""
    done = command(*words)
    if done.exit_code:
        outcome.found(
            f"{words[0]} of a file fails", crash_of(done) or error_of(done) or done.stdout
        )
        return None
    return json.loads(done.stdout)


def differences_of_common(made: Mapping[str, Any], told: Mapping[str, Any]) -> Iterator[str]:
    """What a report on a file says otherwise than the report when the plan was made."""
    common = [key for key in made.keys() & told.keys() if key not in (*_RESTS_ON_MODEL, "training")]
    pairs = [{key: data[key] for key in common if key != "report"} for data in (made, told)]
    yield from differences(*pairs)
    reports = made.get("report", {}), told.get("report", {})
    keys = reports[0].keys() & reports[1].keys() - {"waterfall"}  # which a simulation refines
    own = {key: reports[1][key] for key in keys if reports[1][key]}
    yield from differences({key: reports[0][key] for key in own}, own, "report")


def _exports(outcome: Outcome, plan: Plan, text: str) -> None:
    """Exports the file to its target, or else to each framework; a refusal is an answer."""
    targets = [""] if plan.made_for.target else list(TARGET_NAMES)
    for target in targets:
        done = command("export", text, *(["--to", target] if target else []))
        try:
            words = export(plan, target or None).text
        except AutoparError as error:
            words = f"refused: {error}"
        if crash := crash_of(done):
            outcome.found("traceback of export", target, crash)
        elif done.exit_code and not target:
            outcome.found("its own target cannot say it", error_of(done))
        elif not done.exit_code and done.stdout.strip() != words.strip():
            outcome.found("exports differ", target, done.stdout, words)
        elif done.exit_code and " ".join(words.split()) != f"refused: {error_of(done)}":
            outcome.found("refusals of export differ", target, done.output, words)
        outcome.checked.append("refused export" if done.exit_code else "export")


def _fresh(outcome: Outcome, text: str, audits: Any) -> None:
    """Compares what fresh processes say of a file with what this one says."""
    asked = [("explain", "--plan", text, "--json"), ("diff", text, text)]
    asked += [("audit", text, "--json")] if audits in ("fp32", "bf16", None) and audits else []
    for words in asked:
        done = subprocess.run([sys.executable, "-m", "autopar", *words], capture_output=True, text=True)  # fmt: skip
        here = command(*words)
        if done.returncode != here.exit_code or done.stdout.split() != here.stdout.split():
            outcome.found("a fresh process says otherwise", words[0], done.stdout[-200:], done.stderr[-400:])  # fmt: skip
        outcome.checked.append("fresh")


def made_again(outcome: Outcome, plan: Plan, made: Mapping[str, Any], folder: Path) -> None:
    """Runs the command that the report of a plan prints, which makes this plan again."""
    import shlex

    line = made.get("report", {}).get("command") or ""
    if not line:
        outcome.checked.append("no command")
        return
    path = folder / "again.json"
    words = [word for word in shlex.split(line.replace("\\\n", " ")) if word.strip()]
    done = command(*words[1:], "--time-limit", "900", "--save", str(path))
    if not path.exists():
        outcome.found("the printed command fails", line, crash_of(done) or error_of(done))
        return
    again = Plan.load(str(path))
    for name in _AGAIN:
        one, other = (_at(each, name) for each in (plan, again))
        near = isinstance(one, float) and relative_error(other, one) < 1e-9
        if one != other and not near:
            outcome.found("the printed command makes another plan", name, one, other, line)
    outcome.checked.append("made again")


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = getattr(value, name)
    return value


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
                by_python = folder / "python.json"
                chosen = by_python if draw.maybe(0.3) and by_python.exists() else folder / "command.json"  # fmt: skip
                file_alone(asked, outcome, chosen, draw.maybe(0.12))
                if draw.maybe(0.2):
                    made = json.loads((folder / "command-made.json").read_text())
                    made_again(outcome, plan, made, folder)
            if asked.runs:
                run = run_file(asked.spec, asked.tokens, chosen)
                outcome.ran, outcome.error = run.status, run.error
                if run.status != "exact":
                    outcome.found(f"a run is {run.status}", run.words, run.error)
        except Exception:
            outcome.kind = outcome.kind or "failed"
            outcome.found("an exception", traceback.format_exc()[-1500:])


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
