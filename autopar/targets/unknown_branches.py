"""What a script may be besides, where it tests what it does not tell: it is read with each branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.errors import AutoparError
from autopar.targets.arguments import unread_file
from autopar.targets.expansion import Place
from autopar.targets.job import Finding, Job, Unmodelled
from autopar.targets.target import Source
from autopar.targets.unknown import distinct_jobs

MOST_READINGS = 60
"""The most branches that are read, each as a script of its own."""
MOST_STEPS_OF_ALL = 100_000
"""The most commands that are read for branches, those of all readings counted."""
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
    others, told = list(job.others), set[Place]()
    commands = script.commands
    read_branches = min(MOST_READINGS, MOST_STEPS_OF_ALL // max(1, script.steps))
    for place, branch in places[:read_branches]:
        assumed = replace(source, assumed={**source.assumed, place: branch})
        try:
            if assumed.script().commands == commands:
                continue
            other = read(assumed)
        except AutoparError:  # the script ends there
            told.add(place)
            continue
        found = [replace(one, others=(), findings=()) for one in (other, *other.others)]
        others += found
        if set(replace(job, others=tuple(found)).unknown) - {"gpus"}:  # those of the cluster count
            told.add(place)
    left: tuple[Unmodelled, ...] = ()
    if len(places) > read_branches:
        said = f"{len(places)} branches that the script does not decide, of which {read_branches} are read"
        left = (Unmodelled(said),)
    job = replace(job, others=distinct_jobs(job, others), unmodelled=(*job.unmodelled, *left))
    if left:
        return job
    # of a file that is not there and moves no option only its name is told
    moves_none = [name for name, place in script.unread.items() if place not in told]
    notes = {unread_file(name): Finding("note", f"the script reads {name}, which is not beside it: no value that is priced stands on it")
             for name in moves_none}  # fmt: skip
    return replace(job, findings=tuple(notes.get(finding, finding) for finding in job.findings))
