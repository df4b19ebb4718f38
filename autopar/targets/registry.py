"""All targets, and the reading of a job of any of them."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.targets import trainers
from autopar.targets.accelerate import ACCELERATE
from autopar.targets.bridge import BRIDGE
from autopar.targets.deepspeed import DEEPSPEED
from autopar.targets.job import Job
from autopar.targets.megatron import MEGATRON
from autopar.targets.nanotron import NANOTRON
from autopar.targets.openrlhf import OPENRLHF
from autopar.targets.target import Source, Target
from autopar.targets.torchtitan import TORCHTITAN
from autopar.targets.transformers import TRANSFORMERS
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
        DEEPSPEED,
        BRIDGE,
        MEGATRON,
    )
}
"""Every target by its name, in the order in which files are recognized."""


MOST_UP = 4
"""The most folders above a job in which files that it names are looked for."""


def target_of(name: str) -> Target:
    """The target of a name or alias. Raises AutoparError for an unknown one."""
    lower = name.lower() if isinstance(name, str) else ""
    for target in TARGETS.values():
        if lower in (target.name, *target.aliases):
            return target
    raise AutoparError(f"target {shown(name)} is not known; {', '.join(TARGETS)} are")


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


def read_job(path: str | Path, target: str | None = None) -> Job:
    """The job that a file of another framework says. Nothing in the file is run.

    Args:
        path: a launch script, a configuration file or a dump of arguments. `recipes.py:NAME` reads
            the function NAME of a Python file.
        target: the framework; by default the one whose form the file has.

    Raises:
        AutoparError: the file cannot be read, is no job, or the target is not known.
    """
    path, _, function = str(path).partition(".py:")
    path += ".py" if function else ""
    text = read_text(path, "job")
    folder = Path(path).parent

    def beside(name: str) -> str | None:
        found = file_near(folder, name)
        return read_text(found, "script") if found else None

    source = Source(text, Path(path).name, beside, function)
    if target is not None:
        return target_of(target).read(source)
    for known in TARGETS.values():
        if known.reads(source):
            return known.read(source)
    if trainers.reads(source):
        return trainers.read(source)
    if re.search(r'"(model_type|architectures)"\s*:', text):
        raise AutoparError(f"{path} is no job: it describes a model: give it as --model hf:{path}")
    raise AutoparError(
        f"{path} is no job that autopar knows: it has options of none of {', '.join(TARGETS)}"
    )
