"""What a log or a trace shows of a run, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MeasuredProduct:
    """A matrix product on the device: `batch` products (m, k) @ (k, n) in `dtype`, in seconds."""

    m: int
    n: int
    k: int
    batch: int
    dtype: str
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredStream:
    """An element-wise kernel: the bytes that it reads and writes, and its seconds."""

    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """A collective: its name in `COLLECTIVES`, and the bytes of the whole tensor. The `ranks` of its
    group lie `stride` apart. `seconds` are those of its kernel, with the wait for other ranks.
    """

    name: str
    size_bytes: int
    ranks: int
    stride: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A measured run.

    Attributes:
        source: what it was read from, in words.
        step_s: seconds of a step, or None.
        tokens_per_s_per_gpu: the rate, where that is logged and not the seconds, or None.
        global_batch: sequences of a step, or None if that is not logged.
        reserved_bytes: the most that torch's allocator held on a device, or None.
        products, streams, transfers: kernels of a trace, if their shapes were recorded.
        gaps_s: seconds between kernels that the host had issued in time.
        ranges: seconds of a step by range, in a trace of `engine.profile`.
        segments: the segments of the model that such a trace names.
        has_kernels: whether kernels of a GPU are in the trace.
        steps: number of whole steps.
    """

    source: str
    step_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    global_batch: int | None = None
    reserved_bytes: float | None = None
    products: tuple[MeasuredProduct, ...] = ()
    streams: tuple[MeasuredStream, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    gaps_s: tuple[float, ...] = ()
    ranges: Mapping[str, float] = field(default_factory=dict)
    segments: frozenset[str] = frozenset()
    has_kernels: bool = False
    steps: int = 0
