"""What a verdict on a job may stand on: refusals that hold for all that its file may say, and the
reasons why no verdict is given.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from autopar.foreign.job import Finding, Job
from autopar.foreign.target import Target

_GIVEN = {
    "micro_batch": "--micro-batch",
    "global_batch": "--global-batch",
    "accumulation": "--global-batch",
    "seq": "--seq",
    "gpus": "",
}
"""The options of `autopar check` that give a field; '' for what the cluster says."""

_DEVICES = re.compile(r"(nnodes|nproc_per_node|num_nodes|world_size|num_processes|num_machines) ")
"""Findings on options about devices, which the cluster says."""


def held_refusals(target: Target, job: Job, gpus: int) -> list[Finding]:
    """What a framework finds in a job on `gpus` devices. A refusal holds if the framework has it for
    each of `job.others` too. Any other one is told as what cannot be determined.
    """
    by_job = [target.refusals(one, gpus) for one in (job, *job.others)]
    refused = [{_rule(f): f for f in findings if f.kind == "refused"} for findings in by_job]
    found = [finding for finding in by_job[0] if finding.kind != "refused"]
    for rule in dict.fromkeys(rule for rules in refused for rule in rules):
        held = [rules[rule] for rules in refused if rule in rules]
        if len(held) == len(refused):
            legal = [text for text in held[0].legal if all(text in f.legal for f in held)]
            found.append(replace(held[0], legal=tuple(legal)))
        else:
            found.append(_undecided(held[0], job))
    return found


def _rule(finding: Finding) -> str:
    """The rule behind a finding: its words without numbers."""
    return re.sub(r"\d+", "#", finding.theirs or finding.what)


def _undecided(finding: Finding, job: Job) -> Finding:
    """A refusal that only some of what a file may say has."""
    what = f"whether it starts is not known, since {_names(job)} cannot be determined: {finding.what} is refused"  # fmt: skip
    return Finding("unknown", what, finding.theirs, _remedies(job))


def _names(job: Job) -> str:
    return ", ".join(job.unknown)


def _remedies(job: Job) -> tuple[str, ...]:
    """What gives the fields that a file does not tell."""
    options = dict.fromkeys(_GIVEN.get(name) or "" for name in job.unknown)
    legal = [f"give {option}" for option in options if option]
    open_findings = [f for f in job.findings if f.kind == "unknown" and not _DEVICES.match(f.what)]
    told = [text for finding in open_findings for text in finding.legal]
    return tuple(dict.fromkeys([*legal, *told]))


def open_words(job: Job) -> str:
    """The fields that the file of a job does not tell, and what gives them."""
    remedies = "; ".join(_remedies(job))
    return f"{_names(job)} cannot be determined from the file" + f": {remedies}" * bool(remedies)


def withheld(job: Job, gpus: int) -> tuple[str, ...]:
    """The reasons why no verdict is given on a job on `gpus` devices; () if one is."""
    return (
        *no_price(job, gpus),
        *(str(part) for part in job.unmodelled if part.place != "instead"),
    )


def no_price(job: Job, gpus: int) -> tuple[str, ...]:
    """The reasons why a job has no price at all, and so no verdict; () if it has one."""
    return tuple(_reasons(job, gpus))


def _reasons(job: Job, gpus: int) -> Iterator[str]:
    if job.unknown:
        yield open_words(job)
    yield from (str(part) for part in job.unmodelled if part.place == "instead")
    if experts := unlaid_experts(job, gpus):
        yield experts


def unlaid_experts(job: Job, gpus: int) -> str:
    """The groups of experts of a job if autopar has no such layout, in words; '' otherwise."""
    by, dp = job.layout, job.layout.dp_on(gpus)
    if not job.shape.experts and by.ep == 1:
        return ""
    if dp % by.ep:
        return f"autopar cannot lay out experts over ep={by.ep} ranks, which do not divide dp={dp}"
    if by.etp not in (None, by.tp):
        return (
            f"autopar cannot lay out experts over {by.etp} tensor-parallel ranks beside tp={by.tp}"
        )
    return ""
