"""Where in the user's code a node of a captured graph comes from."""

from __future__ import annotations

import os
import re

from torch.fx import Node

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def place_of(node: Node) -> str:
    """' (losses.py:12: loss / mask.sum())' of a node, or '' if capture kept no line of code."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    if not frames:
        return ""
    path, line, text = frames[-1]
    return f" ({os.path.basename(path)}:{line}: {text.strip()[:120]})"
