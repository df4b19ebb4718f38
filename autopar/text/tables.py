"""Tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table
    from rich.text import Text

_QUANTITY = re.compile(r"[-+]?[\d,.]+ \S+")
"""A number and its unit."""
_BETWEEN = 3
"""Blanks between columns; a line has one more at either end."""


def grid(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    right: Sequence[int] = (),
) -> Grid:
    """A table without vertical lines, with a header unless all `columns` (headings) are ''. `right`
    has the indices of right-aligned columns; the others are left-aligned.
    """
    return Grid(title, tuple(columns), [tuple(row) for row in rows], tuple(right))


class Grid:
    """A table that cuts no word: where the columns do not fit beside one another, the last ones are
    in a table below, beside the first column again. `caption` stands below.
    """

    def __init__(
        self,
        title: str,
        columns: tuple[str, ...],
        rows: Sequence[tuple[str | Text, ...]],
        right: tuple[int, ...],
    ) -> None:
        self.title, self.columns, self.rows, self.right = title, columns, rows, right
        self.caption = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Any]:
        from rich.text import Text

        last, rest = len(self.columns) - 1, len(self.columns)
        while rest > 2 and sum(self._least(range(rest))) > _room(options.max_width, rest):
            rest -= 1
        upper = self._table(range(rest), options.max_width)
        upper.title = self.title
        yield upper
        if rest <= last:
            kept = (0, *range(rest, last + 1))
            lower = Grid(
                "",
                tuple(self.columns[k] for k in kept),
                [tuple(row[k] for k in kept) for row in self.rows],
                tuple(place for place, k in enumerate(kept) if k in self.right),
            )
            yield from lower.__rich_console__(console, options)
        if self.caption:
            yield Text(self.caption)

    def _least(self, kept: Sequence[int]) -> list[int]:
        """For each column, the length of its longest word. A number and its unit are one word."""
        return [max(len(word) for text in self._cells(k) for word in _words(text)) for k in kept]

    def _cells(self, column: int) -> Iterable[str]:
        return (self.columns[column], *(str(row[column]) for row in self.rows))

    def _table(self, kept: Sequence[int], width: int) -> Table:
        """A rich table of some columns, without a title."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table

        table = Table(
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_header=any(self.columns[k] for k in kept),
            pad_edge=False,
        )
        most = [max(len(line) for text in self._cells(k) for line in text.split("\n")) for k in kept]  # fmt: skip
        widths = _shared(self._least(kept), most, _room(width, len(kept)))
        for k, wide in zip(kept, widths, strict=True):
            justify = "right" if k in self.right else "left"
            table.add_column(self.columns[k], justify=justify, overflow="fold", width=wide)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(row[k] for k in kept))
        return table


def _words(text: str) -> list[str]:
    return [text] if _QUANTITY.fullmatch(text) else text.split() or [""]


def _room(width: int, columns: int) -> int:
    """The letters of a line that cells may have."""
    return width - 2 - _BETWEEN * (columns - 1)


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths of columns within `room`: each has at least `least` if that fits, and at most `most`. What
    is left goes to the first column, up to a third of the room, and evenly to others that wrap.
    """
    widths = list(least)
    names = min(most[0], room // 3) - least[0]
    widths[0] += max(0, min(names, room - sum(widths)))
    left = room - sum(widths)
    while left > 0 and (short := [k for k in range(len(widths)) if widths[k] < most[k]]):
        narrowest = min(short, key=lambda k: widths[k])
        widths[narrowest] += 1
        left -= 1
    while left < 0 and max(widths) > 1:  # two columns with words longer than a line
        widths[widths.index(max(widths))] -= 1
        left += 1
    return widths
