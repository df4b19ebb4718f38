"""When a command has to answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.errors import AutoparError, shown

SEARCH_LEAST = 0.5
"""The fraction of the limit that searches have at least, however long capturing the model took."""


def _now_s() -> float:
    return time.perf_counter()


@dataclass(frozen=True, slots=True)
class Deadline:
    """The end of the time of a command: `limit_s` seconds after `start_s`, by `clock`.

    Capturing a model cannot be cut short. If it took `captured_s` seconds, what follows has at
    least half of the limit, so that all ends within `limit_s + captured_s`.
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

    @property
    def is_over(self) -> bool:
        """Whether the answer is due."""
        return self.clock() >= self.at_s

    def captured(self, seconds: float) -> Deadline:
        """This deadline after capturing a model took these seconds more."""
        return replace(self, captured_s=self.captured_s + seconds)

    def share_s(self, number: int = 1) -> float:
        """Seconds for the next of `number` searches that are to come, with equal shares."""
        return self.left_s / max(number, 1)
