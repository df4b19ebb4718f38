"""Texts of options as values."""

from __future__ import annotations

import json
from typing import Any


def typed(text: str) -> Any:
    """A text as the number, truth value, list or nothing that it says."""
    if text in ("on", "true", "True"):
        return True
    if text in ("false", "False"):
        return False
    if text == "null":
        return None
    if text.startswith("[["):
        return json.loads(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
