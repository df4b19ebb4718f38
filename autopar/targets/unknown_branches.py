"""What a script may be besides, where it tests what it does not tell: it is read with each branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.targets.job import Job
from autopar.targets.target import Source
from autopar.targets.unknown import distinct

MOST_READINGS = 60
"""The most branches that are read, each as a script of its own."""
_NO_SCRIPTS = (".py", ".yaml", ".yml", ".json", ".toml")


def over_branches(source: Source, read: Callable[[Source], Job]) -> Job:
    """The job of a source. Of a script it has all that the script may be besides, by the tests and
    cases that it does not decide. Raises AutoparError as `read`.
    """
    job = read(source)
    if source.name.lower().endswith(_NO_SCRIPTS):
        return job
    try:
        script = source.script()
    except AutoparError:
        return job
    places = [(place, n) for place, count in script.undecided.items() for n in range(count)]
    others = list(job.others)
    commands = script.commands
    for place, branch in places[:MOST_READINGS]:
        assumed = replace(source, assumed={**source.assumed, place: branch})
        try:
            if assumed.script().commands == commands:
                continue
            other = read(assumed)
        except AutoparError:  # the script ends there
            continue
        others.append(replace(other, others=(), findings=()))
    return replace(job, others=distinct(job, others))
