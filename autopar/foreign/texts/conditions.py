"""The conditions of a script, as far as its text tells whether they hold. Nothing is run."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from fnmatch import fnmatchcase

from autopar.foreign.texts.arithmetic import NotANumber, arithmetic_value
from autopar.foreign.texts.expansion import LOST, Expansion, is_known, shown_value
from autopar.foreign.texts.shell_commands import Block, Node, ShellCommand
from autopar.foreign.texts.shell_words import CLOSE, OPEN, Word

_OUTSIDE = re.compile(rf"(?:{OPEN}\$\{{?(?:\w+|[@*])\}}?{CLOSE})+")
"""Nothing but variables and arguments that come from outside of the script."""
_NEVER_EMPTY = re.compile(rf"{OPEN}\$(?:\{{#|\(\()")
"""A length or a sum, known or not, has a digit at least."""
_ORDER = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
_JOINED = (("||", True), ("-o", True), ("&&", False), ("-a", False))
"""Operators between tests, loosest first, and the truth of one side that decides."""


class Conditions(Expansion):
    """Tells whether conditions hold, with the variables of a script."""

    def truth_of(self, nodes: Sequence[Node]) -> bool | None:
        """Whether a condition holds; None if the file does not tell."""
        truth: bool | None = None
        connector = ";"
        for node in nodes:
            value = self.decided(node) if isinstance(node, ShellCommand) else None
            joined = connector in ("&&", "||")
            truth = either(truth, value, connector == "||") if joined else value
            connector = node.end if isinstance(node, ShellCommand) else ";"
        return truth

    def decided(self, node: ShellCommand) -> bool | None:
        """Whether a command succeeds, as `test`, or as it is assumed."""
        truth = self.test(node)
        if truth is None and node.words:
            assumed = self.script.branch((node.line, self.text_in_test(node.words[-1])[:20]), 2)
            return None if assumed is None else assumed == 1
        return truth

    def succeeds(self, node: Node, functions: Container[str]) -> bool | None:
        """Whether a command that ran succeeded; None if the file does not tell. A program is taken
        to succeed. A group succeeds if its last command does. `functions` are those of the script.
        """
        if isinstance(node, Block):
            return self._group_succeeds(node, functions)
        called = bool(node.words and node.words[0]) and node.words[0][0].text in functions
        if called or self.is_test(node):
            return self.decided(node)
        truth = self.test(node)
        return True if truth is None else truth

    def _group_succeeds(self, node: Block, functions: Container[str]) -> bool | None:
        """As `succeeds`. Nothing is expanded: the variables inside may have had other values."""
        body = node.branches[0][1] if node.kind == "group" else ()
        if not body:
            return True
        last = body[-1]
        if len(body) > 1 and body[-2].end in ("&&", "||"):
            return None
        if isinstance(last, Block):
            return self._group_succeeds(last, functions)
        first = last.words[0] if last.words else ()
        name = first[0].text if len(first) == 1 and first[0].kind == "text" else "!"
        if self.is_test(last) or name == "!" or name in functions:
            return None
        return name != "false"

    @staticmethod
    def is_test(node: ShellCommand) -> bool:
        """Whether a command is a test or a sum."""
        words = [word[0].text for word in node.words if len(word) == 1]
        return (words[1:] if words[:1] == ["!"] else words)[:1] in (
            ["["],
            ["[["],
            ["test"],
            ["let"],
        )

    def test(self, node: ShellCommand) -> bool | None:
        """Whether a command such as `[ $A = 1 ]` succeeds; None if the file does not tell."""
        words, patterns = [self.text_in_test(word) for word in node.words], list[str]()
        turned = words[:1] == ["!"]
        words = words[1:] if turned else words
        if words[:1] == ["let"]:
            truth = self._is_not_zero(words[-1])
        elif words in (["true"], ["false"], [":"]):
            truth = words != ["false"]
        elif self._is_split(node):
            truth = None
        elif self.is_test(node):
            if words[0] == "[[":
                patterns = [self.pattern(word) for word in node.words[turned + 1 :]]
            words = words[1:-1] if words[-1] in ("]", "]]") else words[1:]
            truth = self._any(words, patterns or [_literal(word) for word in words])
        else:
            truth = None
        return truth if truth is None or not turned else not truth

    def _is_split(self, node: ShellCommand) -> bool:
        """Whether `[` takes a list such as `"$@"` that is not one word."""
        lists = [word for word in node.words if word[0].kind == "variable" or len(word) > 1]
        lists = [word for word in lists if any("@" in part.text for part in word)]
        return self.is_test(node) and any(len(self.fields(word)) != 1 for word in lists)

    def text_in_test(self, word: Word) -> str:
        """A word expanded for a test. An argument that certainly is not given is '' there."""
        name = word[0].text if len(word) == 1 and word[0].kind == "variable" else ""
        given = self.arguments
        if given is None or given is LOST or not re.fullmatch(r"[0-9]{1,6}", name):
            return self.text(word)
        return "" if int(name) > len(given) else self.text(word)

    def pattern(self, word: Word) -> str:
        """A word as a pattern: what is quoted means itself."""
        texts = [(self.text((part,)), part.quoted) for part in word]
        return "".join(
            _literal(text) if quoted else text.replace("[^", "[!") for text, quoted in texts
        )

    def _is_not_zero(self, text: str) -> bool | None:
        try:
            return arithmetic_value(text, self.script.text_of) != 0
        except NotANumber:
            return None

    def _any(self, words: list[str], patterns: list[str]) -> bool | None:
        """Whether tests that are joined hold. `patterns` are the words as patterns."""
        for operator, deciding in _JOINED:
            if operator in words[1:-1]:
                at = words.index(operator, 1)
                left = self._any(words[:at], patterns[:at])
                return either(left, self._any(words[at + 1 :], patterns[at + 1 :]), deciding)
        if words[:1] == ["!"] and len(words) > 1:
            inner = self._any(words[1:], patterns[1:])
            return None if inner is None else not inner
        return self._compare(words, patterns)

    def _compare(self, words: list[str], patterns: list[str]) -> bool | None:
        empty: bool | None
        if len(words) == 1 or (len(words) == 2 and words[0] in ("-z", "-n")):
            empty = self._is_empty(words[-1])
            return None if empty is None else empty == (words[0] == "-z" and len(words) == 2)
        if len(words) != 3:
            return None
        a, operator, b = words
        if operator in ("=", "==", "!="):
            same = fnmatchcase(a, patterns[2]) if is_known(a) and is_known(b) else None
            same = same if b else self._is_empty(a)
            return None if same is None else same != (operator == "!=")
        if operator not in _ORDER or not (is_known(a) and is_known(b)):
            return None
        try:
            return bool(arithmetic_value(f"({a}) {_ORDER[operator]} ({b})", self.script.text_of))
        except NotANumber:
            return None

    def _is_empty(self, text: str) -> bool | None:
        """Whether a text is empty; None if the file does not tell. What comes from outside of the
        script is taken to be unset.
        """
        if is_known(text):
            return not text
        if not _OUTSIDE.fullmatch(text):
            known = re.sub(f"{OPEN}[^{CLOSE}]*{CLOSE}", "", text)
            return False if known or _NEVER_EMPTY.search(text) else None
        self.script.note(f"{shown_value(text)} is taken to be unset")
        return True


def either(left: bool | None, right: bool | None, deciding: bool) -> bool | None:
    """Whether one of two tests holds if `deciding`, or whether both do; None if it is not known."""
    if deciding in (left, right):
        return deciding
    return None if None in (left, right) else not deciding


def _literal(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
