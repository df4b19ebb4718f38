"""The seconds of a measured step, from a text or from the log of a framework."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median

from autopar.errors import AutoparError, shown
from autopar.files import read_text
from autopar.targets.job import Job

_TEXT = re.compile(r"\s*([\d.]+(?:e-?\d+)?)\s*(s|ms|tokens/s/gpu|tokens/s|)\s*", re.IGNORECASE)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_LOGS = (
    (re.compile(r"elapsed time per iteration \(ms\):\s*([\d.,]+)([KM]?)"), "ms"),  # Megatron-LM
    (re.compile(r"\btps:\s*([\d.,]+)([KM]?)"), "tokens/s/gpu"),  # torchtitan
    (re.compile(r"time_per_iteration_ms:\s*([\d.,]+)([KM]?)"), "ms"),  # nanotron
)
"""What a line of a framework's log says of a step, and its unit."""
_FACTORS = {"": 1.0, "K": 1e3, "M": 1e6}


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
        value, unit = _of_log(read_text(text, "log"), text)
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


def _of_log(text: str, path: str) -> tuple[float, str]:
    """(median of the second half of a log's steps, its unit). Raises AutoparError without a step."""
    plain = _COLOR.sub("", text)
    for pattern, unit in _LOGS:
        steps = [float(number.replace(",", "")) * _FACTORS[factor]
                 for number, factor in pattern.findall(plain) if number.strip(".,")]  # fmt: skip
        if steps:
            return median(steps[len(steps) // 2 :]), unit
    raise AutoparError(
        f"{path} has no step in the form of Megatron-LM ('elapsed time per iteration (ms): 8100'), torchtitan ('tps: 2,400') or "
        "nanotron ('time_per_iteration_ms: 8.1K')"
    )
