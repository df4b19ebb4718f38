"""Reads a launch script as a shell would expand it. Nothing is run: a command substitution and the
environment are values that are not known, and so are positional arguments that are not given.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import pairwise

from autopar.errors import AutoparError
from autopar.foreign.texts.assignments import ASSIGNMENT, Assignments
from autopar.foreign.texts.conditions import either
from autopar.foreign.texts.expansion import (
    LOST,
    Place,
    Script,
    ShellValue,
    is_known,
    shown_value,
    unknown,
)
from autopar.foreign.texts.shell_commands import Block, Node, ShellCommand, parse
from autopar.foreign.texts.shell_words import CLOSE, MOST_CHARACTERS, Word, WordPart

ReadFile = Callable[[str], str | None]
"""Returns the text of a file that a script reads with `source`, or None."""

_MOST_STEPS = 20_000
"""The most commands that are read, those of functions counted each time."""

_ENVIRONMENT = re.compile(
    r"(^|/)(\.(bash|zsh)rc|\.(bash_|z)?profile|etc/profile|activate|conda\.sh|setvars\.sh|modules?\.sh|lmod\.sh|init/\w+)$"
)
"""Files that set up the shell and its programs: no options of a training stand there."""
_PIPES = ("|", "|&")
_DECLARE = ("export", "declare", "local", "readonly", "typeset")


def read_script(
    text: str,
    read_file: ReadFile = lambda name: None,
    args: tuple[str, ...] | None = None,
    assumed: Mapping[Place, int] | None = None,
) -> Script:
    """A script with its words expanded, without running anything. `read_file(name)` gives the text
    of another script that it reads. `args` are its positional arguments; None if they are not
    known. `assumed` are branches, as in `Script`. Raises AutoparError for a text that is no script.
    """
    script = Script(assumed=dict(assumed or {}))
    script.variables |= _batch_variables(text)
    reader = _Reader(script, read_file)
    reader.arguments = args
    reader.run(parse(text))
    return script


def _batch_variables(text: str) -> dict[str, ShellValue]:
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
    found_values: dict[str, ShellValue] = {}
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


class ScriptFiles(Assignments):
    """Takes over what commands write to files."""

    def __init__(self, script: Script, read_file: ReadFile) -> None:
        super().__init__(script)
        self.read_file = read_file
        self.piped: str | None = None  # what `sed` hands to the next command

    def edits(self, words: tuple[str, ...], node: ShellCommand) -> None:
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

    def takes_document(self, words: tuple[str, ...], node: ShellCommand) -> bool:
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
        return words[0] == "read" and self.reads(words, text)


class _Stop(Exception):
    """The script ends here."""


class _Break(Exception):
    """The loop ends here."""


class _Continue(Exception):
    """The round of the loop ends here."""


class _Return(Exception):
    """The function, or the file that is read, ends here."""


def _shifts(nodes: Sequence[Node]) -> bool:
    """Whether one of the commands drops arguments."""
    shift = (WordPart("text", "shift", False),)
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
        yield from (found[1] for text in texts if (found := ASSIGNMENT.fullmatch(text)))


class _Reader(ScriptFiles):
    """Expands the commands of a script one after the other."""

    def __init__(self, script: Script, read_file: ReadFile) -> None:
        super().__init__(script, read_file)
        self.functions: dict[str, tuple[Node, ...]] = {}
        self.depth = self.branches = self.loops = 0

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
        status: bool | None = True  # whether the commands joined so far succeeded
        joined = ";"
        for node in nodes:
            self.script.steps += 1
            if self.script.steps > _MOST_STEPS:
                raise AutoparError(f"the script has more than {_MOST_STEPS:,} commands")
            # `test && command`: the command runs only if the test says so
            before = joined
            runs = True if before not in ("&&", "||") else status
            runs = not runs if before == "||" and runs is not None else runs
            self.unsure += runs is None
            joined = node.end
            if runs is not False and isinstance(node, ShellCommand):
                self._command(node)
            elif runs is not False and isinstance(node, Block):
                apart = before in _PIPES or joined in (*_PIPES, "&")
                self._subshell([replace(node, end=";")]) if apart else self._block(node)
            self.unsure -= runs is None
            if runs is not False and joined in ("&&", "||"):
                own = self.succeeds(node, self.functions)
                status = either(status, own, before == "||") if runs is None else own
        self.depth -= 1

    def _block(self, node: Block) -> None:
        if node.kind == "function":
            self.functions[node.name] = node.branches[0][1]
        elif node.kind == "group":
            body = node.branches[0][1]
            self._run(body) if node.name != "(" else self._subshell(body)
        elif node.kind == "if":
            self._if(node)
        elif node.kind == "case":
            self._case(node)
        else:
            self._loop(node)

    def _subshell(self, body: Sequence[Node]) -> None:
        """Reads a group in a shell of its own, whose variables end with it."""
        before = dict(self.script.variables), self.arguments, self.depth, self.branches
        with suppress(_Stop):
            self._run(body)
        self.script.variables, self.arguments, self.depth, self.branches = before
        self.script.stops = 0

    def _holds(self, nodes: Sequence[Node]) -> bool | None:
        """Whether a condition holds; None if the file does not tell. Programs in it are run."""
        truth = self.truth_of(nodes)
        for node in nodes:
            if isinstance(node, ShellCommand) and not self.is_test(node):
                first = node.words[:1] == ((WordPart("text", "!", False),),)
                self._command(replace(node, words=node.words[1:]) if first else node)
        return truth

    def _loop(self, node: Block) -> None:
        """Reads a loop that takes known arguments one after the other, with `shift`, as often as it
        runs. Any other loop is read once, as commands of which it is not known whether they run.
        """
        condition, body = node.branches[0]
        if node.name == "for":
            self._for(condition or (), body)
            return
        if node.name == "for((":
            head = condition[0] if condition else None
            self.counts(self.text(head.words[-1]) if isinstance(head, ShellCommand) else "")
            self._unsurely([body])
            return
        most = sys.maxsize
        while node.name in ("while", "until") and not self.unsure and _shifts(body):
            truth, left = self.truth_of(condition or ()), self.arguments
            ends = truth == (node.name == "until")
            # a round that drops no argument may be followed by any number of others
            if truth is None or left is None or (not ends and len(left) >= most):
                break
            most = len(left)
            if ends or self._round(body):
                # by options that are not among the arguments
                self.empty |= set(_assigned(body))
                return
        if _shifts(body):
            self.arguments = LOST  # each round has others
        self._unsurely([body])

    def _round(self, body: Sequence[Node]) -> bool:
        """Reads a round of a loop; whether it leaves the loop."""
        depth, branches = self.depth, self.branches
        self.loops += 1
        try:
            self._run(body)
            return False
        except _Continue:
            return False
        except _Break:
            return True
        finally:
            self.loops -= 1
            self.depth, self.branches = depth, branches

    def _for(self, head: Sequence[Node], body: Sequence[Node]) -> None:
        """Reads a loop over known arguments, or over one word, as often as it runs. Of another one
        it is not known which value its variable has: each may be a job of its own.
        """
        words = head[0].words if len(head) == 1 and isinstance(head[0], ShellCommand) else ()
        name = self.text(words[0]) if words else ""
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            self._unsurely([body])
            return
        values = self.arguments if len(words) == 1 else ()
        for word in words[2:]:
            values = (*(values or ()), *self.fields(word))
        is_list = len(words) == 1 or any(part.text in ("@", "*") for w in words[2:] for part in w)
        known = values is not None and all(map(is_known, values)) and not self.unsure
        files = any(re.search(r"[*?[]", part.text) for w in words[2:] for part in w
                    if part.kind == "text" and not part.quoted)  # fmt: skip
        known = known and not files
        if values is None or not known or not (is_list or len(values) == 1):
            listed = f", one of {' '.join(values)[:60]}" if values and known else ""
            self.script.variables[name] = unknown(f"${name}{listed}")
            self._unsurely([body])
            return
        for value in values:
            self.script.variables[name] = value
            if self._round(body):
                break
        self.empty |= set(_assigned(body)) if is_list else set()

    def _unsurely(self, bodies: Iterable[Sequence[Node]]) -> None:
        """Reads bodies of which it is not known whether they run."""
        self.unsure += 1
        for body in bodies:
            self._run(body)
        self.unsure -= 1

    def _if(self, node: Block) -> None:
        for number, (condition, body) in enumerate(node.branches):
            truth = True if condition is None else self._holds(condition)
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
        words = condition[0].words if condition and isinstance(condition[0], ShellCommand) else ()
        subject = "".join(self.text_in_test(word) for word in words[:1])
        if not is_known(subject):
            branch = self.script.branch((node.line, "case"), len(node.branches) - 1)
            bodies = [body for _, body in node.branches[1:]]
            self._unsurely(bodies) if branch is None else self._run(bodies[branch])
            return
        for number, (condition, body) in enumerate(node.branches[1:], 1):
            command = condition[0] if condition else None
            choices = command.words if isinstance(command, ShellCommand) else ()
            patterns = [self.pattern(choice) for choice in choices]
            if not all(map(is_known, patterns)):
                self._unsurely(body for _, body in node.branches[number:])
                return
            if any(fnmatchcase(subject, pattern) for pattern in patterns):
                self._run(body)
                return

    def _command(self, node: ShellCommand) -> None:
        arrays, at = dict(node.arrays), 0
        words, before = list(node.words), dict(self.script.variables)
        leads = len(words[0]) == 1 and words[0][0].kind == "text" if words else False
        declares = leads and words[0][0].text in _DECLARE
        if declares:
            at = 1
            self.declares(words)
        while at < len(words):
            if declares and (self.text(words[at]).startswith("-")):
                at += 1
                continue
            if not self.assign(words[at], arrays.get(at), node.line):
                break
            at += 1
        if declares or at == len(words):
            return
        if at:  # `NAME=4 torchrun`: the variable is that of the program alone
            of_program = set(self.script.variables.items()) - set(before.items())
            self.script.environment |= dict(of_program)
            self.script.variables = before
        expanded = tuple(field for word in words[at:] for field in self.fields(word))
        if expanded and node.document is not None and self.takes_document(expanded, node):
            return
        if expanded and expanded[0] == "sed":
            self.edits(expanded, node)
        elif expanded:
            self.piped = None
            if expanded[0] in self.functions:
                self._takes_one_word(words[at + 1 :])
            self._call(expanded, node)

    def _takes_one_word(self, words: Sequence[Word]) -> None:
        """A note for each unquoted word that is not known, and may be none or several for bash."""
        for word in words:
            text = self.text(word)
            if not is_known(text) and not all(part.quoted or part.kind == "text" for part in word):
                self.script.note(f"{shown_value(text)} is taken to be one word")

    def _call(self, words: tuple[str, ...], node: ShellCommand) -> None:
        name = words[0]
        if name in self.functions:
            self._function(name, words[1:])
        elif self.sets(words, node.line):
            return
        elif name in ("source", ".") and len(words) > 1:
            self._source(words[1], node.line)
        elif name in ("exit", "return", "break", "continue"):
            self._ends(words, node.line)
        elif name == "eval" and len(words) > 1:
            self._nested(" ".join(words[1:]), node)
        elif name == "exec" and len(words) > 1:
            self._call(words[1:], node)
        else:
            self.script.commands.append((words, node.end))
            self._writes_or_runs(words, node)
            for word in words[1:]:
                if re.search(r"\s--?\w", word) and re.search(r"\s", word.strip()):
                    self._nested(word, node)

    def _function(self, name: str, arguments: tuple[str, ...]) -> None:
        """Reads a function that is called. What it declares as local has its old value then."""
        before = self.arguments, self.locals, self.depth, self.branches
        self.arguments, self.locals = arguments, {}
        try:
            self._run(self.functions[name])
        except _Return:
            pass
        finally:
            for local, value in self.locals.items():
                self.script.variables.pop(local, None)
                self.script.variables |= {} if value is None else {local: value}
            self.arguments, self.locals, self.depth, self.branches = before

    def _ends(self, words: tuple[str, ...], line: int) -> None:
        """Leaves the script, a function or a loop, if the command certainly runs."""
        # guards such as `if [ -z "$DATA" ]; then exit 1; fi` are taken to hold
        name = words[0]
        if self.unsure:
            return
        if name == "exit" and not self.branches:
            self.script.stops = line
            raise _Stop
        if name == "return" and self.locals is not None:
            raise _Return
        if name == "break" and self.loops:
            raise _Break
        if name == "continue" and self.loops:
            raise _Continue

    def _writes_or_runs(self, words: tuple[str, ...], node: ShellCommand) -> None:
        """Takes over `echo "$TEXT" > FILE`, and reads a script that was written so and is run now."""
        if words[0] in ("echo", "printf") and len(words) == 2 and node.written:
            file = self.text(node.written)
            if is_known(file) and not self.unsure:
                self.script.files[file] = words[1]
        for shell, name in pairwise(words):
            file = name.removeprefix("./")
            if shell in ("bash", "sh") and file in self.script.files and self.depth < 20:
                self._nested(self.script.files[file], node)

    def _nested(self, text: str, node: ShellCommand) -> None:
        """Reads a command that a word holds, as in `bash -c "torchrun ..."`."""
        try:
            self._run(parse(text))
        except AutoparError:
            self.script.commands.append((tuple(text.split()), node.end))

    def _source(self, name: str, line: int) -> None:
        # `source $(dirname $0)/common.sh`: the folder is not known, and is most often that of the script
        known = name.rpartition(CLOSE)[2].lstrip("/") if not is_known(name) else name
        text = self.read_file(known) if known and is_known(known) else None
        if text is None and _ENVIRONMENT.search(shown_value(name).strip()):
            return
        if text is None:
            place = self.script.unread.setdefault(shown_value(name), (line, "source"))
            if self.script.branch(place, 1) is not None:
                names = self.script.variables
                names.update({name: unknown(f"${name}") for name in names})
        else:
            self._run(parse(text))
