"""The commands of shell scripts and their nesting. Nothing is expanded or run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache

from autopar.errors import AutoparError
from autopar.foreign.texts.shell_words import LET, Token, Word, WordPart, tokens_of

_MOST_DEPTH = 60
"""The deepest nesting of blocks."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command. `end` is the operator behind it: ';', '|', '&&', ...; `arrays` are the
    words of assignments of arrays, by the index of their word. `document` is the here-document that
    it reads, or None. `written` is the file that its output goes to, or ().
    """

    words: tuple[Word, ...]
    arrays: tuple[tuple[int, tuple[Word, ...]], ...]
    line: int
    end: str
    document: Word | None = None
    written: Word = ()


@dataclass(frozen=True, slots=True)
class Block:
    """A compound command. `kind` is 'if', 'loop', 'case', 'function' or 'group'. For 'if' the
    branches are pairs of condition and body; the condition of `else` is None. Others have one
    branch for each body. `name` is that of a function, the keyword of a loop, 'for((' for one that
    counts, or '(' for a group in a shell of its own. `end` is the operator behind it.
    """

    kind: str
    branches: tuple[tuple[tuple[Node, ...] | None, tuple[Node, ...]], ...]
    line: int
    name: str = ""
    end: str = ";"


Node = ShellCommand | Block

_TEST, _TEST_END = (WordPart("text", "[[", False),), (WordPart("text", "]]", False),)
_JOINS = ("&&", "||", "|", "|&", "&")
_ENDS = (*_JOINS, ";", ";;", "(", ")")
"""Operators behind a command that are no redirections."""
_OPENS = {
    "if": "fi",
    "while": "done",
    "until": "done",
    "for": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
}


@lru_cache(maxsize=1024)  # a script is read once for each branch that it may take
def parse(text: str) -> tuple[Node, ...]:
    """The commands of a script. Raises AutoparError if it is not one."""
    return _Parser(tokens_of(text)).nodes(frozenset())


class _Parser:
    """Reads commands from tokens."""

    def __init__(self, tokens: list[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def _peek(self) -> Token | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _keyword(self) -> str:
        token = self._peek()
        if token is None or token.kind != "word" or token.array is not None:
            return ""
        part = token.word[0] if len(token.word) == 1 else None
        return part.text if part and part.kind == "text" and not part.quoted else ""

    def nodes(self, ends: frozenset[str]) -> tuple[Node, ...]:
        """The commands up to one of the keywords or operators `ends`, which is not read."""
        self.depth += 1
        if self.depth > _MOST_DEPTH:
            raise AutoparError(f"the script nests its blocks deeper than {_MOST_DEPTH}")
        found: list[Node] = []
        while (token := self._peek()) is not None:
            word = self._keyword()
            if word in ends or (token.kind == "operator" and token.text in ends):
                break
            if token.kind in ("line", "document") or (
                token.kind == "operator" and token.text not in "("
            ):
                self.at += 1
            elif word in _OPENS:
                found.append(self._ended(self._block(word, token.line)))
            elif word in ("then", "do", "else", "fi", "done", "esac", "}", "in"):
                self.at += 1  # stray: bash would refuse it
            elif token.kind == "operator":
                self.at += 1
                body = self.nodes(frozenset(")"))
                self.at += 1
                found.append(self._ended(Block("group", ((None, body),), token.line, "(")))
            else:
                function = self._function()
                found.append(self._ended(function) if function else self._command())
        self.depth -= 1
        return tuple(found)

    def _ended(self, block: Block) -> Block:
        """The block with the operator behind it. Its redirections are read over."""
        while (token := self._peek()) is not None and token.kind == "operator":
            if token.text in _JOINS:
                self.at += 1
                return replace(block, end=token.text)
            if token.text in _ENDS:
                break
            self.at += 1
            if (target := self._peek()) is not None and target.kind == "word":
                self.at += 1
        return block

    def _function(self) -> Block | None:
        word = self._keyword()
        after = self.tokens[self.at + 1 : self.at + 3]
        called = [t.text for t in after if t.kind == "operator"] == ["(", ")"]
        if word == "function" and after and after[0].kind == "word":
            self.at += 1
            word = self._keyword()
            called = [t.text for t in self.tokens[self.at + 1 : self.at + 3]] == ["(", ")"]
        elif not (called and re.fullmatch(r"[\w.:-]+", word)):
            return None
        line = self.tokens[self.at].line
        self.at += 3 if called else 1
        while (token := self._peek()) is not None and token.kind == "line":
            self.at += 1
        if (token := self._peek()) is not None and (token.kind, token.text) == ("operator", "("):
            self.at += 1
            body = self.nodes(frozenset(")"))
            self.at += 1
            inner = Block("group", ((None, body),), line, "(")
            return Block("function", ((None, (inner,)),), line, word)
        if self._keyword() != "{":
            return Block("function", ((None, ()),), line, word)
        block = self._block("{", line)
        return Block("function", block.branches, line, word)

    def _block(self, opening: str, line: int) -> Block:
        self.at += 1
        if opening == "{":
            body = self.nodes(frozenset("}"))
            self.at += 1
            return Block("group", ((None, body),), line)
        if opening == "if":
            return self._if(line)
        if opening == "case":
            return self._case(line)
        start = self._peek()
        opening = "for((" if opening == "for" and start and start.word == LET else opening
        head = self.nodes(frozenset({"do"}))
        self.at += 1
        body = self.nodes(frozenset({"done"}))
        self.at += 1
        return Block("loop", ((head, body),), line, opening)

    def _if(self, line: int) -> Block:
        branches: list[tuple[tuple[Node, ...] | None, tuple[Node, ...]]] = []
        ends = frozenset({"elif", "else", "fi"})
        while True:
            condition = self.nodes(frozenset({"then"}))
            self.at += 1
            branches.append((condition, self.nodes(ends)))
            word = self._keyword()
            self.at += 1
            if word == "else":
                branches.append((None, self.nodes(frozenset({"fi"}))))
                self.at += 1
            if word != "elif":
                return Block("if", tuple(branches), line)

    def _case(self, line: int) -> Block:
        """A case: the first branch has the subject as its condition, the others their patterns."""
        subject = self._command_until("in", line)
        branches: list[tuple[tuple[Node, ...] | None, tuple[Node, ...]]] = [((subject,), ())]
        while (token := self._peek()) is not None and self._keyword() != "esac":
            if token.kind == "line" or (token.kind == "operator" and token.text in ("(", ";;")):
                self.at += 1
                continue
            patterns = self._command_until(")", token.line)
            body = self.nodes(frozenset({";;", "esac"}))
            branches.append(((patterns,), body))
        self.at += 1
        return Block("case", tuple(branches), line)

    def _command_until(self, end: str, line: int) -> ShellCommand:
        """The words up to the keyword or operator `end`, which is read too."""
        words: list[Word] = []
        while (token := self._peek()) is not None:
            self.at += 1
            if token.kind == "word" and token.word == (WordPart("text", end, False),):
                break
            if token.kind == "operator" and token.text == end:
                break
            words += [token.word] if token.kind == "word" else []
        return ShellCommand(tuple(words), (), line, end)

    def _command(self) -> ShellCommand:
        words: list[Word] = []
        arrays: list[tuple[int, tuple[Word, ...]]] = []
        line, end = self.tokens[self.at].line, ";"
        document: Word | None = None
        written: Word = ()
        while (token := self._peek()) is not None:
            if words[:1] == [_TEST] and words[-1] != _TEST_END:  # its operators are its own
                word = (
                    token.word if token.kind == "word" else (WordPart("text", token.text, False),)
                )
                words += [word] if token.kind != "line" else []
                self.at += 1
                continue
            if token.kind == "line":
                self.at += 1
                break
            if token.kind == "operator" and token.text in (
                ";",
                "&",
                "|",
                "|&",
                "&&",
                "||",
                ";;",
                ")",
            ):
                end = token.text
                self.at += end not in (";;", ")")
                break
            if token.kind == "operator":  # a redirection, and where it goes
                self.at += 1
                target = self._peek()
                if token.text not in "()" and target is not None and target.kind == "word":
                    self.at += 1
                    written = target.word if token.text in (">", ">>") else written
                    document = target.word if token.text == "<<<" else document
                continue
            if token.kind == "document":
                document = token.word
                self.at += 1
                continue
            if token.array is not None:
                arrays.append((len(words), token.array))
            words.append(token.word)
            self.at += 1
        return ShellCommand(tuple(words), tuple(arrays), line, end, document, written)
