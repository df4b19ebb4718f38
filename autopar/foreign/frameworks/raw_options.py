"""All options of a job's file by path, whether its reader knows them or not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.frameworks.arguments import flat, is_false, options_of, read_mapping
from autopar.foreign.frameworks.extended import extended_mapping
from autopar.foreign.job import Job
from autopar.foreign.target import SourceFile
from autopar.foreign.texts.expansion import is_known, shown_value, unknown
from autopar.foreign.texts.shell import read_script

_OFF = ("", "[]", "{}", "0.0", "()", "''", '""')
_FILES = (
    "deepspeed", "deepspeed_config", "ds_config", "deepspeed_config_file", "config_file", "fsdp_config", "fsdp", "config",
)  # fmt: skip
"""Options that name a file with more options of the job."""
_TRAINERS = ("accelerate", "deepspeed", "transformers")
"""Targets whose Python files are programs, not recipes."""
_OVERRIDE = re.compile(r"[+~]{0,2}([A-Za-z_][\w@/]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)
_SERVER = re.compile(
    r"vllm[ _-]serve|vllm\.entrypoints|sglang\.launch_server|sglang_router|swift (rollout|deploy)|axolotl vllm-serve"
)
"""Programs that answer requests beside a training."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The options of a job as its file has them.

    Attributes:
        values: texts by path, with underscores for hyphens. A switch by its name alone has the text
            'true', and an option that is off or not set is left out.
        off: the paths of the options that are off.
        program: the words of the command that starts the job, or the name of a Python file.
        called: the names that a Python file calls.
        servers: commands that start an engine beside the job.
        texts: the texts of all options by path, as they stand in the file.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    off: tuple[str, ...] = ()
    program: str = ""
    called: str = ""
    servers: tuple[str, ...] = ()
    texts: Mapping[str, str] = field(default_factory=dict)

    def path(self, end: str) -> str:
        """The path of the first option that is on and whose path is or ends with `end`; or ''."""
        ends = (path for path in self.values if path == end or path.endswith(f".{end}"))
        return next(ends, "")

    def text(self, *ends: str) -> str:
        """The text of the first of these options that is on, by the ends of their paths; or ''."""
        return next((self.values[path] for end in ends if (path := self.path(end))), "")

    def is_off(self, end: str) -> bool:
        """Whether an option whose path is or ends with `end` is off."""
        return any(path == end or path.endswith(f".{end}") for path in self.off)


def shown_option(path: str, value: str) -> str:
    """An option for a message."""
    return path if value == "true" else f"{path}={shown_value(value)[:60]}"


def options_of_job(source: SourceFile, job: Job) -> JobOptions:
    """The options in the file of a job. Where a file has several commands or functions, those of the
    one with most of the options that were read for the job.
    """
    suffix = source.name.rsplit(".", 1)[-1].lower()
    try:
        if suffix in ("yaml", "yml", "json", "toml"):
            return _options(_texts(_of_data(source, suffix)), source, program=source.name)
        return _of_python(source, job) if suffix == "py" else _of_script(source, job)
    except AutoparError:
        return JobOptions()


def _options(texts: Mapping[str, str], source: SourceFile, **fields: Any) -> JobOptions:
    """Options from texts by path, with those of the files that they name."""
    plain = {re.sub(r"^[+~]*", "", path).replace("-", "_"): text for path, text in texts.items()}
    own = dict(plain)
    plain |= _of_files(plain, source)
    values: dict[str, str] = {}
    for path, text in plain.items():
        value = text.strip()
        if not is_false(value) and value not in _OFF:
            values[path] = "true" if value.lower() in ("true", "yes", "on") else value
    off = tuple(path for path in plain if path not in values)
    return JobOptions(values, off, texts=own, **fields)


def _of_data(source: SourceFile, suffix: str) -> Mapping[str, object]:
    if suffix == "toml":
        import tomllib

        try:
            return flat(tomllib.loads(source.text))
        except tomllib.TOMLDecodeError:
            return {}
    return flat(extended_mapping(source)[0])


