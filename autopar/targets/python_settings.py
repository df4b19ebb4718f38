"""Settings in functions of Python that return a configuration, such as recipes. The text is parsed,
never run.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import AutoparError
from autopar.targets.expansion import unknown
from autopar.targets.job import Finding

MOST_CALLS = 200
"""The most calls of functions of the file that are followed."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a function sets.

    Attributes:
        function: its name; '' if the file has none, and its statements are read.
        values: texts by path: `Class.argument` of a call, `part.name` of `config.part.name = ...`,
            and `function.0` for the first argument of a call without a name.
        findings: which other functions there are.
    """

    function: str
    values: Mapping[str, str]
    findings: tuple[Finding, ...]


def settings_of(
    text: str, what: str, function: str, fits: Callable[[Mapping[str, str]], bool]
) -> Settings:
    """The settings of a function of a Python text, by default of the first whose settings `fits`
    accepts; one of a toy or for fine-tuning only if there is no other. Raises AutoparError if the
    text is no Python, or has no such function.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise AutoparError(f"{what} is no Python: {error}") from None
    reader = _Reader(tree)
    if function and function not in reader.functions:
        raise AutoparError(
            f"{what} has no function {function}; it has {', '.join(reader.functions) or 'none'}"
        )
    found = {name: reader.of(name) for name in [function] if name} or {
        name: values for name in reader.functions if fits(values := reader.of(name))
    }
    if not found:
        return Settings("", dict(reader.settings(tree.body, {})), ())
    later = ("debug", "finetune", "sft", "peft", "test", "trainer")
    name = min(found, key=lambda name: any(word in name for word in later))
    others = [other for other in found if other != name]
    note = f"read from function {name}; for {', '.join(others[:6])}{' and others' if others[6:] else ''} give {what}:NAME"
    return Settings(name, found[name], (Finding("note", note),) if others else ())


class _Reader:
    """Reads statements in order; calls of functions of the file are followed."""

    def __init__(self, tree: ast.Module) -> None:
        self.functions = {n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)}
        self.globals = dict(_assigned(tree.body))
        self.calls = 0

    def of(self, name: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
        """The settings of a function, with the texts of its arguments."""
        function = self.functions[name]
        self.calls += 1
        if self.calls > MOST_CALLS:
            return {}
        names = function.args.args[len(function.args.args) - len(function.args.defaults) :]
        pairs = [*zip(names, function.args.defaults, strict=True)]
        pairs += [
            (a, d)
            for a, d in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if d is not None
        ]
        bound = self.globals | {argument.arg: _constant(value, {}) for argument, value in pairs}
        bound |= dict(_assigned(function.body)) | dict(given or {})
        return dict(self.settings(function.body, bound))

    def settings(
        self, body: Sequence[ast.stmt], bound: Mapping[str, str]
    ) -> Iterator[tuple[str, str]]:
        """Each setting of statements, in order. A branch counts if its condition is known to hold."""
        for statement in body:
            if isinstance(statement, ast.If):
                if (truth := _truth(statement.test, bound)) is not None:
                    yield from self.settings(statement.body if truth else statement.orelse, bound)
                continue
            if isinstance(statement, ast.FunctionDef | ast.ClassDef):
                continue
            for node in ast.walk(statement):
                if isinstance(node, ast.Call):
                    yield from self._of_call(node, bound)
            if isinstance(statement, ast.Assign):
                for target in statement.targets:
                    if isinstance(target, ast.Attribute):
                        path = ast.unparse(target).partition(".")[2]
                        yield path, _constant(statement.value, bound)

    def _of_call(self, node: ast.Call, bound: Mapping[str, str]) -> Iterator[tuple[str, str]]:
        called = ast.unparse(node.func).removesuffix(".Config").rpartition(".")[2]
        if called in ("run", "Partial") and node.args:  # NeMo: run.Config(Trainer, devices=8)
            called = ast.unparse(node.args[0]).rpartition(".")[2]
        named = {key.arg: _constant(key.value, bound) for key in node.keywords if key.arg}
        if called in self.functions:
            yield from self.of(called, named).items()
            return
        yield called, ""
        if node.args:
            yield f"{called}.0", _constant(node.args[0], bound)
        yield from ((f"{called}.{name}", value) for name, value in named.items())


def _assigned(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    """Names that are assigned constants."""
    for node in body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        yield from ((t.id, str(node.value.value)) for t in node.targets if isinstance(t, ast.Name))


def _constant(node: ast.expr, bound: Mapping[str, str]) -> str:
    """The text of a constant, of a name that is bound to one, or of a product of whole numbers."""
    if isinstance(node, ast.Name) and node.id in bound:
        return bound[node.id]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        sides = [_constant(side, bound) for side in (node.left, node.right)]
        if all(side.isdigit() and len(side) < 10 for side in sides):
            return str(int(sides[0]) * int(sides[1]))
    try:
        return str(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return unknown(ast.unparse(node)[:60])


def _truth(node: ast.expr, bound: Mapping[str, str]) -> bool | None:
    """Whether a condition holds; None if the file does not tell."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = _truth(node.operand, bound)
        return None if inner is None else not inner
    if isinstance(node, ast.Name) and bound.get(node.id) in ("True", "False", "None"):
        return bound[node.id] == "True"
    return None
