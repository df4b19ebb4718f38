"""Better layouts for a job: the best within its framework, and the cheapest change that makes it
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from autopar.errors import AutoparError
from autopar.ir.deadline import Deadline
from autopar.jobs.pricing import Setting
from autopar.targets.job import Job, Layout
from autopar.targets.target import NotExpressible, Target

MOST_CHANGES = 12
"""The most single changes that are priced."""


@dataclass(frozen=True, slots=True)
class Difference:
    """An option of the framework that another layout sets otherwise; '' where it is left out, and
    'on' for a switch.
    """

    option: str
    now: str
    then: str

    def __str__(self) -> str:
        if not self.now:
            return f"add {self.option}{'' if self.then == 'on' else ' ' + self.then}"
        return (
            f"drop {self.option}" if not self.then else f"{self.option} {self.now} -> {self.then}"
        )


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


def differences(target: Target, now: Job, then: Job) -> tuple[Difference, ...]:
    """The options in which two jobs differ, in the framework's form, and in the names of the options
    that `now` was read from. () if it cannot say one of them.
    """
    try:
        before, after = target.flags(now), target.flags(replace(then, flags=now.flags))
    except NotExpressible:
        return ()

    def shown(flags: dict[str, str], name: str) -> str:
        return (flags[name] or "on") if name in flags else ""

    names = [name for name in (*before, *after) if before.get(name) != after.get(name)]
    return tuple(
        Difference(f"{target.dashes}{n}", shown(before, n), shown(after, n))
        for n in dict.fromkeys(names)
    )


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


def _legal_changes(setting: Setting) -> Iterator[tuple[Layout, tuple[Difference, ...]]]:
    """Each single change that the framework can run, with the options that it sets otherwise."""
    job, target = setting.job, setting.target
    for layout in _single_changes(job.layout, setting):
        changed = replace(job, layout=layout, flags={})
        told = differences(target, job, changed)
        if told and not target.refusals(changed, setting.gpus):
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
