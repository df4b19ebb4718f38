"""The seconds of a measured step, from a text or from the log of a framework."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.targets.job import Job

_TEXT = re.compile(r"\s*([\d.]+(?:e-?\d+)?)\s*(s|ms|tokens/s/gpu|tokens/s|)\s*", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = r"\s*(-?[\d.,]+)([KM]?)"
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
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}


@dataclass(frozen=True, slots=True)
class Steps:
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
    if not 0 < value < 1e15:
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


def steps_of(text: str, path: str) -> Steps:
    """The steps in the text of a log; `path` names it in errors. Raises AutoparError without a step,
    and for one that is not above 0.
    """
    plain = _COLOR.sub("", text)
    for framework, pattern, unit in _LOGS:
        found = [(number, factor) for number, factor in pattern.findall(plain)
                 if number.strip("-.,")]  # fmt: skip
        values = tuple(_value(number, path) * _FACTORS[factor] for number, factor in found)
        if any(value <= 0 for value in values):
            raise AutoparError(
                f"{path} has a step of {min(values):g} {unit}, which must be above 0: it was damaged; log the run again"
            )
        if values:
            return Steps(framework, unit, values)
    raise AutoparError(f"{path} has no step in the form of {FORMS}")


def _value(number: str, path: str) -> float:
    try:
        return float(number.replace(",", ""))
    except ValueError:
        raise AutoparError(
            f"{path} has the step {shown(number)}, which is no number: it was damaged; log the run again"
        ) from None
