"""Layouts, written into the files of jobs: what must be set otherwise, and whether it starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from autopar.errors import AutoparError
from autopar.foreign.checking.pricing import JobSetting
from autopar.foreign.job import Job
from autopar.foreign.verdicts import unlaid_experts
from autopar.foreign.writers.applied import applied
from autopar.foreign.writers.wording import SCRIPT_FILE, OptionDifference, differences
from autopar.ir.layout import Layout, unlike
from autopar.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class Written:
    """A layout in the file of a job.

    Attributes:
        differences: the options that the file must set otherwise.
        setting: the setting of the job as it is read from the file with these options.
    """

    differences: tuple[OptionDifference, ...]
    setting: JobSetting

    @property
    def plan(self) -> Plan:
        """The plan of the file as it is then, on devices with unlimited memory. Raises AutoparError
        if it cannot be priced.
        """
        return self.setting.plan_of(self.setting.job.layout)


def written(setting: JobSetting, layout: Layout) -> Written | None:
    """A layout in the file of a setting's job, with which it starts. None if the file cannot say it,
    or if the framework refuses it there.
    """
    for told in _told(setting, layout):
        if (again := started(setting, layout, told)) is not None:
            return Written(told, setting.of(again))
    return None


def has_verdict(setting: JobSetting, layout: Layout) -> bool | None:
    """Whether the file of a setting's job, with a layout, can have a verdict if the job can: some
    options count only with certain degrees. None if the file has no place for the layout.
    """
    if not unlike(setting.job.layout, layout, setting.gpus):
        return True  # the file says it as it is
    found = None
    for told in _told(setting, layout):
        if (known := _read_with(setting, layout, told)) is not None:
            found = not _opens(known, setting.job)
            if found:
                break
    return found


def _told(setting: JobSetting, layout: Layout) -> Iterator[tuple[OptionDifference, ...]]:
    """The ways to tell a layout: without and with options that the file leaves to a default."""
    job = setting.job
    for explicit in (False, True):
        if told := differences(setting.target, job, replace(job, layout=layout), explicit):
            yield told


def started(setting: JobSetting, layout: Layout, told: tuple[OptionDifference, ...]) -> Job | None:
    """The job that starts if these differences are written into the file of a setting's job. The file
    is read again, says the layout, and is not refused. It can have a verdict if the job can. None if
    it does not start. A job without a file must not be refused.
    """
    job, target, gpus = setting.job, setting.target, setting.gpus
    known = _read_with(setting, layout, told)
    if known is None or target.refusals(known, gpus):
        return None
    refused = any(finding.kind == "refused" for finding in known.findings)
    other = unlike(known.layout, layout, gpus)
    return None if refused or other or _opens(known, job) or unlaid_experts(known, gpus) else known


def _read_with(
    setting: JobSetting, layout: Layout, told: tuple[OptionDifference, ...]
) -> Job | None:
    """The job of a file with other options, with the model of a setting; None if it has no place for
    them, or cannot be read then.
    """
    job = setting.job
    if job.file is None:
        return replace(job, layout=layout, flags={})
    try:
        again = job.file.read(*applied(job.file, told))
    except AutoparError:
        return None
    if any(difference.file == SCRIPT_FILE for difference in told) or again.unknown:
        again = again.with_batches(layout.micro_batch, layout.batch_on(setting.gpus))
    return _of_model(again, setting)


def _opens(job: Job, before: Job) -> bool:
    """Whether a job has a value that is not known, or a part without a price, that another has not."""
    parts, known = ({part.what for part in one.unmodelled} for one in (job, before))
    return bool(set(job.unknown) - set(before.unknown) or parts - known)


def _of_model(job: Job, setting: JobSetting) -> Job:
    """A job, and all that it may be, with the model, length and devices of a setting."""
    shape, seq, stages = setting.job.shape, setting.job.seq, setting.target.stages
    others = tuple(_of_model(other, setting) for other in job.others)
    known = replace(job, shape=shape, seq=seq, gpus=setting.gpus, others=others)
    if not (stages and job.layout.pp > 1 and shape.layers):
        return known
    vpp, cut = stages(known)
    return replace(known, layout=replace(known.layout, vpp=vpp, stages=cut))
