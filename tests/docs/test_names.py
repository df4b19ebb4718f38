"""Paths and names that pages mention are those of the code."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from support.prose import ROOT, pages

_FOLDERS = ("autopar", "benchmarks", "cost_models", "docs", "examples", "kernels", "tests")
_ABOUT_CODE = ("ARCHITECTURE.md", "docs/extending.md", "docs/internals/")
"""Pages whose names are those of the code; other pages also name what a user writes."""


@cache
def _paths() -> frozenset[str]:
    """Every file and folder of the repository, from its root; a folder ends in a slash."""
    below = [path for folder in _FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    return frozenset(f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in below)


@cache
def _words() -> frozenset[str]:
    """Every name in the code and its tests."""
    files = [ROOT / path[1:] for path in _paths() if path.endswith(".py")]
    return frozenset(word for path in files for word in re.findall(r"\w+", path.read_text()))


def unknown_paths(text: str) -> list[str]:
    """Files and folders of the repository that a page names and that do not exist.  The beginning of a path may be left out."""
    named = [span for span in _spans(text) if re.fullmatch(r"[\w./-]+(\.py|/|results/\S+)", span)]
    return [span for span in named if not any(path.endswith(f"/{span}") for path in _paths())]


def unknown_names(text: str) -> list[str]:
    """Classes, functions and attributes that a page names and that no code has."""
    heads = [re.split(r"[(=\s]", span)[0] for span in _spans(text)]
    named = [head for head in heads if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", head)]
    return [
        head for head in named if not head.endswith(".py") and not set(head.split(".")) <= _words()
    ]


def _spans(text: str) -> list[str]:
    """What stands between backticks, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


@pytest.mark.parametrize("page", pages(), ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_names_exist(page: Path) -> None:
    text = page.read_text()
    assert not unknown_paths(text)
    if str(page.relative_to(ROOT)).startswith(_ABOUT_CODE):
        assert not unknown_names(text)


def test_what_does_not_exist_is_found() -> None:
    paths = (
        "`autopar/api.py`, `ir/`, `autopar/nowhere.py`, `nofolder/`, `benchmarks/results/none.txt`"
    )
    assert unknown_paths(paths) == [
        "autopar/nowhere.py",
        "nofolder/",
        "benchmarks/results/none.txt",
    ]
    missing = "".join(["No", "Such", "Class"])
    assert unknown_names(f"`Plan.mesh`, `tp=2`, `{missing}(a)`, `Plan.{missing}`") == [
        missing,
        f"Plan.{missing}",
    ]
