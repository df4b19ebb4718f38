"""README, ARCHITECTURE and docs keep the rules of prose, and their links resolve."""

from __future__ import annotations

import re
from pathlib import Path

from support.prose import ROOT, findings_of, page_findings, pages, prose_lines


def test_pages_keep_the_rules() -> None:
    assert not page_findings(), "\n" + "\n".join(map(str, page_findings()))


def test_pages_are_short() -> None:
    lines = {
        name: len((ROOT / name).read_text().splitlines())
        for name in ("README.md", "ARCHITECTURE.md")
    }
    assert lines["README.md"] <= 150
    assert lines["ARCHITECTURE.md"] <= 120


def test_lines_of_prose_are_short() -> None:
    long = [
        f"{path}:{number}"
        for path in pages()
        for number, line in prose_lines(path.read_text())
        if len(line) > 100
    ]
    assert not long


def test_links_between_files_resolve() -> None:
    links = [
        (path, target, anchor)
        for path in pages()
        for target, anchor in re.findall(
            r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", path.read_text().replace("\n", " ")
        )
        if "://" not in target
    ]
    broken = [
        f"{path}: {target}#{anchor}"
        for path, target, anchor in links
        if not (path.parent / target).exists()
        or (anchor and anchor not in _anchors(path.parent / target if target else path))
    ]
    assert links
    assert not broken


def _anchors(path: Path) -> set[str]:
    """The anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_long_sentences_and_forbidden_phrases_are_found() -> None:
    path = ROOT / "README.md"
    rules = [finding.rule for finding in findings_of(path, "word " * 31 + ".\n\nA plan who runs.")]
    assert rules == ["31 words", "who (of a thing)"]
    assert not list(findings_of(path, 'A user who runs. He said "so many".\n\n    so many\n'))
