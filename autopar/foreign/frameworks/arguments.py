"""The options of a job by name, and what is wrong with their values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.job import Finding, Job, Unmodelled
from autopar.foreign.texts.expansion import Script, is_known, shown_value
from autopar.foreign.texts.shell_words import CLOSE, OPEN

_TRUE = ("", "true", "1", "yes", "on")
_NONE = ("none", "null")
_FALSE = ("false", "0", "no", "off", *_NONE)
_EMPTY = ("[]", "{}")
DEVICE_COUNTS = ("num_nodes", "nnodes", "nproc_per_node", "devices", "world_size", "gpus_per_node", "n_gpus_per_node",
           "num_gpus", "num_gpus_per_node", "actor_num_nodes", "actor_num_gpus_per_node", "num_processes", "num_machines",
           "data_parallel_size")  # fmt: skip
"""Options that count devices, by the last part of their names."""


def is_none(text: str) -> bool:
    """Whether a value says that an option is not set."""
    return text.strip().lower() in _NONE


def is_true(text: str) -> bool:
    """Whether a value switches an option on; '' is a switch by its name alone."""
    return text.strip().lower() in _TRUE


def is_false(text: str) -> bool:
    """Whether a value switches an option off, or says that it is not set."""
    return text.strip().lower() in _FALSE


class Arguments:
    """Options by name, as texts. A name has underscores and no leading hyphens. Reading an option
    marks it as read; `rest` has the others, and `open` those that were read and are not known.
    Findings are added to the list `findings`, if given.
    """

    def __init__(self, values: Mapping[str, str], findings: list[Finding] | None = None) -> None:
        self.values = dict(values)
        self.read: set[str] = set()
        self.open: set[str] = set()
        self.findings = [] if findings is None else findings
        self.unmodelled: list[Unmodelled] = []

    def find(self, kind: str, what: str, theirs: str = "", legal: Iterable[str] = ()) -> None:
        """Adds a finding, once."""
        found = Finding(kind, what, theirs, tuple(legal))
        if found not in self.findings:
            self.findings.append(found)

    def leave_out(self, what: str, option: str = "", moves: str = "both") -> None:
        """Says that no price counts a part of the job."""
        self.unmodelled.append(Unmodelled(what, option, moves))

    def text(self, *names: str) -> str | None:
        """The text of the first of these options that is set; None if none is, or if it is not
        known. An option without a value is ''.
        """
        for name in names:
            value = self.values.get(name)
            if value is None or is_none(value):
                self.read.update(n for n in (name,) if value is not None)
                continue
            self.read.add(name)
            if not is_known(value):
                self._unknown(name, value)
                return None
            return value.strip()
        return None

    def whole(self, *names: str, least: int = 1) -> int | None:
        """The whole number of the first of these options that is set, or None."""
        text = self.text(*names)
        if text is None:
            return None
        digits = text.replace("_", "").replace(",", "")
        if re.fullmatch(r"[+]?\d{1,15}(\.0+)?", digits):
            value = int(float(digits))
            if value >= least:
                return value
            if value == 0:
                self.find("refused", f"{self._name(names)} is {text}, and must be at least {least}")
                return None
        self.open.add(self._name(names))
        self.find("unknown", f"{self._name(names)} is {text!r}, which is no whole number: give one")
        return None

    def flag(self, *names: str) -> bool | None:
        """Whether the first of these options that is set is on; None if none is."""
        text = self.text(*names)
        if text is None:
            return False if any(is_none(self.values.get(n, "")) for n in names) else None
        if is_true(text) or is_false(text):
            return is_true(text)
        self.open.add(self._name(names))
        self.find("unknown", f"{self._name(names)} is {text!r}, which is neither true nor false")
        return None

    def number(self, *names: str) -> float | None:
        """The number of the first of these options that is set, or None."""
        text = self.text(*names)
        try:
            return None if text is None else float(text)
        except ValueError:
            self.open.add(self._name(names))
            self.find("unknown", f"{self._name(names)} is {text!r}, which is no number")
            return None

    def _name(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if name in self.values), names[0])

    def _unknown(self, name: str, value: str) -> None:
        self.open.add(name)
        shown = shown_value(value)
        what = f"{name} is {shown}, which cannot be determined from the file"
        if name.rpartition(".")[2] in DEVICE_COUNTS:
            self.find("note", f"{what}: the devices are those of the cluster")
            return
        legal: tuple[str, ...] = (f"write the value of {name} in its place",)
        if re.search(r"\$\{?[1-9@*]", shown):
            legal += ("give the arguments of the script behind --",)
        self.find("unknown", what, legal=legal)

    def job(self, framework: str, neutral: re.Pattern[str] | None = None, **fields: Any) -> Job:
        """The job with these fields, the options that were read, those without a price and what was
        found. Options that match `neutral` need no price; without it none is listed.
        """
        set_ = {name: value for name, value in self.values.items() if not is_none(value)}
        flags = {name: value for name, value in set_.items() if name in self.read}
        unpriced = self.rest(neutral) if neutral else ()
        return Job(
            framework,
            flags=flags,
            unpriced=unpriced,
            findings=tuple(self.findings),
            unmodelled=tuple(self.unmodelled),
            **fields,
        )

    def rest(self, neutral: re.Pattern[str]) -> tuple[str, ...]:
        """The options that were not read, do not match `neutral` and are not off, as `name=value`."""
        left = [
            name
            for name, value in self.values.items()
            if name not in self.read
            and not neutral.fullmatch(name)
            and not is_false(value)
            and value not in _EMPTY
        ]
        return tuple(
            f"{name}={shown_value(self.values[name])[:60]}" if self.values[name] else name
            for name in left
        )


def note_model(args: Arguments, *names: str) -> None:
    """Adds a note on the model that the first of these options names, if one is set: its dimensions
    stand elsewhere.
    """
    name = next((name for name in names if not is_none(args.values.get(name, "none"))), "")
    args.read.add(name)
    if name:
        model = shown_value(args.values[name])
        args.find("note", f"the model is {model}: give its dimensions with --model")


def unread_files(script: Script) -> list[Finding]:
    """A finding for each file that a script reads and that is not there."""
    return [unread_file(name) for name in script.unread]


def unread_file(name: str) -> Finding:
    """The finding for a file that a script reads and that is not there."""
    what = f"the script reads {name}, which is not beside it: values may stand there"
    return Finding("unknown", what, legal=(f"put {name} beside the file",))


def may_be_options(word: str) -> bool:
    """Whether a word is a value that is not known and whose name promises options, such as
    `$EXTRA_ARGS`.
    """
    inner = re.fullmatch(f"{OPEN}([^{CLOSE}]*){CLOSE}", word)
    return (
        inner is not None
        and re.match(r"\W*\w*(arg|opt|flag|param|cmd)", inner[1], re.I) is not None
    )


def options_of(words: Iterable[str]) -> dict[str, str]:
    """The options of a command: `--name value`, `--name=value` and `--name`, with underscores for
    hyphens. Several values are joined by a blank. The last one of a name counts.
    """
    found: dict[str, str] = {}
    name = ""
    for word in words:
        option = re.match(r"--?([A-Za-z][\w.-]*)(?:=(.*))?$", word, re.DOTALL)
        if re.fullmatch(r"-[A-Za-z]", word):  # of the interpreter or of srun
            name = ""
        elif option:
            name = option[1].replace("-", "_")
            found[name] = option[2] or ""
            name = "" if option[2] is not None else name
        elif word.endswith(".py"):  # the program behind the launcher's options
            name = ""
        elif name and not may_be_options(word):
            found[name] = f"{found[name]} {word}".strip()
    return found


def read_mapping(text: str, what: str) -> Mapping[str, object]:
    """The mapping of a YAML or JSON text. JSON may have comments, tabs, and commas at the end. Tags
    make no objects, and of a key that is given twice the last value counts. Raises AutoparError if it
    is no mapping.
    """
    import yaml

    from autopar.ir.yaml_text import read_yaml

    is_json = text.lstrip("\ufeff \t\r\n")[:1] in ("{", "/", "#") and "{" in text
    try:
        data = _read_json(text) if is_json else None
        data = read_yaml(text, last_counts=True) if data is None else data
    except yaml.YAMLError as error:
        raise AutoparError(f"{what} cannot be read: {' '.join(str(error).split())[:300]}") from None
    if not isinstance(data, Mapping):
        raise AutoparError(f"{what} is no mapping of options to values")
    return {str(key): value for key, value in data.items()}


def _read_json(text: str) -> object:
    """The data of a JSON text with comments; None if it is none, and may be YAML."""
    try:
        return json.loads(without_comments(text).lstrip("\ufeff"), strict=False)
    except (ValueError, RecursionError):
        pass
    # what is left of JSON is YAML, in which a tab is no indentation
    from autopar.ir.yaml_text import read_yaml

    if text.lstrip("\ufeff \t\r\n").startswith("#") and not re.match(r"(\s*#[^\n]*\n)*\s*\{", text):
        return None
    plain = re.sub(
        r"^[ \t]+", lambda match: match[0].replace("\t", "    "), without_comments(text), flags=re.M
    )
    return read_yaml(plain, last_counts=True)


def without_comments(text: str) -> str:
    """A JSON text without `//`, `#` and `/* */` comments and without commas before a closing bracket."""
    pattern = r'("(?:\\.|[^"\\])*")|//[^\n]*|#[^\n]*|/\*.*?\*/'
    bare = re.sub(pattern, lambda match: match[1] or "", text, flags=re.DOTALL)
    return re.sub(r'("(?:\\.|[^"\\])*")|,(\s*[}\]])', lambda m: m[1] or m[2], bare)


def flat_texts(data: Mapping[str, object]) -> dict[str, str]:
    """Nested data by dotted path, as texts."""
    return {path: str(value) for path, value in flat(data).items()}


def flat(data: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Every value of nested mappings by its path, such as `model.hidden_size`."""
    found: dict[str, object] = {}
    for key, value in data.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found |= flat({str(k): v for k, v in value.items()}, f"{path}.")
        else:
            found[path] = value
    return found
