"""All targets, and the reading of a job of any of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.request.restriction import Restriction
from autopar.targets import primus, trainers
from autopar.targets.accelerate import ACCELERATE
from autopar.targets.bridge import BRIDGE
from autopar.targets.deepspeed import DEEPSPEED
from autopar.targets.job import Job, ModelShape
from autopar.targets.megatron import MEGATRON
from autopar.targets.nanotron import NANOTRON
from autopar.targets.neox import NEOX
from autopar.targets.openrlhf import OPENRLHF
from autopar.targets.shell_words import CLOSE, OPEN
from autopar.targets.target import Source, Target
from autopar.targets.torchtitan import TORCHTITAN
from autopar.targets.transformers import TRANSFORMERS
from autopar.targets.unknown_branches import over_branches
from autopar.targets.unmodelled import whole_job
from autopar.targets.unread import refuse_unread
from autopar.targets.verl import VERL

TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        OPENRLHF,
        VERL,
        ACCELERATE,
        TRANSFORMERS,
        TORCHTITAN,
        NANOTRON,
        NEOX,
        DEEPSPEED,
        BRIDGE,
        MEGATRON,
    )
}
"""Every target by its name, in the order in which files are recognized."""


_READS_ARGUMENTS = re.compile(r"\$\{?[#!]?[1-9@*]|\bshift\b")
"""A place where a script reads its arguments."""
MOST_UP = 4
"""The most folders above a job in which files that it names are looked for."""


def target_of(name: str) -> Target:
    """The target of a name or alias. Raises AutoparError for an unknown one."""
    lower = name.lower() if isinstance(name, str) else ""
    for target in TARGETS.values():
        if lower in (target.name, *target.aliases):
            return target
    raise AutoparError(f"target {shown(name)} is not known; {', '.join(TARGETS)} are")


def restriction_of(name: str, shape: ModelShape, seq: int) -> Restriction:
    """What the target of a name can run of a model with sequences of `seq` tokens. Messages propose
    other targets. Raises AutoparError for an unknown name.
    """
    own = target_of(name)
    others = [target for target in TARGETS.values() if target is not own]
    return replace(
        own.restriction(shape, seq),
        target=own.name,
        others=lambda: {other.name: other.restriction(shape, seq) for other in others},
    )


def file_near(folder: Path, name: str) -> Path | None:
    """The file that a job in `folder` names. Jobs are started from elsewhere: a name is looked for
    from the folder, in it, and from the `MOST_UP` folders above it, also by the end of its path.
    """
    parts = Path(name).parts
    ends = [Path(*parts[start:]) for start in range(len(parts) - 1)]
    above = list(folder.resolve().parents)[:MOST_UP]
    places = [folder / name, folder / Path(name).name, *(up / name for up in above)]
    places += [up / end for end in ends for up in (folder, *above) if not end.is_absolute()]
    return next((place for place in places if place.is_file()), None)


def _arguments(args: Sequence[str] | None, text: str, path: str) -> tuple[str, ...] | None:
    """The arguments of a script with this text, or None if none are given. Raises AutoparError if
    they are no texts, or if the file reads none.
    """
    if not args:
        return None if args is None else ()
    if isinstance(args, str) or not all(isinstance(arg, str) for arg in args):
        raise AutoparError(f"args={shown(args)} must be a list of texts, such as ['8', '4']")
    if any(OPEN in arg or CLOSE in arg for arg in args):
        raise AutoparError("an argument has a character of Unicode's private use area: drop it")
    if not _READS_ARGUMENTS.search(text):
        words = " ".join(args)
        raise AutoparError(
            f"{path} reads no arguments, such as $1, and was given {shown(words)} as such"
        )
    return tuple(args)


def _reader_of(source: Source) -> Callable[[Source], Job] | None:
    """What reads a file, by its form; None if nothing does. Raises AutoparError for a job of a
    framework that autopar does not read.
    """
    if primus.reads(source):
        return primus.read
    refuse_unread(source)
    for known in TARGETS.values():
        if known.reads(source):
            return known.read
    return trainers.read if trainers.reads(source) else None


def read_job(path: str | Path, target: str | None = None, args: Sequence[str] | None = None) -> Job:
    """The job that a file of another framework says. Nothing in the file is run.

    Args:
        path: a launch script, a configuration file or a dump of arguments. `recipes.py:NAME` reads
            the function NAME of a Python file.
        target: the framework; by default the one whose form the file has.
        args: the arguments that a launch script is started with: $1, $2 and so on.  By default they
            are not known.

    Raises:
        AutoparError: the file cannot be read, is no job, reads no arguments although some are given,
            or the target is not known.
    """
    path, _, function = str(path).partition(".py:")
    path += ".py" if function else ""
    text = read_text(path, "job")
    given = _arguments(args, text, path)
    folder = Path(path).parent

    def beside(name: str) -> str | None:
        found = file_near(folder, name)
        return read_text(found, "script") if found else None

    def exact(name: str) -> str | None:
        place = folder / name
        return read_text(place, "module") if place.is_file() else None

    source = Source(text, Path(path).name, beside, function, given, exact)
    read = target_of(target).read if target is not None else _reader_of(source)
    if read is not None:
        return whole_job(lambda changed: over_branches(changed, read), source)
    if re.search(r'"(model_type|architectures)"\s*:', text):
        raise AutoparError(f"{path} is no job: it describes a model: give it as --model hf:{path}")
    raise AutoparError(
        f"{path} is no job that autopar knows: it has options of none of {', '.join(TARGETS)}"
    )
