"""How much a test tries: little in every run, much under `--runslow`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import hypothesis
import pytest

RUNSLOW = "AUTOPAR_RUNSLOW"
"""The environment variable that `--runslow` sets, in pytest and in its workers."""


def examples(few: int, many: int) -> int:
    """The number of examples of a hypothesis test: `many` under `--runslow`, else `few`."""
    return many if RUNSLOW in os.environ else few


def tried(few: Any, many: Any) -> Any:
    """What a test goes through in one run: `many` under `--runslow`, else `few` of them."""
    return many if RUNSLOW in os.environ else few


def every(step: int, values: Iterable[Any], unpacked: bool = False) -> list[Any]:
    """Parameters of a test, of which all but the first and each `step`-th after it are slow.

    With `unpacked`, a value is a tuple with a part for each name.
    """
    return [
        pytest.param(
            *(value if unpacked else (value,)), marks=pytest.mark.slow if place % step else ()
        )
        for place, value in enumerate(values)
    ]


def slow_but(kept: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test, of which all but those that are kept are slow."""
    kept, values = list(kept), list(values)
    assert all(value in values for value in kept), "what is kept is a parameter"
    return [
        pytest.param(value, marks=() if value in kept else pytest.mark.slow) for value in values
    ]


def explore(item: pytest.Item, number: int) -> None:
    """Make a property test try `number` new random examples; other tests stay as they are.

    A failure prints a decorator that repeats it, and is kept for the next exploring run.
    """
    function = getattr(item, "obj", None)
    function = getattr(function, "__func__", function)
    own = getattr(function, _SETTINGS, None)
    if own is not None:
        kept = hypothesis.database.DirectoryBasedExampleDatabase(".hypothesis/examples")
        wanted = hypothesis.settings(
            own, max_examples=number, derandomize=False, database=kept, print_blob=True
        )
        setattr(function, _SETTINGS, wanted)
        item.add_marker(pytest.mark.timeout(0))


_SETTINGS = "_hypothesis_internal_use_settings"
"""The attribute of a property test that has its settings."""
