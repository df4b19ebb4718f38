"""The seconds of a measured step, from a text or from the log of a framework."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.foreign.job import Job

_TEXT = re.compile(r"\s*([\d.]+(?:e-?\d+)?)\s*(s|ms|tokens/s/gpu|tokens/s|)\s*", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = r"[ \t]*([^\s|]+)"
_VALUE = re.compile(r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d*)?(?:e[+-]?\d+)?)([KM]?)", re.IGNORECASE)
"""A number and its factor. Commas part thousands: in 936,1 the comma is a decimal point, and that is
no number here.
"""
_LOGS = (
    ("Megatron-LM", re.compile(rf"elapsed time per iteration \(ms\):{_NUMBER}"), "ms"),
    # a line of validation has a rate too
    (
        "torchtitan",
        re.compile(rf"^(?!.*validate step).*?\btps:{_NUMBER}", re.MULTILINE),
        "tokens/s/gpu",
    ),
    ("nanotron", re.compile(rf"time_per_iteration_ms:{_NUMBER}"), "ms"),
)
"""Frameworks, what a line of their logs says of a step, and its unit."""
FORMS = (
    "Megatron-LM ('elapsed time per iteration (ms): 8100'), torchtitan ('tps: 2,400') or "
    "nanotron ('time_per_iteration_ms: 8.1K')"
)
"""What these lines look like, for messages."""
_MOST = 1e15
"""What a step takes less than, in each unit."""
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}


@dataclass(frozen=True, slots=True)
class LogSteps:
    """The steps of a log: the framework that wrote it, and what it says of each, in `unit` ('ms' or
    'tokens/s/gpu').
    """

    framework: str
    unit: str
    values: tuple[float, ...]

    @property
    def steady(self) -> float:
        """The median of the second half, since the first steps are slower."""
        return median(self.values[len(self.values) // 2 :])


def measured_step_s(text: str, job: Job, seq: int | None, gpus: int) -> float:
    """The seconds of a step of a job on `gpus` devices.

    Args:
        text: `8.1s`, `8100ms`, `2400 tokens/s/gpu`, `9600 tokens/s`, or the path of a log.  Of a log the median of its second half
            counts, since the first steps are slower.
        job: the job that was measured.
        seq: tokens of a sequence; None for those of the job.
        gpus: the number of devices.

    Raises:
        AutoparError: the text is none of these, the log has no steps, or a rate lacks the tokens of a sequence.
    """
    found = _TEXT.fullmatch(text)
    if found is None and Path(text).is_file():
        steps = steps_of(read_text(text, "log"), text)
        value, unit = steps.steady, steps.unit
    else:
        try:
            value, unit = (float(found[1]), found[2].lower()) if found else (0.0, "")
        except ValueError:
            value, unit = 0.0, ""
    if not 0 < value < _MOST:
        raise AutoparError(
            f"--measured {shown(text)} is not a time or rate, nor a log; write 8.1s, 8100ms, '2400 tokens/s/gpu' or '9600 tokens/s'"
        )
    if not unit.startswith("tokens"):
        return value / 1e3 if unit == "ms" else value
    length = seq or job.seq
    if not length:
        raise AutoparError("a rate in tokens needs the tokens of a sequence: give --seq")
    rate = value * (gpus if unit.endswith("gpu") else 1)
    return job.layout.batch_on(gpus) * length / rate


def steps_of(text: str, path: str) -> LogSteps:
    """The steps in the text of a log; `path` names it in errors. Raises AutoparError without a step,
    and for one that is not above 0.
    """
    plain = _COLOR.sub("", text)
    for framework, pattern, unit in _LOGS:
        words = [number.rstrip(".,;") for number in pattern.findall(plain)]
        values = tuple(_value(number, path) for number in words if number.strip("-.,"))
        if any(not 0 < value < _MOST for value in values):
            worst = min(values) if min(values) <= 0 else max(values)
            raise AutoparError(
                f"{path} has a step of {worst:g} {unit}, which must be above 0 and below {_MOST:g}: it was damaged; log the run again"
            )
        if values:
            return LogSteps(framework, unit, values)
    raise AutoparError(f"{path} has no step in the form of {FORMS}")


def _value(number: str, path: str) -> float:
    found = _VALUE.fullmatch(number)
    if found is None:
        raise AutoparError(
            f"{path} has the step {shown(number)}, which is no number like 8100.5, 8,100 or 8.1K: log the run again, with decimal points"
        )
    return float(found[1].replace(",", "")) * _FACTORS[found[2].upper()]
