"""The conditions of a script, as far as its text tells whether they hold. Nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from autopar.targets.arithmetic import NotANumber, evaluate
from autopar.targets.expansion import Expansion, is_known, shown_value
from autopar.targets.shell_commands import Command, Node


class Conditions(Expansion):
    """Tells whether conditions hold, with the variables of a script."""

    def truth_of(self, nodes: Sequence[Node]) -> bool | None:
        """Whether a condition holds; None if the file does not tell."""
        truth: bool | None = None
        connector = ";"
        for node in nodes:
            value = self.test(node) if isinstance(node, Command) else None
            if connector == "&&":
                both = (truth, value)
                truth = False if False in both else None if None in both else True
            elif connector == "||":
                either = (truth, value)
                truth = True if True in either else None if None in either else False
            else:
                truth = value
            connector = node.end if isinstance(node, Command) else ";"
        return truth

    @staticmethod
    def is_test(node: Command) -> bool:
        """Whether a command is a test."""
        first = node.words[0] if node.words else ()
        return len(first) == 1 and first[0].text in ("[", "[[", "test")

    def test(self, node: Command) -> bool | None:
        """Whether a command such as `[ $A = 1 ]` succeeds; None if the file does not tell."""
        words = [self.text(word) for word in node.words]
        words = words[1:] if words and words[0] in ("[", "[[", "test") else words
        words = words[:-1] if words and words[-1] in ("]", "]]") else words
        if words and words[0] == "!":
            inner = self._compare(words[1:])
            return None if inner is None else not inner
        return self._compare(words)

    def _compare(self, words: list[str]) -> bool | None:
        if words in (["true"], ["false"], [":"]):
            return words != ["false"]
        if len(words) == 2 and words[0] in ("-z", "-n"):
            return self._is_empty(words[1]) == (words[0] == "-z")
        if len(words) == 3 and not words[2] and words[1] in ("=", "==", "!="):
            return self._is_empty(words[0]) != (words[1] == "!=")
        if len(words) != 3 or not (is_known(words[0]) and is_known(words[2])):
            return None
        a, operator, b = words
        if operator in ("=", "=="):
            return fnmatchcase(a, b)
        if operator == "!=":
            return not fnmatchcase(a, b)
        order = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
        if operator in order:
            try:
                return bool(evaluate(f"{a} {order[operator]} {b}", self.script.text_of))
            except NotANumber:
                return None
        return None

    def _is_empty(self, text: str) -> bool:
        """Whether a text is empty. What comes from outside of the script is taken to be unset."""
        if is_known(text):
            return not text
        self.script.note(f"{shown_value(text)} is taken to be unset")
        return True
