"""A target: another framework, as data and a few functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from autopar.errors import AutoparError
from autopar.request.frameworks import software_of
from autopar.request.restriction import Limit, Only, Restriction
from autopar.request.software import Software
from autopar.targets.expansion import Place, Script
from autopar.targets.job import Exported, Finding, Job, ModelShape
from autopar.targets.shell import ReadFile, read_script


class NotExpressible(AutoparError):
    """A plan that a framework cannot run. The message names what cannot be said."""


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
        name: how users name it.
        title: its name in words, with the version that is written for.
        reads: whether a file looks like a job of this framework.
        read: the job of such a file.
        refusals: what the framework refuses at start, for a job on a number of devices.
        restriction: what it can run, for a model and tokens of a sequence.
        write: a job in its form.  Raises NotExpressible.
        software: the words by which predictions choose the software's facts.
        flags: a job's options in its form, by name; differences of two jobs are told in these.
        aliases: other names.
        dashes: what stands before the name of an option.
        sharding: what shards with ZeRO-1, a row of `SHARDINGS`.
        zero: the ZeRO stages that it has.
        sequence_parallel: whether tp can shard the activations between products.
        overlaps: whether its texts say that gradients are reduced beside compute.
        stages: (stages of a rank, layers of each stage) of a job whose model is not that of its file.
        words: a job's options in the form and release of the file that it was read from, by name;
            None if those are `flags`.
        aspects: what options say of a layout, each option in one of them.
        held: the pins that a job's file cannot change.
        within: what the release or the fork of a job's file can run of what the framework can.
    """

    name: str
    title: str
    reads: Callable[[SourceFile], bool]
    read: Callable[[SourceFile], Job]
    refusals: Callable[[Job, int], list[Finding]]
    restriction: Callable[[ModelShape, int], Restriction]
    write: Callable[[Job], Exported]
    software: str
    flags: Callable[[Job], dict[str, str]]
    aliases: tuple[str, ...] = ()
    dashes: str = ""
    sharding: str = "fsdp"
    zero: tuple[int, ...] = (0, 1, 2, 3)
    sequence_parallel: bool = True
    overlaps: bool = False
    stages: Callable[[Job], tuple[int, tuple[int, ...]]] | None = None
    words: Callable[[Job], dict[str, str]] | None = None
    aspects: tuple[Aspect, ...] = ()
    held: Callable[[Job], Mapping[str, Any]] | None = None
    within: Callable[[Job, Restriction], Restriction] | None = None

    def software_for(self, generation: str, **facts: Any) -> Software:
        """How the framework runs a plan, for devices of a generation such as 'hopper'. `facts` are
        further fields of `FrameworkJob`.
        """
        zero = 1 if self.sharding == "dist_optimizer" else self.zero[-1]
        known: dict[str, Any] = {"sharding": self.sharding, "zero": zero} | facts
        if not known["zero"]:
            known["sharding"] = "none"
        found = software_of(self.software, generation=generation, **known)
        return replace(found, dp_overlap=True) if self.overlaps else found


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


NO_PIPELINE = Only((1,), "has no pipeline")
NO_EXPERTS = Only((1,), "has no expert parallelism")
NO_CONTEXT = Only((1,), "has no context parallelism")
ONE_STAGE = Only((1,), "has one stage on a rank of the pipeline")
WHOLE_POSITIONS = Only((False,), "leaves activations between products whole over tp")
NO_OFFLOAD = Only(("none",), "has nothing in host memory")
OFFLOADS_ALL = Only(
    ("none", "parameters"), "moves the optimizer to host memory with the parameters alone"
)
OFFLOADS_OPTIMIZER = Only(("none", "optimizer"), "moves no parameters to host memory")
"""What several frameworks lack, by pin."""

ONE_ORDER = Limit("has one order of ranks", "no order", lambda choice: choice.mesh.order == "")
WHOLE_SHARDS = Limit(
    "shares out over all data-parallel ranks", "no shard", lambda choice: not choice.shard
)
"""Rules of several frameworks about layouts."""


def even_heads(shape: ModelShape) -> Limit:
    """The rule that tp shares out the heads of keys and values evenly, as far as they are known."""
    heads = shape.kv_heads or shape.heads
    return Limit(
        f"shares out {heads} heads of keys and values evenly over tp",
        f"a tp that divides {heads}",
        lambda choice: not (heads and heads % choice.mesh.tp),
    )


def even_experts(shape: ModelShape) -> Limit:
    """The rule that ep shares out the experts evenly."""
    experts = shape.experts
    return Limit(
        f"shares out {experts} experts evenly over ep",
        f"an ep that divides {experts}" if experts else "ep=1",
        lambda choice: choice.mesh.ep == 1 or (experts > 0 and experts % choice.mesh.ep == 0),
    )


def even_positions(seq: int) -> Limit:
    """The rule that 2 cp divides the tokens of a sequence."""
    return Limit(
        f"shares out {seq} tokens evenly over 2 cp",
        f"a cp whose double divides {seq}",
        lambda choice: choice.mesh.cp == 1 or seq % (2 * choice.mesh.cp) == 0,
    )


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
