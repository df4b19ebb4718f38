"""Limits of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits of one search: `time_s` seconds of wall time for annotation and solving, `processes`,
    and `threads` of CP-SAT. A step that has begun stops at the limit, or later if no
    plan is known (`SearchState.stop_s`).

    A search with `processes` > 1 forks helpers after `alone_s` seconds, or at once if it has at
    least `alone_candidates` candidates. A search in one process always finds the same of two
    equally fast plans. Raises ValueError for less than one process or thread.
    """

    time_s: float = 60.0  # of annotation and solving
    processes: int = 1
    alone_s: float = 0.5
    alone_candidates: int = 100
    threads: int = 1  # of CP-SAT

    def __post_init__(self) -> None:
        if self.processes < 1 or self.threads < 1:
            raise ValueError(
                f"a search needs a process and a thread: processes={self.processes}, threads={self.threads}"
            )
