"""Checks what commands print at 80 columns: no line is longer, and no word is cut."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rich.console import Console

COLUMNS = 80
_ADDRESS = 60
"""Letters of an address from which on it may be folded."""


@contextmanager
def fits_a_terminal() -> Iterator[None]:
    """A context at whose end each table that was printed in it is printed again, narrow and wide."""
    printed: list[Any] = []
    original = Console.print

    def noted(self: Console, *shown: Any, **options: Any) -> None:
        printed.extend(item for item in shown if not isinstance(item, str))
        original(self, *shown, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Console, "print", noted)
        yield
    for shown in printed:
        narrow, wide = (_lines(shown, width) for width in (COLUMNS, 4000))
        assert not [line for line in narrow if len(line) > COLUMNS]
        known = {word for line in wide for word in line.split()}
        long = " ".join(word for word in known if len(word) > _ADDRESS)
        cut = {word for line in narrow for word in line.split() if word not in known}
        assert not [word for word in cut if set(word) != {"─"} and word not in long]


def _lines(shown: Any, width: int) -> list[str]:
    console = Console(width=width, force_terminal=False, color_system=None, highlight=False)
    with console.capture() as captured:
        console.print(shown)
    return [line.rstrip() for line in captured.get().splitlines()]
