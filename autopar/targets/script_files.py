"""The files that commands of a script write, as texts. No file is written."""

from __future__ import annotations

import re
from collections.abc import Callable

from autopar.targets.assignments import Assignments
from autopar.targets.expansion import Script, is_known
from autopar.targets.shell_commands import ShellCommand
from autopar.targets.shell_words import MOST_CHARACTERS

ReadFile = Callable[[str], str | None]
"""Returns the text of a file that a script reads with `source`, or None."""


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
