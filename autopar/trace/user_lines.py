"""Which line of the user's code something comes from."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
import types
from collections.abc import Iterable

import torch

_OWN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(os.path.dirname(__file__)) + os.sep, "<")
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in .*\n\s*(?P<text>.*)')


def line_of_error(error: Exception) -> str:
    """' (file.py:12: its text)' of the innermost frame outside of torch and autopar, or ''."""
    return _innermost((frame.filename, frame.lineno, frame.line) for frame in traceback.extract_tb(error.__traceback__))


def line_now() -> str:
    """As `line_of_error`, of the call that is under way."""
    return _innermost((frame.filename, frame.lineno, frame.line) for frame in traceback.extract_stack())


def line_of_frame(frame: types.FrameType) -> str:
    """As `line_of_error`, of a frame and those that called it."""
    return _innermost((found.filename, found.lineno, found.line) for found in traceback.extract_stack(frame))


def line_of_node(node: torch.fx.Node) -> str:
    """As `line_of_error`, of the call that made a node of a captured graph."""
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return _innermost((frame["file"], int(frame["line"]), frame["text"]) for frame in frames)


def _innermost(frames: Iterable[tuple[str, int | None, str | None]]) -> str:
    users = [frame for frame in frames if not frame[0].startswith(_OWN) and not _is_standard(frame[0])]
    if not users:
        return ""
    file, number, text = users[-1]
    return f" ({os.path.basename(file)}:{number}: {(text or '').strip()[:200]})"


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
