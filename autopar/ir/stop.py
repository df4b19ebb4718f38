"""The time at which a computation that is under way stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import inf

_stop: ContextVar[float] = ContextVar("stop", default=inf)


class TimeIsOver(Exception):
    """A computation was stopped by `stops_at`. The code that opened the context handles it."""


@contextmanager
def stops_at(time_s: float) -> Iterator[None]:
    """A context in which `check_time` raises `TimeIsOver` from `time_s` on, by
    `time.perf_counter()`. Inside of another context, the earlier time counts.
    """
    before = _stop.set(min(time_s, _stop.get()))
    try:
        yield
    finally:
        _stop.reset(before)


def check_time() -> None:
    """Raises `TimeIsOver` if the time of the innermost `stops_at` is over. Long loops call it where
    what they have computed so far is consistent. Without a context it does nothing.
    """
    if _stop.get() <= time.perf_counter():
        raise TimeIsOver
