"""Metrics of a step: loss, time, tokens and memory, with the plan's predictions."""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.ir.plan import Plan
from autopar.runtime.batches.micro_batches import BatchSize

_Mark = float | torch.cuda.Event
"""A point in time: seconds of this machine's clock, or an event on the device's stream."""


@dataclass(frozen=True, slots=True)
class Metrics:
    """The last step.  Loss, tokens and targets are those of the global batch; time and memory are those of this rank.

    Attributes:
        step: the number of the step, from 1.
        loss: the loss of the global batch.
        step_time_s: seconds of the step.
        tokens: positions of the batch as it was given.
        targets: labels that count, or the sum of a mask.  None if the loss is not a mean over tokens.
        mfu: model FLOPs per second divided by the peak rate of all devices, counted as in the plan.
        peak_memory_bytes: on a GPU, the most that torch's allocator has taken so far; on a CPU, the most resident bytes of the process.
        gradient_norm: the norm before clipping.  None if gradients are not clipped or the step was skipped.
        predicted_step_time_s: the plan's seconds of a step.
        predicted_peak_memory_bytes: the plan's bytes on this rank.
    """

    step: int
    loss: float
    step_time_s: float
    tokens: int
    targets: float | None
    mfu: float
    peak_memory_bytes: int
    gradient_norm: float | None
    predicted_step_time_s: float
    predicted_peak_memory_bytes: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens / self.step_time_s

    def __str__(self) -> str:
        taken, predicted = self.peak_memory_bytes / 2**30, self.predicted_peak_memory_bytes / 2**30
        words = [
            f"step {self.step:3d}",
            f"loss {self.loss:.4f}",
            f"{self.step_time_s * 1e3:,.1f} ms (predicted {self.predicted_step_time_s * 1e3:,.1f})",
            f"{self.tokens_per_s:,.0f} tokens/s",
            f"MFU {self.mfu:.1%}",
            f"{taken:.2f} GiB (predicted {predicted:.2f})",
        ]
        return "   ".join(
            words
            if self.gradient_norm is None
            else [*words, f"gradient norm {self.gradient_norm:.3g}"]
        )


class Meter:
    """Records the data of each step without waiting for the device; `metrics` waits. `place` is
    this rank's coordinate along pp.
    """

    def __init__(self, plan: Plan, device: torch.device, place: int) -> None:
        predicted, peaks = plan.predicted, plan.predicted.peak_memory_bytes
        # of the planned batch, at the peak rate of all devices
        self._ideal_s = predicted.mfu * predicted.step_time_s
        self._predicted_s = predicted.step_time_s
        self._predicted_bytes = peaks[place] if place < len(peaks) else max(peaks, default=0)
        self.device = device
        self._begun: _Mark | None = None
        self._last: tuple[Any, ...] | None = None
        self.norm: torch.Tensor | None = None

    def begin(self) -> None:
        """Record that a step begins."""
        self.norm, self._begun = None, self._now()

    def end(self, step: int, loss: torch.Tensor, size: BatchSize) -> None:
        """Record that a step has ended, with its loss and the size of its batch."""
        self._last = step, loss, size, self.norm, self._begun, self._now()

    def _now(self) -> _Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def metrics(self) -> Metrics:
        """The metrics of the last step. Raises AutoparError before the first step."""
        if self._last is None:
            raise AutoparError(
                "engine.metrics are those of the last step, and none has run: call engine.step first"
            )
        step, loss, size, norm, begun, ended = self._last
        if self.device.type == "cuda":
            ended.synchronize()
            seconds = begun.elapsed_time(ended) / 1e3
        else:
            seconds = ended - begun
        return Metrics(
            step=step,
            loss=float(loss),
            step_time_s=seconds,
            tokens=size.tokens,
            targets=size.targets,
            mfu=self._ideal_s * size.share / seconds,
            peak_memory_bytes=_peak_memory_bytes(self.device),
            gradient_norm=None if norm is None else float(norm),
            predicted_step_time_s=self._predicted_s,
            predicted_peak_memory_bytes=self._predicted_bytes,
        )


def _peak_memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB
