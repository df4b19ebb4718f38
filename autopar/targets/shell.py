"""Reads a launch script as a shell would expand it. Nothing is run: a command substitution and the
environment are values that are not known, and so are positional arguments that are not given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise

from autopar.errors import AutoparError
from autopar.targets.conditions import Conditions
from autopar.targets.expansion import (
    Script,
    Value,
    is_known,
    shown_value,
    unknown,
)
from autopar.targets.shell_commands import Block, Command, Node, parse
from autopar.targets.shell_words import CLOSE, MOST_CHARACTERS, Part, Word

MOST_STEPS = 20_000
"""The most commands that are read, those of functions counted each time."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=(.*)", re.DOTALL)
_ENVIRONMENT = re.compile(
    r"(^|/)(\.(bash|zsh)rc|\.(bash_|z)?profile|etc/profile|activate|conda\.sh|setvars\.sh|modules?\.sh|lmod\.sh|init/\w+)$"
)
"""Files that set up the shell and its programs: no options of a training stand there."""
_DECLARE = ("export", "declare", "local", "readonly", "typeset")
ReadFile = Callable[[str], str | None]
"""Returns the text of a file that a script reads with `source`, or None."""


def read_script(
    text: str, read_file: ReadFile = lambda name: None, args: tuple[str, ...] | None = None
) -> Script:
    """A script with its words expanded, without running anything. `read_file(name)` gives the text
    of another script that it reads. `args` are its positional arguments; None if they are not
    known. Raises AutoparError for a text that is no script.
    """
    script = Script()
    script.variables |= _batch_variables(text)
    reader = _Reader(script, read_file)
    reader.arguments = args
    reader.run(parse(text))
    return script


def _batch_variables(text: str) -> dict[str, Value]:
    """The variables that Slurm sets, as far as `#SBATCH` lines fix them."""
    options: dict[str, str] = {}
    letters = {"-N": "--nodes", "-n": "--ntasks"}
    for line in re.findall(r"^#SBATCH\s+(.*)$", text, re.MULTILINE):
        found = re.match(r"(--?[\w-]+)(?:=|\s+)?([^\s#]*)", line.strip())
        if found:
            options[letters.get(found[1], found[1])] = found[2]
    numbers = {name: int(v) for name, v in options.items() if re.fullmatch(r"\d{1,7}", v)}
    gpus = re.search(r"gpu:(?:[\w.-]+:)?(\d+)", options.get("--gres", ""))
    each = numbers.get("--gpus-per-node") or (int(gpus[1]) if gpus else 0)
    each = each or int((re.search(r"(\d+)$", options.get("--gpus-per-node", "")) or [0, 0])[1])
    found_values: dict[str, Value] = {}
    if nodes := numbers.get("--nodes"):
        found_values |= dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(nodes))
    tasks = numbers.get("--ntasks") or (nodes or 0) * numbers.get("--ntasks-per-node", 0)
    if tasks:
        found_values |= dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(tasks))
    if per_node := numbers.get("--ntasks-per-node"):
        found_values["SLURM_NTASKS_PER_NODE"] = str(per_node)
    if each:
        found_values |= dict.fromkeys(("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE"), str(each))
    return found_values


class _Stop(Exception):
    """The script ends here."""


class _Break(Exception):
    """The loop ends here."""


def _shifts(nodes: Sequence[Node]) -> bool:
    """Whether one of the commands drops arguments."""
    shift = (Part("text", "shift", False),)
    return any(
        any(_shifts(body) for _, body in node.branches)
        if isinstance(node, Block)
        else node.words[:1] == (shift,)
        for node in nodes
    )


def _assigned(nodes: Sequence[Node]) -> Iterator[str]:
    """The names that commands assign."""
    for node in nodes:
        if isinstance(node, Block):
            for _, body in node.branches:
                yield from _assigned(body)
            continue
        texts = (word[0].text for word in node.words if word and word[0].kind == "text")
        yield from (found[1] for text in texts if (found := _ASSIGNMENT.fullmatch(text)))


