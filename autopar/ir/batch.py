"""Sizes that depend on the batch: torch.SymInt expressions in one symbol, the number of rows."""

from __future__ import annotations

from typing import Any


def multiple_of_batch(size: Any) -> int:
    """k if `size` is k times the number of rows, otherwise 0."""
    expr = getattr(getattr(size, "node", None), "expr", None)
    if expr is None or expr.is_number:
        return 0
    factor = expr / next(iter(expr.free_symbols))
    return int(factor) if factor.is_Integer else 0
