"""How often Python looks for garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Imports, traces and searches make many small objects that stay and hardly a cycle: to look through them for garbage again and again
    takes a tenth of their time, and more where processes that were forked share them."""
    before = gc.get_threshold()
    gc.set_threshold(5_000_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
