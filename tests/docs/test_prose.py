"""Pages, docstrings, comments, errors and help keep the rules of prose, and links resolve."""

from __future__ import annotations

import re
from pathlib import Path

from support.prose import (
    ROOT,
    comment_findings_of,
    docstring_findings_of,
    findings_of,
    message_findings_of,
    page_findings,
    pages,
    prose_lines,
    source_findings,
    sources,
)


def test_pages_keep_the_rules() -> None:
    assert not page_findings(), "\n" + "\n".join(map(str, page_findings()))


def test_docstrings_comments_and_messages_keep_the_rules() -> None:
    assert len(sources()) > 300
    found = source_findings()
    assert not found, "\n" + "\n".join(map(str, found))


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


_LONG = "word " * 31


def _rules(source: str) -> dict[str, list[str]]:
    """Rules that a source breaks in docstrings, in comments and in messages."""
    checks = {
        "docstring": docstring_findings_of,
        "comment": comment_findings_of,
        "message": message_findings_of,
    }
    path = ROOT / "source.py"
    return {
        where: rules
        for where, check in checks.items()
        if (rules := [finding.rule for finding in check(path, source)])
    }


def test_findings_in_docstrings() -> None:
    assert _rules(f'"""Module.\n\n{_LONG}.\n"""\nx = 1\n"""A copy of it."""') == {
        "docstring": ["31 words", "of it"]
    }
    arguments = f'def f(a, b):\n    """Do.\n\n    Args:\n        a: {_LONG}\n        b: such a one.\n    """'
    assert _rules(arguments) == {"docstring": ["31 words", "such a one"]}
    assert not _rules(f'"""A table.\n\n    {_LONG}\n\nAn end.\n\n>>> f(of it)\n"""')


def test_findings_in_comments_and_messages() -> None:
    assert _rules("x = 1  # as they do\n# a text over\n# two lines, of\n# it\n") == {
        "comment": ["as they do", "of it"]
    }
    assert _rules('raise ValueError(f"{n} of it, whatever is left")') == {
        "message": ["whatever is", "of it"]
    }
    assert _rules('option("--x", help="So many.")') == {"message": ["so many"]}
    assert not _rules("# a comment\nx = 1  # another\nraise ValueError('a text')")
