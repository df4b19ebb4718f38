"""Profiles of training steps: a torch profiler's trace with the plan's names on its ranges,
compared with the plan's predictions.

    step 7                                           a step, and in it
      batch                                          checking it with all ranks, and cutting it
      micro-batch 0 forward, micro-batch 0 backward  without a pipeline
      pipeline                                       with one, and in it
        stage 1 forward of micro-batch 0, ...
      layers.3 forward, layers.3 backward            in these: a segment of the plan; its recomputation is in its backward
      all_gather over tp                             wherever it runs: a collective
      update                                         reducing and clipping gradients, the optimizer, gathering updated parameters

The range of a segment's backward begins when the gradient of its result is ready, and ends when the
next segment's begins.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError
from autopar.ir.mesh import AXES
from autopar.ir.plan import Plan
from autopar.rewrite.program import Program
from autopar.rewrite.root import module_name

Interval = tuple[float, float]
_COLLECTIVE = re.compile(rf"\w+ over ({'|'.join(AXES)})")
_PASS = re.compile(r"(micro-batch \d+ (forward|backward)|stage \d+ .* micro-batch \d+)")


@contextlib.contextmanager
def traced_run(path: Path, device: torch.device) -> Iterator[None]:
    """A context whose ops are written to `path` as a Chrome trace when it ends without an error.
    Raises AutoparError if the file cannot be written or a profiler is already running.
    """
    if torch.autograd._profiler_enabled():
        raise AutoparError(
            "a torch profiler is running already, and there can be one: end it before engine.profile"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    except OSError as error:
        raise AutoparError(f"cannot write the trace {path}: {error}") from None
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        yield
    profiler.export_chrome_trace(str(path))


@contextlib.contextmanager
def named_segments(program: Program, names: Iterable[str]) -> Iterator[None]:
    """A context in which forward and backward of the segments with these names have profiler
    ranges. Names that the program lacks are ignored.
    """
    backward, hooks = _Backward(), []
    for name in names:
        module = getattr(program.module, module_name(name), None)
        if module is not None:
            forward = _Forward(name, backward)
            hooks.append(module.register_forward_pre_hook(forward.begin, prepend=True))
            hooks.append(module.register_forward_hook(forward.end, always_call=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Forward:
    """Opens and closes the profiler range of one segment's forward, as forward hooks. It also
    registers hooks on the results, which open the range of the backward.
    """

    def __init__(self, name: str, backward: _Backward) -> None:
        self.name, self.backward = name, backward
        self.open: list[record_function] = []

    def begin(self, module: nn.Module, inputs: Any) -> None:
        self.open.append(record_function(f"{self.name} forward"))
        self.open[-1].__enter__()

    def end(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        self.open.pop().__exit__(None, None, None)
        given = {id(x) for x in tree_leaves(inputs)}
        for x in tree_leaves(outputs):
            if (
                isinstance(x, Tensor)
                and x.requires_grad
                and x.grad_fn is not None
                and id(x) not in given
            ):
                x.register_hook(partial(self.backward.begin, self.name))


class _Backward:
    """Opens the profiler range of one segment's backward at a time: `begin` closes the range
    before, and the end of autograd's backward closes the last one.
    """

    def __init__(self) -> None:
        self.name = ""
        self.open: record_function | None = None

    def begin(self, name: str, grad: Tensor) -> None:
        if name == self.name:
            return
        if self.open is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        else:
            self.open.__exit__(None, None, None)
        self.name, self.open = name, record_function(f"{name} backward")
        self.open.__enter__()

    def end(self) -> None:
        if self.open is not None:
            self.open.__exit__(None, None, None)
        self.name, self.open = "", None


# ------------------------------------------------------------------------------------------------------------------ what it says


class Profile:
    """The profile of this rank from `engine.profile`, to be read after its block. `str` gives a
    table with the plan's predictions.
    """

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path, self.plan = path, plan

    @cached_property
    def _events(self) -> list[dict[str, Any]]:
        try:
            return [
                event
                for event in json.loads(self.path.read_text())["traceEvents"]
                if event.get("ph") == "X"
            ]
        except ValueError:
            raise AutoparError(
                f"{self.path} is no whole trace: read a profile after the block of engine.profile has ended"
            ) from None

    @cached_property
    def _ranges(self) -> list[tuple[str, Interval]]:
        """(name, (start, end) in seconds) of every named range. On a GPU these are the times of the
        kernels launched within the range.
        """
        kind = (
            "gpu_user_annotation"
            if any(event.get("cat") == "kernel" for event in self._events)
            else "user_annotation"
        )
        return [
            (event["name"], _interval(event)) for event in self._events if event.get("cat") == kind
        ]

    @property
    def steps(self) -> int:
        """Number of whole steps in the trace."""
        return sum(re.fullmatch(r"step \d+", name) is not None for name, _ in self._ranges)

    @cached_property
    def seconds(self) -> Mapping[str, float]:
        """Seconds per step of each range, by name. Ranges with one name in several steps or
        micro-batches are summed.
        """
        found: dict[str, float] = {}
        for name, (start, end) in self._ranges:
            name = re.sub(r"^step \d+$", "step", name)
            found[name] = found.get(name, 0.0) + (end - start) / max(self.steps, 1)
        return found

    @cached_property
    def exposed_communication_s(self) -> Mapping[str, float]:
        """Seconds per step in which the rank only communicates or waits for others. On CPU they are
        given by axis, since every collective is waited for at once. On a GPU there is one number
        ('all'): NCCL kernels while no other kernel runs.
        """
        steps = max(self.steps, 1)
        kernels = [
            (event["name"], _interval(event))
            for event in self._events
            if event.get("cat") == "kernel"
        ]
        if kernels:
            sending = [interval for name, interval in kernels if "nccl" in name.lower()]
            return {
                "all": exposed(
                    sending, [interval for name, interval in kernels if "nccl" not in name.lower()]
                )
                / steps
            }
        by_axis: dict[str, list[Interval]] = {}
        for name, interval in self._ranges:
            if match := _COLLECTIVE.fullmatch(name):
                by_axis.setdefault(match[1], []).append(interval)
        return {axis: exposed(by_axis[axis], []) / steps for axis in AXES if axis in by_axis}

    def rows(self) -> list[tuple[str, float, float | None]]:
        """The rows of the table: (part of a step, measured seconds per step, predicted seconds or
        None if the plan predicts none).
        """
        took, plan = self.seconds, self.plan
        predicted = plan.predicted.breakdown
        passes = sum(seconds for name, seconds in took.items() if _PASS.fullmatch(name))
        parts = ("forward", "backward", "recompute", "conversion", "edge", "stages")
        rows: list[tuple[str, float, float | None]] = [
            ("forward and backward", passes, sum(predicted.get(part, 0.0) for part in parts))
        ]
        if plan.mesh.pp > 1:
            rows.append(
                (
                    "pipeline bubble and messages",
                    took.get("pipeline", 0.0) - passes,
                    predicted.get("bubble"),
                )
            )
        rows.append(
            ("gradient reduction and optimizer", took.get("update", 0.0), predicted.get("step"))
        )
        rows.append(("the batch", took.get("batch", 0.0), None))
        rows.append(("step", took.get("step", 0.0), plan.predicted.step_time_s))
        within = (
            predicted.get("conversion", 0.0) + predicted.get("edge", 0.0)
            if plan.mesh.pp == 1
            else None
        )
        return rows + [
            (
                f"exposed communication over {axis}" if axis != "all" else "exposed communication",
                seconds,
                within if axis == "tp" else None,
            )
            for axis, seconds in self.exposed_communication_s.items()
        ]

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.steps} step(s); milliseconds of each",
            f"{'':34}{'measured':>12}{'predicted':>12}",
        ]
        for name, measured, predicted in self.rows():
            lines.append(
                f"{name:34}{measured * 1e3:12,.2f}{'' if predicted is None else f'{predicted * 1e3:12,.2f}'}"
            )
        return "\n".join(lines)


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"] / 1e6, (
        event["ts"] + event["dur"]
    ) / 1e6  # a Chrome trace counts microseconds


def exposed(wanted: Iterable[Interval], beside: Iterable[Interval]) -> float:
    """Seconds in which at least one interval of `wanted` and none of `beside` is active."""
    marks = sorted(
        [
            (time, kind, step)
            for kind, group in enumerate((wanted, beside))
            for start, end in group
            for time, step in ((start, 1), (end, -1))
        ]
    )
    open_now, total, before = [0, 0], 0.0, 0.0
    for time, kind, step in marks:
        if open_now[0] and not open_now[1]:
            total += time - before
        open_now[kind] += step
        before = time
    return total
