"""What a command answers, as data: lines, tables and pictures. Text, page and JSON are made from it.

A row of a table is said once, as a `Field`: its key in JSON, its value, and its column.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any

from autopar_cost_models import COST_MODEL_VERSION

from autopar.text.numbers import Number, Words, plain
from autopar.text.tables import Table
from autopar.text.units import WIDTH

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


ABSENT = object()
"""The value of a field that a row does not have: shown as '-', and not in its JSON."""


@dataclass(frozen=True, slots=True)
class Field:
    """A fact of each row of a table.

    Attributes:
        key: its key in the JSON of a row, or the path of a value inside another field; '' if it is
            only shown.
        of: its value in a row, in SI units. None is shown as '-'.
        head: the heading of its column; None if it is only in JSON.
        words: writes a value with its unit, in a column that is right-aligned. None for a text.
        wide: only a page, which has room, shows it.
    """

    key: str
    of: Callable[[Any], Any]
    head: str | None = None
    words: Callable[[Any], str] | None = None
    wide: bool = False

    def cell(self, row: Any, path: str) -> str | Number:
        """The cell of a row whose JSON is at `path` ('': nowhere)."""
        value = self.of(row)
        words = (
            "-"
            if value in (None, ABSENT)
            else str(value)
            if self.words is None
            else self.words(value)
        )
        is_number = isinstance(value, (int, float)) and self.key and path
        return Number(words, value, f"{path}.{self.key}") if is_number else words


def records(fields: Sequence[Field], rows: Iterable[Any]) -> list[dict[str, Any]]:
    """The JSON of rows, one dict for each."""
    kept = [field for field in fields if field.key and "." not in field.key]
    found = [{field.key: field.of(row) for field in kept} for row in rows]
    return [{key: value for key, value in row.items() if value is not ABSENT} for row in found]


def doubted(doubt: str, data: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an answer, of which a doubt comes first."""
    return {"not_proved": doubt, **data} if doubt else data


def field_table(
    fields: Sequence[Field], rows: Iterable[Any], title: str = "", at: str = ""
) -> Table:
    """The table of rows, whose `records` are under the path `at` of the answer's JSON, if anywhere."""
    shown = [field for field in fields if field.head is not None]
    cells = [
        [field.cell(row, at and f"{at}.{place}") for field in shown]
        for place, row in enumerate(rows)
    ]
    right = [place for place, field in enumerate(shown) if field.words is not None]
    wide = [place for place, field in enumerate(shown) if field.wide]
    return Table([field.head or "" for field in shown], cells, right, title=title, wide=wide)


@dataclass(frozen=True, slots=True)
class Styled:
    """A line of an answer that stands out: 'bold' for a verdict, 'yellow' for a warning."""

    words: Words
    style: str
    wraps: bool = True


@dataclass(frozen=True, slots=True)
class StepBar:
    """A step: its name, seconds of its parts by the names of `Prediction.breakdown`, and its time."""

    name: str
    parts: Mapping[str, float]
    step: Number


@dataclass(frozen=True, slots=True)
class Spot:
    """A point of a drawing: its name, how far right and how high it is, and the words beside it."""

    name: str
    across: Number
    up: Number
    words: str = ""


@dataclass(frozen=True, slots=True)
class Spots:
    """Points by two merits, of which less is better. `across` says what the axis to the right is."""

    title: str
    spots: Sequence[Spot]
    across: str


Figure = Spots | Sequence[StepBar]
"""What a page draws: points, or steps as bars."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer. rich prints it as text, and `report.page.page_of` makes its page.

    Attributes:
        parts: lines and tables, in order; '' is left out.
        data: what `--json` prints.
        title: its title.
        doubt: a warning that comes before all else; '' without one.
        figure: what its page draws, and a sentence on how to read that.
        command: the command that prints it.
        version: the version of the cost model that predicted its numbers.
    """

    parts: Sequence[str | Styled | Table]
    data: Any = None
    title: str = ""
    doubt: str = ""
    figure: tuple[Figure, str] | None = None
    command: str = ""
    version: str = COST_MODEL_VERSION

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.text import Text

        for part in (Styled(self.doubt, "yellow"), Styled(self.title, "bold"), *self.parts):
            if isinstance(part, Table):
                yield part
            elif words := plain(
                (said := part if isinstance(part, Styled) else Styled(part, "")).words
            ):
                yield Text(
                    words,
                    said.style,
                    no_wrap=not said.wraps or None,
                    overflow=None if said.wraps else "ignore",
                )

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=WIDTH, color_system=None, force_terminal=False).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def json(self) -> str:
        """Its data as JSON text, with null where a number is not finite."""
        return json.dumps(_finite(self.data), indent=1, allow_nan=False)


def _finite(data: Any) -> Any:
    """`data` with NaN and infinities, which JSON lacks, replaced by None."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not isfinite(data) else data
