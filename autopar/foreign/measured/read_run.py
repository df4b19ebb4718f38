"""Reads a measured run: the log of a framework, or a trace of torch's profiler with products,
element-wise kernels, collectives, gaps between kernels, steps, and the ranges of `engine.profile`.

Events are those of torch's Kineto exporter. A kernel has the `External id` of the op that launched
it, whose `Input Dims` are there if the profiler ran with `record_shapes=True`. Kernels of NCCL carry
the name and size of their collective themselves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

from autopar.errors import AutoparError
from autopar.files import path_of, read_text
from autopar.foreign.checking.measured import FORMS, steps_of
from autopar.foreign.measured.measured_run import (
    MeasuredProduct,
    MeasuredRun,
    MeasuredStream,
    Transfer,
)
from autopar.ir.mesh import AXES
from autopar.report.trace_diff import read_trace
from autopar.text.units import ms

_Event = Mapping[str, Any]
_DTYPES = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "c10::BFloat16": ("bf16", 2),
    "c10::Half": ("fp16", 2),
    "c10::Float8_e4m3fn": ("fp8", 1),
    "c10::Float8_e5m2": ("fp8", 1),
}
"""Type of an op's input -> (dtype, bytes of an element)."""
_NCCL_BYTES = {
    "Float": 4,
    "BFloat16": 2,
    "Half": 2,
    "Double": 8,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Byte": 1,
    "Int": 4,
    "Long": 8,
}
"""`dtype` of a collective -> bytes of an element."""
_FACTORS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}  # fmt: skip
"""Ops of products -> position of their first factor; the second follows."""
_STREAMS = ("aten::add", "aten::mul", "aten::sub", "aten::div", "aten::silu", "aten::copy_")
_COLLECTIVES = (
    (re.compile(r"all_?reduce"), "all_reduce", "In msg nelems"),
    (re.compile(r"all_?gather"), "all_gather", "Out msg nelems"),
    (re.compile(r"reduce_scatter"), "reduce_scatter", "In msg nelems"),
    (re.compile(r"all_?to_?all"), "all_to_all", "In msg nelems"),
)
"""What names of collectives contain -> the name in `COLLECTIVES`, and which message is the whole."""
_MOST_ELEMENTS = 2**63 - 1
"""Elements that a tensor of torch has at most."""
_MOST_RANKS = 10**9
_STEP = re.compile(r"(ProfilerStep#|step )\d+")
_PASS = re.compile(r"micro-batch \d+ (forward|backward)")
_SEGMENT = re.compile(r"([\w.]+) (forward|backward)")
_EXCHANGE = re.compile(rf"\w+ over ({'|'.join(AXES)})")


def run_of_trace(path: Path) -> MeasuredRun:
    """The run in a trace. Raises AutoparError if the file is cut off, is no trace of torch's profiler,
    or was predicted by autopar.
    """
    try:
        data = read_trace(path)
    except AutoparError as error:
        raise AutoparError(
            f"{error}; give a whole trace, as torch.profiler's export_chrome_trace writes it when the run has ended"
        ) from None
    other = data.get("otherData")
    if isinstance(other, dict) and "folded" in other:
        raise AutoparError(
            f"{path} was predicted by autopar explain --trace, and nothing was measured: give a trace of torch's profiler"
        )
    events = [event for event in data["traceEvents"] if _is_slice(event, path)]
    kernels = _of_one_device([event for event in events if event.get("cat") == "kernel"])
    products, streams = _computed(events, kernels)
    named = "gpu_user_annotation" if kernels else "user_annotation"
    ranges = [event for event in events if event.get("cat") == named]
    if kernels:
        ranges = [e for e in ranges if _device(e) == _device(kernels[0])]
    steps = _of_one_thread(event for event in ranges if _STEP.fullmatch(_name(event)))
    steps = steps or _of_one_thread(
        event
        for event in events
        if event.get("cat") == "user_annotation" and _STEP.fullmatch(_name(event))
    )
    if not kernels and not steps:
        raise AutoparError(
            f"{path} has no kernel of a GPU and no range of a step: profile steps of training with torch.profiler, with a "
            "schedule and its step() after each, or with engine.profile"
        )
    step_s = median(_seconds(event) for event in steps) if steps else None
    words = "no step" if step_s is None else f"{len(steps)} step(s) of {ms(step_s)}"
    return MeasuredRun(
        source=f"a trace of {words} and {len(kernels):,} kernels",
        step_s=step_s,
        products=tuple(products),
        streams=tuple(streams),
        transfers=tuple(_transfers(kernels)),
        gaps_s=tuple(_gaps_s(events, kernels)),
        ranges=_ranges(ranges, steps),
        segments=frozenset(of[1] for e in ranges if (of := _SEGMENT.fullmatch(_name(e)))),
        has_kernels=bool(kernels),
        steps=len(steps),
    )


