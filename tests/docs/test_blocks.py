"""Every console and Python block of README.md and docs/ runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.doc_blocks import Block, difference, pages, parse_blocks, same_line
from support.imports import ROOT
from sybil import Sybil

from autopar.cli import terminal
from autopar.cli.plan_commands import cli
from autopar.planning.remedies import remedies

_SYBIL = Sybil(parsers=[parse_blocks], pattern="*.md")
_PRINTED: dict[str, tuple[str, int]] = {}
"""Output and exit code of each command that reads and writes no file of its page."""
_NAMES: dict[tuple[str, ...], dict[str, Any]] = {}
"""What a page's Python blocks defined and printed, by their texts from the first on: a page that begins alike goes on from there."""


def _examples() -> list[Any]:
    """Every block as a parameter, with the marks that its directives ask for."""
    found = []
    for path in pages(ROOT):
        for example in _SYBIL.parse(path):
            directives = example.parsed.directives
            marks = [pytest.mark.slow] if "slow" in directives else []
            if "skip" in directives:
                assert directives["skip"], f"{path}:{example.line}: a skipped block has a reason"
                marks.append(pytest.mark.skip(reason=directives["skip"]))
            name = f"{path.relative_to(ROOT)}:{example.line}"
            found.append(pytest.param(example, id=name, marks=marks))
    return found


_EXAMPLES = _examples()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each page, made when its first block runs."""
    made: dict[str, Path] = {}
    for example in (parameter.values[0] for parameter in _EXAMPLES):
        if example.path not in made:
            made[example.path] = tmp_path_factory.mktemp(Path(example.path).stem)
    return made


@pytest.mark.parametrize("example", _EXAMPLES)
def test_block_prints_what_the_page_says(
    example: Any, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    block: Block = example.parsed
    monkeypatch.chdir(folders[example.path])
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(terminal, "PROGRESS_AFTER_S", 1e5)  # no line of progress in between
    # what remedies have time for does not depend on how busy the machine is
    monkeypatch.setattr(remedies, "__defaults__", (300.0, *remedies.__defaults__[1:]))
    monkeypatch.setattr(sys, "path", [str(folders[example.path]), *sys.path])
    if "file" in block.directives:
        Path(block.directives["file"]).write_text(block.body)
    elif "output" in block.directives:
        printed = example.namespace["_printed"]
        assert not (wrong := difference(block.body.splitlines(), printed, block.tolerance)), wrong
    elif block.language == "python":
        _run_python(example)
    else:
        _run_console(block)


def _run_python(example: Any) -> None:
    """Run a block in the namespace of its page, unless another page has run the same blocks up to here."""
    names, block = example.namespace, example.parsed
    texts = (*names.get("_texts", ()), block.body)
    if texts not in _NAMES:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block.body, f"{example.path}:{example.line}", "exec"), names)
        _NAMES[texts] = {**names, "_printed": out.getvalue().splitlines(), "_texts": texts}
    names.update(_NAMES[texts])


def _run_console(block: Block) -> None:
    """Run each command of a block and compare its output and the last exit code."""
    for number, (command, expected) in enumerate(block.commands, 1):
        printed, code = _printed(command)
        wanted = block.exit_code if number == len(block.commands) else 0
        assert code == wanted, f"{command}: exit code {code}, not {wanted}\n{printed}"
        wrong = difference(expected, printed.splitlines(), block.tolerance) if expected else ""
        assert not wrong, f"{command}\n{wrong}"


def _printed(command: str) -> tuple[str, int]:
    """What a command prints, and its exit code: autopar in this process, anything else by bash."""
    if not command.startswith("autopar ") or any(sign in command for sign in "|><"):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, env=environment
        )
        return done.stdout + done.stderr, done.returncode
    if command not in _PRINTED:
        answer = _command(shlex.split(command.replace("\\\n", " "))[1:])
        if any(word in command for word in (".json", ".yaml", ".csv", ".py")):
            return answer
        _PRINTED[command] = answer
    return _PRINTED[command]


def _command(arguments: list[str]) -> tuple[str, int]:
    import click

    out, code = io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = cli.main(arguments, prog_name="autopar", standalone_mode=False) or 0
        except click.ClickException as error:
            click.echo(f"Error: {error.format_message()}", err=True)
            code = error.exit_code
    return out.getvalue(), code


def test_number_of_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    marks = [[mark.name for mark in parameter.marks] for parameter in _EXAMPLES]
    slow, skipped = (sum(word in names for names in marks) for word in ("slow", "skip"))
    run = sum(not names for names in marks)
    with capsys.disabled():
        print(f"\nblocks of README and docs: {run} run, {slow} slow, {skipped} skipped")
    assert run >= 25


@pytest.mark.parametrize(
    ("expected", "actual", "same"),
    [
        ("step 1,770.0 ms", "step 1,771.5 ms", True),
        ("step 1,600.0 ms", "step 1,771.5 ms", False),
        ("tp=4 pp=1", "tp=8 pp=1", False),
        ("a ... z", "a b c z", True),
        ("gap ... %", "gap 5e-08 %", True),
        ("dp=4", "dp=4 tp=2", False),
    ],
)
def test_lines_are_compared_by_words_and_numbers(expected: str, actual: str, same: bool) -> None:
    assert same_line(expected, actual, 0.02) is same


def test_three_dots_stand_for_any_lines() -> None:
    assert not difference(["a", "...", "z"], ["a", "b", "c", "z"], 0.02)
    assert "not found" in difference(["a", "z"], ["a", "b", "z"], 0.02)
