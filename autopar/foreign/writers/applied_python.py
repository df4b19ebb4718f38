"""Differences of options, written into functions of Python that return a configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from autopar.errors import AutoparError
from autopar.foreign.writers.values import typed
from autopar.foreign.writers.wording import OptionDifference

_CODE = re.compile(r"None|[A-Z]\w*(\.\w+)*\(\)")
"""Texts that are Python themselves."""


def in_python(text: str, differences: Sequence[OptionDifference], function: str) -> str:
    """The text of a file with other options: of arguments of calls, and as assignments before the
    configuration is returned. They stand in `function`, or in all functions that return one if it is
    ''. Raises AutoparError if an option has no place there.
    """
    left: list[OptionDifference] = []
    for difference in differences:
        if changed := _keyword(text, difference, function):
            text = changed
        else:
            left.append(difference)
    return _assigned(text, left, function) if left else text


def _keyword(text: str, difference: OptionDifference, function: str) -> str:
    """The text with another keyword argument of a call, as `Call.name` says it; '' if it has no such
    call.
    """
    call, _, name = difference.option.rpartition(".")
    call = call.rpartition(".")[2]
    if not difference.then or not (call[:1].isupper() or (call and difference.now)):
        return ""
    calls = [
        node
        for part in _parts(text, function)
        for node in ast.walk(part)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == call
    ]
    if not calls:
        return ""
    said = [key.value for node in calls for key in node.keywords if key.arg == name]
    if said:
        start, end = _place(text, said[0]), _end(text, said[0])
        return f"{text[:start]}{_code(difference.then)}{text[end:]}"
    start = text.index("(", _end(text, calls[0].func)) + 1
    return f"{text[:start]}{name}={_code(difference.then)}, {text[start:]}"


def _parts(text: str, function: str) -> list[ast.stmt]:
    """The function of a name, or all statements of the file if it is ''."""
    body = ast.parse(text).body
    return [
        n for n in body if not function or (isinstance(n, ast.FunctionDef) and n.name == function)
    ]


def _place(text: str, node: ast.expr) -> int:
    """The index of the first character of a node."""
    return _index(text, node.lineno, node.col_offset)


def _end(text: str, node: ast.expr) -> int:
    """The index behind the last character of a node."""
    assert node.end_lineno is not None and node.end_col_offset is not None
    return _index(text, node.end_lineno, node.end_col_offset)


def _index(text: str, line: int, offset: int) -> int:
    """The index of a place that Python's parser tells: a line from 1, and bytes within it."""
    lines = text.splitlines(keepends=True)
    inside = lines[line - 1].encode()[:offset].decode()
    return sum(map(len, lines[: line - 1])) + len(inside)


def _assigned(text: str, differences: Sequence[OptionDifference], function: str) -> str:
    """The text with assignments before what is returned."""
    returned = list(_returned(text, function))
    if not returned:
        raise AutoparError("no function of the file returns a configuration that could be changed")
    lines = text.splitlines()
    for node in sorted(returned, key=lambda node: node.lineno, reverse=True):
        assert node.value is not None and node.end_lineno is not None
        indent = " " * node.col_offset
        value = ast.get_source_segment(text, node.value) or ""
        name = value if isinstance(node.value, ast.Name) else "config"
        changed = [f"{indent}{name}.{d.option} = {_code(d.then)}" for d in differences]
        first = [] if name == value else [f"{indent}config = {value}"]
        lines[node.lineno - 1 : node.end_lineno] = [*first, *changed, f"{indent}return {name}"]
    return "\n".join(lines) + "\n"


def _returned(text: str, function: str) -> Iterator[ast.Return]:
    """The statements that return a configuration: a name, or what a call makes."""
    lines = text.splitlines()
    for node in _parts(text, function):
        if not isinstance(node, ast.FunctionDef):
            continue
        for inner in ast.walk(node):
            if not isinstance(inner, ast.Return) or lines[inner.lineno - 1][: inner.col_offset].strip():  # fmt: skip
                continue
            makes = isinstance(inner.value, ast.Call) and "onfig" in ast.unparse(inner.value.func)
            if makes or isinstance(inner.value, ast.Name):
                yield inner


def _code(then: str) -> str:
    if not then or _CODE.fullmatch(then):
        return then or "None"
    return repr(typed(then))
