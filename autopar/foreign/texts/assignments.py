"""What commands of a script assign: variables, elements of arrays, sums and positional arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from autopar.foreign.texts.arithmetic import NotANumber, arithmetic_value
from autopar.foreign.texts.conditions import Conditions
from autopar.foreign.texts.expansion import LOST, Script, ShellValue, is_known, shown_value, unknown
from autopar.foreign.texts.shell_words import Word, WordPart

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_SUM = re.compile(r"\s*([A-Za-z_]\w*)\s*(<<|>>|[-+*/%]|)=(?!=)(.+)", re.DOTALL)
_STEP = re.compile(r"\s*(?:([A-Za-z_]\w*)\s*(\+\+|--)|(\+\+|--)\s*([A-Za-z_]\w*))\s*")

_COUNTED = re.compile(
    r"([A-Za-z_]\w*)\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--)\s*([A-Za-z_]\w*)"
)


class Assignments(Conditions):
    """Takes over what commands assign, with the variables of a script."""

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self.locals: dict[str, ShellValue | None] | None = None  # of the function that is read

    def assign(self, word: Word, array: tuple[Word, ...] | None, line: int) -> bool:
        """Takes over an assignment; False if the word is none."""
        first = word[0] if word else None
        if first is None or first.kind != "text" or first.quoted:
            return False
        found = ASSIGNMENT.fullmatch(first.text)
        if found is None and re.fullmatch(r"[A-Za-z_]\w*\[", first.text):
            found = ASSIGNMENT.fullmatch(self.text(word))  # such as A[$I]=8
            word = (WordPart("text", found[0], False),) if found else word
        if found is None:
            return False
        name, adds = found[1], found[3] == "+"
        if array is not None:
            value: ShellValue = tuple(field for item in array for field in self.fields(item))
            self._keyed(name, value)
        else:
            value = self.text((WordPart("text", found[4], True), *word[1:]))
        if found[2]:
            name = self._element(name, found[2][1:-1], value)
        self.store(name, value, adds, line)
        return True

    def _keyed(self, name: str, values: ShellValue) -> None:
        """Takes over `A=([tp]=8 [pp]=4)`."""
        for item in values:
            if (found := re.fullmatch(r"\[(\w+)\]=(.*)", item, re.DOTALL)) and not self.unsure:
                self.script.variables[f"{name}[{found[1]}]"] = found[2]

    def _element(self, name: str, index: str, value: ShellValue) -> str:
        """The name under which an element of an array is kept. In an array whose elements are
        known, it stands in its place too.
        """
        old = self.script.variables.get(name, ())
        values, others = list(old) if isinstance(old, tuple) else [old], unknown(f"${{{name}[@]}}")
        if (
            index.isdigit()
            and int(index) <= len(values)
            and not self.unsure
            and others not in values
        ):
            text = value if isinstance(value, str) else ""
            values[int(index) : int(index) + 1] = [text]
            self.script.variables[name] = tuple(values)
        else:  # the others are not known in order
            self.script.variables[name] = (others,)
        return f"{name}[{index}]"

    def declares(self, words: Sequence[Word]) -> None:
        """Keeps the values of the variables that a function declares as its own. They have none
        there before they are assigned.
        """
        if self.locals is None or words[0][0].text not in ("local", "declare", "typeset"):
            return
        for word in words[1:]:
            name = re.match(r"[A-Za-z_]\w*", word[0].text if word[0].kind == "text" else "")
            if name and name[0] not in self.locals:
                self.locals[name[0]] = self.script.variables.get(name[0])
            if name and word == (WordPart("text", name[0], False),):
                self.script.variables.pop(name[0], None)

    def sets(self, words: tuple[str, ...], line: int) -> bool:
        """Takes over a command that sets variables or arguments; False for another one."""
        name = words[0]
        if name in ("set", "shift"):
            self.set_arguments(words)
        elif name == "let":
            self.sums(words[1:], line)
        elif name == "unset":
            for word in words[1:]:
                old = self.script.variables.pop(word, None)
                if self.unsure and old is not None:
                    self.script.variables[word] = unknown(f"${word}, which may be unset")
        elif name in ("read", "mapfile", "readarray") or words[:2] == ("printf", "-v"):
            source = "is read from the terminal" if name == "read" else f"{name} sets"
            for word in words[1:]:
                value = unknown(f"${word}, which {source}")
                self.script.variables[word] = value if name == "read" else (value,)
        else:
            return False
        return True

    def reads(self, words: tuple[str, ...], text: str) -> bool:
        """Takes over `read NAME ...` of a text; False if it does something else."""
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        if not names or self.unsure or "-a" in " ".join(words[1:-1]):
            return False
        whole = any(re.fullmatch(r"-r?d.*", word) for word in words)  # up to no character
        line = text.strip() if whole else text.partition("\n")[0]
        between = re.escape(self.script.text_of("IFS")) if "IFS" in self.script.variables else r"\s"
        pieces = (
            re.split(rf"[{between}]+" if between else "$.", line.strip(), maxsplit=len(names) - 1)
            if len(names) > 1
            else [line]
        )
        for name, piece in zip(names, [*pieces, *[""] * len(names)], strict=False):
            self.script.variables[name] = piece
        return True

    def store(self, name: str, value: ShellValue, adds: bool, line: int) -> None:
        """Sets a variable, or adds to it."""
        old = self.script.variables.get(name)
        if self.unsure:
            self._maybe(name, old, value, adds, line)
        elif adds and isinstance(value, tuple):
            before = old if isinstance(old, tuple) else ((old,) if old else ())
            self.script.variables[name] = before + value
        elif adds and isinstance(old, str) and isinstance(value, str):
            self.script.variables[name] = old + value
        elif adds and isinstance(old, tuple) and old and isinstance(value, str):
            self.script.variables[name] = (old[0] + value, *old[1:])
        else:
            self.script.variables[name] = value

    def _maybe(
        self, name: str, old: ShellValue | None, value: ShellValue, adds: bool, line: int
    ) -> None:
        """An assignment that may not happen: a value from before stays, with a note."""
        if old is None and value:
            where = f"{name}, which line {line} sets under a condition that the file does not tell"
            self.script.variables[name] = (
                (unknown(where),) if isinstance(value, tuple) else unknown(where)
            )
        elif old is None:
            self.script.variables[name] = value
        if old is not None and (adds or old != value):
            words = " ".join(value) if isinstance(value, tuple) else value
            verb = "adds" if adds else "sets"
            self.script.note(
                f"line {line} {verb} {name} ({shown_value(words)[:80]}) under a condition that the file does not tell: not taken"
            )

    def counts(self, head: str) -> None:
        """Takes over the head of `for ((I = 0; I < 8; I++))`: its variables have a value of each
        round, and one behind the loop, that are not known.
        """
        for found in _COUNTED.finditer(head):
            name = found[1] or found[2]
            self.script.variables[name] = unknown(f"${name}, which a loop counts")

    def sums(self, texts: tuple[str, ...], line: int) -> None:
        """Takes over the assignments of `let A=B+1 C++`, and so of `((A = B + 1))`."""
        for text in (piece for whole in texts for piece in whole.split(",")):
            for name, value in _assigned_sums(text):
                try:
                    shown = str(arithmetic_value(value, self.script.text_of))
                except NotANumber:
                    shown = unknown(f"(({text.strip()[:60]}))")
                self.store(name, shown, False, line)

    def set_arguments(self, words: tuple[str, ...]) -> None:
        """Takes over `set -- A B` and `shift N`. The arguments are unknown after one of which the
        file does not tell whether it runs, what it sets, or by how many it shifts.
        """
        if words[0] == "set":
            given = _set_words(words[1:])
            if given is not None:
                known = not self.unsure and all(map(is_known, given))
                self.arguments = given if known else LOST
            return
        count = words[1] if len(words) > 1 else "1"
        if self.unsure or not re.fullmatch(r"[0-9]{1,6}", count):
            self.arguments = LOST
        elif self.arguments and self.arguments is not LOST and int(count) <= len(self.arguments):
            self.arguments = self.arguments[int(count) :]


def _assigned_sums(text: str) -> Iterator[tuple[str, str]]:
    """(variable, its new value as an expression) of an assignment in arithmetic."""
    if found := _SUM.fullmatch(text):
        yield found[1], f"{found[1]} {found[2]} ({found[3]})" if found[2] else found[3]
    elif found := _STEP.fullmatch(text):
        name, step = found[1] or found[4], found[2] or found[3]
        yield name, f"{name} {step[0]} 1"


def _set_words(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The arguments that `set` is given behind its options, or None if it sets options alone."""
    at = 0
    while at < len(words) and words[at][:1] in ("-", "+"):
        if words[at] == "--":
            return words[at + 1 :]
        at += 2 if words[at].endswith("o") else 1  # `set -o pipefail`
    return words[at:] or None
