"""Sentences over 30 words and phrases that the rules of prose forbid, in README, ARCHITECTURE, docs and docstrings.

    python -m tests.support.prose

Code blocks, quoted output and text in quotation marks do not count. A table cell, a list item and a heading end a sentence.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
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


def docstring_findings() -> list[Finding]:
    """What breaks a rule in a docstring of the packages and benchmarks."""
    found = []
    for folder in ("autopar", "cost_models", "kernels", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if (
                    isinstance(node, ast.Expr)
                    and isinstance(node.value, ast.Constant)
                    and isinstance(node.value.value, str)
                ):
                    text = "\n".join(line.strip() for line in node.value.value.splitlines())
                    found += findings_of(path, text, node.lineno)
    return found


def main() -> None:
    """Print the findings of pages, then the number of those of docstrings by folder."""
    for finding in page_findings():
        print(finding)
    counts: dict[str, Counter[str]] = {}
    for finding in docstring_findings():
        folder = str(finding.path.relative_to(ROOT).parent)
        rule = "over 30 words" if finding.rule.endswith(" words") else "forbidden phrase"
        counts.setdefault(folder, Counter())[rule] += 1
    print("\ndocstrings: over 30 words, forbidden phrases")
    for folder, count in sorted(counts.items()):
        print(f"{count['over 30 words']:5} {count['forbidden phrase']:5}  {folder}")
    long, phrases = (
        sum(count[rule] for count in counts.values())
        for rule in ("over 30 words", "forbidden phrase")
    )
    print(f"{long:5} {phrases:5}  all")


if __name__ == "__main__":
    main()