class _Reader(Conditions):
    """Expands the commands of a script one after the other."""

    def __init__(self, script: Script, read_file: ReadFile) -> None:
        super().__init__(script)
        self.read_file = read_file
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.steps = self.depth = self.branches = self.loops = 0
        self.piped: str | None = None  # what `sed` hands to the next command

    # ------------------------------------------------------------------------------------ commands

    def run(self, nodes: Sequence[Node]) -> None:
        """Reads commands in order. Those behind an `exit` that certainly runs are left out."""
        try:
            self._run(nodes)
        except _Stop:
            return

    def _run(self, nodes: Sequence[Node]) -> None:
        self.depth += 1
        if self.depth > 40:
            raise AutoparError("the script calls its functions deeper than 40 times")
        verdict: bool | None = True
        for node in nodes:
            self.steps += 1
            if self.steps > MOST_STEPS:
                raise AutoparError(f"the script has more than {MOST_STEPS:,} commands")
            self.unsure += verdict is None
            if verdict is not False:
                self._block(node) if isinstance(node, Block) else self._command(node)
            self.unsure -= verdict is None
            if isinstance(node, Block):
                verdict = True
                continue
            # `test && command`: the command runs only if the test says so
            verdict = True
            if node.end in ("&&", "||"):
                truth = self.test(node)
                verdict = truth if node.end == "&&" or truth is None else not truth
                if truth is None and not self.is_test(node):
                    verdict = node.end == "&&"  # a program is taken to succeed
        self.depth -= 1

    def _block(self, node: Block) -> None:
        if node.kind == "function":
            self.functions[node.name] = node.branches[0][1]
        elif node.kind == "group":
            self._run(node.branches[0][1])
        elif node.kind == "if":
            self._if(node)
        elif node.kind == "case":
            self._case(node)
        else:
            self._loop(node)

    def _loop(self, node: Block) -> None:
        """Reads a loop that takes known arguments one after the other, with `shift`, as often as it
        runs. Any other loop is read once, as commands of which it is not known whether they run.
        """
        condition, body = node.branches[0]
        depth, branches, most = self.depth, self.branches, sys.maxsize
        self.loops += 1
        while node.name in ("while", "until") and not self.unsure and _shifts(body):
            truth, left = self.truth_of(condition or ()), self.arguments
            ends = truth == (node.name == "until")
            # a round that drops no argument may be followed by any number of others
            if truth is None or left is None or (not ends and len(left) >= most):
                break
            most = len(left)
            try:
                if not ends:
                    self._run(body)
                    continue
            except _Break:
                self.depth, self.branches = depth, branches
            self.loops -= 1
            self.empty |= set(_assigned(body))  # by options that are not among the arguments
            return
        self.loops -= 1
        self._unsurely([body])

    def _unsurely(self, bodies: Iterable[Sequence[Node]]) -> None:
        """Reads bodies of which it is not known whether they run."""
        self.unsure += 1
        for body in bodies:
            self._run(body)
        self.unsure -= 1

    def _if(self, node: Block) -> None:
        for number, (condition, body) in enumerate(node.branches):
            truth = True if condition is None else self.truth_of(condition)
            if truth:
                self.branches += 1
                self._run(body)
                self.branches -= 1
                return
            if truth is None:
                self._unsurely(body for _, body in node.branches[number:])
                return

    def _case(self, node: Block) -> None:
        condition = node.branches[0][0]
        words = condition[0].words if condition and isinstance(condition[0], Command) else ()
        subject = "".join(self.text(word) for word in words[:1])
        if not is_known(subject):
            self._unsurely(body for _, body in node.branches[1:])
            return
        for patterns, body in node.branches[1:]:
            command = patterns[0] if patterns else None
            texts = [self.text(w) for w in command.words] if isinstance(command, Command) else []
            choices = [part.strip() for text in texts for part in text.split("|")]
            if any(fnmatchcase(subject, choice) for choice in choices):
                self._run(body)
                return

    def _command(self, node: Command) -> None:
        arrays, at = dict(node.arrays), 0
        words = list(node.words)
        leads = len(words[0]) == 1 and words[0][0].kind == "text" if words else False
        declares = leads and words[0][0].text in _DECLARE
        if declares:
            at = 1
        while at < len(words):
            if declares and (self.text(words[at]).startswith("-")):
                at += 1
                continue
            if not self._assign(words[at], arrays.get(at), node.line):
                break
            at += 1
        if declares or at == len(words):
            return
        expanded = tuple(field for word in words[at:] for field in self.fields(word))
        if expanded and node.document is not None and self._takes_document(expanded, node):
            return
        if expanded and expanded[0] == "sed":
            self._edits(expanded, node)
        elif expanded:
            self.piped = None
            self._call(expanded, node)

    def _edits(self, words: tuple[str, ...], node: Command) -> None:
        """Takes over what `sed "s/A/B/" FILE > OTHER` writes, also behind a pipe. Only plain texts are
        replaced; with another edit the file is not known.
        """
        rest = [word for word in words[1:] if word != "-e"]
        text = self.piped
        if len(rest) == 2 and is_known(rest[1]):
            text = self.script.reader(self.read_file)(rest[1])
        found = re.fullmatch(r"s(\W)([\w .:{}<>@%-]+)\1([^\n]*?)\1g?", rest[0]) if rest else None
        self.piped = None
        if text is None or found is None or len(rest) > 2 or self.unsure:
            return
        new = found[3].replace(f"\\{found[1]}", found[1])
        if len(text) + text.count(found[2]) * len(new) > MOST_CHARACTERS:
            return
        text = text.replace(found[2], new)
        if node.end == "|":
            self.piped = text
        elif (file := self.text(node.written)) and is_known(file):
            self.script.files[file] = text

    def _takes_document(self, words: tuple[str, ...], node: Command) -> bool:
        """Takes over the here-document of `cat > FILE`, `tee FILE` or `read NAME`; False for another
        command.
        """
        text = self.text(node.document or ())
        tee = words[0] == "tee" and len(words) == 2
        if words == ("cat",) or tee:
            file = words[1] if tee else self.text(node.written)
            if file and is_known(file):
                self.script.files[file] = text
            return bool(file)
        names = [word for word in words[1:] if re.fullmatch(r"[A-Za-z_]\w*", word)]
        if words[0] != "read" or len(names) != 1 or self.unsure:
            return False
        whole = any(re.fullmatch(r"-r?d.*", word) for word in words)  # up to no character
        self.script.variables[names[0]] = text.strip() if whole else text.partition("\n")[0]
        return True

    def _assign(self, word: Word, array: tuple[Word, ...] | None, line: int) -> bool:
        """Takes over an assignment; False if the word is none."""
        first = word[0] if word else None
        if first is None or first.kind != "text" or first.quoted:
            return False
        found = _ASSIGNMENT.fullmatch(first.text)
        if found is None:
            return False
        name, adds = found[1], found[3] == "+"
        if array is not None:
            value: Value = tuple(field for item in array for field in self.fields(item))
        else:
            value = self.text((Part("text", found[4], True), *word[1:]))
        old = self.script.variables.get(name)
        if self.unsure:
            self._maybe(name, old, value, adds, line)
        elif adds and isinstance(value, tuple):
            before = old if isinstance(old, tuple) else ((old,) if old else ())
            self.script.variables[name] = before + value
        elif adds and isinstance(old, str) and isinstance(value, str):
            self.script.variables[name] = old + value
        else:
            self.script.variables[name] = value
        return True

    def _maybe(self, name: str, old: Value | None, value: Value, adds: bool, line: int) -> None:
        """An assignment that may not happen: a value from before stays, with a note."""
        if old is None and value:
            where = f"{name}, which line {line} sets under a condition that the file does not tell"
            self.script.variables[name] = (
                (unknown(where),) if isinstance(value, tuple) else unknown(where)
            )
        elif old is None:
            self.script.variables[name] = value
        if old is not None and old != value:
            words = " ".join(value) if isinstance(value, tuple) else value
            verb = "adds" if adds else "sets"
            self.script.note(
                f"line {line} {verb} {name} ({shown_value(words)[:80]}) under a condition that the file does not tell: not taken"
            )

    def _call(self, words: tuple[str, ...], node: Command) -> None:
        name = words[0]
        if name in self.functions:
            before, self.arguments = self.arguments, words[1:]
            self._run(self.functions[name])
            self.arguments = before
        elif name in ("source", ".") and len(words) > 1:
            self._source(words[1])
        elif name in ("set", "shift"):
            self._set_arguments(words)
        elif name in ("exit", "return", "break"):
            self._ends(name, node.line)
        elif name == "unset" and not self.unsure:
            for word in words[1:]:
                self.script.variables.pop(word, None)
        elif name == "read":
            for word in words[1:]:
                self.script.variables[word] = unknown(f"${word}, which is read from the terminal")
        elif name in ("eval", "exec") and len(words) > 1:
            self._nested(" ".join(words[1:]), node)
        else:
            self.script.commands.append((words, node.end))
            self._writes_or_runs(words, node)
            for word in words[1:]:
                if re.search(r"\s--?\w", word) and re.search(r"\s", word.strip()):
                    self._nested(word, node)

    def _ends(self, name: str, line: int) -> None:
        """Leaves the script or a loop, if the command certainly runs."""
        # guards such as `if [ -z "$DATA" ]; then exit 1; fi` are taken to hold
        if name == "exit" and not (self.unsure or self.branches):
            self.script.stops = line
            raise _Stop
        if name == "break" and self.loops and not self.unsure:
            raise _Break

    def _set_arguments(self, words: tuple[str, ...]) -> None:
        """Takes over `set -- A B` and `shift N`. The arguments are unknown after a shift of which it
        is not known whether it runs, or by how many.
        """
        if words[0] == "set":
            self.arguments = words[words.index("--") + 1 :] if "--" in words else self.arguments
            return
        count = words[1] if len(words) > 1 else "1"
        if self.unsure or not re.fullmatch(r"[0-9]{1,6}", count):
            self.arguments = None
        elif self.arguments is not None and int(count) <= len(self.arguments):
            self.arguments = self.arguments[int(count) :]

    def _writes_or_runs(self, words: tuple[str, ...], node: Command) -> None:
        """Takes over `echo "$TEXT" > FILE`, and reads a script that was written so and is run now."""
        if words[0] in ("echo", "printf") and len(words) == 2 and node.written:
            file = self.text(node.written)
            if is_known(file) and not self.unsure:
                self.script.files[file] = words[1]
        for shell, name in pairwise(words):
            file = name.removeprefix("./")
            if shell in ("bash", "sh") and file in self.script.files and self.depth < 20:
                self._nested(self.script.files[file], node)

    def _nested(self, text: str, node: Command) -> None:
        """Reads a command that a word holds, as in `bash -c "torchrun ..."`."""
        try:
            self._run(parse(text))
        except AutoparError:
            self.script.commands.append((tuple(text.split()), node.end))

    def _source(self, name: str) -> None:
        # `source $(dirname $0)/common.sh`: the folder is not known, and is most often that of the script
        known = name.rpartition(CLOSE)[2].lstrip("/") if not is_known(name) else name
        text = self.read_file(known) if known and is_known(known) else None
        if text is None and _ENVIRONMENT.search(shown_value(name).strip()):
            return
        if text is None:
            self.script.unread.append(shown_value(name))
        else:
            self._run(parse(text))
