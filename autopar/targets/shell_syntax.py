"""The syntax of shell scripts: words, commands and their nesting. Nothing is expanded or run."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from autopar.errors import AutoparError

MOST_CHARACTERS = 2_000_000
"""The largest script that is read."""
OPEN, CLOSE = "\ue000", "\ue001"
"""Brackets around the description of a value that is not known, inside an expanded text."""
MOST_DEPTH = 60
"""The deepest nesting of quotes, expansions and blocks."""

_OPERATORS = (
    "&&",
    "||",
    ";;",
    "|&",
    "&>>",
    "&>",
    ">>",
    "<<<",
    "<<-",
    "<<",
    ">&",
    "<&",
    ">",
    "<",
    ";",
    "&",
    "|",
    "(",
    ")",
)
_SPACE = " \t\r"
_STREAM = re.compile(r"\d+(?=[<>])")
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[\w ./:-]*[\w.])?>(?=[\s\"'/)]|$)")
_ENDS = frozenset(" \t\r\n;&|<>()")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a word: `kind` is 'text', 'variable' (the text inside `${}`), 'command' (what
    would be run) or 'sum' (the text inside `$(())`). A quoted part is not split at blanks.
    """

    kind: str
    text: str
    quoted: bool


Word = tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A word, an operator, the end of a line, or a here-document, whose text is a word. `array` has
    the words in parentheses behind a word such as `A=` or `A+=`, or None.
    """

    kind: str  # 'word', 'operator', 'line', 'document'
    line: int
    text: str = ""
    word: Word = ()
    array: tuple[Word, ...] | None = None


def tokens_of(text: str) -> list[Token]:
    """The tokens of a script, without comments. Raises AutoparError for quotes or brackets that do
    not end.
    """
    if len(text) > MOST_CHARACTERS:
        raise AutoparError(f"a script of {len(text):,} characters is no launch script")
    return list(_Scanner(text.replace("\r\n", "\n")).tokens())


class _Scanner:
    """Reads a text from left to right; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.ends = [match.start() for match in re.finditer("\n", text)]  # of lines
        # ends of here-documents, whether tabs are dropped, and whether their text is literal
        self.waiting: list[tuple[str, bool, bool]] = []

    def _line(self) -> int:
        return bisect_left(self.ends, self.at) + 1

    def _placeholder(self) -> str:
        """The `<PATH TO CHECKPOINTS>` that begins here, which whoever copies a script fills in."""
        found = _PLACEHOLDER.match(self.text, self.at)
        return found[0] if found else ""

    def tokens(self) -> Iterator[Token]:
        while self.at < len(self.text):
            self._skip_blanks()
            if self.at >= len(self.text):
                return
            character, line = self.text[self.at], self._line()
            if character == "#":
                self._skip_to_line_end()
            elif character == "\n":
                self.at += 1
                yield from self._documents(line)
                yield Token("line", line)
            elif stream := _STREAM.match(self.text, self.at):
                self.at = stream.end()  # `2>&1`: the number belongs to the redirection
            elif (operator := self._operator()) and not self._placeholder():
                self.at += len(operator)
                if operator in ("<<", "<<-"):
                    self._skip_blanks()
                    word = self.word()
                    end, literal = "".join(part.text for part in word), any(p.quoted for p in word)
                    self.waiting.append((end, operator == "<<-", literal))
                else:
                    yield Token("operator", line, operator)
            else:
                yield self._word_token(line)

    def _word_token(self, line: int) -> Token:
        word = self.word()
        plain = word[0].text if len(word) == 1 and word[0].kind == "text" else ""
        if re.fullmatch(r"[A-Za-z_]\w*\+?=", plain) and self.text[self.at : self.at + 1] == "(":
            self.at += 1
            return Token("word", line, word=word, array=tuple(self._array()))
        return Token("word", line, word=word)

    def _array(self) -> Iterator[Word]:
        start = self._line()
        while self.at < len(self.text):
            self._skip_blanks()
            character = self.text[self.at : self.at + 1]
            if character == ")":
                self.at += 1
                return
            if character == "#":
                self._skip_to_line_end()
            elif character in ("\n", "|", ";", "&", "<", ">", "("):
                if (
                    character != "\n"
                ):  # bash refuses these; the bar of a layout is told by its reader
                    yield (Part("text", character, True),)
                self.at += 1
            elif character:
                yield self.word()
        raise AutoparError(f"the array that begins in line {start} has no end")

    def _operator(self) -> str:
        return next((op for op in _OPERATORS if self.text.startswith(op, self.at)), "")

    def _skip_blanks(self) -> None:
        while True:
            if self.text[self.at : self.at + 1] in tuple(_SPACE):
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            else:
                return

    def _skip_to_line_end(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _documents(self, line: int) -> Iterator[Token]:
        """The here-documents that begin on this line, whose operators stand on the one before."""
        for end, tabs, literal in self.waiting:
            lines: list[str] = []
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                text = self.text[self.at : stop]
                text = text.lstrip("\t") if tabs else text
                self.at = stop + 1
                if text == end:
                    break
                lines.append(text)
            whole = "\n".join(lines)
            word = (Part("text", whole, True),) if literal else document_word(whole)
            yield Token("document", line, word=word)
        self.waiting = []

    def word(self) -> Word:
        """The word that begins here, up to a blank or an operator."""
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if place := self._placeholder():
                parts.append(Part("place", place, True))
                self.at += len(place)
            elif character == OPEN and (end := self.text.find(CLOSE, self.at)) > 0:
                # a value that is not known, in a text that is read again
                parts.append(Part("text", self.text[self.at : end + 1], True))
                self.at = end + 1
            elif character in _ENDS:
                break
            elif character == "'":
                parts.append(Part("text", self._until("'"), True))
            elif character == '"':
                parts += self._double_quoted()
            elif self.text.startswith("$'", self.at):
                self.at += 1
                parts.append(Part("text", self._until("'"), True))
            elif character in "$`":
                parts.append(self._expansion(False))
            elif character == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if escaped != "\n":
                    parts.append(Part("text", escaped, True))
            else:
                parts.append(Part("text", character, False))
                self.at += 1
        if not parts:
            self.at += 1
        return _joined(parts)

    def _until(self, quote: str) -> str:
        line, end = self._line(), self.text.find(quote, self.at + 1)
        if end < 0:
            raise AutoparError(f"the quote {quote} in line {line} has no end")
        found = self.text[self.at + 1 : end]
        self.at = end + 1
        return found

    def _double_quoted(self) -> list[Part]:
        line = self._line()
        self.at += 1
        parts = self.quoted('"')
        if self.at >= len(self.text):
            raise AutoparError(f'the quote " in line {line} has no end')
        self.at += 1
        return parts

    def quoted(self, end: str) -> list[Part]:
        """The parts up to the character `end`, which is not read, or up to the end of the text. Only
        expansions and escapes mean more than themselves.
        """
        parts = [Part("text", "", True)]
        while self.at < len(self.text) and self.text[self.at] != end:
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('"\\$`\n'):
                escaped = self.text[self.at + 1]
                parts += [] if escaped == "\n" else [Part("text", escaped, True)]
                self.at += 2
            elif character in "$`":
                parts.append(self._expansion(True))
            else:
                parts.append(Part("text", character, True))
                self.at += 1
        return parts

    def _expansion(self, quoted: bool) -> Part:
        """The expansion that begins here with `$` or a backtick."""
        if self.text[self.at] == "`":
            return Part("command", self._until("`"), quoted)
        if self.text.startswith("$((", self.at):
            return Part("sum", self._balanced(3, "(", ")")[:-1], quoted)
        if self.text.startswith("$(", self.at):
            return Part("command", self._balanced(2, "(", ")"), quoted)
        if self.text.startswith("${", self.at):
            return Part("variable", self._balanced(2, "{", "}"), quoted)
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]").match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return Part("text", "$", quoted)
        self.at = name.end()
        return Part("variable", name[0], quoted)

    def _balanced(self, skip: int, opening: str, closing: str) -> str:
        """The text from `skip` characters on up to the bracket that closes the first one."""
        line, start = self._line(), self.at + skip
        depth, quote, self.at = skip - 1, "", start
        while self.at < len(self.text):
            character = self.text[self.at]
            self.at += 1
            if character == "\\":
                self.at += 1
            elif quote:
                quote = "" if character == quote else quote
            elif character in "\"'":
                quote = character
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
                if depth == 0:
                    return self.text[start : self.at - 1]
        raise AutoparError(f"the {opening} in line {line} has no end")


