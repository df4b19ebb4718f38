"""What autopar says, saved in a folder, to be compared after a change of its code.

    python -m benchmarks.snapshot take FOLDER [--requests 40] [--runs CSV ...] [--jobs FILE ...]
    python -m benchmarks.snapshot compare BEFORE AFTER

`take` writes a JSON file for each answer: the plans of random requests, in one process; what
`autopar predict` and `autopar check` print of FILES; the help of every command. An answer that is
an error is its text.
`compare` prints each value that differs, by file and key, and how many files are equal. Exit code 1
if any differs. Times of a search are not compared, nor plans of a search that the time ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from click.testing import CliRunner

if not __package__:  # as a script
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from autopar import api
from autopar.cli.plan_commands import cli
from autopar.errors import AutoparError
from benchmarks.search.random_requests import random_request

TIME_LIMIT_S = 60.0
JOB_CLUSTER = "dgx-h100:8"
_TIMES = frozenset({"solve_time_s", "budget_s", "digest"})
"""Keys of answers that are the time of this run, or depend on it."""
_MOST = 20  # differences of a file that are printed


def plans(requests: int, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """(name, data) of the plan of each of `requests` random requests, or its error."""
    draw = random.Random(seed)
    for number in range(requests):
        asked = random_request(draw)
        try:
            traced = asked.traced()
            plan = api.plan_traced(traced, asked.request(), TIME_LIMIT_S, processes=1)
            answer = json.loads(plan.to_json())
        except AutoparError as error:
            answer = {"error": str(error)}
        yield f"plan-{number}", {"asked": str(asked), "answer": answer}


def commands(runs: Sequence[str], jobs: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(name, arguments) of each command whose output is saved."""
    for name in runs:
        yield f"predict-{Path(name).stem}", ["predict", name, "--json"]
    for name in jobs:
        arguments = ["check", name, "--cluster", JOB_CLUSTER, "--json"]
        yield "check-" + "-".join(Path(name).parts[-2:]), arguments
    for name in sorted(cli.commands):
        yield f"help-{name}", [name, "--help"]


def output_of(arguments: Sequence[str]) -> Any:
    """The exit code and what a command prints: parsed if it is JSON, otherwise as lines."""
    result = CliRunner().invoke(cli, arguments)
    text: Any = result.stdout.splitlines()
    with contextlib.suppress(ValueError):
        text = json.loads(result.stdout)
    return {"exit": result.exit_code, "stdout": text, "stderr": result.stderr.splitlines()}


def take(folder: Path, requests: int, runs: Sequence[str], jobs: Sequence[str]) -> int:
    """Writes all answers to `folder`, and returns their number."""
    folder.mkdir(parents=True, exist_ok=True)
    outputs = ((name, output_of(arguments)) for name, arguments in commands(runs, jobs))
    number = 0
    for one in (plans(requests), outputs):
        for name, data in one:
            (folder / f"{name}.json").write_text(json.dumps(data, indent=1, sort_keys=True))
            number += 1
    return number


def differences(before: Any, after: Any, at: str = "") -> Iterator[str]:
    """A line for each value that differs between two answers, with its key."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            if key not in _TIMES:
                missing = "(missing)"
                values = before.get(key, missing), after.get(key, missing)
                yield from differences(*values, at=f"{at}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from differences(old, new, f"{at}[{number}]")
    elif before != after:
        yield f"{at.lstrip('.')}: {_short(before)} -> {_short(after)}"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _is_cut(answer: Any) -> bool:
    """Whether the time ended the search of a plan, which then differs from run to run."""
    plan = answer.get("answer", {}) if isinstance(answer, dict) else {}
    return plan.get("certificate", {}).get("status", "optimal") != "optimal"


def compare(before: Path, after: Path) -> list[str]:
    """The lines that `compare` prints about two folders."""
    lines: list[str] = []
    equal = cut = 0
    names = [{path.name for path in folder.glob("*.json")} for folder in (before, after)]
    lines += [f"{name}: only in one folder" for name in sorted(names[0] ^ names[1])]
    for name in sorted(names[0] & names[1]):
        old, new = (json.loads((folder / name).read_text()) for folder in (before, after))
        if _is_cut(old) or _is_cut(new):
            cut += 1
            continue
        found = list(differences(old, new))
        equal += not found
        lines += [f"{name}: {line}" for line in found[:_MOST]]
        if len(found) > _MOST:
            lines.append(f"{name}: {len(found) - _MOST} more")
    return [
        *lines,
        f"{equal} answers are equal, {cut} of searches that the time ended are left out",
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    actions = parser.add_subparsers(dest="action", required=True)
    taking = actions.add_parser("take")
    taking.add_argument("folder", type=Path)
    taking.add_argument("--requests", type=int, default=40)
    taking.add_argument("--runs", nargs="*", default=[], metavar="CSV")
    taking.add_argument("--jobs", nargs="*", default=[], metavar="FILE")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    if args.action == "take":
        with contextlib.redirect_stderr(io.StringIO()):
            number = take(args.folder, args.requests, args.runs, args.jobs)
        print(f"{number} answers are in {args.folder}")
        return 0
    lines = compare(args.before, args.after)
    print("\n".join(lines))
    return int(len(lines) > 1)


if __name__ == "__main__":
    sys.exit(main())
