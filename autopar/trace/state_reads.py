"""Finds source lines that read state which forward changes, other than to change that state."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import types
from collections.abc import Collection, Iterable, Sequence

from torch import nn

from autopar.trace.python_state import codes_of
from autopar.trace.user_lines import line_text

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
_LOGS = {"print", "log", "logger", "logging", "warnings", "_logger", "LOG", "LOGGER"}
"""Names of functions and objects whose calls, as statements, only output their arguments."""


def read_of(names: Collection[str], functions: Iterable[types.FunctionType]) -> str | None:
    """' (file.py:12: its text)' for the first line of `functions` that reads one of the attributes
    or variables `names`; None if no line does.

    Lines that only change state with these names, or print it, do not count. If the source of a
    function is missing, it counts as reading all names in its code; its own name is then the text.
    """
    for function in functions:
        code = function.__code__
        tree = _tree_of(code)
        if tree is None:
            if set(names) & _all_names(code):
                return f" ({function.__qualname__}, whose source is not there)"
            continue
        if (node := _first_read(tree, set(names))) is not None:
            return line_text(code.co_filename, node.lineno)
    return None


def methods_of(model: nn.Module) -> list[types.FunctionType]:
    """The methods that the classes of the model's modules, and their bases outside torch, define.
    Wrappers by functools.wraps are taken off.
    """
    kinds = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    mine = [base for base in kinds if not base.__module__.startswith(("torch.", "builtins"))]
    return [
        inspect.unwrap(value)
        for base in mine
        for value in vars(base).values()
        if isinstance(value, types.FunctionType)
    ]


def _all_names(code: types.CodeType) -> set[str]:
    return {
        name
        for inner in codes_of(code)
        for name in (*inner.co_names, *inner.co_freevars, *inner.co_varnames)
    }


def _tree_of(code: types.CodeType) -> _Function | None:
    """The syntax tree of a function, parsed from its source file. None if there is no source, or
    the function is not found in it.
    """
    tree = _parsed("".join(linecache.getlines(code.co_filename)))
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            starts = node.lineno, *(decorator.lineno for decorator in node.decorator_list)
            if code.co_firstlineno in starts:
                return node
        if (
            isinstance(node, ast.Lambda)
            and code.co_name == "<lambda>"
            and node.lineno == code.co_firstlineno
        ):
            return node
    return None


@functools.lru_cache(maxsize=8)
def _parsed(source: str) -> ast.Module | None:
    """The syntax tree of a file's text, which is kept; None if it is not Python."""
    try:
        return ast.parse(source)
    except SyntaxError:
        return None


def _first_read(tree: _Function, names: set[str]) -> ast.expr | None:
    body: Sequence[ast.AST] = [tree.body] if isinstance(tree, ast.Lambda) else tree.body
    for statement in body:
        node = None if _only_changes(statement, names) else _read_in(statement, names)
        if node is not None:
            return node
    return None


def _read_in(node: ast.AST, names: set[str]) -> ast.expr | None:
    if isinstance(node, ast.stmt) and _only_changes(node, names):
        return None
    if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load):
        return node
    if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
        return node
    # getattr(self, "name")
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names:
        return node
    return next(
        (
            found
            for child in ast.iter_child_nodes(node)
            if (found := _read_in(child, names)) is not None
        ),
        None,
    )


def _only_changes(statement: ast.AST, names: set[str]) -> bool:
    """Whether a statement only sets state called `names`, calls a method on it, or prints. An `if`
    counts by its branches alone.
    """
    if isinstance(statement, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return all(_is_state(target, names) for target in targets)
    if isinstance(statement, ast.Expr):
        call = statement.value
        return isinstance(call, ast.Call) and (
            _is_state(call.func, names) or _root(call.func) in _LOGS
        )
    if isinstance(statement, ast.If):
        return all(_only_changes(inner, names) for inner in (*statement.body, *statement.orelse))
    return isinstance(statement, ast.Pass)


def _is_state(node: ast.AST, names: set[str]) -> bool:
    """Whether an expression is a variable or attribute called one of `names`, or something inside
    of one.
    """
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        if isinstance(node, ast.Attribute) and node.attr in names:
            return True
        node = node.value
    return isinstance(node, ast.Name) and node.id in names


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute):
        if node.attr in _LOGS:
            return node.attr
        node = node.value
    return node.id if isinstance(node, ast.Name) else None
