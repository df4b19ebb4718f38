"""The words of shell scripts: quotes, expansions, operators and here-documents, as a row of tokens.
Nothing is expanded or run.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from autopar.errors import AutoparError
from autopar.foreign.texts.shell_brackets import closing, end_of_ansi

MOST_CHARACTERS = 2_000_000
"""The largest script that is read."""
OPEN, CLOSE = "\ue000", "\ue001"
"""Brackets around the description of a value that is not known, inside an expanded text."""

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
_PLACEHOLDER = re.compile(
    r"""<(?P<name>[A-Za-z](?:[\w ./:,-]*[\w.])?)>
    (?: (?P<more>(?=[_.,:-]\w)) | (?=["'/]) | (?=[\s)]|$) (?:[ \t]+\([^()\n]*\))? )""",
    re.VERBOSE,
)
_ESCAPES = dict(zip("abeEfnrtv\\'\"?", "\a\b\x1b\x1b\f\n\r\t\v\\'\"?", strict=True))
"""What a backslash and a letter mean inside `$''`."""
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|U([0-9a-fA-F]{1,8})|([0-7]{1,3})|c(.)|(.))",
    re.DOTALL,
)
_BYTE = re.compile(r"(?<!\\)(?:\\\\)*\\(?:x[89a-fA-F][0-9a-fA-F]|[2-7]\d\d)")
_ENDS = frozenset(" \t\r\n;&|<>()")


@dataclass(frozen=True, slots=True)
class WordPart:
    """A part of a word: `kind` is 'text', 'variable' (the text inside `${}`), 'command' (what
    would be run) or 'sum' (the text inside `$(())`). A quoted part is not split at blanks.
    """

    kind: str
    text: str
    quoted: bool


Word = tuple[WordPart, ...]


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


LET: Word = (WordPart("text", "let", True),)
"""The first word of the command that `((...))` is; a `let` of the script is not quoted."""


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
        """The `<PATH TO CHECKPOINTS>` that begins here, which whoever copies a script fills in, with a
        remark in parentheses behind it, which bash would refuse.
        """
        found = _PLACEHOLDER.match(self.text, self.at)
        if found is None:
            return ""
        # `sort <in>out.txt` names two files
        before, name = self.text[self.at - 1 : self.at], found["name"]
        attached = before in ("=", "/") or " " in name or name.isupper()
        return found[0] if found["more"] is None or attached else ""

    def _is_pipe(self) -> bool:
        """Whether a `<(command)` or `>(command)` begins here."""
        return self.text.startswith(("<(", ">("), self.at)

    def _begins_word(self) -> bool:
        """Whether the `<` or `>` here is no redirection."""
        return self._is_pipe() or bool(self._placeholder())

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
            elif (arithmetic := self._sum()) is not None:  # `((A = 1))` is `let "A = 1"`
                yield Token("word", line, word=LET)
                yield Token("word", line, word=document_word(arithmetic.replace('"', "")))
            elif (operator := self._operator()) and not self._begins_word():
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

    def _sum(self) -> str | None:
        """The arithmetic that is a command here, or None."""
        start = self.at
        if self.text.startswith("((", start):
            inner = self._inside("(")
            if closing(inner, 1, "(") == len(inner) - 1:
                return inner[1:-1]
            self.at = start  # a shell inside a shell
        return None

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
            elif character in ("\n", "|", ";", "&", "<", ">", "(") and not self._begins_word():
                if (
                    character != "\n"
                ):  # bash refuses these; the bar of a layout is told by its reader
                    yield (WordPart("text", character, True),)
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
            word = (WordPart("text", whole, True),) if literal else document_word(whole)
            yield Token("document", line, word=word)
        self.waiting = []

    def word(self) -> Word:
        """The word that begins here, up to a blank or an operator."""
        parts: list[WordPart] = []
        while self.at < len(self.text):
            character = self.text[self.at]
            if place := self._placeholder():
                parts.append(WordPart("place", place, True))
                self.at += len(place)
            elif self._is_pipe():  # a file whose name is not known
                start, opening = self.at, character + "("
                self._inside(opening)
                parts.append(WordPart("place", self.text[start : self.at][:60], True))
            elif character == OPEN and (end := self.text.find(CLOSE, self.at)) > 0:
                # a value that is not known, in a text that is read again
                parts.append(WordPart("text", self.text[self.at : end + 1], True))
                self.at = end + 1
            elif character in _ENDS:
                break
            elif character == "'":
                parts.append(WordPart("text", self._until("'"), True))
            elif character == '"':
                parts += self._double_quoted()
            elif self.text.startswith("$'", self.at):
                parts.append(self._ansi_quoted())
            elif self.text.startswith('$"', self.at):  # a text to translate
                self.at += 1
                parts += self._double_quoted()
            elif character in "$`":
                parts.append(self._expansion(False))
            elif character == "\\":
                escaped = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if escaped != "\n":
                    parts.append(WordPart("text", escaped, True))
            else:
                parts.append(WordPart("text", character, False))
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

    def _double_quoted(self) -> list[WordPart]:
        line = self._line()
        self.at += 1
        parts = self.quoted('"')
        if self.at >= len(self.text):
            raise AutoparError(f'the quote " in line {line} has no end')
        self.at += 1
        return parts

    def _ansi_quoted(self) -> WordPart:
        """The `$'...'` that begins here."""
        end = end_of_ansi(self.text, self.at)
        if end < 0:
            raise AutoparError(f"the quote $' in line {self._line()} has no end")
        whole = self.text[self.at : end]
        self.at = end
        if _BYTE.search(whole):  # bytes that may be a part of a character
            return WordPart("place", whole, True)
        text = _ESCAPE.sub(_unescaped, whole[2:-1])
        return WordPart("text", text.partition("\0")[0], True)

    def quoted(self, end: str, is_default: bool = False) -> list[WordPart]:
        """The parts up to the character `end`, which is not read, or up to the end of the text. Only
        expansions and escapes mean more than themselves. A double quote ends nothing and is not
        escaped in a here-document, whose `end` is ''. In a default such as that of `${A:-it}` a
        brace may be escaped, and `$''` is a quote.
        """
        escaped_here = f"{end}\\$`\n" + ("}" if is_default else "")
        parts = [WordPart("text", "", True)]
        while self.at < len(self.text) and self.text[self.at] != end:
            character = self.text[self.at]
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple(escaped_here):
                escaped = self.text[self.at + 1]
                parts += [] if escaped == "\n" else [WordPart("text", escaped, True)]
                self.at += 2
            elif is_default and self.text.startswith("$'", self.at):
                parts.append(self._ansi_quoted())
            elif is_default and self.text.startswith('$"', self.at):
                self.at += 1
            elif character in "$`":
                parts.append(self._expansion(True))
            else:
                parts.append(WordPart("text", character, True))
                self.at += 1
        return parts

    def _expansion(self, quoted: bool) -> WordPart:
        """The expansion that begins here with `$` or a backtick."""
        if self.text[self.at] == "`":
            text = self._inside("`")
            return WordPart("command", re.sub(r"\\([`$\\])", r"\1", text), quoted)
        if self.text.startswith("$(", self.at):
            text = self._inside("$(")
            is_sum = text.startswith("(") and closing(text, 1, "(") == len(text) - 1
            return (
                WordPart("sum", text[1:-1], quoted) if is_sum else WordPart("command", text, quoted)
            )
        if self.text.startswith("$[", self.at):
            return WordPart("sum", self._inside("$["), quoted)
        if self.text.startswith("${", self.at):
            return WordPart("variable", self._inside("${"), quoted)
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?!$-]").match(self.text, self.at + 1)
        if name is None:
            self.at += 1
            return WordPart("text", "$", quoted)
        self.at = name.end()
        return WordPart("variable", name[0], quoted)

    def _inside(self, opening: str) -> str:
        """The text between the bracket that begins here and the one that closes it."""
        start = self.at + len(opening)
        end = closing(self.text, start, opening)
        if end < 0:
            raise AutoparError(f"the {opening[-1]} in line {self._line()} has no end")
        self.at = end + 1
        return self.text[start:end]