def _texts(values: Mapping[str, object]) -> dict[str, str]:
    return {path: str(value) for path, value in values.items()}


def _of_python(source: SourceFile, job: Job) -> JobOptions:
    try:
        tree = ast.parse(source.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return JobOptions()
    called, values = list[str](), dict[str, str]()
    for node in _parts(tree, source.function, job):
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                name = ast.unparse(inner.func).rpartition(".")[2]
                named = [(key.arg, key.value) for key in inner.keywords if key.arg]
                called += [name, *(ast.unparse(arg).rpartition(".")[2] for arg in inner.args[:1])]
                values |= {f"{name}.{key}": _text(value) for key, value in named}
                values |= {f"{name}.0": _text(inner.args[0])} if inner.args else {}
            elif isinstance(inner, ast.Assign):
                targets = [t for t in inner.targets if isinstance(t, ast.Attribute)]
                values |= {ast.unparse(t).partition(".")[2]: _text(inner.value) for t in targets}
    return _options(values, source, program=source.name, called=" ".join(called))


def _parts(tree: ast.Module, function: str, job: Job) -> list[ast.AST]:
    """The statements that a job is read from: a recipe is one function with those that it calls."""
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if not functions or (job.framework in _TRAINERS and not function):
        return [tree]
    names = set(job.flags)

    def words(node: ast.AST) -> set[str]:
        found = {key.arg for n in ast.walk(node) if isinstance(n, ast.Call) for key in n.keywords}
        found |= {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        return {word for word in found if word}

    first = functions.get(function) or max(
        functions.values(), key=lambda node: len(names & words(node))
    )
    parts: dict[str, ast.AST] = {first.name: first}
    for node in ast.walk(first):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            parts |= {n: functions[n] for n in (node.func.id,) if n in functions}
    return list(parts.values())


def _text(node: ast.expr) -> str:
    try:
        return str(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return unknown(ast.unparse(node)[:60])


def _of_script(source: SourceFile, job: Job) -> JobOptions:
    script = read_script(source.text, source.read_file, source.args)
    names, best, program = set(job.flags), dict[str, str](), ""
    servers: list[str] = []
    for _, words in script.programs():
        line = " ".join(filter(is_known, words[:6]))
        if _SERVER.search(line):
            servers.append(line[:80])
            continue
        values = command_options(words)
        if not program or len(names & _ends(values)) > len(names & _ends(best)):
            best, program = values, _program(words)
    texts = {path: value or "true" for path, value in best.items()}
    read = replace(source, read_file=script.reader(source.read_file))
    return _options(texts, read, program=program, servers=tuple(servers))


_PROGRAM = re.compile(r"[\w./-]+\.py|openrlhf(\.[\w.]+)?|verl\.[\w.]+|swift")


def _program(words: Sequence[str]) -> str:
    """What a command starts: its words before the first option behind the program."""
    named = [n for n, word in enumerate(words) if _PROGRAM.fullmatch(word)]
    end = named[0] + 2 if named else 4
    return " ".join(word for word in words[:end] if not word.startswith("-") and is_known(word))


def _ends(values: Mapping[str, str]) -> set[str]:
    return {*values, *(path.rpartition(".")[2] for path in values)}


def command_options(words: Iterable[str]) -> dict[str, str]:
    """The options of a command and its overrides in Hydra's form, by path."""
    words = tuple(words)
    found = options_of(words)
    for word in words:
        if not word.startswith("-") and (match := _OVERRIDE.fullmatch(word)):
            found[match[1].replace("-", "_")] = match[2]
    return found


def _of_files(values: Mapping[str, str], source: SourceFile) -> dict[str, str]:
    """The options in the files that options name, each under the name of its option."""
    found: dict[str, str] = {}
    for path, name in values.items():
        option = path.rpartition(".")[2]
        if option not in _FILES or not re.search(r"\.(json|ya?ml)$", name):
            continue
        try:
            text = source.read_file(name)
            inner = flat(read_mapping(text, name)) if text is not None else {}
        except AutoparError:
            continue
        found |= {f"{option}.{key}": str(value) for key, value in inner.items()}
    return found
