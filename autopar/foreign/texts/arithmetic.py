"""Whole-number arithmetic of shell scripts, evaluated by a parser of our own."""

from __future__ import annotations

import re
from collections.abc import Callable

_TOKEN = re.compile(
    r"\s*(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*|[-+*/%()<>?:!])"
)
_LEVELS = (
    ("||",),
    ("&&",),
    ("==", "!="),
    ("<", ">", "<=", ">="),
    ("<<", ">>"),
    ("+", "-"),
    ("*", "/", "%"),
)
_MOST = 10**18
"""The largest absolute value of a result."""


class NotANumber(ValueError):
    """The text is no arithmetic of whole numbers, or has a value that is not known."""


def arithmetic_value(text: str, value_of: Callable[[str], str]) -> int:
    """The value of an expression such as `NNODES * 8 / (TP * PP)`. `value_of(name)` is the text of
    a variable. Raises NotANumber if that is no whole number, or for another defect.
    """
    tokens: list[str] = []
    at = 0
    text = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None or len(tokens) > 1000:
            raise NotANumber(text)
        tokens.append(found[1])
        at = found.end()
        text = text.rstrip()
    parser = _Parser(tokens, value_of)
    value = parser.choice(0)
    if parser.at != len(tokens):
        raise NotANumber(text)
    return value


class _Parser:
    def __init__(self, tokens: list[str], value_of: Callable[[str], str]) -> None:
        self.tokens, self.value_of, self.at = tokens, value_of, 0

    def _take(self, *texts: str) -> str:
        if self.at < len(self.tokens) and self.tokens[self.at] in texts:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def choice(self, depth: int) -> int:
        """A value, or one of two behind a question mark."""
        if depth > 50:
            raise NotANumber("nested too deep")
        value = self._level(0, depth)
        if not self._take("?"):
            return value
        yes = self.choice(depth + 1)
        if not self._take(":"):
            raise NotANumber("a choice without a second value")
        no = self.choice(depth + 1)
        return yes if value else no

    def _level(self, level: int, depth: int) -> int:
        if level == len(_LEVELS):
            return self._power(depth)
        value = self._level(level + 1, depth)
        while operator := self._take(*_LEVELS[level]):
            value = _apply(operator, value, self._level(level + 1, depth))
        return value

    def _power(self, depth: int) -> int:
        base = self._atom(depth)
        if not self._take("**"):
            return base
        exponent = self._power(depth + 1)
        if not 0 <= exponent <= 60 or abs(base) > 10**6:
            raise NotANumber("a power too large")
        return _bounded(base**exponent)

    def _atom(self, depth: int) -> int:
        if depth > 50 or self.at >= len(self.tokens):
            raise NotANumber("a value is missing")
        if sign := self._take("-", "+", "!"):
            value = self._atom(depth + 1)
            return -value if sign == "-" else int(not value) if sign == "!" else value
        if self._take("("):
            value = self.choice(depth + 1)
            if not self._take(")"):
                raise NotANumber("a bracket is not closed")
            return value
        token = self.tokens[self.at]
        self.at += 1
        if token[0].isdigit():
            return _bounded(_number(token))
        if not re.fullmatch(r"[A-Za-z_]\w*", token):
            raise NotANumber(token)
        text = self.value_of(token).strip()
        found = re.fullmatch(r"([+-]?)(0[xX][0-9a-fA-F]{1,15}|\d{1,18})", text)
        if found is None:
            raise NotANumber(f"{token} is {text!r}")
        return -_number(found[2]) if found[1] == "-" else _number(found[2])


def _number(text: str) -> int:
    """A number as shells write it: 010 is 8, and 0x10 is 16."""
    try:
        return int(text, 16 if text[1:2] in ("x", "X") else 8 if text[0] == "0" else 10)
    except ValueError:
        raise NotANumber(f"{text} is no number of base 8") from None


def _apply(operator: str, a: int, b: int) -> int:
    if operator in ("/", "%"):
        if b == 0:
            raise NotANumber("a division by 0")
        quotient = abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
        return quotient if operator == "/" else a - quotient * b
    if operator in ("<<", ">>"):
        if not 0 <= b <= 60:
            raise NotANumber("a shift too far")
        return _bounded(a << b if operator == "<<" else a >> b)
    results = {"+": a + b, "-": a - b, "*": a * b, "<": a < b, ">": a > b, "<=": a <= b, ">=": a >= b,
               "==": a == b, "!=": a != b, "&&": bool(a and b), "||": bool(a or b)}  # fmt: skip
    return _bounded(int(results[operator]))


def _bounded(value: int) -> int:
    if abs(value) > _MOST:
        raise NotANumber("a number too large")
    return value
