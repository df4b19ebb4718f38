"""What bash hands to `torchrun`, and whether the reader of launch scripts says the same."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from autopar.errors import AutoparError
from autopar.foreign.texts.expansion import Script, is_known
from autopar.foreign.texts.shell import read_script
from autopar.foreign.texts.shell_words import CLOSE, OPEN

STUB = r"""torchrun() { { (($#)) && printf '%s\0' "$@"; printf '\1'; } >&9; }
nproc() { echo 96; }
"""
"""Defined before a script runs: the launcher prints its words, each with a zero behind it."""


def bash_runs(text: str, args: Sequence[str], folder: Path) -> list[tuple[str, ...]] | None:
    """The words of each `torchrun` that bash reaches, in an empty environment and in `folder`; None
    if bash refuses the text.
    """
    with tempfile.NamedTemporaryFile() as out, tempfile.NamedTemporaryFile("w") as stub:
        stub.write(STUB)
        stub.flush()
        script = folder / "run.sh"
        script.write_text(text)
        command = f'exec 9>"$1"; BASH_ENV={stub.name}; export BASH_ENV; shift; exec bash "$@"'
        if subprocess.run(["bash", "-n", script], capture_output=True).returncode:
            return None
        done = subprocess.run(
            ["bash", "-c", command, "bash", out.name, "run.sh", *args],
            capture_output=True,
            timeout=20,
            cwd=folder,
            env={"PATH": "/usr/bin:/bin", "HOME": "~"},
            stdin=subprocess.DEVNULL,
        )
        written = out.read().decode()
    if re.search(rb"unexpected|syntax error near", done.stderr):
        return None
    runs = written.split("\1")[:-1]
    return [tuple(run.split("\0")[:-1]) for run in runs]


def reader_runs(script: Script) -> list[tuple[str, ...]]:
    """The words of each `torchrun` that the reader finds; of a command that it does not know, the word
    alone that names it, which may be `torchrun`.
    """
    found = (words for words, _ in script.commands if words)
    return [
        words[words.index("torchrun") + 1 :] if "torchrun" in words[:2] else words[:1]
        for words in found
        if "torchrun" in words[:2] or not is_known(words[0])
    ]


def pattern_of(words: Sequence[str]) -> re.Pattern[str]:
    """What bash's words, each with a zero behind it, can be if the reader says `words`. A word that is
    not known alone may be no word, or several.
    """
    found = ""
    for word in words:
        pieces = re.split(f"{OPEN}[^{CLOSE}]*{CLOSE}", word)
        inner = ".*".join(map(re.escape, pieces))
        found += "(?:.*\0)?" if not any(pieces) and pieces[1:] else inner + "\0"
    return re.compile(found, re.DOTALL)


def disagreement(text: str, args: Sequence[str], folder: Path) -> str:
    """How the reader contradicts bash, or ''. Each command of bash must be one that it finds, in
    order. It may say in a note that it did not take an assignment, or took what it does not know to be one
    word; what follows is not compared.
    """
    theirs = bash_runs(text, args, folder)
    if theirs is None:
        return ""
    try:
        script = read_script(text, args=tuple(args))
    except AutoparError as error:
        return f"{error}; bash runs {theirs}"
    if any(note.endswith(("not taken", "taken to be one word")) for note in script.notes):
        return ""
    ours, at = reader_runs(script), 0
    for words in theirs:
        shown = "".join(f"{word}\0" for word in words)
        fits = [n for n in range(at, len(ours)) if pattern_of(ours[n]).fullmatch(shown)]
        if not fits:
            return f"{ours[at : at + 3]} and not {words}"
        at = fits[0]
    return ""
