"""Output of the command line: results on stdout, progress on stderr."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

PROGRESS_AFTER_S = 2.0
PROGRESS_EVERY_S = 10.0
"""Seconds between lines of progress where there is no terminal."""


def show(renderable: Any, width: int | None = None) -> None:
    """Prints a rich renderable or text to stdout. Text is not wrapped. If stdout is not a terminal,
    a renderable is $COLUMNS wide, or else `width`, or else 120, and lines end without blanks.
    """
    from rich.console import Console

    console = Console(file=sys.stdout, highlight=False, soft_wrap=isinstance(renderable, str))
    if console.is_terminal:
        console.print(renderable)
        return
    from autopar.text.units import WIDTH

    wide = int(os.environ.get("COLUMNS") or width or WIDTH)
    console = Console(
        file=sys.stdout, width=wide, highlight=False, soft_wrap=isinstance(renderable, str)
    )
    with console.capture() as captured:
        console.print(renderable)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """A context that yields `tell(text)`; `what` is the first text. After two seconds it shows the
    latest text on stderr, with the number of texts before and the seconds since the start. On a
    terminal that is a spinner; otherwise it is a line every ten seconds.
    """
    from rich.console import Console

    shown = _Progress(what, Console(stderr=True, highlight=False))
    try:
        yield shown.tell
    finally:
        shown.end()


class _Progress:
    """The progress of one command, shown by a timer's thread."""

    def __init__(self, what: str, console: Any) -> None:
        self.console, self.text, self.told = console, f"{what} ...", 0
        self.status = console.status(self.text)
        self.lock, self.started, self.ended = threading.Lock(), time.monotonic(), threading.Event()
        threading.Thread(target=self._run, args=(PROGRESS_AFTER_S,), daemon=True).start()

    def tell(self, text: str) -> None:
        """Note the latest text."""
        with self.lock:
            self.text, self.told = text, self.told + 1

    def end(self) -> None:
        """Show nothing more."""
        self.ended.set()
        with self.lock:
            self.status.stop()

    def _run(self, wait_s: float) -> None:
        """Show the latest text after `wait_s` seconds, and again and again until the end."""
        while not self.ended.wait(wait_s):
            with self.lock:
                if self.ended.is_set():
                    return
                self._show()
            wait_s = 0.5 if self.console.is_terminal else PROGRESS_EVERY_S

    def _show(self) -> None:
        seconds = time.monotonic() - self.started
        count = f"{self.told} so far, " if self.told > 1 else ""
        words = f"{self.text} ({count}{seconds:.0f} s)"
        if self.console.is_terminal:
            self.status.update(words)
            self.status.start()
        else:
            self.console.print(words, soft_wrap=True)
