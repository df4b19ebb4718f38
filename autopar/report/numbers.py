"""Numbers of a page: each has its text, its value, and its path in the output of `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from autopar.text.units import gib, ms, percent


@dataclass(frozen=True, slots=True)
class Number:
    """A number as a page shows it: `text`, and `value` under `path` ('predicted.step_time_s') of
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


class Numbers:
    """Makes the numbers of a page from data: each is looked up at its path."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.data = data

    def value(self, path: str) -> Any:
        """What the data has at a path of keys and indices. Raises KeyError or IndexError if there
        is nothing.
        """
        found: Any = self.data
        for key in path.split("."):
            found = found[int(key)] if isinstance(found, (list, tuple)) else found[key]
        return found

    def ms(self, path: str) -> Number:
        """Seconds, as milliseconds or seconds."""
        seconds = self.value(path)
        return Number(f"{seconds:.4g} s" if seconds >= 10 else ms(seconds), seconds, path)

    def gib(self, path: str) -> Number:
        """Bytes, as GiB."""
        return Number(gib(self.value(path)), self.value(path), path)

    def percent(self, path: str) -> Number:
        """A fraction, as percent."""
        return Number(percent(self.value(path)), self.value(path), path)

    def count(self, path: str) -> Number:
        """A number as it is, with commas, and without decimals from 100 on."""
        value = self.value(path)
        text = (
            f"{value:,}"
            if isinstance(value, int)
            else f"{value:,.0f}"
            if value >= 100
            else f"{value:.4g}"
        )
        return Number(text, value, path)
