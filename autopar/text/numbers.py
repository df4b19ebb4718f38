"""Numbers of a report: each has its text, its value, and its path in the output of `--json`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from autopar.text.units import gib, ms, percent


@dataclass(frozen=True, slots=True)
class Number:
    """A number as a report shows it: `text`, and `value` under `path` ('predicted.step_time_s') of
    the plan's data.
    """

    text: str
    value: float
    path: str

    @property
    def attributes(self) -> str:
        """Its attributes in HTML and SVG."""
        return f'data-path="{escape(self.path)}" data-value="{self.value!r}"'

    def __html__(self) -> str:
        return f"<data {self.attributes}>{escape(self.text)}</data>"

    def __str__(self) -> str:
        return self.text


Words = str | Number | Sequence[str | Number]
"""A text, a number, or several of these in a row."""


def plain(words: Words) -> str:
    """Words as one text."""
    return "".join(map(str, words)) if isinstance(words, (list, tuple)) else str(words)


class Numbers:
    """Makes the numbers of a report from data: each is looked up at its path. `under` is the path of
    the part of the data where all paths begin; '' is the whole.
    """

    def __init__(self, data: Any, under: str = "") -> None:
        self.data, self.under = data, under

    def value(self, path: str) -> Any:
        """What the data has at a path of keys and indices. Raises KeyError or IndexError if there
        is nothing.
        """
        found: Any = self.data
        for key in self._whole(path).split("."):
            found = found[int(key)] if isinstance(found, (list, tuple)) else found[key]
        return found

    def number(self, path: str, words: Callable[[Any], str]) -> Number:
        """The number at a path, as `words` writes it."""
        value = self.value(path)
        return Number(words(value), value, self._whole(path))

    def _whole(self, path: str) -> str:
        return f"{self.under}.{path}" if self.under else path

    def ms(self, path: str) -> Number:
        """Seconds, as milliseconds or seconds."""
        return self.number(path, ms)

    def gib(self, path: str) -> Number:
        """Bytes, as GiB."""
        return self.number(path, gib)

    def most_gib(self, path: str) -> Number:
        """The largest of a list of bytes, as GiB."""
        sizes = self.value(path)
        return self.gib(f"{path}.{sizes.index(max(sizes))}")

    def percent(self, path: str) -> Number:
        """A fraction, as percent."""
        return self.number(path, percent)

    def count(self, path: str) -> Number:
        """A number as it is, with commas, and without decimals from 100 on."""
        return self.number(path, _count)


def _count(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.4g}"
