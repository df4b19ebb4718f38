"""Better layouts for a job: the best within its framework, and the cheapest change that makes it
fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from autopar.errors import AutoparError
from autopar.foreign.checking.pricing import JobSetting
from autopar.foreign.checking.written import Written, written
from autopar.foreign.writers.wording import OptionDifference
from autopar.ir.deadline import Deadline
from autopar.ir.layout import Layout

MOST_CHANGES = 16
"""The most single changes that are priced."""


@dataclass(frozen=True, slots=True)
class OptionChange:
    """A single change of a layout: in the framework's options, with its step and memory.

    Attributes:
        differences: the options.
        layout: the layout after the change.
        step_time_s: the predicted seconds of a step.
        peak_bytes: the predicted bytes of the fullest device.
    """

    differences: tuple[OptionDifference, ...]
    layout: Layout
    step_time_s: float
    peak_bytes: int


def fitting_changes(
    setting: JobSetting, room_bytes: int, deadline: Deadline
) -> tuple[OptionChange, ...]:
    """The single changes with which the job takes at most `room_bytes` of a device, the fastest first.
    Of smaller micro-batches they are the largest half that fits, and 1. Changes that the framework
    refuses or cannot say are left out, and those for which half of the time until the deadline does
    not suffice.
    """
    found = list[OptionChange]()
    end_s = deadline.clock() + deadline.left_s / 2
    own = setting.job.layout
    smaller = False  # whether a smaller micro-batch is known to fit
    for layout, told in islice(_legal_changes(setting), MOST_CHANGES):
        if deadline.clock() >= end_s:
            break
        if smaller and 1 < layout.micro_batch < own.micro_batch:
            continue
        try:
            plan = told.plan
        except AutoparError:
            continue
        peak = max(plan.predicted.peak_memory_bytes)
        if peak <= room_bytes:
            found.append(OptionChange(told.differences, layout, plan.predicted.step_time_s, peak))
            smaller = smaller or layout.micro_batch < own.micro_batch
    return tuple(sorted(found, key=lambda change: change.step_time_s))


def _legal_changes(setting: JobSetting) -> Iterator[tuple[Layout, Written]]:
    """Each single change that the framework can run, in the file of the job."""
    for layout in _single_changes(setting.job.layout, setting):
        if told := written(setting, layout):
            yield layout, told


def _single_changes(by: Layout, setting: JobSetting) -> Iterator[Layout]:
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
    size = by.micro_batch
    while size > 1:
        size //= 2
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
