"""A training job as another framework's file says it, and what is found in it, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from typing import Any

from autopar.ir.layout import Layout
from autopar.ir.model_shape import ModelShape

_KINDS = ("refused", "unknown", "contradiction", "note")
"""Kinds of findings. In order: the framework refuses to start; the file does not tell a value;
names, comments or options contradict each other; what else a user should know.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something found in a job.

    Attributes:
        kind: one of `_KINDS`.
        what: what is wrong, with the values.
        theirs: the framework's own words, or ''.
        legal: the nearest values that are legal, each with its option; () if there are none.
    """

    kind: str
    what: str
    theirs: str = ""
    legal: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(f"kind of finding {self.kind!r} is not one of {_KINDS}")

    def __str__(self) -> str:
        words = self.what + (f' ("{self.theirs}")' if self.theirs else "")
        return words + (f"; legal: {', '.join(self.legal)}" if self.legal else "")


WEIGHTS = ("memory", "time", "both")
"""What an unmodelled part of a job moves."""
PLACES = ("beside", "inside", "instead")
"""Where an unmodelled part of a job lies. A rollout engine lies beside training, on its devices. An
option of weight lies inside training. Adapters stand in the place of what autopar prices.
"""


@dataclass(frozen=True, slots=True)
class Unmodelled:
    """A part of a job that no price counts, and that moves memory or time by more than 2 %. No
    verdict (fits, a chance, a better plan) stands on the price of such a job.

    Attributes:
        what: the part, such as 'a rollout engine (vLLM) with 60 % of the memory'.
        option: the option that says it, with its value.
        moves: one of `WEIGHTS`.
        place: one of `PLACES`. The job has a price without parts that are beside or inside training,
            and none with one in its place.
    """

    what: str
    option: str = ""
    moves: str = "both"
    place: str = "inside"

    def __post_init__(self) -> None:
        if self.moves not in WEIGHTS:
            raise ValueError(f"moves={self.moves!r} is not one of {WEIGHTS}")
        if self.place not in PLACES:
            raise ValueError(f"place={self.place!r} is not one of {PLACES}")

    def __str__(self) -> str:
        return f"{self.what} ({self.option})" if self.option else self.what


@dataclass(frozen=True, slots=True)
class Facts:
    """What a job says of precision and software, as far as it changes time and memory. None means
    that the file does not say it.

    `precision` is 'bf16', 'fp16' or 'fp32'. `fp8` is the scaling of fp8 products, or ''. `grads` is
    the dtype of gradients. The overlaps say whether communication over that axis runs beside
    compute.
    """

    precision: str = "bf16"
    fp8: str = ""
    grads: str | None = None
    dp_overlap: bool | None = None
    tp_overlap: bool | None = None
    pp_overlap: bool | None = None
    compile: bool | None = None
    optimizer: str | None = None
    dropout: float | None = None
    fused_loss: bool | None = None
    fused_accumulation: bool | None = None


@dataclass(frozen=True, slots=True)
class FilePart:
    """A file that the file of a job names, and whose values count more than those of that file.

    Attributes:
        under: the path of the key under which its values stand.
        name: its path, from the folder of the job.
        text: its text.
    """

    under: str
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class JobFile:
    """The file that a job was read from.

    Attributes:
        text: its text.
        name: its name.
        read: reads a job from another text in its place, with other texts of files by name.
        options: all options by path, with underscores for hyphens, as texts.
        function: the function of a Python file that it was read from; '' for the first that fits.
        parts: files whose values count more.
    """

    text: str
    name: str
    read: Callable[[str, Mapping[str, str]], Job]
    options: Mapping[str, str]
    function: str = ""
    parts: tuple[FilePart, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A training job of another framework.

    Attributes:
        framework: the name of the target, such as 'megatron'.
        shape: the dimensions of the model, as far as the file says them.
        layout: how it is laid out over devices.
        gpus: the number of devices, or None if the file does not say it.
        gpus_per_node: devices of a node, or None.
        seq: tokens of a sequence, or None.
        facts: precision and software.
        flags: every option of the file that sets shape, layout or facts, with its text.
        unpriced: options that may change time or memory and that no price takes into account.
        findings: what was found while reading.
        unmodelled: parts of weight that no price counts.
        others: the other jobs that the file may be, where it does not tell a value. Each differs
            from this one in what is not known. A refusal holds only if it holds for all of them.
        file: the file that it was read from, or None.
    """

    framework: str
    shape: ModelShape = field(default_factory=ModelShape)
    layout: Layout = field(default_factory=Layout)
    gpus: int | None = None
    gpus_per_node: int | None = None
    seq: int | None = None
    facts: Facts = Facts()
    flags: Mapping[str, str] = field(default_factory=dict)
    unpriced: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    unmodelled: tuple[Unmodelled, ...] = ()
    others: tuple[Job, ...] = ()
    file: JobFile | None = field(default=None, compare=False, repr=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """The fields of shape, layout and facts, and of the job, in which `others` differ."""
        return tuple(name for name, value in self._values() if self._differs(name, value))

    def _values(self) -> Iterator[tuple[str, Any]]:
        for part in (self.shape, self.layout, self.facts):
            yield from ((f.name, getattr(part, f.name)) for f in fields(part))
        yield from (("gpus", self.gpus), ("seq", self.seq))

    def _differs(self, name: str, value: Any) -> bool:
        return any(dict(other._values())[name] != value for other in self.others)

    def with_batches(self, micro_batch: int | None, global_batch: int | None) -> Job:
        """The job with these batches in place of its own, where they are not None."""
        layout = replace(
            self.layout,
            micro_batch=micro_batch or self.layout.micro_batch,
            global_batch=global_batch or self.layout.global_batch,
            accumulation=1 if global_batch else self.layout.accumulation,
        )
        others = tuple(other.with_batches(micro_batch, global_batch) for other in self.others)
        return replace(self, layout=layout, others=others)

    def check(self, cluster: str, **asked: Any) -> Any:
        """`autopar.check_job` of this job on a cluster, with its other arguments."""
        return import_module("autopar").check_job(self, cluster, **asked)


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in another framework's words.

    Attributes:
        target: the name of the target, with the version that it is written for.
        text: the arguments, or the configuration file.
        launch: the command that starts the job.
        env: environment variables that the framework requires.
        losses: what of the job the text does not say, one phrase each.
        name: the usual name of the file.
    """

    target: str
    text: str
    launch: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    losses: tuple[str, ...] = ()
    name: str = ""
