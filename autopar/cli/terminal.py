"""Output of the command line: results on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROGRESS_AFTER_S = 2.0


def show(renderable: Any, width: int | None = None) -> None:
    """Prints a rich renderable or text to stdout. Text is not wrapped. If stdout is not a terminal,
    a renderable is `width` columns wide; by default $COLUMNS, or else 120.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=isinstance(renderable, str))
    if not console.is_terminal:
        from autopar.text.units import WIDTH

        wide = width or int(os.environ.get("COLUMNS") or WIDTH)
        console = Console(
            file=sys.stdout, width=wide, highlight=False, soft_wrap=isinstance(renderable, str)
        )
    console.print(renderable)


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A context that yields `tell(text)`; `what` is the first text. After two seconds it shows the
    latest text on stderr: on a terminal with a spinner, which follows later texts, otherwise once,
    as a line.
    """
    from rich.console import Console

    console, started, lock = (
        Console(stderr=True, highlight=False),
        threading.Event(),
        threading.Lock(),
    )
    status, current = console.status(f"{what} ..."), [f"{what} ..."]

    def start() -> None:
        with lock:
            if not started.is_set():
                started.set()
                status.start() if console.is_terminal else console.print(current[0])

    def tell(text: str) -> None:
        with lock:
            current[0] = text
            if started.is_set() and console.is_terminal:
                status.update(text)

    timer = threading.Timer(PROGRESS_AFTER_S, start)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        with lock:
            started.set()
            status.stop()
