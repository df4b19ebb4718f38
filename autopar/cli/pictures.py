"""How answers are shown: as text, JSON, a page, SVG files, and a trace of the simulated step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from autopar.cli.options import together
from autopar.cli.terminal import show

if TYPE_CHECKING:
    from autopar.report.page import Page
    from autopar.report.report import Report
    from autopar.text.replies import Reply

_PATH = click.Path(dir_okay=False)


page_options = together(
    click.option(
        "--svg",
        type=click.Path(file_okay=False),
        metavar="DIR",
        help="Write the figures of the page to a folder.",
    ),
    click.option(
        "--html",
        type=_PATH,
        metavar="report.html",
        help="Write the report as a page with figures.",
    ),
)
"""A decorator that adds the options of a page."""
picture_options = together(
    click.option(
        "--ranks",
        type=click.Choice(["stages", "all"]),
        default="stages",
        help="Of --trace: a process for each pipeline rank, or for each rank of the mesh.",
    ),
    click.option(
        "--trace",
        type=_PATH,
        metavar="trace.json.gz",
        help="Write the simulated step as a Chrome trace, for Perfetto.",
    ),
    page_options,
)
"""A decorator that adds the options of a page and of a trace."""


@dataclass(frozen=True, slots=True)
class Pictures:
    """What is to be drawn: paths of a page, of a folder of SVG files and of a trace, or None; and
    whether the trace has every rank.
    """

    html: str | None
    svg: str | None
    trace: str | None = None
    every_rank: bool = False

    @staticmethod
    def taken_from(asked: dict[str, Any]) -> Pictures:
        """The pictures that a command's arguments ask for, which are removed from `asked`."""
        html, svg, trace, ranks = (
            asked.pop(name, None) for name in ("html", "svg", "trace", "ranks")
        )
        if ranks == "all" and trace is None:
            raise click.UsageError("--ranks all is for --trace: give the name of a trace too")
        return Pictures(html, svg, trace, ranks == "all")

    @property
    def wanted(self) -> bool:
        """Whether anything is to be drawn."""
        return any(path is not None for path in (self.html, self.svg, self.trace))

    def write(self, shown: Page | Report) -> None:
        """Writes the pictures, and says so on stderr; nothing if none is wanted. A trace is that of a
        report. Raises AutoparError if one cannot be written.
        """
        said = []
        if self.html is not None:
            shown.save(self.html)
            said.append(self.html)
        if self.svg is not None:
            said += map(str, shown.save_svgs(self.svg))
        if self.trace is not None and hasattr(shown, "save_trace"):
            events = shown.save_trace(self.trace, self.every_rank)
            said.append(f"{self.trace} ({events:,} events)")
        if said:
            click.echo(f"Written: {', '.join(said)}", err=True)


def show_reply(
    answer: Reply, as_json: bool, drawn: Pictures | None = None, width: int | None = None
) -> None:
    """Prints an answer as JSON or as text, of which `width` is as for `show`; writes its page if one is
    wanted.
    """
    if as_json:
        click.echo(answer.json())
    else:
        show(answer, width)
    if drawn is not None and drawn.wanted:
        from autopar.report.page import page_of

        drawn.write(page_of(answer))
