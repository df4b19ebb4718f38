"""Reads a measured run: tells logs from traces, and reads the logs of frameworks."""

from __future__ import annotations

import re
from pathlib import Path

from autopar.errors import AutoparError
from autopar.files import path_of, read_text
from autopar.jobs.measured import FORMS, steps_of
from autopar.refit.measured_run import MeasuredRun
from autopar.refit.read_trace import run_of_trace

_JSON = re.compile(rb"(\xef\xbb\xbf)?\s*\{\s*[\"}]")
"""The start of a JSON object; logs may begin with a Python dict, or with a bracket."""
_BATCH = re.compile(r"global batch size:\s*(\d{1,18})\b")
_MEMORY = (
    # Megatron-LM's report_memory divides by 2**20 (megatron/training/utils.py)
    (re.compile(r"max reserved:\s*([\d.]+)"), 2**20),
    # torchtitan prints max_reserved_gib (torchtitan/components/metrics.py)
    (re.compile(r"memory:\s*([\d.]+)GiB"), 2**30),
)
"""What a line of a log says of the most memory that torch reserved, and the bytes of its unit."""


def read_run(path: str | Path) -> MeasuredRun:
    """The measured run in a file: a trace of torch's profiler (JSON, perhaps compressed by gzip), or
    the log of Megatron-LM, torchtitan or nanotron. Raises AutoparError for another file.
    """
    found = path_of(path, "run")
    try:
        with found.open("rb") as file:
            start = file.read(4096)
    except OSError:
        start = b" "  # `read_text` says why it cannot be read
    if not start.strip():
        read_text(found, "run")
        raise AutoparError(
            f"{found} is empty: give a trace of torch's profiler, or the log of {FORMS}"
        )
    is_trace = start[:2] == b"\x1f\x8b" or _JSON.match(start) is not None
    return run_of_trace(found) if is_trace else _run_of_log(found)


def _run_of_log(path: Path) -> MeasuredRun:
    """The run in a log. The steady step is the median of the second half of its steps; of memory the
    most counts. Raises AutoparError for one line of steps, and if the batch grows in this half.
    """
    text = read_text(path, "run")
    steps = steps_of(text, str(path))
    if len(steps.values) < 2:
        raise AutoparError(
            f"{path} has one line of steps, and the first steps of a run are slower: give a log with at least 2"
        )
    batches = _BATCH.findall(text)
    steady = sorted({int(number) for number in batches[len(batches) // 2 :]})
    if len(steady) > 1:
        raise AutoparError(
            f"the second half of {path} has steps of {steady[0]:,} to {steady[-1]:,} sequences, whose times differ: "
            "give a log in which the batch no longer grows"
        )
    reserved = [
        float(number) * unit
        for pattern, unit in _MEMORY
        for number in pattern.findall(text)
        if number.count(".") <= 1 and number != "."
    ]
    is_rate = steps.unit != "ms"
    return MeasuredRun(
        source=f"the log of {steps.framework}, {len(steps.values)} line(s) of steps",
        step_s=None if is_rate else steps.steady / 1e3,
        tokens_per_s_per_gpu=steps.steady if is_rate else None,
        global_batch=steady[0] if steady else None,
        reserved_bytes=max(reserved, default=None),
        steps=len(steps.values),
    )
