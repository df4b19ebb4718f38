"""Expands words of a script as a shell would. Nothing is run: a command substitution and the
environment are values that are not known, and so are positional arguments that are not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.errors import AutoparError
from autopar.targets.arithmetic import NotANumber, evaluate
from autopar.targets.shell_words import (
    CLOSE,
    MOST_CHARACTERS,
    OPEN,
    Part,
    Word,
    document_word,
    parse_text,
)

MOST_WORDS = 100_000
"""The most words of an expanded value."""
Value = str | tuple[str, ...]
_CAT = re.compile(r"\s*cat\s+<<-?\s*(['\"]?)(\w+)\1[^\S\n]*\n(.*?)\n?\t*\2\s*", re.DOTALL)
"""A command substitution that is a here-document."""


def unknown(what: str) -> str:
    """The marker of a value that is not known, such as '$SLURM_NNODES'."""
    return f"{OPEN}{what.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"


def is_known(text: str) -> bool:
    """Whether an expanded text has no value that is not known."""
    return OPEN not in text


def shown_value(text: str) -> str:
    """An expanded text for a message: what is not known is named as in the file."""
    return text.replace(OPEN, "").replace(CLOSE, "")


@dataclass
class Script:
    """What a script says.

    Attributes:
        commands: each command as its expanded words, with the operator behind it.
        variables: the last value of each variable.
        notes: what was assumed, one sentence each.
        unread: files that the script reads with `source` and that are not there.
        files: the text of each file that the script writes from a here-document, by its name.
        stops: the line of the `exit` that ends it, or 0.
    """

    commands: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    variables: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    stops: int = 0

    def note(self, text: str) -> None:
        """Adds a note, once."""
        if text not in self.notes:
            self.notes.append(text)

    def reader(self, read_file: Callable[[str], str | None]) -> Callable[[str], str | None]:
        """A function that reads a file: one that the script writes, or else by `read_file`."""

        def read(name: str) -> str | None:
            text = self.files.get(name)
            return text if text is not None else read_file(name)

        return read

    def programs(self) -> list[tuple[int, tuple[str, ...]]]:
        """The commands that do more than print, as (index, words)."""
        found = ((number, words) for number, (words, _) in enumerate(self.commands))
        return [(number, words) for number, words in found if words[0] not in ("echo", "printf")]

    def text_of(self, name: str) -> str:
        """The value of a variable as a text; the marker of an unknown value if it is not set."""
        value = self.variables.get(name)
        if value is None:
            return unknown(f"${name}")
        return value if isinstance(value, str) else (value[0] if value else "")


def bounded(text: str, words: int = 0) -> str:
    """The text. Raises AutoparError if a value has more characters or words than any script needs."""
    if len(text) > MOST_CHARACTERS or words > MOST_WORDS:
        raise AutoparError(
            f"a value of the script has more than {MOST_CHARACTERS:,} characters or {MOST_WORDS:,} words"
        )
    return text


class Expansion:
    """Expands words with the variables of a script, which defaults such as `${NAME:=8}` set."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.arguments: tuple[str, ...] | None = None  # of the function or script that runs
        # variables that certainly have no value, unless one is assigned
        self.empty: set[str] = set()
        self.unsure = 0  # how many conditions around the command the file does not tell

    def text(self, word: Word) -> str:
        """A word expanded without splitting. Raises AutoparError if it is too long."""
        return bounded("".join(" ".join(self._part(part)) for part in word))

    def fields(self, word: Word) -> list[str]:
        """A word expanded and split as the shell splits it. Raises AutoparError if it is too long."""
        found: list[str] = []
        current: str | None = None
        for part in word:
            if part.kind == "text":
                current = (current or "") + part.text
                continue
            values = self._part(part)
            if (
                part.kind == "variable"
                and re.search(r"\[[@*]\]$|^[@*]$", part.text)
                and part.quoted
            ):
                pieces = list(values)
            elif part.quoted:
                pieces = [" ".join(values)]
            else:
                pieces = [piece for value in values for piece in _split(value)]
            for number, piece in enumerate(pieces):
                if number:
                    found.append(current or "")
                    current = None
                current = (current or "") + piece
            bounded(current or "", len(found))
        return found if current is None else [*found, current]

    def _part(self, part: Part) -> tuple[str, ...]:
        if part.kind == "text":
            return (part.text,)
        if part.kind == "place":
            return (unknown(part.text),)
        if part.kind == "command" and (document := _CAT.fullmatch(part.text)):
            literal = bool(document[1])
            text = document[3] if literal else self.text(document_word(document[3]))
            return (text.strip("\n"),)
        if part.kind == "command":
            return (unknown(f"$({part.text.strip()[:60]})"),)
        if part.kind == "sum":
            try:
                inner = self.text(parse_text(part.text))
                return (str(evaluate(inner, self.script.text_of)),)
            except NotANumber:
                return (unknown(f"$(({part.text.strip()[:60]}))"),)
        return self._variable(part.text)

    def _variable(self, text: str) -> tuple[str, ...]:
        """The values of `${text}`."""
        found = re.fullmatch(
            r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?!$-])(?:\[([^]]*)\])?(.*)", text, re.DOTALL
        )
        if found is None:
            return (unknown(f"${{{text}}}"),)
        if found[1]:
            value = self.script.variables.get(found[2])
            if found[1] == "#" and value is not None and all(map(is_known, value)):
                return (str(len(value)),)
            return (unknown(f"${{{text}}}"),)
        values = self._values(found[2], found[3])
        return (
            self._changed(values, found[2], found[4])
            if found[4]
            else values or self._unset(found[2])
        )

    def _values(self, name: str, index: str | None) -> tuple[str, ...] | None:
        """The values of a variable, or None if it is not set here."""
        if re.fullmatch(r"[0-9]+|[@*#]", name):
            arguments = self.arguments
            if name in "@*":
                return arguments
            if name == "#":
                return None if arguments is None else (str(len(arguments)),)
            number = int(name)
            inside = arguments is not None and 1 <= number <= len(arguments)
            return (arguments[number - 1],) if arguments is not None and inside else None
        value = self.script.variables.get(name)
        if value is None:
            return None
        values = value if isinstance(value, tuple) else (value,)
        if index is None or index in "@*":
            return values if index is not None else (values[0] if values else "",)
        at = self.text(parse_text(index))
        return (values[int(at)],) if at.isdigit() and int(at) < len(values) else None

    def _unset(self, name: str) -> tuple[str, ...]:
        if name in ("@", "*"):
            return (unknown(f'"${name}", the arguments of the script'),)
        if name in self.empty:
            self.script.note(f"${name} is taken to be unset")
            return ("",)
        return (unknown(f"${{{name}}}" if name.isdigit() and len(name) > 1 else f"${name}"),)

    def _changed(self, values: tuple[str, ...] | None, name: str, change: str) -> tuple[str, ...]:
        """The values after the change that `${name...}` asks for, such as a default."""
        found = re.match(r"(:?[-=+?])", change)
        if found is None:
            return self._trimmed(values or self._unset(name), name, change)
        is_set = values is not None and (":" not in found[1] or any(values))
        rest = self.text(parse_text(change[found.end() :]))
        kind = found[1][-1]
        if kind == "+":
            return (rest,) if is_set else ("",)
        if is_set and values is not None:
            return values
        if kind == "?":
            return self._unset(name)
        if rest:
            self.script.note(
                f"${name} is taken to be unset, so that it is {shown_value(rest)[:60]}"
            )
        if kind == "=" and not self.unsure:
            self.script.variables[name] = rest
        return (rest,)

    def _trimmed(self, values: tuple[str, ...], name: str, change: str) -> tuple[str, ...]:
        if not all(map(is_known, values)):
            return values
        if change in ("^^", ",,"):
            return tuple(v.upper() if change == "^^" else v.lower() for v in values)
        if part := re.fullmatch(r":(\d+)(?::(\d+))?", change):
            end = int(part[1]) + int(part[2]) if part[2] else None
            return tuple(value[int(part[1]) : end] for value in values)
        if part := re.fullmatch(r"(//?)([^/*?\[]+)/(.*)", change):
            count = -1 if part[1] == "//" else 1
            return tuple(value.replace(part[2], part[3], count) for value in values)
        if part := re.fullmatch(r"(##?|%%?)(.+)", change):
            return tuple(_without(value, part[1], part[2]) for value in values)
        return (unknown(f"${{{name}{change}}}"),)


def _split(value: str) -> list[str]:
    """The words of an expanded value. Descriptions of unknown values are not split."""
    return re.findall(rf"(?:{OPEN}[^{CLOSE}]*{CLOSE}|[^\s])+", value)


def _without(value: str, side: str, pattern: str) -> str:
    """A text without the shortest or longest beginning or end that matches a pattern."""
    sizes = range(len(value) + 1)
    order = reversed(sizes) if len(side) == 2 else sizes
    for size in order:
        piece = value[:size] if side[0] == "#" else value[len(value) - size :]
        if fnmatchcase(piece, pattern):
            return value[size:] if side[0] == "#" else value[: len(value) - size]
    return value