def _joined(parts: list[Part]) -> Word:
    """The parts, with neighbouring texts of one quoting as one part."""
    found: list[Part] = []
    for (kind, quoted), run in groupby(parts, lambda part: (part.kind, part.quoted)):
        same = list(run)
        is_text = kind == "text"
        found += [Part(kind, "".join(part.text for part in same), quoted)] if is_text else same
    return tuple(found)


def document_word(text: str) -> Word:
    """The word of a here-document. A quote in it is a plain character."""
    try:
        return _joined(_Scanner(text).quoted(""))
    except AutoparError:  # a bracket without an end: bash would refuse it
        return (Part("text", text, True),)


@dataclass(frozen=True, slots=True)
class Command:
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
    branch for each body.
    """

    kind: str
    branches: tuple[tuple[tuple[Node, ...] | None, tuple[Node, ...]], ...]
    line: int
    name: str = ""


Node = Command | Block

_OPENS = {
    "if": "fi",
    "while": "done",
    "until": "done",
    "for": "done",
    "select": "done",
    "case": "esac",
    "{": "}",
}


def parse(text: str) -> tuple[Node, ...]:
    """The commands of a script. Raises AutoparError if it is not one."""
    parser = _Parser(tokens_of(text))
    found = parser.nodes(frozenset())
    return found


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
        if self.depth > MOST_DEPTH:
            raise AutoparError(f"the script nests its blocks deeper than {MOST_DEPTH}")
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
                found.append(self._block(word, token.line))
            elif word in ("then", "do", "else", "fi", "done", "esac", "}", "in"):
                self.at += 1  # stray: bash would refuse it
            elif token.kind == "operator":
                self.at += 1
                body = self.nodes(frozenset(")"))
                self.at += 1
                found.append(Block("group", ((None, body),), token.line))
            else:
                found.append(self._function() or self._command())
        self.depth -= 1
        return tuple(found)

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
        head = self.nodes(frozenset({"do"}))
        self.at += 1
        body = self.nodes(frozenset({"done"}))
        self.at += 1
        return Block("loop", ((head, body),), line)

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

    def _command_until(self, end: str, line: int) -> Command:
        """The words up to the keyword or operator `end`, which is read too."""
        words: list[Word] = []
        while (token := self._peek()) is not None:
            self.at += 1
            if token.kind == "word" and token.word == (Part("text", end, False),):
                break
            if token.kind == "operator" and token.text == end:
                break
            words += [token.word] if token.kind == "word" else []
        return Command(tuple(words), (), line, end)

    def _command(self) -> Command:
        words: list[Word] = []
        arrays: list[tuple[int, tuple[Word, ...]]] = []
        line, end = self.tokens[self.at].line, ";"
        document: Word | None = None
        written: Word = ()
        while (token := self._peek()) is not None:
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
                continue
            if token.kind == "document":
                document = token.word
                self.at += 1
                continue
            if token.array is not None:
                arrays.append((len(words), token.array))
            words.append(token.word)
            self.at += 1
        return Command(tuple(words), tuple(arrays), line, end, document, written)


def parse_text(text: str) -> Word:
    """The parts of a text that stands inside an expansion, such as a default. Blanks and operators
    are plain text there.
    """
    scanner, parts = _Scanner(text), list[Part]()
    while scanner.at < len(text):
        if text[scanner.at] in _ENDS:
            parts.append(Part("text", text[scanner.at], False))
            scanner.at += 1
        else:
            parts += scanner.word()
    return _joined(parts)
