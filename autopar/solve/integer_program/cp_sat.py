"""CP-SAT (`ortools.sat.python.cp_model`), imported on first use: with pandas that takes half a
second, and most plans are found without it.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    from ortools.sat.python import cp_model

    return getattr(cp_model, name)
