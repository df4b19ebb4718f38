"""Tables, which a terminal shows as text and a page as HTML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from autopar.text.numbers import Words, plain

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.table import Table as RichTable

_QUANTITY = re.compile(r"[-+]?[\d,.]+ \S+")
"""A number and its unit."""
_BETWEEN = 3
"""Blanks between columns; a line has one more at either end."""
_LABEL_WIDTH, _ALIKE_WIDTH = 24, 16
"""Letters of the first column and of others that are alike: three of them fit 80."""


@dataclass(slots=True)
class Table:
    """A table with a heading for each column, unless all are ''. `right` are the indices of columns of
    numbers. `folded` has rows that a page shows when a reader asks for them. `caption` stands below.

    As text it cuts no word: where the columns do not fit beside one another, the last ones are in a
    table below, beside the first column again. `alike`: columns after the first are one kind, and
    as many stand side by side as have room. Columns of the indices `wide` are on pages only.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Words]]
    right: Sequence[int] = ()
    folded: Sequence[Sequence[Words]] = ()
    title: str = ""
    caption: str = ""
    alike: bool = False
    wide: Sequence[int] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Any]:
        from rich.text import Text

        for place, kept in enumerate(self._parts(options.max_width)):
            part = self._of(kept)._rich(options.max_width)
            part.title = self.title if place == 0 else ""
            yield part
        if self.caption:
            yield Text(self.caption)

    def _parts(self, width: int) -> Iterator[Sequence[int]]:
        """The columns that stand beside one another, for each table of the text."""
        least = self._least()
        others = [k for k in range(1, len(self.columns)) if k not in self.wide]
        at_once = max(len(others), 1)
        if self.alike:
            at_once = max((width - _LABEL_WIDTH - 2) // (_ALIKE_WIDTH + 2), 1)
        first = 0
        while first < max(len(others), 1):
            rest = others[first : first + at_once - first % at_once]
            fits = len(rest)
            while fits > 1 and least[0] + sum(least[k] for k in rest[:fits]) > _room(
                width, fits + 1
            ):
                fits -= 1
            yield (0, *rest[:fits])
            first += max(fits, 1)

    def _of(self, kept: Sequence[int]) -> Table:
        """The table of some columns."""
        rows = [[row[k] for k in kept] for row in self.rows]
        right = [place for place, k in enumerate(kept) if k in self.right]
        return replace(self, columns=[self.columns[k] for k in kept], rows=rows, right=right)

    def _least(self) -> list[int]:
        """For each column, the length of its longest word. A number and its unit are one word."""
        return [
            max(len(word) for text in cells for word in _words(text)) for cells in self._cells()
        ]

    def _cells(self) -> Iterator[list[str]]:
        for column, head in enumerate(self.columns):
            yield [head, *(plain(row[column]) for row in self.rows)]

    def _rich(self, width: int) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            title_justify="left",
            title_style="bold",
            box=SIMPLE_HEAD,
            show_header=any(self.columns),
            pad_edge=False,
        )
        most = [
            max(len(line) for text in cells for line in text.split("\n")) for cells in self._cells()
        ]
        widths = _shared(self._least(), most, _room(width, len(self.columns)))
        for k, (head, wide) in enumerate(zip(self.columns, widths, strict=True)):
            justify = "right" if k in self.right else "left"
            table.add_column(head, justify=justify, overflow="fold", width=wide)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(Text(plain(cell)) for cell in row))
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