def _is_slice(event: Any, path: Path) -> bool:
    """Whether an event is a slice of time. Raises AutoparError for one whose times are no numbers
    from 0 on.
    """
    if not isinstance(event, dict) or event.get("ph") != "X":
        return False
    for key in ("ts", "dur"):
        value = event.get(key, 0)
        # inf and nan are no times either
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e18:
            raise AutoparError(
                f"{path}: the event {_name(event)[:60]!r} has {key}={value!r}, which is no time from 0 on: the trace was damaged; "
                "profile again"
            )
    return "ts" in event and "dur" in event


def _name(event: _Event) -> str:
    return str(event.get("name", ""))


def _args(event: _Event) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _seconds(event: _Event) -> float:
    return float(event["dur"]) / 1e6  # a Chrome trace counts microseconds


def _device(event: _Event) -> str:
    return str(_args(event).get("device", event.get("pid")))


def _of_one_device(kernels: Sequence[_Event]) -> list[_Event]:
    """The kernels of the first device, in the order in which they begin."""
    first = min(map(_device, kernels), default="")
    own = [event for event in kernels if _device(event) == first]
    return sorted(own, key=lambda event: event["ts"])


def _of_one_thread(ranges: Iterable[_Event]) -> list[_Event]:
    """The ranges of the thread in which they last longest. Kineto writes a range of the host once for
    each stream in which it launches kernels, and merged traces have threads of several ranks.
    """
    threads: dict[str, list[_Event]] = defaultdict(list)
    for event in ranges:
        threads[f"{event.get('pid')} {event.get('tid')}"].append(event)
    return max(threads.values(), key=lambda own: sum(map(_seconds, own)), default=[])


def _number(event: _Event, key: str) -> int | None:
    """The whole number that an argument of an event is; None if it is none."""
    value = _args(event).get(key)
    return value if isinstance(value, int) else None


# ------------------------------------------------------------------------------------------------------------------ compute


def _computed(
    events: Sequence[_Event], kernels: Sequence[_Event]
) -> tuple[list[MeasuredProduct], list[MeasuredStream]]:
    """(products, element-wise kernels) whose shapes are recorded. The kernels of one op count
    together.
    """
    took: dict[Any, float] = defaultdict(float)
    tf32: set[Any] = set()
    for kernel in kernels:
        number = _number(kernel, "External id")
        if number is not None and "nccl" not in _name(kernel).lower():
            took[number] += _seconds(kernel)
            if "tf32" in _name(kernel):
                tf32.add(number)
    products, streams = [], []
    for event in events:
        number = _number(event, "External id")
        if event.get("cat") != "cpu_op" or number not in took or "Input Dims" not in _args(event):
            continue
        try:
            if product := _product(event, took[number], number in tf32):
                products.append(product)
            if stream := _stream(event, took[number]):
                streams.append(stream)
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):
            continue  # an op with other arguments
    return products, streams


def _product(event: _Event, seconds: float, is_tf32: bool) -> MeasuredProduct | None:
    """The product that an op is; None for another op or dtype."""
    first = _FACTORS.get(_name(event))
    args = _args(event)
    if first is None or args["Input type"][first] not in _DTYPES or seconds <= 0:
        return None
    dtype = _DTYPES[args["Input type"][first]][0]
    *batch, m, k = map(int, args["Input Dims"][first])
    n = int(args["Input Dims"][first + 1][-1])
    count = batch[0] if batch else 1
    if min(m, n, k, *batch) < 1 or count * max(m * k, k * n, m * n) > _MOST_ELEMENTS:
        return None
    name = "tf32" if is_tf32 and dtype == "fp32" else dtype
    return MeasuredProduct(m, n, k, count, name, seconds)


