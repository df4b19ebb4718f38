"""Expands words of a script as a shell would. Nothing is run: a command substitution and the
environment are values that are not known, and so are positional arguments that are not given.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from autopar.errors import AutoparError
from autopar.foreign.texts.arithmetic import NotANumber, arithmetic_value
from autopar.foreign.texts.shell_words import (
    CLOSE,
    MOST_CHARACTERS,
    OPEN,
    Word,
    WordPart,
    document_word,
    parse_text,
    quoted_text,
)

MOST_WORDS = 100_000
"""The most words of an expanded value."""
ShellValue = str | tuple[str, ...]
Place = tuple[int, str]
"""The line of a command in a script, and its first word."""
MOST_EXPANDED = 30_000_000
"""The most characters of all expanded values of a script."""
MOST_BRACES = 8
"""The most lists such as `{1..4}` of a word that are expanded."""
MOST_TRIMMED = 10_000
"""The longest value of which a pattern is taken away."""
_CAT = re.compile(r"\s*cat\s+<<-?\s*(['\"]?)(\w+)\1[^\S\n]*\n(.*)", re.DOTALL)
"""A command substitution that is a here-document."""


_SEPARATE = re.compile(r"(@|[A-Za-z_]\w*\[@\])")
"""An expansion that stays several words between double quotes."""


def unknown(what: str) -> str:
    """The marker of a value that is not known, such as '$SLURM_NNODES'."""
    return f"{OPEN}{what.replace(OPEN, '').replace(CLOSE, '')}{CLOSE}"


LOST: tuple[str, ...] = (unknown('"$@", the arguments of the script'),)
"""Arguments of which it is no longer known what and how many they are."""


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
        environment: what variables are for single programs, as in `NAME=4 torchrun`.
        notes: what was assumed, one sentence each.
        unread: files that the script reads with `source` and that are not there, with the place. The
            branch that can be assumed there is that the file changes all variables.
        files: the text of each file that the script writes from a here-document, by its name.
        stops: the line of the `exit` that ends it, or 0.
        steps: the commands that were read, those of functions counted each time.
        assumed: which branch is taken at a test or `case` that the file does not decide, by its
            place; 1 is that of a test that holds.
        undecided: the number of branches at each other such place.
    """

    commands: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    variables: dict[str, ShellValue] = field(default_factory=dict)
    environment: dict[str, ShellValue] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unread: dict[str, Place] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    stops: int = 0
    steps: int = 0
    assumed: Mapping[Place, int] = field(default_factory=dict)
    undecided: dict[Place, int] = field(default_factory=dict)

    def branch(self, place: Place, branches: int) -> int | None:
        """The branch that is assumed at a place; None if none is, which is noted."""
        if place not in self.assumed:
            self.undecided.setdefault(place, branches)
        return self.assumed.get(place)

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

    def exported(self, name: str) -> str | None:
        """What a program finds in its environment; None if the script sets nothing there."""
        value = self.environment.get(name)
        if isinstance(value, str):
            return value
        return self.text_of(name) if name in self.variables else None


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
        self.expanded = 0  # characters, of all values
        self.unsure = 0  # how many conditions around the command the file does not tell

    def text(self, word: Word) -> str:
        """A word expanded without splitting. Raises AutoparError if it is too long."""
        return self._counted("".join(" ".join(self._part(part)) for part in word))

    def _counted(self, text: str) -> str:
        """The text. Raises AutoparError if it, or all values together, are too long."""
        self.expanded += len(text)
        if self.expanded > MOST_EXPANDED:
            raise AutoparError(
                f"the values of the script have more than {MOST_EXPANDED:,} characters"
            )
        return bounded(text)

    def fields(self, word: Word) -> list[str]:
        """A word expanded and split as the shell splits it. Raises AutoparError if it is too long."""
        for at, part in enumerate(word):
            if part.kind == "text" and not part.quoted and (braces := _BRACES.search(part.text)):
                texts = (part.text[: braces.start()] + piece + part.text[braces.end() :]
                         for piece in _alternatives(braces))  # fmt: skip
                words = (
                    (*word[:at], WordPart("text", text, False), *word[at + 1 :]) for text in texts
                )
                if part.text.count("{") > MOST_BRACES:
                    return [unknown(part.text[:60])]
                listed: list[str] = []
                for alternative in words:
                    listed += self.fields(alternative)
                    bounded("", len(listed))
                return listed
        found: list[str] = []
        current: str | None = None
        gone = False  # `"$@"` without arguments is no word
        for part in word:
            if part.kind == "text":
                current = (current or "") + part.text
                continue
            values = self._part(part)
            for value in values:
                self._counted(value)
            if part.kind == "variable" and part.quoted and _SEPARATE.match(part.text):
                pieces = list(values)
                gone = gone or not pieces
            elif part.quoted:
                pieces = [" ".join(values)]
            else:
                pieces = [piece for value in values for piece in self._split(value)]
            for number, piece in enumerate(pieces):
                if number:
                    found.append(current or "")
                    current = None
                current = (current or "") + piece
            bounded(current or "", len(found))
        return found if current is None or (gone and not current) else [*found, current]

    def _split(self, value: str) -> list[str]:
        """The words of an expanded value. Descriptions of unknown values are not split."""
        blanks = re.escape(self.script.text_of("IFS")) if "IFS" in self.script.variables else r"\s"
        inside = f"[^{blanks}]" if blanks else r"[\s\S]"
        return re.findall(rf"(?:{OPEN}[^{CLOSE}]*{CLOSE}|{inside})+", value)

    def _part(self, part: WordPart) -> tuple[str, ...]:
        if part.kind == "text":
            return (part.text,)
        if part.kind == "place":
            return (unknown(part.text),)
        if part.kind == "command" and (document := _document(part.text)) is not None:
            literal, text = document
            return ((text if literal else self.text(document_word(text))).strip("\n"),)
        if part.kind == "command":
            return (unknown(f"$({part.text.strip()[:60]})"),)
        if part.kind == "sum":
            try:
                inner = self.text(parse_text(part.text))
                return (str(arithmetic_value(inner, self.script.text_of)),)
            except NotANumber:
                return (unknown(f"$(({part.text.strip()[:60]}))"),)
        return self._variable(part.text, part.quoted)

    def _variable(self, text: str, quoted: bool) -> tuple[str, ...]:
        """The values of `${text}`, which may stand between double quotes."""
        found = re.fullmatch(
            r"([#!]?)([A-Za-z_]\w*|[0-9]+|[@*#?!$-])(?:\[([^]]*)\])?(.*)", text, re.DOTALL
        )
        if found is None:
            return (unknown(f"${{{text}}}"),)
        name, index, change = found[2], found[3], found[4]
        if found[1]:
            values = self._values(name, index)
            if values is None or not all(map(is_known, values)):
                return (unknown(f"${{{text}}}"),)
            if found[1] == "#":
                is_list = name in "@*" or index in ("@", "*")
                return (str(len(values) if is_list else len(values[0])),)
            if index or change or not re.fullmatch(r"[A-Za-z_]\w*|[0-9]+", values[0]):
                return (unknown(f"${{{text}}}"),)
            return self._variable(values[0], quoted)
        values = self._values(name, index)
        is_list = name in "@*" or index in ("@", "*")
        part = _SLICE.fullmatch(change) if is_list and values is not None else None
        if part and values is not None:
            return _sliced(values, part, 1 if name in "@*" else 0)
        if change:
            return self._changed(values, name, change, quoted)
        return self._unset(name) if values is None else values

    def _values(self, name: str, index: str | None) -> tuple[str, ...] | None:
        """The values of a variable, or None if it is not set here."""
        if re.fullmatch(r"[0-9]+|[@*#]", name):
            arguments = self.arguments
            if name in "@*":
                return arguments
            if arguments is LOST and name != "0":
                return (unknown(f"${name}"),)
            if name == "#":
                return None if arguments is None else (str(len(arguments)),)
            number = int(name)
            inside = arguments is not None and 1 <= number <= len(arguments)
            return (arguments[number - 1],) if arguments is not None and inside else None
        value = self.script.variables.get(name, () if index else None)
        if value is None:
            return None
        values = value if isinstance(value, tuple) else (value,)
        if index is None or index in "@*":
            return values if index is not None else (values[0] if values else "",)
        at = self.text(parse_text(index))
        kept = self.script.variables.get(f"{name}[{at}]")
        if isinstance(kept, str):
            return (kept,)
        number = int(at) if re.fullmatch(r"-?\d{1,9}", at) else len(values)
        return (values[number],) if -len(values) <= number < len(values) else None

    def _unset(self, name: str) -> tuple[str, ...]:
        if name in ("@", "*"):
            return (unknown(f'"${name}", the arguments of the script'),)
        if name in self.empty:
            self.script.note(f"${name} is taken to be unset")
            return ("",)
        return (unknown(f"${{{name}}}" if name.isdigit() and len(name) > 1 else f"${name}"),)

    def _changed(
        self, values: tuple[str, ...] | None, name: str, change: str, quoted: bool
    ) -> tuple[str, ...]:
        """The values after the change that `${name...}` asks for, such as a default."""
        found = re.match(r"(:?[-=+?])", change)
        if found is None:
            return self._trimmed(values or self._unset(name), name, change)
        is_set = values is not None and (":" not in found[1] or any(values))
        default = change[found.end() :]
        rest = self.text(quoted_text(default) if quoted else parse_text(default))
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
            parts = (part for value in values for part in re.split(f"({OPEN}|{CLOSE})", value))
            alone = len(values) == 1 and sum(map(bool, parts)) == 3
            return values if alone else (unknown(f"${{{name}{change}}}"),)
        if change[:1] in tuple("/#%") and re.search(r"[\"'$`\\]", change):  # not a plain pattern
            return (unknown(f"${{{name}{change}}}"),)
        if change in ("^^", ",,"):
            return tuple(v.upper() if change == "^^" else v.lower() for v in values)
        if part := _SLICE.fullmatch(change):
            return tuple("".join(_sliced(tuple(value), part, 0)) for value in values)
        if part := re.fullmatch(r"/([#%])([^/*?\[\\$`\"']+)/(.*)", change):
            ends = part[1] == "%"
            return tuple(_replaced(value, part[2], part[3], ends) for value in values)
        if part := re.fullmatch(r"(//?)([^/*?\[]+)/(.*)", change):
            count = -1 if part[1] == "//" else 1
            return tuple(value.replace(part[2], part[3], count) for value in values)
        short = all(len(value) <= MOST_TRIMMED for value in values)
        if short and (part := re.fullmatch(r"(##?|%%?)(.+)", change)):
            return tuple(_without(value, part[1], part[2]) for value in values)
        return (unknown(f"${{{name}{change}}}"),)


