"""A target: another framework, as data and a few functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.errors import AutoparError
from autopar.foreign.job import Exported, Finding, Job
from autopar.foreign.limits.frameworks import FrameworkLimits
from autopar.foreign.texts.expansion import Place, Script
from autopar.foreign.texts.shell import ReadFile, read_script
from autopar.request.restriction import Restriction


class NotExpressible(AutoparError):
    """A plan that a framework cannot run. The message names what cannot be said."""


def said(options: Mapping[str, object]) -> dict[str, str]:
    """Options by name, as texts. True is '', a switch that is on. None and False are left out."""
    values = {name: value for name, value in options.items() if value is not None}
    return {n: "" if v is True else str(v) for n, v in values.items() if v is not False}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """The text of a file, its name, and how files beside it are read. `function` is the one that a
    Python file is read for; '' for the first that has a configuration. `args` are the arguments of
    a script; None if they are not known. `read_module` reads a file by its exact path from the
    folder, such as '../common.py'. `assumed` are branches of a script, as in `Script`.
    """

    text: str
    name: str = "file"
    read_file: ReadFile = lambda name: None
    function: str = ""
    args: tuple[str, ...] | None = None
    read_module: ReadFile = lambda name: None
    assumed: Mapping[Place, int] = field(default_factory=dict)

    def script(self) -> Script:
        """The text as a script, expanded. Raises AutoparError if it is none."""
        return read_script(self.text, self.read_file, self.args, self.assumed)


@dataclass(frozen=True, slots=True)
class Aspect:
    """One thing that a layout says, in a framework's options.

    Attributes:
        fields: the fields of `Layout` that say it.
        options: a pattern of the options that say it, with underscores for hyphens.
    """

    fields: tuple[str, ...]
    options: str


@dataclass(frozen=True, slots=True)
class Target:
    """Another framework.

    Attributes:
        limits: what it can run, and its software.
        reads: whether a file looks like a job of this framework.
        read: the job of such a file.
        refusals: what the framework refuses at start, for a job on a number of devices.
        write: a job in its form.  Raises NotExpressible.
        flags: a job's options in its form, by name; differences of two jobs are told in these.
        dashes: what stands before the name of an option.
        stages: (stages of a rank, layers of each stage) of a job whose model is not that of its file.
        words: a job's options in the form and release of the file that it was read from, by name;
            None if those are `flags`.
        aspects: what options say of a layout, each option in one of them.
        held: the pins that a job's file cannot change.
        within: what the release or the fork of a job's file can run of what the framework can.
    """

    limits: FrameworkLimits
    reads: Callable[[SourceFile], bool]
    read: Callable[[SourceFile], Job]
    refusals: Callable[[Job, int], list[Finding]]
    write: Callable[[Job], Exported]
    flags: Callable[[Job], dict[str, str]]
    dashes: str = ""
    stages: Callable[[Job], tuple[int, tuple[int, ...]]] | None = None
    words: Callable[[Job], dict[str, str]] | None = None
    aspects: tuple[Aspect, ...] = ()
    held: Callable[[Job], Mapping[str, Any]] | None = None
    within: Callable[[Job, Restriction], Restriction] | None = None

    @property
    def name(self) -> str:
        """How users name it."""
        return self.limits.name

    @property
    def title(self) -> str:
        """Its name in words, with the version that is written for."""
        return self.limits.title


def nodes_of(job: Job) -> tuple[int, int]:
    """(devices of a node, number of nodes) of a job, whose product is its number of devices; up to 8
    devices are one node by default.
    """
    gpus = job.gpus or job.layout.least_gpus
    most = min(job.gpus_per_node or 8, gpus)
    per_node = next(number for number in range(most, 0, -1) if gpus % number == 0)
    return per_node, gpus // per_node


def torchrun(job: Job) -> str:
    """The beginning of the command that starts a job on all its devices."""
    per_node, nodes = nodes_of(job)
    return f"torchrun --nproc-per-node {per_node} --nnodes {nodes}"


def head_findings(job: Job, theirs: str, option: str) -> Iterator[Finding]:
    """A finding for each kind of attention heads that tp does not divide. `theirs` are the words of
    the framework, `option` how its option of tp begins.
    """
    tp, shape = job.layout.tp, job.shape
    kinds = (("attention heads", shape.heads), ("heads of keys and values", shape.kv_heads))
    for words, heads in kinds:
        if heads and heads % tp:
            legal = tuple(f"{option} {d}" for d in divisors_near(heads, tp))
            yield Finding("refused", f"tp={tp} does not divide {heads} {words}", theirs, legal)


def divisors_near(number: int, value: int) -> list[int]:
    """The divisors of `number` next to `value`: the largest one below and the smallest above."""
    found = [d for d in range(1, min(number, 100_000) + 1) if number % d == 0]
    below, above = [d for d in found if d < value], [d for d in found if d > value]
    return below[-1:] + above[:1]


def multiples_near(unit: int, value: int) -> list[int]:
    """The multiples of `unit` next to `value`, without 0."""
    below = value // unit * unit
    return [number for number in (below, below + unit) if number > 0]


VOCABULARIES = (
    (r"llama[-_]?3", 128256), (r"llama[-_]?2|codellama", 32000), (r"mixtral|mistral[-_]?7b", 32000),
    (r"qwen[-_.]?(2|2\.5|3)", 151936), (r"deepseek[-_]?v3|deepseek[-_]?r1", 129280), (r"deepseek[-_]?v2", 102400),
    (r"gemma[-_]?2", 256000), (r"gpt2|gpt-2", 50257),
)  # fmt: skip
"""Tokens of the vocabularies of public models, by words in the path of a tokenizer: `vocab_size` of
their config.json files on Hugging Face.
"""


def vocabulary_of(path: str) -> int:
    """The vocabulary of a public tokenizer, by words in its path; 0 if it is not known."""
    return next((size for pattern, size in VOCABULARIES if re.search(pattern, path, re.I)), 0)
