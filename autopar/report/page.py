"""A page from sections: plain data, rendered by Jinja2 to one file of HTML without requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.errors import AutoparError
from autopar.files import made_folder, path_of, write_text
from autopar.report.bars_figure import bars_figure
from autopar.report.pareto_figure import pareto_figure
from autopar.report.svg import Svg, patterns, styles
from autopar.text.numbers import Number, Words, plain
from autopar.text.replies import Reply, Spots, Styled
from autopar.text.tables import Table

if TYPE_CHECKING:
    from jinja2 import Template

_TEMPLATES = Path(__file__).parent / "templates"


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


@dataclass(frozen=True)
class Page:
    """A page, which is saved, shown in a notebook, and drawn as files.

    Attributes:
        title: its title.
        data: plain data in which each of its numbers has its path, as `--json` prints it.
        sections: its sections, in order.
        version: the version of the cost model that predicted its numbers.
        command: the command whose `--json` prints the data.
    """

    title: str
    data: Any
    sections: Sequence[Section]
    version: str
    command: str

    def html(self) -> str:
        """One HTML text that needs nothing else."""
        read = {name: (_TEMPLATES / name).read_text() for name in ("report.css", "report.js")}
        return _template().render(
            title=self.title,
            sections=self.sections,
            foot=f"autopar, cost model {self.version}. Times and memory are predictions. "
            f"Every number of this page is in the output of {self.command} --json --html.",
            css=styles() + read["report.css"],
            js=read["report.js"],
            patterns=patterns(),
        )

    def framed(self) -> str:
        """The page as notebooks show it, in a frame of its own."""
        return (
            f'<iframe srcdoc="{escape(self.html())}" style="width:100%;height:85vh;border:0"'
            f' title="{escape(self.title)}"></iframe>'
        )

    @property
    def figures(self) -> list[Svg]:
        """The figures of its sections."""
        return [section.figure for section in self.sections if section.figure is not None]

    def save(self, path: str | Path) -> None:
        """Write the page to `path`; its name ends in .html. Raises AutoparError if that fails."""
        if path_of(path, "report").suffix.lower() not in (".html", ".htm"):
            raise AutoparError(f"the report {path} is a page: give it a name that ends in .html")
        write_text(path, self.html(), "report")

    def save_svgs(self, directory: str | Path) -> list[Path]:
        """Write each figure to a file of the folder `directory`, which is made if it is missing.
        Returns the paths. Raises AutoparError if that fails.
        """
        folder, found = made_folder(directory), []
        for figure in self.figures:
            found.append(folder / f"{figure.name}.svg")
            write_text(found[-1], figure.standalone(), "figure")
        return found


def page_of(answer: Reply) -> Page:
    """The page of an answer: its lines as far as the first table, its figure, its tables, and the other
    lines as items of a list.
    """
    lead: list[str | Number] = [f"{answer.doubt} "] if answer.doubt else []
    tables, items, figure = list[Table](), list[Words](), None
    for part in answer.parts:
        words = part.words if isinstance(part, Styled) else part
        if isinstance(words, Table):
            tables.append(words)
        elif words and tables:
            items.append(words)
        elif words:
            lead += [plain(words), " "]
    if answer.figure is not None:
        drawn, words = answer.figure
        figure = pareto_figure(drawn) if isinstance(drawn, Spots) else bars_figure(drawn)
        lead.append(words)
    section = Section("answer", "Answer", lead, figure, tuple(tables), items=items)
    return Page(answer.title, answer.data, [section], answer.version, answer.command)


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