_SLICE = re.compile(r":\s*(\d{1,9}|(?<=\s)-\d{1,9})(?:\s*:\s*(-?\d{1,9}))?")
"""The part of a text or an array that `${NAME:2:3}` takes."""


def _sliced(values: tuple[str, ...], part: re.Match[str], first: int) -> tuple[str, ...]:
    """A part of a list whose first element has the number `first`."""
    start = int(part[1])
    start = len(values) + start if start < 0 else max(start - first, 0)
    if start < 0:
        return ()
    count = int(part[2]) if part[2] else len(values)
    return values[start : start + count] if count >= 0 else values[start : len(values) + count]


def _replaced(value: str, old: str, new: str, at_end: bool) -> str:
    """A text whose beginning or end `old` is `new` instead."""
    if at_end:
        return value.removesuffix(old) + new if value.endswith(old) else value
    return new + value.removeprefix(old) if value.startswith(old) else value


def _document(command: str) -> tuple[bool, str] | None:
    """(whether it is literal, the text) of a command substitution that is a here-document, or
    None.
    """
    found = _CAT.fullmatch(command)
    text, _, last = (found[3] if found else "").rstrip().rpartition("\n")
    if found is None or last.strip("\t") != found[2]:
        return None
    return bool(found[1]), text


_BRACES = re.compile(r"\{(\d{1,3})\.\.(\d{1,3})\}|\{([^{}$]*,[^{}$]*)\}")


def _alternatives(braces: re.Match[str]) -> list[str]:
    """The texts that `{1..4}` or `{a,b}` stands for."""
    if braces[3] is not None:
        return braces[3].split(",")
    first, last = int(braces[1]), int(braces[2])
    width = len(braces[1]) if "0" in (braces[1][:1], braces[2][:1]) else 0
    step = 1 if first <= last else -1
    return [str(number).zfill(width) for number in range(first, last + step, step)]


def _without(value: str, side: str, pattern: str) -> str:
    """A text without the shortest or longest beginning or end that matches a pattern."""
    sizes = range(len(value) + 1)
    order = reversed(sizes) if len(side) == 2 else sizes
    for size in order:
        piece = value[:size] if side[0] == "#" else value[len(value) - size :]
        if fnmatchcase(piece, pattern):
            return value[size:] if side[0] == "#" else value[: len(value) - size]
    return value
