"""What a message repeats of a user's value: short, on one line, and made without fail."""

from __future__ import annotations

import re
import reprlib
from typing import Any

LONGEST_WORD = 300
"""Characters of a run without spaces, such as a path, that a message repeats in full."""
LONGEST_MESSAGE = 4000
_LONG_WORD = re.compile(rf"\S{{{LONGEST_WORD + 1},}}")
_LEFT_OUT = " ... "


class _Short(reprlib.Repr):
    """`repr` of a few elements and levels.  Large containers are not walked through."""

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
    """`repr(value)` in at most some 100 characters and on one line, whatever the value is."""
    return shortened(" ".join(_SHORT.repr(value).split()), 200)


def shortened(text: str, most: int) -> str:
    """`text`, without its middle where it is longer than `most` characters."""
    if len(text) <= most:
        return text
    tail = most // 3
    head = most - tail - len(_LEFT_OUT)
    return f"{text[:head]}{_LEFT_OUT}{text[-tail:]}"


def shortened_message(text: str) -> str:
    """A message without the middle of words that no reader needs whole, nor of a text that never ends."""
    words = _LONG_WORD.sub(lambda word: shortened(word[0], LONGEST_WORD), text)
    return shortened(words, LONGEST_MESSAGE)
