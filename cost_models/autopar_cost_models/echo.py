"""Short, single-line forms of user-supplied values for error messages. They never raise."""

from __future__ import annotations

import re
import reprlib
from typing import Any

LONGEST_WORD = 300
"""The longest run of characters without spaces, such as a path, that a message shows in full."""
LONGEST_MESSAGE = 4000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_LEFT_OUT = " ... "


class _Short(reprlib.Repr):
    """A `repr` that shows only a few elements and levels of a container, without walking through
    the rest.
    """

    def __init__(self) -> None:
        super().__init__()
        self.maxstring, self.maxlong, self.maxother = 100, 60, 100
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 10_000:  # Python refuses to write down more than 4,300 digits
            return f"<a whole number of {x.bit_length():,} bits>"
        return super().repr_int(x, level)


_SHORT = _Short()


def shown(value: Any) -> str:
    """`repr(value)` on one line, shortened to at most 200 characters. It works for any value."""
    return shortened(" ".join(_SHORT.repr(value).split()), 200)


def shortened(text: str, most: int) -> str:
    """`text` with its middle replaced by a mark if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    head = most - tail - len(_LEFT_OUT)
    return f"{text[:head]}{_LEFT_OUT}{text[-tail:]}"


def shortened_message(text: str) -> str:
    """A message whose very long words, and whose text as a whole, are shortened in the middle."""
    words = _LONG_WORD.sub(lambda word: shortened(word[0], LONGEST_WORD), text)
    return shortened(words, LONGEST_MESSAGE)
