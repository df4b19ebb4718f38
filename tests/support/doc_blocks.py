"""The blocks of README.md and docs/ as examples that run, and the comparison of their output.

A block is a fence of language `console` or `python`. A comment on the line before it is its directive:

    <!-- slow -->               it takes over 10 seconds, and runs with --runslow only
    <!-- skip: reason -->       it cannot run here
    <!-- exit: 1 -->            the exit code of its last command, which is 0 otherwise
    <!-- tolerance: 10 % -->    by how much numbers may differ, relative to the printed one
    <!-- file: name -->         the block is written to a file of this name beside the page; of any language
    <!-- output -->             the text that the block before it printed

Several directives stand in one comment with `;` between them. All blocks of a page share one folder and one Python namespace.
In a `console` block a line that begins with `$ ` is a command, a line that ends in a backslash goes on in the next, and what
follows is its output. In output a line `...` stands for any number of lines, and `...` within a line for any text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sybil import Document, Region

TOLERANCE = 0.02
"""Numbers with a decimal point or a comma may differ by so much of the printed one; whole numbers are equal."""

_BLOCK = re.compile(
    r"(?:^<!-- (?P<directive>(?:slow|skip|exit|tolerance|file|output)\b[^\n]*?) -->\n)?"
    r"^```(?P<language>[a-z]*)\n(?P<body>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


@dataclass(frozen=True)
class Block:
    """One block of a page."""

    language: str
    body: str
    directives: dict[str, str]

    @property
    def tolerance(self) -> float:
        """The relative difference that numbers may have."""
        text = self.directives.get("tolerance")
        return TOLERANCE if text is None else float(text.removesuffix("%")) / 100

    @property
    def exit_code(self) -> int:
        """The exit code of the last command."""
        return int(self.directives.get("exit", "0"))

    @property
    def commands(self) -> list[tuple[str, list[str]]]:
        """Each command with the lines of its expected output."""
        found: list[tuple[str, list[str]]] = []
        goes_on = False
        for line in self.body.splitlines():
            if goes_on:
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            elif line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
            else:
                raise ValueError(f"a console block begins with a command, not with {line!r}")
            command = found[-1][0]
            goes_on = not found[-1][1] and (command.endswith("\\") or command.count("'") % 2 == 1)
        return found


def parse_blocks(document: Document) -> Iterable[Region]:
    """A parser of Sybil: the blocks that run, are written to files or hold the output of the block before."""
    for match in _BLOCK.finditer(document.text):
        pairs = [item.partition(":") for item in (match["directive"] or "").split(";")]
        directives = {name.strip(): value.strip() for name, _, value in pairs if name.strip()}
        if match["language"] in ("console", "python") or {"file", "output"} & directives.keys():
            block = Block(match["language"], match["body"], directives)
            yield Region(match.start(), match.end(), block, lambda example: None)


def pages(root: Path) -> Iterator[Path]:
    """README.md and every page of docs/."""
    yield root / "README.md"
    yield from sorted(path for path in (root / "docs").rglob("*.md") if "_build" not in path.parts)


def difference(expected: list[str], actual: list[str], tolerance: float) -> str:
    """'' if the actual lines are what was expected; else the first expected line that was not found, beside what was printed."""
    wanted = [line for line in (" ".join(text.split()) for text in expected) if line]
    printed = [line for line in (" ".join(text.split()) for text in actual) if line]
    furthest = [0]

    @cache
    def matches(i: int, j: int) -> bool:
        furthest[0] = max(furthest[0], i)
        if i == len(wanted):
            return j == len(printed)
        if wanted[i] == "...":
            return any(matches(i + 1, k) for k in range(j, len(printed) + 1))
        return (
            j < len(printed)
            and same_line(wanted[i], printed[j], tolerance)
            and matches(i + 1, j + 1)
        )

    if matches(0, 0):
        return ""
    missing = wanted[furthest[0]] if furthest[0] < len(wanted) else "(end of output)"
    return f"expected, and not found in its place: {missing}\nprinted:\n" + "\n".join(printed)


def same_line(expected: str, actual: str, tolerance: float) -> bool:
    """Whether a printed line is the expected one, numbers with a decimal point or a comma to a relative tolerance."""
    pattern, numbers, at = "", [], 0
    for match in re.finditer(rf"\.\.\.|{_NUMBER.pattern}", expected):
        pattern += re.escape(expected[at : match.start()])
        at = match.end()
        if match[0] == "...":
            pattern += ".*"
        else:
            pattern += f"({_NUMBER.pattern})"
            numbers.append(match[0])
    found = re.fullmatch(_loose(pattern + re.escape(expected[at:])), actual)
    return found is not None and all(
        _same_number(a, b, tolerance) for a, b in zip(numbers, found.groups(), strict=True)
    )


def _loose(pattern: str) -> str:
    """A pattern in which lines of a table may be longer or shorter."""
    return re.sub(r"─+", "─+", pattern)


def _same_number(expected: str, actual: str, tolerance: float) -> bool:
    a, b = (float(text.replace(",", "").rstrip(".") or "nan") for text in (expected, actual))
    if re.fullmatch(r"[+-]?\d+", expected) and re.fullmatch(r"[+-]?\d+", actual):
        return a == b
    return abs(a - b) <= tolerance * abs(a) + 1e-12
