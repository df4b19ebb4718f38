"""The answer to a job: what each rank holds, what a step takes, what its framework refuses, and
what would be better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import gcd

from autopar.errors import AutoparError
from autopar.ir.cluster import ClusterSpec
from autopar.ir.plan import Plan
from autopar.jobs.advice import Change, Difference, differences, fitting_changes
from autopar.jobs.pricing import Setting, setting_of
from autopar.predict.chances import fit_chance
from autopar.predict.run import RunPrediction
from autopar.request.arguments import parsed_cluster
from autopar.targets.from_plan import layers_of, layout_of
from autopar.targets.job import Finding, Job, Layout
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
        best: the fastest plan within the framework that was found: one that leaves memory free, or the job's own layout. None if there
            is neither.
        bound_s: no plan within the framework that leaves memory free has a shorter step than this without the host, in seconds. 0 if
            nothing is proved.
        why_no_best: why no plan that leaves memory free was found; '' if one was.
        differences: the framework's options in which the best plan differs.
        changes: single changes with which the job fits, the fastest first; () if it fits.
        measured_s: measured seconds of a step, or None.
        setting: what the job was priced with, or None if it has no price.
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
    bound_s: float = 0.0
    why_no_best: str = ""
    differences: tuple[Difference, ...] = ()
    changes: tuple[Change, ...] = ()
    measured_s: float | None = None
    setting: Setting | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What the framework refuses at start."""
        return tuple(finding for finding in self.findings if finding.kind == "refused")

    @property
    def runs(self) -> bool:
        """Whether the framework starts the job and it fits."""
        return self.fits and not self.refused

    @property
    def gap(self) -> tuple[float, float] | None:
        """(seconds by which the measured step is longer than that of the best plan, how many of
        them the layout explains). None without a measured step and a price.
        """
        if self.plan is None or self.measured_s is None:
            return None
        step_s = self.plan.predicted.step_time_s
        best_s = self.best.predicted.step_time_s if self.best is not None else step_s
        whole_s = self.measured_s - best_s
        return whole_s, min(max(0.0, step_s - best_s), whole_s)

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
    answer = Answer(job, target, spec, measured_s=measured_s)
    try:
        setting = setting_of(job, spec, model, seq)
    except AutoparError as error:
        findings += target.refusals(replace(job, gpus=spec.num_devices), spec.num_devices)
        why = str(error)
        return replace(answer, findings=tuple(findings), why_not=why, why_no_best=why)
    findings += target.refusals(setting.job, spec.num_devices)
    answer = _priced(replace(answer, seq=setting.seq, findings=tuple(findings)), setting)
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
        run, plan = setting.run, setting.with_host(setting.plan_of(setting.job.layout))
    except AutoparError as error:
        return replace(answer, why_not=str(error))
    peak = max(plan.predicted.peak_memory_bytes)
    chance = fit_chance(run, RunPrediction(plan.predicted.step_time_s, peak))
    fits = peak <= answer.cluster.device.memory_bytes
    return replace(answer, plan=plan, fits=fits, chance=chance, setting=setting)


def _advised(answer: Answer, setting: Setting, time_limit_s: float) -> Answer:
    """The answer with the best plan within the framework, and single changes if the job does not fit.
    If no plan was found that is faster, the best one is the job's own layout.
    """
    target, job = setting.target, setting.job
    if answer.plan is not None and not answer.fits:
        changes = fitting_changes(setting, answer.cluster.device.memory_bytes)
        answer = replace(answer, changes=changes)
    try:
        best = setting.with_host(
            setting.best(target.restriction(job.shape, setting.seq), time_limit_s)
        )
    except AutoparError as error:
        answer = replace(answer, why_no_best=str(error))
        return replace(answer, best=answer.plan) if answer.runs else answer
    bound_s, own = best.certificate.bound_s, answer.plan
    if own and answer.runs and own.predicted.step_time_s <= best.predicted.step_time_s:
        return replace(answer, best=own, bound_s=bound_s)
    told = differences(target, job, replace(job, layout=_like(layout_of(best), job.layout)))
    return replace(answer, best=best, bound_s=bound_s, differences=told)


def _like(layout: Layout, by: Layout) -> Layout:
    """A layout of a plan, written as a job writes its own: what the devices leave stays open."""
    return replace(layout, etp=by.etp, group=0, dp=None if by.dp is None else layout.dp)
