"""Validation of arguments, shared by the cost models. Errors are ValueError: this package does not
import autopar's exceptions.
"""

from __future__ import annotations

from difflib import get_close_matches
from math import inf, isfinite
from numbers import Real
from typing import SupportsFloat, TypeGuard

from autopar_cost_models.echo import LONGEST_WORD, shortened, shown

_MOST = 10**18
"""The largest allowed count or size: an exabyte, or more operations than any training step has."""


def is_whole(value: object, least: int = 1, most: float = inf) -> TypeGuard[int]:
    """Whether `value` is an int from `least` to `most`; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def whole(name: str, value: object, least: int = 1) -> int:
    """`value` if it is an int from `least` to `_MOST` (a bool is not); otherwise ValueError."""
    if not is_whole(value, least, _MOST):
        limit = (
            f">= {least}"
            if not isinstance(value, int) or value < least
            else f"of at most {_MOST:,}"
        )
        raise ValueError(f"{name}={shown(value)} must be a whole number {limit}")
    return value


def positive(name: str, value: object, zero_allowed: bool = False) -> float:
    """`value` as a float if it is a finite real number > 0 (or >= 0 where zero is allowed); otherwise ValueError."""
    # to ask for the type itself is much quicker
    if (
        not (
            type(value) is float
            or type(value) is int
            or (isinstance(value, Real) and not isinstance(value, bool))
        )
        or not finite(value)
        or value < 0
        or (value == 0 and not zero_allowed)
    ):
        raise ValueError(
            f"{name}={shown(value)} must be a finite number {'>= 0' if zero_allowed else '> 0'}"
        )
    return float(value)


def fraction(name: str, value: object) -> float:
    """`value` as a float if 0 < `value` <= 1; otherwise ValueError."""
    share = positive(name, value)
    if share > 1:
        raise ValueError(
            f"{name}={shown(value)} must be at most 1: it is a share of the datasheet figure"
        )
    return share


def text(name: str, value: object) -> None:
    """ValueError unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={shown(value)} must be a non-empty text")


def finite(value: SupportsFloat) -> bool:
    """Whether a number is a finite float. False for nan, infinities, and integers above 1.8e308."""
    try:
        return isfinite(value)
    except OverflowError:
        return False


def nearest(word: object, known: list[str]) -> str:
    """A phrase for an error message: the entries of `known` that begin with `word` or are closest
    to it, or all of them if none is close.
    """
    text = shortened(word if isinstance(word, str) else shown(word), LONGEST_WORD)
    begins = [name for name in known if text and name.startswith(text.lower())]
    close = begins[:4] or get_close_matches(text.lower(), known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(known))}"
