"""The answer to a job: what each rank holds, what a step takes, what its framework refuses, and
what would be better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from autopar.errors import AutoparError, NoPlanFits
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.jobs.advice import Change, Difference, differences, fitting_changes
from autopar.jobs.pricing import Setting, run_of, setting_of
from autopar.predict.chances import fit_chance
from autopar.predict.run import RunPrediction
from autopar.request.arguments import parsed_cluster
from autopar.targets.from_plan import layers_of, layout_of
from autopar.targets.job import Finding, Job
from autopar.targets.registry import target_of
from autopar.targets.target import Target


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known about a job on a cluster.

    Attributes:
        job: the job.
        target: its framework.
        cluster: the cluster.
        seq: tokens of a sequence; 0 if they are not known.
        findings: what the framework refuses, what cannot be determined, and contradictions.
        plan: the job's layout with its predicted time and memory, or None if it cannot be priced.
        why_not: why there is no price; '' if there is one.
        fits: whether the fullest device has the memory.
        chance: the chance that it fits, from 0 to 1, or None.
        best: the best plan within the framework that fits, or None.
        why_no_best: why there is none; '' if there is one.
        differences: the framework's options in which the best plan differs.
        changes: single changes with which the job fits, the fastest first; () if it fits.
        measured_s: measured seconds of a step, or None.
    """

    job: Job
    target: Target
    cluster: ClusterSpec
    seq: int = 0
    findings: tuple[Finding, ...] = ()
    plan: Plan | None = None
    why_not: str = ""
    fits: bool = False
    chance: float | None = None
    best: Plan | None = None
    why_no_best: str = ""
    differences: tuple[Difference, ...] = ()
    changes: tuple[Change, ...] = ()
    measured_s: float | None = None

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What the framework refuses at start."""
        return tuple(finding for finding in self.findings if finding.kind == "refused")

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """For each pipeline rank, the numbers of layers of its stages."""
        if self.plan is None:
            return ()
        sizes = layers_of(self.plan)
        pp = self.plan.mesh.pp
        return tuple(tuple(sizes[rank::pp]) for rank in range(pp))


def check_job(
    job: Job,
    cluster: ClusterSpec | str,
    model: str | None = None,
    seq: int | None = None,
    measured_s: float | None = None,
    time_limit_s: float = 60.0,
    advise: bool = True,
) -> Answer:
    """What is known about a job on a cluster, as an `Answer`.

    Args:
        job: the job, from `autopar.read_job`.
        cluster: a cluster of one kind of devices, or a text such as 'dgx-h100:8'.
        model: a MODEL text.  By default the model is that of the file.
        seq: tokens of a sequence.  By default those of the file.
        measured_s: measured seconds of a step, to compare with.
        time_limit_s: seconds to search for a better plan.
        advise: whether to look for better plans and for changes that fit.

    Raises:
        AutoparError: the cluster is not known or has several kinds of devices.
    """
    spec = parsed_cluster(cluster).one_kind
    target = target_of(job.framework)
    findings = [*job.findings, *_devices_findings(job, spec)]
    sized = replace(job, gpus=spec.num_devices)
    try:
        setting = setting_of(sized, spec, target.software, model, seq)
    except AutoparError as error:
        findings += target.refusals(sized, spec.num_devices)
        return Answer(
            job,
            target,
            spec,
            findings=tuple(findings),
            why_not=str(error),
            why_no_best=str(error),
            measured_s=measured_s,
        )
    known = replace(sized, shape=setting.shape, seq=setting.seq)
    findings += target.refusals(known, spec.num_devices)
    answer = Answer(job, target, spec, setting.seq, tuple(findings), measured_s=measured_s)
    answer = _priced(answer, setting)
    return _advised(answer, setting, time_limit_s) if advise else answer


def _devices_findings(job: Job, cluster: ClusterSpec) -> list[Finding]:
    """Findings about the devices: another number than the file's, and experts over tp."""
    found, gpus = [], cluster.num_devices
    if job.gpus not in (None, gpus):
        what = f"the file starts {job.gpus} processes, and {cluster.name} has {gpus} devices: priced on those"
        found.append(Finding("contradiction", what))
    dp = job.layout.dp_on(gpus)
    if (priced := gcd(job.layout.ep, dp)) != job.layout.ep:
        what = f"ep={job.layout.ep} is more than a part of dp={dp}: priced as ep={priced}, with experts split over tp"
        found.append(Finding("note", what))
    return found


def _priced(answer: Answer, setting: Setting) -> Answer:
    """The answer with the price of the job's own layout, or the reason why it has none."""
    try:
        run, plan = run_of(setting), setting.plan_of(setting.job.layout)
    except AutoparError as error:
        return replace(answer, why_not=str(error))
    peak = max(plan.predicted.peak_memory_bytes)
    chance = fit_chance(run, RunPrediction(plan.predicted.step_time_s, peak))
    return replace(
        answer, plan=plan, fits=peak <= answer.cluster.device.memory_bytes, chance=chance
    )


def _advised(answer: Answer, setting: Setting, time_limit_s: float) -> Answer:
    target, job = answer.target, setting.job
    limits = target.restriction(setting.shape, setting.seq, setting.gpus)
    try:
        best = setting.best(limits, time_limit_s)
    except NoPlanFits as error:
        return replace(answer, why_no_best=str(error))
    except AutoparError as error:
        return replace(answer, why_no_best=str(error))
    told = replace(job, shape=setting.shape, seq=setting.seq)
    better = replace(told, layout=_like(layout_of(best), job))
    found = replace(answer, best=best, differences=differences(target, told, better))
    if answer.plan is not None and not answer.fits:
        found = replace(
            found, changes=fitting_changes(setting, target, answer.cluster.device.memory_bytes)
        )
    return found


def _like(layout: Any, job: Job) -> Any:
    """A layout of a plan, written as the job writes its own: what the devices leave stays open."""
    by = job.layout
    changes: dict[str, Any] = {"etp": by.etp, "group": 0}
    changes |= {"dp": None} if by.dp is None else {}
    return replace(layout, **changes)
