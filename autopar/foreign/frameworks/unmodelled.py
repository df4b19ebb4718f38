"""The parts of a job that no price counts, from all options of its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.foreign.frameworks.adapters import partly_trained
from autopar.foreign.frameworks.beside import beside
from autopar.foreign.frameworks.extended import winning_parts
from autopar.foreign.frameworks.raw_options import options_of_job
from autopar.foreign.frameworks.weight_rules import WEIGHT_RULES
from autopar.foreign.frameworks.weights import parts_by_rule
from autopar.foreign.job import Job, JobFile, Unmodelled
from autopar.foreign.target import SourceFile


def whole_job(read: Callable[[SourceFile], Job], source: SourceFile) -> Job:
    """The job that `read` reads from a source, with the parts that no price counts, and with its file.
    Options that say such parts are no longer listed among those without a price.
    """
    job = read(source)
    options = options_of_job(source, job)
    around = beside(job, options)
    found = (*job.unmodelled, *partly_trained(job, options), *around.parts)
    found += tuple(parts_by_rule(job, options, WEIGHT_RULES))
    parts = tuple({part.what: part for part in reversed(found)}.values())[::-1]
    names = {_name(part) for part in parts}
    unpriced = tuple(text for text in job.unpriced if _end(text) not in names)
    findings = (*job.findings, *around.notes)

    def again(text: str, texts: Mapping[str, str]) -> Job:
        def near(name: str) -> str | None:
            return texts.get(name) or source.read_file(name)

        return whole_job(read, replace(source, text=text, read_file=near))

    winning = winning_parts(source)
    file = JobFile(source.text, source.name, again, options.texts, source.function, winning)
    return replace(job, unmodelled=parts, unpriced=unpriced, findings=findings, file=file)


def _name(part: Unmodelled) -> str:
    return _end(part.option)


def _end(text: str) -> str:
    """The last part of the path of an option, as `path=value` says it."""
    return re.split(r"[=,]", text)[0].rpartition(".")[2]
