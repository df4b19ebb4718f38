"""The answer to a job: what each rank holds, what a step takes, what its framework refuses, and
what would be better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from autopar_cost_models.memory_error import FIT_CHANCE, is_sure

from autopar.errors import AutoparError
from autopar.foreign.checking.advice import OptionChange, fitting_changes
from autopar.foreign.checking.pricing import JobSetting, job_setting
from autopar.foreign.checking.searching import best_within
from autopar.foreign.checking.written import written
from autopar.foreign.frameworks.registry import target_of
from autopar.foreign.job import Finding, Job
from autopar.foreign.published.chances import run_fit_chance
from autopar.foreign.published.run import RunPrediction
from autopar.foreign.target import Target
from autopar.foreign.verdicts import held_refusals, no_price, withheld
from autopar.foreign.writers.from_plan import layers_of, layout_of
from autopar.foreign.writers.wording import OptionDifference
from autopar.ir.cluster import ClusterSpec
from autopar.ir.deadline import Deadline
from autopar.ir.layout import like, unlike
from autopar.ir.plan import Plan
from autopar.request.arguments import parsed_cluster
from autopar.text.plan_words import short_words
from autopar.text.units import ms, percent

_NO_VERDICT = "no verdict is given on this job"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known about a job on a cluster.

    Attributes:
        job: the job.
        target: its framework.
        cluster: the cluster.
        seq: tokens of a sequence; 0 if they are not known.
        findings: what the framework refuses, what cannot be determined, and contradictions.
        withheld: the reasons why no verdict is given; () if one is.
        plan: the job's layout with its predicted time and memory, or None if it cannot be priced.
            If a verdict is withheld, it leaves out the parts that no price counts.
        why_not: why there is no price; '' if there is one.
        fits: whether the fullest device has the memory.  None without a verdict.
        chance: the chance that it fits, from 0 to 1, or None.
        best: the fastest plan within the framework that was found: one that leaves memory free, or the job's own layout. None if there
            is neither.
        bound_s: no plan within the framework that leaves memory free has a shorter step than this, in seconds. 0 if
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
    withheld: tuple[str, ...] = ()
    plan: Plan | None = None
    why_not: str = ""
    fits: bool | None = None
    chance: float | None = None
    best: Plan | None = None
    bound_s: float = 0.0
    why_no_best: str = ""
    differences: tuple[OptionDifference, ...] = ()
    changes: tuple[OptionChange, ...] = ()
    measured_s: float | None = None
    setting: JobSetting | None = field(default=None, repr=False, compare=False)

    @property
    def refused(self) -> tuple[Finding, ...]:
        """What the framework refuses at start."""
        return tuple(finding for finding in self.findings if finding.kind == "refused")

    @property
    def runs(self) -> bool:
        """Whether the framework starts the job and it fits."""
        return self.fits is True and not self.refused

    @property
    def is_sure(self) -> bool:
        """Whether the job fits with a chance of at least that of a plan by default, `FIT_CHANCE`."""
        return self.fits is True and (self.chance is None or is_sure(self.chance))

    @property
    def gap(self) -> tuple[float, float] | None:
        """(seconds by which the measured step is longer than that of the best plan, how many of
        them the layout explains). None without a measured step and a price, and if no verdict is
        given.
        """
        if self.plan is None or self.measured_s is None or self.withheld:
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
    deadline: Deadline | None = None,
) -> Answer:
    """What is known about a job on a cluster, as an `Answer`.

    Args:
        job: the job, from `autopar.read_job`.
        cluster: a cluster of one kind of devices, or a text such as 'dgx-h100:8'.
        model: a MODEL text.  By default the model is that of the file.
        seq: tokens of a sequence.  By default those of the file.
        measured_s: measured seconds of a step, to compare with.
        time_limit_s: seconds for the whole answer.  What follows the price of the job's own layout has at least half of them.  In the
            main thread that price is given up after these seconds, or after 120 if that is more.
        advise: whether to look for better plans and for changes that fit.
        deadline: in the place of `time_limit_s`: the limit of a command that has begun.

    Raises:
        AutoparError: the cluster is not known or has several kinds of devices.
    """
    deadline = deadline or Deadline.after(time_limit_s)
    spec = parsed_cluster(cluster).one_kind
    target = target_of(job.framework)
    findings = [*job.findings, *_devices_findings(job, spec)]
    answer = Answer(job, target, spec, measured_s=measured_s)
    try:
        setting = job_setting(job, spec, model, seq)
    except AutoparError as error:
        findings += held_refusals(target, _on_devices(job, spec), spec.num_devices)
        why = str(error)
        reasons = (why, *withheld(_on_devices(job, spec), spec.num_devices))
        return replace(
            answer, findings=tuple(findings), withheld=reasons, why_not=why, why_no_best=why
        )
    gpus = spec.num_devices
    findings += held_refusals(target, setting.job, gpus)
    answer = replace(
        answer, seq=setting.seq, findings=tuple(findings), withheld=withheld(setting.job, gpus)
    )
    if reasons := no_price(setting.job, gpus):
        return replace(answer, why_not="; ".join(reasons), why_no_best=_NO_VERDICT)
    try:
        with deadline.ends_capture("pricing the job's own layout"):
            answer = _priced(answer, setting)
    except AutoparError as error:
        return replace(answer, why_not=str(error), why_no_best=str(error))
    if answer.withheld:
        return replace(answer, why_no_best=_NO_VERDICT)
    deadline = deadline.captured(deadline.clock() - deadline.start_s)
    return _advised(answer, setting, deadline) if advise else answer


def _on_devices(job: Job, cluster: ClusterSpec) -> Job:
    """The job, and all that it may be, on the devices of a cluster."""
    gpus = cluster.num_devices
    others = tuple(replace(other, gpus=gpus) for other in job.others)
    return replace(job, gpus=gpus, others=others)


def _devices_findings(job: Job, cluster: ClusterSpec) -> list[Finding]:
    """A finding if the file starts another number of processes than there are devices."""
    gpus = cluster.num_devices
    started = {one.gpus for one in (job, *job.others)}
    if None in started or gpus in started:
        return []
    what = f"the file starts {job.gpus} processes, and {cluster.name} has {gpus} devices: priced on those"
    return [Finding("contradiction", what)]


def _priced(answer: Answer, setting: JobSetting) -> Answer:
    """The answer with the price of the job's own layout, or the reason why it has none. Of a job on
    which no verdict is given, the price alone.
    """
    try:
        run, plan = setting.run, setting.plan_of(setting.job.layout)
    except AutoparError as error:
        return replace(answer, why_not=str(error))
    answer = replace(answer, plan=plan, setting=setting)
    if answer.withheld:
        return answer
    peak = max(plan.predicted.peak_memory_bytes)
    chance = run_fit_chance(run, RunPrediction(plan.predicted.step_time_s, peak))
    return replace(answer, fits=peak <= answer.cluster.device.memory_bytes, chance=chance)


def _advised(answer: Answer, setting: JobSetting, deadline: Deadline) -> Answer:
    """The answer with advice, as far as the deadline allows: the best plan that can be written into
    the job's file, and single changes if the job may not fit. If no plan is faster, the best one is
    the job's own layout.
    """
    job, own = setting.job, answer.plan
    room_bytes = answer.cluster.kept_free().room_bytes
    if own is not None and not answer.is_sure:
        changes = fitting_changes(setting, room_bytes, deadline)
        answer = replace(answer, changes=changes)
    if answer.runs:
        answer = replace(answer, best=own)
    try:
        best, bound_s = best_within(setting, deadline)
    except AutoparError as error:
        return replace(answer, why_no_best=str(error))
    layout = like(layout_of(best), job.layout)
    alike = not unlike(layout, job.layout, setting.gpus)
    if answer.runs and (alike or _as_fast(own, best)):
        return replace(answer, bound_s=bound_s)
    try:
        told = written(setting, layout)
        if told is None:
            return replace(answer, why_no_best=_no_words(job, best, alike))
        best = replace(best, predicted=told.plan.predicted)
    except AutoparError as error:
        return replace(answer, why_no_best=str(error))
    if max(best.predicted.peak_memory_bytes) > room_bytes:
        is_over = max(best.predicted.peak_memory_bytes) > answer.cluster.device.memory_bytes
        fit = "does not fit" if is_over else f"has a chance to fit below {percent(FIT_CHANCE)}"
        why = f"{short_words(best)}, {ms(best.predicted.step_time_s)}, {fit} as this file runs it"
        return replace(answer, why_no_best=why)
    if answer.runs and _as_fast(own, best):
        return replace(answer, bound_s=bound_s)
    return replace(answer, best=best, bound_s=bound_s, differences=told.differences)


def _as_fast(own: Plan | None, best: Plan) -> bool:
    """Whether a job's own plan takes no longer than another one."""
    return own is not None and own.predicted.step_time_s <= best.predicted.step_time_s


def _no_words(job: Job, best: Plan, alike: bool) -> str:
    """Why a plan does not start in the file of a job. `alike`: it has the layout of the job."""
    for finding in job.findings:
        if finding.kind == "refused":
            return f"the file is refused with any layout: {finding.what}"
    if alike:
        return "the best layout found is that of the job"
    return f"{short_words(best)}, {ms(best.predicted.step_time_s)}, has no words in this file"
