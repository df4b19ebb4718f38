"""Where the quotes and brackets of a shell script end, with all that they hold."""

from __future__ import annotations

import re

from autopar.errors import AutoparError

MOST_NESTED = 60
"""The deepest nesting of expansions and quotes."""

_OPENS = {"`": "`", '"': '"', "${": "}", "$(": ")", "$[": "]", "<(": ")", ">(": ")"}
"""What begins inside quotes and expansions, by what ends it."""
_ANSI = re.compile(r"\$'(?:[^'\\]|\\.)*'", re.DOTALL)
_PLAIN = re.compile(r"'[^']*'")
_DOCUMENT = re.compile(r"<<(-?)[ \t]*(\\?['\"]?)([\w.]+)['\"]?")
_WORD = re.compile(r"(?<![\w$/.-])(case|esac)(?=[\s;)]|$)")
_BEFORE_CASE = re.compile(r"(?:^|[\n;&|({]|\b(?:then|do|else))[ \t]*$")


def end_of_ansi(text: str, at: int) -> int:
    """The index behind the `$'...'` that begins at `at`, or -1 if it does not end."""
    found = _ANSI.match(text, at)
    return found.end() if found else -1


def closing(text: str, at: int, opening: str) -> int:
    """The index of the bracket or quote that closes `opening`, whose inside begins at `at`; -1 if
    none does. Raises AutoparError for brackets that nest too deep.
    """
    return _Closing(text, at).find(opening)


class _Closing:
    """Walks over a text with a stack of what is open."""

    def __init__(self, text: str, at: int) -> None:
        self.text, self.at, self.start = text, at, at
        self.stack: list[str] = []  # what ends each open bracket or quote
        self.cases: list[int] = []  # how many `case` are open in each
        self.documents: list[tuple[bool, str]] = []  # (drops tabs, last line) of those to come

    def _push(self, end: str) -> None:
        self.stack.append(end)
        self.cases.append(0)
        if len(self.stack) > MOST_NESTED:
            raise AutoparError(f"the script nests its brackets deeper than {MOST_NESTED}")

    def find(self, opening: str) -> int:
        """The index of what closes `opening`, or -1."""
        self._push(")" if opening == "(" else _OPENS[opening])
        while self.at < len(self.text):
            character, end = self.text[self.at], self.stack[-1]
            if character == "\\":
                self.at += 2
            elif character == end and not (end == ")" and self.cases[-1]):
                self.stack.pop()
                self.cases.pop()
                if not self.stack:
                    return self.at
                self.at += 1
            elif end == "`":  # up to the next one, whatever stands between
                self.at += 1
            elif not self._step(character, end):
                return -1
        return -1

    def _step(self, character: str, end: str) -> bool:
        """Moves over what begins here; False if it does not end."""
        opening = self._opening(end)
        if opening:
            self._push(_OPENS[opening])
            self.at += len(opening)
        elif end != '"' and (character == "'" or self.text.startswith("$'", self.at)):
            found = (_PLAIN if character == "'" else _ANSI).match(self.text, self.at)
            self.at = found.end() if found else self.at
            return found is not None
        elif end == ")":
            self._command_step(character)
        elif end == "]" and character == "[":
            self._push("]")
            self.at += 1
        else:
            self.at += 1
        return True

    def _opening(self, end: str) -> str:
        two, character = self.text[self.at : self.at + 2], self.text[self.at]
        if two in _OPENS and (end == ")" or two[0] == "$"):
            return two
        return character if character in '"`' else ""

    def _command_step(self, character: str) -> None:
        """Moves over comments, here-documents, brackets and `case` of commands."""
        text, at = self.text, self.at
        if character == "#" and (at == self.start or text[at - 1] in " \t\n;&|("):
            line_end = text.find("\n", at)
            self.at = len(text) if line_end < 0 else line_end
        elif character == "\n":
            self.at += 1
            self._skip_documents()
        elif character == "(":
            self._push(")")
            self.at += 1
        elif text.startswith("<<<", at):
            self.at += 3
        elif found := _DOCUMENT.match(text, at):
            self.documents.append((bool(found[1]), found[3]))
            self.at = found.end()
        elif found := _WORD.match(text, at):
            if found[1] == "esac":
                self.cases[-1] = max(self.cases[-1] - 1, 0)
            elif _BEFORE_CASE.search(text, max(0, at - 40), at):
                self.cases[-1] += 1
            self.at = found.end()
        else:
            self.at += 1

    def _skip_documents(self) -> None:
        for tabs, last in self.documents:
            at = self.at
            while at < len(self.text):
                stop = self.text.find("\n", at)
                stop = len(self.text) if stop < 0 else stop
                line = self.text[at:stop]
                at = stop + 1
                if (line.lstrip("\t") if tabs else line) == last:
                    self.at = min(at, len(self.text))
                    break
        self.documents = []
