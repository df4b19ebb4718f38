"""Sizes that depend on the batch: torch.SymInt expressions in one symbol, the number of rows."""

from __future__ import annotations

from typing import Any


def multiple_of_batch(size: Any) -> int:
    """The integer k if `size` is a symbolic size equal to k times the number of rows of the batch.
    0 for every other size, such as a plain number.
    """
    expr = getattr(getattr(size, "node", None), "expr", None)
    if expr is None or expr.is_number:
        return 0
    factor = expr / next(iter(expr.free_symbols))
    return int(factor) if factor.is_Integer else 0
