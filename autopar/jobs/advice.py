"""Better layouts for a job: the best within its framework, and the cheapest change that makes it
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import islice

from autopar.errors import AutoparError
from autopar.ir.deadline import Deadline
from autopar.jobs.applied import applied
from autopar.jobs.pricing import Setting
from autopar.jobs.wording import Difference, differences
from autopar.targets.job import Layout

MOST_CHANGES = 12
"""The most single changes that are priced."""


@dataclass(frozen=True, slots=True)
class Change:
    """A single change of a layout: in the framework's options, with its step and memory.

    Attributes:
        differences: the options.
        layout: the layout after the change.
        step_time_s: the predicted seconds of a step.
        peak_bytes: the predicted bytes of the fullest device.
    """

    differences: tuple[Difference, ...]
    layout: Layout
    step_time_s: float
    peak_bytes: int


def fitting_changes(setting: Setting, memory_bytes: int, deadline: Deadline) -> tuple[Change, ...]:
    """The single changes with which the job fits into `memory_bytes` of a device, the fastest first.
    Changes that the framework refuses or cannot say are left out, and those for which half of the
    time until the deadline does not suffice.
    """
    found = list[Change]()
    end_s = deadline.clock() + deadline.left_s / 2
    for layout, told in islice(_legal_changes(setting), MOST_CHANGES):
        if deadline.clock() >= end_s:
            break
        try:
            plan = setting.with_host(setting.plan_of(layout))
        except AutoparError:
            continue
        peak = max(plan.predicted.peak_memory_bytes)
        if peak <= memory_bytes:
            found.append(Change(told, layout, plan.predicted.step_time_s, peak))
    return tuple(sorted(found, key=lambda change: change.step_time_s))


def written(setting: Setting, layout: Layout) -> tuple[Difference, ...]:
    """The differences that say a layout in the file of a setting's job, and with which it starts. ()
    if the file cannot say it, or if the framework refuses it there.
    """
    job, target = setting.job, setting.target
    then = replace(job, layout=layout)
    for explicit in (False, True):
        told = differences(target, job, then, explicit)
        if told and starts(setting, layout, told):
            return told
    return ()


def starts(setting: Setting, layout: Layout, told: tuple[Difference, ...]) -> bool:
    """Whether a layout starts if these differences are written into the job's file: the file is read
    again, says the layout, and is not refused. A job without a file only is not refused.
    """
    job, target, gpus = setting.job, setting.target, setting.gpus
    if job.file is None:
        return not target.refusals(replace(job, layout=layout, flags={}), gpus)
    try:
        again = job.file.read(applied(job.file, told))
    except AutoparError:
        return False
    if any(": " in difference.option for difference in told) or again.unknown:
        again = again.with_batches(layout.micro_batch, layout.batch_on(gpus))
    known = replace(again, shape=job.shape, seq=job.seq, gpus=gpus)
    if target.stages and known.layout.pp > 1 and job.shape.layers:
        vpp, stages = target.stages(known)
        known = replace(known, layout=replace(known.layout, vpp=vpp, stages=stages))
    return not target.refusals(known, gpus) and not unlike(known.layout, layout, gpus)


_FREE = ("dp", "global_batch", "accumulation", "etp", "group", "recompute_layers")
"""Fields of layouts that say the same in other words."""


def unlike(one: Layout, other: Layout, gpus: int) -> list[str]:
    """The fields in which two layouts differ on `gpus` devices, in what they do."""
    alone = one.dp_on(gpus) * one.cp == other.dp_on(gpus) * other.cp == 1
    free = (*_FREE, *(("zero", "copies") if alone else ()))
    names = [f.name for f in fields(Layout) if f.name not in free]
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    if "stages" in found and {one.stages, other.stages} & {()} and len(set(one.stages or other.stages)) == 1:  # fmt: skip
        found.remove("stages")
    numbers = {"dp": Layout.dp_on, "batch": Layout.batch_on, "micro_batches": Layout.micro_batches_on}  # fmt: skip
    return found + [n for n, of in numbers.items() if of(one, gpus) != of(other, gpus)]


def _legal_changes(setting: Setting) -> Iterator[tuple[Layout, tuple[Difference, ...]]]:
    """Each single change that the framework can run, with the options that it sets otherwise."""
    job = setting.job
    for layout in _single_changes(job.layout, setting):
        if told := written(setting, layout):
            yield layout, told


def _single_changes(by: Layout, setting: Setting) -> Iterator[Layout]:
    """Layouts that differ from one in a single choice, and save memory."""
    dp, per_node = by.dp_on(setting.gpus), setting.cluster.topology.devices_per_node
    for mode in ("selective", "full"):
        if by.recompute not in (mode, "full") or (by.recompute == "full" and by.recompute_layers):
            yield replace(by, recompute=mode, recompute_layers=0)
    for zero in range(by.zero + 1, 4):
        if dp * by.cp > 1:
            yield replace(by, zero=zero)
    if by.copies > 1:
        yield replace(by, copies=1)
    for size in sorted({by.micro_batch // 2, 1} - {0, by.micro_batch}, reverse=True):
        yield replace(by, micro_batch=size)
    if by.tp > 1 and not by.sequence_parallel:
        yield replace(by, sequence_parallel=True)
    if dp % 2 == 0:
        batch = by.batch_on(setting.gpus)
        fewer = replace(by, dp=dp // 2, global_batch=batch)
        if 2 * by.tp <= per_node:
            yield replace(fewer, tp=2 * by.tp, sequence_parallel=by.sequence_parallel or by.tp == 1)
        deeper = "1f1b" if by.pp == 1 else by.schedule
        yield replace(fewer, pp=2 * by.pp, stages=(), schedule=deeper)
        yield replace(fewer, cp=2 * by.cp)
    if by.offload == "none" and setting.cluster.host is not None:
        yield replace(by, offload="optimizer")
        yield replace(by, offload="parameters")