def _stream(event: _Event, seconds: float) -> MeasuredStream | None:
    """The element-wise kernel that an op is; None for another op, and for operands that are read
    more than once or not at all (broadcast).
    """
    if _name(event) not in _STREAMS or seconds <= 0:
        return None
    args = _args(event)
    pairs = zip(args["Input Dims"], args["Input type"], strict=False)
    tensors = [(tuple(map(int, dims)), _DTYPES[kind][1]) for dims, kind in pairs
               if kind in _DTYPES and dims]  # fmt: skip
    if not tensors or any(shape != tensors[0][0] for shape, _ in tensors):
        return None
    strides = args.get("Input Strides", ())
    if any(0 in stride for stride in strides if isinstance(stride, list)):
        return None
    elements = prod(tensors[0][0])
    if not 0 < elements <= _MOST_ELEMENTS:
        return None
    sizes = [elements * itemsize for _, itemsize in tensors]
    written = 0 if _name(event) == "aten::copy_" else sizes[0]  # its first input is what it writes
    return MeasuredStream(sum(sizes) + written, seconds)


def _gaps_s(events: Sequence[_Event], kernels: Sequence[_Event]) -> Iterator[float]:
    """Seconds between two kernels of a stream, if the second was launched before the first ended."""
    launched = {
        _number(event, "correlation"): event["ts"] + event["dur"]
        for event in events
        if str(event.get("cat")) in ("cuda_runtime", "cuda_driver")
    }
    launched.pop(None, None)
    before: dict[int | None, float] = {}
    for kernel in kernels:
        stream, number = _number(kernel, "stream"), _number(kernel, "correlation")
        end = before.get(stream)
        if end is not None and number in launched and launched[number] < end <= kernel["ts"]:
            yield (kernel["ts"] - end) / 1e6
        before[stream] = kernel["ts"] + kernel["dur"]


# ------------------------------------------------------------------------------------------------------------ communication


def _transfers(kernels: Sequence[_Event]) -> Iterator[Transfer]:
    """The collectives whose kernels say their size."""
    for kernel in kernels:
        args, name = _args(kernel), str(_args(kernel).get("Collective name", "")).lower()
        size = _NCCL_BYTES.get(str(args.get("dtype")))
        kind = next(((n, whole) for of, n, whole in _COLLECTIVES if of.search(name)), None)
        if kind is None or size is None or not kernel["dur"]:
            continue
        elements, ranks = _number(kernel, kind[1]) or 0, _number(kernel, "Group size") or 0
        if not 0 < elements <= _MOST_ELEMENTS or not 1 < ranks <= _MOST_RANKS:
            continue
        stride = _stride(str(args.get("Process Group Ranks", "")))
        yield Transfer(kind[0], elements * size, ranks, stride, _seconds(kernel))


def _stride(text: str) -> int:
    """How far the ranks in a text such as `[0, 8, 16]` lie apart; 1 if it does not tell."""
    ranks = list(map(int, re.findall(r"\d{1,18}", text)))
    return max(ranks[1] - ranks[0], 1) if len(ranks) > 1 else 1


def _ranges(events: Sequence[_Event], steps: Sequence[_Event]) -> dict[str, float]:
    """Seconds of a step in the passes of `engine.profile` ('passes'), and in the collectives inside
    them, by axis. {} if there is none. Passes outside `steps` do not count, unless there is no step.
    """
    passes = _of_one_thread(
        event
        for event in events
        if _PASS.fullmatch(_name(event)) and (not steps or any(_is_in(event, of) for of in steps))
    )
    found: dict[str, float] = defaultdict(float)
    for event in passes:
        found["passes"] += _seconds(event) / max(len(steps), 1)
    for event in events:
        match = _EXCHANGE.fullmatch(_name(event))
        if match and any(event.get("pid") == of.get("pid") and _is_in(event, of) for of in passes):
            found[match[1]] += _seconds(event) / max(len(steps), 1)
    return dict(found)


def _is_in(event: _Event, other: _Event) -> bool:
    """Whether the middle of an event is in another one. Its ends may be rounded."""
    middle = event["ts"] + event["dur"] / 2
    return bool(other["ts"] <= middle <= other["ts"] + other["dur"])


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
