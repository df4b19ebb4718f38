"""Sentences over 30 words and forbidden phrases in pages, docstrings, comments, errors and help.

    python -m tests.support.prose

Code blocks, quoted output and text in quotation marks do not count. A table cell, a list item and a heading end a sentence.
"""

from __future__ import annotations

import ast
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("autopar", "cost_models", "kernels", "benchmarks")
MOST_WORDS = 30

FORBIDDEN = {
    "so many": r"\bso many\b",
    "than which": r"\bthan which\b",
    "whatever is": r"\bwhatever is\b",
    "as they do": r"\bas they do\b",
    "of it": r"\bof it\b(?=[\s.,;:)]|$)",
    "who (of a thing)": r"(?<!reader )(?<!readers )(?<!user )(?<!users )(?<!person )(?<!people )(?<!anyone )\bwho\b",
    "than those": r"\bthose than\b",
    "such a one": r"\bsuch a one\b",
}
_PATTERNS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in FORBIDDEN.items()}


@dataclass(frozen=True)
class Finding:
    """One place where prose breaks a rule."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.text}"


def pages() -> list[Path]:
    """README.md, ARCHITECTURE.md and every page of docs/."""
    docs = sorted(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)
    return [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *docs]


def prose_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of the lines of a page that can be broken: no block, table, heading or directive."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced and not line.startswith(("|", "#", "<!--")):
            yield number, line


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(line, sentence) of a text in Markdown or of a docstring; indented and fenced blocks are left out."""
    fenced, start, words = False, 0, ""
    for number, line in enumerate([*text.splitlines(), ""], 1):
        stripped = line.strip()
        if re.match(r"(```|:::)", stripped):
            fenced = not fenced
            stripped = ""
        elif fenced or line.startswith("    ") or stripped.startswith("<!--"):
            stripped = ""
        ends = not stripped or bool(re.match(r"([-*#|>:]|\d+\.)\s", stripped + " "))
        if ends and words:
            yield from ((start, part) for part in _split(words))
            words = ""
        if stripped.startswith("|"):
            for cell in stripped.strip("|").split("|"):
                yield from ((number, part) for part in _split(cell))
            continue
        if stripped:
            start = start if words else number
            words += " " + re.sub(r"^([-*#>:]+|\d+\.)\s+", "", stripped)


def _split(text: str) -> list[str]:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\"[^\"]*\"", "QUOTED", text)
    text = re.sub(r"`[^`]*`", "CODE", text)
    return [part for part in re.split(r"(?<=[.!?])\s+", text.strip()) if part]


def findings_of(path: Path, text: str, first_line: int = 1) -> Iterator[Finding]:
    """What breaks a rule in a text whose first line is that of a file."""
    for line, sentence in sentences(text):
        at = first_line + line - 1
        count = len(re.findall(r"[A-Za-z0-9][^\s]*", sentence))
        if count > MOST_WORDS:
            yield Finding(path, at, f"{count} words", sentence)
        for name, pattern in _PATTERNS.items():
            if pattern.search(sentence):
                yield Finding(path, at, name, sentence)


def page_findings() -> list[Finding]:
    """What breaks a rule in README, ARCHITECTURE and docs."""
    return [finding for path in pages() for finding in findings_of(path, path.read_text())]


def sources() -> list[Path]:
    """Every Python file of the packages and benchmarks."""
    return [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def docstring_prose(docstring: str) -> str:
    """A docstring of Google's style as Markdown: the lines of its sections become list items.

    Other indented blocks and doctests stay indented by 4 spaces, which makes them blocks of code.
    """
    lines, section = [], False
    for line in inspect.cleandoc(docstring).splitlines():
        if re.fullmatch(r"(Args|Attributes|Raises|Returns|Yields):", line):
            section = True
            lines.append("")
        elif section and line.startswith("    "):
            item = re.match(r"    [*\w.]+(, [*\w.]+)*: ", line)
            lines.append(f"- {line[item.end() :]}" if item else line.strip())
        else:
            section = section and not line
            lines.append(f"    {line}" if line.startswith((">>>", "...")) else line)
    return "\n".join(lines)


@lru_cache(maxsize=1)
def _nodes(source: str) -> list[ast.AST]:
    """All nodes of the syntax tree of a file."""
    return list(ast.walk(ast.parse(source)))


def docstring_findings_of(path: Path, source: str) -> Iterator[Finding]:
    """What breaks a rule in the docstrings of a file, those of attributes too."""
    for node in _nodes(source):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield from findings_of(path, docstring_prose(node.value.value), node.lineno)


def comment_findings_of(path: Path, source: str) -> Iterator[Finding]:
    """What breaks a rule in the comments of a file; comments on consecutive lines are one text."""
    first, block = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = token.line.lstrip().startswith("#")
            if block and not (alone and token.start[0] == first + len(block)):
                yield from findings_of(path, "\n".join(block), first)
                block = []
            first = first if block else token.start[0]
            block.append(token.string.lstrip("# "))
    if block:
        yield from findings_of(path, "\n".join(block), first)


def message_findings_of(path: Path, source: str) -> Iterator[Finding]:
    """What breaks a rule in a text that a file raises, or passes as `help`."""
    for node in _nodes(source):
        texts: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            texts = node.exc.args
        elif isinstance(node, ast.keyword) and node.arg == "help":
            texts = [node.value]
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield from findings_of(path, text.value, text.lineno)
            elif isinstance(text, ast.JoinedStr):
                words = "".join(
                    part.value
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                    else "X"
                    for part in text.values
                )
                yield from findings_of(path, words, text.lineno)


def source_findings() -> list[Finding]:
    """What breaks a rule in a docstring, comment, error or help text of the packages and benchmarks."""
    found: list[Finding] = []
    for path in sources():
        source = path.read_text()
        for check in (docstring_findings_of, comment_findings_of, message_findings_of):
            found += check(path, source)
    return found


def main() -> None:
    """Print what breaks a rule, then how much does in all."""
    found = [*page_findings(), *source_findings()]
    for finding in found:
        print(finding)
    long = sum(finding.rule.endswith(" words") for finding in found)
    print(f"{long} sentences over {MOST_WORDS} words, {len(found) - long} forbidden phrases")


if __name__ == "__main__":
    main()
