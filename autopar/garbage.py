"""The frequency of Python's garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seldom_collected() -> Iterator[None]:
    """A context in which Python collects garbage rarely.

    Imports, traces and searches make many small objects that stay, and hardly any cycles. Repeated
    collections take a tenth of their time, and more in forked processes that share these objects.
    """
    before = gc.get_threshold()
    gc.set_threshold(5_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
