"""What every rank must have alike in each call of a method, such as the options of the optimizer.

A rank sends a checksum in the message of its call (`batches/meeting.py`). If checksums differ,
ranks exchange the values, and each raises an error that names the first difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.errors import AutoparError

_LONGEST = 8
"""The longest list or tuple that is compared as an option."""


def checksum(values: Any) -> int:
    """A number that almost always differs where `values`, numbers and texts, do."""
    return zlib.crc32(repr(values).encode())


def options(
    groups: Sequence[Mapping[str, Any]], moving: Collection[str]
) -> list[list[tuple[str, Any]]]:
    """For each parameter group, the names and values of its options, if they are numbers, texts or
    short lists of such. Options in `moving`, which the optimizer's own step changes, are left out.
    """
    return [
        [
            (key, plain)
            for key, value in group.items()
            if key not in ("params", "param_names")
            and key not in moving
            and (plain := _plain(value)) is not _OTHER
        ]
        for group in groups
    ]


_OTHER = object()


def _plain(value: Any) -> Any:
    """The value as it is compared, or `_OTHER` if it is not."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else _OTHER
    if isinstance(value, list | tuple) and len(value) <= _LONGEST:
        found = [_plain(entry) for entry in value]
        return _OTHER if any(entry is _OTHER for entry in found) else found
    return _OTHER


def by_name(values: list[list[tuple[str, Any]]]) -> dict[str, Any]:
    """The result of `options` as one mapping, for `raise_difference`."""
    return {
        f"{key} of parameter group {number}": value
        for number, group in enumerate(values)
        for key, value in group
    }


def raise_difference(ranks: Sequence[Mapping[str, Any]], advice: str) -> None:
    """Raise AutoparError, with the advice, if ranks have different values: `ranks[r]` are those of
    rank r, by what they are.
    """
    first = ranks[0]
    for rank, other in enumerate(ranks):
        for what in (*first, *other):
            one, two = repr(first.get(what, "none")), repr(other.get(what, "none"))
            if one != two:
                raise AutoparError(
                    f"ranks have different {what}: {_short(one)} on rank 0, {_short(two)} on rank {rank}. {advice}"
                )


def _short(text: str) -> str:
    return text if len(text) <= 150 else f"{text[:147]}..."
