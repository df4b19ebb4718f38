"""How much a test tries: little in every run, much under `--runslow`."""

from __future__ import annotations

import os

RUNSLOW = "AUTOPAR_RUNSLOW"
"""The environment variable that `--runslow` sets, in pytest and in its workers."""


def examples(few: int, many: int) -> int:
    """The number of examples of a hypothesis test: `many` under `--runslow`, else `few`."""
    return many if RUNSLOW in os.environ else few
