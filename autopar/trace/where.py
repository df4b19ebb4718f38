"""Where in the user's code a node of a captured graph comes from."""

from __future__ import annotations

import os
import re

import torch
from torch.fx import Node

_OWN = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(__file__)))
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)')


def place_of(node: Node) -> str:
    """' (losses.py:12: loss / mask.sum())' of a node, or its module if capture kept no line of code."""
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line, text in reversed(frames):
        if not path.startswith(_OWN):
            return f" ({os.path.basename(path)}:{line}: {text.strip()[:120]})"
    paths = [path.removeprefix("model.") for path, _ in node.meta.get("nn_module_stack", {}).values() if path not in ("", "model")]
    return f" in module {paths[-1]!r}" if paths else " in the loss"