def _unescaped(found: re.Match[str]) -> str:
    """What an escape inside `$''` stands for; itself if it means nothing."""
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if found[group]:
            number = int(found[group], base)
            return chr(number) if number < 0x110000 else found[0]
    if found[5]:
        return chr(ord(found[5].upper()) & 0x1F)
    return _ESCAPES.get(found[6], found[0])


def _joined(parts: list[WordPart]) -> Word:
    """The parts, with neighbouring texts of one quoting as one part."""
    found: list[WordPart] = []
    for (kind, quoted), run in groupby(parts, lambda part: (part.kind, part.quoted)):
        same = list(run)
        is_text = kind == "text"
        found += [WordPart(kind, "".join(part.text for part in same), quoted)] if is_text else same
    return tuple(found)


def document_word(text: str) -> Word:
    """The word of a here-document. A quote in it is a plain character."""
    try:
        return _joined(_Scanner(text).quoted(""))
    except AutoparError:  # a bracket without an end: bash would refuse it
        return (WordPart("text", text, True),)


def quoted_text(text: str) -> Word:
    """The parts of a text inside an expansion that stands between double quotes, such as the
    default in `"${A:-it}"`. Single quotes are plain characters there, double quotes end and begin.
    """
    scanner, parts = _Scanner(text), list[WordPart]()
    while scanner.at < len(text):
        parts += scanner.quoted('"', is_default=True)
        scanner.at += 1
    return _joined(parts)


def parse_text(text: str) -> Word:
    """The parts of a text that stands inside an expansion, such as a default. Blanks and operators
    are plain text there.
    """
    scanner, parts = _Scanner(text), list[WordPart]()
    while scanner.at < len(text):
        if text[scanner.at] in _ENDS:
            parts.append(WordPart("text", text[scanner.at], False))
            scanner.at += 1
        else:
            parts += scanner.word()
    return _joined(parts)
