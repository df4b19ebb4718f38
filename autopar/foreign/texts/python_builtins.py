"""Functions of Python that reading a file computes: those of numbers, texts, lists and mappings."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

MOST_ITEMS = 20_000
"""The longest list, and the longest text, that is computed."""


class NotComputed(Exception):
    """A value that reading does not compute."""


def _range(*numbers: int) -> list[int]:
    found = range(*numbers)
    if len(found) > MOST_ITEMS:
        raise NotComputed
    return list(found)


def _multiplied(left: Any, right: Any) -> Any:
    sizes = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
    counts = [side for side in (left, right) if isinstance(side, int)]
    if sizes and counts and sizes[0] * counts[0] > MOST_ITEMS:
        raise NotComputed
    return left * right


def _remainder(left: Any, right: Any) -> Any:
    if isinstance(left, str) and re.search(r"\d{4}|\*", left):  # `"%999999999d" % 1`
        raise NotComputed
    return left % right


def method(value: Any, name: str, args: list[Any], named: dict[str, Any]) -> Any:
    """The value of a method of `STRING_METHODS`. Raises NotComputed if it has none or a very long one."""
    texts = [value, *args, *(args[0] if args and isinstance(args[0], list | tuple) else ())]
    length = sum(len(text) for text in texts if isinstance(text, str))
    if isinstance(value, str) and (length > MOST_ITEMS // 4 or name == "zfill"):
        raise NotComputed
    if name == "format" and re.search(r"\d{4}", value):
        raise NotComputed
    return computed(getattr(value, name), *args, **named)


def _power(left: Any, right: Any) -> Any:
    if abs(right) > 64 or abs(left) > 10**9:
        raise NotComputed
    return left**right


BUILTINS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "len": len,
    "min": min,
    "max": max,
    "abs": abs,
    "round": round,
    "range": _range,
    "sum": sum,
    "any": any,
    "all": all,
    "sorted": sorted,
    "reversed": lambda items: list(reversed(items)),
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": set,
    "zip": lambda *lists, **_: [tuple(row) for row in zip(*lists, strict=False)],
    "enumerate": lambda items, start=0: [tuple(pair) for pair in enumerate(items, start)],
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.prod": math.prod,
    "math.gcd": math.gcd,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}
"""Functions by name, on values that are known."""

OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": _multiplied,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": _remainder,
    "Pow": _power,
    "LShift": lambda left, right: _multiplied(left, _power(2, right)),
    "RShift": operator.rshift,
    "BitOr": operator.or_,
    "BitAnd": operator.and_,
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
    "In": lambda left, right: left in right,
    "NotIn": lambda left, right: left not in right,
}
"""Operators by the class of their node."""

STRING_METHODS = frozenset(
    "lower upper strip lstrip rstrip replace split rsplit startswith endswith join removeprefix removesuffix title "
    "format partition rpartition zfill isdigit get items keys values copy index count union".split()
)
"""Methods of texts, lists and mappings that change nothing."""
CHANGES = frozenset("append extend insert update setdefault pop add remove clear sort".split())
"""Methods of lists and mappings that change them."""


def computed(call: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The value of a call on known values. Raises NotComputed if it has none or a very long one."""
    try:
        value = call(*args, **named)
    except NotComputed:
        raise
    except Exception:  # the file would fail there
        raise NotComputed from None
    if isinstance(value, str | list | tuple | dict) and len(value) > MOST_ITEMS:
        raise NotComputed
    if isinstance(value, int) and abs(value) > 10**30:
        raise NotComputed
    return (
        list(value)
        if isinstance(value, type({}.items()) | type({}.keys()) | type({}.values()))
        else value
    )
