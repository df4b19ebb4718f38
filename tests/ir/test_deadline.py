"""The end of the time of a command."""

from __future__ import annotations

import threading
import time

import pytest

from autopar.errors import AutoparError
from autopar.ir.deadline import CAPTURE_S, Deadline


def late(limit_s: float, left_s: float) -> Deadline:
    """A deadline whose capture has to end in `left_s` seconds."""
    return Deadline(time.perf_counter() - max(limit_s, CAPTURE_S) + left_s, limit_s)


def swallowing(seconds: float) -> None:
    """Work that handles every error of its own."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        try:
            time.sleep(0.01)
        except Exception:
            continue


@pytest.mark.parametrize("limit_s", [4.0, 400.0])
def test_a_capture_that_takes_too_long_is_ended(limit_s: float) -> None:
    start = time.perf_counter()
    most_s = max(limit_s, CAPTURE_S)
    words = f"tracing a was not done after {most_s:g} s"
    with pytest.raises(AutoparError, match=words), late(limit_s, 0.05).ends_capture("tracing a"):
        swallowing(30.0)
    assert time.perf_counter() - start < 20.0


def test_a_capture_in_time_is_left_alone() -> None:
    with late(4.0, 0.3).ends_capture("tracing a"):
        pass
    time.sleep(0.5)  # no alarm is left
    with pytest.raises(ValueError, match="its own"), late(4.0, 9.0).ends_capture("tracing a"):
        raise ValueError("its own")


def test_a_capture_that_comes_late_is_ended_at_once() -> None:
    with pytest.raises(AutoparError), late(4.0, -5.0).ends_capture("tracing a"):
        swallowing(30.0)


def test_other_threads_take_their_time() -> None:
    found = []

    def run() -> None:
        with late(4.0, 0.01).ends_capture("tracing a"):
            time.sleep(0.1)
            found.append("done")

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["done"]
