"""A page from sections: plain data, rendered by Jinja2 to one file of HTML without requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.report.numbers import Number
from autopar.report.svg import Svg, patterns, styles

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATES = Path(__file__).parent / "templates"

Words = str | Number | Sequence[str | Number]
"""A text, a number, or several of these in a row."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page. `right` are the indices of columns of numbers. `folded` has rows that are
    shown when a reader asks for them.
    """

    columns: tuple[str, ...]
    rows: Sequence[Sequence[Words]]
    right: tuple[int, ...] = ()
    folded: Sequence[Sequence[Words]] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page: what it shows in a sentence, then a figure, tables, code to copy, and
    items of a list.
    """

    key: str
    title: str
    lead: Words
    figure: Svg | None = None
    tables: tuple[Table, ...] = ()
    code: str = ""
    items: Sequence[Words] = field(default_factory=tuple)
    note: Words = ""


def render(title: str, sections: Sequence[Section], foot: Words = "") -> str:
    """The page as text of an HTML file."""
    read = {name: (_TEMPLATES / name).read_text() for name in ("report.css", "report.js")}
    return _template().render(
        title=title,
        sections=sections,
        foot=foot,
        css=styles() + read["report.css"],
        js=read["report.js"],
        patterns=patterns(),
    )


@cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # our own texts: every value is escaped, and a name that is missing is an error
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")
