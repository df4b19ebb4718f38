"""The time of each search of a command that makes several."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import NoPlanFits
from autopar.ir.deadline import Deadline


@dataclass(slots=True)
class Searches:
    """How many searches a command makes until its deadline. Those to come have equal shares of the
    time that is left.
    """

    deadline: Deadline
    to_come: int = 1

    def next_s(self, share: float = 1.0) -> float:
        """Seconds for the next search: its part of the fraction `share` of what is left.

        Raises NoPlanFits if nothing is left.
        """
        left_s = self.deadline.share_s(self.to_come) * share
        self.to_come = max(self.to_come - 1, 1)
        if left_s <= 0:
            raise NoPlanFits(too_short(self.deadline), proven=False, is_cut=True)
        return left_s


def too_short(deadline: Deadline) -> str:
    """What to say where the time was over before a plan was looked for."""
    captured = (
        f"; capturing the model took {deadline.captured_s:.1f} s of it"
        if deadline.captured_s
        else ""
    )
    least = max(2 * deadline.limit_s, 2 * deadline.captured_s)
    return (
        f"the time limit of {deadline.limit_s:g} s was over before this plan was looked for{captured}; "
        f"a limit of {least:.0f} s may be enough (--time-limit, time_limit_s in Python)"
    )
