"""Finds the line of the user's code that something comes from."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable

import torch

_OWN = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    "<",
)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in ')
DATA_DEPENDENT = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "PendingUnbackedSymbolNotFound",
)
"""Names of the errors that torch raises if Python asks for the values of a fake tensor."""


def line_of_error(error: Exception) -> str:
    """Text ' (file.py:12: its text)' for the innermost frame of an error's traceback that is
    outside torch, autopar and the standard library. '' if there is none.
    """
    return _innermost(
        (frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)
    )


def line_now() -> str:
    """Text ' (file.py:12: its text)' for the innermost frame of the current call stack in the
    user's code. '' if there is none.
    """
    return _innermost((frame.filename, frame.lineno) for frame in traceback.extract_stack())


def line_of_node(node: torch.fx.Node) -> str:
    """Text ' (file.py:12: its text)' for the user's line whose call made a node of a captured
    graph. '' if it is not known.
    """
    frames = _FRAME.finditer(node.meta.get("stack_trace") or "")
    return _innermost((frame["file"], int(frame["line"])) for frame in frames)


def line_of_nodes(nodes: Iterable[torch.fx.Node]) -> str:
    """`line_of_node` of the first node for which it is known; '' if there is none."""
    return next(filter(None, map(line_of_node, nodes)), "")


def _innermost(frames: Iterable[tuple[str, int | None]]) -> str:
    users = [frame for frame in frames if is_of_user(frame[0])]
    return line_text(*users[-1]) if users else ""


def line_text(file: str, number: int | None) -> str:
    """A line as text for a message: ' (file.py:12: its text)'."""
    return f" ({os.path.basename(file)}:{number}: {linecache.getline(file, number or 0).strip()[:200]})"


def is_of_user(file: str) -> bool:
    """Whether a file (by its path) belongs neither to Python's standard library nor to torch or
    autopar. False for code without a file, such as '<string>'.
    """
    return not file.startswith(_OWN) and (
        not file.startswith(_STANDARD_LIBRARY) or "site-packages" in file
    )
