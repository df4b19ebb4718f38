"""When a command has to answer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError, shown

SEARCH_LEAST = 0.5
"""The fraction of the limit that searches have at least, however long capturing the model took."""


CAPTURE_S = 120.0
"""Seconds that capturing a model may take in a command with a lower limit."""


def _now_s() -> float:
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time of a command: `limit_s` seconds after `start_s`, by `clock`.

    Without a captured model there is no answer. If that took `captured_s` seconds, what follows has
    at least half of the limit, so that all ends within `limit_s + captured_s`.
    """

    start_s: float
    limit_s: float
    captured_s: float = 0.0
    clock: Callable[[], float] = field(default=_now_s, compare=False)

    def __post_init__(self) -> None:
        if not self.limit_s > 0 or self.captured_s < 0:
            raise AutoparError(f"a time limit of {shown(self.limit_s)} s must be above 0")

    @staticmethod
    def after(limit_s: float, clock: Callable[[], float] = _now_s) -> Deadline:
        """The deadline `limit_s` seconds from now; infinity is none."""
        return Deadline(clock(), limit_s, clock=clock)

    @property
    def at_s(self) -> float:
        """The time of `clock` at which the answer is due."""
        return self.start_s + max(self.limit_s, self.captured_s + SEARCH_LEAST * self.limit_s)

    @property
    def left_s(self) -> float:
        """Seconds until then, at least 0."""
        return max(self.at_s - self.clock(), 0.0)

    def at_most_s(self, most_s: float) -> float:
        """The seconds that are left, to a tenth, but at most `most_s`: a figure to print."""
        return min(most_s, round(self.left_s, 1))

    @property
    def is_over(self) -> bool:
        """Whether the answer is due."""
        return self.clock() >= self.at_s

    def captured(self, seconds: float) -> Deadline:
        """This deadline after capturing a model took these seconds more."""
        return replace(self, captured_s=self.captured_s + seconds)

    @contextmanager
    def ends_capture(self, what: str) -> Iterator[None]:
        """Ends the block, which captures a model, with AutoparError if it is not done `limit_s`
        seconds, or `CAPTURE_S` if that is more, after the start. `what` is done, as in 'tracing a'.
        Only the main thread can be ended so: elsewhere the block takes its time.
        """
        most_s = max(self.limit_s, CAPTURE_S)
        left_s = self.start_s + most_s - self.clock()
        if most_s == float("inf") or threading.current_thread() is not threading.main_thread():
            yield
            return
        fired = False

        def end(*_: object) -> None:
            nonlocal fired
            fired = True
            raise _Ended

        before = signal.signal(signal.SIGALRM, end)
        signal.setitimer(
            signal.ITIMER_REAL, max(left_s, 0.001), 1.0
        )  # again, if the first was lost
        try:
            yield
        except BaseException as error:
            if not fired or isinstance(error, KeyboardInterrupt):
                raise
            raise AutoparError(
                f"{what} was not done after {most_s:g} s, and counts to the time limit: "
                f"give a limit of {10 * most_s:g} s, or fewer layers or tokens"
            ) from None
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def share_s(self, number: int = 1) -> float:
        """Seconds for the next of `number` searches that are to come, with equal shares."""
        return self.left_s / max(number, 1)


class _Ended(BaseException):
    """The block has no time left. No handler of errors takes it for one."""
