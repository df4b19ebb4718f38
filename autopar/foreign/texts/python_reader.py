"""Reads Python files as they would run, statement by statement, without running anything: functions
of other files are followed, and what no file tells stays unknown.
"""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Sequence
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.texts.python_calls import Calls, Returned
from autopar.foreign.texts.python_values import (
    UNSET,
    Choice,
    Class,
    Later,
    Module,
    Named,
    PythonFunction,
    Record,
    is_certain,
)

_MOST_UP = 8
"""The most folders above a file in which the modules that it imports are looked for."""
MOST_ROUNDS = 2_000
"""The most rounds of a loop that are read."""


class _Left(Exception):
    """A loop is left, or its round; `ends` says which."""

    def __init__(self, ends: bool) -> None:
        self.ends = ends


class PythonReader(Calls):
    """Reads statements in order."""

    def load(self, module: Module) -> Module:
        """A module with the names that its statements define."""
        if module.state == "new" and module.tree is not None:
            module.state = "read"
            self.run(module.tree.body, module.names, module)
        return module

    def parsed(self, text: str, file: str, path: str) -> Module:
        """The module of a text. Raises AutoparError if it is no Python."""
        try:
            return Module(path, file, {"__name__": path}, ast.parse(text))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise AutoparError(f"{file} is no Python: {error}") from None

    def module(self, path: str, level: int, inside: str) -> Module | None:
        """The module that the file `inside` imports, or None if it is not there."""
        folder = posixpath.dirname(inside)
        end = path.replace(".", "/")
        ups = [level - 1] if level else range(_MOST_UP + 1)
        for up in ups:
            base = posixpath.normpath(posixpath.join(folder, *[".."] * up, end))
            for file in (f"{base}.py", posixpath.join(base, "__init__.py")):
                if file in self.modules:
                    return self.modules[file]
                if file.startswith("/") or (text := self.read_file(file)) is None:
                    continue
                name = path or posixpath.basename(base)
                self.modules[file] = self.parsed(text, file, name)
                return self.modules[file]
        return None

    def imported(self, later: Later) -> Any:
        """What an import gives: of a file, or the name of what is not there."""
        level = len(later.module) - len(later.module.lstrip("."))
        path = later.module[level:]
        found = self.module(path, level, later.inside)
        ours = bool(level) or not self.is_library(path)
        whole = ".".join(part for part in (path, later.name) if part)
        if found is None:
            return Named(whole, ours)
        if not later.name:
            return found
        value = self.load(found).names.get(later.name, UNSET)
        if value is UNSET:
            inner = self.module(later.name, 1, posixpath.join(posixpath.dirname(found.file), "x"))
            return inner if inner is not None else Named(whole, ours)
        return self.plain(value)

    def run(self, body: Sequence[ast.stmt], scope: dict[str, Any], module: Module) -> None:
        """Reads statements in a scope."""
        for statement in body:
            self.count()
            self._statement(statement, scope, module)

    def _statement(self, node: ast.stmt, scope: dict[str, Any], module: Module) -> None:
        for reads in (self._defines, self._assigns, self._controls, self._leaves):
            if reads(node, scope, module):
                return

    def _defines(self, node: ast.stmt, scope: dict[str, Any], module: Module) -> bool:
        """Reads an import, or the definition of a function or class; False for another statement."""
        match node:
            case ast.Import():
                for name in node.names:
                    known = name.asname or name.name.partition(".")[0]
                    path = name.name if name.asname else known
                    scope[known] = Later(path, "", module.file)
            case ast.ImportFrom():
                self._imports(node, scope, module)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                scope[node.name] = PythonFunction(node, module, scope)
            case ast.ClassDef():
                self._class(node, scope, module)
            case _:
                return False
        return True

    def _assigns(self, node: ast.stmt, scope: dict[str, Any], module: Module) -> bool:
        """Reads an assignment or an expression; False for another statement."""
        match node:
            case ast.Assign():
                value = self.value(node.value, scope, module)
                for target in node.targets:
                    self.assign(target, value, scope, module)
            case ast.AnnAssign() if node.value is not None:
                self.assign(node.target, self.value(node.value, scope, module), scope, module)
            case ast.AnnAssign() if isinstance(scope, _Scope) and isinstance(node.target, ast.Name):
                scope.own.setdefault(node.target.id, UNSET)
            case ast.AugAssign():
                sides = ast.BinOp(_loaded(node.target), node.op, node.value)
                value = self.value(sides, scope, module)
                self.assign(node.target, value, scope, module)
            case ast.Expr():
                self.value(node.value, scope, module)
            case ast.Delete():
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        scope.pop(target.id, None)
            case _:
                return False
        return True

    def _controls(self, node: ast.stmt, scope: dict[str, Any], module: Module) -> bool:
        """Reads a branch, a loop or a block; False for another statement."""
        match node:
            case ast.If():
                self._if(node.test, node.body, node.orelse, scope, module)
            case ast.For() | ast.AsyncFor():
                self._for(node, scope, module)
            case ast.While():
                if self.truth(node.test, scope, module) is not False:
                    self.unsurely([node.body], scope, module)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    value = self.value(item.context_expr, scope, module)
                    if item.optional_vars is not None:
                        self.assign(item.optional_vars, value, scope, module)
                self.run(node.body, scope, module)
            case ast.Try():
                self.run([*node.body, *node.orelse, *node.finalbody], scope, module)
            case ast.Match():
                self._match(node, scope, module)
            case _:
                return False
        return True

    def _leaves(self, node: ast.stmt, scope: dict[str, Any], module: Module) -> bool:
        """Leaves a function or a loop, if the statement certainly runs."""
        if isinstance(node, ast.Return):
            value = None if node.value is None else self.value(node.value, scope, module)
            self._returns(value, scope)
        elif isinstance(node, ast.Raise) and not self.unsure:
            raise Returned(UNSET)
        elif isinstance(node, ast.Break | ast.Continue) and not self.unsure:
            raise _Left(isinstance(node, ast.Break))
        return True

    def _imports(self, node: ast.ImportFrom, scope: dict[str, Any], module: Module) -> None:
        path = "." * node.level + (node.module or "")
        for name in node.names:
            if name.name != "*":
                scope[name.asname or name.name] = Later(path, name.name, module.file)
                continue
            found = self.imported(Later(path, "", module.file))
            if isinstance(found, Module):
                names = self.load(found).names
                scope |= {key: value for key, value in names.items() if not key.startswith("_")}
            elif isinstance(found, Named) and found.ours:
                self.wildcards.append(found)

    def _class(self, node: ast.ClassDef, scope: dict[str, Any], module: Module) -> None:
        bases = tuple(self.value(base, scope, module) for base in node.bases)
        body: dict[str, Any] = {}
        inner = _Scope(body, scope)
        self.run(node.body, inner, module)
        made = Class(node.name, module, bases, body)
        for value in body.values():
            if isinstance(value, PythonFunction):
                value.cls = made
        scope[node.name] = made

    def _returns(self, value: Any, scope: dict[str, Any]) -> None:
        """Returns a value; under a condition that is not known, what follows may not run."""
        if not self.unsure:
            raise Returned(value)
        scope.setdefault("@returned", []).append(value)

    def _if(
        self,
        test: ast.expr,
        body: Sequence[ast.stmt],
        other: Sequence[ast.stmt],
        scope: dict[str, Any],
        module: Module,
    ) -> None:
        truth = self.truth(test, scope, module)
        if truth is None:
            self.unsurely([body, other], scope, module)
        else:
            self.run(body if truth else other, scope, module)

    def unsurely(
        self, bodies: Sequence[Sequence[ast.stmt]], scope: dict[str, Any], module: Module
    ) -> None:
        """Reads bodies of which it is not known whether they run."""
        returned = len(scope.get("@returned", ()))
        self.unsure += 1
        for body in bodies:
            self.run(body, scope, module)
        self.unsure -= 1
        if len(scope.get("@returned", ())) > returned:
            self.unsure += 1  # what follows may not run
            scope["@level"] = self.unsure

    def _for(self, node: ast.For | ast.AsyncFor, scope: dict[str, Any], module: Module) -> None:
        items = self.value(node.iter, scope, module)
        if isinstance(items, dict):
            items = list(items)
        if not isinstance(items, list | tuple) or len(items) > MOST_ROUNDS:
            self.assign(node.target, Record("", missing=ast.unparse(node.target)), scope, module)
            self.unsurely([node.body], scope, module)
            return
        for item in items:
            self.assign(node.target, item, scope, module)
            try:
                self.run(node.body, scope, module)
            except _Left as left:
                if left.ends:
                    return
        self.run(node.orelse, scope, module)

    def _match(self, node: ast.Match, scope: dict[str, Any], module: Module) -> None:
        subject = self.value(node.subject, scope, module)
        for number, case in enumerate(node.cases):
            truth = self._matches(case, subject, scope, module)
            if truth:
                self.run(case.body, scope, module)
                return
            if truth is None:
                self.unsurely([rest.body for rest in node.cases[number:]], scope, module)
                return

    def _matches(
        self, case: ast.match_case, subject: Any, scope: dict[str, Any], module: Module
    ) -> bool | None:
        pattern = case.pattern
        choices = pattern.patterns if isinstance(pattern, ast.MatchOr) else [pattern]
        found: list[Any] = []
        for choice in choices:
            if isinstance(choice, ast.MatchAs) and choice.pattern is None and case.guard is None:
                return True
            if not isinstance(choice, ast.MatchValue | ast.MatchSingleton):
                return None
            value = choice.value
            found.append(self.value(value, scope, module) if isinstance(value, ast.expr) else value)
        if case.guard is not None or not is_certain(subject) or not is_certain(found):
            return None
        return subject in found

    def assign(self, target: ast.expr, value: Any, scope: dict[str, Any], module: Module) -> None:
        """Assigns a value to a name, a field or an element, or its parts to several."""
        match target:
            case ast.Name():
                self.put(scope, target.id, value)
            case ast.Attribute():
                holder = self.value(target.value, scope, module)
                self.set_field(holder, target.attr, value)
            case ast.Subscript():
                holder = self.value(target.value, scope, module)
                key = self.value(target.slice, scope, module)
                if isinstance(holder, Record):
                    self.set_field(holder, str(key), value)
                elif isinstance(holder, dict) and isinstance(key, str | int):
                    self.put(holder, key, value)
                elif isinstance(holder, list) and isinstance(key, int) and abs(key) < len(holder):
                    holder[key] = value if not self.unsure else Choice((holder[key], value))
            case ast.Tuple() | ast.List():
                self._unpacks(target.elts, value, scope, module)
            case ast.Starred():
                self.assign(target.value, value, scope, module)

    def _unpacks(
        self, targets: Sequence[ast.expr], value: Any, scope: dict[str, Any], module: Module
    ) -> None:
        starred = any(isinstance(target, ast.Starred) for target in targets)
        if isinstance(value, list | tuple) and len(value) == len(targets) and not starred:
            for target, item in zip(targets, value, strict=True):
                self.assign(target, item, scope, module)
            return
        for number, target in enumerate(targets):
            part = Record("", missing=ast.unparse(target))
            if isinstance(value, Record):  # such as (optimizer, scheduler) of a function
                part = Record(value.kind, value.fields if number == 0 else {}, value.missing)
            self.assign(target, part, scope, module)


class _Scope(dict[str, Any]):
    """The names of the body of a class, over those around it."""

    def __init__(self, own: dict[str, Any], outer: dict[str, Any]) -> None:
        super().__init__(outer)
        self.own = own

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.own[key] = value


def _loaded(target: ast.expr) -> ast.expr:
    """A target of an assignment as the expression of its value."""
    return ast.parse(ast.unparse(target), mode="eval").body
