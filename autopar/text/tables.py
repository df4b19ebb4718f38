"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[int] = (),
) -> Table:
    """A rich table without vertical lines, with a header unless all `columns` (headings) are ''.
    `right` has the indices of right-aligned columns; the others are left-aligned.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        show_header=any(columns),
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
