"""The values of expressions in Python files that are read and never run."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from autopar.foreign.texts.python_builtins import (
    CHANGES,
    OPERATORS,
    STRING_METHODS,
    NotComputed,
    computed,
    method,
)
from autopar.foreign.texts.python_names import Names
from autopar.foreign.texts.python_values import (
    Choice,
    Module,
    Named,
    PythonFunction,
    Record,
    is_certain,
    text_of,
)


class Expressions(Names):
    """Evaluates expressions in a scope."""

    def value(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of an expression."""
        self.count()
        match node:
            case ast.Constant():
                return node.value if is_certain(node.value) else text_of(str(node.value))
            case ast.Name():
                return self.name(node.id, scope, module)
            case ast.Attribute():
                return self.field(self.value(node.value, scope, module), node.attr)
            case ast.Call():
                return self.call(node, scope, module)
            case ast.Subscript():
                return self._element(node, scope, module)
            case ast.Lambda():
                return PythonFunction(node, module, scope)
            case ast.NamedExpr():
                value = self.value(node.value, scope, module)
                self.assign(node.target, value, scope, module)
                return value
            case ast.Await() | ast.Starred():
                return self.value(node.value, scope, module)
            case ast.JoinedStr():
                return self._text(node, scope, module)
            case ast.List() | ast.Tuple() | ast.Set():
                items = self._items(node.elts, scope, module)
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Dict():
                return self._mapping(node, scope, module)
        return self._operation(node, scope, module)

    def _operation(self, node: ast.expr, scope: dict[str, Any], module: Module) -> Any:
        """The value of an operator, a condition or a comprehension."""
        match node:
            case ast.BinOp():
                return self._operated(
                    type(node.op).__name__, [node.left, node.right], scope, module
                )
            case ast.Compare():
                return self._compared(node, scope, module)
            case ast.BoolOp():
                return self._joined(node, scope, module)
            case ast.UnaryOp():
                return self._turned(node, scope, module)
            case ast.IfExp():
                truth = self.truth(node.test, scope, module)
                both = [node.orelse, node.body]
                sides = both if truth is None else [both[truth]]
                values = tuple(self.value(side, scope, module) for side in sides)
                return values[0] if len(values) == 1 else Choice(values)
            case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
                return self._comprehended(node, scope, module)
        return Record("", missing=ast.unparse(node)[:60])

    # ------------------------------------------------------------------------------ expressions

    def truth(self, node: ast.expr, scope: dict[str, Any], module: Module) -> bool | None:
        """Whether a condition holds; None if the files do not tell."""
        return self.truth_of(self.value(node, scope, module))

    def _items(self, nodes: Sequence[ast.expr], scope: dict[str, Any], module: Module) -> list[Any]:
        found: list[Any] = []
        for node in nodes:
            value = self.value(node, scope, module)
            if isinstance(node, ast.Starred) and isinstance(value, list | tuple):
                found += value
            else:
                found.append(value)
        return found

    def _mapping(self, node: ast.Dict, scope: dict[str, Any], module: Module) -> dict[str, Any]:
        found: dict[Any, Any] = {}
        for key, item in zip(node.keys, node.values, strict=True):
            value = self.value(item, scope, module)
            if key is None:  # `**common`
                inner = self.likely(value)
                if isinstance(inner, Record):
                    found |= inner.fields
                    found |= {"**": inner} if inner.missing else {}
                elif isinstance(inner, dict):
                    found |= inner
                continue
            name = self.value(key, scope, module)
            found[name if isinstance(name, str | int | bool) else text_of(name)] = value
        return found

    def _element(self, node: ast.Subscript, scope: dict[str, Any], module: Module) -> Any:
        holder = self.likely(self.value(node.value, scope, module))
        if isinstance(node.slice, ast.Slice):
            ends = [None if end is None else self.value(end, scope, module)
                    for end in (node.slice.lower, node.slice.upper, node.slice.step)]  # fmt: skip
            plain = all(end is None or isinstance(end, int) for end in ends)
            if plain and isinstance(holder, list | tuple | str) and ends[2] != 0:
                return holder[slice(*ends)]
            return Record("", missing=ast.unparse(node)[:60])
        key = self.value(node.slice, scope, module)
        if isinstance(holder, dict) and isinstance(key, str | int | bool) and key in holder:
            return self.plain(holder[key])
        if isinstance(holder, list | tuple | str) and isinstance(key, int) and -len(holder) <= key < len(holder):  # fmt: skip
            return holder[key]
        if isinstance(holder, Record) and isinstance(key, str):
            return self.of_record(holder, key)
        if isinstance(holder, Named) and not is_certain(key):
            return holder  # such as list[int]
        if isinstance(holder, dict) and holder and not is_certain(key):
            return Choice(tuple(holder.values()))
        return Record("", missing=ast.unparse(node)[:60])

    def _operated(
        self, name: str, sides: Sequence[ast.expr], scope: dict[str, Any], module: Module
    ) -> Any:
        values = [self.value(side, scope, module) for side in sides]
        return self.operated(name, values, " and ".join(map(ast.unparse, sides))[:60])

    def operated(self, name: str, values: list[Any], text: str) -> Any:
        """The value of an operator on two values."""
        lists = all(isinstance(value, list | tuple | dict | str) for value in values)
        if name in OPERATORS and (
            all(map(is_certain, values)) or (lists and name in ("Add", "BitOr"))
        ):
            try:
                return computed(OPERATORS[name], *values)
            except NotComputed:
                pass
        return Record("", missing=text)

    def _compared(self, node: ast.Compare, scope: dict[str, Any], module: Module) -> Any:
        values = [self.value(side, scope, module) for side in (node.left, *node.comparators)]
        truths: list[Any] = []
        for number, op in enumerate(node.ops):
            left, right = values[number : number + 2]
            name = type(op).__name__
            if name in ("Is", "IsNot"):
                same = self._is(left, right)
                truths.append(same if same is None or name == "Is" else not same)
            elif (
                name in ("In", "NotIn")
                and isinstance(right, dict | list | tuple)
                and is_certain(left)
            ):
                whole = isinstance(right, dict) or is_certain(right)
                truths.append((left in right) == (name == "In") if whole else None)
            else:
                found = self.operated(name, [left, right], "")
                truths.append(found if isinstance(found, bool) else None)
        if False in truths:
            return False
        return Record("", missing=ast.unparse(node)[:60]) if None in truths else True

    def _is(self, left: Any, right: Any) -> bool | None:
        """Whether two values are the same object, of which one is None, True or False."""
        if isinstance(left, Choice) and right is None:
            found = {item is None for item in left.values}
            return found.pop() if len(found) == 1 and not left.why else None
        if isinstance(left, Record) and right is None:
            return None if left.missing or not (left.cls or left.fields) else False
        if isinstance(left, Named | Choice) or isinstance(right, Named | Choice | Record):
            return None
        return left is right

    def _joined(self, node: ast.BoolOp, scope: dict[str, Any], module: Module) -> Any:
        """The value of `and` and `or`, which is that of one of its sides."""
        decides = isinstance(node.op, ast.Or)
        open_values: list[Any] = []
        for number, side in enumerate(node.values):
            value = self.value(side, scope, module)
            truth = self.truth_of(value)
            last = number == len(node.values) - 1
            if truth is decides or (last and not open_values):
                return (
                    value
                    if not open_values or (not decides and truth is False)
                    else Choice((*open_values, value))
                )
            if truth is None or (last and open_values):
                open_values.append(value)
        return Choice(tuple(open_values)) if len(open_values) > 1 else open_values[0]

    def _turned(self, node: ast.UnaryOp, scope: dict[str, Any], module: Module) -> Any:
        value = self.value(node.operand, scope, module)
        if isinstance(node.op, ast.Not):
            truth = self.truth_of(value)
            return Record("", missing=ast.unparse(node)[:60]) if truth is None else not truth
        if isinstance(value, int | float) and not isinstance(node.op, ast.Invert):
            return -value if isinstance(node.op, ast.USub) else value
        return Record("", missing=ast.unparse(node)[:60])

    def _text(self, node: ast.JoinedStr, scope: dict[str, Any], module: Module) -> Any:
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.value(part.value, scope, module)
                plain = is_certain(value) and part.format_spec is None
                parts.append(
                    text_of(value if plain else Record("", missing=ast.unparse(part)[:60]))
                )
            elif isinstance(part, ast.Constant):
                parts.append(str(part.value))
        return "".join(parts)[:20_000]

    def _comprehended(self, node: Any, scope: dict[str, Any], module: Module) -> Any:
        rows: list[Any] = []
        unknown = Record("", missing=ast.unparse(node)[:60])
        inner = {"@outer": scope, "@level": self.unsure}

        def fill(generators: Sequence[ast.comprehension]) -> bool:
            if not generators:
                self.count()
                if isinstance(node, ast.DictComp):
                    rows.append(
                        (self.value(node.key, inner, module), self.value(node.value, inner, module))
                    )
                else:
                    rows.append(self.value(node.elt, inner, module))
                return True
            first, *rest = generators
            items = self.likely(self.value(first.iter, inner, module))
            if not isinstance(items, list | tuple | dict | set):
                return False
            for item in list(items):
                self.assign(first.target, item, inner, module)
                truths = [self.truth(test, inner, module) for test in first.ifs]
                if None in truths:
                    return False
                if all(truths) and not fill(rest):
                    return False
            return True

        if not fill(node.generators):
            return unknown
        if isinstance(node, ast.DictComp):
            return {k if isinstance(k, str | int) else text_of(k): v for k, v in rows}
        return rows

    # ------------------------------------------------------------------------------------ calls

    def arguments(
        self, node: ast.Call, scope: dict[str, Any], module: Module
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call, without and with names."""
        args = self._items(node.args, scope, module)
        named: dict[str, Any] = {}
        for key in node.keywords:
            value = self.value(key.value, scope, module)
            if key.arg is not None:
                named[key.arg] = value
                continue
            inner = self.likely(value)
            more = inner.fields if isinstance(inner, Record) else inner
            if isinstance(more, dict):
                named |= {str(k): v for k, v in more.items()}
            if isinstance(inner, Record) and (inner.missing or not inner.fields):
                named["**"] = inner
        return args, named

    def of_container(
        self, holder: Any, node: ast.Call, scope: dict[str, Any], module: Module
    ) -> Any:
        """The value of a method of a list, a mapping or a text."""
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        args, named = self.arguments(node, scope, module)
        unknown = Record("", missing=ast.unparse(node)[:60])
        if name in CHANGES and isinstance(holder, list | dict | set):
            if name == "update" and isinstance(holder, dict):
                given = self.likely(args[0]) if args else {}
                more = given.fields if isinstance(given, Record) else given
                for key, value in ({**more} if isinstance(more, dict) else {} | named).items():
                    self.put(holder, key, value)
                for key, value in named.items():
                    self.put(holder, key, value)
                return None
            try:
                return computed(getattr(holder, name), *args, **named)
            except NotComputed:
                return unknown
        if name == "get" and isinstance(holder, dict) and args and not is_certain(args[0]):
            return Choice(tuple(holder.values())) if holder else unknown
        certain = all(map(is_certain, [*args, *named.values()])) and (is_certain(holder) or not isinstance(holder, str))  # fmt: skip
        if name not in STRING_METHODS or not (
            certain or name in ("get", "items", "keys", "values", "copy")
        ):
            return unknown
        try:
            return method(holder, name, args, named)
        except NotComputed:
            return unknown
