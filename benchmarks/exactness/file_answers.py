"""What commands answer about the file of a plan alone, compared with what was said when it was made."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from autopar.foreign.writers.export import export
from autopar.ir.plan import Plan
from autopar.request.framework_names import TARGET_NAMES
from autopar.request.pins import pin_text
from autopar.verify.verify import relative_error
from benchmarks.exactness import own_modules
from benchmarks.exactness.drawn_requests import Request
from benchmarks.snapshot import differences

MOST_LINES = 6
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
            found = list(differences(made.get(check, told), told))
            if found:
                outcome.found(f"{check} of the file says otherwise", *found)
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


def asked_about(asked: Request, outcome: Outcome, text: str) -> None:
    """Asks `why-not` and `compare` about a file. Its own choice costs nothing."""
    plan = Plan.load(text)
    own = ("--global-batch", str(asked.global_batch), *(("--seq", str(asked.seq)) if asked.seq else ()))  # fmt: skip
    at = (asked.model, asked.cluster, *own)
    pins = pin_text({"zero": plan.zero, "micro_batch": plan.micro_batch})
    done = command("why-not", *at, "--plan", text, "--pin", pins, "--json")
    if crash_of(done) or done.exit_code == 2:
        outcome.found("why-not of a file fails", crash_of(done) or error_of(done))
    if asked.options.get("precision"):
        at = (*at, "--precision", asked.options["precision"])
    done = command("compare", *at, "--plan", text, "--json", "--time-limit", "900")
    if crash_of(done) or done.exit_code == 2:
        outcome.found("compare with a file fails", crash_of(done) or error_of(done))
    outcome.checked.append("asked about")


def made_again(outcome: Outcome, plan: Plan, made: Mapping[str, Any], folder: Path) -> None:
    """Runs the command that the report of a plan prints, which makes this plan again."""
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
